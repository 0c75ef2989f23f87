"""The kernels and library calls of a compiled model: their sources in the model and their rates.
Nothing is measured here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, col, select

from farm.models import catalog
from farm.report.operators import Operators, rows_of
from farm.store import tables
from farm.store.captures import kernels_unknown, stored_tuples
from farm.store.columns import OPERATOR
from farm.store.database import by_key, fetch_values
from farm.subjects.label import fused_names
from farm.types.figure import value_of
from farm.types.roofline import Roofline, roofline_of
from farm.types.variant import Variant
from farm.verdict.cost_line import CostLine
from farm.verdict.rates import Rates, rule_of

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted path


def listed_kernels(session: Session, variant: Variant, device_type: str) -> Operators:
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
    needed = stored_tuples(session, variant, device_type, "", card_model)
    if not needed:
        title = catalog.resolve(variant.model).title_of(variant)
        raise kernels_unknown(variant, title, card_model)
    peaks = roofline_of(device_type, card_model, dtype=variant.computes_in)
    model_flops = session.get_one(tables.ModelVariant, variant.id).model_flops
    return Operators(variant, rows_of(needed, peaks), model_flops or None, card_model=card_model)


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
class JobKernels:
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


def job_kernels(
    session: Session, capture: tables.Capture, lines: Sequence[CostLine], peaks: Roofline
) -> JobKernels:
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
    return JobKernels(tuple(rows), graph_breaks, peaks)


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
