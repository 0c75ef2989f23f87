"""``farm lookup``: what an operator costs, from readings."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.options import AsJson, Cards
from cli.output import emit_json, say, show


def lookup(
    words: Annotated[
        list[str],
        typer.Argument(metavar="OPERATOR|FILTER...", help="Conv2d in_channels=64 kernel_size=3 dtype=bfloat16 ..."),
    ],
    card: Cards = None,
    sort: Annotated[
        str, typer.Option(help="time (default), energy, power: the costliest first; age: the newest.")
    ] = "time",
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many to show at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what an operator costs: time, energy and power from readings, with where and when they were taken."""
    from farm.exchange.filters import parse
    from farm.report import lookup as lookups

    filters = parse(words, card or ())
    found = opening.first_that_knows(
        lambda session: lookups.lookup(session, filters, sort=sort, limit=limit),  # type: ignore[arg-type]
        lambda answer: answer.total > 0,
    )
    rows = [row.to_json() for row in found.rows]
    if as_json:
        emit_json({"total": found.total, "readings": rows})
        return
    if not rows:
        say(f"No reading is meant by: {filters}\n→ Leave a word out; `farm export` writes all that there is.")
        return
    from cli import lists

    show(lists.readings(rows))
    if found.total > len(rows):
        say(f"{found.total - len(rows)} more; -n {found.total} shows all, `farm export` writes them.")
