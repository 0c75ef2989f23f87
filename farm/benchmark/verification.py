"""Verification of a variant on a card: which tuples does it have there, which kernels, and how long does each call
take?

The list made at submit time is a prediction: it comes from fake tensors on a CPU. On the card the model is captured
once more and compared with an unobserved pass. The farm measures the tuples that differ in a further round. The
findings include the kernels of the unobserved pass, the kernels of each rebuilt tuple, and the time of each call in the
running model.

All of this comes from the run that is measured. If that is the replay of a CUDA graph, the operators are those called
during graph capture, and the kernels are those of a replay: a model may ask whether it is being captured, and run
something else. The findings name what an eager pass runs differently.

Time of a call in the model, on a GPU: the time that its kernels take, without the gaps between kernels. For an eager
pass, PyTorch's profiler knows the range of each call, and a kernel belongs to the call in whose range it was launched.
A replayed graph has no ranges: a marking kernel stands before and after each call. On a CPU the time of a call is that
of its range. In all cases it is the median over a few passes; there is no energy per call.

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
    from farm.operators.captured import CapturedPass
    from farm.operators.profiler import Record, WatchedPass

_log = logging.getLogger(__name__)

KEPT_DIFFERENCES = 50
KEPT_KERNELS = 400
NUMERICS = ("tf32", "cudnn_benchmark", "cudnn_deterministic")  # they decide which kernels run
PASSES = 3  # for the times of calls
LAUNCHES = ("cuda", "cu", "hip")  # prefixes of the driver's functions that launch work on a card

#: One pass of the observed run; its argument makes a context around each slot of the capture, by the slot's number.
ObservedRun = Callable[[Callable[[int], contextlib.AbstractContextManager[Any]]], object]


def verify(
    subject: Subject,
    protocol: Protocol,
    device: torch.device,
    predicted: Mapping[str, int] | None,
    record: Record | None = None,
) -> tuple[dict[str, Any] | None, Verification]:
    """Capture a variant on the card, launched as it is measured, and compare it with the prediction.

    Args:
        predicted: tuple id -> calls; None: there is no prediction.
        record: makes the run that is measured; the default is a CUDA graph if the protocol launches graphs.

    Returns:
        The observed capture as JSON if it differs from the prediction or there is none, else None; and the findings.

    Raises:
        Unmeasurable: the model does not fit on the card, or raised there.
    """
    one_stream(device)
    if record is None and device.type == "cuda" and protocol.launch == "graph":
        record = functools.partial(_as_graph, device=device)
    variant, not_captured, timed = Variant.from_json(subject.spec), "", None
    try:
        with numeric_flags(protocol):
            observe = _observe_step if variant.step else _observe_pass
            compare, time_calls = observe(variant, protocol, device)
            try:
                found = compare(record)
            except NotCaptured as error:
                record, not_captured = None, str(error)  # verify the eager pass instead
                found = compare(None)
            timed = time_calls(found.capture, record)
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


#: Compares an observed run with an unobserved one; times the calls of the observed capture.
_Observation = tuple[
    Callable[["Record | None"], "WatchedPass"], Callable[["CapturedPass", "Record | None"], "InModel | None"]
]


def _observe_pass(variant: Variant, protocol: Protocol, device: torch.device) -> _Observation:
    from farm.operators.capture import run_with_owners
    from farm.operators.profiler import verify_on_device

    model, arguments = build_variant(variant, device, hand_over=True)

    def timed(around: Callable[[int], contextlib.AbstractContextManager[Any]]) -> None:
        run_with_owners(model, arguments, device_type=device.type, grad_enabled=protocol.grad, around=around)

    return (
        lambda record: verify_on_device(model, arguments, device, grad_enabled=protocol.grad, record=record),
        lambda seen, record: time_in_model(timed, seen, device, record=record),
    )


def _observe_step(variant: Variant, protocol: Protocol, device: torch.device) -> _Observation:
    from farm.operators.profiler import compare_with_unwatched
    from farm.training.capture import capture_step
    from farm.training.extract import build_step

    with torch.enable_grad():
        step = build_step(variant, device, launch=protocol.launch)

    def observe() -> CapturedPass:
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
    """A run cannot be captured as a CUDA graph."""


def _as_graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    try:
        return capture_graph([run], device).replay
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, CaptureError) as error:
        raise NotCaptured(str(error).split("\n")[0][:300]) from error


def _eagerly(found: WatchedPass) -> Eagerly | None:
    """How an eager pass differs from the measured one; None if it does not."""
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
    capture: CapturedPass, protocol: Protocol, device: torch.device, record: Record
) -> dict[str, dict[str, int]]:
    """The kernels that one pass of each rebuilt tuple launches, on a GPU: tuple id -> kernel -> launches. Failures are
    left out.

    All tuples run in one profile, between marks: starting and ending a profile takes longer than a tuple.
    """
    from farm.operators.rebuild import rebuild

    if device.type != "cuda":
        return {}
    for _ in range(2):  # the first profile after one of another kind is empty
        marked: list[str | None] = []
        with grad_mode(protocol), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for tuple_id, spec in capture.tuples.items():
                try:
                    rebuilt = rebuild(spec, device)
                    rebuilt.run()  # libraries initialize in the first run
                    launched = record(rebuilt.run)
                    torch.cuda.synchronize(device)
                except Exception:  # the tuple's own item reports the error
                    _log.debug("The kernels of %s are unknown", label_of(spec), exc_info=True)
                    continue
                mark(device)
                launched()
                mark(device)
                torch.cuda.synchronize(device)
                marked += [tuple_id, None]  # work after the second mark belongs to no tuple
        between = kernels_between_marks(profile.events() or [])
        if len(between) == len(marked):
            return {
                tuple_id: dict(Counter(kernel.name for kernel in kernels).most_common())
                for tuple_id, kernels in zip(marked, between, strict=True)
                if tuple_id is not None
            }
    return {}


def capture_json(capture: CapturedPass) -> dict[str, Any]:
    """A capture as plain JSON: `tuples` (id -> tuple), `costs` (id -> flops, bytes), `calls` (index, module_path,
    tuple_id, reads, writes; for a step, part and owner) in order, `storages` (size_bytes, role), and the modes during
    the capture."""
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


# ------------------------------------------------------------------------------------------ times of calls in the model


@dataclass(frozen=True)
class InModel:
    """Times of the calls of one capture in the running model.

    Attributes:
        times_us: for each call, in the capture's order; None if its kernels are unknown.
        source: ``kernels`` or ``ranges``.
        attributed_share: the share of the kernels' time that belongs to a call; 1.0 for ranges.
    """

    times_us: tuple[float | None, ...]
    source: str
    passes: int
    attributed_share: float

    def by_tuple(self, capture: CapturedPass) -> InModelTimes:
        """The times by tuple, as they are stored."""
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
    run: ObservedRun, capture: CapturedPass, device: torch.device, *, passes: int = PASSES, record: Record | None = None
) -> InModel:
    """Time the calls of a capture in passes of its model or step, which must be warm and run the same calls each time.

    Args:
        run: one pass, with a context around each of ``capture.slots``.
        record: makes the run that is measured, as in `farm.operators.profiler.verify_on_device`.
    """
    source = "kernels" if device.type == "cuda" else "ranges"
    if device.type != "cuda":
        seen, attributed = _by_clock(run, passes, record or (lambda run: run)), 1.0
    elif record is not None:
        seen, attributed = _by_marks(run, capture, device, passes, record)
    else:
        seen, attributed = attribute(_profiled(run, device, passes))
    times: list[float | None] = [None] * len(capture.calls)
    for number, index in enumerate(capture.slots):
        if index is not None and number in seen:
            times[index] = statistics.median(seen[number])
    return InModel(tuple(times), source, passes, attributed)


def _by_clock(run: ObservedRun, passes: int, record: Record) -> dict[int, list[float]]:
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
    run: ObservedRun, capture: CapturedPass, device: torch.device, passes: int, record: Record
) -> tuple[dict[int, list[float]], float]:
    """Times in a replayed graph, with a mark before and after each call: only the order of the kernels assigns them."""

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        mark(device)
        yield
        mark(device)

    one_pass = record(lambda: run(around))
    torch.cuda.synchronize(device)
    owners = len(capture.slots)
    for _ in range(2):  # the first profile after one of another kind is empty
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(passes):
                one_pass()
            torch.cuda.synchronize(device)
        between = kernels_between_marks(profile.events() or [])
        if len(between) == 2 * owners * passes:
            return attribute_marked(between, owners)
    return {}, 0.0


def attribute_marked(between: Sequence[Sequence[Any]], owners: int) -> tuple[dict[int, list[float]], float]:
    """Assign kernels between marks to calls: the time of each call in each pass (us), and the share of time that has a
    call."""
    seen: dict[int, list[float]] = defaultdict(list)
    total_us = 0.0
    for position, kernels in enumerate(between):
        time_us = _covered_us((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
        total_us += time_us
        if kernels and position % 2 == 0:  # odd positions are between two calls
            seen[position // 2 % owners].append(time_us)
    return seen, sum(map(sum, seen.values())) / total_us if total_us else 0.0


def kernels_of_calls(run: ObservedRun, capture: CapturedPass, device: torch.device) -> dict[str, Counter[str]]:
    """The kernels that the first call of each tuple launches in the running model, by tuple id; on a GPU."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for one in _kernels_by_call(_profiled(run, device, passes=1)):
        found[one.number].update(name for name, *_ in one.kernels)
    named: dict[str, Counter[str]] = {}
    for number, index in enumerate(capture.slots):
        if index is not None:
            named.setdefault(capture.calls[index].tuple_id, found[number])
    return named


def _profiled(run: ObservedRun, device: torch.device, passes: int) -> list[Any]:
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
    """Assign kernels to the calls that launched them: the time of each call in each pass (us), and the share that has a
    call."""
    seen: dict[int, list[float]] = defaultdict(list)
    for one in _kernels_by_call(events):
        if one.kernels:  # a view has none; the time of any other call is unknown
            seen[one.number].append(one.time_us)
    total_us = _covered_us((event.time_range.start, event.time_range.end) for event in events if is_kernel(event))
    # Calls may overlap at their edges: a kernel starts while the one before it ends.
    return seen, min(1.0, sum(map(sum, seen.values())) / total_us) if total_us else 0.0


@dataclass
class _CallKernels:
    """One call's range on the host, and the kernels launched in it: name, begin and end in us."""

    number: int
    begin_us: float
    end_us: float
    kernels: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def time_us(self) -> float:
        """Time in which at least one of them ran: kernels may overlap (cuDNN runs groups of a convolution in
        parallel)."""
        return _covered_us((begin_us, end_us) for _, begin_us, end_us in self.kernels)


def _covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _kernels_by_call(events: Sequence[Any]) -> list[_CallKernels]:
    """The ranges of all calls in order, with their kernels, by the one of two ways that finds more kernel time.

    By launch: a kernel has the number of the driver's function that launched it, which ran within the range. That
    compares the driver's clock with the host's. By link: the profiler links a kernel to the operator around its launch,
    which is below the range. That needs an operator of PyTorch around the launch.
    """
    return max(_by_launch(events), _by_link(events), key=lambda calls: sum(one.time_us for one in calls))


def _ranges(events: Sequence[Any]) -> dict[int, _CallKernels]:
    """The ranges by the id of their event, in order."""
    found = [event for event in events if _is_range(event)]
    found.sort(key=lambda event: event.time_range.start)
    return {
        id(event): _CallKernels(int(event.name[len(RANGE) :]), event.time_range.start, event.time_range.end)
        for event in found
    }


def _is_range(event: Any) -> bool:
    return event.name.startswith(RANGE) and event.device_type == torch.autograd.DeviceType.CPU


def _by_launch(events: Sequence[Any]) -> list[_CallKernels]:
    ranges = list(_ranges(events).values())  # they do not overlap: one call at a time owns the slot
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


def _by_link(events: Sequence[Any]) -> list[_CallKernels]:
    ranges = _ranges(events)
    for event in events:
        above = event
        while above is not None and not _is_range(above):
            above = above.cpu_parent
        if above is None or id(above) not in ranges:
            continue
        for kernel in event.kernels:
            if not kernel.name.startswith(("Mem", RANGE)):
                # The link has only durations: line the kernels up.
                kernels = ranges[id(above)].kernels
                begin_us = kernels[-1][2] if kernels else 0.0
                kernels.append((kernel.name, begin_us, begin_us + float(kernel.duration)))
    return list(ranges.values())
