"""Effects of caches: the share of a footprint that the GPU's L2 cache keeps, and the time that cold
caches add.

If a kernel runs in a loop, its code stays in the instruction caches and its inputs do not change.
In a model, another kernel has just run and has written these inputs. On an H200 this costs 0.2 us
to a few us per kernel, 3 to 7 % of a whole model (docs/design/neighbours.md). So the farm also
times an operator after a dozen kernels of other operators and a kernel that rewrites its inputs.
CUDA events inside the graph add the same overhead with warm and with cold caches."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farm.benchmark import ranks
from farm.benchmark.policies import WindowPolicy
from farm.benchmark.torch_device import cache_bytes, capture_graph
from farm.types import intervals
from farm.types.details import InContext
from farm.types.figure import Figure

PIECES = 64  # the cache size is divided into this many pieces
LEAST_PIECE_BYTES = 2**16
COLD_TIMES = 3  # the cache keeps nothing of a footprint of this many cache sizes
WARM_SHARE = 8  # the cache keeps all of a footprint of 1/8 of its size
# least number of pieces that one graph reads: the graph's launch time is then negligible
READS = 200
PIECE_REPLAYS = 5

SIZE = 1024  # matrix size in `other_operators`: enough blocks for every multiprocessor
LEAST_PASSES = 4  # in one graph with events
BUDGET_S = 0.006  # duration of one graph with events
BARE_S = 0.001  # least duration of the graph without events: its launch time is then negligible
MOST_BARE = 500  # most passes in the graph without events
# least and most counted replays; one warm-up replay comes before them
LEAST_REPLAYS, REPLAYS = 3, 6
# longer passes are not timed: a few microseconds of cold caches do not matter to them
LONGEST_S = 0.005
UNSEEN_US = 10.0  # assumed half-width of the effect on passes longer than `LONGEST_S`


def found_again(footprint_bytes: int, device: torch.device) -> float | None:
    """Measure the share of a footprint that a GPU's cache still contains at the next read: 0 to 1;
    None if unknown.

    Kernels read about a megabyte each, one after the other. The size of the cache does not predict
    the share: the 60 MB L2 of an H200 keeps all of a 38 MB footprint and nothing of a 52 MB
    footprint."""
    cache = cache_bytes(device)
    if footprint_bytes >= COLD_TIMES * cache:
        return 0.0
    piece_bytes = max(LEAST_PIECE_BYTES, cache // PIECES)
    try:
        memory = torch.zeros(COLD_TIMES * cache // piece_bytes, piece_bytes // 4, device=device)
        pieces = list(memory.unbind())
        number = max(1, round(footprint_bytes / piece_bytes))
        warm_us = _piece_us(pieces[: max(1, cache // WARM_SHARE // piece_bytes)], device)
        cold_us = _piece_us(pieces, device)
        here_us = _piece_us(pieces[:number], device)
    except torch.OutOfMemoryError:  # the model leaves too little memory
        return None
    if cold_us <= 1.02 * warm_us:  # the cache makes no difference to this kernel
        return None
    return min(1.0, max(0.0, (cold_us - here_us) / (cold_us - warm_us)))


def _piece_us(pieces: list[torch.Tensor], device: torch.device) -> float:
    """The median time to read one piece if a graph reads all pieces in turn. Unit: us."""
    walks = math.ceil(READS / len(pieces))
    graph = capture_graph([piece.sum for piece in pieces] * walks, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us: list[float] = []
    for replay in range(PIECE_REPLAYS + 1):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        if replay:  # earlier work has filled the caches of the first replay
            times_us.append(begin.elapsed_time(end) * 1e3 / (walks * len(pieces)))
    return statistics.median(times_us)


@functools.cache
def other_operators(device: torch.device) -> Callable[[], None]:
    """Return a function that runs a dozen kernels: matrix products in four precisions, special
    functions, reductions.

    The kernels fill the instruction caches. They touch only a few megabytes, so weights stay in the
    L2."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator) + 0.1

    plane = random(SIZE // 2, SIZE)
    left, right = random(SIZE, SIZE // 8), random(SIZE // 8, SIZE)
    products = [
        (left.to(dtype), right.to(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    # This product is small because double precision is slow on many cards.
    products.append((left[:, :32].double(), right[:32, : SIZE // 2].double()))

    def run() -> None:
        for left, right in products:
            torch.mm(left, right)
        torch.lgamma(plane)
        torch.digamma(plane)
        torch.erfinv(plane)
        torch.special.i0e(plane)
        torch.softmax(plane, 1)
        torch.nn.functional.layer_norm(plane, (SIZE,))
        torch.var(plane, 1)
        torch.where(plane > 0.5, plane, plane)

    run()  # once outside of a graph: libraries load and compile
    return run


def write_again(memories: Sequence[torch.Tensor]) -> None:
    """Write the same values to these memories again."""
    for memory in memories:  # types of one byte (bool, float8) have no arithmetic
        (memory.view(torch.uint8) if memory.element_size() == 1 else memory).mul_(1)


@dataclass(frozen=True)
class InPlacePass:
    """A pass of a kernel or a collective. If it changes its inputs, they get the model's values
    before each run.

    Otherwise the values would drift over millions of runs, and some kernels take other branches for
    other values. The time and energy of `restore` are measured by themselves and subtracted."""

    run: Callable[[], object]
    restore: Callable[[], object]

    def __call__(self) -> object:
        self.restore()
        return self.run()


def time_among_others(
    run: Callable[[], object],
    memories: Sequence[torch.Tensor],
    others: Callable[[], None],
    pass_s: float,
    device: torch.device,
    policy: WindowPolicy,
) -> InContext:
    """Time an operator alone and after other operators, in alternating replays.

    Args:
        run: one pass, capturable in a CUDA graph.
        memories: the inputs that another operator of the model writes just before the operator
            runs.
        pass_s: approximate time of one pass in s.
        policy: of the operator's window: how many passes, and how precise.
    """
    if pass_s > LONGEST_S:
        return InContext(alone_us=pass_s * 1e6, effect_us=Figure(0.0, UNSEEN_US), passes=0)
    passes = _passes_in_context(memories, pass_s, policy)
    bare_passes = max(passes, min(MOST_BARE, math.ceil(BARE_S / pass_s)))
    every: Any = run
    restore: Callable[[], object] | None = None
    if isinstance(every, InPlacePass):
        run, restore = every.run, every.restore

    def among_others() -> None:
        others()
        write_again(memories)
        if restore is not None:
            restore()

    pool = torch.cuda.graph_pool_handle()
    bare = _BareLoop(every, restore, bare_passes, device, pool)
    alone, alone_events = _timed_graph(run, restore, passes, device, pool)
    among, among_events = _timed_graph(run, among_others, passes, device, pool)
    bare_us, alone_us, among_us = list[float](), list[float](), list[float]()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(REPLAYS + 1):  # alternate the graphs, so that all run at the same clocks
        precise = replay > LEAST_REPLAYS and (
            _effect_us(alone_us, among_us).half_width <= policy.context_share * bare_us[-1]
        )
        if ranks.every(precise):
            break
        pass_us = bare.pass_us(begin, end)
        alone.replay()
        among.replay()
        torch.cuda.synchronize(device)
        if replay:
            bare_us.append(pass_us)
            # Ignore the first pass of each graph: it includes the graph's launch.
            alone_us += [first.elapsed_time(second) * 1e3 for first, second in alone_events[1:]]
            among_us += [first.elapsed_time(second) * 1e3 for first, second in among_events[1:]]
    return InContext(
        alone_us=statistics.median(bare_us),
        effect_us=_effect_us(alone_us, among_us),
        passes=len(among_us),
    )


def _passes_in_context(
    memories: Sequence[torch.Tensor], pass_s: float, policy: WindowPolicy
) -> int:
    """The number of timed passes in each graph: as many as the time budget allows."""
    # Writing the inputs is limited by the memory bandwidth; all kernels of the other operators
    # take about 70 us together.
    around_s = 1e-4 + sum(memory.nbytes for memory in memories) / 1e12
    affordable = math.ceil(BUDGET_S / (pass_s + around_s))
    return max(LEAST_PASSES, min(policy.context_passes, affordable))


class _BareLoop:
    """A graph of passes without events between them. If a pass restores its inputs, a second graph
    runs that alone, and its time is subtracted."""

    def __init__(
        self,
        run: Callable[[], object],
        restore: Callable[[], object] | None,
        passes: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        self._passes = passes
        self._graph = capture_graph([run] * passes, device, pool)
        self._restoring: torch.cuda.CUDAGraph | None = None
        if restore is not None:
            self._restoring = capture_graph([restore] * passes, device, pool)

    def pass_us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Replay the graphs, and return the time of one pass. Unit: us."""
        pass_us = replay_us(self._graph, begin, end) / self._passes
        if self._restoring is not None:
            pass_us -= replay_us(self._restoring, begin, end) / self._passes
        return pass_us


def _effect_us(alone_us: Sequence[float], among_us: Sequence[float]) -> Figure:
    """How much longer passes take among other operators."""
    effect_us = intervals.midmean(among_us) - intervals.midmean(alone_us)
    each_us = (
        intervals.batch_half_width(values, intervals.midmean) for values in (alone_us, among_us)
    )
    return Figure(effect_us, math.hypot(*each_us))


def replay_us(graph: torch.cuda.CUDAGraph, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """The time of the second of two replays. Unit: us."""
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _timed_graph(
    run: Callable[[], object],
    before: Callable[[], object] | None,
    passes: int,
    device: torch.device,
    pool: Any,
) -> tuple[torch.cuda.CUDAGraph, list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Capture a graph of passes. Return it with a pair of events per pass: before and after the
    pass.
    """
    # external: becomes a graph node
    event = functools.partial(torch.cuda.Event, enable_timing=True, external=True)
    events = [(event(), event()) for _ in range(passes)]

    def timed(first: torch.cuda.Event, second: torch.cuda.Event) -> Callable[[], None]:
        def call() -> None:
            if before is not None:
                before()
            first.record()
            run()
            second.record()

        return call

    return capture_graph([timed(*pair) for pair in events], device, pool), events
