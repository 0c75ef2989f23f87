"""Verify a variant on a card: compare its tuples with the prediction, list its kernels, time each
call in the model.

The farm predicts the tuples at submit time, with fake tensors on a CPU. On the card, the
verification captures the model again and compares the capture with an unobserved pass. The farm
measures tuples that differ in another round.

All findings come from the same kind of run as the measurement. If it replays a CUDA graph, the
operators are those called during graph capture, and the kernels are those of a replay: a model may
query whether a graph capture is running, and then call other operators. The findings list the
differences from an eager pass.

On a GPU the time of a call is the time of its kernels, without pauses between them. In an eager
pass, PyTorch's profiler says in which call's range a kernel was launched. A replayed graph has no
ranges, so a marking kernel runs before and after each call. On a CPU the time of a call is the time
of its range. Times are medians of a few passes.

The profiler slows down the process that has used it: see `farm.benchmark_process.client`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gc
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from farm.benchmark import ranks
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import numeric_flags
from farm.benchmark.subjects import kind_of_variant
from farm.benchmark.subjects.model_variant import ObservedRun
from farm.benchmark.torch_device import capture_graph, one_stream
from farm.benchmark.workload import why_it_raised
from farm.errors import CaptureError, FarmError, Unmeasurable, error_text
from farm.operators import profiler, self_check
from farm.operators.captured import CapturedCall, CapturedPass
from farm.operators.cost import costs_of
from farm.operators.fake_outputs import as_computed
from farm.operators.profiler import (
    RANGE,
    Record,
    WatchedPass,
    is_kernel,
    mark,
)
from farm.operators.rebuild import rebuild
from farm.subjects.label import label_of
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.verification import Eagerly, InModelTimes, Launches, OtherCalls, Verification

_log = logging.getLogger(__name__)

KEPT_DIFFERENCES = 50
KEPT_KERNELS = 400
PASSES = 3  # passes in which calls are timed
LAUNCHES = ("cuda", "cu", "hip")  # name prefixes of the functions that launch work on a card


def verify(
    subject: Subject,
    protocol: Protocol,
    device: torch.device,
    predicted: Mapping[str, int] | None,
    record: Record | None = None,
) -> Verification:
    """Capture a variant on the card, launched in the same way as for a measurement, and compare it
    with the prediction.

    Args:
        predicted: id of a tuple without values that decide its work -> number of calls; None: there
            is no prediction.
        record: makes the measured run from a function; by default a CUDA graph if the protocol
            launches graphs.

    Returns:
        The findings. `Verification.observed` is None if the capture equals the prediction and no
        values decide the work of its calls.

    Raises:
        Unmeasurable: the model does not fit on the card, or raised there.
    """
    one_stream(device)
    kind, not_captured = kind_of_variant(subject.variant), None
    if record is None and device.type == "cuda" and protocol.launch == "graph":
        record = functools.partial(_as_graph, device=device, waits=kind.has_host_steps)
    with _errors_of_model(), numeric_flags(protocol):
        if ranks.world() > 1:
            return _verify_rank(subject, protocol, device, predicted or {})
        observation = kind.observation(subject, protocol, device)
        try:
            watched = observation.compare(record=record)
        except NotCaptured as error:
            record, not_captured = None, error_text(error)  # verify the eager pass instead
            watched = observation.compare()
        in_model = time_in_model(observation.run, watched.capture, device, record=record)
        watched = _checked(watched, predicted or {}, device)
        tuple_kernels = _tuple_kernels(
            watched.capture, protocol, device, record or (lambda run: run)
        )
    findings = dataclasses.replace(
        _compared(watched, predicted),
        launch="graph" if record is not None else "eager",
        not_captured=not_captured,
        tuple_kernels=tuple_kernels,
        mismatches=watched.capture.mismatches or None,
        in_model=in_model,
        numerics={  # settings that decide which kernels run
            "tf32": protocol.tf32,
            "cudnn_benchmark": protocol.cudnn_benchmark,
            "cudnn_deterministic": protocol.cudnn_deterministic,
        },
    )
    as_predicted = predicted is not None and not (findings.missing or findings.unexpected)
    if as_predicted and not _has_deciding_values(watched.capture):
        return findings
    observed = {**capture_json(watched.capture), **kind.facts(subject, device)}
    return dataclasses.replace(findings, observed=observed)


@contextlib.contextmanager
def _errors_of_model() -> Iterator[None]:
    """Raise any error of a model as `Unmeasurable`."""
    try:
        yield
    except CaptureError as error:
        raise Unmeasurable("raised", error.message, error.next_step) from error
    except FarmError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise why_it_raised(error) from error


def _has_deciding_values(capture: CapturedPass) -> bool:
    """True if values decide the work of a call."""
    return any(spec.without_values is not spec for spec in capture.tuples.values())


def _checked(
    watched: WatchedPass, predicted: Mapping[str, int], device: torch.device
) -> WatchedPass:
    """Check the captured tuples on this device. A CPU runs what was predicted, so only others are
    checked there.
    """
    corrected = functools.partial(as_computed, on_card=False)
    known = predicted if device.type == "cpu" else ()
    check = functools.partial(self_check.checked_on, device, corrected=corrected, known=known)
    eager = watched.eager and dataclasses.replace(
        watched.eager, capture=check(watched.eager.capture)
    )
    return dataclasses.replace(watched, capture=check(watched.capture), eager=eager)


def _verify_rank(
    subject: Subject, protocol: Protocol, device: torch.device, predicted: Mapping[str, int]
) -> Verification:
    """Compare the operators of this rank's part with the prediction.

    The profiler is not used, because it would slow down the next measurements of the ranks.
    """
    variant = subject.variant
    capture = kind_of_variant(variant).capture_rank(variant, protocol, device)
    gc.collect()  # a split model refers to itself; the measurement needs its memory
    findings = _compared(WatchedPass(capture, Counter(), Counter(), Counter(), []), predicted)
    launch = protocol.launch if device.type == "cuda" else "eager"
    findings = dataclasses.replace(findings, launch=launch, unobserved_kernels=None, kernels=None)
    if findings.matches and not _has_deciding_values(capture):
        return findings
    return dataclasses.replace(findings, observed=capture_json(capture))


def _compared(watched: WatchedPass, predicted: Mapping[str, int] | None) -> Verification:
    """Compare the observed pass with the prediction and with unobserved passes.

    Values that decide the work of a call are not compared: a prediction may not have them.
    """
    capture = watched.capture
    plain = {spec.without_values.id: spec.without_values for spec in capture.tuples.values()}
    observed_calls = Counter(
        capture.tuples[call.tuple_id].without_values.id for call in capture.calls
    )
    expected = observed_calls if predicted is None else Counter(predicted)
    missing, unexpected = expected - observed_calls, observed_calls - expected
    differences = [
        *(
            f"capturing the pass changes its kernel launches: {text}"
            for text in watched.differences
        ),
        *(
            f"predicted, but not run on the card: {count}x {tuple_id}"
            for tuple_id, count in missing.items()
        ),
        *(
            f"run on the card, but not predicted: {count}x {label_of(plain[tuple_id])}"
            for tuple_id, count in unexpected.items()
        ),
        *(f"gap: {text}" for text in capture.gaps),
        *(f"overlap: {text}" for text in capture.overlaps),
    ]
    return Verification(
        eagerly=_eagerly(watched),
        matches=predicted is not None and not (missing or unexpected or watched.differences),
        observer_effect=tuple(watched.differences)[:KEPT_DIFFERENCES],
        missing=dict(missing),
        unexpected=dict(unexpected),
        gaps=capture.gaps[:KEPT_DIFFERENCES],
        overlaps=capture.overlaps[:KEPT_DIFFERENCES],
        unobserved_kernels=sum(watched.unobserved.values()),
        kernels={
            name: Launches(watched.unobserved[name], round(time_us, 3))
            for name, time_us in watched.unobserved_times_us.most_common(KEPT_KERNELS)
        },
        differences=tuple(differences[:KEPT_DIFFERENCES]),
        difference_count=len(differences),
    )


class NotCaptured(Exception):
    """Raised if a run cannot be captured as a CUDA graph."""


def _as_graph(run: Callable[[], object], device: torch.device, waits: bool) -> Callable[[], object]:
    """``waits``: the run may have host steps."""
    try:
        steps = HostSteps.of(run, device) if waits else HostSteps(device)
        graph = capture_graph([steps.around(run)], device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, CaptureError, Unmeasurable) as error:
        raise NotCaptured(error_text(error).split("\n")[0][:300]) from error

    def replay(kept: HostSteps = steps) -> None:
        """Replay the graph. `kept` owns the memory of the values that the graph reads."""
        graph.replay()

    return replay


def _eagerly(watched: WatchedPass) -> Eagerly | None:
    """The differences between an eager pass and the measured run; None if there was no separate
    eager pass.
    """
    if watched.eager is None:
        return None
    launched, eager = watched.capture.counts, watched.eager.capture.counts
    specs = {**watched.eager.capture.tuples, **watched.capture.tuples}
    kernels = sorted(watched.unobserved.keys() | watched.eager.unobserved.keys())
    apart = {name: (watched.unobserved[name], watched.eager.unobserved[name]) for name in kernels}
    return Eagerly(
        operators=tuple(
            OtherCalls(
                tuple_id,
                label_of(specs[tuple_id]),
                launched.get(tuple_id, 0),
                eager.get(tuple_id, 0),
            )
            for tuple_id in specs
            if launched.get(tuple_id, 0) != eager.get(tuple_id, 0)
        ),
        kernels=dict(
            [(name, counts) for name, counts in apart.items() if counts[0] != counts[1]][
                :KEPT_KERNELS
            ]
        ),
        kernel_time_us=round(sum(watched.unobserved_times_us.values()), 3),
        eager_kernel_time_us=round(sum(watched.eager.unobserved_times_us.values()), 3),
    )


def _tuple_kernels(
    capture: CapturedPass, protocol: Protocol, device: torch.device, record: Record
) -> dict[str, dict[str, int]]:
    """The kernels of one pass of each rebuilt tuple: tuple id -> kernel -> launches. {} on a CPU.

    Tuples that fail are missing. One profile covers all tuples, since its start and end take longer
    than a tuple."""
    if device.type != "cuda":
        return {}
    marked: list[str] = []

    def launch() -> int:
        marked.clear()
        for tuple_id, spec in capture.tuples.items():
            try:
                rebuilt = rebuild(spec, device)
                rebuilt.run()  # libraries initialize in the first run
                launched = record(rebuilt.run)
                torch.cuda.synchronize(device)
            except Exception:  # the tuple's own item reports the error
                _log.debug("The kernels of %s could not be recorded", label_of(spec), exc_info=True)
                continue
            mark(device)
            launched()
            mark(device)
            torch.cuda.synchronize(device)
            marked.append(tuple_id)
        return 2 * len(marked)

    with torch.set_grad_enabled(protocol.grad):
        between = _between_marks(launch)
    # Work after the second mark belongs to no tuple.
    return {
        tuple_id: dict(Counter(kernel.name for kernel in kernels).most_common())
        for tuple_id, kernels in zip(marked, between[::2], strict=False)
    }


def _between_marks(launch: Callable[[], int]) -> list[list[Any]]:
    """Profile `launch`, which launches kernels with marks between them and returns the number of
    marks. Return the kernels between each two consecutive marks; [] if the profiler loses a
    mark."""
    for _ in range(2):  # the first profile after a profile with other activities is empty
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            marks = launch()
        between = profiler.kernels_between_marks(profile.events() or [])
        if len(between) == marks:
            return between
    return []


def capture_json(capture: CapturedPass) -> dict[str, Any]:
    """The part of a capture that `farm.store.captures.store_observed` stores: `tuples` (id ->
    tuple), `costs` (id -> `Cost`) and `calls` in order (calls of a step also have part and owner).
    """
    costs = costs_of(capture)
    return {
        "tuples": {tuple_id: spec.to_json() for tuple_id, spec in capture.tuples.items()},
        "costs": {tuple_id: dataclasses.asdict(cost) for tuple_id, cost in costs.items()},
        "calls": [_call_json(call) for call in capture.calls],
    }


def _call_json(call: CapturedCall) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": call.index,
        "module_path": call.module_path,
        "tuple_id": call.tuple_id,
        "reads": call.reads,
        "writes": call.writes,
    }
    if call.part:
        fields |= {"part": call.part, "owner": call.owner}
    return fields


def time_in_model(
    run: ObservedRun, capture: CapturedPass, device: torch.device, *, record: Record | None = None
) -> InModelTimes:
    """Time the calls of a capture while its model or step runs. It must be warm and run the same
    calls in each pass.
    """
    source = "kernels" if device.type == "cuda" else "ranges"
    if device.type != "cuda":
        slot_times_us, attributed = _by_clock(run, record or (lambda run: run)), 1.0
    elif record is not None:
        slot_times_us, attributed = _by_marks(run, capture, device, record)
    else:
        slot_times_us, attributed = attribute(profiled_calls(run, device, PASSES))
    times_us: list[float | None] = [None] * len(capture.calls)
    for number, index in enumerate(capture.slots):
        if index is not None and number in slot_times_us:
            times_us[index] = statistics.median(slot_times_us[number])
    calls_us: dict[str, list[float | None]] = defaultdict(list)
    for call, value in zip(capture.calls, times_us, strict=True):
        calls_us[call.tuple_id].append(None if value is None else round(value, 3))
    return InModelTimes(
        calls_us={tuple_id: tuple(values) for tuple_id, values in calls_us.items()},
        source=source,
        passes=PASSES,
        attributed_share=round(attributed, 4),
        sum_us=round(sum(value for value in times_us if value is not None), 3),
    )


def _by_clock(run: ObservedRun, record: Record) -> dict[int, list[float]]:
    slot_times_us: dict[int, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        begin_s = time.thread_time()  # the clock of readings on a CPU
        yield
        slot_times_us[number].append((time.thread_time() - begin_s) * 1e6)

    one_pass = record(lambda: run(around))
    for _ in range(PASSES):
        one_pass()
    return slot_times_us


def _by_marks(
    run: ObservedRun, capture: CapturedPass, device: torch.device, record: Record
) -> tuple[dict[int, list[float]], float]:
    """Slot number -> times (us) of its call in a replayed graph; and the share of kernel time that
    belongs to calls.
    """

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        mark(device)
        try:
            yield
        finally:
            mark(device)  # the marks are counted, also if the model catches an error of the call

    one_pass = record(lambda: run(around))
    torch.cuda.synchronize(device)
    owners = len(capture.slots)

    def launch() -> int:
        for _ in range(PASSES):
            one_pass()
        torch.cuda.synchronize(device)
        return 2 * owners * PASSES

    slot_times_us: dict[int, list[float]] = defaultdict(list)
    total_us = 0.0
    for position, kernels in enumerate(_between_marks(launch)):
        time_us = _covered_us(
            (kernel.time_range.start, kernel.time_range.end) for kernel in kernels
        )
        total_us += time_us
        if kernels and position % 2 == 0:  # odd positions are between two calls
            slot_times_us[position // 2 % owners].append(time_us)
    return slot_times_us, sum(map(sum, slot_times_us.values())) / total_us if total_us else 0.0


def profiled_calls(run: ObservedRun, device: torch.device, passes: int) -> list[Any]:
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
    """Slot number -> times (us) of its call's kernels; and the share of all kernel time that
    belongs to a call.
    """
    slot_times_us: dict[int, list[float]] = defaultdict(list)
    for number, kernels in kernels_by_call(events):
        if kernels:  # a view launches no kernel; if another call has none, its time is unknown
            slot_times_us[number].append(_busy_us(kernels))
    total_us = _covered_us(
        (event.time_range.start, event.time_range.end) for event in events if is_kernel(event)
    )
    # The sum may exceed the total: a kernel may start before the kernel of the call before it has
    # ended.
    return slot_times_us, min(
        1.0, sum(map(sum, slot_times_us.values())) / total_us
    ) if total_us else 0.0


_Kernels = list[tuple[str, float, float]]  # name, begin and end in us


def _busy_us(kernels: _Kernels) -> float:
    """Time in us in which at least one of the kernels ran: cuDNN runs groups of a convolution in
    parallel.
    """
    return _covered_us((begin_us, end_us) for _, begin_us, end_us in kernels)


def _covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def kernels_by_call(events: Sequence[Any]) -> list[tuple[int, _Kernels]]:
    """All calls in order, as (slot number, kernels). Use the better of two methods: it finds more
    kernel time.

    By launch: a kernel event has the id of the driver call that launched it, and this driver call
    is within the range of the operator call on the host. This fails if the clocks of driver and
    host differ. By link: the profiler links a kernel to the PyTorch operator that launched it,
    inside the range. This fails if no operator launched the kernel."""
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    ranges = [event for event in on_host if event.name.startswith(RANGE)]
    # ranges do not overlap: calls run one at a time
    ranges.sort(key=lambda event: event.time_range.start)
    starts = [one.time_range.start for one in ranges]
    launched = {
        event.id: event.time_range.start for event in on_host if event.name.startswith(LAUNCHES)
    }
    positions = {id(one): position for position, one in enumerate(ranges)}
    by_launch: list[_Kernels] = [[] for _ in ranges]
    by_link: list[_Kernels] = [[] for _ in ranges]
    for event in events:
        if is_kernel(event) and (moment := launched.get(event.id)) is not None:
            position = bisect.bisect_right(starts, moment) - 1
            if position >= 0 and moment <= ranges[position].time_range.end:
                by_launch[position].append(
                    (event.name, event.time_range.start, event.time_range.end)
                )
        above = event
        while above is not None and id(above) not in positions:
            above = above.cpu_parent
        for kernel in event.kernels if above is not None else ():
            if not kernel.name.startswith(("Mem", RANGE)):
                # A link gives only durations: assume that the kernels run one after the other.
                kernels = by_link[positions[id(above)]]
                begin_us = kernels[-1][2] if kernels else 0.0
                kernels.append((kernel.name, begin_us, begin_us + float(kernel.duration)))
    best = max(by_launch, by_link, key=lambda calls: sum(map(_busy_us, calls)))
    return [
        (int(one.name[len(RANGE) :]), kernels) for one, kernels in zip(ranges, best, strict=True)
    ]
