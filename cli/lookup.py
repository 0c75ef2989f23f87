"""``farm lookup`` and ``farm compare``: the cost of an operator from readings, and differences between two sides."""

from __future__ import annotations

import typer

from cli import lists, opening
from cli.options import AsJson, Cards
from cli.output import answer, emit_json, say, show
from farm.errors import BelowTarget, UsageError


def lookup(
    words: list[str] = typer.Argument(
        ..., metavar="OPERATOR|FILTER...", help="Conv2d in_channels=64 kernel_size=3 dtype=bfloat16 ..."
    ),
    card: Cards = None,
    sort: str = typer.Option(
        "time", help="time (default), energy or power: the most expensive first; age: the newest first."
    ),
    limit: int = typer.Option(20, "-n", "--limit", min=1, help="The maximum number of readings to show."),
    as_json: AsJson = False,
) -> None:
    """Show the cost of an operator: time, energy and power from readings, with their card, software and age."""
    from farm.exchange.filters import parse
    from farm.report import lookup as lookups

    filters = parse(words, card or ())
    found, total = opening.first_that_knows(
        lambda session: lookups.lookup(session, filters, sort=sort, limit=limit),  # type: ignore[arg-type]
        lambda result: result[1] > 0,
    )
    rows = [vars(row) for row in found]
    if as_json:
        emit_json({"total": total, "readings": rows})
    elif not rows:
        say(f"No readings match {filters}.\n→ Omit a filter; `farm export` writes all readings.")
    else:
        show(lists.readings(rows))
        if total > len(rows):
            say(f"{total - len(rows)} more: -n {total} shows all, `farm export` writes them.")


def compare(
    first: str = typer.Argument(
        ..., metavar="A", help="The id of a job, or filters such as 'card=H200 torch=2.11 until=2026-11-21'."
    ),
    second: str = typer.Argument(..., metavar="B", help="The other side, in the same form."),
    fail_above: str | None = typer.Option(
        None,
        metavar="X%",
        help="Exit with code 5 if B is slower than A by more than this and the intervals do not overlap.",
    ),
    limit: int = typer.Option(20, "-n", "--limit", min=0, help="The maximum number of tuples to show."),
    as_json: AsJson = False,
) -> None:
    """Compare two jobs or two sets of readings: by operator type and by tuple."""
    from farm.report import compare as comparisons

    bound = None if fail_above is None else _fraction(fail_above)
    with opening.open_database().read() as session:
        found = comparisons.compare(session, first, second)
    answer(as_json, found, lambda: lists.comparison(found, limit))
    if bound is not None:
        if found.total is None:
            raise BelowTarget("The two sides have no tuple in common.", "Compare jobs of the same model.")
        if worse := found.worse_by(bound):
            raise BelowTarget(f"B is slower than A by more than {bound * 100:g} %: {'; '.join(worse[:5])}.")


def _fraction(text: str) -> float:
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100 if "%" in text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value >= 1 and "%" not in text):  # 5 would be 500 %
        raise UsageError(f"--fail-above requires a percentage or a fraction, such as 5% or 0.05; got '{text}'.")
    return value
