"""What a study found, for a terminal. Formatting, no logic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from cli import tables
from cli.tables import Text
from farm.types.format import ENERGY, NOTHING, POWER, TIME, percent, quantity, span

if TYPE_CHECKING:
    from farm.study.findings import Column
    from farm.study.performed import Performed

_MOST_FAILURES = 5


def table(made: Performed) -> RenderableType:
    """Title, table, notes, what could not be measured, and where the readings are."""
    rows = made.findings.rows
    # A card that tells no power has no column of dashes for it; heads of two words stand on two lines.
    columns = [column for column in made.findings.columns if any(row.get(column.key) is not None for row in rows)]
    heads = [column.head.replace(", ", "\n") for column in columns]
    found = tables.ruled(
        *(head if column.kind == "text" else f">{head}" for column, head in zip(columns, heads, strict=True)),
        drops=[column.head.replace(", ", " ") for column in columns[:1:-1]],
    )
    for row in rows:
        tables.row(found, *(_cell(column, row.get(column.key)) for column in columns))
    named = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"))
    versions = [f"{name} {made.software[key]}" for name, key in named if made.software.get(key)]
    parts: list[RenderableType] = [
        Text(made.title, style="bold"),
        tables.hanging(made.study.question, "dim"),
        tables.hanging(f"{made.card.id}; {', '.join(versions)}", "dim"),
        Text(),
        found,
        Text(),
        *map(tables.hanging, made.findings.notes),
    ]
    for subject, reason in list(made.failures.items())[:_MOST_FAILURES]:
        parts.append(tables.hanging(f"not measured: {subject}: {reason}", "yellow"))
    if (left := len(made.failures) - _MOST_FAILURES) > 0:
        parts.append(Text(f"  and {left} more; --json lists all", style="dim"))
    kept = f"{len(made.readings)} readings kept as study {made.id}; {span(made.card_time_s)} of card time"
    return Group(*parts, tables.hanging(kept, "dim"))


def kept(studies: Sequence[Performed]) -> RenderableType:
    """The studies of this host."""
    if not studies:
        return Text("No studies yet. Start one with `farm study windows --quick`.")
    found = tables.ruled("id", "study", "model", "card", "", ">age", drops=("age", "", "card"))
    for made in studies:
        quick = "quick" if made.quick else ""
        age = span(time.time() - made.created_at_s)
        tables.row(found, made.id, made.study.name, str(made.variant), made.card.model, quick, age)
    return found


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return NOTHING
    match column.kind:
        case "time_us":
            return quantity(value, TIME, 4)
        case "energy_mj":
            return quantity(value, ENERGY, 4)
        case "power_w":
            return quantity(value, POWER)
        case "seconds":
            return f"{value:.2g} s"
        case "change":
            return f"{value * 100:+.2f} %"
        case "share":
            return percent(value, 2)
        case "count":
            return f"{value:g}"
        case _:
            return str(value)
