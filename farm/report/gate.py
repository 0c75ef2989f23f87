"""The gate of a comparison: which rows cost more on side B than a limit allows, with the
uncertainty of the change.

A row fails if the lower bound of its change exceeds the limit. The bound of stored readings comes
from their 95 % intervals and, if the sides ran on different cards of one model, from the spread
between cards (`card_spread`). The bound of paired rounds comes from the spread between the rounds
(`judge_rounds`). docs/compare.md has the formulas."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, Literal, get_args
from xml.etree.ElementTree import Element, SubElement, tostring

from sqlmodel import Session, col, select

from farm.errors import BelowTarget, UsageError
from farm.report.card_spread import LEAST_ON_CARDS, Quantity, card_spread
from farm.report.compare import compare
from farm.report.comparison import ComparedRow, Side, SideComparison
from farm.store import tables
from farm.store.reuse import DOUBTFUL
from farm.types.figure import Figure, share_of, total_of, value_of
from farm.types.format import ENERGY, TIME, few, percent, plural
from farm.types.format import quantity as in_unit

Level = Literal["whole", "sum", "type", "tuple"]
Scope = tuple[Quantity, Level]

_QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
_LEVELS: tuple[Level, ...] = get_args(Level)
#: All scopes except those of single tuples.
DEFAULT_SCOPES: tuple[Scope, ...] = tuple(itertools.product(_QUANTITIES, _LEVELS[:-1]))
MIN_SHARE = 0.05
FALSE_ALARMS = 0.01  # of paired comparisons in which no row changes by more than the limit
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Gate:
    """The rows that a gate looks at, and the change that it allows."""

    limit: float | None = None  # the largest allowed change, as a fraction; None: no row fails
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    # A type or tuple with a smaller share of its side's total, on both sides, is not judged
    min_share: float = MIN_SHARE

    @classmethod
    def parse(
        cls, limit: str | None, scopes: str | None = None, min_share: str | None = None
    ) -> Gate:
        """Read the options --fail-above, --scope and --min-share. Raises `UsageError` if a text is
        neither a percentage nor a scope."""
        gate = cls()
        if limit is not None:
            gate = replace(gate, limit=_fraction("--fail-above", limit))
        if scopes is not None:
            distinct = dict.fromkeys(_scope(scope) for scope in scopes.split(","))
            gate = replace(gate, scopes=tuple(distinct))
        if min_share is not None:
            gate = replace(gate, min_share=_fraction("--min-share", min_share))
        return gate

    def to_json(self) -> dict[str, Any]:
        return {
            "limit": self.limit,
            "scope": [":".join(scope) for scope in self.scopes],
            "min_share": self.min_share,
        }


def _fraction(option: str, text: str) -> float:
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100 if "%" in text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value >= 1 and "%" not in text):  # 5 would be 500 %
        raise UsageError(
            f"{option} requires a percentage or a fraction, such as 5% or 0.05; got '{text}'.",
            f"Write a number from 0 with %, or below 1 without: {option} 5%.",
        )
    return value


def _scope(text: str) -> Scope:
    quantity, _, level = text.strip().partition(":")
    if quantity not in _QUANTITIES or level not in _LEVELS:
        raise UsageError(
            f"--scope does not accept '{text.strip()}'.",
            "Give time or energy, a colon, and whole, sum, type or tuple: --scope "
            "time:type,energy:whole.",
        )
    return quantity, level


@dataclass(frozen=True)
class JudgedRow:
    """One row of the scope. Time in µs, energy in mJ. The change and its bounds are fractions: b /
    a - 1.
    """

    quantity: Quantity
    level: Level
    name: str
    share: float  # the larger of the row's shares in the totals of A and B; 1 for a whole or a sum
    a: float  # the cost of all calls on side A; of paired rounds the median
    b: float  # the same on side B
    change: float
    low: float
    high: float
    rounds: int  # the number of paired rounds that count; 0 for stored readings
    fails: bool  # True if `low` exceeds the limit

    @property
    def line(self) -> str:
        share = (
            f", {percent(self.share)} of the {self.quantity}"
            if self.level in ("type", "tuple")
            else ""
        )
        change, least = self.change * 100, self.low * 100
        return f"{self.quantity} of {self.name}: {change:+z.1f} %, at least {least:+z.1f} %{share}"

    @property
    def cells(self) -> list[str]:
        """A, B, the change and its bounds, for people."""
        sides = (
            in_unit(side, TIME if self.quantity == "time" else ENERGY) for side in (self.a, self.b)
        )
        return [
            *sides,
            *(f"{change * 100:+z.1f} %" for change in (self.change, self.low, self.high)),
        ]


@dataclass(frozen=True)
class Judgement:
    """The judged rows of a comparison.

    Attributes:
        unknown: why no row can be judged; "" if rows are judged.
        incomplete: names of the rows of the scope that are not judged, because one side lacks
            readings that the other side has.
    """

    gate: Gate
    rows: tuple[JudgedRow, ...]
    unknown: str = ""
    card_spread: Mapping[Quantity, float] = field(default_factory=dict)  # half-widths; {}: one card
    incomplete: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """Say which rows are not judged; "" if all are."""
        if not self.incomplete:
            return ""
        return (
            f"Not judged, because one side lacks readings that the other side has: "
            f"{few(self.incomplete)}."
        )

    @property
    def findings(self) -> tuple[JudgedRow, ...]:
        """The rows that fail."""
        return tuple(row for row in self.rows if row.fails)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.gate.to_json(),
            "rows": [vars(row) for row in self.rows],
            "failed": [vars(row) for row in self.findings],
            "findings": [row.line for row in self.findings],
            "unknown": self.unknown,
            "incomplete": list(self.incomplete),
            "card_spread": dict(self.card_spread),
        }

    def markdown(self, a: str, b: str) -> str:
        """Return a summary for a pull request: the outcome and a table of all rows, those that fail
        first.
        """
        limit = "" if self.gate.limit is None else f" (limit {percent(self.gate.limit)})"
        number = len(self.findings)
        outcome = self.unknown or (
            f"{number} {plural('row', number)} failed" if number else "no row failed"
        )
        lines = [f"**{outcome.rstrip('.')}**{limit}. A: `{a}`, B: `{b}`.", ""]
        lines += [
            "| row | A | B | change | at least | at most | |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        ]
        for row in sorted(self.rows, key=lambda row: not row.fails):
            outcome = "**fail**" if row.fails else ""
            lines.append(f"| {row.quantity} of {row.name} | {' | '.join(row.cells)} | {outcome} |")
        if self.left_out:
            lines += ["", self.left_out]
        return "\n".join(lines)

    def junit(self) -> str:
        """Return a JUnit report in XML with one test case for each row."""
        suite = Element(
            "testsuite",
            name="farm compare",
            tests=str(len(self.rows)),
            failures=str(len(self.findings)),
        )
        for row in self.rows:
            case = SubElement(
                suite, "testcase", classname=f"{row.quantity}.{row.level}", name=row.name
            )
            if row.fails:
                SubElement(case, "failure", message=row.line)
        if self.unknown:
            SubElement(
                SubElement(suite, "testcase", name="comparison"), "error", message=self.unknown
            )
        return tostring(suite, encoding="unicode")

    def check(self) -> None:
        """Raises `BelowTarget` if a row fails, or none can be judged; one line for each finding."""
        if self.gate.limit is None:
            return
        if self.unknown:
            raise BelowTarget(
                self.unknown, "Measure A and B on one card, or take another --scope or --min-share."
            )
        if self.findings:
            number = len(self.findings)
            head = (
                f"B takes over {self.gate.limit * 100:g} % more than A in {number} "
                f"{plural('row', number)}:"
            )
            raise BelowTarget("\n".join([head, *(row.line for row in self.findings)]))


# ---- stored readings


def judge(session: Session, found: SideComparison, gate: Gate) -> Judgement:
    """Judge the rows of one comparison by the intervals of its figures."""
    if found.total is None and not found.sums:
        return Judgement(gate, (), "A and B have neither a model nor a tuple in common.")
    spread: Mapping[Quantity, float] = {}
    model = _model_of_several_cards(found.a, found.b)
    if model:
        spread = card_spread(session, model)
        gate = replace(gate, scopes=tuple(scope for scope in gate.scopes if scope[0] in spread))
        if not gate.scopes:
            why = (
                f"fewer than {LEAST_ON_CARDS} tuples or whole models were measured on several of "
                "them"
            )
            unknown = (
                f"A and B ran on different cards ({model}), and {why}: their spread is unknown."
            )
            return Judgement(gate, (), unknown)

    rows = []
    for (quantity, level, name), value in _values(found, gate).items():
        a, b = value.a, value.b
        ratio = b.divided_by(a)
        change = ratio.value - 1
        half_width = math.hypot(ratio.half_width, ratio.value * spread.get(quantity, 0.0))
        low = change - half_width
        rows.append(
            JudgedRow(
                quantity,
                level,
                name,
                share=value.share,
                a=a.value,
                b=b.value,
                change=change,
                low=low,
                high=change + half_width,
                rounds=0,
                fails=_fails(low, gate),
            )
        )
    judged = {quantity: spread[quantity] for quantity, _ in gate.scopes if quantity in spread}
    incomplete: dict[str, ComparedRow] = {}
    for _, level in gate.scopes:
        incomplete |= {name: row for name, row in _rows(found, level) if row.incomplete}
    return Judgement(gate, tuple(rows), "" if rows else _none_of(gate), judged, tuple(incomplete))


def _fails(low: float, gate: Gate) -> bool:
    return gate.limit is not None and low > gate.limit


def _none_of(gate: Gate) -> str:
    scopes = ",".join(":".join(scope) for scope in gate.scopes)
    return (
        f"No row of {scopes} has figures of A and B and at least {percent(gate.min_share)} of the "
        "total."
    )


def _model_of_several_cards(a: Side, b: Side) -> str:
    """The card model if both sides ran on cards of the same model and not all on one card; else
    "".
    """
    several = len({*a.cards, *b.cards}) > 1
    return a.card_models[0] if several and len({*a.card_models, *b.card_models}) == 1 else ""


@dataclass(frozen=True)
class RowValue:
    """The figures of one row on both sides, and its share (see `JudgedRow`)."""

    a: Figure
    b: Figure
    share: float


#: (quantity, level, name) -> the row
Rows = dict[tuple[Quantity, Level, str], RowValue]


def _values(found: SideComparison, gate: Gate) -> Rows:
    """Return the rows of the scope that have figures of both sides and the smallest share."""
    values: Rows = {}
    for quantity, level in gate.scopes:
        of_types = [row.change_of(quantity) for row in found.types]
        total_a = math.fsum(value_of(change.a) or 0.0 for change in of_types)
        total_b = math.fsum(value_of(change.b) or 0.0 for change in of_types)
        terms_a: dict[str, list[tuple[Figure, int]]] = defaultdict(list)
        terms_b: dict[str, list[tuple[Figure, int]]] = defaultdict(list)
        for name, row in _rows(found, level):
            if row.incomplete:
                continue
            change = row.change_of(quantity)
            if change.a and change.b and change.a.value > 0 and change.b.value > 0:
                terms_a[name].append((change.a, 1))  # tuples may have the same label
                terms_b[name].append((change.b, 1))
        for name in terms_a:
            a, b = total_of(terms_a[name]), total_of(terms_b[name])
            assert a
            assert b
            share = max(share_of(a.value, total_a) or 0.0, share_of(b.value, total_b) or 0.0)
            if level in ("whole", "sum"):
                share = 1.0
            if share >= gate.min_share:
                values[quantity, level, name] = RowValue(a, b, share)
    return values


def _rows(found: SideComparison, level: Level) -> list[tuple[str, ComparedRow]]:
    of_jobs = found.weights == "own calls"  # one model
    match level:
        case "whole":
            return [
                ("whole model" if of_jobs else f"whole model {row.name}", row)
                for row in found.wholes
            ]
        case "sum":
            common = (
                [("sum of the common tuples", found.total)] if found.total and not of_jobs else []
            )
            of_one = "sum of the tuples"
            return [
                *((of_one if of_jobs else f"sum of {row.name}", row) for row in found.sums),
                *common,
            ]
        case "type":
            return [(row.name, row) for row in found.types]
        case "tuple":
            return [(row.name, row) for row in found.tuples]


# ---- paired rounds


@dataclass(frozen=True)
class PairedComparison:
    """The rounds of a paired comparison and their judgement. `jobs`: the ids of the jobs of A and B
    in each round.
    """

    card: str
    titles: tuple[str, str]
    jobs: tuple[tuple[str, str], ...]
    judgement: Judgement

    def to_json(self) -> dict[str, Any]:
        sides = {"a": self.titles[0], "b": self.titles[1]}
        return {"card": self.card, **sides, "rounds": self.jobs, "gate": self.judgement.to_json()}


def judge_jobs(
    session: Session, card: str, jobs: Sequence[tuple[str, str]], gate: Gate
) -> PairedComparison:
    """Judge paired rounds, given by the jobs of A and B in each round."""
    judgement = judge_rounds([round_values(session, a, b, gate) for a, b in jobs], gate)
    a, b = (session.get_one(tables.Job, job_id).title for job_id in jobs[0])
    return PairedComparison(card, (a, b), tuple(jobs), judgement)


def round_values(session: Session, a_job: str, b_job: str, gate: Gate) -> Rows:
    """Return the rows of one round. A row with a reading that later jobs would not reuse is left
    out.
    """
    values = _values(compare(session, a_job, b_job), replace(gate, min_share=0.0))
    doubtful = _doubtful(session, a_job) | _doubtful(session, b_job)
    sound = {}
    for (quantity, level, name), value in values.items():
        if (level, "") not in doubtful and (level, name) not in doubtful:
            sound[quantity, level, name] = value
    return sound


def _doubtful(session: Session, job_id: str) -> set[tuple[str, str]]:
    """Return (level, name; "" for all) of the rows of a job that contain a doubtful reading."""
    item, reading, operator = tables.Item, tables.ReadingRow, tables.Operator
    query = (
        select(item.role, reading.flags, operator.short_name, operator.label)
        .join(reading, col(reading.id) == col(item.reading_id))
        .join(operator, col(operator.id) == col(item.subject_id), isouter=True)
        .where(item.job_id == job_id)
    )
    doubtful: set[tuple[str, str]] = set()
    for role, flags, short_name, label in session.exec(query):
        if not DOUBTFUL.intersection(flags):
            continue
        if role == "whole":
            doubtful.add(("whole", ""))
        else:
            doubtful.update((("sum", ""), ("type", short_name), ("tuple", label)))
    return doubtful


def judge_rounds(rounds: Sequence[Rows], gate: Gate) -> Judgement:
    """Judge rows by the changes in paired rounds.

    With d = ln(b / a) of each round, their mean m, standard deviation s and number n, and the
    number k of judged rows, the bounds of the change are exp(m -+ t s / sqrt(n)) - 1. t is the
    quantile of Student's t with n - 1 degrees of freedom at 1 - `FALSE_ALARMS` / k. A row without
    `LEAST_ROUNDS` rounds is not judged."""
    series: dict[tuple[Quantity, Level, str], list[RowValue]] = defaultdict(list)
    for of_round in rounds:
        for key, value in of_round.items():
            series[key].append(value)
    judged = {}
    for key, values in series.items():
        share = median(value.share for value in values)
        if len(values) >= LEAST_ROUNDS and share >= gate.min_share:
            judged[key] = values

    rows = []
    for (quantity, level, name), values in judged.items():
        changes = [math.log(value.b.value / value.a.value) for value in values]
        count, mean = len(values), fmean(changes)
        quantile = student_t(1 - FALSE_ALARMS / len(judged), count - 1)
        half_width = quantile * stdev(changes) / math.sqrt(count)
        low = math.expm1(mean - half_width)
        rows.append(
            JudgedRow(
                quantity,
                level,
                name,
                share=median(value.share for value in values),
                a=median(value.a.value for value in values),
                b=median(value.b.value for value in values),
                change=math.expm1(mean),
                low=low,
                high=math.expm1(mean + half_width),
                rounds=count,
                fails=_fails(low, gate),
            )
        )
    unknown = "" if rows else f"{_none_of(gate)[:-1]} in {LEAST_ROUNDS} rounds."
    return Judgement(gate, tuple(rows), unknown)


@functools.cache
def student_t(probability: float, degrees: int) -> float:
    """The quantile of Student's t for a probability from 0.5 to below 1. SciPy, an extra, is not
    needed.
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return high


def _student_cdf(t: float, degrees: int) -> float:
    """The distribution function for t >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for step in range(1 + odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * step / (step + 1)
    within = (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
    return 0.5 + within / 2
