"""Find readings by filters, and single readings with their time series by id."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy
from sqlmodel import Session, col, select

from farm.errors import UsageError, did_you_mean
from farm.store import tables
from farm.store.columns import OF_TUPLES, OPERATOR, PROTOCOL, READING, SOFTWARE, VARIANT
from farm.store.content import stored_variant
from farm.store.database import read_clock_s
from farm.store.query import Filters, Selection, select_readings
from farm.types.fields import figure_json, names_of
from farm.types.figure import Figure, figure_of, value_of
from farm.types.format import ENERGY, TIME, quantity
from farm.types.reading import Trace
from farm.types.variant import Variant
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import CallCost

Sort = Literal["time", "energy", "power", "age"]

_BY = {
    "time": READING.time_us,
    "energy": READING.energy_mj,
    "power": READING.power_w,
    "age": READING.created_at_s,
}


#: The columns of a reading that a row needs.
_COLUMNS = (
    "id",
    "subject_id",
    "time_us",
    "time_half_width_us",
    "energy_mj",
    "energy_half_width_mj",
    "power_w",
    "card_id",
    "card_model",
    "flags",
    "method",
    "created_at_s",
    "origin",
)


@dataclass(frozen=True)
class LookupRow:
    """One reading. `line` has its figures: of one call, or of one pass of a whole model."""

    line: CostLine
    power_w: float | None
    card_model: str
    torch: str
    driver: str
    launch: str
    residency: str
    method: int | None
    created_at_s: float
    age_s: float
    origin: str  # the farm from which it was imported; "" if measured here

    @property
    def reading_id(self) -> str:
        return self.line.reading_id or ""

    @property
    def operator(self) -> str:
        """The operator type; "" for a whole model."""
        return self.line.subject.short_name

    @property
    def label(self) -> str:
        return self.line.subject.label

    @property
    def data_class(self) -> str:
        return self.line.subject.data

    @property
    def flags(self) -> tuple[str, ...]:
        return self.line.flags

    @property
    def time_us(self) -> float | None:
        return value_of(self.line.time_us)

    @property
    def energy_mj(self) -> float | None:
        return value_of(self.line.energy_mj)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names."""
        subject = self.line.subject
        return {
            "reading_id": self.line.reading_id,
            "operator": subject.short_name,
            "operator_id": subject.operator_id,
            "label": subject.label,
            "flops": subject.flops,
            "bytes_moved": subject.bytes_moved,
            **figure_json("time", "us", self.line.time_us),
            **figure_json("energy", "mj", self.line.energy_mj),
            "power_w": self.power_w,
            "card_id": self.line.card_id,
            "card_model": self.card_model,
            "torch": self.torch,
            "driver": self.driver,
            "launch": self.launch,
            "residency": self.residency,
            "data_class": subject.data,
            "flags": self.line.flags,
            "method": self.method,
            "created_at_s": self.created_at_s,
            "age_s": self.age_s,
            "origin": self.origin,
        }

    def __repr__(self) -> str:
        cost = f"{quantity(self.time_us, TIME)}, {quantity(self.energy_mj, ENERGY)}"
        return f"<LookupRow {self.label}: {cost} on {self.card_model}>"


def lookup(
    session: Session, filters: Filters, *, sort: Sort = "time", limit: int = 20
) -> tuple[tuple[LookupRow, ...], int]:
    """Return the first `limit` matching readings in the given order, and the number of all matching
    readings. The most expensive readings come first (if sorted by age: the newest); readings
    without the value come last. Whole models are included only if a filter is about a model. Raises
    `UsageError` if `sort` is unknown; see also `select_readings`."""
    if sort not in _BY:
        step = did_you_mean(sort, _BY) or f"Choose one of {', '.join(_BY)}."
        raise UsageError(f"Readings cannot be sorted by '{sort}'.", step)
    selection = _selection(session, filters)
    largest, total = _largest_of_subjects(session, selection, _BY[sort])
    subject_ids = _candidates(largest, limit)
    ids = _first_ids(session, Selection(selection.conditions, subject_ids), _BY[sort], limit)
    rows = _rows(session, ids)
    return tuple(rows[id_] for id_ in ids), total


def _selection(session: Session, filters: Filters) -> Selection:
    """Return the selected readings; those of whole models only if a filter is about a model."""
    selection = select_readings(session, filters, placed=False)
    filtered = {entry.column.name for entry in filters.filters}
    if selection.subject_ids is None and filtered.isdisjoint(("model", "batch", "subject_kind")):
        return Selection((*selection.conditions, OF_TUPLES), None)
    return selection


def _largest_of_subjects(
    session: Session, selection: Selection, by: Any
) -> tuple[dict[str, float | None], int]:
    """Return subject id -> the largest value of a column, and the number of readings."""
    columns = (READING.subject_id, sqlalchemy.func.count(), sqlalchemy.func.max(by))
    largest: dict[str, float | None] = {}
    total = 0
    for conditions in selection.where():
        query = sqlalchemy.select(*columns).where(*conditions).group_by(READING.subject_id)
        for subject_id, number, value in session.execute(query):
            total += number
            largest[subject_id] = value
    return largest, total


def _candidates(largest: Mapping[str, float | None], limit: int) -> tuple[str, ...]:
    """Return the subjects of the first `limit` readings: those with the `limit` largest values."""
    values = sorted((value for value in largest.values() if value is not None), reverse=True)
    if not 0 < limit <= len(values):
        return tuple(largest)
    least = values[limit - 1]
    return tuple(id_ for id_, value in largest.items() if value is not None and value >= least)


def _first_ids(session: Session, selection: Selection, by: Any, limit: int) -> list[str]:
    """Return the ids of the first `limit` readings. An index has the column `by`, and complete rows
    are long, so the ids are selected first.
    """
    rows: list[Any] = []
    for conditions in selection.where():
        first = sqlalchemy.select(READING.id, by).where(*conditions)
        in_order = first.order_by(by.desc().nulls_last(), READING.id)
        rows += session.execute(in_order.limit(limit)).all()

    def order(row: Any) -> tuple[bool, float, str]:
        return row[1] is None, -(row[1] or 0.0), row[0]

    return [row[0] for row in heapq.nsmallest(limit, rows, key=order)]


def _rows(session: Session, ids: list[str]) -> dict[str, LookupRow]:
    flops = sqlalchemy.func.coalesce(OPERATOR.flops, VARIANT.flops, 0)
    bytes_moved = sqlalchemy.func.coalesce(OPERATOR.bytes_moved, VARIANT.bytes_moved, 0)
    query = (
        sqlalchemy.select(
            *(READING[name] for name in _COLUMNS),
            OPERATOR.short_name,
            OPERATOR.label,
            flops.label("flops"),
            bytes_moved.label("bytes_moved"),
            SOFTWARE.torch,
            SOFTWARE.driver,
            PROTOCOL.launch,
            PROTOCOL.residency,
            PROTOCOL.data.label("data_class"),
            *(VARIANT[name] for name in names_of(Variant)),
        )
        .select_from(tables.ReadingRow)
        .join(tables.SoftwareRow, SOFTWARE.id == READING.software_id)
        .join(tables.ProtocolRow, PROTOCOL.id == READING.protocol_id)
        .outerjoin(tables.Operator, OPERATOR.id == READING.subject_id)
        .outerjoin(tables.ModelVariant, VARIANT.id == READING.subject_id)
        .where(READING.id.in_(ids))
    )
    now_s = read_clock_s(session)
    stored = session.execute(query).mappings().all()
    titles = _titles(stored)
    rows = {}
    for row in stored:
        label = titles.get(row["subject_id"]) or row["label"] or row["subject_id"]
        rows[row["id"]] = LookupRow(
            line=_line(row, label),
            power_w=row["power_w"],
            card_model=row["card_model"],
            torch=row["torch"],
            driver=row["driver"],
            launch=row["launch"],
            residency=row["residency"],
            method=row["method"],
            created_at_s=row["created_at_s"],
            age_s=max(0.0, now_s - row["created_at_s"]),
            origin=row["origin"],
        )
    return rows


def _line(row: Any, label: str) -> CostLine:
    """The cost of one call of a stored reading's subject."""
    subject = TupleView(
        operator_id=row["subject_id"],
        short_name=row["short_name"] or "",
        label=label,
        data=row["data_class"],
        flops=row["flops"],
        bytes_moved=row["bytes_moved"],
    )
    return CostLine(
        subject,
        count=1,
        origin="measured",
        cost=CallCost(
            Figure(row["time_us"], row["time_half_width_us"]),
            figure_of(row["energy_mj"], row["energy_half_width_mj"]),
        ),
        flags=tuple(row["flags"] or ()),
        reading_id=row["id"],
        card_id=row["card_id"],
    )


def _titles(rows: Iterable[Any]) -> dict[str, str]:
    """Return subject id -> the text of a whole model, with its version if several have the same."""
    variants = {}
    for row in rows:
        if row["label"] is None and row["model"] is not None:
            variants[row["subject_id"]] = stored_variant(row)
    numbers = Counter(map(str, variants.values()))
    titles = {}
    for subject_id, variant in variants.items():
        title = str(variant)
        titles[subject_id] = variant.with_version(title) if numbers[title] > 1 else title
    return titles


@dataclass(frozen=True)
class TracedReading:
    """A reading with its time series."""

    reading: tables.ReadingRow
    label: str  # label of the tuple or variant
    trace: Trace

    @property
    def title(self) -> str:
        figures = f"{self.reading.time_us:.4g} µs"
        if self.reading.power_w is not None and self.reading.energy_mj is not None:
            figures += f", {self.reading.power_w:.1f} W, {self.reading.energy_mj:.4g} mJ"
        return (
            f"{self.label}\n{figures} on {self.reading.card_model}, reading {self.reading.id[:12]}"
        )

    @property
    def levels_w(self) -> Mapping[str, float]:
        """Name -> the card's power in W, at idle and at full clocks without work. Unknown levels
        are left out.
        """
        levels = {"idle": self.reading.idle_power_w, "base": self.reading.base_power_w}
        return {name: value for name, value in levels.items() if value is not None}


def find_traced(session: Session, beginning: str) -> TracedReading:
    """Return the one reading whose id starts with `beginning`, with its time series. Raises
    `UsageError` if not exactly one reading matches, or if it has no time series."""
    where = "`farm report JOB --readings` lists the ids."
    if not beginning.strip():
        raise UsageError("The id of the reading is empty.", where)
    begins = col(tables.ReadingRow.id).startswith(beginning, autoescape=True)
    matches = session.exec(select(tables.ReadingRow).where(begins).limit(2)).all()
    if len(matches) != 1:
        if not matches:
            raise UsageError(f"No reading has an id that begins with '{beginning}'.", where)
        raise UsageError(
            f"Several readings have an id that begins with '{beginning}'.",
            f"Give a longer id. {where}",
        )
    reading = matches[0]
    if (stored := session.get(tables.TraceRow, reading.id)) is None:
        why, step = "its card has no power sensors", "Only readings of GPUs have time series."
        if session.get_one(tables.CardRow, reading.card_id).is_gpu:
            why = "the database does not contain it"
            step = (
                "`farm db prune` may have deleted it. Measure again: `farm run MODEL --reuse none`."
            )
            if reading.origin:
                why = f"the export from {reading.origin} did not include it"
                step = (
                    f"Export the readings of {reading.origin} again with `farm export --traces`, "
                    "and import them."
                )
        raise UsageError(f"The reading {reading.id} has no time series: {why}.", step)
    return TracedReading(reading, _label(session, reading), Trace.unpack(stored.packed))


def _label(session: Session, reading: tables.ReadingRow) -> str:
    """Return the label of the tuple or variant of a reading."""
    if reading.subject_kind == "operator":
        return getattr(
            session.get(tables.Operator, reading.subject_id), "label", reading.subject_id
        )
    job = tables.Job
    titles = (
        select(job.title)
        .where(job.variant_id == reading.subject_id)
        .order_by(col(job.created_at_s).desc())
    )
    if title := session.exec(titles.limit(1)).first():
        return title
    row = session.get(tables.ModelVariant, reading.subject_id)  # a reading of a study has no job
    return str(stored_variant(row.model_dump())) if row else reading.subject_id
