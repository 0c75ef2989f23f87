"""Compare two jobs or two sets of readings: the operators that take longer, and by how much.

Tuples are matched by their description; if the two sides differ in their dtype, by the rest of it. A tuple is faster or
slower only if the intervals do not overlap. Tuples of one side only are listed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy
from sqlmodel import Session

from farm.errors import NoSuchJob, UnknownOperator, UsageError
from farm.exchange.filters import Filters, parse, select_readings
from farm.store import tables
from farm.store.database import fetch, fetch_values
from farm.verdict.figures import Figure, figure_json, total_of

_READING, _OPERATOR, _PROTOCOL, _SOFTWARE = (
    table.__table__.c  # type: ignore[union-attr]
    for table in (tables.ReadingRow, tables.Operator, tables.ProtocolRow, tables.SoftwareRow)
)


@dataclass(frozen=True)
class Side:
    """A job, or the readings that match filters."""

    text: str
    job_id: str  # "" for filters
    card_models: tuple[str, ...]
    software: tuple[str, ...]
    dtypes: tuple[str, ...]
    tuples: int


@dataclass(frozen=True)
class Difference:
    """One quantity on both sides, in one unit; `change` is b / a - 1."""

    a: Figure
    b: Figure

    @property
    def change(self) -> Figure:
        return self.b.deviation_from(self.a) if self.a.value else Figure(0.0)

    @property
    def apart(self) -> bool:
        """True if the intervals do not overlap."""
        return abs(self.b.value - self.a.value) > self.a.half_width + self.b.half_width

    @property
    def verdict(self) -> Literal["faster", "slower", "same"]:
        if not self.apart:
            return "same"
        return "slower" if self.b.value > self.a.value else "faster"


@dataclass(frozen=True)
class ComparedRow:
    """One tuple or operator type on both sides, with the calls of the first. Time in µs, energy in mJ."""

    name: str
    operator: str
    calls: int
    tuples: int
    time: Difference
    energy: Difference | None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {name: getattr(self, name) for name in ("name", "operator", "calls", "tuples")}
        for name, unit, found in (("time", "us", self.time), ("energy", "mj", self.energy)):
            a, b, change = (found.a, found.b, found.change) if found else (None, None, None)
            data |= figure_json(f"a_{name}", unit, a) | figure_json(f"b_{name}", unit, b)
            data |= figure_json(f"{name}_change", "", change)
            data[f"{name}_verdict"] = found.verdict if found else "unknown"
        return data


@dataclass(frozen=True)
class SideComparison:
    """Both sides, with the largest changes of time first."""

    a: Side
    b: Side
    total: ComparedRow | None  # None: they have no tuple in common
    types: tuple[ComparedRow, ...]
    tuples: tuple[ComparedRow, ...]
    only_a: tuple[str, ...]  # labels
    only_b: tuple[str, ...]

    def worse_by(self, limit: float) -> list[str]:
        """The sum and operator types that take more on side b by more than this fraction, with intervals apart."""
        return [
            f"{row.name}: {what} {difference.change.value * 100:+.1f} %"
            for row in [*([self.total] if self.total else []), *self.types]
            for what, difference in (("time", row.time), ("energy", row.energy))
            if difference and difference.apart and difference.change.value > limit
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; changes are fractions, b / a - 1."""
        rows = {name: [row.to_json() for row in getattr(self, name)] for name in ("types", "tuples")}
        total = self.total.to_json() if self.total else None
        return {**vars(self), "a": vars(self.a), "b": vars(self.b), "total": total, **rows}


@dataclass(frozen=True)
class SideTuple:
    """One tuple of a side."""

    operator_id: str
    short_name: str
    label: str
    data: str
    calls: int
    time: Figure
    energy: Figure | None


Pair = tuple[SideTuple, SideTuple]
Tuples = tuple[Side, Sequence[SideTuple]]


def compare(session: Session, first: str, second: str) -> SideComparison:
    """Compare two sides.

    Args:
        first, second: a job's id or its beginning, or filters (``card=H200 torch=2.11``, see `farm.exchange.filters`).

    Raises:
        NoSuchJob, UsageError: nothing matches a side, or its readings cannot be summed.
    """
    a, b = _side(session, first), _side(session, second)
    texts: dict[str, str] = {}
    if len(a[0].dtypes) == len(b[0].dtypes) == 1 and a[0].dtypes != b[0].dtypes:
        ids = [row.operator_id for _, rows in (a, b) for row in rows]
        specs = fetch_values(session, (_OPERATOR.id, _OPERATOR.spec), ids)
        texts = {id_: json.dumps(row.spec, sort_keys=True) for id_, row in specs.items()}

    def key(row: SideTuple, side: Side) -> str:
        return texts[row.operator_id].replace(f'"{side.dtypes[0]}"', '"*"') if texts else row.operator_id

    pairs, only_a, only_b = _matched(a, b, key)
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair[0].short_name].append(pair)
    types = [_compared(group, name, name) for name, group in groups.items()]
    tuples = [_compared([pair], pair[0].label, pair[0].short_name) for pair in pairs]

    def largest_first(row: ComparedRow) -> tuple[bool, float, str]:
        return not row.time.apart, -abs(row.time.b.value - row.time.a.value), row.name

    return SideComparison(
        a[0],
        b[0],
        _compared(pairs, "sum", "") if pairs else None,
        tuple(sorted(types, key=largest_first)),
        tuple(sorted(tuples, key=largest_first)),
        tuple(row.label for row in only_a),
        tuple(row.label for row in only_b),
    )


def _matched(
    a: Tuples, b: Tuples, key: Callable[[SideTuple, Side], str]
) -> tuple[list[Pair], list[SideTuple], list[SideTuple]]:
    """Pairs of the same tuple, with the same data class if both sides have it; and the other tuples of both sides."""
    of_b: dict[str, dict[str, SideTuple]] = defaultdict(dict)
    for row in b[1]:
        of_b[key(row, b[0])][row.data] = row
    of_a = [(row, of_b[key(row, a[0])]) for row in a[1]]
    same = [(row, others.pop(row.data, None)) for row, others in of_a]
    pairs = [(row, other) for row, other in same if other is not None]
    only_a = []
    for (row, others), (_, matched) in zip(of_a, same, strict=True):
        if matched is None and others:
            pairs.append((row, others.popitem()[1]))
        elif matched is None:
            only_a.append(row)
    return pairs, only_a, [row for rows in of_b.values() for row in rows.values()]


def _compared(pairs: Sequence[Pair], name: str, operator: str) -> ComparedRow:
    def difference(quantity: Literal["time", "energy"]) -> Difference | None:
        first = total_of((getattr(a, quantity), a.calls) for a, _ in pairs)
        second = total_of((getattr(b, quantity), a.calls) for a, b in pairs)
        return Difference(first, second) if first and second else None

    time = difference("time")
    assert time is not None
    return ComparedRow(name, operator, sum(a.calls for a, _ in pairs), len(pairs), time, difference("energy"))


def _side(session: Session, text: str) -> Tuples:
    words = text.split()
    if not words:
        raise UsageError("A side of the comparison is empty.", "Name a job, or filters such as 'card=H200 torch=2.11'.")
    if len(words) == 1 and not any(sign in text for sign in "=<>"):
        from farm.jobs import jobs

        try:
            return _of_job(session, jobs.find(session, text).id)
        except NoSuchJob as error:
            try:
                return _of_filters(session, parse(words))
            except UnknownOperator:
                raise error from None
    return _of_filters(session, parse(words))


def _of_job(session: Session, job_id: str) -> Tuples:
    from farm.report.report import build

    built = build(session, job_id)
    rows = []
    for row in built.tuples:
        if row.time_us is not None:
            time = Figure(row.time_us, row.time_half_width_us or 0.0)
            energy = None if row.energy_mj is None else Figure(row.energy_mj, row.energy_half_width_mj or 0.0)
            rows.append(SideTuple(row.operator_id, row.short_name, row.label, row.data, row.calls, time, energy))
    if not rows:
        raise UsageError(f"The job {job_id} has no readings yet.", f"`farm status {job_id}` shows its progress.")
    dtype = (built.request.get("variant") or {}).get("dtype")
    card_models = tuple(sorted({card.model for card in built.cards}))
    torches = tuple(sorted({str(software["torch"]) for software in built.software}))
    return Side(built.title, job_id, card_models, torches, (dtype,) if dtype else (), len(rows)), rows


def _of_filters(session: Session, filters: Filters) -> Tuples:
    """Each tuple with the mean of its readings; the half-width includes their distance from the mean."""
    selection = select_readings(session, filters, placed=False)
    key = (_READING.card_model, _READING.software_id, _READING.protocol_id, _READING.subject_id, _READING.method)
    of = sqlalchemy.func
    query = sqlalchemy.select(
        *key,
        of.avg(_READING.time_us).label("time_us"),
        of.max(_READING.time_half_width_us).label("time_half_width_us"),
        (of.max(_READING.time_us) - of.min(_READING.time_us)).label("time_spread_us"),
        of.avg(_READING.energy_mj).label("energy_mj"),
        of.max(_READING.energy_half_width_mj).label("energy_half_width_mj"),
        (of.max(_READING.energy_mj) - of.min(_READING.energy_mj)).label("energy_spread_mj"),
        of.count(_READING.energy_mj).label("with_energy"),
        of.count().label("readings"),
    ).where(_READING.subject_kind == "operator")
    found = [
        row
        for conditions in selection.where()
        for row in session.execute(query.where(*conditions).group_by(*key)).all()
    ]
    if not found:
        raise UsageError(f"No readings of operators match '{filters}'.", "`farm lookup` shows the readings.")
    data, torches = _compatible(session, filters, found)
    wanted = (_OPERATOR.id, _OPERATOR.short_name, _OPERATOR.label, _OPERATOR.spec)
    operators = fetch_values(session, wanted, (row.subject_id for row in found))
    rows = []
    for row in found:
        operator = operators[row.subject_id]
        energy = None
        if row.with_energy == row.readings:
            energy = Figure(row.energy_mj, (row.energy_half_width_mj or 0.0) + row.energy_spread_mj / 2)
        time = Figure(row.time_us, row.time_half_width_us + row.time_spread_us / 2)
        rows.append(SideTuple(operator.id, operator.short_name, operator.label, data[row.protocol_id], 1, time, energy))
    dtypes = {dtype for operator in operators.values() if (dtype := _dtype(operator.spec))}
    about = Side(str(filters), "", (found[0].card_model,), tuple(torches), tuple(sorted(dtypes)), len(rows))
    return about, rows


def _dtype(spec: Mapping[str, Any]) -> str | None:
    """The dtype of the first floating-point tensor of a tuple's description."""
    dtypes = (str(tensor.get("dtype")) for tensor in spec.get("tensors", ()))
    return next((dtype for dtype in dtypes if dtype.startswith(("float", "bfloat"))), None)


def _compatible(session: Session, filters: Filters, found: Sequence[Any]) -> tuple[dict[str, str], set[str]]:
    """The data class of each protocol by id, and the version of torch; `UsageError` if readings cannot be mixed."""
    protocols = fetch_values(session, (_PROTOCOL.id, _PROTOCOL.spec), (row.protocol_id for row in found))
    software = fetch(session, tables.SoftwareRow, (row.software_id for row in found)).values()
    specs = {id_: dict(row.spec) for id_, row in protocols.items()}
    data = {id_: str(spec.pop("data", "normal")) for id_, spec in specs.items()}
    fields: list[tuple[str, set[str], str]] = []  # a name in the plural, its values, and a filter for one of them
    for name in sorted({name for spec in specs.values() for name in spec}):
        values = {str(spec.get(name)) for spec in specs.values()}
        fields.append((f"kinds of {name}", values, f"{name}={min(values).lower()}"))
    for name in (column.name for column in _SOFTWARE if column.name != "id"):
        values = {str(getattr(row, name)) for row in software}
        example = f"{name}={max(values)}" if name != "platform" else "the id of a card, card=GPU-..."
        fields.append((f"versions of {name}", values, example))
    fields.append(("card models", {row.card_model for row in found}, "card=H200"))
    fields.append(("methods", {str(row.method) for row in found}, "method=4"))
    for what, values, example in fields:
        if len(values) > 1:
            listed = ", ".join(sorted(values)[:6])
            raise UsageError(
                f"'{filters}' matches readings of several {what} ({listed}), which cannot be mixed.",
                f"Choose one, for instance with {example}.",
            )
    return data, {row.torch for row in software}
