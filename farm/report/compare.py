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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import sqlalchemy
from sqlmodel import Session, col

from farm.errors import NoSuchJob, UnknownOperator, UsageError
from farm.report.card_spread import Quantity, between_cards
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
from farm.store.content import PlacedCall, counts, placed_calls
from farm.store.database import by_key, fetch, fetch_values, values
from farm.store.query import Filters, parse, select_readings
from farm.types.fields import figure_json, names_of
from farm.types.figure import Figure, PassCost, figure_of, share_of, total_of, value_of
from farm.types.format import percent
from farm.types.protocol import Variant, software_values
from farm.verdict.cost_line import Change, CostLine, TupleView
from farm.verdict.figures import NOT_IN_SCOPE
from farm.verdict.verdict import VERDICT_SCHEMA, Verdict

if TYPE_CHECKING:
    from farm.report.report import Report

Weights = Literal["own calls", "calls of A", "calls of B", "once"]

#: The data classes that the name of a row does not mention.
_USUAL_DATA = (["normal"], ["copied"])


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
class RowSide:
    """What one side has of a row.

    Attributes:
        cost: of all calls; None: unknown.
        calls, tuples: the number of them in the figures.
        share: of the side's sum (time), with the side's own number of calls.
        coverage: share of the time that the row would have with all tuples of the side.
        job: the job of the verdict, for a whole or a sum.
        note: about the job, in words.
        lacks: what the figures lack, in words; "" if nothing.
    """

    cost: PassCost | None = None
    calls: int = 0
    tuples: int = 0
    share: float | None = None
    coverage: float | None = None
    job: str = ""
    note: str = ""
    lacks: str = ""

    @property
    def time_us(self) -> Figure | None:
        return self.cost.time_us if self.cost else None

    @property
    def energy_mj(self) -> Figure | None:
        return self.cost.energy_mj if self.cost else None


@dataclass(frozen=True)
class ComparedRow:
    """The comparison of one whole model, sum, operator type or tuple.

    `between_cards`: relative half-widths for differences between single cards of one model; {} if
    both sides are of one card."""

    name: str
    operator: str
    a: RowSide
    b: RowSide
    note: str = ""  # what concerns both sides
    between_cards: Mapping[Quantity, float] = field(default_factory=dict)

    @property
    def time(self) -> Change:
        return Change(self.a.time_us, self.b.time_us, self.between_cards.get("time", 0.0))

    @property
    def energy(self) -> Change:
        return Change(self.a.energy_mj, self.b.energy_mj, self.between_cards.get("energy", 0.0))

    def change_of(self, quantity: Quantity) -> Change:
        return self.time if quantity == "time" else self.energy

    @property
    def covers(self) -> str:
        """What the row covers, in words; "" if it covers everything."""
        words = [
            ("A: ", self.a.note),
            ("B: ", self.b.note),
            ("A: ", self.a.lacks),
            ("B: ", self.b.lacks),
            ("", self.note),
        ]
        return "; ".join(side + text for side, text in words if text)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operator": self.operator,
            "calls": self.a.calls,
            "tuples": self.a.tuples,
            "b_calls": self.b.calls,
            "b_tuples": self.b.tuples,
            "a_share": self.a.share,
            "b_share": self.b.share,
            "a_coverage": self.a.coverage,
            "b_coverage": self.b.coverage,
            "covers": self.covers,
            "a_job": self.a.job,
            "b_job": self.b.job,
            **_change_json("time", "us", self.time),
            **_change_json("energy", "mj", self.energy),
        }


def _change_json(name: str, unit: str, change: Change) -> dict[str, Any]:
    return {
        **figure_json(f"a_{name}", unit, change.a),
        **figure_json(f"b_{name}", unit, change.b),
        **figure_json(f"{name}_change", "", change.change),
        f"{name}_verdict": change.verdict,
    }


@dataclass(frozen=True)
class ComparedKernels:
    """A part of a model in an eager and a compiled job, or in two compiled jobs."""

    # the module paths (*: several numbers); () for the calls of a side that have no match
    modules: tuple[str, ...]
    a_operators: Mapping[str, int]  # operator type -> number of calls
    b_operators: Mapping[str, int]
    row: ComparedRow

    def saved(self, change: Change) -> float | None:
        """What B saves in time or energy; None if a side's figure is unknown. A side without calls
        costs nothing.
        """
        cost_a = value_of(change.a) if self.a_operators else 0.0
        cost_b = value_of(change.b) if self.b_operators else 0.0
        return None if cost_a is None or cost_b is None else cost_a - cost_b

    def to_json(self) -> dict[str, Any]:
        return {
            **self.row.to_json(),
            "modules": self.modules,
            "a_operators": self.a_operators,
            "b_operators": self.b_operators,
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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(row) for row in self.rows[index]]
        return self.make(self.rows[index])


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
        number = len(self.tuples)
        return f"<SideComparison {self.a.text} and {self.b.text}: {number} tuples on both sides>"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names. Shares, coverages and changes (b / a - 1) are
        fractions.
        """
        return {
            "a": vars(self.a),
            "b": vars(self.b),
            "total": self.total.to_json() if self.total else None,
            "weights": self.weights,
            "between_cards": dict(self.between_cards),
            "wholes": [row.to_json() for row in self.wholes],
            "sums": [row.to_json() for row in self.sums],
            "types": [row.to_json() for row in self.types],
            "tuples": [row.to_json() for row in self.tuples],
            "tuples_only_a": [row.to_json() for row in self.tuples_only_a],
            "tuples_only_b": [row.to_json() for row in self.tuples_only_b],
            "kernels": [row.to_json() for row in self.kernels],
            "only_a": [row.name for row in self.tuples_only_a],
            "only_b": [row.name for row in self.tuples_only_b],
        }


class Counted(NamedTuple):
    """A tuple of a side, and the number of calls with which it is compared.

    There are thousands: a dataclass is made four times as slowly."""

    line: CostLine
    calls: int


class Pair(NamedTuple):
    """The same tuple on both sides."""

    a: Counted
    b: Counted

    @property
    def short_name(self) -> str:
        return self.a.line.subject.short_name


@dataclass(frozen=True)
class _Model:
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
class _Loaded:
    """A side with its tuples and models.

    Attributes:
        lines: all tuples; their count is the side's own number of calls.
        fields: the fields of `Variant` that the side's filters name.
        report: of a job.
    """

    side: Side
    lines: Sequence[CostLine]
    models: Sequence[_Model]
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
        return _time_of(self.lines)

    def share(self, lines: Sequence[CostLine]) -> float | None:
        """The share of tuples in the side's sum; None without tuples."""
        return share_of(_time_of(lines), self.sum_us) if lines else None


def _time_of(lines: Sequence[CostLine]) -> float:
    """Return the time of all calls of tuples in us, with the side's own number of calls."""
    return math.fsum([line.total_us for line in lines])


def _covered(lines: Sequence[CostLine], every: Sequence[CostLine]) -> float | None:
    """Return the share of `lines` in the time of `every`; in the estimated time if a tuple of
    `every` has no reading.
    """
    if all(line.time_us for line in every):
        time_us = _time_of(lines)
        return share_of(time_us, time_us if len(lines) == len(every) else _time_of(every))

    keys = {line.subject.key for line in lines}
    covered_us, every_us = [], []
    for line in every:
        estimated_us = line.count * line.subject.estimated_us
        every_us.append(estimated_us)
        if line.subject.key in keys:
            covered_us.append(estimated_us)
    return share_of(math.fsum(covered_us), math.fsum(every_us))


_Operator = tuple[str, str, str | None]  # short name, label, dtype


def compare(session: Session, first: str, second: str) -> SideComparison:
    """Compare two sides: each is a job's id or its beginning, or filters (``card=H200
    torch=2.11``). Raises `NoSuchJob` or `UsageError` if nothing matches a side, or if its readings
    cannot be summed."""
    operators: dict[str, _Operator] = {}
    a, b = _load(session, first, operators), _load(session, second, operators)
    if bool(a.side.job_id) != bool(b.side.job_id):
        a, b = _measured_alone(session, a), _measured_alone(session, b)
    cards = (a.side.cards, b.side.cards)
    between = between_cards(session, (*a.side.card_models, *b.side.card_models), cards)

    def on_cards(row: ComparedRow) -> ComparedRow:
        return replace(row, between_cards=between) if between else row

    matching = _match(session, a, b)
    weights = _weights(a.side, b.side)
    pairs = _counted(matching.pairs, weights)
    common = _counted(matching.pairs, "calls of A") if weights == "own calls" else pairs
    total = on_cards(_row(a, b, common, "sum")) if common else None
    types = [on_cards(row) for row in _types(a, b, pairs, own=weights == "own calls")]

    wholes, sums = [], []
    for model_a, model_b in _models(a, b):
        whole, sum_row = _compared(session, model_a, model_b)
        sums.append(on_cards(sum_row))
        if model_a.variant:  # not a sweep
            wholes.append(on_cards(whole))
    kernels = [replace(entry, row=on_cards(entry.row)) for entry in _kernels(session, a, b)]

    def order_of_pair(pair: Pair) -> tuple[bool, float, str]:
        time = Change(_time([pair.a]), _time([pair.b]), between.get("time", 0.0))
        return (*time.order, pair.a.line.subject.label)

    return SideComparison(
        a=a.side,
        b=b.side,
        wholes=tuple(wholes),
        sums=tuple(sums),
        total=total,
        weights=weights,
        types=tuple(sorted(types, key=lambda row: (*row.time.order, row.name))),
        tuples=Made(
            sorted(pairs, key=order_of_pair),
            lambda pair: on_cards(_row_of_tuple(a, b, [pair.a], [pair.b])),
        ),
        tuples_only_a=_only_in("A", a, b, matching, lambda of_a: _row_of_tuple(a, b, of_a, [])),
        tuples_only_b=_only_in("B", b, a, matching, lambda of_b: _row_of_tuple(a, b, [], of_b)),
        kernels=tuple(kernels),
        between_cards=between,
    )


# ---- tuples


@dataclass(frozen=True)
class _Matching:
    """The tuples of both sides with a reading, paired.

    Attributes:
        texts: tuple id -> its description, if the sides differ in the dtype.
    """

    pairs: Sequence[tuple[CostLine, CostLine]]
    only_a: Sequence[CostLine]
    only_b: Sequence[CostLine]
    texts: Mapping[str, str]

    def key(self, loaded: _Loaded, line: CostLine) -> str:
        return _key(self.texts, loaded, line)


def _key(texts: Mapping[str, str], loaded: _Loaded, line: CostLine) -> str:
    """Return what is equal for the same tuple on both sides: its id, or its description without the
    side's dtype.
    """
    operator_id = line.subject.operator_id
    if operator_id not in texts:
        return operator_id
    return texts[operator_id].replace(f'"{loaded.side.dtypes[0]}"', '"*"')


def _match(session: Session, a: _Loaded, b: _Loaded) -> _Matching:
    """Pair equal tuples, preferably with equal data classes."""
    texts = _texts(session, a, b)
    left_b: dict[str, dict[str, CostLine]] = defaultdict(dict)  # key -> data class -> tuple
    for line in b.measured:
        left_b[_key(texts, b, line)][line.subject.data] = line

    pairs, unmatched = [], []
    for line in a.measured:
        others = left_b[_key(texts, a, line)]
        if line.subject.data in others:
            pairs.append((line, others.pop(line.subject.data)))
        else:
            unmatched.append((line, others))

    only_a = []
    for line, others in unmatched:
        if others:
            _, other = others.popitem()
            pairs.append((line, other))
        else:
            only_a.append(line)

    only_b: list[CostLine] = []
    for others in left_b.values():
        only_b += others.values()
    return _Matching(pairs, only_a, only_b, texts)


def _texts(session: Session, a: _Loaded, b: _Loaded) -> dict[str, str]:
    """Return tuple id -> description; {} unless each side has one dtype and they differ."""
    if len(a.side.dtypes) != 1 or len(b.side.dtypes) != 1 or a.side.dtypes == b.side.dtypes:
        return {}
    ids = [line.subject.operator_id for line in (*a.lines, *b.lines)]
    stored = fetch_values(session, (OPERATOR.id, OPERATOR.spec), ids)
    return {id_: json.dumps(row.spec, sort_keys=True) for id_, row in stored.items()}


def _weights(a: Side, b: Side) -> Weights:
    if a.job_id and b.job_id:
        return "own calls"
    if a.job_id:
        return "calls of A"
    return "calls of B" if b.job_id else "once"


def _counted(pairs: Sequence[tuple[CostLine, CostLine]], weights: Weights) -> list[Pair]:
    """Give the tuples of each pair their numbers of calls."""
    counted = []
    for line, other in pairs:
        calls_a = other.count if weights == "calls of B" else line.count
        calls_b = other.count if weights == "own calls" else calls_a
        counted.append(Pair(Counted(line, calls_a), Counted(other, calls_b)))
    return counted


def _types(a: _Loaded, b: _Loaded, pairs: Sequence[Pair], *, own: bool) -> list[ComparedRow]:
    """Sum the pairs of each operator type; if `own`, all tuples of the type on each side."""
    by_type = by_key(lambda pair: pair.short_name, pairs)
    names = dict.fromkeys([*a.by_type, *b.by_type] if own else by_type)
    rows = [_row(a, b, by_type.get(name, []), name, name, own=own) for name in names]
    return [row for row in rows if row.a.tuples or row.b.tuples]


def _row(
    a: _Loaded,
    b: _Loaded,
    pairs: Sequence[Pair],
    name: str,
    operator: str = "",
    *,
    own: bool = False,
) -> ComparedRow:
    """Sum the pairs; if `own`, sum all tuples of an operator type on each side. The row says what
    it covers.
    """
    every_a = a.by_type.get(operator, []) if operator else a.lines
    every_b = b.by_type.get(operator, []) if operator else b.lines
    of_a = [pair.a for pair in pairs]
    of_b = [pair.b for pair in pairs]
    if own:
        of_a = [Counted(line, line.count) for line in every_a if line.time_us]
        of_b = [Counted(line, line.count) for line in every_b if line.time_us]

    side_a = _side_of_row(a, of_a, every_a)
    side_b = _side_of_row(b, of_b, every_b)
    note = ""
    if not every_a or not every_b:
        note = f"only in {'A' if every_a else 'B'}"
    elif of_a and of_b and len(pairs) < max(len(of_a), len(of_b)):
        note = f"{len(pairs)} tuples in both (A has {len(of_a)}, B has {len(of_b)})"
    return ComparedRow(name, operator, side_a, side_b, note)


def _row_of_tuple(
    a: _Loaded, b: _Loaded, of_a: Sequence[Counted], of_b: Sequence[Counted]
) -> ComparedRow:
    """Compare one tuple. Its name has the data class of each side if it is not the usual one."""
    subjects = [entry.line.subject for entry in (*of_a, *of_b)]
    data = list(dict.fromkeys(subject.data for subject in subjects))
    name = subjects[0].label
    if data not in _USUAL_DATA:
        name = f"{name}, {' against '.join(data)}"
    side_a, side_b = _side_of_row(a, of_a), _side_of_row(b, of_b)
    return ComparedRow(name, subjects[0].short_name, side_a, side_b)


def _only_in(
    name: str,
    loaded: _Loaded,
    other: _Loaded,
    matching: _Matching,
    compared: Callable[[list[Counted]], ComparedRow],
) -> Made:
    """Return the tuples that are only on side `name`, the largest share first."""
    unread = {matching.key(other, line) for line in other.lines if not line.time_us}

    def make(line: CostLine) -> ComparedRow:
        note = f"only in {name}"
        if matching.key(loaded, line) in unread:
            note = f"no reading in {'B' if name == 'A' else 'A'}"
        return replace(compared([Counted(line, line.count)]), note=note)

    only = matching.only_a if name == "A" else matching.only_b
    return Made(sorted(only, key=lambda line: -line.total_us), make)


def _side_of_row(
    loaded: _Loaded, counted: Sequence[Counted], every: Sequence[CostLine] | None = None
) -> RowSide:
    """Sum tuples of a side. `every`: all tuples that the row would have."""
    lines = [entry.line for entry in counted]
    side = RowSide(
        cost=_cost(_time(counted), _energy(counted)),
        calls=sum(entry.calls for entry in counted),
        tuples=len(counted),
        share=loaded.share(lines),
    )
    if every is None:
        return side
    coverage = _covered(lines, every)
    lacks = ""
    if len(lines) < len(every):
        lacks = f"{len(lines)} of {len(every)} tuples, {percent(coverage)}"
    return replace(side, coverage=coverage, lacks=lacks)


def _cost(time_us: Figure | None, energy_mj: Figure | None) -> PassCost | None:
    return None if time_us is None else PassCost(time_us, energy_mj)


def _time(counted: Sequence[Counted]) -> Figure | None:
    """Return the time of all calls; None without tuples, or if one has no reading."""
    return _total([(line.time_us, calls) for line, calls in counted])


def _energy(counted: Sequence[Counted]) -> Figure | None:
    """Return the energy of all calls; None without tuples, or if one has no energy."""
    return _total([(line.energy_mj, calls) for line, calls in counted])


def _total(terms: Sequence[tuple[Figure | None, int]]) -> Figure | None:
    if len(terms) == 1:  # of thousands of tuples
        figure, calls = terms[0]
        return figure.times(calls) if figure else None
    return total_of(terms) if terms else None


# ---- kernels


def _kernels(session: Session, a: _Loaded, b: _Loaded) -> tuple[ComparedKernels, ...]:
    """Match the calls of two jobs of one model if at least one is compiled: an eager job by
    modules, the heaviest part first; two compiled jobs by kernels, the kernel that became slower
    first."""
    if not (a.report and b.report):
        return ()
    variant_a, variant_b = dict(a.models[0].variant), dict(b.models[0].variant)
    compiled_a, compiled_b = variant_a.pop("compile", ""), variant_b.pop("compile", "")
    variant_a["version"] = variant_b["version"] = ""
    if not (compiled_a or compiled_b) or variant_a != variant_b:
        return ()

    from farm.report import operators as kernels

    calls_a, calls_b = _calls_of(session, a.report), _calls_of(session, b.report)
    if compiled_a and compiled_b:
        sources = _sources(session, [*calls_a, *calls_b])
        groups_a, groups_b = kernels.kernel_groups(calls_a, calls_b, sources)
    elif compiled_a:
        groups_b, groups_a = kernels.fused_groups(calls_b, calls_a)
    else:
        groups_a, groups_b = kernels.fused_groups(calls_a, calls_b)

    line_of_a = {line.subject.key: line for line in a.lines}
    line_of_b = {line.subject.key: line for line in b.lines}
    compared = []
    for group in kernels.merged(calls_a, groups_a, calls_b, groups_b):
        of_a, of_b = _lines_of(line_of_a, group.a), _lines_of(line_of_b, group.b)
        name = ", ".join(group.modules)
        side_a = _side_of_row(a, _if_complete(of_a))
        side_b = _side_of_row(b, _if_complete(of_b))
        row = ComparedRow(name, "", side_a, side_b)
        compared.append(
            ComparedKernels(group.modules, _calls_by_type(of_a), _calls_by_type(of_b), row)
        )

    def heaviest_us(entry: ComparedKernels) -> float:
        time = entry.row.time
        return max(value_of(time.a) or 0.0, value_of(time.b) or 0.0)

    if compiled_a and compiled_b:
        compared.sort(key=lambda entry: entry.saved(entry.row.time) or 0.0)
    else:
        compared.sort(key=lambda entry: -heaviest_us(entry))
    return tuple(compared)


def _calls_of(session: Session, report: Report) -> list[PlacedCall]:
    """Return the calls of a job's round."""
    capture_id = session.get_one(tables.Round, (report.job_id, report.round)).capture_id
    return placed_calls(session, capture_id, report.protocol.data) if capture_id else []


def _sources(session: Session, calls: Sequence[PlacedCall]) -> dict[str, str]:
    """Return tuple id -> the hash of its kernel's source; library calls have none."""
    ids = {call.operator_id for call in calls}
    stored = fetch_values(session, (OPERATOR.id, OPERATOR.parameters), ids)
    sources = {}
    for operator_id, row in stored.items():
        source = row.parameters.get("source")
        if source:
            sources[operator_id] = source
    return sources


def _lines_of(
    line_of: Mapping[tuple[str, str], CostLine], calls: Mapping[tuple[str, str], int]
) -> list[Counted]:
    return [Counted(line_of[key], number) for key, number in calls.items() if key in line_of]


def _if_complete(counted: Sequence[Counted]) -> Sequence[Counted]:
    """Return the tuples if all have a reading; else none, so that the sum is unknown."""
    return counted if all(line.time_us for line, _ in counted) else []


def _calls_by_type(counted: Sequence[Counted]) -> dict[str, int]:
    calls = Counter[str]()
    for entry in counted:
        calls[entry.line.subject.short_name] += entry.calls
    return dict(calls)


# ---- models


def _models(a: _Loaded, b: _Loaded) -> list[tuple[_Model, _Model]]:
    """Pair the models of both sides. Two jobs are one pair. Else pair equal variants first; then
    variants that differ in the version of a user's own model; then those that also differ in fields
    that both sides filter on."""
    if a.side.job_id and b.side.job_id:
        return [(a.models[0], b.models[0])]

    version = frozenset({"version"})
    left_a, left_b = list(a.models), list(b.models)
    pairs = []
    for ignored in (frozenset[str](), version, version | (a.fields & b.fields)):
        of_a, of_b = _by_variant(left_a, ignored), _by_variant(left_b, ignored)
        common = of_a.keys() & of_b.keys()
        pairs += [(_most_complete(of_a[text]), _most_complete(of_b[text])) for text in common]
        left_a = [model for model in left_a if model.text_without(ignored) not in common]
        left_b = [model for model in left_b if model.text_without(ignored) not in common]
    return sorted(pairs, key=lambda pair: [(model.title, model.job_id) for model in pair])


def _by_variant(models: Sequence[_Model], ignored: frozenset[str]) -> dict[str, list[_Model]]:
    return by_key(lambda model: model.text_without(ignored), models)


def _most_complete(models: Sequence[_Model]) -> _Model:
    """Return the last model, see `_models_of`."""
    if len(models) == 1:
        return models[0]
    return replace(models[-1], note=f"the most complete of {len(models)} jobs")


def _compared(session: Session, a: _Model, b: _Model) -> tuple[ComparedRow, ComparedRow]:
    """Compare the whole model, and the sum of its tuples, as given in the verdicts."""
    of_a, of_b = _verdict_of(session, a), _verdict_of(session, b)
    name = a.title if a.title == b.title else f"{a.title} / {b.title}"
    whole = ComparedRow(name, "", _whole_of(a, of_a), _whole_of(b, of_b))
    total = ComparedRow(name, "", _sum_of(session, a, of_a), _sum_of(session, b, of_b))
    return whole, total


def _verdict_of(session: Session, model: _Model) -> Verdict:
    if isinstance(model.verdict, Verdict):
        return model.verdict
    details = session.get_one(tables.VerdictRow, model.verdict).details
    if details.get("schema") == VERDICT_SCHEMA:
        return Verdict.from_json(details)

    from farm.report.report import build

    return build(session, model.job_id).verdict


def _whole_of(model: _Model, verdict: Verdict) -> RowSide:
    time, lacks = verdict.time.whole, ""
    if not time:
        reasons = dict.fromkeys(whole.short_reason for whole in verdict.wholes if whole.reason)
        lacks = f"no reading{''.join(f' ({reason})' for reason in reasons)}"
    return RowSide(
        cost=_cost(time, verdict.energy.whole if verdict.energy else None),
        coverage=1.0 if time else None,
        job=model.job_id,
        note=model.note,
        lacks=lacks,
    )


def _sum_of(session: Session, model: _Model, verdict: Verdict) -> RowSide:
    lacks = ""
    if verdict.measured < verdict.parts:
        outside = sum(entry.reason == NOT_IN_SCOPE for entry in verdict.unmeasured)
        scope = f" ({outside} not in scope)" if outside else ""
        number = f"{verdict.measured} of {verdict.parts} tuples{scope}"
        lacks = f"{number}, {percent(verdict.coverage)}"
    return RowSide(
        cost=_cost(
            verdict.time.total if verdict.measured else None,
            verdict.energy.total if verdict.energy else None,
        ),
        calls=_calls(session, model.job_id, verdict),
        tuples=verdict.measured,
        coverage=verdict.coverage,
        job=model.job_id,
        note=model.note,
        lacks=lacks,
    )


def _calls(session: Session, job_id: str, verdict: Verdict) -> int:
    """The number of calls in the sum of a verdict."""
    rounds = (
        sqlalchemy.select(col(tables.Round.capture_id))
        .where(col(tables.Round.job_id) == job_id, col(tables.Round.capture_id).is_not(None))
        .order_by(col(tables.Round.number).desc())
    )
    capture_id = session.scalars(rounds.limit(1)).first()
    if capture_id is None:  # a sweep
        return verdict.measured
    unmeasured = sum(entry.count for entry in verdict.unmeasured)
    return sum(counts(session, capture_id).values()) - unmeasured


# ---- loading a side


def _load(session: Session, text: str, operators: dict[str, _Operator]) -> _Loaded:
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


def _of_job(session: Session, job_id: str) -> _Loaded:
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
    model = _Model(job_id, report.title, _fields(variant) if variant else {}, verdict, note)
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
    return _Loaded(side, report.tuples, [model], frozenset(names_of(Variant)), report)


def _measured_alone(session: Session, loaded: _Loaded) -> _Loaded:
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
            line = replace(line, time_us=time_us, energy_mj=energy_mj)
        lines.append(line)
    return replace(loaded, lines=lines)


def _fields(variant: tables.ModelVariant) -> dict[str, Any]:
    columns = variant.model_dump()
    return {name: columns[name] for name in names_of(Variant)}


def _of_filters(session: Session, filters: Filters, operators: dict[str, _Operator]) -> _Loaded:
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
        short_name, label, dtype = operators[row.subject_id]
        if dtype:
            dtypes.add(dtype)
        energy = None
        if row.with_energy == row.readings:
            half_width_mj = (row.energy_half_width_mj or 0.0) + row.energy_spread_mj / 2
            energy = Figure(row.energy_mj, half_width_mj)
        time = Figure(row.time_us, row.time_half_width_us + row.time_spread_us / 2)
        subject = TupleView(row.subject_id, short_name, label, data[row.protocol_id])
        lines.append(CostLine(subject, 1, "measured", time, energy))

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
    return _Loaded(side, lines, models, fields)


def _means_of_readings(session: Session, filters: Filters) -> list[Any]:
    """Return the mean and the spread of the readings of each tuple under equal conditions."""
    key = (
        READING.card_model,
        READING.software_id,
        READING.protocol_id,
        READING.subject_id,
        READING.method,
    )
    sql = sqlalchemy.func
    columns = (
        *key,
        sql.avg(READING.time_us).label("time_us"),
        sql.max(READING.time_half_width_us).label("time_half_width_us"),
        (sql.max(READING.time_us) - sql.min(READING.time_us)).label("time_spread_us"),
        sql.avg(READING.energy_mj).label("energy_mj"),
        sql.max(READING.energy_half_width_mj).label("energy_half_width_mj"),
        (sql.max(READING.energy_mj) - sql.min(READING.energy_mj)).label("energy_spread_mj"),
        sql.count(READING.energy_mj).label("with_energy"),
        sql.count().label("readings"),
        sql.min(READING.card_id).label("card_id"),
        sql.max(READING.card_id).label("other_card_id"),
    )
    selection = select_readings(session, filters, placed=False, kind="operator")
    rows: list[Any] = []
    for conditions in selection.where():
        rows += values(session, columns, OF_TUPLES, *conditions, grouped_by=key)
    return rows


def _add_operators(session: Session, operators: dict[str, _Operator], ids: Sequence[str]) -> None:
    """Add the short name, label and dtype of tuples that are not known yet."""
    # Only the tensors are decoded: whole descriptions of thousands of tuples take longer than
    # their readings.
    tensors = OPERATOR.spec["tensors"].label("tensors")
    columns = (OPERATOR.id, OPERATOR.short_name, OPERATOR.label, tensors)
    new = fetch_values(session, columns, [id_ for id_ in ids if id_ not in operators])
    for operator_id, row in new.items():
        operators[operator_id] = (row.short_name, row.label, _floating_dtype(row.tensors or ()))


def _floating_dtype(tensors: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the dtype of the first floating-point tensor."""
    for tensor in tensors:
        if tensor["dtype"].startswith(("float", "bfloat")):
            return str(tensor["dtype"])
    return None


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
        *(VERDICT.job_id == JOB.id, OF_WHOLES),
        READING.subject_id.in_(
            sqlalchemy.select(VARIANT.id)
        ),  # by its index, not through all readings of a card
    )
    rows: list[Any] = []
    for conditions in selection.where():
        rows += session.execute(query.where(*conditions))
    variants = fetch(session, tables.ModelVariant, (row.variant_id for row in rows))
    newest = {row.job_id: row for row in sorted(rows, key=lambda row: row.round)}
    models = [
        _Model(row.job_id, row.title, _fields(variants[row.variant_id]), row.id)
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
