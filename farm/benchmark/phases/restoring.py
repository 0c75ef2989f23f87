"""The phase of restoring: the copies that restore the inputs of a kernel or collective before each
pass are measured alone, and leave the reading."""

from __future__ import annotations

import contextlib

from farm.benchmark import ranks
from farm.benchmark.cache import InPlacePass
from farm.benchmark.passes import Passes
from farm.benchmark.phases.base import Measurement, Phase
from farm.benchmark.policies import POLICIES, WindowPolicy
from farm.benchmark.steady import Windows, silent
from farm.benchmark.workload import arrange
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading


class Restoring(Phase):
    """Subtracts the copies (`Timing.restore_us`)."""

    name = "restoring"
    announced = False

    def applies(self, measurement: Measurement) -> bool:
        passes = measurement.workload.passes
        return passes is not None and isinstance(passes.first, InPlacePass)

    def run(self, measurement: Measurement, reading: Reading) -> Reading:
        call = measurement.passes.first
        assert isinstance(call, InPlacePass)
        copies = time_restoring(
            measurement.windows,
            call,
            measurement.protocol,
            measurement.stopping,
            measurement.policy,
        )
        return reading.without(copies)


def time_restoring(
    windows: Windows,
    call: InPlacePass,
    protocol: Protocol,
    stopping: Stopping,
    policy: WindowPolicy,
) -> Reading:
    """Measure the copies that restore the inputs of a kernel or a collective.

    Those of a collective have a policy of their own."""
    if ranks.world() > 1 and policy.energy:
        stopping, policy = stopping.allowing(0.025), POLICIES["copies"]
    workload = arrange(Passes(call.restore), protocol, windows.torch_device)
    with contextlib.closing(workload):
        return windows.measure(workload, stopping, policy, silent)
