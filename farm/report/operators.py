"""Lists the operator tuples of a model: calls, FLOPs, bytes and share of the estimated cost. Nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, col, select

from farm.errors import FarmError
from farm.estimate.readings import tuples_of
from farm.operators.roofline import Roofline, roofline_of
from farm.store import tables
from farm.types.label import label_of, told_apart
from farm.types.protocol import Variant


@dataclass(frozen=True)
class OperatorRow:
    """One tuple: number of calls, FLOPs and bytes of *one* call, and the share of the model's estimated cost."""

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
    refusal: FarmError | None = None  # why the tuples cannot be summed; None: they can
    card_model: str = ""  # only of a compiled model: the card model for which its kernels were generated

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
        roofline: the peaks for estimating the cost shares; None: the peaks of a generic GPU.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.models.catalog`.
        CaptureError: the model could not be extracted.
    """
    from farm.training.extract import extract

    peaks = roofline or roofline_of("cuda", "", dtype=variant.computes_in)
    extracted = extract(variant)
    tuples, counts, costs = extracted.capture.tuples, extracted.capture.counts, extracted.costs
    weights_us = {id_: count * peaks.estimate_us(costs[id_].flops, costs[id_].bytes) for id_, count in counts.items()}
    total_us = sum(weights_us.values())
    labels = told_apart({id_: label_of(spec) for id_, spec in tuples.items()})
    rows = []
    for id_, count in counts.items():
        cost, share = costs[id_], weights_us[id_] / total_us
        rows.append(OperatorRow(id_, tuples[id_].short_name, labels[id_], count, cost.flops, cost.bytes, share))
    rows.sort(key=lambda row: (-row.estimated_cost_share, row.label))
    gaps, refusal = extracted.capture.gaps, extracted.refusal(variant.model)
    return Operators(variant, tuple(rows), extracted.model_flops, gaps, refusal)


def compiled_operators(session: Session, variant: Variant, device_type: str) -> Operators:
    """Return the stored kernels and library calls of a compiled variant, of the card model that compiled it last.

    Raises:
        NoReadings: no card has compiled it.
    """
    capture = tables.Capture
    observed = select(capture).where(capture.variant_id == variant.id, col(capture.compiled).is_not(None))
    found = session.exec(observed.order_by(col(capture.id).desc())).first()
    card_model, device_type = (found.card_model, found.device_type) if found else ("", device_type)
    needed = tuples_of(session, variant, device_type, "", card_model)
    peaks = roofline_of(device_type, card_model, dtype=variant.computes_in)
    shares = [one.all_calls * peaks.estimate_us(one.flops, one.bytes_moved) for one in needed]
    labels = told_apart({one.operator_id: one.label for one in needed})
    rows = [
        OperatorRow(
            *(one.operator_id, one.short_name, labels[one.operator_id], one.all_calls, one.flops, one.bytes_moved),
            estimated_cost_share=share / sum(shares),
        )
        for one, share in zip(needed, shares, strict=True)
    ]
    rows.sort(key=lambda row: (-row.estimated_cost_share, row.label))
    model_flops = session.get_one(tables.ModelVariant, variant.id).model_flops
    return Operators(variant, tuple(rows), model_flops, card_model=card_model)
