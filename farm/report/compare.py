"""Two jobs, or two sets of readings, held against each other: which operators take longer, and by how much.

Tuples are matched by what they are; where the two sides differ in their dtype, by what they are but for that. Nothing is
called faster or slower whose intervals overlap, and what one side alone has is listed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import sqlalchemy
from sqlmodel import Session

from farm.errors import NoSuchJob, UnknownOperator, UsageError
from farm.exchange.filters import Filters, parse, select_readings
from farm.store import tables
from farm.store.rows import in_batches
from farm.verdict.figures import Figure

Change = Literal["faster", "slower", "same", "unknown"]


@dataclass(frozen=True)
class Side:
    """What is compared: a job, or the readings that filters mean."""

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
        if not self.a.value:
            return Figure(0.0)
        ratio = self.b.value / self.a.value
        return Figure(ratio - 1, abs(ratio) * math.hypot(self.a.relative, self.b.relative))

    @property
    def apart(self) -> bool:
        """Whether the intervals do not overlap."""
        return abs(self.b.value - self.a.value) > self.a.half_width + self.b.half_width

    @property
    def verdict(self) -> Change:
        if not self.apart:
            return "same"
        return "slower" if self.b.value > self.a.value else "faster"


@dataclass(frozen=True)
class Compared:
    """One tuple or operator type on both sides; calls are those of the first. Time in µs, energy in mJ."""

    name: str
    operator: str
    calls: int
    tuples: int
    time: Difference
    energy: Difference | None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operator": self.operator,
            "calls": self.calls,
            "tuples": self.tuples,
            **_difference("time", "us", self.time),
            **_difference("energy", "mj", self.energy),
        }


def _difference(name: str, unit: str, found: Difference | None) -> dict[str, Any]:
    sides = {side: getattr(found, side) if found else None for side in ("a", "b")}
    return {
        **{f"{side}_{name}_{unit}": figure.value if figure else None for side, figure in sides.items()},
        **{f"{side}_{name}_half_width_{unit}": figure.half_width if figure else None for side, figure in sides.items()},
        f"{name}_change": found.change.value if found else None,
        f"{name}_change_half_width": found.change.half_width if found else None,
        f"{name}_verdict": found.verdict if found else "unknown",
    }


@dataclass(frozen=True)
class Comparison:
    """Both sides, the biggest movers in time first."""

    a: Side
    b: Side
    total: Compared | None  # None: they have no tuple in common
    types: tuple[Compared, ...]
    tuples: tuple[Compared, ...]
    only_a: tuple[str, ...]  # labels
    only_b: tuple[str, ...]

    def worse_by(self, limit: float) -> list[str]:
        """What takes more by over this fraction on the second side, intervals apart: the sum and operator types."""
        found = []
        for row in [*([self.total] if self.total else []), *self.types]:
            for what, difference in (("time", row.time), ("energy", row.energy)):
                if difference and difference.apart and difference.change.value > limit:
                    found.append(f"{row.name}: {what} {difference.change.value * 100:+.1f} %")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; changes are fractions, b / a - 1."""
        return {
            "a": asdict(self.a),
            "b": asdict(self.b),
            "total": self.total.to_json() if self.total else None,
            "types": [row.to_json() for row in self.types],
            "tuples": [row.to_json() for row in self.tuples],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


@dataclass(frozen=True)
class Read:
    """One tuple on one side."""

    operator_id: str
    short_name: str
    label: str
    data: str
    calls: int
    time: Figure
    energy: Figure | None


@dataclass(frozen=True)
class _Side:
    about: Side
    rows: Sequence[Read]


def compare(session: Session, first: str, second: str) -> Comparison:
    """
    Args:
        first, second: a job's id or its beginning, or filters (``card=H200 torch=2.11``, see `farm.exchange.filters`).

    Raises:
        NoSuchJob, UsageError: a side means nothing, or readings that are not to be summed.
    """
    a, b = (_side(session, text) for text in (first, second))
    dtypes_differ = len(a.about.dtypes) == len(b.about.dtypes) == 1 and a.about.dtypes != b.about.dtypes
    key: Callable[[Read, Side], str] = lambda row, side: row.operator_id  # noqa: E731
    if dtypes_differ:
        specs = _specs(session, {row.operator_id for side in (a, b) for row in side.rows})
        key = lambda row, side: specs[row.operator_id].replace(f'"{side.dtypes[0]}"', '"*"')  # noqa: E731
    pairs, only_a, only_b = _matched(a, b, key)
    tuples = [_compared([pair], pair[0].label, pair[0].short_name) for pair in pairs]
    groups: dict[str, list[tuple[Read, Read]]] = defaultdict(list)
    for pair in pairs:
        groups[pair[0].short_name].append(pair)
    types = [_compared(group, name, name) for name, group in groups.items()]
    return Comparison(
        a.about,
        b.about,
        _compared(pairs, "sum", "") if pairs else None,
        tuple(sorted(types, key=_moved)),
        tuple(sorted(tuples, key=_moved)),
        tuple(row.label for row in only_a),
        tuple(row.label for row in only_b),
    )


def _moved(row: Compared) -> tuple[bool, float, str]:
    """The order of rows: those whose intervals lie apart first, by how much time that is."""
    return not row.time.apart, -abs(row.time.b.value - row.time.a.value), row.name


def _matched(
    a: _Side, b: _Side, key: Callable[[Read, Side], str]
) -> tuple[list[tuple[Read, Read]], list[Read], list[Read]]:
    """Pairs of the same tuple, in the same class of data where both have it; what is left on either side."""
    there: dict[str, dict[str, Read]] = defaultdict(dict)
    for row in b.rows:
        there[key(row, b.about)][row.data] = row
    pairs, left = [], []
    for row in a.rows:
        same = there.get(key(row, a.about), {})
        (pairs.append((row, same.pop(row.data))) if row.data in same else left.append(row))
    only_a = []
    for row in left:
        others = there.get(key(row, a.about), {})
        (pairs.append((row, others.popitem()[1])) if others else only_a.append(row))
    return pairs, only_a, [row for rows in there.values() for row in rows.values()]


def _compared(pairs: Sequence[tuple[Read, Read]], name: str, operator: str) -> Compared:
    time = Difference(_summed([(a.time, a.calls) for a, _ in pairs]), _summed([(b.time, a.calls) for a, b in pairs]))
    energies = [(a.energy, b.energy, a.calls) for a, b in pairs if a.energy and b.energy]
    energy = None
    if len(energies) == len(pairs):
        energy = Difference(
            _summed([(one, calls) for one, _, calls in energies]), _summed([(one, calls) for _, one, calls in energies])
        )
    return Compared(name, operator, sum(a.calls for a, _ in pairs), len(pairs), time, energy)


def _summed(figures: Sequence[tuple[Figure, int]]) -> Figure:
    """Figures and how often each counts. (No figure is made for each: there may be thousands.)"""
    if len(figures) == 1:  # of a tuple
        figure, calls = figures[0]
        return figure.times(calls) if calls != 1 else figure
    return Figure(
        math.fsum(figure.value * calls for figure, calls in figures),
        math.hypot(*(figure.half_width * calls for figure, calls in figures)),
    )


# --------------------------------------------------------------------------------------------- sides


def _side(session: Session, text: str) -> _Side:
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


def _of_job(session: Session, job_id: str) -> _Side:
    from farm.report.report import build

    built = build(session, job_id)
    rows = [
        Read(
            row.operator_id,
            row.short_name,
            row.label,
            row.data,
            row.calls,
            Figure(row.time_us, row.time_half_width_us or 0.0),
            None if row.energy_mj is None else Figure(row.energy_mj, row.energy_half_width_mj or 0.0),
        )
        for row in built.tuples
        if row.time_us is not None
    ]
    if not rows:
        raise UsageError(f"The job {job_id} has no reading yet.", f"Look at it with `farm status {job_id}`.")
    dtype = (built.request.get("variant") or {}).get("dtype")
    about = Side(
        built.title,
        job_id,
        tuple(sorted({card.model for card in built.cards})),
        tuple(sorted({str(software["torch"]) for software in built.software})),
        (dtype,) if dtype else (),
        len(rows),
    )
    return _Side(about, rows)


_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_OPERATOR = tables.Operator.__table__.c  # type: ignore[attr-defined]
_PROTOCOL = tables.Protocol.__table__.c  # type: ignore[attr-defined]


def _of_filters(session: Session, filters: Filters) -> _Side:
    """Tuples with the mean of their readings; several readings of one lie within its half-width."""
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
        raise UsageError(f"No reading of an operator is meant by '{filters}'.", "`farm lookup` shows what there is.")
    data = _one_protocol(session, filters, {row.protocol_id for row in found})
    software = {row.id: row for row in session.execute(sqlalchemy.select(tables.Software.__table__))}  # type: ignore[attr-defined]
    _only_one(filters, "card models", {row.card_model for row in found}, "card=H200")
    torches = {software[row.software_id].torch for row in found}
    _only_one(filters, "software", torches, "torch=2.11")
    _only_one(filters, "drivers", {software[row.software_id].driver for row in found}, "driver=580")
    _only_one(filters, "methods", {str(row.method) for row in found}, "method=4")
    operators = {
        row.id: row
        for batch in in_batches(row.subject_id for row in found)
        for row in session.execute(
            sqlalchemy.select(_OPERATOR.id, _OPERATOR.short_name, _OPERATOR.label).where(_OPERATOR.id.in_(batch))
        )
    }
    rows = []
    for row in found:
        operator = operators[row.subject_id]
        energy = None
        if row.with_energy == row.readings:
            energy = Figure(row.energy_mj, (row.energy_half_width_mj or 0.0) + row.energy_spread_mj / 2)
        time = Figure(row.time_us, row.time_half_width_us + row.time_spread_us / 2)
        rows.append(Read(operator.id, operator.short_name, operator.label, data[row.protocol_id], 1, time, energy))
    dtypes = {dtype for row in operators.values() if (dtype := _dtype(row.label))}
    about = Side(
        str(filters), "", tuple({row.card_model for row in found}), tuple(torches), tuple(sorted(dtypes)), len(rows)
    )
    return _Side(about, rows)


_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def _dtype(label: str) -> str | None:
    """The floating dtype that a label names; descriptions are long, and thousands of them take a second to read."""
    return next((_SHORT[word] for word in reversed(label.split()) if word in _SHORT), None)


def _one_protocol(session: Session, filters: Filters, ids: set[str]) -> dict[str, str]:
    """Protocol id -> class of data.

    Raises:
        UsageError: they differ in more than that.
    """
    rows = session.execute(sqlalchemy.select(_PROTOCOL.id, _PROTOCOL.spec).where(_PROTOCOL.id.in_(ids)))
    specs = {row.id: dict(row.spec) for row in rows}
    data = {id_: str(spec.pop("data", "normal")) for id_, spec in specs.items()}
    for name in sorted({name for spec in specs.values() for name in spec}):
        values = {str(spec.get(name)) for spec in specs.values()}
        _only_one(filters, f"kinds of {name}", values, f"{name}={min(values).lower()}")
    return data


def _only_one(filters: Filters, what: str, there: set[str], example: str) -> None:
    if len(there) > 1:
        raise UsageError(
            f"'{filters}' means readings of several {what} ({', '.join(sorted(there)[:6])}), which are not held together.",
            f"Choose one, for instance with {example}.",
        )


def _specs(session: Session, ids: Iterable[str]) -> Mapping[str, str]:
    """Descriptions as text, to be compared."""
    return {
        row.id: json.dumps(row.spec, sort_keys=True)
        for batch in in_batches(ids)
        for row in session.execute(sqlalchemy.select(_OPERATOR.id, _OPERATOR.spec).where(_OPERATOR.id.in_(batch)))
    }
