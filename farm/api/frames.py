"""Readings and calls as a frame: the tables of an export, the same columns with the same units, in memory."""

from __future__ import annotations

from typing import Any, Literal

from farm.exchange import export, filters
from farm.store.database import Database


def readings(database: Database, *wanted: str, card: str = "") -> Any:
    """Readings as a frame, a row each, with operator, card, software and protocol; docs/data-dictionary.md has the columns.

    Args:
        wanted: which: operators ("Conv2d") and conditions ("in_channels=64", "flops>=1e9", "torch=2.11"), as for
            `farm lookup`; all without any.
        card: as for ``--card``.

    Returns:
        A pandas.DataFrame where pandas is installed, else a pyarrow.Table, which polars and DuckDB take as it is.

    Raises:
        UsageError, UnknownOperator: there is no such column or operator; names the nearest.
    """
    return _frame(database, "readings", wanted, card)


def calls(database: Database, *wanted: str, card: str = "") -> Any:
    """The calls of every captured model that has one of these readings, a row each, as a frame: see `readings`."""
    return _frame(database, "calls", wanted, card)


def _frame(database: Database, table: Literal["readings", "calls"], wanted: tuple[str, ...], card: str) -> Any:
    meant = filters.parse(wanted, [card] if card else ())
    with database.read() as session:
        found = export.as_table(session, table, meant or None)
    try:
        import pandas  # noqa: F401
    except ImportError:
        return found
    return found.to_pandas()
