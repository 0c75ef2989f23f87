"""The rows of a comparison: sums of paired tuples, single tuples, and the wholes and sums of
verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import sqlalchemy
from sqlmodel import Session, col

from farm.report.compared_side import ComparedModel, LoadedSide, covered_share
from farm.report.comparison import ComparedRow, Made, RowSide
from farm.report.matching import Counted, Matching, Pair
from farm.store import tables
from farm.store.captures import counts
from farm.store.database import by_key
from farm.types.figure import Figure, PassCost, total_of
from farm.types.format import percent
from farm.verdict.cost_line import CostLine
from farm.verdict.figures import NOT_IN_SCOPE
from farm.verdict.verdict import VERDICT_SCHEMA, Verdict

#: The data classes that the name of a row does not mention.
_USUAL_DATA = (["normal"], ["copied"])


def type_rows(
    a: LoadedSide, b: LoadedSide, pairs: Sequence[Pair], *, own: bool
) -> list[ComparedRow]:
    """Sum the pairs of each operator type; if `own`, all tuples of the type on each side."""
    by_type = by_key(lambda pair: pair.short_name, pairs)
    names = dict.fromkeys([*a.by_type, *b.by_type] if own else by_type)
    rows = [sum_row(a, b, by_type.get(name, []), name, name, own=own) for name in names]
    return [row for row in rows if row.a.tuples or row.b.tuples]


def sum_row(
    a: LoadedSide,
    b: LoadedSide,
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

    side_a = side_of_row(a, of_a, every_a)
    side_b = side_of_row(b, of_b, every_b)
    note = ""
    if not every_a or not every_b:
        note = f"only in {'A' if every_a else 'B'}"
    elif of_a and of_b and len(pairs) < max(len(of_a), len(of_b)):
        note = f"{len(pairs)} tuples in both (A has {len(of_a)}, B has {len(of_b)})"
    return ComparedRow(name, operator, side_a, side_b, note, own_calls=own)


def tuple_row(
    a: LoadedSide, b: LoadedSide, of_a: Sequence[Counted], of_b: Sequence[Counted]
) -> ComparedRow:
    """Compare one tuple. Its name has the data class of each side if it is not the usual one."""
    subjects = [entry.line.subject for entry in (*of_a, *of_b)]
    data = list(dict.fromkeys(subject.data for subject in subjects))
    name = subjects[0].label
    if data not in _USUAL_DATA:
        name = f"{name}, {' against '.join(data)}"
    side_a, side_b = side_of_row(a, of_a), side_of_row(b, of_b)
    return ComparedRow(name, subjects[0].short_name, side_a, side_b)


def rows_only_in(name: Literal["A", "B"], a: LoadedSide, b: LoadedSide, matching: Matching) -> Made:
    """Return the tuples that are only on side `name`, the largest share first."""
    if name == "A":
        side, other, other_name, lines = a, b, "B", matching.only_a
    else:
        side, other, other_name, lines = b, a, "A", matching.only_b
    without_reading = {matching.key(other, line) for line in other.lines if not line.time_us}

    def make(line: CostLine) -> ComparedRow:
        counted = [Counted(line, line.count)]
        row = tuple_row(a, b, counted, []) if name == "A" else tuple_row(a, b, [], counted)
        if matching.key(side, line) in without_reading:
            return replace(row, note=f"no reading in {other_name}")
        return replace(row, note=f"only in {name}")

    return Made(sorted(lines, key=lambda line: -line.total_us), make)


def side_of_row(
    loaded: LoadedSide, counted: Sequence[Counted], every: Sequence[CostLine] | None = None
) -> RowSide:
    """Sum tuples of a side. `every`: all tuples that the row would have."""
    lines = [entry.line for entry in counted]
    side = RowSide(
        cost=_cost(counted),
        calls=sum(entry.calls for entry in counted),
        tuples=len(counted),
        share=loaded.share(lines),
    )
    if every is None:
        return side
    coverage = covered_share(lines, every)
    lacks = ""
    if len(lines) < len(every):
        lacks = f"{len(lines)} of {len(every)} tuples, {percent(coverage)}"
    return replace(side, coverage=coverage, lacks=lacks)


def _cost(counted: Sequence[Counted]) -> PassCost | None:
    """Return the cost of all calls; None without tuples, or if one has no reading."""
    time_us = time_of(counted)
    return None if time_us is None else PassCost(time_us, _energy(counted))


def time_of(counted: Sequence[Counted]) -> Figure | None:
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


def model_rows(
    session: Session, a: ComparedModel, b: ComparedModel
) -> tuple[ComparedRow, ComparedRow]:
    """Compare the whole model, and the sum of its tuples, as given in the verdicts."""
    of_a, of_b = _verdict_of(session, a), _verdict_of(session, b)
    name = a.title if a.title == b.title else f"{a.title} / {b.title}"
    whole = ComparedRow(name, "", _whole_of(a, of_a), _whole_of(b, of_b))
    sums = _sum_of(session, a, of_a), _sum_of(session, b, of_b)
    total = ComparedRow(name, "", *sums, own_calls=True)
    return whole, total


def _verdict_of(session: Session, model: ComparedModel) -> Verdict:
    if isinstance(model.verdict, Verdict):
        return model.verdict
    details = session.get_one(tables.VerdictRow, model.verdict).details
    if details.get("schema") == VERDICT_SCHEMA:
        return Verdict.from_json(details)

    from farm.report.report import build

    return build(session, model.job_id).verdict


def _whole_of(model: ComparedModel, verdict: Verdict) -> RowSide:
    side = RowSide(job_id=model.job_id, note=model.note)
    time = verdict.time.whole
    if not time:
        reasons = dict.fromkeys(whole.short_reason for whole in verdict.wholes if whole.reason)
        return replace(side, lacks=f"no reading{''.join(f' ({reason})' for reason in reasons)}")
    energy = verdict.energy.whole if verdict.energy else None
    return replace(side, cost=PassCost(time, energy), coverage=1.0)


def _sum_of(session: Session, model: ComparedModel, verdict: Verdict) -> RowSide:
    lacks = ""
    if verdict.measured < verdict.parts:
        outside = sum(entry.reason == NOT_IN_SCOPE for entry in verdict.unmeasured)
        scope = f" ({outside} not in scope)" if outside else ""
        number = f"{verdict.measured} of {verdict.parts} tuples{scope}"
        lacks = f"{number}, {percent(verdict.coverage)}"
    cost = None
    if verdict.measured:
        cost = PassCost(verdict.time.total, verdict.energy.total if verdict.energy else None)
    return RowSide(
        cost=cost,
        calls=_calls(session, model.job_id, verdict),
        tuples=verdict.measured,
        coverage=verdict.coverage,
        job_id=model.job_id,
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
