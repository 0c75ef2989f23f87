"""One side of a comparison: a job, or the readings that match filters, with its tuples and
models.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy
from sqlmodel import Session

from farm.errors import NoSuchJob, UnknownOperator, UsageError
from farm.report.comparison import Side
from farm.store import tables
from farm.store.columns import (
    ITEM,
    JOB,
    OF_TUPLES,
    OF_WHOLES,
    OPERATOR,
    PROTOCOL,
    READING,
    SOFTWARE,
    VARIANT,
    VERDICT,
)
from farm.store.database import by_key, fetch, fetch_values, in_fixed_order, values
from farm.store.query import Filters, parse, select_readings
from farm.types.fields import names_of
from farm.types.figure import Figure, figure_of, share_of
from farm.types.software import software_values
from farm.types.variant import Variant
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import CallCost
from farm.verdict.verdict import Verdict

if TYPE_CHECKING:
    from farm.report.report import Report


@dataclass(frozen=True)
class ComparedModel:
    """A model on one side: a job, with its verdict or the id of its stored verdict."""

    job_id: str
    title: str
    variant: Mapping[str, Any]  # {} for a sweep
    verdict: Verdict | int
    note: str = ""

    def text_without(self, ignored: frozenset[str]) -> str:
        """Return the variant without some fields, as text."""
        fields = {name: value for name, value in self.variant.items() if name not in ignored}
        return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True)
class LoadedSide:
    """A side with its tuples and models.

    Attributes:
        lines: all tuples; their count is the side's own number of calls.
        fields: the fields of `Variant` that the side's filters name.
        report: of a job.
    """

    side: Side
    lines: Sequence[CostLine]
    models: Sequence[ComparedModel]
    fields: frozenset[str]
    report: Report | None = None

    @cached_property
    def measured(self) -> list[CostLine]:
        """The tuples with a reading."""
        return [line for line in self.lines if line.time_us]

    @cached_property
    def by_type(self) -> Mapping[str, list[CostLine]]:
        """The tuples of each operator type."""
        return by_key(lambda line: line.subject.short_name, self.lines)

    @cached_property
    def sum_us(self) -> float:
        """The time of all calls of all tuples with a reading, in us."""
        return own_time_us(self.lines)

    def share(self, lines: Sequence[CostLine]) -> float | None:
        """The share of tuples in the side's sum; None without tuples."""
        return share_of(own_time_us(lines), self.sum_us) if lines else None


def own_time_us(lines: Sequence[CostLine]) -> float:
    """Return the time of all calls of tuples in us, with the side's own number of calls."""
    return math.fsum([line.total_us for line in lines])


def covered_share(lines: Sequence[CostLine], every: Sequence[CostLine]) -> float | None:
    """Return the share of `lines` in the time of `every`; in the estimated time if a tuple of
    `every` has no reading.
    """
    if all(line.time_us for line in every):
        time_us = own_time_us(lines)
        return share_of(time_us, time_us if len(lines) == len(every) else own_time_us(every))

    keys = {line.subject.key for line in lines}
    covered_us, every_us = [], []
    for line in every:
        every_us.append(line.weight_us)
        if line.subject.key in keys:
            covered_us.append(line.weight_us)
    return share_of(math.fsum(covered_us), math.fsum(every_us))


class DescribedOperator(NamedTuple):
    """What a comparison shows of a tuple."""

    short_name: str
    label: str
    dtype: str | None  # of the first floating-point tensor


def load(session: Session, text: str, operators: dict[str, DescribedOperator]) -> LoadedSide:
    """Load a job or the readings that match filters. `operators`: those that are known already."""
    try:
        words = shlex.split(text)
    except ValueError:
        step = "Put a value that contains blanks in quotes: card='H100 NVL'."
        raise UsageError(f"A quotation mark is missing in: {text}", step) from None
    if not words:
        raise UsageError(
            "A side of the comparison is empty.",
            "Name a job, or filters such as 'card=H200 torch=2.11'.",
        )
    if len(words) == 1 and re.fullmatch(r"job=[^,]+", words[0]):
        words = [words[0].removeprefix("job=")]
    if len(words) > 1 or any(sign in words[0] for sign in "=<>"):
        return _of_filters(session, parse(words), operators)

    from farm.store.job_ids import find_job

    try:
        job_id = find_job(session, words[0]).id
    except NoSuchJob as error:
        try:
            return _of_filters(session, parse(words), operators)
        except UnknownOperator:
            raise error from None
    return _of_job(session, job_id)


def _of_job(session: Session, job_id: str) -> LoadedSide:
    from farm.report.report import build  # late: a comparison of filters seldom needs a report

    report = build(session, job_id)
    verdict = report.verdict
    measured = sum(line.time_us is not None for line in report.tuples)
    if not measured and not verdict.time.whole:
        raise UsageError(
            f"The job {job_id} has no readings yet.", f"`farm status {job_id}` shows its progress."
        )

    note = "preliminary" if report.preliminary else ""
    if verdict.types and not note:
        note = f"only the {len(report.tuples)} heaviest of {verdict.parts} tuples"
    variant_id = session.get_one(tables.Job, job_id).variant_id
    variant = session.get(tables.ModelVariant, variant_id or "")
    model = ComparedModel(
        job_id, report.title, variant_fields(variant) if variant else {}, verdict, note
    )
    dtype = (report.request.get("variant") or {}).get("dtype")
    side = Side(
        text=report.title,
        job_id=job_id,
        card_models=tuple(sorted({card.model for card in report.cards})),
        software=tuple(sorted({str(software["torch"]) for software in report.software})),
        dtypes=(dtype,) if dtype else (),
        tuples=measured,
        cards=tuple(card.id for card in report.cards if card.readings),
    )
    return LoadedSide(side, report.tuples, [model], frozenset(names_of(Variant)), report)


def measured_alone(session: Session, loaded: LoadedSide) -> LoadedSide:
    """Return a job's side with the figures of its readings, as a side of filters has them. The
    figures of a job include the effect of neighbouring operators and of the clocks in its model."""
    if not loaded.side.job_id:
        return loaded
    columns = (
        READING.id,
        READING.time_us,
        READING.time_half_width_us,
        READING.energy_mj,
        READING.energy_half_width_mj,
    )
    ids = [line.reading_id for line in loaded.measured if line.reading_id]
    readings = fetch_values(session, columns, ids)
    lines = []
    for line in loaded.lines:
        reading = readings.get(line.reading_id)
        if reading is not None:
            time_us = Figure(reading.time_us, reading.time_half_width_us)
            energy_mj = figure_of(reading.energy_mj, reading.energy_half_width_mj)
            line = replace(line, cost=CallCost(time_us, energy_mj))
        lines.append(line)
    return replace(loaded, lines=lines)


def variant_fields(variant: tables.ModelVariant) -> dict[str, Any]:
    columns = variant.model_dump()
    return {name: columns[name] for name in names_of(Variant)}


def _of_filters(
    session: Session, filters: Filters, operators: dict[str, DescribedOperator]
) -> LoadedSide:
    """Build a side from filters. A tuple has the mean of its readings; the half-width includes
    their spread.
    """
    rows = _means_of_readings(session, filters)
    models, wholes = _models_of(session, filters)
    if not rows and not models:
        raise UsageError(f"No readings match '{filters}'.", "`farm lookup` shows the readings.")
    data, torches = _compatible(session, filters, [*rows, *wholes])
    _add_operators(session, operators, [row.subject_id for row in rows])

    lines = []
    dtypes = {model.variant["dtype"] for model in models}
    for row in rows:
        operator = operators[row.subject_id]
        if operator.dtype:
            dtypes.add(operator.dtype)
        energy = None
        if row.with_energy == row.readings:
            half_width_mj = (row.energy_half_width_mj or 0.0) + row.energy_spread_mj / 2
            energy = Figure(row.energy_mj, half_width_mj)
        time = Figure(row.time_us, row.time_half_width_us + row.time_spread_us / 2)
        subject = TupleView(
            row.subject_id, operator.short_name, operator.label, data[row.protocol_id]
        )
        lines.append(CostLine(subject, 1, "measured", CallCost(time, energy)))

    cards = {row.card_id for row in (*rows, *wholes)} | {row.other_card_id for row in rows}
    side = Side(
        text=str(filters),
        job_id="",
        card_models=([*rows, *wholes][0].card_model,),
        software=tuple(torches),
        dtypes=tuple(sorted(dtypes)),
        tuples=len(lines),
        cards=tuple(sorted(cards)),
    )
    fields = frozenset(entry.column.name for entry in filters.filters)
    return LoadedSide(side, lines, models, fields)


def _means_of_readings(session: Session, filters: Filters) -> list[Any]:
    """Return the mean and the spread of the readings of each tuple under equal conditions."""
    key = (
        READING.card_model,
        READING.software_id,
        READING.protocol_id,
        READING.subject_id,
        READING.method,
    )
    averaged = (
        READING.time_us,
        READING.time_half_width_us,
        READING.energy_mj,
        READING.energy_half_width_mj,
        READING.card_id,
    )
    sql = sqlalchemy.func
    selection = select_readings(session, filters, placed=False, kind="operator")
    rows: list[Any] = []
    for conditions in selection.where():
        reading = in_fixed_order((*key, *averaged), OF_TUPLES, *conditions, by=(*key, READING.id)).c
        groups = [reading[column.name] for column in key]
        columns = (
            *groups,
            sql.avg(reading.time_us).label("time_us"),
            sql.max(reading.time_half_width_us).label("time_half_width_us"),
            (sql.max(reading.time_us) - sql.min(reading.time_us)).label("time_spread_us"),
            sql.avg(reading.energy_mj).label("energy_mj"),
            sql.max(reading.energy_half_width_mj).label("energy_half_width_mj"),
            (sql.max(reading.energy_mj) - sql.min(reading.energy_mj)).label("energy_spread_mj"),
            sql.count(reading.energy_mj).label("with_energy"),
            sql.count().label("readings"),
            sql.min(reading.card_id).label("card_id"),
            sql.max(reading.card_id).label("other_card_id"),
        )
        rows += values(session, columns, grouped_by=groups)
    return rows


def _add_operators(
    session: Session, operators: dict[str, DescribedOperator], ids: Sequence[str]
) -> None:
    """Add the short name, label and dtype of tuples that are not known yet."""
    # Only the tensors are decoded: whole descriptions of thousands of tuples take longer than
    # their readings.
    tensors = OPERATOR.spec["tensors"].label("tensors")
    columns = (OPERATOR.id, OPERATOR.short_name, OPERATOR.label, tensors)
    new = fetch_values(session, columns, [id_ for id_ in ids if id_ not in operators])
    for operator_id, row in new.items():
        dtype = _floating_dtype(row.tensors or ())
        operators[operator_id] = DescribedOperator(row.short_name, row.label, dtype)


def _floating_dtype(tensors: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the dtype of the first floating-point tensor."""
    for tensor in tensors:
        if tensor["dtype"].startswith(("float", "bfloat")):
            return str(tensor["dtype"])
    return None


def _models_of(session: Session, filters: Filters) -> tuple[list[ComparedModel], list[Any]]:
    """Return the jobs with readings of whole models that match the filters, and these readings.
    They are ordered by coverage, then by age: the largest coverage and the newest come last."""
    selection = select_readings(session, filters, placed=False, kind="variant")
    query = sqlalchemy.select(
        *(JOB.id.label("job_id"), JOB.title, JOB.variant_id),
        *(VERDICT.id, VERDICT.round, VERDICT.coverage, VERDICT.created_at_s),
        *(
            READING[name]
            for name in ("card_model", "card_id", "software_id", "protocol_id", "method")
        ),
    )
    query = query.where(
        *(ITEM.role == "whole", ITEM.reading_id == READING.id, JOB.id == ITEM.job_id),
        *(VERDICT.job_id == JOB.id, OF_WHOLES),
        # by its index, not through all readings of a card
        READING.subject_id.in_(sqlalchemy.select(VARIANT.id)),
    )
    rows: list[Any] = []
    for conditions in selection.where():
        rows += session.execute(query.where(*conditions))
    variants = fetch(session, tables.ModelVariant, (row.variant_id for row in rows))
    newest = {row.job_id: row for row in sorted(rows, key=lambda row: row.round)}
    models = [
        ComparedModel(row.job_id, row.title, variant_fields(variants[row.variant_id]), row.id)
        for row in sorted(
            newest.values(), key=lambda row: (row.coverage or 0.0, row.created_at_s, row.id)
        )
    ]
    return models, rows


def _compatible(
    session: Session, filters: Filters, rows: Sequence[Any]
) -> tuple[dict[str, str], set[str]]:
    """Return protocol id -> data class, and the torch versions. Raise `UsageError` if readings
    cannot be mixed.
    """
    protocols = fetch_values(
        session, (PROTOCOL.id, PROTOCOL.spec), (row.protocol_id for row in rows)
    )
    software = fetch(session, tables.SoftwareRow, (row.software_id for row in rows)).values()
    specs = {id_: dict(row.spec) for id_, row in protocols.items()}
    data = {id_: str(spec.pop("data", "normal")) for id_, spec in specs.items()}

    names: set[str] = set()
    for spec in specs.values():
        names.update(spec)
    for name in sorted(names):
        kinds = {str(spec.get(name)) for spec in specs.values()}
        example = f"{name}={min(kinds).lower()}"
        _require_one(filters, f"kinds of {name}", kinds, example)
    for column in SOFTWARE:
        if column.name == "id":
            continue
        versions = software_values(software, column.name)
        example = f"{column.name}={max(versions, default='')}"
        if column.name == "platform":
            example = "the id of a card, card=GPU-..."
        _require_one(filters, f"versions of {column.name}", versions, example)
    _require_one(filters, "card models", {row.card_model for row in rows}, "card=H200")
    methods = {str(row.method) for row in rows}
    _require_one(filters, "versions of the method", methods, "method=4")
    return data, {row.torch for row in software}


def _require_one(filters: Filters, what: str, kinds: set[str], example: str) -> None:
    """Raise `UsageError` if there are several values. `example`: filters for one of them."""
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds)[:6])
        raise UsageError(
            f"'{filters}' matches readings of several {what} ({listed}), which cannot be mixed.",
            f"Choose one, for instance with {example}.",
        )
