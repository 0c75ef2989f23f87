"""The first time a variant runs on a card: which tuples does it really have there?

The list made at submit time is a prediction, on fake tensors that claim to be on a CPU. On the card the model is
captured once more, and the observed pass is held against an unobserved one. What differs goes back to
the farm, which measures it in a further round. The kernels of the unobserved pass go along, beside those that each
rebuilt tuple launches, and so does what each call took in the running model.

All of it is taken from the run that is measured. Where that is the replay of a CUDA graph, the operators are those that
are called while a graph is captured, and the kernels those of a replay: a model may ask whether it is being captured,
and run something else. What an eager pass runs otherwise is told beside it.

All of this needs PyTorch's profiler, which leaves its mark on a process: see `farm.benchmark_process.client`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark.cuda_graph import capture_graph, one_stream
from farm.benchmark.in_model_timing import InModel, time_in_model
from farm.benchmark.passes import build_variant, grad_mode, numeric_flags
from farm.benchmark.workload import why_it_raised
from farm.errors import CaptureError, FarmError, Unmeasurable
from farm.types.label import label_of
from farm.types.protocol import Protocol, Subject, Variant
from farm.types.reading import Eagerly, Launches, OtherCalls, Verification

if TYPE_CHECKING:
    from farm.operators.capture import Capture, Observed, Record

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
_Look = tuple[Callable[["Record | None"], "Observed"], Callable[["Capture", "Record | None"], "InModel | None"]]


def _look_at_pass(variant: Variant, protocol: Protocol, device: torch.device) -> _Look:
    from farm.operators.capture import run_with_owners, verify_on_device

    model, arguments = build_variant(variant, device, hand_over=True)

    def timed(around: Callable[[int], contextlib.AbstractContextManager[Any]]) -> None:
        run_with_owners(model, arguments, device_type=device.type, grad_enabled=protocol.grad, around=around)

    return (
        lambda record: verify_on_device(model, arguments, device, grad_enabled=protocol.grad, record=record),
        lambda seen, record: time_in_model(timed, seen, device, record=record),
    )


def _look_at_step(variant: Variant, protocol: Protocol, device: torch.device) -> _Look:
    from farm.operators.capture import held_against
    from farm.training.capture import capture_step
    from farm.training.extract import build_step

    with torch.enable_grad():
        step = build_step(variant, device, launch=protocol.launch)

    def observe() -> Capture:
        return capture_step(step, device_type=device.type, warmed_up=True).as_capture()

    def plainly() -> None:
        step.count_from_one()
        step.run()

    def timed(around: Callable[[int], contextlib.AbstractContextManager[Any]]) -> None:
        with torch.enable_grad():
            capture_step(step, device_type=device.type, warmed_up=True, around=around)

    return (
        lambda record: held_against(plainly, observe, device, grad_enabled=True, record=record),
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


def _eagerly(found: Observed) -> Eagerly | None:
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
    from farm.operators.profiled import kernels_between_marks, mark
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
        "storages": [{"size_bytes": storage.size_bytes, "role": storage.role} for storage in capture.storages],
        "gaps": list(capture.gaps),
        "overlaps": list(capture.overlaps),
        "device_type": capture.device_type,
        "grad_enabled": capture.grad_enabled,
        "training": capture.training,
    }
