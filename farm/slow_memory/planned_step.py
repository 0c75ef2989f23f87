"""A training step run with chosen tensors in slow memory for their whole lives, and the same with all of them fast.

The calls of the step are played from its tuples, as for `farm.benchmark.call_context`. What no call makes (parameters, states,
inputs) is copied to slow memory, and what calls make they are told to write there (`farm.slow_memory.offload`), each to memory of its own.
What nobody can be told to write elsewhere stays fast, and is told.

A GPU replays the step from graphs: launched from Python, it would wait for Python. A call whose outputs need a pool of memory of
their own cannot share a graph with others, since a graph is captured into one pool. So the step is a row of graphs, each such call one of
its own, and those between them share a pool; with all fast it is one graph.

What is moved while it waits (`farm.slow_memory.memory_tier`) is copied between graphs: the row is also cut at the calls before which a copy
begins or has to be done. Its room in fast memory is kept, as graphs know addresses: what is run is the time that moves take.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from farm.benchmark import intervals
from farm.benchmark.call_context import Player
from farm.benchmark.cuda_graph import capturing, one_stream
from farm.benchmark.workload import out_of_memory
from farm.errors import Unmeasurable
from farm.slow_memory.memory_tier import Mover, SlowMemory, slow_memory_of, wire_beside
from farm.slow_memory.offload import Outputs, slow_outputs
from farm.slow_memory.transfers import AsRun, Move, Run, Wire

if TYPE_CHECKING:
    from farm.operators.captured import Capture, CapturedCall
    from farm.operators.rebuild import Rebuilt
    from farm.types.protocol import Protocol, Subject

WARM_UP_S = 0.3  # of replays that are not counted
WINDOW_S = 1.0  # of all that are
RUNS = (10, 100)  # least and most

_last_step: dict[str, Capture] = {}  # the step that was last, until it is run


def extract_step(subject: Subject, protocol: Protocol, device: torch.device) -> Capture:
    """A training step as this card runs it, a GPU where it is captured into a graph. `compare` runs the same.

    Raises:
        Unmeasurable: not_available: the card has no slow memory; rejected: a call of it is no tuple; out_of_memory.
        FarmError: see `farm.training.extract.extract_step`.
    """
    from farm.benchmark.passes import as_launched, numeric_flags
    from farm.training.capture import capture_step
    from farm.training.extract import build_step
    from farm.types.protocol import Variant

    slow_memory_of(device)
    if device.type == "cuda":
        one_stream(device)
    _last_step.clear()
    with numeric_flags(protocol), torch.enable_grad(), _memory_told():
        step = build_step(Variant.from_json(subject.spec), device, launch=protocol.launch)
        step.run()

        def observe() -> Capture:
            with torch.enable_grad():
                return capture_step(step, device_type=device.type, warmed_up=True)

        with torch.no_grad():
            capture = as_launched(observe, protocol, device)
    if capture.gaps:
        raise Unmeasurable("rejected", f"The step cannot be played from its calls: {capture.gaps[0]}.")
    _last_step[_key(subject, protocol)] = capture
    return capture


def measure_wire(subject: Subject, protocol: Protocol, device: torch.device) -> Wire:
    """What copies get of the wire, alone and beside the step as it was taken apart, and what that costs the step.

    Raises:
        Unmeasurable: see `extract_step`.
    """
    capture = _known(subject, protocol, device)
    with _as_asked(protocol):
        if device.type == "cuda":
            one_stream(device)
        _let_go(device)
        memory = slow_memory_of(device)
        step = PlannedStep(Player(capture, device), capture, frozenset(), lambda: memory, device)
        again = step.replayed()

        def step_us(meanwhile: Callable[[], None] | None) -> float:
            return intervals.midmean(_timed(again, device, WINDOW_S, meanwhile))

        try:
            return wire_beside(step_us, memory, device)
        finally:
            step.forget()


def compare(
    subject: Subject,
    protocol: Protocol,
    device: torch.device,
    calls: Sequence[str],
    plans: Sequence[Collection[int]],
    moves: Sequence[Sequence[Move]] = (),
) -> AsRun:
    """The step as it was taken apart, run with all fast and under each plan.

    Args:
        calls: the tuple ids of its calls, as the plans were made for them.
        plans, moves: see `run_planned`.

    Raises:
        Unmeasurable: rejected: this card runs other calls; and see `extract_step` and `run_planned`.
    """
    known = _known(subject, protocol, device)
    _last_step.clear()
    here = [call.tuple_id for call in known.calls]
    if here != list(calls):
        first = next((place for place, (one, other) in enumerate(zip(here, calls, strict=False)) if one != other), None)
        where = f"from call {first} on they are others" if first is not None else "the rest is missing"
        raise Unmeasurable(
            "rejected",
            f"The plan is of another step than this card runs: {len(calls)} calls, and {len(here)} here; {where}.",
            "Plan it anew for this card.",
        )
    with _as_asked(protocol):
        memory = functools.partial(slow_memory_of, device)
        return run_planned(known, plans, memory, device, moves=moves, window_s=WINDOW_S)


def _known(subject: Subject, protocol: Protocol, device: torch.device) -> Capture:
    return _last_step.get(_key(subject, protocol)) or extract_step(subject, protocol, device)


def _key(subject: Subject, protocol: Protocol) -> str:
    return f"{subject.id}/{protocol.id}"


@contextlib.contextmanager
def _as_asked(protocol: Protocol) -> Iterator[None]:
    from farm.benchmark.passes import grad_mode, numeric_flags

    with numeric_flags(protocol), grad_mode(protocol), _memory_told():
        yield


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
    moves: Sequence[Sequence[Move]] = (),
    window_s: float,
) -> AsRun:
    """Time a step with all fast, and under each plan.

    Args:
        plans: of each the numbers of the storages that are slow.
        memory: makes slow memory.
        moves: of each plan, of storages that are fast; nothing is moved without.
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
    for slow, moved in itertools.zip_longest(plans, moves, fillvalue=()):
        _let_go(device)
        try:
            with _memory_told():
                found.append(PlannedStep(player, capture, frozenset(slow), memory, device, moved).read(window_s))
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
        movers: one for each move.
        graphs: that it is replayed from, on a GPU.
    """

    def __init__(
        self,
        player: Player,
        capture: Capture,
        slow: frozenset[int],
        memory: Callable[[], SlowMemory],
        device: torch.device,
        moves: Sequence[Move] = (),
    ) -> None:
        """
        Raises:
            Unmeasurable: out_of_memory: so much slow memory cannot be had.
        """
        self.graphs: list[torch.cuda.CUDAGraph] = []  # first: they go before the pools that they were captured into
        self._row: list[Callable[[], None]] = []  # their replays, and what copies do between them
        self._capture, self._slow, self._make_memory, self._device = capture, slow, memory, device
        self.memories = [memory()]
        sizes = {number: capture.tensors[number].size_bytes for number in {*slow, *(move.tensor for move in moves)}}
        self.memories[0].check_room(*sizes.values())
        hosts = {number: self.memories[0].host_bytes(sizes[number]) for number in sizes.keys() - slow}
        self.movers = [Mover(move, hosts[move.tensor], device) for move in moves]
        self._acts: dict[int, list[Callable[[], None]]] = defaultdict(list)  # by call
        for index, act in itertools.chain.from_iterable(zip(*(mover.actions() for mover in self.movers), strict=True)):
            self._acts[index].append(act)
        self.player = player.placed(slow, self.memories[0].copied) if slow else player
        self._outputs: dict[int, Outputs] = {}  # by call
        self.stayed_fast: set[int] = set()
        self._kept: list[Rebuilt] = []

    def read(self, window_s: float) -> Run:
        again = self.replayed()
        values_us = _timed(again, self._device, window_s)
        time_us = intervals.midmean(values_us)
        half_width_us = intervals.batch_half_width(values_us, intervals.midmean)
        half_width_us = intervals.finite(half_width_us, time_us)
        moved = [mover.room.nbytes for mover in self.movers if mover.room is not None]
        graphs, stayed_fast = len(self.graphs), tuple(sorted(self.stayed_fast))
        launch_us = 0.0
        if self._device.type == "cuda":
            began_s = time.perf_counter()
            again()
            launch_us = (time.perf_counter() - began_s) * 1e6
            _wait(self._device)
        self.forget()
        return Run(time_us, half_width_us, graphs, stayed_fast, len(moved), sum(moved), launch_us)

    def forget(self) -> None:
        """Give back what it is replayed from."""
        self._row.clear()
        self.graphs.clear()

    # ------------------------------------------------------------------------------------------ what is made

    def prepare(self, call: CapturedCall, operator: Rebuilt) -> object:
        """Run a call for the first time, and learn how those of its outputs come to lie in slow memory that are to."""
        made = [number for number in call.writes if number not in call.reads]
        sized = [number for number in made if self._capture.tensors[number].size_bytes]
        wanted = {place: number for place, number in enumerate(sized) if number in self._slow}
        largest_first = tuple(sorted(wanted, key=lambda place: -self._capture.tensors[wanted[place]].size_bytes))
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
            outputs = slow_outputs(operator, wanted, memory)
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
        self.player.play(self.prepare, once=True)
        if self._device.type != "cuda":
            return lambda: self.player.play(self._run, once=True, before=self._copy)
        _let_go(self._device)
        while not self._captured():
            _let_go(self._device)

        def replay() -> None:
            for launch in self._row:
                launch()

        return replay

    def _copy(self, index: int, memory: Mapping[int, torch.UntypedStorage]) -> None:
        for act in self._copies(index, memory):
            act()

    def _copies(self, index: int, memory: Mapping[int, torch.UntypedStorage]) -> Sequence[Callable[[], None]]:
        """What is to be done before a call, or behind the last."""
        for mover in self.movers:
            if mover.move.out == index:
                mover.found(memory.get(mover.move.tensor))
        return self._acts.get(index, ())

    def _run(self, call: CapturedCall, operator: Rebuilt) -> object:
        outputs = self._outputs.get(call.index)
        return operator.run() if outputs is None else outputs.run(operator)()

    def _captured(self) -> bool:
        """Capture the step; False where a call could not be captured as it was prepared: its outputs now stay fast."""
        self.forget()
        self._kept.clear()
        pools = {index: outputs.pool for index, outputs in self._outputs.items() if outputs.pool is not None}
        calls = len(self._capture.calls)
        shared = torch.cuda.graph_pool_handle()
        with contextlib.ExitStack() as others:

            def add(graph: torch.cuda.CUDAGraph) -> None:
                self.graphs.append(graph)
                self._row.append(graph.replay)

            def before(index: int, memory: Mapping[int, torch.UntypedStorage]) -> None:
                acts = self._copies(index, memory)
                if acts or index == 0 or index in pools or index - 1 in pools:
                    others.close()
                    self._row.extend(acts)
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
                    raise _NotCaptured(call) from error
                add(graph)
                return out

            try:
                self.player.play(step, once=True, before=before)
            except _NotCaptured as error:
                self.forget()
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
    def __init__(self, call: CapturedCall) -> None:
        super().__init__(call.index)
        self.call = call


def _timed(
    run: Callable[[], None], device: torch.device, window_s: float, meanwhile: Callable[[], None] | None = None
) -> list[float]:
    """What each of many runs takes, one right behind the other. Unit: µs.

    Args:
        meanwhile: called all the while, on a GPU.
    """
    warm_up_s = min(WARM_UP_S, window_s)
    began_s = time.perf_counter()
    runs = 0
    while runs == 0 or time.perf_counter() - began_s < warm_up_s:
        run()
        _wait(device, meanwhile)
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
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait_for(event: torch.cuda.Event, meanwhile: Callable[[], None]) -> None:
    while not event.query():
        meanwhile()
