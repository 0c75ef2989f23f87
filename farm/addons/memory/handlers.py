"""Handlers of the requests about training steps and slow memory, in the benchmark process."""

from __future__ import annotations

from typing import Any

from farm.addons.memory.requests import PlannedStepRequest, StepCaptureRequest, WireRequest
from farm.addons.memory.transfers import AsRun, Wire
from farm.benchmark_process.handlers import Handler, OpenCard
from farm.types.protocol import OnPhase


def _capture_step(request: StepCaptureRequest, card: OpenCard, on_phase: OnPhase) -> dict[str, Any]:
    from farm.addons.memory.planned_step import extract_step

    return extract_step(request.subject, request.protocol, card.torch_device).to_json()


def _measure_wire(request: WireRequest, card: OpenCard, on_phase: OnPhase) -> Wire:
    from farm.addons.memory.planned_step import measure_wire

    return measure_wire(request.subject, request.protocol, card.torch_device)


def _run_planned(request: PlannedStepRequest, card: OpenCard, on_phase: OnPhase) -> AsRun:
    from farm.addons.memory.planned_step import compare

    return compare(
        request.subject,
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
