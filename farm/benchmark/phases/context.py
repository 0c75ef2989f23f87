"""The phase of context: how much longer a tuple takes among other operators."""

from __future__ import annotations

from dataclasses import replace

from farm.benchmark.cache import other_operators, time_among_others
from farm.benchmark.phases.base import FigurePhase, Measurement
from farm.types.details import Details


class Context(FigurePhase):
    """`Details.context`, of a tuple."""

    name = "context"
    figure = "context"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.in_context

    def measure(self, measurement: Measurement, details: Details) -> Details:
        others = other_operators(measurement.torch_device)
        context = time_among_others(
            measurement.passes.first,
            measurement.passes.inputs,
            others,
            measurement.pass_s,
            measurement.torch_device,
            measurement.policy,
        )
        return replace(details, context=context)
