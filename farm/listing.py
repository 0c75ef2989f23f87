"""The operator tuples of a model variant with their cost, for people and programs that want no measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farm.benchmark.protocol import Variant


@dataclass(frozen=True)
class Row:
    """One operator tuple: how often it is called, and the cost of *one* call."""

    operator_id: str
    short_name: str
    label: str
    count: int
    flops: int
    bytes_moved: int


@dataclass(frozen=True)
class Listing:
    """A variant's tuples, the costliest first. ``model_flops`` is PyTorch's own count over the whole model."""

    variant: Variant
    rows: tuple[Row, ...]
    model_flops: int
    gaps: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def flops(self) -> int:
        return sum(row.count * row.flops for row in self.rows)

    @property
    def bytes_moved(self) -> int:
        return sum(row.count * row.bytes_moved for row in self.rows)

    def flops_share(self, row: Row) -> float:
        """Share of the model's FLOPs, 0 to 1."""
        return row.count * row.flops / self.flops if self.flops else 0.0

    def bytes_share(self, row: Row) -> float:
        """Share of the model's bytes, 0 to 1."""
        return row.count * row.bytes_moved / self.bytes_moved if self.bytes_moved else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant.to_json(),
            "calls": self.calls,
            "tuples": len(self.rows),
            "flops": self.flops,
            "model_flops": self.model_flops,
            "bytes_moved": self.bytes_moved,
            "gaps": list(self.gaps),
            "operators": [
                {
                    "operator_id": row.operator_id,
                    "operator": row.short_name,
                    "label": row.label,
                    "count": row.count,
                    "flops_per_call": row.flops,
                    "bytes_per_call": row.bytes_moved,
                    "flops_share": self.flops_share(row),
                    "bytes_share": self.bytes_share(row),
                }
                for row in self.rows
            ],
        }


def list_operators(variant: Variant) -> Listing:
    """Take a variant apart on meta and count each tuple's cost. Imports torch; measures nothing.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.catalog`.
        CaptureError: the model could not be taken apart.
    """
    from farm import catalog
    from farm.operators.capture import predict
    from farm.operators.cost import cost, model_flops

    common = {"dtype": variant.dtype, "memory_format": variant.memory_format}
    inputs = catalog.example_inputs(variant.model, variant.batch, variant.input_size, device="meta", **common)
    model = catalog.build(variant.model, device="meta", mode=variant.mode, **common)
    taken = predict(model, inputs, device_type="cpu", grad_enabled=False)
    rows = []
    for operator_id, count in taken.counts.items():
        spec = taken.tuples[operator_id]
        counted = cost(spec)
        rows.append(Row(operator_id, spec.short_name, spec.label, count, counted.flops, counted.bytes))
    rows.sort(key=lambda row: (-row.count * row.flops, -row.count * row.bytes_moved, row.label))
    return Listing(variant, tuple(rows), model_flops(model, inputs), taken.gaps)
