"""``farm compare``: two jobs, or two sets of readings, against each other."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.options import AsJson
from cli.output import emit_json, show

SHOWN = 20
Job = "A job's id, or filters such as 'card=H200 torch=2.11 until=2026-11-21'."


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help=Job)],
    second: Annotated[str, typer.Argument(metavar="B", help="What it is held against, in the same way.")],
    fail_above: Annotated[
        str | None, typer.Option(metavar="X%", help="Exit with 5 where B takes more by over so much, intervals apart.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=0, help="How many tuples to show at most.")] = SHOWN,
    as_json: AsJson = False,
) -> None:
    """Hold two jobs, or two sets of readings, against each other: by operator type and by tuple."""
    from farm.errors import BelowTarget
    from farm.report import compare as comparisons

    bound = None if fail_above is None else _fraction(fail_above)
    with opening.open_database().read() as session:
        found = comparisons.compare(session, first, second)
    if as_json:
        emit_json(found.to_json())
    else:
        from cli import compare_tables

        show(compare_tables.comparison(found, limit))
    if bound is not None:
        if found.total is None:
            raise BelowTarget("The two sides have no tuple in common.", "Compare jobs of the same model.")
        if worse := found.worse_by(bound):
            raise BelowTarget(f"B takes more by over {bound * 100:g} %: {'; '.join(worse[:5])}.")


def _fraction(text: str) -> float:
    from farm.errors import UsageError

    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100 if "%" in text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value >= 1 and "%" not in text):  # 5 would be 500 %, which nothing exceeds
        raise UsageError(f"--fail-above wants a share such as 5% or 0.05, not '{text}'.")
    return value
