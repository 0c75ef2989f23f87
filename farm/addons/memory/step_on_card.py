"""Capture a training step on a card of this host, and run it under offload plans."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farm.addons.memory.requests import PlannedStepRequest, StepCaptureRequest, WireRequest
from farm.addons.memory.step_memory import StepMemory, memory
from farm.addons.memory.transfers import Wire, moves_of
from farm.benchmark_process.client import BenchmarkProcess
from farm.devices.cpu import no_slow_memory
from farm.devices.device import Card
from farm.errors import UsageError
from farm.jobs.own_card import hold_card
from farm.operators.captured import CapturedPass
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.models.resolved import ResolvedModel


@dataclass(frozen=True)
class StepOnCard:
    """A step that was captured on its card. It may use other operators than a capture without a
    card predicts.
    """

    memory: StepMemory  # with estimated times
    subject: Subject
    protocol: Protocol
    process: BenchmarkProcess

    def wire(self) -> Wire:
        """Measure the bandwidth of copies between slow and fast memory, alone and during the step,
        or raise `Unmeasurable`."""
        return self.process.call(WireRequest(self.subject, self.protocol))

    def run(self, planned: StepMemory) -> StepMemory:
        """Run the step with all tensors in fast memory, and under each plan. Return `planned` with
        the results. Raises `Unmeasurable` if the card does not support it."""
        offload_plans = planned.offload_plans
        assert offload_plans is not None, "there are plans"
        bytes_per_s = offload_plans.moves_bytes_per_s or 0.0
        request = PlannedStepRequest(
            self.subject,
            self.protocol,
            calls=tuple(call.tuple_id for call in planned.capture.calls),
            plans=tuple(tuple(sorted(plan.slow)) for plan in offload_plans.plans),
            moves=tuple(
                tuple(moves_of(planned.life, plan.moved, bytes_per_s))
                for plan in offload_plans.plans
            ),
        )
        run = self.process.call(
            request, timeout_s=self.process.item_timeout_s * (1 + len(offload_plans.plans))
        )
        return dataclasses.replace(
            planned, offload_plans=dataclasses.replace(offload_plans, run=run)
        )


@contextlib.contextmanager
def step_on(card: Card, model: ResolvedModel, variant: Variant) -> Iterator[StepOnCard]:
    """Capture the step of a variant on a card. The card is locked until the end of the block.
    Raises `UsageError` if the card has no slow memory or no data sheet, and `CardBusy`,
    `UnhealthyCard` or `Unmeasurable` if the step cannot run on it."""
    if why := no_slow_memory(card):
        raise UsageError(why, "Omit --run, or choose another card with --card.")
    subject = Subject("variant", variant.id, variant.to_json())
    protocol = Protocol(launch=card.usual_launch)
    with hold_card(card) as process:
        request = StepCaptureRequest(subject, protocol)
        step = CapturedPass.from_json(process.call(request))
        yield StepOnCard(
            memory(model, variant, "cpu" if card.is_cpu else card.model, step),
            subject,
            protocol,
            process,
        )
