"""Describes a tuple that a model needs, for estimates and predictions."""

from __future__ import annotations

from farm.subjects.label import label_of
from farm.types.tuple import Cost, NeededTuple, OperatorTuple


def needed_tuple(spec: OperatorTuple, cost: Cost, calls: int = 1) -> NeededTuple:
    """Describe a tuple for estimates and predictions, with the data class of the protocol."""
    columns = spec.id, spec.short_name, label_of(spec), cost.flops, cost.bytes
    return NeededTuple(*columns, {"": calls}, spec.to_json(), cost.output_shapes)
