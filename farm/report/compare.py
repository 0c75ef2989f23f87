"""Compare two jobs or two sets of readings: whole models, sums, operator types and tuples, in time
and energy.

Wholes and sums come from verdicts. `farm.report.compared_side` loads a side, `farm.report.matching`
pairs tuples and models, `farm.report.compared_rows` and `compared_kernels` make the rows."""

from __future__ import annotations

from dataclasses import replace

from sqlmodel import Session

from farm.report.card_spread import between_cards
from farm.report.compared_kernels import compared_kernels
from farm.report.compared_rows import (
    model_rows,
    rows_only_in,
    sum_row,
    time_of,
    tuple_row,
    type_rows,
)
from farm.report.compared_side import DescribedOperator, load, measured_alone
from farm.report.comparison import ComparedRow, Made, SideComparison
from farm.report.matching import Pair, counted_pairs, match, paired_models, weights_of
from farm.verdict.cost_line import Change


def compare(session: Session, first: str, second: str) -> SideComparison:
    """Compare two sides: each is a job's id or its beginning, or filters (``card=H200
    torch=2.11``). Raises `NoSuchJob` or `UsageError` if nothing matches a side, or if its readings
    cannot be summed."""
    operators: dict[str, DescribedOperator] = {}
    a, b = load(session, first, operators), load(session, second, operators)
    if bool(a.side.job_id) != bool(b.side.job_id):
        a, b = measured_alone(session, a), measured_alone(session, b)
    cards = (a.side.cards, b.side.cards)
    between = between_cards(session, (*a.side.card_models, *b.side.card_models), cards)

    def on_cards(row: ComparedRow) -> ComparedRow:
        return replace(row, between_cards=between) if between else row

    matching = match(session, a, b)
    weights = weights_of(a.side, b.side)
    pairs = counted_pairs(matching.pairs, weights)
    common = counted_pairs(matching.pairs, "calls of A") if weights == "own calls" else pairs
    total = on_cards(sum_row(a, b, common, "sum")) if common else None
    types = [on_cards(row) for row in type_rows(a, b, pairs, own=weights == "own calls")]

    wholes, sums = [], []
    for model_a, model_b in paired_models(a, b):
        whole, sum_of_model = model_rows(session, model_a, model_b)
        sums.append(on_cards(sum_of_model))
        if model_a.variant:  # not a sweep
            wholes.append(on_cards(whole))
    kernels = [replace(entry, row=on_cards(entry.row)) for entry in compared_kernels(session, a, b)]

    def order_of_pair(pair: Pair) -> tuple[bool, float, str]:
        time = Change(time_of([pair.a]), time_of([pair.b]), between.get("time", 0.0))
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
            lambda pair: on_cards(tuple_row(a, b, [pair.a], [pair.b])),
        ),
        tuples_only_a=rows_only_in("A", a, b, matching),
        tuples_only_b=rows_only_in("B", a, b, matching),
        kernels=tuple(kernels),
        between_cards=between,
    )
