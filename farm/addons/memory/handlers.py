"""Handlers of the requests about training steps and slow memory, in the benchmark process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farm.addons.memory.requests import PlannedStepRequest, StepCaptureRequest, WireRequest
from farm.addons.memory.transfers import AsRun, Wire
from farm.benchmark_process.handlers import Handler, OpenCard
from farm.benchmark_process.requests import SubjectRequest
from farm.types.protocol import OnPhase

if TYPE_CHECKING:
    from farm.operators.captured import CapturedPass


#: The name of the last extracted step in `OpenCard.kept`, until `_run_planned` runs it.
_LAST_STEP = "the last extracted step"


def _extracted(request: SubjectRequest[Any], card: OpenCard) -> CapturedPass:
    """Extract the step of a request, and keep it for the next requests."""
    from farm.addons.memory.planned_step import extract_step

    card.kept.pop(_LAST_STEP, None)
    step = extract_step(request.subject, request.protocol, card.torch_device)
    card.kept[_LAST_STEP] = _key(request), step
    return step


def _last_step(request: SubjectRequest[Any], card: OpenCard) -> CapturedPass:
    """The kept step of a request; it is extracted if another one was kept."""
    key, step = card.kept.get(_LAST_STEP, (None, None))
    if step is None or key != _key(request):
        return _extracted(request, card)
    return step


def _key(request: SubjectRequest[Any]) -> tuple[str, str]:
    return request.subject.id, request.protocol.id


def _capture_step(request: StepCaptureRequest, card: OpenCard, on_phase: OnPhase) -> dict[str, Any]:
    return _extracted(request, card).to_json()


def _measure_wire(request: WireRequest, card: OpenCard, on_phase: OnPhase) -> Wire:
    from farm.addons.memory.planned_step import measure_wire

    return measure_wire(_last_step(request, card), request.protocol, card.torch_device)


def _run_planned(request: PlannedStepRequest, card: OpenCard, on_phase: OnPhase) -> AsRun:
    from farm.addons.memory.planned_step import compare

    step = _last_step(request, card)
    card.kept.pop(_LAST_STEP, None)
    return compare(
        step,
        request.protocol,
        card.torch_device,
        request.calls,
        request.plans,
        request.moves,
    )


HANDLERS = (
    Handler(StepCaptureRequest, _capture_step),
    Handler(WireRequest, _measure_wire),
    Handler(PlannedStepRequest, _run_planned),
)
