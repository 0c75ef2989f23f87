"""The operator tuples of a model: calls, FLOPs, bytes and share of the estimated cost. Nothing is
measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farm.errors import FarmError
from farm.types.format import told_apart
from farm.types.roofline import Roofline, roofline_of
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.training.extract import Extraction


@dataclass(frozen=True)
class OperatorRow:
    """One tuple: number of calls, FLOPs and bytes of *one* call, and the share of the model's
    estimated cost.
    """

    operator_id: str
    operator: str
    label: str
    count: int
    flops_per_call: int
    bytes_per_call: int
    estimated_cost_share: float


@dataclass(frozen=True)
class Operators:
    """The tuples of a variant, the most expensive first. ``model_flops`` is PyTorch's own count for
    the whole model; None: not counted.
    """

    variant: Variant
    rows: tuple[OperatorRow, ...]
    model_flops: int | None
    gaps: tuple[str, ...] = ()
    refusal: FarmError | None = None  # why the tuples cannot be summed; None: they can
    # only of generated kernels (`farm.report.kernels`): the card model that they are for
    card_model: str = ""
    # label of a row -> why the tuple is not measured
    mismatches: Mapping[str, str] = field(default_factory=dict)
    note_on_values: str = ""  # which calls depend on values of the example input

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant.to_json(),
            "calls": sum(row.count for row in self.rows),
            "tuples": len(self.rows),
            "flops": sum(row.count * row.flops_per_call for row in self.rows),
            "model_flops": self.model_flops,
            "bytes_moved": sum(row.count * row.bytes_per_call for row in self.rows),
            "gaps": list(self.gaps),
            "mismatches": dict(self.mismatches),
            "note_on_values": self.note_on_values,
            "operators": [vars(row) for row in self.rows],
        }


def operators(
    variant: Variant, extracted: Extraction, roofline: Roofline | None = None
) -> Operators:
    """The tuples of a variant with the cost of each. The cost shares are estimates: with the peaks
    of `roofline`; by default, of a generic GPU."""
    peaks = roofline or roofline_of("cuda", "", dtype=variant.computes_in)
    gaps, refusal = extracted.capture.gaps, extracted.refusal(variant.model)
    needed = extracted.needed()
    rows = rows_of(needed, peaks)
    label_of = {row.operator_id: row.label for row in rows}
    mismatches = {label_of[entry.operator_id]: entry.mismatch for entry in needed if entry.mismatch}
    return Operators(
        variant,
        rows,
        extracted.model_flops,
        gaps,
        refusal,
        mismatches=mismatches,
        note_on_values=extracted.note_on_values,
    )


@dataclass(frozen=True)
class OtherCall:
    """A call that is another tuple with the other input: how often, with which label and FLOPs.

    A call that only one of the inputs has lacks the label of the other."""

    module_path: str
    operator: str
    count: int
    label_a: str
    label_b: str
    flops_a: int
    flops_b: int


@dataclass(frozen=True)
class ComparedInputs:
    """The calls of a model that differ between two inputs, and the totals with each of them."""

    calls: tuple[OtherCall, ...]
    equal_calls: int
    calls_a: int
    calls_b: int
    flops_a: int
    flops_b: int
    bytes_a: int
    bytes_b: int

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"calls": [vars(row) for row in self.calls]}


def compare_inputs(name: str, *sides: Extraction) -> ComparedInputs:
    """Pair the calls of a model with two inputs by module, operator and order. Raises the refusal
    of either capture. ``name``: of the model, for messages."""
    from farm.subjects.label import label_of

    placed: list[dict[tuple[str, str, int], str]] = []
    labels: dict[str, str] = {"": ""}
    flops: dict[str, int] = {"": 0}
    for side in sides:
        refusal = side.refusal(name)
        if refusal is not None:
            raise refusal
        labels |= {id_: label_of(spec) for id_, spec in side.capture.tuples.items()}
        flops |= {id_: cost.flops for id_, cost in side.costs.items()}
        number: Counter[tuple[str, str]] = Counter()
        calls = {}
        for call in side.capture.calls:
            where = (call.module_path, side.capture.tuples[call.tuple_id].short_name)
            calls[*where, number[where]] = call.tuple_id
            number[where] += 1
        placed.append(calls)
    others: Counter[tuple[str, str, str, str]] = Counter()
    for path, operator, position in dict.fromkeys((*placed[0], *placed[1])):
        pair = [calls.get((path, operator, position), "") for calls in placed]
        others[path, operator, pair[0], pair[1]] += 1
    differing = {key: count for key, count in others.items() if key[2] != key[3]}
    rows = [
        OtherCall(path, name, count, labels[id_a], labels[id_b], flops[id_a], flops[id_b])
        for (path, name, id_a, id_b), count in differing.items()
    ]
    return ComparedInputs(
        tuple(rows),
        equal_calls=others.total() - sum(differing.values()),
        calls_a=len(sides[0].capture.calls),
        calls_b=len(sides[1].capture.calls),
        flops_a=sides[0].flops,
        flops_b=sides[1].flops,
        bytes_a=sides[0].bytes_moved,
        bytes_b=sides[1].bytes_moved,
    )


def rows_of(needed: Sequence[NeededTuple], peaks: Roofline) -> tuple[OperatorRow, ...]:
    weights_us = [entry.all_calls * peaks.call_us(entry) for entry in needed]
    total_us = sum(weights_us)
    labels = told_apart({entry.operator_id: entry.label for entry in needed})
    rows = []
    for entry, weight_us in zip(needed, weights_us, strict=True):
        rows.append(
            OperatorRow(
                entry.operator_id,
                entry.short_name,
                labels[entry.operator_id],
                entry.all_calls,
                entry.flops,
                entry.bytes_moved,
                estimated_cost_share=weight_us / total_us,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.estimated_cost_share, row.label)))
