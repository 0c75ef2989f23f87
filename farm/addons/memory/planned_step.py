"""Run a training step under a plan with tensors in slow memory, and compare it with the step in
fast memory.

This module replays the calls of the step from its tuples (`farm.benchmark.call_context`). It copies
slow tensors that exist before the step (parameters, states, inputs) to slow memory. Calls write
their slow outputs directly to slow memory (`farm.addons.memory.offload`). If a call cannot do this,
the tensor stays fast, and the result names it.

A GPU replays the step from CUDA graphs, because it would wait for Python if Python launched the
calls. A graph uses one memory pool, so a call with a pool of its own needs a graph of its own. The
step is a sequence of graphs: one for each such call, and graphs with a common pool for the calls
between them. The fast step is one graph.

A plan may also move a tensor to slow memory between two uses. The copies run between graphs, so a
new graph begins at each call before which a copy begins or must be complete. Graphs contain
addresses, so the tensor's fast memory stays
allocated: a run measures the time of moves, not the memory that they free.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from farm.addons.memory.memory_tier import Mover, SlowMemory, slow_memory_of, wire_beside
from farm.addons.memory.offload import Outputs, slow_outputs
from farm.addons.memory.transfers import AsRun, Move, Run, Wire
from farm.benchmark.call_context import Player
from farm.benchmark.passes import applied, as_launched, numeric_flags
from farm.benchmark.torch_device import capturing, one_stream, run_all, synchronize
from farm.benchmark.workload import out_of_memory
from farm.errors import Unmeasurable
from farm.operators.captured import CapturedCall, CapturedPass
from farm.operators.rebuild import Rebuilt
from farm.types import intervals
from farm.types.figure import Figure
from farm.types.protocol import Protocol
from farm.types.subject import Subject

WARM_UP_S = 0.3  # duration of the warm-up replays
WINDOW_S = 1.0  # duration of all timed replays
RUNS = (10, 100)  # least and most number of timed replays


def extract_step(subject: Subject, protocol: Protocol, device: torch.device) -> CapturedPass:
    """Capture a training step on this card; on a GPU, during graph capture.

    Raises `Unmeasurable`: not_available (the card has no slow memory), rejected (no tuple describes
    a call) or out_of_memory; and as `farm.training.extract.build_step`."""
    from farm.training.capture import capture_step
    from farm.training.extract import build_step

    slow_memory_of(device)
    one_stream(device)
    with numeric_flags(protocol), _translated_out_of_memory():
        step = build_step(subject.variant, device, launch=protocol.launch)
        step.run()
        observe = functools.partial(capture_step, step, device_type=device.type, warmed_up=True)
        capture = as_launched(observe, protocol, device)
    if capture.gaps:
        raise Unmeasurable(
            "rejected", f"The step cannot be run again call by call: {capture.gaps[0]}."
        )
    return capture


def measure_wire(capture: CapturedPass, protocol: Protocol, device: torch.device) -> Wire:
    """Measure the bandwidth of copies alone and during an extracted step, and its time. Raises as
    `extract_step`.
    """
    with applied(protocol), _translated_out_of_memory():
        one_stream(device)
        _release_memory(device)
        memory = slow_memory_of(device)
        step = PlannedStep(Player(capture, device), frozenset(), lambda: memory)
        again = step.replayed()

        def step_us(meanwhile: Callable[[], None] | None) -> float:
            return intervals.midmean(_timed(again, device, WINDOW_S, meanwhile))

        try:
            return wire_beside(step_us, memory, device)
        finally:
            step.forget()


def compare(
    capture: CapturedPass,
    protocol: Protocol,
    device: torch.device,
    calls: Sequence[str],
    plans: Sequence[Collection[int]],
    moves: Sequence[Sequence[Move]] = (),
) -> AsRun:
    """Run an extracted step with all tensors in fast memory and under each plan, see
    `run_planned`. ``calls``: the tuple ids of the calls in the planned step, in order. Raises
    `Unmeasurable` (rejected) if the extracted step has other calls, and as `extract_step` and
    `run_planned`."""
    here = [call.tuple_id for call in capture.calls]
    if here != list(calls):
        first = next(
            (
                position
                for position, (own_id, other) in enumerate(zip(here, calls, strict=False))
                if own_id != other
            ),
            None,
        )
        where = (
            f"they differ from call {first} on"
            if first is not None
            else "the other calls are equal"
        )
        what = f"the plan has {len(calls)} calls, this card runs {len(here)}; {where}"
        text = f"The plan does not fit the step of this card: {what}."
        raise Unmeasurable("rejected", text, "Make a new plan on this card.")
    with applied(protocol), _translated_out_of_memory():
        memory = functools.partial(slow_memory_of, device)
        return run_planned(capture, plans, memory, device, moves=moves, window_s=WINDOW_S)


@contextlib.contextmanager
def _translated_out_of_memory() -> Iterator[None]:
    """Convert errors about missing memory to `Unmeasurable`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(error) from error


def run_planned(
    capture: CapturedPass,
    plans: Sequence[Collection[int]],
    memory: Callable[[], SlowMemory],
    device: torch.device,
    *,
    moves: Sequence[Sequence[Move]] = (),
    window_s: float,
) -> AsRun:
    """Time a step with all tensors in fast memory, and under each plan.

    Args:
        plans: for each plan, the numbers of its slow tensors.
        memory: creates slow memory.
        moves: for each plan, the moves of its fast tensors. Default: no moves.
        window_s: duration of each timing, for at least ten runs.

    Raises:
        torch.OutOfMemoryError: the step with all tensors fast does not fit in fast memory.
    """
    began_s = time.perf_counter()
    one_stream(device)
    _release_memory(device)
    player = Player(capture, device)
    fast = PlannedStep(player, frozenset(), memory).time(window_s)
    runs: list[Run | str] = []
    for slow, moved in itertools.zip_longest(plans, moves, fillvalue=()):
        _release_memory(device)
        try:
            with _translated_out_of_memory():
                runs.append(PlannedStep(player, frozenset(slow), memory, moved).time(window_s))
        except Unmeasurable as error:
            runs.append(f"{error.message} {error.next_step}".strip())
    return AsRun(memory().name, fast, tuple(runs), time.perf_counter() - began_s)


def _release_memory(device: torch.device) -> None:
    """Return the memory of earlier runs to the driver."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_accelerator_emptyHostCache"):  # also pinned memory
            torch._C._accelerator_emptyHostCache()
        elif hasattr(torch._C, "_host_emptyCache"):  # older torch
            torch._C._host_emptyCache()


class PlannedStep:
    """A step under one plan."""

    def __init__(
        self,
        player: Player,
        slow: frozenset[int],
        memory: Callable[[], SlowMemory],
        moves: Sequence[Move] = (),
    ) -> None:
        """Raises `Unmeasurable` (out_of_memory) if there is not enough slow memory."""
        self.graphs: list[
            torch.cuda.CUDAGraph
        ] = []  # on a GPU; created first, so that graphs are freed before pools
        self._sequence: list[Callable[[], None]] = []  # replays of graphs, with copies between them
        self._capture, self._slow, self._make_memory, self._device = (
            player.capture,
            slow,
            memory,
            player.device,
        )
        first = memory()
        self.memories = [first]  # own the slow tensors
        tensors = {*slow, *(move.tensor for move in moves)}
        sizes = {number: self._capture.tensors[number].size_bytes for number in tensors}
        first.check_room(*sizes.values())
        hosts = {number: first.host_bytes(sizes[number]) for number in sizes.keys() - slow}
        self.movers = [Mover(move, hosts[move.tensor], self._device) for move in moves]
        # by index of the call
        self._actions: dict[int, list[Callable[[], None]]] = defaultdict(list)
        for actions in zip(*(mover.actions() for mover in self.movers), strict=True):
            for index, action in actions:
                self._actions[index].append(action)
        self.player = player.with_copies(slow, first.copied) if slow else player
        self._outputs: dict[int, Outputs] = {}  # by index of the call
        # planned slow tensors that had to stay in fast memory; after `replayed`
        self.stayed_fast: set[int] = set()
        self._kept: list[Rebuilt] = []

    def time(self, window_s: float) -> Run:
        again = self.replayed()
        values_us = _timed(again, self._device, window_s)
        time_us = intervals.midmean(values_us)
        half_width_us = intervals.finite(
            intervals.batch_half_width(values_us, intervals.midmean), time_us
        )
        moved = [mover.room.nbytes for mover in self.movers if mover.room is not None]
        graphs, stayed_fast = len(self.graphs), tuple(sorted(self.stayed_fast))
        launch_us = 0.0
        if self._device.type == "cuda":
            began_s = time.perf_counter()
            again()
            launch_us = (time.perf_counter() - began_s) * 1e6
            synchronize(self._device)
        self.forget()
        return Run(
            Figure(time_us, half_width_us), graphs, stayed_fast, len(moved), sum(moved), launch_us
        )

    def forget(self) -> None:
        """Delete the graphs."""
        self._sequence.clear()
        self.graphs.clear()

    def prepare(self, call: CapturedCall, operator: Rebuilt) -> object:
        """Run a call for the first time, and find out how it can write its slow outputs to slow
        memory.
        """
        made = [number for number in call.writes if number not in call.reads]
        sized = [number for number in made if self._capture.tensors[number].size_bytes]
        number_of_position = {
            position: number for position, number in enumerate(sized) if number in self._slow
        }
        # Try all outputs at once. If that fails, add single outputs as long as they work, the
        # largest first.
        slow = tuple(
            sorted(
                number_of_position,
                key=lambda position: (
                    -self._capture.tensors[number_of_position[position]].size_bytes
                ),
            )
        )
        outputs = self._attempt(operator, slow) if slow else None
        if outputs is None:
            positions, slow = slow, ()
            for position in positions if len(positions) > 1 else ():
                if (more := self._attempt(operator, (*slow, position))) is not None:
                    slow, outputs = (*slow, position), more
        self.stayed_fast.update(
            number for position, number in number_of_position.items() if position not in slow
        )
        if outputs is None:
            return operator.run()
        self._outputs[call.index], memory = outputs
        self.memories.append(memory)
        return self._run(call, operator)

    def _attempt(
        self, operator: Rebuilt, wanted: tuple[int, ...]
    ) -> tuple[Outputs, SlowMemory] | None:
        memory = self._make_memory()  # of this attempt: it is freed if the attempt fails
        try:
            outputs = slow_outputs(operator, wanted, memory)
            outputs.run(operator)()  # checks that the outputs are in slow memory
        except Unmeasurable as error:
            if error.reason != "not_available":
                raise
            return None
        except torch.OutOfMemoryError:  # not enough memory for the pool
            return None
        return outputs, memory

    def replayed(self) -> Callable[[], None]:
        """Prepare the step; return a function that runs it once."""
        self.player.play(self.prepare, once=True)
        if self._device.type != "cuda":
            return lambda: self.player.play(
                self._run,
                once=True,
                before=lambda index, memory: run_all(self._copies(index, memory)),
            )
        _release_memory(self._device)
        while not self._captured():
            _release_memory(self._device)
        return functools.partial(run_all, self._sequence)

    def _copies(
        self, index: int, memory: Mapping[int, torch.UntypedStorage]
    ) -> Sequence[Callable[[], None]]:
        """Return the actions before call `index`; the number of calls means the end of the step."""
        for mover in self.movers:
            if mover.move.out == index:
                mover.found(memory.get(mover.move.tensor))
        return self._actions.get(index, ())

    def _run(self, call: CapturedCall, operator: Rebuilt) -> object:
        outputs = self._outputs.get(call.index)
        return operator.run() if outputs is None else outputs.run(operator)()

    def _captured(self) -> bool:
        """Capture the step as graphs. Return False if one call failed; its outputs then stay in
        fast memory.
        """
        self.forget()
        self._kept.clear()
        pools = {
            index: outputs.pool
            for index, outputs in self._outputs.items()
            if outputs.pool is not None
        }
        calls = len(self._capture.calls)
        shared = torch.cuda.graph_pool_handle()
        with contextlib.ExitStack() as others:

            def add(graph: torch.cuda.CUDAGraph) -> None:
                self.graphs.append(graph)
                self._sequence.append(graph.replay)

            def before(index: int, memory: Mapping[int, torch.UntypedStorage]) -> None:
                actions = self._copies(index, memory)
                if actions or index == 0 or index in pools or index - 1 in pools:
                    others.close()
                    self._sequence.extend(actions)
                    if index < calls and index not in pools:
                        add(others.enter_context(capturing(self._device, shared)))

            def step(call: CapturedCall, operator: Rebuilt) -> object:
                if call.index not in pools:
                    return self._run(call, operator)
                self._kept.append(operator)
                try:
                    with capturing(self._device, pools[call.index].id) as graph:
                        out = self._run(call, operator)
                except (Unmeasurable, torch.OutOfMemoryError) as error:
                    raise _CallNotCaptured(call) from error
                add(graph)
                return out

            try:
                self.player.play(step, once=True, before=before)
            except _CallNotCaptured as error:
                self.forget()
                (call,) = error.args
                del self._outputs[call.index]
                self.stayed_fast |= (set(call.writes) - set(call.reads)) & self._slow
                return False
        return True


class _CallNotCaptured(Exception):
    """A call could not be captured in its own memory pool. The argument is the call."""


def _timed(
    run: Callable[[], None],
    device: torch.device,
    window_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> list[float]:
    """Return the time of each of many consecutive runs in us. On a GPU, call ``meanwhile`` during
    the runs.
    """
    began_s, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - began_s < min(WARM_UP_S, window_s):
        run()
        _wait(device, meanwhile)
        runs += 1
    pass_s = (time.perf_counter() - began_s) / runs
    count = max(RUNS[0], min(RUNS[1], math.ceil(window_s / pass_s)))
    if device.type != "cuda":
        moments_s = [time.perf_counter()]
        for _ in range(count):
            run()
            moments_s.append(time.perf_counter())
        return [(after - before) * 1e6 for before, after in itertools.pairwise(moments_s)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    run()  # keeps the card busy while Python launches the next run
    events[0].record()
    for before, after in itertools.pairwise(events):
        run()
        after.record()
        if meanwhile is not None:
            _wait_for(before, meanwhile)
    _wait(device, meanwhile)
    return [float(before.elapsed_time(after)) * 1e3 for before, after in itertools.pairwise(events)]


def _wait(device: torch.device, meanwhile: Callable[[], None] | None = None) -> None:
    if device.type == "cuda" and meanwhile is not None:
        _wait_for(torch.cuda.current_stream(device).record_event(), meanwhile)
    else:
        synchronize(device)


def _wait_for(event: torch.cuda.Event, meanwhile: Callable[[], None]) -> None:
    while not event.query():
        meanwhile()
