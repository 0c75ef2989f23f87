"""What does this operator cost? Answered from readings, each with where it comes from and how old it is."""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import sqlalchemy
from sqlmodel import Session

from farm.errors import UsageError, did_you_mean
from farm.exchange.filters import Filters, Selection, select_readings
from farm.store import tables
from farm.store.database import read_clock_s
from farm.types.protocol import Variant

Sort = Literal["time", "energy", "power", "age"]
SORTS: tuple[Sort, ...] = get_args(Sort)


@dataclass(frozen=True)
class Found:
    """One reading. Figures are of one call (of one pass, for a whole model), half-widths of the 95 % interval."""

    reading_id: str
    operator: str  # "" of a whole model
    operator_id: str
    label: str
    flops: int
    bytes_moved: int
    time_us: float
    time_half_width_us: float
    energy_mj: float | None
    energy_half_width_mj: float | None
    power_w: float | None
    card_id: str
    card_model: str
    torch: str
    driver: str
    launch: str
    residency: str
    data_class: str
    flags: tuple[str, ...]
    method: int | None
    created_at_s: float
    age_s: float
    origin: str  # the farm it was imported from; "" measured here

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "flags": list(self.flags)}


@dataclass(frozen=True)
class Answer:
    """The first readings by the order that was asked for, and how many there are."""

    rows: tuple[Found, ...]
    total: int


_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_OPERATOR = tables.Operator.__table__.c  # type: ignore[attr-defined]
_VARIANT = tables.ModelVariant.__table__.c  # type: ignore[attr-defined]
_SOFTWARE = tables.Software.__table__.c  # type: ignore[attr-defined]
_PROTOCOL = tables.Protocol.__table__.c  # type: ignore[attr-defined]
_BY = {"time": _READING.time_us, "energy": _READING.energy_mj, "power": _READING.power_w, "age": _READING.created_at_s}


def lookup(session: Session, filters: Filters, *, sort: Sort = "time", limit: int = 20) -> Answer:
    """Readings that are meant, the costliest first (by age: the newest).

    Of operators, unless a filter is about a model. What has no energy comes last by energy, and so on.

    Raises:
        UnknownOperator, UsageError: see `farm.exchange.filters.select_readings`; there is no such order.
    """
    if sort not in SORTS:
        raise UsageError(
            f"There is no order '{sort}'.", did_you_mean(sort, SORTS) or f"Choose one of {', '.join(SORTS)}."
        )
    selection = select_readings(session, filters, placed=False)
    whole = any(entry.column.name in ("model", "batch", "subject_kind") for entry in filters.filters)
    if not whole and selection.subject_ids is None:
        of_operators = (*selection.conditions, _READING.subject_kind == "operator")
        selection = Selection(of_operators, None)
    total, best = 0, list[Any]()
    by = _BY[sort]
    # Ids first: an index holds what decides, the rows themselves are long.
    for conditions in selection.where():
        total += (
            session.scalar(sqlalchemy.select(sqlalchemy.func.count()).select_from(tables.Reading).where(*conditions))
            or 0
        )
        first = sqlalchemy.select(_READING.id, by).where(*conditions)
        best += session.execute(first.order_by(by.desc().nulls_last(), _READING.id).limit(limit)).all()
    chosen = heapq.nsmallest(limit, best, key=lambda row: (row[1] is None, -(row[1] or 0.0), row[0]))
    found = _rows(session, [row[0] for row in chosen])
    return Answer(tuple(found[row[0]] for row in chosen), total)


def _rows(session: Session, ids: list[str]) -> dict[str, Found]:
    own = [name for name in Found.__dataclass_fields__ if name in _READING]
    query = (
        sqlalchemy.select(
            _READING.id.label("reading_id"),
            _READING.subject_id,
            *(_READING[name] for name in own),
            *(_OPERATOR[name] for name in ("short_name", "label")),
            sqlalchemy.func.coalesce(_OPERATOR.flops, _VARIANT.flops, 0).label("flops"),
            sqlalchemy.func.coalesce(_OPERATOR.bytes_moved, _VARIANT.bytes_moved, 0).label("bytes_moved"),
            *(_SOFTWARE[name] for name in ("torch", "driver")),
            *(_PROTOCOL[name] for name in ("launch", "residency")),
            _PROTOCOL.data.label("data_class"),
            *(_VARIANT[one.name] for one in dataclasses.fields(Variant)),
        )
        .select_from(tables.Reading)
        .join(tables.Software, _SOFTWARE.id == _READING.software_id)
        .join(tables.Protocol, _PROTOCOL.id == _READING.protocol_id)
        .outerjoin(tables.Operator, _OPERATOR.id == _READING.subject_id)
        .outerjoin(tables.ModelVariant, _VARIANT.id == _READING.subject_id)
        .where(_READING.id.in_(ids))
    )
    now_s = read_clock_s(session)
    found = {}
    for row in session.execute(query):
        values = dict(row._mapping)
        label = values["label"]
        if label is None and values["model"] is not None:
            label = str(Variant(**{one.name: values[one.name] for one in dataclasses.fields(Variant)}))
        about = {
            "operator": values["short_name"] or "",
            "operator_id": values["subject_id"],
            "label": label or values["subject_id"],
            "flags": tuple(values["flags"] or ()),
            "age_s": max(0.0, now_s - values["created_at_s"]),
        }
        kept = {name: values[name] for name in Found.__dataclass_fields__ if name in values}
        found[row.reading_id] = Found(**{**kept, **about})
    return found
