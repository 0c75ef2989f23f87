"""Compare two jobs or two sets of readings: whole models, sums, operator types and tuples, in time
and energy.

Wholes and sums come from verdicts. Models are matched by their variants and tuples by their
descriptions. The dtype may differ, and so may a field that both sides filter on. A row is faster or
slower only if the intervals do not overlap. If a row does not cover everything, it says what it
covers."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import sqlalchemy
from sqlmodel import Session, col

from farm.errors import NoSuchJob, UnknownOperator, UsageError
from farm.report.card_spread import Quantity, between_cards
from farm.store import tables
from farm.store.columns import ITEM, JOB, OPERATOR, PROTOCOL, READING, SOFTWARE, VARIANT, VERDICT
from farm.store.content import counts, placed_calls
from farm.store.database import by_key, fetch, fetch_values, values
from farm.store.query import Filters, parse, select_readings
from farm.types.fields import names_of
from farm.types.format import percent
from farm.types.protocol import Variant, software_values
from farm.verdict.figures import NOT_IN_SCOPE, Figure, figure_json, share_of, total_of
from farm.verdict.verdict import VERDICT_SCHEMA, Verdict

Weights = Literal["own calls", "calls of A", "calls of B", "once"]


@dataclass(frozen=True)
class Side:
    """A job, or the readings that match filters."""

    text: str
    job_id: str  # "" if the side is given by filters
    card_models: tuple[str, ...]
    software: tuple[str, ...]
    dtypes: tuple[str, ...]
    tuples: int
    cards: tuple[str, ...]  # ids; if filters match several cards, some of them


@dataclass(frozen=True)
class Difference:
    """One quantity on both sides, in the same unit; `change` is b / a - 1. None: unknown, or absent
    on that side.

    `between_cards` is the relative half-width of the change for differences between single cards of
    one model."""

    a: Figure | None
    b: Figure | None
    between_cards: float = 0.0

    @property
    def change(self) -> Figure | None:
        if self.a is None or self.b is None:
            return None
        if not self.a.value:
            return Figure(0.0)
        change = self.b.deviation_from(self.a)
        cards_half_width = (1 + change.value) * self.between_cards
        return replace(change, half_width=math.hypot(change.half_width, cards_half_width))

    @property
    def apart(self) -> bool:
        """True if the intervals do not overlap, and the change is larger than cards of one model
        differ.
        """
        if self.a is None or self.b is None:
            return False
        difference = abs(self.b.value - self.a.value)
        cards_half_width = self.between_cards * self.b.value
        return difference > max(self.a.half_width + self.b.half_width, cards_half_width)

    @property
    def order(self) -> tuple[bool, float]:
        """A key that sorts the largest difference first, and those with overlapping intervals
        last.
        """
        a, b = (figure.value if figure else 0.0 for figure in (self.a, self.b))
        return self.verdict == "same", -abs(b - a)

    @property
    def verdict(self) -> Literal["faster", "slower", "same", "unknown"]:
        if self.a is None or self.b is None:
            return "unknown"
        if not self.apart:
            return "same"
        return "slower" if self.b.value > self.a.value else "faster"


@dataclass(frozen=True)
class ComparedRow:
    """The comparison of one whole model, sum, operator type or tuple. Time in µs, energy in mJ."""

    name: str
    operator: str
    calls: int  # in A's figures
    tuples: int
    time: Difference  # of all calls
    energy: Difference
    b_calls: int = 0
    b_tuples: int = 0
    a_share: float | None = None  # of the side's sum (time), with the side's own number of calls
    b_share: float | None = None
    # share of the time that the row would have with all tuples of the side
    a_coverage: float | None = None
    b_coverage: float | None = None
    covers: str = ""  # what the row covers, in words; "" if it covers everything
    a_job: str = ""  # the job of the verdict, for a whole or a sum
    b_job: str = ""

    def on_different_cards(self, between: Mapping[Quantity, float]) -> ComparedRow:
        """Return the row with changes that include the differences between single cards
        (`between_cards`).
        """
        time = replace(self.time, between_cards=between.get("time", 0.0))
        energy = replace(self.energy, between_cards=between.get("energy", 0.0))
        return replace(self, time=time, energy=energy)

    def to_json(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name not in ("time", "energy")}
        for name, unit, found in (("time", "us", self.time), ("energy", "mj", self.energy)):
            data |= figure_json(f"a_{name}", unit, found.a) | figure_json(
                f"b_{name}", unit, found.b
            )
            data |= figure_json(f"{name}_change", "", found.change)
            data[f"{name}_verdict"] = found.verdict
        return data


@dataclass(frozen=True)
class ComparedKernels:
    """A part of a model in an eager and a compiled job, or in two compiled jobs."""

    modules: tuple[
        str, ...
    ]  # the module paths (*: several numbers); () for the calls of a side that have no match
    a_operators: Mapping[str, int]  # operator type -> number of calls
    b_operators: Mapping[str, int]
    row: ComparedRow

    def saved(self, found: Difference) -> float | None:
        """What B saves in time or energy; None if a side's figure is unknown. A side without calls
        costs nothing.
        """
        sides = ((self.a_operators, found.a), (self.b_operators, found.b))
        costs = [
            figure.value if figure else None if operators else 0.0 for operators, figure in sides
        ]
        return None if costs[0] is None or costs[1] is None else costs[0] - costs[1]

    def to_json(self) -> dict[str, Any]:
        data = {**self.row.to_json(), **vars(self)}
        del data["row"]
        return data | {
            "saved_time_us": self.saved(self.row.time),
            "saved_energy_mj": self.saved(self.row.energy),
        }


@dataclass(frozen=True)
class Made(Sequence[ComparedRow]):
    """Compared rows, each of them made when it is used: a table shows few of thousands."""

    rows: Sequence[Any]
    make: Callable[[Any], ComparedRow]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        return (
            [*map(self.make, self.rows[place])]
            if isinstance(place, slice)
            else self.make(self.rows[place])
        )


@dataclass(frozen=True)
class SideComparison:
    """The comparison, largest changes of time first. `weights` says by which number of calls a
    tuple is multiplied.
    """

    a: Side
    b: Side
    wholes: tuple[ComparedRow, ...]  # for two jobs: their models; else the models on both sides
    sums: tuple[ComparedRow, ...]  # sums of the same models, with each side's own number of calls
    total: ComparedRow | None  # the sum over common tuples; None: no tuple is on both sides
    weights: Weights
    types: tuple[ComparedRow, ...]
    tuples: Sequence[ComparedRow]
    tuples_only_a: Sequence[ComparedRow]  # tuples only on side A, the largest share first
    tuples_only_b: Sequence[ComparedRow]
    kernels: tuple[ComparedKernels, ...] = ()  # only if a side is a job of a compiled model
    #: Relative half-widths for differences between single cards of one model; {} if both sides are
    #: of one card.
    between_cards: Mapping[Quantity, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<SideComparison {self.a.text} and {self.b.text}: {len(self.tuples)} tuples on both "
            "sides>"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names. Shares, coverages and changes (b / a - 1) are
        fractions.
        """
        listed = ("wholes", "sums", "types", "tuples", "tuples_only_a", "tuples_only_b", "kernels")
        rows = {name: [row.to_json() for row in getattr(self, name)] for name in listed}
        total = self.total.to_json() if self.total else None
        about: dict[str, Any] = {
            "a": vars(self.a),
            "b": vars(self.b),
            "total": total,
            "weights": self.weights,
        }
        about |= {"between_cards": {**self.between_cards}}
        only = {
            f"only_{side}": [row["name"] for row in rows[f"tuples_only_{side}"]] for side in "ab"
        }
        return {**about, **rows, **only}


class SideTuple(NamedTuple):
    """One tuple of a side. Figures are for one call. There are thousands: a dataclass is made four
    times as slowly.
    """

    operator_id: str
    short_name: str
    label: str
    data: str
    own_calls: int  # of the side
    calls: int  # with which it is compared
    time: Figure | None  # None: no reading
    energy: Figure | None
    estimated_us: float = 0.0
    reading_id: str | None = None  # of a job

    @property
    def key(self) -> tuple[str, str]:
        return self.operator_id, self.data

    def called(self, calls: int) -> SideTuple:
        """The tuple, compared with another number of calls."""
        return self if calls == self.calls else self._replace(calls=calls)


@dataclass(frozen=True)
class _Model:
    """A model on one side: a job, with its verdict or the id of its stored verdict."""

    job_id: str
    title: str
    variant: Mapping[str, Any]  # {} for a sweep
    verdict: Verdict | int
    note: str = ""


@dataclass(frozen=True)
class _Found:
    """Everything that is known about a side. `fields`: the fields of `Variant` that its filters
    name.
    """

    side: Side
    every: Sequence[SideTuple]
    models: Sequence[_Model]
    fields: frozenset[str]
    report: Any = None  # of a job: its `Report`

    @cached_property
    def tuples(self) -> list[SideTuple]:
        """The tuples with a reading."""
        return [row for row in self.every if row.time]

    @cached_property
    def by_type(self) -> Mapping[str, list[SideTuple]]:
        """The tuples of each operator type."""
        return by_key(lambda row: row.short_name, self.every)

    @cached_property
    def sum_us(self) -> float:
        """The time of all calls of all tuples with a reading, in µs."""
        return self.time_of(self.tuples)

    def time_of(self, rows: Rows) -> float:
        """The time of all calls of the tuples `rows` in µs, with the side's own number of calls."""
        return math.fsum([row.own_calls * row.time.value for row in rows if row.time])

    def covered(self, rows: Rows, every: Rows) -> float | None:
        """The share of `rows` in the time of `every`; in the estimated time if a tuple of `every`
        has no reading.
        """
        if all(row.time for row in every):
            us = self.time_of(rows)
            return share_of(us, us if len(rows) == len(every) else self.time_of(every))
        keys = {row.key for row in rows}
        estimated = [(row.calls * row.estimated_us, row.key in keys) for row in every]
        return share_of(
            math.fsum(us for us, inside in estimated if inside),
            math.fsum(us for us, _ in estimated),
        )


_Operator = tuple[str, str, str | None]  # short name, label, dtype
Pair = tuple[SideTuple, SideTuple]
Rows = Sequence[SideTuple]


def compare(session: Session, first: str, second: str) -> SideComparison:
    """Compare two sides: each is a job's id or its beginning, or filters (``card=H200
    torch=2.11``). Raises `NoSuchJob` or `UsageError` if nothing matches a side, or if its readings
    cannot be summed."""
    known: dict[str, _Operator] = {}
    a, b = _side(session, first, known), _side(session, second, known)
    if bool(a.side.job_id) != bool(b.side.job_id):
        a, b = (_measured_alone(session, side) if side.side.job_id else side for side in (a, b))
    texts: dict[str, str] = {}
    if len(a.side.dtypes) == len(b.side.dtypes) == 1 and a.side.dtypes != b.side.dtypes:
        specs = fetch_values(
            session, (OPERATOR.id, OPERATOR.spec), (row.operator_id for row in (*a.every, *b.every))
        )
        texts = {id_: json.dumps(row.spec, sort_keys=True) for id_, row in specs.items()}

    def key(row: SideTuple, side: Side) -> str:
        return (
            texts[row.operator_id].replace(f'"{side.dtypes[0]}"', '"*"')
            if texts
            else row.operator_id
        )

    weights: Weights = "calls of A" if a.side.job_id else "calls of B" if b.side.job_id else "once"
    pairs, only_a, only_b = _matched(a, b, key)
    alike = [(one, other.called(one.calls)) for one, other in pairs]
    if weights == "calls of B":
        alike = [(one.called(other.calls), other) for one, other in pairs]
    total = _row(a, b, alike, "sum") if pairs else None
    if a.side.job_id and b.side.job_id:
        weights, alike = "own calls", pairs
    own = weights == "own calls"
    of_types = by_key(lambda pair: pair[0].short_name, alike)
    names = dict.fromkeys([*a.by_type, *b.by_type] if own else of_types)
    types = [_row(a, b, of_types.get(name, []), name, name, own=own) for name in names]
    types = [row for row in types if row.tuples or row.b_tuples]

    def alone(found: _Found, of_a: bool, rows: Rows, others: _Found) -> Made:
        """Return the tuples that are only on side `found`, the largest share first."""
        unread = {key(row, others.side) for row in others.every if not row.time}

        def made(row: SideTuple) -> ComparedRow:
            covers = (
                f"no reading in {'AB'[of_a]}"
                if key(row, found.side) in unread
                else f"only in {'BA'[of_a]}"
            )
            pair = ([row], []) if of_a else ([], [row])
            return replace(_of_one(a, b, *pair), covers=covers)

        return Made(sorted(rows, key=lambda row: -found.time_of([row])), made)

    models = _models(a, b)
    compared = [_compared(session, *pair) for pair in models]
    between = between_cards(
        session,
        (*a.side.card_models, *b.side.card_models),
        (a.side.cards, b.side.cards),
    )

    def on_cards(row: ComparedRow) -> ComparedRow:
        return row.on_different_cards(between) if between else row

    def order_of_pair(pair: Pair) -> tuple[bool, float, str]:
        time = _difference("time", pair[:1], pair[1:])
        time = replace(time, between_cards=between.get("time", 0.0)) if between else time
        return (*time.order, pair[0].label)

    wholes = [
        whole for (whole, _), (model, _) in zip(compared, models, strict=True) if model.variant
    ]  # no sweeps
    sums = [sum_row for _, sum_row in compared]
    types = [on_cards(row) for row in types]
    kernels = [replace(row, row=on_cards(row.row)) for row in _kernels(session, a, b)]
    return SideComparison(
        a=a.side,
        b=b.side,
        wholes=tuple(map(on_cards, wholes)),
        sums=tuple(map(on_cards, sums)),
        total=total and on_cards(total),
        weights=weights,
        types=tuple(sorted(types, key=lambda row: (*row.time.order, row.name))),
        tuples=Made(
            sorted(alike, key=order_of_pair),
            lambda pair: on_cards(_of_one(a, b, pair[:1], pair[1:])),
        ),
        tuples_only_a=alone(a, True, only_a, b),
        tuples_only_b=alone(b, False, only_b, a),
        kernels=tuple(kernels),
        between_cards=between,
    )


def _kernels(session: Session, a: _Found, b: _Found) -> tuple[ComparedKernels, ...]:
    """Match the calls of two jobs of one model if at least one is compiled: an eager job by
    modules, the heaviest part first; two compiled jobs by kernels, the kernel that became slower
    first."""
    if not (a.report and b.report):
        return ()
    variants = [{**found.models[0].variant, "version": ""} for found in (a, b)]
    modes = [variant.pop("compile", "") for variant in variants]
    if not any(modes) or variants[0] != variants[1]:
        return ()
    from farm.report import operators as kernels

    calls = []
    for report in (a.report, b.report):
        capture_id = session.get_one(tables.Round, (report.job_id, report.round)).capture_id
        calls.append(placed_calls(session, capture_id, report.protocol.data) if capture_id else [])
    if all(modes):
        ids = {call.operator_id for of_side in calls for call in of_side}
        stored = fetch_values(session, (OPERATOR.id, OPERATOR.parameters), ids)
        sources = {
            id_: row.parameters["source"]
            for id_, row in stored.items()
            if row.parameters.get("source")
        }
        of_a, of_b = kernels.kernel_groups(calls[0], calls[1], sources)
    elif modes[0]:
        of_b, of_a = kernels.fused_groups(calls[1], calls[0])
    else:
        of_a, of_b = kernels.fused_groups(calls[0], calls[1])
    known_tuples = [{row.key: row for row in found.every} for found in (a, b)]
    made = []
    for group in kernels.merged(calls[0], of_a, calls[1], of_b):
        rows = [
            [known[key].called(number) for key, number in side.items() if key in known]
            for known, side in zip(known_tuples, (group.a, group.b), strict=True)
        ]
        types = [by_key(lambda row: row.short_name, side) for side in rows]
        operators = [
            {name: sum(row.calls for row in some) for name, some in side.items()} for side in types
        ]
        complete = [side if all(row.time for row in side) else [] for side in rows]
        total = _summed(a, b, complete[0], complete[1], ", ".join(group.modules), "")
        made.append(ComparedKernels(group.modules, operators[0], operators[1], total))

    def order(one: ComparedKernels) -> float:
        heaviest_us = max(
            figure.value if figure else 0.0 for figure in (one.row.time.a, one.row.time.b)
        )
        return one.saved(one.row.time) or 0.0 if all(modes) else -heaviest_us

    return tuple(sorted(made, key=order))


def _of_one(a: _Found, b: _Found, of_a: Rows, of_b: Rows) -> ComparedRow:
    """Compare one tuple. Its name has the data class of each side if it is not the usual one."""
    one = [*of_a, *of_b][0]
    data = list(dict.fromkeys(row.data for row in (*of_a, *of_b)))
    name = (
        one.label if data in (["normal"], ["copied"]) else f"{one.label}, {' against '.join(data)}"
    )
    return _summed(a, b, of_a, of_b, name, one.short_name)


def _matched(
    a: _Found, b: _Found, key: Callable[[SideTuple, Side], str]
) -> tuple[list[Pair], list[SideTuple], list[SideTuple]]:
    """Pair equal tuples, preferably with equal data classes. Return pairs, tuples only in A, and
    tuples only in B.
    """
    of_b: dict[str, dict[str, SideTuple]] = defaultdict(dict)
    for row in b.tuples:
        of_b[key(row, b.side)][row.data] = row
    of_a = [(row, of_b[key(row, a.side)]) for row in a.tuples]
    same = [(row, others.pop(row.data, None)) for row, others in of_a]
    pairs = [(row, other) for row, other in same if other is not None]
    only_a = []
    for (row, others), (_, matched) in zip(of_a, same, strict=True):
        if matched is None and others:
            pairs.append((row, others.popitem()[1]))
        elif matched is None:
            only_a.append(row)
    return pairs, only_a, [row for rows in of_b.values() for row in rows.values()]


def _row(
    a: _Found, b: _Found, pairs: Sequence[Pair], name: str, operator: str = "", *, own: bool = False
) -> ComparedRow:
    """Sum the pairs; if `own`, sum all tuples of an operator type on each side. The row says what
    it covers.
    """
    every = [side.by_type.get(operator, []) if operator else side.every for side in (a, b)]
    rows = [[one for one, _ in pairs], [other for _, other in pairs]]
    if own:
        rows = [[row for row in of_all if row.time] for of_all in every]
    coverage = [a.covered(rows[0], every[0]), b.covered(rows[1], every[1])]
    words = [
        f"{side}: {len(inside)} of {len(of_all)} tuples, {percent(share)}"
        for side, inside, of_all, share in zip("AB", rows, every, coverage, strict=True)
        if len(inside) < len(of_all)
    ]
    if not all(every):
        words.append(f"only in {'A' if every[0] else 'B'}")
    elif all(rows) and len(pairs) < max(map(len, rows)):
        words.append(f"{len(pairs)} tuples in both (A has {len(rows[0])}, B has {len(rows[1])})")
    row = _summed(a, b, rows[0], rows[1], name, operator)
    return replace(row, a_coverage=coverage[0], b_coverage=coverage[1], covers="; ".join(words))


def _summed(a: _Found, b: _Found, of_a: Rows, of_b: Rows, name: str, operator: str) -> ComparedRow:
    """Compare the sum over the tuples `of_a` with the sum over the tuples `of_b`."""
    return ComparedRow(
        name=name,
        operator=operator,
        calls=sum(row.calls for row in of_a),
        tuples=len(of_a),
        time=_difference("time", of_a, of_b),
        energy=_difference("energy", of_a, of_b),
        b_calls=sum(row.calls for row in of_b),
        b_tuples=len(of_b),
        a_share=share_of(a.time_of(of_a), a.sum_us) if of_a else None,
        b_share=share_of(b.time_of(of_b), b.sum_us) if of_b else None,
    )


def _difference(quantity: Literal["time", "energy"], *sides: Rows) -> Difference:
    """Compare the sums of a quantity over the tuples of each side."""

    def total(rows: Rows) -> Figure | None:
        if len(rows) == 1 and rows[0].calls == 1:  # of thousands of tuples
            return getattr(rows[0], quantity)  # type: ignore[no-any-return]
        return total_of([(getattr(row, quantity), row.calls) for row in rows]) if rows else None

    a, b = map(total, sides)
    return Difference(a, b)


def _models(a: _Found, b: _Found) -> list[tuple[_Model, _Model]]:
    """Pair the models of both sides. Two jobs are one pair. Else pair equal variants first; then
    variants that differ in the version of a user's own model; then those that also differ in fields
    that both sides filter on."""
    if a.side.job_id and b.side.job_id:
        return [(a.models[0], b.models[0])]
    left, pairs = [list(a.models), list(b.models)], []
    version = frozenset({"version"})
    for apart in (frozenset[str](), version, version | (a.fields & b.fields)):

        def kept(model: _Model, apart: frozenset[str] = apart) -> str:
            return json.dumps(
                {key: model.variant[key] for key in model.variant if key not in apart},
                sort_keys=True,
            )

        of_a, of_b = (by_key(kept, models) for models in left)
        for key in of_a.keys() & of_b.keys():
            for group in (of_a[key], of_b[key]):
                if len(group) > 1:
                    group[-1] = replace(group[-1], note=f"the most complete of {len(group)} jobs")
            pairs.append((of_a[key][-1], of_b[key][-1]))
        left = [
            [one for one in models if not (kept(one) in of_a and kept(one) in of_b)]
            for models in left
        ]
    return sorted(pairs, key=lambda pair: [(model.title, model.job_id) for model in pair])


def _compared(session: Session, a: _Model, b: _Model) -> tuple[ComparedRow, ComparedRow]:
    """Compare the whole model, and the sum of its tuples, as given in the verdicts."""
    verdicts: list[Verdict] = []
    of_whole = [f"{side}: {model.note}" for side, model in (("A", a), ("B", b)) if model.note]
    of_sum = list(of_whole)
    for side, model in (("A", a), ("B", b)):
        found = model.verdict
        if isinstance(found, int):
            details = session.get_one(tables.VerdictRow, found).details
            if details.get("schema") == VERDICT_SCHEMA:
                found = Verdict.from_json(details)
            else:
                from farm.report.report import build

                found = build(session, model.job_id).verdict
        verdicts.append(found)
        if not found.time.whole:
            reasons = dict.fromkeys(whole.short_reason for whole in found.wholes if whole.reason)
            of_whole.append(f"{side}: no reading{''.join(f' ({reason})' for reason in reasons)}")
        if found.measured < found.parts:
            outside = sum(entry.reason == NOT_IN_SCOPE for entry in found.unmeasured)
            scope = f" ({outside} not in scope)" if outside else ""
            of_sum.append(
                f"{side}: {found.measured} of {found.parts} tuples{scope}, "
                f"{percent(found.coverage)}"
            )

    name = a.title if a.title == b.title else f"{a.title} / {b.title}"
    of_a, of_b = verdicts
    time = Difference(of_a.time.whole, of_b.time.whole)
    energies = [found.energy for found in verdicts]
    energy_a, energy_b = (found.whole if found else None for found in energies)
    energy = Difference(energy_a, energy_b)
    row = ComparedRow(name, "", 0, 0, time, energy, a_job=a.job_id, b_job=b.job_id)
    calls = [
        _calls(session, model.job_id, found) for model, found in zip((a, b), verdicts, strict=True)
    ]
    shares = [None if found.time.whole is None else 1.0 for found in verdicts]
    whole = replace(row, a_coverage=shares[0], b_coverage=shares[1], covers="; ".join(of_whole))
    return whole, replace(
        row,
        calls=calls[0],
        b_calls=calls[1],
        tuples=verdicts[0].measured,
        b_tuples=verdicts[1].measured,
        time=Difference(
            of_a.time.total if of_a.measured else None,
            of_b.time.total if of_b.measured else None,
        ),
        energy=Difference(
            of_a.energy.total if of_a.energy else None,
            of_b.energy.total if of_b.energy else None,
        ),
        a_coverage=verdicts[0].coverage,
        b_coverage=verdicts[1].coverage,
        covers="; ".join(of_sum),
    )


def _calls(session: Session, job_id: str, verdict: Verdict) -> int:
    """The number of calls in the sum of a verdict."""
    rounds = sqlalchemy.select(col(tables.Round.capture_id)).where(
        col(tables.Round.job_id) == job_id
    )
    captured = [
        id_ for id_ in session.scalars(rounds.order_by(col(tables.Round.number))) if id_ is not None
    ]
    if not captured:  # a sweep
        return verdict.measured
    return sum(counts(session, captured[-1]).values()) - sum(
        entry.count for entry in verdict.unmeasured
    )


def _side(session: Session, text: str, known: dict[str, _Operator]) -> _Found:
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
    if len(words) == 1 and not any(sign in words[0] for sign in "=<>"):
        from farm.jobs import jobs

        try:
            return _of_job(session, jobs.find(session, words[0]).id)
        except NoSuchJob as error:
            try:
                return _of_filters(session, parse(words), known)
            except UnknownOperator:
                raise error from None
    return _of_filters(session, parse(words), known)


def _of_job(session: Session, job_id: str) -> _Found:
    from farm.report.report import build  # late: a comparison of filters seldom needs a report

    built = build(session, job_id)
    rows = []
    for row in built.tuples:
        time = None if row.time_us is None else Figure(row.time_us, row.time_half_width_us or 0.0)
        energy = (
            None
            if row.energy_mj is None
            else Figure(row.energy_mj, row.energy_half_width_mj or 0.0)
        )
        label = (row.operator_id, row.short_name, row.label, row.data, row.calls, row.calls)
        rows.append(SideTuple(*label, time, energy, row.estimated_us, row.reading_id))
    measured = sum(row.time is not None for row in rows)
    if not measured and not built.verdict.time.whole:
        raise UsageError(
            f"The job {job_id} has no readings yet.", f"`farm status {job_id}` shows its progress."
        )
    dtype = (built.request.get("variant") or {}).get("dtype")
    card_models = tuple(sorted({card.model for card in built.cards}))
    torches = tuple(sorted({str(software["torch"]) for software in built.software}))
    variant = session.get(tables.ModelVariant, session.get_one(tables.Job, job_id).variant_id or "")
    note = (
        f"only the {len(rows)} heaviest of {built.verdict.parts} tuples"
        if built.verdict.types
        else ""
    )
    note = "preliminary" if built.preliminary else note
    model = _Model(job_id, built.title, _fields(variant) if variant else {}, built.verdict, note)
    cards = tuple(card.id for card in built.cards if card.readings)
    side = Side(
        built.title, job_id, card_models, torches, (dtype,) if dtype else (), measured, cards
    )
    return _Found(side, rows, [model], frozenset(names_of(Variant)), built)


def _measured_alone(session: Session, found: _Found) -> _Found:
    """Return a job's side with the figures of its readings, as a side of filters has them. The
    figures of a job include the effect of neighbouring operators and of the clocks in its model."""
    figures = ("time_us", "time_half_width_us", "energy_mj", "energy_half_width_mj")
    columns = (READING.id, *(getattr(READING, name) for name in figures))
    readings = fetch_values(
        session, columns, [row.reading_id for row in found.tuples if row.reading_id]
    )

    def alone(row: SideTuple) -> SideTuple:
        if (reading := readings.get(row.reading_id)) is None:
            return row
        energy = (
            None
            if reading.energy_mj is None
            else Figure(reading.energy_mj, reading.energy_half_width_mj or 0.0)
        )
        return row._replace(time=Figure(reading.time_us, reading.time_half_width_us), energy=energy)

    return replace(found, every=[alone(row) for row in found.every])


def _fields(variant: tables.ModelVariant) -> dict[str, Any]:
    return {name: getattr(variant, name) for name in names_of(Variant)}


def _of_filters(session: Session, filters: Filters, known: dict[str, _Operator]) -> _Found:
    """Build a side from filters. A tuple has the mean of its readings; the half-width includes
    their spread.
    """
    selection = select_readings(session, filters, placed=False, kind="operator")
    key = (
        READING.card_model,
        READING.software_id,
        READING.protocol_id,
        READING.subject_id,
        READING.method,
    )
    of = sqlalchemy.func
    columns = (
        *key,
        of.avg(READING.time_us).label("time_us"),
        of.max(READING.time_half_width_us).label("time_half_width_us"),
        (of.max(READING.time_us) - of.min(READING.time_us)).label("time_spread_us"),
        of.avg(READING.energy_mj).label("energy_mj"),
        of.max(READING.energy_half_width_mj).label("energy_half_width_mj"),
        (of.max(READING.energy_mj) - of.min(READING.energy_mj)).label("energy_spread_mj"),
        of.count(READING.energy_mj).label("with_energy"),
        of.count().label("readings"),
        of.min(READING.card_id).label("card_id"),
        of.max(READING.card_id).label("other_card_id"),
    )
    found = [
        row
        for conditions in selection.where()
        for row in values(
            session, columns, READING.subject_kind == "operator", *conditions, grouped_by=key
        )
    ]
    models, wholes = _models_of(session, filters)
    if not found and not models:
        raise UsageError(f"No readings match '{filters}'.", "`farm lookup` shows the readings.")
    data, torches = _compatible(session, filters, [*found, *wholes])
    text = sqlalchemy.cast(OPERATOR.spec, sqlalchemy.Text).label("spec")
    wanted = (OPERATOR.id, OPERATOR.short_name, OPERATOR.label, text)
    new = fetch_values(
        session, wanted, (row.subject_id for row in found if row.subject_id not in known)
    )
    known |= {id_: (row.short_name, row.label, _dtype(row.spec)) for id_, row in new.items()}
    rows, dtypes = [], {model.variant["dtype"] for model in models}
    for row in found:
        short_name, label, dtype = known[row.subject_id]
        dtypes |= {dtype} if dtype else set()
        energy = None
        if row.with_energy == row.readings:
            energy = Figure(
                row.energy_mj, (row.energy_half_width_mj or 0.0) + row.energy_spread_mj / 2
            )
        time = Figure(row.time_us, row.time_half_width_us + row.time_spread_us / 2)
        rows.append(
            SideTuple(row.subject_id, short_name, label, data[row.protocol_id], 1, 1, time, energy)
        )
    card_model = [*found, *wholes][0].card_model
    cards = {row.card_id for row in (*found, *wholes)} | {row.other_card_id for row in found}
    side = Side(
        str(filters),
        "",
        (card_model,),
        tuple(torches),
        tuple(sorted(dtypes)),
        len(rows),
        tuple(sorted(cards)),
    )
    return _Found(side, rows, models, frozenset(entry.column.name for entry in filters.filters))


def _models_of(session: Session, filters: Filters) -> tuple[list[_Model], list[Any]]:
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
        *(VERDICT.job_id == JOB.id, READING.subject_kind == "variant"),
        READING.subject_id.in_(
            sqlalchemy.select(VARIANT.id)
        ),  # by its index, not through all readings of a card
    )
    rows = [
        row for conditions in selection.where() for row in session.execute(query.where(*conditions))
    ]
    variants = fetch(session, tables.ModelVariant, (row.variant_id for row in rows))
    newest = {row.job_id: row for row in sorted(rows, key=lambda row: row.round)}
    models = [
        _Model(row.job_id, row.title, _fields(variants[row.variant_id]), row.id)
        for row in sorted(
            newest.values(), key=lambda row: (row.coverage or 0.0, row.created_at_s, row.id)
        )
    ]
    return models, rows


def _dtype(spec: str | None) -> str | None:
    """Return the dtype of the first floating-point tensor in the text of a tuple's description. To
    decode thousands of descriptions takes longer than to read their readings."""
    found = re.search(r'"dtype": *"(b?float[^"]*)"', (spec or "").rpartition('"tensors"')[2])
    return found[1] if found else None


def _compatible(
    session: Session, filters: Filters, found: Sequence[Any]
) -> tuple[dict[str, str], set[str]]:
    """Return protocol id -> data class, and the torch versions. Raise `UsageError` if readings
    cannot be mixed.
    """
    protocols = fetch_values(
        session, (PROTOCOL.id, PROTOCOL.spec), (row.protocol_id for row in found)
    )
    software = fetch(session, tables.SoftwareRow, (row.software_id for row in found)).values()
    specs = {id_: dict(row.spec) for id_, row in protocols.items()}
    data = {id_: str(spec.pop("data", "normal")) for id_, spec in specs.items()}
    fields: list[
        tuple[str, set[str], str]
    ] = []  # (name in the plural, values, filter for one value)
    for name in sorted({name for spec in specs.values() for name in spec}):
        values = {str(spec.get(name)) for spec in specs.values()}
        fields.append((f"kinds of {name}", values, f"{name}={min(values).lower()}"))
    for name in (column.name for column in SOFTWARE if column.name != "id"):
        values = software_values(software, name)
        example = (
            f"{name}={max(values, default='')}"
            if name != "platform"
            else "the id of a card, card=GPU-..."
        )
        fields.append((f"versions of {name}", values, example))
    fields.append(("card models", {row.card_model for row in found}, "card=H200"))
    fields.append(("versions of the method", {str(row.method) for row in found}, "method=4"))
    for what, values, example in fields:
        if len(values) > 1:
            listed = ", ".join(sorted(values)[:6])
            raise UsageError(
                f"'{filters}' matches readings of several {what} ({listed}), which cannot be "
                "mixed.",
                f"Choose one, for instance with {example}.",
            )
    return data, {row.torch for row in software}
