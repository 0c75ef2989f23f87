"""The operator tuples of a model: calls, FLOPs, bytes and share of the estimated cost. The kernels
of a compiled model: their sources in the model and their rates. Nothing is measured here."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlmodel import Session, col, select

from farm.errors import FarmError
from farm.store import tables
from farm.store.captures import known_tuples
from farm.store.columns import OPERATOR
from farm.store.database import by_key, fetch_values
from farm.subjects.label import fused_names
from farm.types.figure import value_of
from farm.types.format import told_apart
from farm.types.protocol import Variant
from farm.types.roofline import Roofline, roofline_of
from farm.types.tuple import NeededTuple
from farm.verdict.cost_line import CostLine
from farm.verdict.rates import Rates, rule_of

if TYPE_CHECKING:
    from farm.training.extract import Extraction

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted path


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
    the whole model.
    """

    variant: Variant
    rows: tuple[OperatorRow, ...]
    model_flops: int
    gaps: tuple[str, ...] = ()
    refusal: FarmError | None = None  # why the tuples cannot be summed; None: they can
    # only of a compiled model: the card model for which its kernels were generated
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
    rows = _rows(needed, peaks)
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


def compiled_operators(session: Session, variant: Variant, device_type: str) -> Operators:
    """Return the stored kernels and library calls of a compiled variant, of the card model that
    compiled it last. Raises `NoReadings` if no card has compiled it."""
    capture = tables.Capture
    observed = select(capture).where(
        capture.variant_id == variant.id, col(capture.compiled).is_not(None)
    )
    newest = session.exec(observed.order_by(col(capture.id).desc())).first()
    card_model = ""
    if newest:
        card_model, device_type = newest.card_model, newest.device_type
    needed = known_tuples(session, variant, device_type, "", card_model)
    peaks = roofline_of(device_type, card_model, dtype=variant.computes_in)
    model_flops = session.get_one(tables.ModelVariant, variant.id).model_flops
    return Operators(variant, _rows(needed, peaks), model_flops, card_model=card_model)


def _rows(needed: Sequence[NeededTuple], peaks: Roofline) -> tuple[OperatorRow, ...]:
    weights_us = []
    for entry in needed:
        weights_us.append(
            entry.all_calls * peaks.estimate_us(entry.flops, entry.bytes_moved, entry.short_name)
        )
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


# ------------------------------------------------------------------------------------------------
# kernels


@dataclass(frozen=True)
class KernelRow:
    """A generated kernel or a library call of a compiled model."""

    rates: Rates
    fused: tuple[str, ...]  # names of the aten operators that a generated kernel computes
    # paths of the modules that the kernel was fused from; each * stands for a number that differs
    modules: tuple[str, ...]

    @property
    def line(self) -> CostLine:
        return self.rates.line

    def to_json(self) -> dict[str, Any]:
        return {
            "operator_id": self.line.subject.operator_id,
            "operator": self.line.subject.short_name,
            "fused": self.fused,
            "modules": self.modules,
            "calls": self.line.count,
            "time_us": value_of(self.line.time_us),
            **self.rates.to_json(),
        }


@dataclass(frozen=True)
class CompiledJob:
    """The kernels of a compiled job, the most expensive first, and the number of graph breaks by
    reason.
    """

    kernels: tuple[KernelRow, ...]
    graph_breaks: Mapping[str, int]
    peaks: Roofline

    @property
    def rule(self) -> str:
        """What the mark of a row and the column `roofline` mean."""
        return rule_of(self.peaks)

    @property
    def breaks(self) -> str:
        """The number of graph breaks, and the first line of each reason."""
        texts = [str(sum(self.graph_breaks.values()))]
        for reason, count in self.graph_breaks.items():
            first_line = reason.strip().split("\n")[0]
            texts.append(f"{first_line} (×{count})")
        return "; ".join(texts)

    def to_json(self) -> dict[str, Any]:
        return {
            "kernels": [row.to_json() for row in self.kernels],
            "graph_breaks": dict(self.graph_breaks),
            "peaks": vars(self.peaks),
        }


def compiled_job(
    session: Session, capture: tables.Capture, lines: Sequence[CostLine], peaks: Roofline
) -> CompiledJob:
    """Return the kernels of a job whose capture is of a compiled model."""
    paths: dict[str, list[str]] = defaultdict(list)
    calls = select(tables.Call.operator_id, tables.Call.module_path).where(
        tables.Call.capture_id == capture.id
    )
    for operator_id, path in session.exec(calls.order_by(col(tables.Call.call_index))):
        paths[operator_id] += paths_of(path)
    stored = fetch_values(session, (OPERATOR.id, OPERATOR.parameters), paths)
    total_us = sum(line.total_us for line in lines)
    rows = []
    for line in lines:
        operator_id = line.subject.operator_id
        rows.append(
            KernelRow(
                Rates.of(line, total_us, peaks),
                fused=tuple(fused_names(stored[operator_id].parameters.get("fused") or "")),
                modules=patterns_of(paths[operator_id]),
            )
        )
    rows.sort(key=lambda row: (-row.line.total_us, -row.line.weight_us))
    graph_breaks = (capture.compiled or {}).get("graph_breaks") or {}
    return CompiledJob(tuple(rows), graph_breaks, peaks)


def paths_of(text: str) -> list[str]:
    """The module paths of a launch."""
    return text.split(", ") if text else []


def pattern_of(path: str) -> str:
    """Return a module path with ``*`` for each number: ``h.*.mlp.act``."""
    return _NUMBER.sub("*", path)


def patterns_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Return distinct paths; paths that differ only in numbers become one pattern."""
    groups = by_key(pattern_of, dict.fromkeys(paths))
    return tuple(alike[0] if len(alike) == 1 else pattern for pattern, alike in groups.items())
