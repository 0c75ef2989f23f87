"""What a study found: a table, what it says in words, charts, and the readings behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from farm.pages.plots import Chart, Line
from farm.types.protocol import Variant

Kind = Literal["text", "count", "seconds", "time_us", "energy_mj", "power_w", "clock_mhz", "change", "share"]


@dataclass(frozen=True)
class Column:
    """How one key of the rows is headed and written. `change` is a signed fraction, `share` an unsigned one."""

    key: str
    head: str
    kind: Kind = "text"


@dataclass(frozen=True)
class Findings:
    """The answer of one study. Keys of rows carry their unit; changes, gaps and shares are fractions.

    `variant` is what was read, where that is not what was asked for.
    """

    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    variant: Variant | None = None

    @property
    def drawable(self) -> tuple[Chart, ...]:
        """The charts with something in them: a study that could not compare what one shows has it empty."""
        return tuple(chart for chart in self.charts if not chart.empty)

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": [dataclasses.asdict(column) for column in self.columns],
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """With `charts`, which are kept, but are no part of what is printed."""
        return cls(
            tuple(Column(**column) for column in data["columns"]),
            tuple(data["rows"]),
            tuple(data["notes"]),
            tuple(
                Chart(**{**chart, "lines": tuple(Line(**line) for line in chart["lines"])}) for chart in data["charts"]
            ),
        )


def change(value: float | None, reference: float | None) -> float | None:
    """``value / reference - 1``; None where either is missing."""
    return value / reference - 1 if value is not None and reference else None


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
