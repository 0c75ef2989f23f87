"""Measured operator tuples with some of their tensors in slow memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import Offload, Passes
from farm.benchmark.policies import POLICIES, WindowPolicy
from farm.benchmark.subjects.operator_tuple import (
    OperatorTupleKind,
    pass_of,
    rebuilt_tuple,
    set_values,
    tuple_passes,
)
from farm.errors import Unmeasurable
from farm.subjects.registry import kind_of
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject


@dataclass(frozen=True)
class SlowTupleKind(OperatorTupleKind):
    """An operator tuple whose protocol has a placement.

    Attributes:
        offload: puts the tensors of the placement in slow memory; None: this process cannot.
    """

    offload: Offload | None = None

    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        if protocol.residency == "chain":
            text = "--residency chain cannot use tensors in slow memory."
            raise Unmeasurable("not_available", text, "Use --residency resident.")
        if self.offload is None:
            raise Unmeasurable(
                "not_available",
                "This process cannot put tensors in slow memory: its host lacks the add-on "
                "'memory'.",
                "Install the farm on this host again with all its files.",
            )
        rebuilt = rebuilt_tuple(subject, device)
        set_values(rebuilt, protocol.data)
        offloaded = self.offload(rebuilt, protocol)
        steps = HostSteps(device)  # none
        run = offloaded.run if kind_of(rebuilt.spec).standalone else pass_of
        passes = tuple_passes(offloaded.rebuilt, protocol, run, steps)
        return replace(
            passes,
            rewritten=[],
            details=steps.noted(offloaded.details),
            pool=offloaded.pool,
            keep=offloaded.memory,
        )

    def policy(self, protocol: Protocol, stopping: Stopping) -> WindowPolicy:
        return POLICIES["timed"]
