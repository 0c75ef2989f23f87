"""A second opinion on a tuple's time: each call timed where it stands, between its neighbours in the running model.

On a card the calls of an eagerly launched pass are named to PyTorch's profiler; a kernel belongs to the call
in whose range it was launched, and a call's time is what its kernels took together. In a graph that is replayed there
are no ranges: a marking kernel stands before and behind each call. Gaps between kernels are in neither. On a CPU a call's time is that of its range by the clock. Either way the
median over a few passes counts. There is no energy at this grain.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.operators.capture import Capture, Record
from farm.operators.profiled import RANGE, is_kernel, kernels_between_marks, mark
from farm.types.reading import InModelTimes

PASSES = 3
LAUNCHES = ("cuda", "cu", "hip")  # how the driver's functions begin that put work on a card


#: One pass of what is timed, with something around each of its owners, by number.
Run = Callable[[Callable[[int], contextlib.AbstractContextManager[Any]]], object]


@dataclass(frozen=True)
class InModel:
    """What the calls of one capture took in the running model.

    Attributes:
        times_us: per call, in the capture's order; None where its kernels could not be told.
        source: ``kernels`` or ``ranges``.
        attributed_share: of the kernels' time, what lies in some call; 1.0 for ranges.
    """

    times_us: tuple[float | None, ...]
    source: str
    passes: int
    attributed_share: float

    def by_tuple(self, capture: Capture) -> InModelTimes:
        """By tuple, as it is kept."""
        calls_us: dict[str, list[float | None]] = defaultdict(list)
        for call, value in zip(capture.calls, self.times_us, strict=True):
            calls_us[call.tuple_id].append(None if value is None else round(value, 3))
        return InModelTimes(
            calls_us={tuple_id: tuple(times_us) for tuple_id, times_us in calls_us.items()},
            source=self.source,
            passes=self.passes,
            attributed_share=round(self.attributed_share, 4),
            sum_us=round(sum(value for value in self.times_us if value is not None), 3),
        )


def time_in_model(
    run: Run, capture: Capture, device: torch.device, *, passes: int = PASSES, record: Record | None = None
) -> InModel:
    """Time the calls of a capture in passes of what it was taken from.

    What is run must be warm, and run the same calls each time.

    Args:
        run: one pass, with what is given around whatever has an entry in ``capture.owners``, by its number there.
        record: how the run that is measured is made, as in `farm.operators.capture.verify_on_device`.
    """
    if device.type == "cuda" and record is not None:
        seen, attributed = _by_marks(run, capture, device, passes, record)
        source = "kernels"
    elif device.type == "cuda":
        seen, attributed = attribute(_profiled(run, device, passes))
        source = "kernels"
    elif record is not None:
        seen, attributed, source = _by_clock(run, passes, record), 1.0, "ranges"
    else:
        seen, attributed, source = _by_clock(run, passes), 1.0, "ranges"
    times: list[float | None] = [None] * len(capture.calls)
    for number, index in enumerate(capture.owners):
        if index is not None and number in seen:
            times[index] = statistics.median(seen[number])
    return InModel(tuple(times), source, passes, attributed)


def _by_clock(run: Run, passes: int, record: Record = lambda run: run) -> dict[int, list[float]]:
    seen: dict[int, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        seen[number].append((time.perf_counter() - begin_s) * 1e6)

    one_pass = record(lambda: run(around))
    for _ in range(passes):
        one_pass()
    return seen


def _by_marks(
    run: Run, capture: Capture, device: torch.device, passes: int, record: Record
) -> tuple[dict[int, list[float]], float]:
    """Of a replayed graph, with a mark before and behind each call: one that only the order of the kernels tells of."""

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        mark(device)
        yield
        mark(device)

    one_pass = record(lambda: run(around))
    torch.cuda.synchronize(device)
    owners = len(capture.owners)
    for _ in range(2):  # the first profile of this kind after one of another kind sees nothing
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(passes):
                one_pass()
            torch.cuda.synchronize(device)
        between = kernels_between_marks(profile.events() or [])
        if len(between) == 2 * owners * passes:
            return told_apart(between, owners)
    return {}, 0.0


def told_apart(between: Sequence[Sequence[Any]], owners: int) -> tuple[dict[int, list[float]], float]:
    """Kernels between marks to calls: per call its time in each pass (us), and the share of all that found a call."""
    seen: dict[int, list[float]] = defaultdict(list)
    whole_us = 0.0
    for position, kernels in enumerate(between):
        time_us = _covered_us((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
        whole_us += time_us
        if kernels and position % 2 == 0:  # else it lies behind a call, and before the next
            seen[position // 2 % owners].append(time_us)
    return seen, sum(map(sum, seen.values())) / whole_us if whole_us else 0.0


def kernels_of_calls(run: Run, capture: Capture, device: torch.device) -> dict[str, Counter[str]]:
    """The kernels that the first call of each tuple launches in the running model, by tuple id. Needs a GPU."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for placed in _placed(_profiled(run, device, passes=1)):
        found[placed.number].update(name for name, *_ in placed.kernels)
    named: dict[str, Counter[str]] = {}
    for number, index in enumerate(capture.owners):
        if index is not None:
            named.setdefault(capture.calls[index].tuple_id, found[number])
    return named


def _profiled(run: Run, device: torch.device, passes: int) -> list[Any]:
    def around(number: int) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{RANGE}{number}")

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(passes):
            run(around)
            torch.cuda.synchronize(device)
    return list(profile.events() or [])


def attribute(events: Sequence[Any]) -> tuple[dict[int, list[float]], float]:
    """Kernels to the calls that launched them: per call its time in each pass (us), and the share that found a call."""
    seen: dict[int, list[float]] = defaultdict(list)
    for placed in _placed(events):
        if placed.kernels:  # a view has none; of another call nothing is known
            seen[placed.number].append(placed.time_us)
    whole_us = _covered_us((event.time_range.start, event.time_range.end) for event in events if is_kernel(event))
    # At their edges calls may overlap: a kernel starts while the one before it ends.
    return seen, min(1.0, sum(map(sum, seen.values())) / whole_us) if whole_us else 0.0


@dataclass
class _Placed:
    """One call's range on the host, and the kernels that were launched in it: name, begin and end in us."""

    number: int
    begin_us: float
    end_us: float
    kernels: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def time_us(self) -> float:
        """What the card was busy with them: kernels may overlap (cuDNN runs groups of a convolution side by side)."""
        return _covered_us((begin_us, end_us) for _, begin_us, end_us in self.kernels)


def _covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans of time."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _placed(events: Sequence[Any]) -> list[_Placed]:
    """Every call's range in order, with its kernels, placed in that of two ways which finds more of them.

    By the launch: a kernel bears the number of the driver's function that launched it, which ran within the range.
    By the link: the profiler ties a kernel to the operator around its launch, which lies below the range. The first
    compares the driver's clock with the host's, the second needs an operator of PyTorch's own around the launch.
    """
    by_launch, by_link = _by_launch(events), _by_link(events)
    return max(by_launch, by_link, key=lambda placed: sum(one.time_us for one in placed))


def _ranges(events: Sequence[Any]) -> dict[int, _Placed]:
    """The ranges by the identity of their event, in order."""
    found = [event for event in events if _is_range(event)]
    found.sort(key=lambda event: event.time_range.start)
    return {
        id(event): _Placed(int(event.name[len(RANGE) :]), event.time_range.start, event.time_range.end)
        for event in found
    }


def _is_range(event: Any) -> bool:
    return event.name.startswith(RANGE) and event.device_type == torch.autograd.DeviceType.CPU


def _by_launch(events: Sequence[Any]) -> list[_Placed]:
    ranges = list(_ranges(events).values())  # only one call owns the slot at a time: they do not overlap
    starts = [one.begin_us for one in ranges]
    launched = {
        event.id: event.time_range.start
        for event in events
        if event.device_type == torch.autograd.DeviceType.CPU and event.name.startswith(LAUNCHES)
    }
    for event in events:
        if not is_kernel(event) or (moment := launched.get(event.id)) is None:
            continue
        position = bisect.bisect_right(starts, moment) - 1
        if position >= 0 and moment <= ranges[position].end_us:
            ranges[position].kernels.append((event.name, event.time_range.start, event.time_range.end))
    return ranges


def _by_link(events: Sequence[Any]) -> list[_Placed]:
    ranges = _ranges(events)
    for event in events:
        above = event
        while above is not None and not _is_range(above):
            above = above.cpu_parent
        if above is None or id(above) not in ranges:
            continue
        for kernel in event.kernels:
            if not kernel.name.startswith(("Mem", RANGE)):
                # Only its duration is linked: one behind the other.
                kernels = ranges[id(above)].kernels
                begin_us = kernels[-1][2] if kernels else 0.0
                kernels.append((kernel.name, begin_us, begin_us + float(kernel.duration)))
    return list(ranges.values())
