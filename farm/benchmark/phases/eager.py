"""The phase of eager launch: what a pass of a whole model takes without a CUDA graph."""

from __future__ import annotations

from typing import Any

from farm.benchmark.clock import eager_time_us
from farm.benchmark.phases.base import FigurePhase, Measurement


class EagerLaunch(FigurePhase):
    """`Details.eager_time_us`, of a whole model whose rounds are graphs."""

    name = "eager"
    missing = "eager_time_missing"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.windows.cuda and measurement.whole and measurement.workload.replayed

    def figures(self, measurement: Measurement) -> dict[str, Any]:
        time_us, half_width_us = eager_time_us(measurement.passes.first, measurement.torch_device)
        return {"eager_time_us": time_us, "eager_time_half_width_us": half_width_us}
