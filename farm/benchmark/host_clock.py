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
- A small model leaves its data in the caches. So an operator is also timed with warm data: the same
  weights in each pass, and outputs in memory that was just freed. With the whole model,
  `farm.benchmark.host_places` times what the place of each call in the model adds to that.
- The clock itself takes about a microsecond in each section. It is measured in each visit, and
  subtracted.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.benchmark.cache import InPlacePass, write_again
from farm.benchmark.clock import TimedRound
from farm.benchmark.host_places import HostPlaces
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
WARM_SHARE = 0.25  # length of the passes with warm data in a visit, as a share of the visit
LONGEST_WARM_S = 0.005  # longer passes are not timed with warm data
CLOCK_READINGS = 16  # empty passes in a visit, which show how long the clock takes
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
    # the passes of each turn with warm data; empty if the data never stay in the cache
    warm_turns: list[list[TimedRound]] = field(default_factory=list)
    # of a whole model: times its calls in order; None: `places_missing` says why
    places: HostPlaces | None = None
    places_missing: str = ""
    # empty passes of one and of two sections: what the clock itself takes
    empty: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
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
        return LEAST_TURNS * (
            WHOLE_VISITS * self._pass_s if self.whole else max(self.visit_s, 2 * self._pass_s)
        )

    @property
    def _pass_s(self) -> float:
        """The first estimate of the duration of a pass."""
        return self.workload.round_s / max(1, self.workload.rounds[0].passes)

    @property
    def times_warm_data(self) -> bool:
        """True if the tuple is also timed with warm data: the protocol is that of a model, and the
        pass is so short that cold data matter."""
        if self.whole or self.workload.passes is None or self._pass_s > LONGEST_WARM_S:
            return False
        return self.protocol.residency == "resident"

    def visit(self, turn: int) -> None:
        """Time passes for `visit_s`, at least one. If there are several, the first does not count:
        it finds the data of another subject in the cache."""
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        _add_passes(self.turns, turn, self._passes(self._calls, self.visit_s, keep=not self.whole))
        if self.times_warm_data:
            same = itertools.repeat(self.workload.calls[0])
            warm = self._passes(same, WARM_SHARE * self.visit_s, keep=False)
            _add_passes(self.warm_turns, turn, warm)
        if self.places is not None and len(self.places.turns) == turn:
            with applied(self.protocol):
                self.places.visit(self.visit_s)
        for times_s, empty_s in zip(self.empty, _empty_passes_s(self.marks_modules), strict=True):
            times_s += empty_s
        self.ended_s = time.perf_counter()
        self.elapsed_s += self.ended_s - begin_s
        self.cpu_s += time.thread_time() - begin_cpu_s

    def _passes(self, calls: Iterator[Pass], longest_s: float, *, keep: bool) -> list[TimedRound]:
        """Time passes for `longest_s`, at least one. `keep`: keep their outputs until they are as
        large as the cache."""
        passes: list[TimedRound] = []
        marks: list[float] = []
        kept, kept_bytes = collections.deque[tuple[Any, int]](), 0
        now_s = time.perf_counter()
        end_s = now_s + longest_s
        with applied(self.protocol), _marked(marks, self.marks_modules):
            while not passes or (now_s < end_s and len(passes) < MOST_PASSES):
                write_again(self.workload.rewritten)
                run = next(calls)
                if isinstance(run, InPlacePass):
                    run.restore()
                    run = run.run
                marks[:] = [time.thread_time()]
                output = run()
                marks.append(time.thread_time())
                if keep:
                    kept.append((output, sum(tensor.nbytes for tensor in tensors_in(output))))
                    kept_bytes += kept[-1][1]
                    while kept_bytes > self._cache_bytes:
                        kept_bytes -= kept.popleft()[1]
                del output
                now_s = time.perf_counter()
                sections_s = tuple(late - early for early, late in itertools.pairwise(marks))
                passes.append(TimedRound(now_s, marks[-1] - marks[0], 1, sections_s=sections_s))
        return passes

    @property
    def rounds(self) -> list[TimedRound]:
        return [round_ for turn in self.turns for round_ in turn]

    @property
    def waited_share(self) -> float:
        """The share of the visits' time in which the CPU did not run this thread, 0 to 1."""
        return max(0.0, 1 - self.cpu_s / self.elapsed_s) if self.elapsed_s else 0.0

    def time_us(self) -> Figure:
        """The time of a pass, with an interval from the differences between turns. Unit: us."""
        return self._figure_us(self.turns)

    def warm_us(self) -> Figure | None:
        """The time of a pass with warm data; None if it was not timed. Unit: us."""
        return self._figure_us(self.warm_turns) if self.warm_turns else None

    def _figure_us(self, turns: Sequence[list[TimedRound]]) -> Figure:
        half_width_us = intervals.jackknife_half_width(self.without_turn_us(turns))
        return Figure(self._pass_us(turns), half_width_us)

    def without_turn_us(self, turns: Sequence[list[TimedRound]] | None = None) -> list[float]:
        """For each turn, the time of a pass without the passes of this turn. Unit: us."""
        turns = self.turns if turns is None else turns
        if len(turns) < 2:
            return []
        return [
            self._pass_us([*turns[:number], *turns[number + 1 :]]) for number in range(len(turns))
        ]

    def _pass_us(self, turns: Iterable[list[TimedRound]]) -> float:
        """The time of a pass without that of the clock. Unit: us."""
        rounds = list(itertools.chain(*turns))
        return fastest_us(rounds) - self._clock_us(len(rounds[0].sections_s))

    def _clock_us(self, sections: int) -> float:
        """What the clock takes in a pass with this number of sections. Unit: us."""
        if not all(self.empty):
            return 0.0
        one_us, two_us = (intervals.fastest(times_s) * 1e6 for times_s in self.empty)
        return one_us + (sections - 1) * (two_us - one_us)

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


def _add_passes(turns: list[list[TimedRound]], turn: int, passes: list[TimedRound]) -> None:
    """Add the passes of a visit to its turn. The first of several does not count."""
    if turn == len(turns):
        turns.append([])
    turns[turn] += passes[1:] or passes


def _empty_passes_s(marks_modules: bool) -> tuple[list[float], list[float]]:
    """The times of passes that do nothing, with one and with two sections: those of the clock and
    of a mark. Unit: s."""
    marks: list[float] = []
    one_s, two_s = list[float](), list[float]()
    module = torch.nn.Module()
    with contextlib.ExitStack() as stack:
        if marks_modules:
            stack.enter_context(replaced(torch.nn.Module, "__call__", lambda _: None))
        stack.enter_context(_marked(marks, marks_modules))
        begin_section = module if marks_modules else kernels.at_launch
        assert begin_section is not None  # `_marked` has set it
        for _ in range(CLOCK_READINGS):
            marks[:] = [time.thread_time()]
            marks.append(time.thread_time())
            one_s.append(marks[-1] - marks[0])
            marks[:] = [time.thread_time()]
            begin_section()
            marks.append(time.thread_time())
            two_s.append(marks[-1] - marks[0])
    return one_s, two_s


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
