"""A training step run with chosen tensors in slow memory for their whole lives, and the same with all of them fast.

The calls of the step are played from its tuples, as for `farm.benchmark.places`. What no call makes (parameters, states,
inputs) is copied to slow memory, and what calls make they are told to write there (`farm.benchmark.placed`), each to memory of its own.
What nobody can be told to write elsewhere stays fast, and is told.

A GPU replays the step from graphs: launched from Python, it would wait for Python. A call whose outputs need a pool of memory of
their own cannot share a graph with others, since a graph is captured into one pool. So the step is a row of graphs, each such call one of
its own, and those between them share a pool; with all fast it is one graph.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from farm.benchmark import intervals
from farm.benchmark.cuda_graph import capturing, one_stream
from farm.benchmark.placed import Outputs, placed_outputs
from farm.benchmark.places import Player
from farm.benchmark.slow_memory import SlowMemory, slow_memory_of
from farm.benchmark.workload import out_of_memory
from farm.errors import Unmeasurable
from farm.training.placement import AsRun, Run

if TYPE_CHECKING:
    from farm.operators.capture import Call, Capture
    from farm.operators.rebuild import Rebuilt
    from farm.training.recorded import StepCapture
    from farm.words.protocol import Protocol, Subject

WARM_UP_S = 0.3  # of replays that are not counted
WINDOW_S = 1.0  # of all that are
RUNS = (10, 100)  # least and most

_taken_apart: dict[str, StepCapture] = {}  # the step that was last, until it is run


def take_apart(subject: Subject, protocol: Protocol, device: torch.device) -> StepCapture:
    """A training step as this card runs it, a GPU where it is captured into a graph. `compare` runs the same.

    Raises:
        Unmeasurable: not_available: the card has no slow memory; rejected: a call of it is no tuple; out_of_memory.
        FarmError: see `farm.training.taking_apart.take_step_apart`.
    """
    from farm.benchmark.passes import as_launched, numeric_flags
    from farm.training.capture import capture_step
    from farm.training.taking_apart import build_step
    from farm.words.protocol import Variant

    slow_memory_of(device)
    if device.type == "cuda":
        one_stream(device)
    _taken_apart.clear()
    with numeric_flags(protocol), torch.enable_grad(), _memory_told():
        step = build_step(Variant.from_json(subject.spec), device, launch=protocol.launch)
        step.run()

        def observe() -> StepCapture:
            with torch.enable_grad():
                return capture_step(step, device_type=device.type, warmed_up=True)

        with torch.no_grad():
            capture = as_launched(observe, protocol, device)
    if capture.unowned:
        raise Unmeasurable("rejected", f"The step cannot be played from its calls: {capture.unowned[0]}.")
    _taken_apart[_key(subject, protocol)] = capture
    return capture


def compare(
    subject: Subject, protocol: Protocol, device: torch.device, calls: Sequence[str], plans: Sequence[Collection[int]]
) -> AsRun:
    """The step as it was taken apart, run with all fast and under each plan.

    Args:
        calls: the tuple ids of its calls, as the plans were made for them.
        plans: see `run_planned`.

    Raises:
        Unmeasurable: rejected: this card runs other calls; and see `take_apart` and `run_planned`.
    """
    from farm.benchmark.passes import grad_mode, numeric_flags

    known = _taken_apart.get(_key(subject, protocol)) or take_apart(subject, protocol, device)
    _taken_apart.clear()
    here = [call.tuple_id for call in known.calls]
    if here != list(calls):
        first = next((place for place, (one, other) in enumerate(zip(here, calls, strict=False)) if one != other), None)
        where = f"from call {first} on they are others" if first is not None else "the rest is missing"
        raise Unmeasurable(
            "rejected",
            f"The plan is of another step than this card runs: {len(calls)} calls, and {len(here)} here; {where}.",
            "Plan it anew for this card.",
        )
    with numeric_flags(protocol), grad_mode(protocol), _memory_told():
        return run_planned(known.as_capture(), plans, lambda: slow_memory_of(device), device, window_s=WINDOW_S)


def _key(subject: Subject, protocol: Protocol) -> str:
    return f"{subject.id}/{protocol.id}"


@contextlib.contextmanager
def _memory_told() -> Iterator[None]:
    """A lack of memory as the reason that it is."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(error) from error


def run_planned(
    capture: Capture,
    plans: Sequence[Collection[int]],
    memory: Callable[[], SlowMemory],
    device: torch.device,
    *,
    window_s: float,
) -> AsRun:
    """Time a step with all fast, and under each plan.

    Args:
        plans: of each the numbers of the storages that are slow.
        memory: makes slow memory.
        window_s: for so long each is timed, at least ten times.

    Raises:
        torch.OutOfMemoryError: the step does not fit with all fast.
    """
    began_s = time.perf_counter()
    if device.type == "cuda":
        one_stream(device)
    _let_go(device)
    player = Player(capture, device)
    fast = PlannedStep(player, capture, frozenset(), memory, device).read(window_s)
    found: list[Run | str] = []
    for slow in plans:
        _let_go(device)
        try:
            with _memory_told():
                found.append(PlannedStep(player, capture, frozenset(slow), memory, device).read(window_s))
        except Unmeasurable as error:
            found.append(f"{error.message} {error.next_step}".strip())
    return AsRun(memory().name, fast, tuple(found), time.perf_counter() - began_s)


def _let_go(device: torch.device) -> None:
    """Give back what was taken before."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_accelerator_emptyHostCache"):  # pinned memory, too
            torch._C._accelerator_emptyHostCache()
        elif hasattr(torch._C, "_host_emptyCache"):  # of an older torch
            torch._C._host_emptyCache()


class PlannedStep:
    """The step with one set of slow storages.

    Attributes:
        player: plays its calls.
        memories: what is slow lies in.
        stayed_fast: storages that could not be placed, once the step is prepared.
        graphs: that it is replayed from, on a GPU.
    """

    def __init__(
        self,
        player: Player,
        capture: Capture,
        slow: frozenset[int],
        memory: Callable[[], SlowMemory],
        device: torch.device,
    ) -> None:
        """
        Raises:
            Unmeasurable: out_of_memory: so much slow memory cannot be had.
        """
        self.graphs: list[torch.cuda.CUDAGraph] = []  # first: they go before the pools that they were captured into
        self._capture, self._slow, self._make_memory, self._device = capture, slow, memory, device
        self.memories = [memory()]
        self.memories[0].check_room(*(capture.storages[number].size_bytes for number in slow))
        self.player = player.placed(slow, self.memories[0].copied) if slow else player
        self._outputs: dict[int, Outputs] = {}  # by call
        self.stayed_fast: set[int] = set()
        self._kept: list[Rebuilt] = []

    def read(self, window_s: float) -> Run:
        again = self.replayed()
        values_us = _timed(again, self._device, window_s)
        time_us = intervals.midmean(values_us)
        half_width_us = intervals.batch_half_width(values_us, intervals.midmean)
        graphs, stayed_fast = len(self.graphs), tuple(sorted(self.stayed_fast))
        self.graphs.clear()
        return Run(time_us, intervals.finite(half_width_us, time_us), graphs, stayed_fast)

    def play(self, step: Callable[[Call, Rebuilt], object]) -> None:
        self.player.play(step, once=True)

    # ------------------------------------------------------------------------------------------ what is made

    def prepare(self, call: Call, operator: Rebuilt) -> object:
        """Run a call for the first time, and learn how those of its outputs come to lie in slow memory that are to."""
        made = [number for number in call.writes if number not in call.reads]
        sized = [number for number in made if self._capture.storages[number].size_bytes]
        wanted = {place: number for place, number in enumerate(sized) if number in self._slow}
        largest_first = tuple(sorted(wanted, key=lambda place: -self._capture.storages[wanted[place]].size_bytes))
        placed = self._most_of(operator, largest_first)
        there = placed.there if placed is not None else ()
        self.stayed_fast.update(wanted[place] for place in wanted if place not in there)
        if placed is None:
            return operator.run()
        self.memories.append(placed.memory)
        self._outputs[call.index] = placed.outputs
        return placed.outputs.run(operator)()

    def _most_of(self, operator: Rebuilt, wanted: tuple[int, ...]) -> _Placed | None:
        """All of these outputs where that goes, else as many as do one after the other."""
        if not wanted or (found := self._tried(operator, wanted)) is not None:
            return found if wanted else None
        for place in wanted if len(wanted) > 1 else ():
            found = self._tried(operator, (*(found.there if found else ()), place)) or found
        return found

    def _tried(self, operator: Rebuilt, wanted: tuple[int, ...]) -> _Placed | None:
        memory = self._make_memory()  # of this attempt: what was taken for one that fails goes with it
        try:
            outputs = placed_outputs(operator, wanted, memory)
            outputs.run(operator)()  # which sees that they do lie there
        except Unmeasurable as error:
            if error.reason != "not_available":
                raise
            return None
        except torch.OutOfMemoryError:  # no room for its pool
            return None
        return _Placed(outputs, wanted, memory)

    # ------------------------------------------------------------------------------------------ again and again

    def replayed(self) -> Callable[[], None]:
        """Prepare the step; the result runs it once more."""
        self.play(self.prepare)
        if self._device.type != "cuda":
            return lambda: self.play(self._run)
        _let_go(self._device)
        while not self._captured():
            _let_go(self._device)

        def replay() -> None:
            for graph in self.graphs:
                graph.replay()

        return replay

    def _run(self, call: Call, operator: Rebuilt) -> object:
        outputs = self._outputs.get(call.index)
        return operator.run() if outputs is None else outputs.run(operator)()

    def _captured(self) -> bool:
        """Capture the step; False where a call could not be captured as it was prepared: its outputs now stay fast."""
        self.graphs.clear()
        self._kept.clear()
        pools = {index: outputs.pool for index, outputs in self._outputs.items() if outputs.pool is not None}
        calls = len(self._capture.calls)
        shared = torch.cuda.graph_pool_handle()
        with contextlib.ExitStack() as others:

            def others_from(index: int) -> None:
                if index < calls and index not in pools:
                    self.graphs.append(others.enter_context(capturing(self._device, shared)))

            def step(call: Call, operator: Rebuilt) -> object:
                if call.index not in pools:
                    return self._run(call, operator)
                others.close()
                self._kept.append(operator)
                try:
                    with capturing(self._device, pools[call.index].id) as graph:
                        out = self._run(call, operator)
                except (Unmeasurable, torch.OutOfMemoryError) as error:
                    raise _NotCaptured(call) from error
                self.graphs.append(graph)
                others_from(call.index + 1)
                return out

            try:
                others_from(0)
                self.play(step)
            except _NotCaptured as error:
                self.graphs.clear()
                del self._outputs[error.call.index]
                made = set(error.call.writes) - set(error.call.reads)
                self.stayed_fast |= made & self._slow
                return False
        return True


@dataclass(frozen=True)
class _Placed:
    """How a call's outputs ``there`` are written to slow memory."""

    outputs: Outputs
    there: tuple[int, ...]
    memory: SlowMemory


class _NotCaptured(Exception):
    def __init__(self, call: Call) -> None:
        super().__init__(call.index)
        self.call = call


def _timed(run: Callable[[], None], device: torch.device, window_s: float) -> list[float]:
    """What each of many runs takes, one right behind the other. Unit: µs."""
    warm_up_s = min(WARM_UP_S, window_s)
    began_s = time.perf_counter()
    runs = 0
    while runs == 0 or time.perf_counter() - began_s < warm_up_s:
        run()
        _wait(device)
        runs += 1
    pass_s = (time.perf_counter() - began_s) / runs
    least, most = RUNS
    count = max(least, min(most, math.ceil(window_s / pass_s)))
    if device.type != "cuda":
        moments_s = [time.perf_counter()]
        for _ in range(count):
            run()
            moments_s.append(time.perf_counter())
        return [(after - before) * 1e6 for before, after in itertools.pairwise(moments_s)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    run()  # the card is at work while the next is launched
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    _wait(device)
    return [float(before.elapsed_time(after)) * 1e3 for before, after in itertools.pairwise(events)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
