"""The phase of context: how much longer a tuple takes among other operators."""

from __future__ import annotations

from typing import Any

from farm.benchmark.cache import other_operators, time_among_others
from farm.benchmark.phases.base import FigurePhase, Measurement


class Context(FigurePhase):
    """`Details.context`, of a tuple."""

    name = "context"
    missing = "context_missing"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.in_context and not measurement.whole

    def figures(self, measurement: Measurement) -> dict[str, Any]:
        others = other_operators(measurement.torch_device)
        context = time_among_others(
            measurement.passes.first,
            measurement.passes.inputs,
            others,
            measurement.pass_s,
            measurement.torch_device,
            rough=measurement.stopping.rough,
        )
        return {"context": context}
