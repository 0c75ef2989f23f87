"""The phase of bursts: a tuple at the power limit is also measured with pauses, at full clocks."""

from __future__ import annotations

from typing import Any

from farm.benchmark.clock import measure_bursts
from farm.benchmark.phases.base import FigurePhase, Measurement


class Bursts(FigurePhase):
    """`Details.burst`. Bursts that fail raise."""

    name = "burst"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.limited and not measurement.whole

    def figures(self, measurement: Measurement) -> dict[str, Any]:
        return {"burst": measure_bursts(measurement.workload, measurement.windows.device)}
