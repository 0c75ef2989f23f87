"""A comparison as it is shown: operator types, tuples, and what one side alone has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from cli.tables import Text, row, ruled
from farm.types.format import ENERGY, NOTHING, TIME, Units, gap, plural, quantity

if TYPE_CHECKING:
    from farm.report.compare import Compared, Comparison, Difference

SHOWN = 20  # of what one side alone has, where no tuples are shown
_STYLES = {"faster": "green", "slower": "red"}


def comparison(found: Comparison, limit: int) -> RenderableType:
    parts: list[RenderableType] = []
    for name, side in (("A", found.a), ("B", found.b)):
        about = f"{', '.join(side.card_models) or NOTHING}, torch {', '.join(side.software) or NOTHING}"
        text = f"{name}  {side.text}  ({about}; {side.tuples} {plural('tuple', side.tuples)})"
        parts.append(Text(text, style="bold"))
    if found.total is None:
        parts += [Text(""), Text("They have no tuple in common.")]
    else:
        parts += [Text(""), _table("operator", found.types, found.total)]
        if limit and found.tuples:
            parts += [Text(""), _table("tuple", found.tuples[:limit])]
            if len(found.tuples) > limit:
                parts.append(Text(f"  {len(found.tuples) - limit} more moved less; -n shows them.", style="dim"))
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            parts += [Text(""), Text(f"only in {name}: {len(only)} {plural('tuple', len(only))}", style="bold")]
            parts += [Text(f"  {label}") for label in only[: limit or SHOWN]]
            if len(only) > (limit or SHOWN):
                parts.append(Text(f"  {len(only) - (limit or SHOWN)} more", style="dim"))
    return Group(*parts)


def _table(head: str, rows: tuple[Compared, ...], total: Compared | None = None) -> RenderableType:
    columns = (head, ">calls", ">time A", ">time B", ">change", ">energy A", ">energy B", ">change")
    table = ruled(*columns, drops=("calls", "energy A", "energy B", "time A"))
    for entry in rows:
        _add(table, entry)
    if total is not None:
        table.add_section()
        _add(table, total, style="bold")
    return table


def _add(table: object, entry: Compared, style: str = "") -> None:
    cells = [entry.name, str(entry.calls), *_cells(entry.time, TIME), *_cells(entry.energy, ENERGY)]
    row(table, *cells, style=style)  # type: ignore[arg-type]


def _cells(found: Difference | None, units: Units) -> list[str | Text]:
    if found is None:
        return [NOTHING] * 3
    change = f"{gap(found.change)}" if found.apart else f"({gap(found.change)})"
    figures: list[str | Text] = [quantity(found.a.value, units), quantity(found.b.value, units)]
    return [*figures, Text(change, style=_STYLES.get(found.verdict, ""))]
