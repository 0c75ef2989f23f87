"""Requests to a benchmark process about training steps and slow memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farm.addons.memory.transfers import AsRun, Move, Wire
from farm.benchmark_process.requests import SubjectRequest


@dataclass(frozen=True)
class StepCaptureRequest(SubjectRequest[dict[str, Any]]):
    """Capture a training step on the card. The answer is JSON
    (`farm.addons.memory.planned_step.extract_step`).
    """

    name = "step_capture"
    answer = dict[str, Any]
    doing = "capture the step"


@dataclass(frozen=True)
class WireRequest(SubjectRequest[Wire]):
    """Measure the bandwidth of copies, alone and during a step
    (`farm.addons.memory.planned_step.measure_wire`).
    """

    name = "wire"
    answer = Wire
    doing = "time copies"
    uses_slow_memory = True


@dataclass(frozen=True)
class PlannedStepRequest(SubjectRequest[AsRun]):
    """Run a step with all tensors in fast memory, and under each plan
    (`farm.addons.memory.planned_step.compare`).
    """

    name = "planned_step"
    answer = AsRun
    doing = "run the step"
    uses_slow_memory = True
    calls: tuple[str, ...]  # the tuple ids of the step's calls
    plans: tuple[tuple[int, ...], ...]  # for each plan, the numbers of the tensors in slow memory
    # for each plan, the copies between slow and fast memory
    moves: tuple[tuple[Move, ...], ...] = ()
