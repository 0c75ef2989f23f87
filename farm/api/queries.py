"""Query a database from Python: readings and calls as data frames, and the memory of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from farm.errors import UsageError
from farm.exchange import export, filters
from farm.exchange.packaged import packaged_database
from farm.memory_report import step_memory as memories
from farm.memory_report.step_memory import StepMemory
from farm.requests.memory import amounts_of, bytes_of
from farm.settings import settings
from farm.store.database import Database
from farm.training.version import versioned
from farm.types.protocol import Variant


def open_database(where: str | Path | None = None) -> Database:
    """Open a database of the farm. A missing or empty SQLite file gets its tables; other databases are not changed.

    Args:
        where: a URL (``postgresql://...``, ``sqlite:////...``) or the path of a SQLite file. Default: the
            database of the settings, as for every command of `farm`.

    Raises:
        SettingsError: the farm does not support this kind of database.
        SchemaMismatch: another version of the farm made the database, or it has other tables.
        DatabaseUnreachable: the database does not answer.
    """
    url = settings().database if where is None else str(where)
    if isinstance(where, Path) or "://" not in url:
        url = f"sqlite:///{Path(url).expanduser().absolute()}"
    database = Database(url)
    if database.missing or (database.engine.dialect.name == "sqlite" and database.schema_version() is None):
        database.upgrade()
    database.check_schema()
    return database


def readings(database: Database, *wanted: str, card: str = "") -> Any:
    """Return readings as a data frame, one row for each reading. docs/data-dictionary.md describes the columns.

    Args:
        wanted: operators ("Conv2d") and conditions ("in_channels=64", "flops>=1e9", "torch=2.11"), as in
            `farm lookup`. Default: all readings.
        card: as in ``--card``.

    Returns:
        A pandas.DataFrame if pandas is installed, else a pyarrow.Table, which polars and DuckDB accept.

    Raises:
        UsageError, UnknownOperator: there is no such column or operator; the message suggests a similar name.
    """
    return _frame(database, "readings", wanted, card)


def calls(database: Database, *wanted: str, card: str = "") -> Any:
    """Return the calls of all captured models that have such readings, one row for each call; see `readings`."""
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


def step_memory(
    variant: Variant, *, database: Database | None = None, card: str = "H200", fast: str = "", slow_bandwidth: str = ""
) -> StepMemory:
    """Compute the memory that a training step needs. With ``fast``, plan its slow tensors. Runs nothing on a card.

    Args:
        variant: a training step: ``farm.variant("resnet50", batch=32, step="training")``.
        database: source of times and of the cost of slow memory. Default: the readings that come with the package.
        card: part of the model name of a card, or ``cpu``.
        fast: amounts of fast memory to plan for: ``8GB``, or shares of the peak, ``75%,50%``.
        slow_bandwidth: bandwidth of slow memory, ``55GB/s``, for operators without readings in slow memory.
            Default: derived from the readings.

    Returns:
        The memory over the step. With ``fast``, ``offload_plans.plans`` name the tensors in slow memory, and
        ``offload_plans.curve`` has the step's time by fast memory. ``to_json()`` equals ``farm memory --json``.

    Raises:
        UsageError: the variant is a forward pass, the card is unknown, an amount is malformed or too small for the
            largest operator, or a plan has no readings to use.
        CaptureError: the step cannot be captured.
    """
    if variant.step != "training":
        raise UsageError(
            f"{variant} is a forward pass, not a training step.",
            'Give step="training": farm.variant("resnet50", 32, step="training").',
        )
    amounts = amounts_of("fast", fast) if fast else []
    bytes_per_s = bytes_of("slow_bandwidth", slow_bandwidth, per_second=True) if slow_bandwidth else None
    found = memories.memory(versioned(variant), card)
    known = database or packaged_database()
    with known.read() as session:
        found = memories.with_readings(session, found)
        read = memories.read_in_slow_memory(session, found) if amounts else None
    return memories.with_offload_plans(found, read, amounts, bytes_per_s) if amounts else found
