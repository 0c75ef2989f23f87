"""What an operator takes between other operators, which a loop of itself never shows.

In a loop the kernel's code lies ready in the instruction caches, and its inputs were only read, never written, since the
pass before. In a model another kernel ran just now and wrote them. On an H200 that is worth 0.2 to some µs a kernel, 3 to
7 % of whole models (docs/method.md). So beside its window a tuple is run in a second state: each
pass comes after a dozen kernels of other operators, and after one that writes the inputs anew.

What is in the way is not subtracted: events recorded inside the CUDA graph stand directly around the operator. What an
event itself adds is the same in both states, so the difference between the two is the effect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farm.benchmark import intervals
from farm.benchmark.cuda_graph import capture_graph
from farm.types.reading import InContext

SIZE = 1024  # of the matrices that the others work on: enough blocks for every multiprocessor
PASSES = 24  # in one graph
LEAST_PASSES = 4
BUDGET_S = 0.006  # of one graph
BARE_S = 0.001  # the least of the graph without events, so that starting it does not count
MOST_BARE = 500  # passes of it
REPLAYS = 6  # beside the first, which is not counted
LONGEST_S = 0.005  # longer passes are not looked at: some microseconds are nothing to them
UNSEEN_US = 10.0  # what the effect is taken to be at most where it is not looked at


class Others:
    """A dozen kernels of other operators: matrix products in four precisions, special functions, reductions.

    They bring much code, and read and write some megabytes only, so that they push no weights out of the L2.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, device=device, generator=generator) + 0.1

        self._plane = random(SIZE // 2, SIZE)
        left, right = random(SIZE, SIZE // 8), random(SIZE // 8, SIZE)
        self._products = [(left.to(dtype), right.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        # A thin one: double precision is slow on many cards.
        self._products.append((left[:, :32].double(), right[:32, : SIZE // 2].double()))
        self.run()  # once outside of a graph: libraries load and compile what they need

    def run(self) -> None:
        for left, right in self._products:
            torch.mm(left, right)
        plane = self._plane
        torch.lgamma(plane)
        torch.digamma(plane)
        torch.erfinv(plane)
        torch.special.i0e(plane)
        torch.softmax(plane, 1)
        torch.nn.functional.layer_norm(plane, (SIZE,))
        torch.var(plane, 1)
        torch.where(plane > 0.5, plane, plane)


def write_anew(memories: Sequence[torch.Tensor]) -> None:
    """Write every tensor with what it holds."""
    for memory in memories:
        # Types of one byte (bool, small floats) lack arithmetic of their own.
        (memory.view(torch.uint8) if memory.element_size() == 1 else memory).mul_(1)


def read_context(
    run: Callable[[], object], memories: Sequence[torch.Tensor], others: Others, pass_s: float, device: torch.device
) -> InContext:
    """Time an operator alone and among others, by turns.

    Args:
        run: one pass, capturable in a CUDA graph.
        memories: what the operator reads and another one wrote before it.
        pass_s: about what one pass takes.
    """
    if pass_s > LONGEST_S:
        return InContext(alone_us=pass_s * 1e6, effect_us=0.0, effect_half_width_us=UNSEEN_US, passes=0)
    # The inputs are written at the memory's pace, the others take some 70 µs together.
    around_s = 1e-4 + sum(memory.nbytes for memory in memories) / 1e12
    passes = max(LEAST_PASSES, min(PASSES, math.ceil(BUDGET_S / (pass_s + around_s))))

    def among_others() -> None:
        others.run()
        write_anew(memories)

    pool = torch.cuda.graph_pool_handle()
    bare_passes = max(passes, min(MOST_BARE, math.ceil(BARE_S / pass_s)))
    bare = capture_graph([run] * bare_passes, device, pool)
    alone, alone_events = _timed_graph(run, None, passes, device, pool)
    among, among_events = _timed_graph(run, among_others, passes, device, pool)
    bare_us: list[float] = []
    alone_us: list[float] = []
    among_us: list[float] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(REPLAYS + 1):  # by turns, so that all see the same clocks
        bare.replay()
        begin.record()
        bare.replay()
        end.record()
        alone.replay()
        among.replay()
        torch.cuda.synchronize(device)
        if replay:
            bare_us.append(begin.elapsed_time(end) * 1e3 / bare_passes)
            # A graph's first pass waits for the graph's own start.
            alone_us += [first.elapsed_time(second) * 1e3 for first, second in alone_events[1:]]
            among_us += [first.elapsed_time(second) * 1e3 for first, second in among_events[1:]]
    return InContext(
        alone_us=statistics.median(bare_us),
        effect_us=intervals.midmean(among_us) - intervals.midmean(alone_us),
        effect_half_width_us=math.hypot(
            *(intervals.batch_half_width(values, intervals.midmean) for values in (alone_us, among_us))
        ),
        passes=len(among_us),
    )


_Events = list[tuple[torch.cuda.Event, torch.cuda.Event]]


def _timed_graph(
    run: Callable[[], object], before: Callable[[], None] | None, passes: int, device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, _Events]:
    """A graph of passes with an event before and behind each."""

    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, external=True)  # external: a node of the graph

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
