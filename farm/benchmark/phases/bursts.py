"""The phase of bursts: a tuple at the power limit is also measured with pauses, at full clocks."""

from __future__ import annotations

from dataclasses import replace

from farm.benchmark.clock import measure_bursts
from farm.benchmark.phases.base import FigurePhase, Measurement
from farm.types.details import Details


class Bursts(FigurePhase):
    """`Details.burst`. Bursts that fail raise."""

    name = "burst"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.limited

    def measure(self, measurement: Measurement, details: Details) -> Details:
        burst = measure_bursts(measurement.workload, measurement.windows.device)
        return replace(details, burst=burst)
