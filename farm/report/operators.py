"""The operator tuples of a model: calls, FLOPs, bytes and the share of the estimated cost. Nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farm.errors import FarmError
from farm.operators.roofline import Roofline, roofline_of
from farm.types.label import label_of, told_apart
from farm.types.protocol import Variant


@dataclass(frozen=True)
class OperatorRow:
    """One operator tuple: the number of calls, FLOPs and bytes of *one* call, and the share of the estimated cost."""

    operator_id: str
    operator: str
    label: str
    count: int
    flops_per_call: int
    bytes_per_call: int
    estimated_cost_share: float


@dataclass(frozen=True)
class Operators:
    """The tuples of a variant, the most expensive first. ``model_flops`` is PyTorch's own count for the whole model."""

    variant: Variant
    rows: tuple[OperatorRow, ...]
    model_flops: int
    gaps: tuple[str, ...] = ()
    refusal: FarmError | None = None  # why they cannot be summed

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant.to_json(),
            "calls": sum(row.count for row in self.rows),
            "tuples": len(self.rows),
            "flops": sum(row.count * row.flops_per_call for row in self.rows),
            "model_flops": self.model_flops,
            "bytes_moved": sum(row.count * row.bytes_per_call for row in self.rows),
            "gaps": list(self.gaps),
            "operators": [vars(row) for row in self.rows],
        }


def operators(variant: Variant, roofline: Roofline | None = None) -> Operators:
    """Extract the tuples of a variant and count the cost of each. Imports torch; measures nothing.

    Args:
        roofline: estimates the shares of the cost; that of a generic GPU if None.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.models.catalog`.
        CaptureError: the model could not be extracted.
    """
    from farm.training.extract import extract

    peaks = roofline or roofline_of("cuda", "", dtype=variant.computes_in)
    apart = extract(variant)
    taken, costs = apart.capture, apart.costs
    weights_us = {
        operator_id: count * peaks.estimate_us(costs[operator_id].flops, costs[operator_id].bytes)
        for operator_id, count in taken.counts.items()
    }
    whole_us = sum(weights_us.values())
    labels = told_apart({operator_id: label_of(spec) for operator_id, spec in taken.tuples.items()})
    rows = [
        OperatorRow(
            operator_id,
            taken.tuples[operator_id].short_name,
            labels[operator_id],
            count,
            costs[operator_id].flops,
            costs[operator_id].bytes,
            weights_us[operator_id] / whole_us,
        )
        for operator_id, count in taken.counts.items()
    ]
    rows.sort(key=lambda row: (-row.estimated_cost_share, row.label))
    return Operators(variant, tuple(rows), apart.model_flops, taken.gaps, apart.refusal(variant.model))
