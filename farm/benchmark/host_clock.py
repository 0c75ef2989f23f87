"""Time the passes of a subject on a CPU that other programs use as well (docs/method.md, "On a CPU").

- The subject runs in one thread, and the clock is that thread's CPU time. It stands still while other programs or other
  virtual machines use the core.
- Each pass is timed by itself, in sections: a section begins with each call of a module. Of each section the fastest
  passes count: other programs slow passes by their use of caches and memory, and seldom a whole pass of a model.
- Under `resident`, the inputs of an operator are written directly before it, as in a model.
- The process keeps the memory that PyTorch frees. Otherwise each large output is new memory from the kernel, and the
  time of a pass depends on what the process freed before.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farm.benchmark import intervals
from farm.benchmark.cache import write_again
from farm.benchmark.clock import Clock, TimedRound
from farm.benchmark.workload import Workload

STEP_S = 0.005  # duration of the first steps
STEP_SHARE = 0.05  # longest step as a share of the time since the first: between steps all passes are evaluated
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt
_MMAP_MAX_DEFAULT, _TRIM_DEFAULT = 65536, 128 * 2**10


def keep_memory(keep: bool = True) -> None:
    """Let the C library keep freed memory for later allocations, or return to its defaults. Only glibc can do this."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0 if keep else _MMAP_MAX_DEFAULT)
        library.mallopt(_TRIM_THRESHOLD, -1 if keep else _TRIM_DEFAULT)


class HostClock(Clock):
    """Times single passes, in sections, by the CPU time of this thread."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._calls = itertools.cycle(workload.calls)
        self._moments: list[tuple[float, float]] = []  # the host's clock and the CPU time of this thread, after a step

    def step(self) -> None:
        """Time passes for at least `STEP_S`."""
        begin_s = now_s = time.perf_counter()
        until_s = begin_s + max(STEP_S, STEP_SHARE * (begin_s - self._moments[0][0]) if self._moments else 0.0)
        marks: list[float] = []
        with _marked(marks):
            while now_s < until_s:
                write_again(self.workload.rewritten)
                run = next(self._calls)
                marks[:] = [time.thread_time()]
                run()
                marks.append(time.thread_time())
                now_s = time.perf_counter()
                sections_s = tuple(late - early for early, late in itertools.pairwise(marks))
                self.done.append(TimedRound(now_s, marks[-1] - marks[0], 1, sections_s=sections_s))
        self._moments.append((now_s, time.thread_time()))

    def waited_share(self, begin_s: float, end_s: float) -> float:
        """The share of the time from `begin_s` to `end_s` in which the CPU did not run this thread, 0 to 1."""
        inside = [moment for moment in self._moments if begin_s <= moment[0] <= end_s] or self._moments[:1]
        elapsed_s, cpu_s = (last - first for first, last in zip(inside[0], inside[-1], strict=True))
        return max(0.0, 1 - cpu_s / elapsed_s) if elapsed_s else 0.0


def fastest_us(rounds: Sequence[TimedRound]) -> float:
    """The sum over all sections of a pass: of each section the mean of the fastest quarter of the passes. Unit: us.

    If the passes have different numbers of sections, a pass counts as one section.
    """
    sections = [one.sections_s for one in rounds]
    if len({len(each) for each in sections}) > 1:
        sections = [(one.took_s,) for one in rounds]
    return math.fsum(intervals.fastest(values) for values in zip(*sections, strict=True)) * 1e6


@contextlib.contextmanager
def _marked(marks: list[float]) -> Iterator[None]:
    """Append the CPU time of this thread to `marks` at each call of a module in the block.

    Hooks of modules would switch off fast paths of PyTorch, so this replaces the call itself.
    """
    original = torch.nn.Module.__call__

    def call(module: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        marks.append(time.thread_time())
        return original(module, *arguments, **keywords)

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]
