"""The phase of eager launch: what a pass of a whole model takes without a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

from farm.benchmark.clock import eager_time_us
from farm.benchmark.phases.base import FigurePhase, Measurement
from farm.devices.quiet import quiet
from farm.types.details import Details


class EagerLaunch(FigurePhase):
    """`Timing.eager_time_us`, of a whole model whose rounds are graphs."""

    name = "eager"
    figure = "eager_time"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.windows.cuda and measurement.workload.replayed

    def measure(self, measurement: Measurement, details: Details) -> Details:
        with quiet():  # launches take longer beside compilations of the host
            time_us = eager_time_us(measurement.passes.first, measurement.torch_device)
        return replace(details, timing=replace(details.timing, eager_time_us=time_us))
