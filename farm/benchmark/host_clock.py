"""Time subjects on a CPU that other programs use as well (docs/design/cpu-clock.md).

- Subjects are timed in turn, in many short visits. The speed of such a CPU drifts by some 10 %
  within seconds, and a sum can only be compared with a whole that was measured at the same moments.
- A subject runs in one thread, and the clock is that thread's CPU time. It stands still while other
  programs or other virtual machines use the core.
- Each pass is timed by itself, in sections: a section begins with each call of a module and with
  each launch of a generated kernel. Of each section the fastest passes count: other programs slow
  passes by their use of caches and memory, and seldom a whole pass of a model.
- Under `resident`, the inputs of an operator are written directly before it, as in a model.
- An operator's outputs are kept until they are as large as the cache. So each output is in memory
  that is not in the cache, as in a model: there, other operators have used the cache since this
  memory was last used.
- The process keeps the memory that PyTorch frees. Otherwise each large output is new memory from
  the kernel, and the time of a pass depends on what the process freed before.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.benchmark.cache import InPlacePass, write_again
from farm.benchmark.clock import TimedRound
from farm.benchmark.passes import Pass, applied
from farm.benchmark.torch_device import cache_bytes
from farm.benchmark.workload import Workload
from farm.subjects import kernel as kernels
from farm.subjects.encoding import tensors_in
from farm.types import intervals
from farm.types.figure import Figure
from farm.types.protocol import Protocol, Stopping
from farm.types.replacement import replaced

TURNS = 22  # most turns: in a turn each subject has a visit
LEAST_TURNS = 8
# the turns end if the gap between sum and whole is known within this interval
GAP_HALF_WIDTH = 0.025
VISIT_SHARE = 0.04  # length of a visit as a share of the longest window
WHOLE_VISITS = 3  # visits of a whole model in a turn: its passes are few and long
LONGEST_TIMES = 5.0  # the visits of a subject end after this multiple of the longest window
MOST_PASSES = 64  # of one visit
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt
_MMAP_MAX_DEFAULT, _TRIM_DEFAULT = 65536, 128 * 2**10


def keep_memory(keep: bool = True) -> None:
    """Let the C library keep freed memory for later allocations, or return to its defaults. Only
    glibc can do this.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0 if keep else _MMAP_MAX_DEFAULT)
        library.mallopt(_TRIM_THRESHOLD, -1 if keep else _TRIM_DEFAULT)


@dataclass
class HostTimer:
    """Times the passes of one subject in visits, by the CPU time of this thread."""

    workload: Workload
    protocol: Protocol
    stopping: Stopping
    whole: bool = False  # a whole model
    #: Sections begin with calls of modules. False for compiled models: see `_marked`.
    marks_modules: bool = True
    calls: int = 1  # in the whole model
    prepare_s: float = 0.0  # duration of the workload's preparation
    turns: list[list[TimedRound]] = field(default_factory=list)  # the passes of each turn
    elapsed_s: float = 0.0  # of all visits, on the host's clock
    cpu_s: float = 0.0  # CPU time of this thread in them
    ended_s: float = 0.0  # end of the last visit, on the host's clock
    group: str = ""  # id of the subjects that were timed in turn with this one
    # the values of a written input grew, shrank or overflowed during the visits
    moved: bool = False

    def __post_init__(self) -> None:
        self._calls: Iterator[Pass] = itertools.cycle(self.workload.calls)
        self._cache_bytes = cache_bytes(self.workload.device)

    @property
    def visit_s(self) -> float:
        return VISIT_SHARE * self.stopping.maximum_s

    @property
    def longest_s(self) -> float:
        """The visits end after this time."""
        return LONGEST_TIMES * self.stopping.maximum_s * (WHOLE_VISITS if self.whole else 1)

    @property
    def least_s(self) -> float:
        """The expected duration of the least number of visits."""
        pass_s = self.workload.round_s / max(1, self.workload.rounds[0].passes)
        return LEAST_TURNS * (
            WHOLE_VISITS * pass_s if self.whole else max(self.visit_s, 2 * pass_s)
        )

    def visit(self, turn: int) -> None:
        """Time passes for `visit_s`, at least one. If there are several, the first does not count:
        it finds the data of another subject in the cache."""
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        passes: list[TimedRound] = []
        marks: list[float] = []
        kept, kept_bytes = collections.deque[tuple[Any, int]](), 0
        now_s = begin_s
        with applied(self.protocol), _marked(marks, self.marks_modules):
            while not passes or (now_s < begin_s + self.visit_s and len(passes) < MOST_PASSES):
                write_again(self.workload.rewritten)
                run = next(self._calls)
                if isinstance(run, InPlacePass):
                    run.restore()
                    run = run.run
                marks[:] = [time.thread_time()]
                output = run()
                marks.append(time.thread_time())
                if not self.whole:
                    kept.append((output, sum(tensor.nbytes for tensor in tensors_in(output))))
                    kept_bytes += kept[-1][1]
                    while kept_bytes > self._cache_bytes:
                        kept_bytes -= kept.popleft()[1]
                del output
                now_s = time.perf_counter()
                sections_s = tuple(late - early for early, late in itertools.pairwise(marks))
                passes.append(TimedRound(now_s, marks[-1] - marks[0], 1, sections_s=sections_s))
        if turn == len(self.turns):
            self.turns.append([])
        self.turns[turn] += passes[1:] or passes
        self.elapsed_s += now_s - begin_s
        self.cpu_s += time.thread_time() - begin_cpu_s
        self.ended_s = now_s

    @property
    def rounds(self) -> list[TimedRound]:
        return [round_ for turn in self.turns for round_ in turn]

    @property
    def waited_share(self) -> float:
        """The share of the visits' time in which the CPU did not run this thread, 0 to 1."""
        return max(0.0, 1 - self.cpu_s / self.elapsed_s) if self.elapsed_s else 0.0

    def time_us(self) -> Figure:
        """The time of a pass, with an interval from the differences between turns. Unit: us."""
        half_width_us = intervals.jackknife_half_width(self.without_turn_us())
        return Figure(fastest_us(self.rounds), half_width_us)

    def without_turn_us(self) -> list[float]:
        """For each turn, the time of a pass without the passes of this turn. Unit: us."""
        if len(self.turns) < 2:
            return []
        times_us = []
        for number in range(len(self.turns)):
            rounds = list(itertools.chain(*self.turns[:number], *self.turns[number + 1 :]))
            times_us.append(fastest_us(rounds))
        return times_us

    def converged(self) -> bool:
        """True if the interval is narrow enough for the stopping rule."""
        return self.time_us().relative <= self.stopping.time_half_width


def take_turns(timers: Sequence[HostTimer], on_turn: Callable[[], None] = lambda: None) -> None:
    """Visit all subjects in turn until all have converged, or the gap between sum and whole is
    known well enough, or for `TURNS` turns. Long passes end earlier. Call `on_turn` before each
    turn."""
    group = uuid.uuid4().hex[:12]
    tuples, wholes = (
        [timer for timer in timers if timer.whole is whole] for whole in (False, True)
    )
    third = math.ceil(len(tuples) / WHOLE_VISITS)
    order = [
        timer
        for at in range(WHOLE_VISITS)
        for timer in (*tuples[at * third : (at + 1) * third], *wholes)
    ]
    for timer in timers:
        timer.group = group
    for turn in range(TURNS):
        on_turn()
        for timer in order:
            if timer.elapsed_s < timer.longest_s:
                timer.visit(turn)
        if turn + 1 >= LEAST_TURNS and (
            _gap_known(tuples, wholes) or all(timer.converged() for timer in timers)
        ):
            break


def _gap_known(tuples: Sequence[HostTimer], wholes: Sequence[HostTimer]) -> bool:
    if (
        len(wholes) != 1
        or not tuples
        or len({len(timer.turns) for timer in (*tuples, *wholes)}) > 1
    ):
        return False
    terms = [(timer.calls, timer.without_turn_us()) for timer in tuples]
    return intervals.paired_half_width(terms, wholes[0].without_turn_us()) <= GAP_HALF_WIDTH


def fastest_us(rounds: Sequence[TimedRound]) -> float:
    """The sum over all sections of a pass: of each section the mean of the fastest fifth of the
    passes. Unit: us.

    If the passes have different numbers of sections, a pass counts as one section.
    """
    sections = [round_.sections_s for round_ in rounds]
    if len({len(each) for each in sections}) > 1:
        sections = [(round_.took_s,) for round_ in rounds]
    return math.fsum(intervals.fastest(values) for values in zip(*sections, strict=True)) * 1e6


@contextlib.contextmanager
def _marked(marks: list[float], marks_modules: bool) -> Iterator[None]:
    """Append the CPU time of this thread to `marks` at each launch of a C++ kernel.

    With ``marks_modules`` it is also appended at each call of a module.

    It must be False for a compiled model. The compiler's code depends on how modules are called: it
    would compile the model again, with a graph break at each mark.

    Hooks of modules would switch off fast paths of PyTorch, so this replaces the call itself. Other
    threads have other clocks, so their calls are no marks."""
    original, thread = torch.nn.Module.__call__, threading.get_ident()

    def mark() -> None:
        if threading.get_ident() == thread:
            marks.append(time.thread_time())

    def call(module: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        mark()
        return original(module, *arguments, **keywords)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(kernels, "at_launch", mark))
        if marks_modules:
            stack.enter_context(replaced(torch.nn.Module, "__call__", call))
        yield
