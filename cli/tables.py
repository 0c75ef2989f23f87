"""How every table of this program looks: its lines, its cells, and the words and colours of states and outcomes.

Made for 100 columns; whole in a narrower terminal too, and in a pipe without colour and with every line as long as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich import box
from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text as RichText

from cli.responsive_table import FittedTable
from farm.types.format import NOTHING, printable

Row = Mapping[str, Any]

# A line under the head and above a section, and no other.
_BOX = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
_OUTCOMES = {"pass": ("PASS", "bold green"), "fail": ("FAIL", "bold red"), "none": ("NO VERDICT", "bold yellow")}
_STATES = {
    "open": "cyan",
    "done": "green",
    "cancelled": "dim",
    "starting": "yellow",
    "idle": "green",
    "busy": "cyan",
    "draining": "yellow",
    "quarantined": "bold red",
    "lost": "red",
    "stopped": "dim",
}


class Text(RichText):
    """Rich's, which shows what others wrote (titles, labels, ids) without control characters: the one that verbs use."""

    def __init__(self, text: str = "", style: str | Style = "", **options: Any) -> None:
        super().__init__(printable(text), style, **options)

    def append(self, text: RichText | str, style: str | Style | None = None) -> Self:
        super().append(printable(text) if isinstance(text, str) else text, style)
        return self

    def append_text(self, text: RichText) -> Self:
        super().append_text(text)
        return self


def ruled(*columns: str, drops: Sequence[str] = ()) -> Table:
    """A table with a head and lines; a column whose name begins with > is set to the right.

    Args:
        drops: heads of the columns that drop out of a narrow terminal, first the one that is missed least.
    """
    table = FittedTable(box=_BOX, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    table.drops = drops
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def row(table: Table, *cells: RenderableType, style: str = "") -> None:
    """Add a row."""
    # As Text: a label such as "getitem[0]" is no markup.
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def grid(columns: int) -> Table:
    """So many columns, without a head or lines."""
    table = Table.grid(padding=(0, 1))
    for _ in range(columns):
        table.add_column(overflow="fold")  # an id is longer than a narrow terminal
    return table


def outcome(name: str) -> Text:
    """A verdict's outcome in capitals and colour."""
    words, style = _OUTCOMES.get(name, (name.upper(), ""))
    return Text(words, style=style)


def state(name: Any, reason: str = "") -> Text:
    """The state of a job or a card in its colour, with the reason where there is one."""
    told = Text(str(name or NOTHING), style=_STATES.get(str(name), ""))
    return told.append_text(clipped(f": {reason}", 60)) if reason else told


def cell(values: Row, key: str) -> str:
    """What a row holds under that key; a dash where it lacks it."""
    value = values.get(key)
    return NOTHING if value is None or value == "" else str(value)


def hanging(told: str | RichText, style: str = "") -> Table:
    """A note, set in, whose further lines stand under its first."""
    table = Table.grid(padding=0)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("  ", Text(told, style) if isinstance(told, str) else told)
    return table


def clipped(text: str, most: int) -> Text:
    """One line: in a terminal cut at `most` characters, and further where the table is narrow; whole in a pipe."""
    most = most if sys.stdout.isatty() else len(text)
    return Text(text if len(text) <= most else text[: most - 1] + "…", no_wrap=True, overflow="ellipsis")


def short_id(card_id: str) -> str:
    """The beginning of a card's id, enough to know it by."""
    return card_id if len(card_id) <= 14 else card_id[:12] + "…"
