"""Verification of a variant on a card: which tuples does it have there, which kernels, and how long does each call take?

The list made at submit time is a prediction: it comes from fake tensors on a CPU. On the card the model is captured once more
and compared with an unobserved pass. The farm measures the tuples that differ in a further round. The findings include the
kernels of the unobserved pass, the kernels of each rebuilt tuple, and the time of each call in the running model.

All of this comes from the run that is measured. If that is the replay of a CUDA graph, the operators are those called
during graph capture, and the kernels are those of a replay: a model may ask whether it is being captured, and run
something else. The findings name what an eager pass runs differently.

Time of a call in the model, on a GPU: the time that its kernels take, without the gaps between kernels. For an eager pass,
PyTorch's profiler knows the range of each call, and a kernel belongs to the call in whose range it was launched. A replayed
graph has no ranges: a marking kernel stands before and after each call. On a CPU the time of a call is that of its range. In
all cases it is the median over a few passes; there is no energy per call.

The profiler slows down the process that has used it: see `farm.benchmark_process.client`.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark.cuda_graph import capture_graph, one_stream
from farm.benchmark.passes import build_variant, grad_mode, numeric_flags
from farm.benchmark.workload import why_it_raised
from farm.errors import CaptureError, FarmError, Unmeasurable
from farm.operators.profiler import RANGE, is_kernel, kernels_between_marks, mark
from farm.types.label import label_of
from farm.types.protocol import Protocol, Subject, Variant
from farm.types.reading import Eagerly, InModelTimes, Launches, OtherCalls, Verification

if TYPE_CHECKING:
    from farm.operators.captured import Capture
    from farm.operators.profiler import Record, WatchedPass

_log = logging.getLogger(__name__)

KEPT_DIFFERENCES = 50
KEPT_KERNELS = 400
NUMERICS = ("tf32", "cudnn_benchmark", "cudnn_deterministic")  # which kernels run depends on these


def verify(
    subject: Subject,
    protocol: Protocol,
    device: torch.device,
    predicted: Mapping[str, int] | None,
    record: Record | None = None,
) -> tuple[dict[str, Any] | None, Verification]:
    """Capture a variant on the card as it is launched when it is measured, and compare.

    Args:
        record: how the run that is measured is made; without it, a CUDA graph where the protocol launches one.

    Returns:
        The observed capture as JSON where it differs from the prediction (or there is none), else None; and the
        findings.

    Raises:
        Unmeasurable: the model does not fit on the card, or raised there.
    """
    if device.type == "cuda":
        one_stream(device)
    if record is None and device.type == "cuda" and protocol.launch == "graph":
        record = functools.partial(_as_graph, device=device)
    variant, not_captured, timed = Variant.from_json(subject.spec), "", None
    try:
        with numeric_flags(protocol):
            look = _look_at_step if variant.step else _look_at_pass
            held, time = look(variant, protocol, device)
            try:
                found = held(record)
            except NotCaptured as error:
                record, not_captured = None, str(error)  # what it runs eagerly is told all the same
                found = held(None)
            timed = time(found.capture, record)
            tuple_kernels = _tuple_kernels(found.capture, protocol, device, record or (lambda run: run))
    except CaptureError as error:
        raise Unmeasurable("raised", error.message, error.next_step) from error
    except FarmError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise why_it_raised(error) from error
    seen = Counter(found.capture.counts)
    expected = Counter(predicted or {})
    missing, unexpected = expected - seen, seen - expected
    matches = predicted is not None and not missing and not unexpected
    differences = [f"observing changes what runs: {text}" for text in found.differences]
    if predicted is not None:
        differences += [f"predicted, not seen on the card: {count}x {tuple_id}" for tuple_id, count in missing.items()]
        differences += [
            f"seen on the card, not predicted: {count}x {label_of(found.capture.tuples[tuple_id])}"
            for tuple_id, count in unexpected.items()
        ]
    differences += [f"gap: {text}" for text in found.capture.gaps]
    differences += [f"overlap: {text}" for text in found.capture.overlaps]
    findings = Verification(
        launch="graph" if record is not None else "eager",
        not_captured=not_captured or None,
        eagerly=_eagerly(found),
        matches=matches and not found.differences,
        observer_effect=tuple(found.differences)[:KEPT_DIFFERENCES],
        missing=dict(missing) if predicted is not None else {},
        unexpected=dict(unexpected) if predicted is not None else {},
        gaps=tuple(found.capture.gaps)[:KEPT_DIFFERENCES],
        overlaps=tuple(found.capture.overlaps)[:KEPT_DIFFERENCES],
        unobserved_kernels=sum(found.unobserved.values()),
        kernels={
            name: Launches(found.unobserved[name], round(time_us, 3))
            for name, time_us in found.unobserved_times_us.most_common(KEPT_KERNELS)
        },
        tuple_kernels=tuple_kernels,
        in_model=timed.by_tuple(found.capture) if timed else None,
        numerics={name: getattr(protocol, name) for name in NUMERICS},
        differences=tuple(differences[:KEPT_DIFFERENCES]),
        difference_count=len(differences),
    )
    return None if matches else capture_json(found.capture), findings


#: Holds an observed run against one that nobody observes, and times the calls of what was seen.
_Look = tuple[Callable[["Record | None"], "WatchedPass"], Callable[["Capture", "Record | None"], "InModel | None"]]


def _look_at_pass(variant: Variant, protocol: Protocol, device: torch.device) -> _Look:
    from farm.operators.capture import run_with_owners
    from farm.operators.profiler import verify_on_device

    model, arguments = build_variant(variant, device, hand_over=True)

    def timed(around: Callable[[int], contextlib.AbstractContextManager[Any]]) -> None:
        run_with_owners(model, arguments, device_type=device.type, grad_enabled=protocol.grad, around=around)

    return (
        lambda record: verify_on_device(model, arguments, device, grad_enabled=protocol.grad, record=record),
        lambda seen, record: time_in_model(timed, seen, device, record=record),
    )


def _look_at_step(variant: Variant, protocol: Protocol, device: torch.device) -> _Look:
    from farm.operators.profiler import compare_with_unwatched
    from farm.training.capture import capture_step
    from farm.training.extract import build_step

    with torch.enable_grad():
        step = build_step(variant, device, launch=protocol.launch)

    def observe() -> Capture:
        return capture_step(step, device_type=device.type, warmed_up=True)

    def plainly() -> None:
        step.count_from_one()
        step.run()

    def timed(around: Callable[[int], contextlib.AbstractContextManager[Any]]) -> None:
        with torch.enable_grad():
            capture_step(step, device_type=device.type, warmed_up=True, around=around)

    return (
        lambda record: compare_with_unwatched(plainly, observe, device, grad_enabled=True, record=record),
        lambda seen, record: time_in_model(timed, seen, device, record=record),
    )


class NotCaptured(Exception):
    """No CUDA graph can be made of a run."""


def _as_graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    try:
        return capture_graph([run], device).replay
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, CaptureError) as error:
        raise NotCaptured(str(error).split("\n")[0][:300]) from error


def _eagerly(found: WatchedPass) -> Eagerly | None:
    """What an eager pass runs otherwise than the one that is measured; None where it runs the same."""
    if found.eager is None:
        return None
    launched, eager = found.capture.counts, found.eager.capture.counts
    specs = {**found.eager.capture.tuples, **found.capture.tuples}
    kernels = sorted(found.unobserved.keys() | found.eager.unobserved.keys())
    apart = {name: (found.unobserved[name], found.eager.unobserved[name]) for name in kernels}
    return Eagerly(
        operators=tuple(
            OtherCalls(tuple_id, label_of(specs[tuple_id]), launched.get(tuple_id, 0), eager.get(tuple_id, 0))
            for tuple_id in specs
            if launched.get(tuple_id, 0) != eager.get(tuple_id, 0)
        ),
        kernels=dict([(name, counts) for name, counts in apart.items() if counts[0] != counts[1]][:KEPT_KERNELS]),
        kernel_time_us=round(sum(found.unobserved_times_us.values()), 3),
        eager_kernel_time_us=round(sum(found.eager.unobserved_times_us.values()), 3),
    )


def _tuple_kernels(
    capture: Capture, protocol: Protocol, device: torch.device, record: Record
) -> dict[str, dict[str, int]]:
    """The kernels that one pass of each rebuilt tuple launches, where the device has any. What fails is left out.

    All tuples run in one profile, between marks: to begin a profile and to end it takes longer than a tuple.
    """
    from farm.operators.profiler import kernels_between_marks, mark
    from farm.operators.rebuild import rebuild

    if device.type != "cuda":
        return {}
    for _ in range(2):  # the first profile of this kind after one of another kind sees nothing
        marked: list[str | None] = []
        with grad_mode(protocol), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for tuple_id, spec in capture.tuples.items():
                try:
                    rebuilt = rebuild(spec, device)
                    rebuilt.run()  # what libraries do once does not count
                    launched = record(rebuilt.run)
                    torch.cuda.synchronize(device)
                except Exception:  # its own item will say why
                    _log.debug("The kernels of %s were not seen", label_of(spec), exc_info=True)
                    continue
                mark(device)
                launched()
                mark(device)
                torch.cuda.synchronize(device)
                marked += [tuple_id, None]  # what runs behind the second mark belongs to none
        between = kernels_between_marks(profile.events() or [])
        if len(between) == len(marked):
            return {
                tuple_id: dict(Counter(kernel.name for kernel in kernels).most_common())
                for tuple_id, kernels in zip(marked, between, strict=True)
                if tuple_id is not None
            }
    return {}


def capture_json(capture: Capture) -> dict[str, Any]:
    """A capture as plain JSON: `tuples` (id -> tuple), `costs` (id -> flops, bytes), `calls` (index, module_path,
    tuple_id, reads, writes; of a step part and owner) in order, `storages` (size_bytes, role), and what it was captured under."""
    from farm.operators.captured import role_in_tuple
    from farm.operators.cost import cost

    costs = {tuple_id: cost(spec) for tuple_id, spec in capture.tuples.items()}
    return {
        "tuples": {tuple_id: spec.to_json() for tuple_id, spec in capture.tuples.items()},
        "costs": {tuple_id: {"flops": one.flops, "bytes": one.bytes} for tuple_id, one in costs.items()},
        "calls": [
            {
                "index": call.index,
                "module_path": call.module_path,
                "tuple_id": call.tuple_id,
                "reads": list(call.reads),
                "writes": list(call.writes),
                **({"part": call.part, "owner": call.owner} if call.part else {}),
            }
            for call in capture.calls
        ],
        "storages": [{"size_bytes": one.size_bytes, "role": role_in_tuple(one.role)} for one in capture.tensors],
        "gaps": list(capture.gaps),
        "overlaps": list(capture.overlaps),
        "device_type": capture.device_type,
        "grad_enabled": capture.grad_enabled,
        "training": capture.training,
    }


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
        run: one pass, with what is given around whatever has an entry in ``capture.slots``, by its number there.
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
    for number, index in enumerate(capture.slots):
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
    owners = len(capture.slots)
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
    for number, index in enumerate(capture.slots):
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
