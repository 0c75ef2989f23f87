"""Query a database from Python: readings, comparisons and exports.

Nothing here runs on a card, and nothing needs a broker.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farm.exchange import export as exports
from farm.exchange.export import Exported
from farm.exchange.first_answer import first_answer
from farm.exchange.importer import Imported, import_export
from farm.exchange.packaged import export_at
from farm.report.compare import compare as compare_sides
from farm.report.comparison import SideComparison
from farm.report.lookup import LookupRow, Sort
from farm.report.lookup import lookup as look_up
from farm.report.why import why as explain
from farm.store import query as filters
from farm.store.database import Database, database_url
from farm.store.job_ids import find_job

if TYPE_CHECKING:
    from farm.verdict.causes import Why


def open_database(where: str | Path | None = None) -> Database:
    """Open a database of the farm. A missing or empty database gets its tables; others are not
    changed.

    Args:
        where: a URL (``postgresql://...``, ``sqlite:////...``) or the path of a SQLite file.
            Default: the database of the settings, as for every command of `farm`.

    Raises:
        SettingsError: the farm does not support this kind of database.
        SchemaMismatch: another version of the farm made the database, or it has other tables.
        DatabaseUnreachable: the database does not answer.
    """
    url = database_url() if where is None else str(where)
    if isinstance(where, Path) or "://" not in url:
        url = f"sqlite:///{Path(url).expanduser().absolute()}"
    database = Database(url)
    database.create_or_check()
    return database


def readings(database: Database, *wanted: str, card: str = "") -> Any:
    """Return readings as a data frame, one row for each reading. docs/data-dictionary.md describes
    the columns.

    Args:
        wanted: operators ("Conv2d") and conditions ("in_channels=64", "flops>=1e9", "torch=2.11"),
            as in `farm lookup`. Default: all readings.
        card: as in ``--card``.

    Returns:
        A pandas.DataFrame if pandas is installed, else a pyarrow.Table, which polars and DuckDB
        accept.

    Raises:
        UsageError, UnknownOperator: there is no such column or operator; the message suggests a
        similar name.
    """
    return _frame(database, "readings", wanted, card)


def calls(database: Database, *wanted: str, card: str = "") -> Any:
    """Return the calls of all captured models that have such readings, one row for each call; see
    `readings`.
    """
    return _frame(database, "calls", wanted, card)


def _frame(
    database: Database, table: Literal["readings", "calls"], wanted: tuple[str, ...], card: str
) -> Any:
    meant = filters.parse(wanted, [card] if card else ())
    with database.read() as session:
        rows = exports.as_table(session, table, meant or None)
    try:
        import pandas  # noqa: F401
    except ImportError:
        return rows
    return rows.to_pandas()


def lookup(
    *wanted: str,
    card: str = "",
    sort: Sort = "time",
    limit: int = 20,
    database: Database | None = None,
) -> tuple[LookupRow, ...]:
    """Return readings of an operator, as `farm lookup` shows them.

    Args:
        wanted: an operator and filters: ``farm.lookup("Conv2d", "in_channels=64", card="H200")``.
        sort: time, energy or power (most expensive first), or age (newest first).
        database: default: the database of the settings, then the packaged readings.

    Raises:
        UsageError, UnknownOperator: there is no such column or operator; the message suggests a
        similar name.
    """
    meant = filters.parse(wanted, [card] if card else ())
    return first_answer(
        lambda session: look_up(session, meant, sort=sort, limit=limit),
        lambda found: found[1] > 0,
        database=database,
    )[0]


def compare(first: str, second: str, *, database: Database) -> SideComparison:
    """Compare two jobs or two sets of readings, as `farm compare`. ``to_json()`` equals its
    ``--json``.

    Args:
        first, second: the id of a job, or filters in one text: ``"card=H200 torch=2.11"``.

    Raises:
        UsageError: a side is no job and no filter, or nothing matches.
    """
    with database.read() as session:
        return compare_sides(session, first, second)


def why(job: str, *, database: Database) -> Why:
    """Explain the time of a job, as `farm report JOB --why`: the rates of its operators (`rows`),
    and its largest causes (`causes`), each with the time that it would save at most.

    Args:
        job: the id of a job, or its first characters.

    Raises:
        NoSuchJob: there is no such job.
        NoReadings: no operator of the job is measured.

    Example:
        >>> answer = farm.why("55xkbcua", database=farm.open_database())
        >>> [(cause.topic, cause.saves_us) for cause in answer.causes]
        [('dtype', 8380.0), ('fusion', 1160.0)]
    """
    with database.read() as session:
        return explain(session, find_job(session, job).id)


def export(
    target: str | Path,
    *wanted: str,
    database: Database,
    card: str = "",
    form: str | None = None,
    traces: bool = False,
) -> Exported:
    """Write readings to a file, or all tables to a folder, as `farm export`.

    Args:
        target: a file (.parquet, .csv or .jsonl), or a folder.
        wanted: filters as in `lookup`. Default: all readings.
        form: the format of the files in a folder: parquet (default), csv or jsonl.
        traces: also write the sampled time series.

    Raises:
        UsageError: the target cannot be written, or a filter is wrong.
    """
    meant = filters.parse(wanted, [card] if card else ())
    with database.read() as session:
        return exports.export(
            session, Path(target), form=form, filters=meant or None, traces=traces
        )


def import_readings(source: str | Path, *, database: Database, origin: str = "") -> list[Imported]:
    """Import the export of another farm, as `farm import`. Returns the number of rows and of new
    rows by table.

    Args:
        source: a file or folder of `export`; "h100" and "h200" are the packaged readings.
        origin: the name of the exporting farm. Default: the name of the file.

    Raises:
        UsageError: a file is not an export, or damaged; then nothing is written.
        SchemaMismatch, DatabaseUnreachable: the database has another schema, or is read-only.
    """
    database.check_stores()
    return import_export(database, export_at(Path(source)), origin=origin)
