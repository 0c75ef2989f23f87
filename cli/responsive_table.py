"""A table that a narrow terminal does not cut: what is least important drops out, and numbers, ids and names stay whole.

No word is broken: what folds, folds between words. A pipe has no width, so that what reads it may count on every column;
where `COLUMNS` gives it one, it is told what a terminal of that width would be.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

_SENSIBLE = 16  # labels are folded to this width before a column drops out
_WORD = 24  # longer words end in an ellipsis in columns that may drop out, and where even the others have no room
_CLIPPED = 10  # the least of what is cut anyway


class FittedTable(Table):
    """A table with the columns that may drop out, first the one that is missed least."""

    drops: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._fits([_natural(column) for column in self.columns], options):
            yield from super().__rich_console__(console, options)
            return
        shown, dropped = list(self.columns), []
        rest = list(self.drops)
        while not self._fits(self._leasts(shown), options) and rest:
            dropped.append(rest.pop(0))
            shown = [column for column in shown if _head(column) != dropped[-1]]
        ways = (self._leasts(shown), *([_least(column, width, _WORD) for column in shown] for width in (_SENSIBLE, 0)))
        least = next((widths for widths in ways if self._fits(widths, options)), None)
        if least is None:
            yield self._listed()
            return
        yield from Table.__rich_console__(self._narrowed(shown, least, options), console, options)
        if named := ", ".join(dict.fromkeys(head for head in dropped if head)):
            yield Text(f"  no room for: {named}", style="dim")

    def _leasts(self, shown: Sequence[Column]) -> list[int]:
        """As narrow as each may become without a cut in what matters: the columns that never drop out."""
        return [_least(column, _SENSIBLE, _WORD if _head(column) in self.drops else None) for column in shown]

    def _fits(self, widths: Sequence[int], options: ConsoleOptions) -> bool:
        return self._room(widths, options) >= 0

    def _room(self, widths: Sequence[int], options: ConsoleOptions) -> int:
        """What is left of the line, with three characters between two columns."""
        # Some versions of Rich reckon with padding at both edges too, where there is none.
        edges = 2 * (self._get_padding_width(0) - 1)
        return options.max_width - sum(widths) - 3 * (len(widths) - 1) - edges

    def _narrowed(self, shown: Sequence[Column], least: Sequence[int], options: ConsoleOptions) -> Table:
        """Ordinary again, with fixed widths: the narrowest grow first, up to what they hold."""
        widths = list(least)
        wanted = [_natural(column) for column in shown]
        for _ in range(self._room(widths, options)):
            growing = [index for index, width in enumerate(widths) if width < wanted[index]]
            if not growing:
                break
            widths[min(growing, key=lambda index: widths[index])] += 1
        table = copy.copy(self)
        table.columns = [
            dataclasses.replace(
                column, header=Text(str(column.header), no_wrap=False), overflow="ellipsis", width=width, _index=index
            )
            for index, (column, width) in enumerate(zip(shown, widths, strict=True))
        ]
        return table

    def _listed(self) -> Table:
        """Too narrow for columns: each row is a block, a line for each of its cells."""
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", overflow="fold")
        table.add_column(overflow="fold")
        for index in range(self.row_count):
            for column in self.columns:
                if str(value := list(column.cells)[index]):
                    table.add_row(_head(column), value)
            table.add_row("", "")
        return table


def _head(column: Column) -> str:
    return str(column.header).replace("\n", " ")


def _lines(cell: RenderableType) -> list[str]:
    return str(cell).split("\n")


def _natural(column: Column) -> int:
    """As wide as nothing of it is folded."""
    return max(cell_len(line) for cell in (str(column.header), *column.cells) for line in _lines(cell))


def _least(column: Column, sensible: int, word: int | None) -> int:
    """As narrow as it may become: its longest word, a number with its unit, or an id.

    Args:
        sensible: what folds keeps this width.
        word: longer words may be cut to it; None: none may.
    """
    return max(_word(str(column.header)), *(_least_of(cell, column, sensible, word) for cell in column.cells), 1)


def _least_of(cell: RenderableType, column: Column, sensible: int, word: int | None) -> int:
    width = max(cell_len(line) for line in _lines(cell))
    if isinstance(cell, Text) and cell.overflow == "ellipsis":
        return min(width, _CLIPPED)
    longest = _word(str(cell))
    return width if column.no_wrap else min(width, max(sensible, longest if word is None else min(longest, word)))


def _word(text: str) -> int:
    return max((cell_len(word) for word in text.split()), default=0)
