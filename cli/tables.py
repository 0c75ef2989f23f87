"""The look of every table of this program: its lines and cells, and the words and colours of states
and outcomes.

A narrow terminal drops the least important columns; numbers, ids and names stay complete, and text
wraps between words. A pipe has no width: programs get every column, unless `COLUMNS` sets a width.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import measure_renderables
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text as RichText

from cli.streams import plain, shows
from farm.errors.safe_text import printable
from farm.types.format import NOTHING, count_of, quantity

Row = Mapping[str, Any]
Cell = Callable[[Any], RenderableType]  # the cell of a row

_WRAPPED = 16  # text wraps down to this width before a column is dropped
_WORD = 24  # longer words may be cut, in columns that may be dropped first
_CLIPPED = 10  # the least width of a text that is cut to one line
# A line below the head and above a section.
_BOX = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
_ASCII_BOX = box.Box("    \n    \n -- \n    \n -- \n    \n    \n    \n", ascii=True)
_OUTCOMES = {
    "pass": ("PASS", "bold green"),
    "fail": ("FAIL", "bold red"),
    "none": ("NO VERDICT", "bold yellow"),
}
_OUTCOMES |= {"listed": ("lists the kernels", "")}
_COLOURS = {
    "cyan": "open busy",
    "green": "done idle",
    "dim": "cancelled stopped",
    "yellow": "starting draining",
}
_COLOURS |= {"bold red": "quarantined", "red": "lost"}
_STATES = {state: colour for colour, states in _COLOURS.items() for state in states.split()}
_BARS = "▁▂▃▄▅▆▇█"


class Text(RichText):
    """Rich's text without the control characters of titles, labels and ids."""

    def __init__(self, text: str = "", style: str | Style = "", **options: Any) -> None:
        super().__init__(plain(printable(text)), style, **options)

    def append(self, text: RichText | str, style: str | Style | None = None) -> Self:
        super().append(plain(printable(text)) if isinstance(text, str) else text, style)
        return self

    def append_text(self, text: RichText) -> Self:
        super().append_text(text)
        return self


class PlainConsole(Console):
    """Rich's console, without characters that stdout cannot show."""

    def render_str(self, text: str, **options: Any) -> RichText:
        return super().render_str(plain(text), **options)


class ResponsiveTable(Table):
    """A table that drops columns if the terminal is too narrow."""

    drops: Sequence[str] = ()  # heads, the least important first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Some versions of Rich add padding at the edges of the table to its width, although they
        # print none.
        edges = 2 * (self._get_padding_width(0) - 1)

        def room(widths: Sequence[int]) -> int:
            """Return the unused width of the line in characters. Three characters separate two
            columns.
            """
            return options.max_width - sum(widths) - 3 * (len(widths) - 1) - edges

        def least(
            columns: Sequence[Column], wrapped: int = _WRAPPED, *, cut: bool = False
        ) -> list[int]:
            return [self._least(console, options, column, wrapped, cut=cut) for column in columns]

        texts = [[_heading(column), *column.cells] for column in self.columns]
        natural = [measure_renderables(console, options, of_column).maximum for of_column in texts]
        if room(natural) >= 0:
            yield from super().__rich_console__(console, options)
            return
        shown, dropped, drops = list(self.columns), list[str](), list(self.drops)
        while room(least(shown)) < 0 and drops:
            dropped.append(drops.pop(0))
            shown = [column for column in shown if _head(column) != dropped[-1]]
        ways = (least(shown), least(shown, cut=True), least(shown, 0, cut=True))
        widths = next((way for way in ways if room(way) >= 0), None)
        if widths is None:
            yield self._as_list()
            return
        # the narrowest column that is narrower than its text grows first
        for _ in range(room(widths)):
            growing = [
                n
                for n, column in enumerate(shown)
                if widths[n] < natural[self.columns.index(column)]
            ]
            if growing:
                widths[min(growing, key=lambda n: widths[n])] += 1
        table = copy.copy(self)
        table.columns = [
            dataclasses.replace(
                column, header=_heading(column), overflow="ellipsis", width=width, _index=n
            )
            for n, (column, width) in enumerate(zip(shown, widths, strict=True))
        ]
        yield from Table.__rich_console__(table, console, options)
        if named := ", ".join(dict.fromkeys(filter(None, dropped))):
            yield Text(f"  columns left out, as the terminal is too narrow: {named}", style="dim")

    def _least(
        self, console: Console, options: ConsoleOptions, column: Column, wrapped: int, *, cut: bool
    ) -> int:
        """The least width of a column: its longest word (if `cut`, long words may be cut), or its
        text if it does not wrap. Text does not wrap below the width `wrapped`."""
        widths = [measure_renderables(console, options, [_heading(column)]).minimum, 1]
        for text in column.cells:
            word, line = measure_renderables(console, options, [text])
            if isinstance(text, RichText) and text.overflow == "ellipsis":
                widths.append(min(line, _CLIPPED))
            elif column.no_wrap:
                widths.append(line)
            else:
                word = min(word, _WORD) if cut or _head(column) in self.drops else word
                widths.append(min(line, max(wrapped, word)))
        return max(widths)

    def _as_list(self) -> Table:
        """For a terminal that is too narrow for columns: a line for each cell."""
        table = grid(2)
        table.columns[0].style = "bold"
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            for column, value in zip(self.columns, cells, strict=True):
                if str(value):
                    table.add_row(_head(column), value)
            table.add_row("", "")
        return table


def _heading(column: Column) -> RichText:
    return RichText(plain(str(column.header)), no_wrap=False)


def _head(column: Column) -> str:
    return str(column.header).replace("\n", " ")


def ruled(
    heads: Sequence[str],
    rows: Iterable[Sequence[RenderableType]] = (),
    drops: Sequence[str] = (),
    total: Sequence[RenderableType] = (),
) -> Table:
    """A table with a head and lines.

    Args:
        heads: ">" at the beginning aligns the column to the right.
        rows: the cells of each row.
        drops: heads of the columns that a narrow terminal drops, the least important first.
        total: the cells of a last row below a line.
    """
    lines = _BOX if shows("─") else _ASCII_BOX
    table = ResponsiveTable(
        box=lines, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False
    )
    table.drops = drops
    for head in heads:
        right = head.startswith(">")
        table.add_column(
            head.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for cells in rows:
        row(table, *cells)
    if total:
        table.add_section()
        row(table, *total, style="bold")
    return table


def filled(
    rows: Sequence[Any],
    columns: Sequence[Any],
    drops: Sequence[str] = (),
    *,
    total: Sequence[RenderableType] = (),
    dim: Callable[[Any], bool] = lambda _: False,
    most: int | None = None,
    rest: str = "; --json lists all",
) -> RenderableType:
    """A table of rows, see `ruled`.

    Args:
        columns: (head; key or function of a row; optional format) of each, see `_cell_of`.
        dim: whether a row is dim.
        most: the number of rows to show; a line with their number and `rest` replaces the others.
    """
    table = ruled([head for head, *_ in columns], drops=drops)
    for values in rows[:most]:
        row(
            table,
            *(_cell_of(values, *column[1:]) for column in columns),
            style="dim" if dim(values) else "",
        )
    if total:
        table.add_section()
        row(table, *total, style="bold")
    left = 0 if most is None else len(rows) - most
    return Group(table, Text(f"  and {left} more{rest}", style="dim")) if left > 0 else table


def _cell_of(values: Any, key: str | Cell, form: Any = None) -> RenderableType:
    """One cell: the value of a key, an attribute or a function of the row, formatted with `Units`,
    the unit of a count, or a function. Without a format, None and "" are a dash."""
    value: Any
    if callable(key):
        value = key(values)
    else:
        value = values.get(key) if isinstance(values, Mapping) else getattr(values, key)
        value = NOTHING if form is None and value in (None, "") else value
    if form is None:
        return value if isinstance(value, str | RichText) else str(value)
    if isinstance(form, str):
        return count_of(value, form).strip()
    return str(form(value)) if callable(form) else quantity(value, form)


def row(table: Table, *cells: RenderableType, style: str = "") -> None:
    """Add a row."""
    # As Text: a label such as "getitem[0]" is not markup.
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def grid(columns: int) -> Table:
    """An empty table with so many columns, without a head or lines."""
    table = Table.grid(padding=(0, 1))
    for _ in range(columns):
        table.add_column(overflow="fold")  # an id may be longer than the line
    return table


def facts(lines: Iterable[tuple[str, str | RichText]]) -> Table:
    """Names and values in two columns, indented."""
    table = grid(3)
    table.columns[1].style = "dim"
    for name, value in lines:
        row(table, " ", name, value)
    return table


def outcome(name: str) -> Text:
    """The outcome of a verdict in capitals and colour."""
    words, style = _OUTCOMES.get(name, (name.upper(), ""))
    return Text(words, style=style)


def state(name: Any, reason: str = "") -> Text:
    """The state of a job or a card in its colour, with the reason if there is one."""
    text = Text(str(name or NOTHING), style=_STATES.get(str(name), ""))
    return text.append_text(clipped(f": {reason}", 60)) if reason else text


def cell(values: Row, key: str) -> str:
    """The value of a key; a dash if there is none."""
    value = values.get(key)
    return NOTHING if value is None or value == "" else str(value)


def hanging(text: str | RichText, style: str = "") -> Table:
    """An indented note with a hanging indent."""
    table = Table.grid(padding=0)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("  ", Text(text, style) if isinstance(text, str) else text)
    return table


def clipped(text: str, most: int) -> Text:
    """One line. A terminal shows at most `most` characters, and fewer if the table is narrow; a
    pipe gets all.
    """
    most = most if sys.stdout.isatty() else len(text)
    return Text(
        text if len(text) <= most else text[: most - 1] + "…", no_wrap=True, overflow="ellipsis"
    )


def short_id(card_id: str) -> str:
    """The beginning of a card's id."""
    return card_id if len(card_id) <= 14 else card_id[:12] + "…"


def sparkline(
    times: list[float], values: list[float], window_s: tuple[float, float], width: int = 60
) -> str:
    """A row of bars over time, with dots outside the window."""
    if not values:
        return ""
    begin, end = times[0], max(times[-1], times[0] + 1e-9)
    low, high = min(values), max(values)
    line = []
    for column in range(width):
        moment = begin + (end - begin) * (column + 0.5) / width
        nearest = min(range(len(times)), key=lambda index: abs(times[index] - moment))
        inside = window_s[0] <= moment <= window_s[1]
        level = 0 if high == low else int((values[nearest] - low) / (high - low) * (len(_BARS) - 1))
        line.append(_BARS[level] if inside else "·")
    return "".join(line)
