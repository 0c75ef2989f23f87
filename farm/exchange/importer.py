"""Imports an export of another farm. Every row is checked before anything is written; duplicates
are skipped.

`import_file` reads and checks the values of a file, `import_rows` each row. Checked batches go to a
temporary file until all files are checked. Then `import_writers` writes them, and `import_jobs` the
jobs of the verdicts."""

from __future__ import annotations

import contextlib
import gc
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlmodel import Session

from farm.errors import UsageError
from farm.errors.safe_text import printable
from farm.exchange import import_rows, import_writers
from farm.exchange.column_types import check_of
from farm.exchange.import_file import (
    ExportFile,
    ImportRefused,
    Row,
    checked_rows,
    opened,
    problem_of,
)
from farm.store import content, tables
from farm.store.data_columns import Column
from farm.store.database import Database, read_clock_s

AT_ONCE = 1000  # rows in one transaction: small, because other writers wait for its end
MOST_IN_MEMORY = 64 << 20  # bytes of compressed checked rows in memory; more go to the disk


@dataclass(frozen=True)
class Imported:
    """The number of rows of one file, and how many of them were new to the database. ``left_out``:
    why the file was not imported."""

    path: Path
    table: str
    rows: int
    new: int
    left_out: str = ""


def import_export(database: Database, path: Path, *, origin: str = "") -> list[Imported]:
    """Import a file of readings, or a folder with the tables of an export. `origin`: the name of
    the exporting farm; by default the name of the file or folder. Raises `UsageError` if it is not
    a valid name, and `ImportRefused` if a file is not an export, of a newer format, damaged, or has
    a value that no farm writes. Then nothing was written."""
    origin = origin or (path.resolve().name if path.is_dir() else path.stem)  # "." has no name
    try:
        check_of(_FARM_NAME)(origin)
    except ValueError as error:
        raise UsageError(
            f"{printable(origin)[:40]!r} is not a valid farm name: {problem_of(error)}.",
            "Give a name for the exporting farm with --origin.",
        ) from error
    files = [opened(file) for file in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])]
    if not files:
        raise ImportRefused(
            f"The folder {path} has no Parquet file.",
            "Give a file or folder that `farm export` wrote.",
        )
    files.sort(key=lambda file: list(_IMPORTS).index(file.table))
    metadata = files[0].about
    left_out: list[Imported] = []
    if not any(file.table == "captures" for file in files):
        why = "calls need the table of their captures, captures.parquet of the same export"
        calls = [file for file in files if file.table == "calls"]
        left_out = [
            Imported(file.path, file.table, file.parquet.metadata.num_rows, 0, why)
            for file in calls
        ]
        files = [file for file in files if file.table != "calls"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rare_garbage_collection())
        checked = []
        for file in files:
            batches = checked_rows(file, _IMPORTS[file.table].check, origin)
            checked.append((file, stack.enter_context(_spooled(batches))))
        _store_origin(database, origin, path, metadata)
        return [*(_write(database, file, batches) for file, batches in checked), *left_out]


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage a hundred times less often: a batch is a million objects that are no garbage,
    and looking at them again and again takes a quarter of an import's time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 70_000), *(max(count, 20) for count in before[1:]))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _spooled(batches: Iterable[list[Any]]) -> Iterator[Iterator[list[Any]]]:
    """Write checked batches to an unnamed temporary file. Then yield one iterator over all
    batches.
    """
    with tempfile.SpooledTemporaryFile(MOST_IN_MEMORY) as spool:
        try:
            for records in batches:
                pickle.dump(zlib.compress(pickle.dumps(records), 1), spool)
        except OSError as error:
            raise UsageError(
                f"Temporary data cannot be written to {tempfile.gettempdir()}: {error.strerror}.",
                "Free disk space there, or set the environment variable TMPDIR to another folder.",
            ) from error
        except RecursionError:
            raise ImportRefused(
                "A JSON value in the export is nested too deeply.", "Export the readings again."
            ) from None
        end = spool.tell()
        spool.seek(0)
        yield (
            pickle.loads(zlib.decompress(pickle.load(spool)))
            for _ in iter(lambda: spool.tell() < end, False)
        )


def _store_origin(database: Database, origin: str, path: Path, about: Mapping[str, Any]) -> None:
    exported_at_s: Any = about.get("exported_at_s")
    with database.write() as session:
        row = tables.Origin(
            name=origin,
            file=content.storable_text(printable(path.name)),
            farm_version=printable(str(about.get("farm_version", "")))[:300],
            exported_at_s=float(exported_at_s) if type(exported_at_s) in (int, float) else 0.0,
            imported_at_s=read_clock_s(session),
        )
        session.merge(row)


def _write(database: Database, file: ExportFile, batches: Iterable[list[Any]]) -> Imported:
    write = _IMPORTS[file.table].write
    rows = new = 0
    for records in batches:
        rows += len(records)
        for begin in range(0, len(records), AT_ONCE):
            with database.write() as session:
                new += write(session, records[begin : begin + AT_ONCE])
    return Imported(file.path, file.table, rows, new)


@dataclass(frozen=True)
class _TableImport:
    """How the rows of one table are imported."""

    check: Callable[[Row, str], Any]  # of `import_rows`
    write: Callable[[Session, Sequence[Any]], int]  # of `import_writers`


#: The tables are written in this order: a table comes before those that refer to it.
_IMPORTS: Mapping[str, _TableImport] = {
    "readings": _TableImport(import_rows.reading, import_writers.write_readings),
    "captures": _TableImport(import_rows.capture, import_writers.write_captures),
    "calls": _TableImport(import_rows.call, import_writers.write_calls),
    "verdicts": _TableImport(import_rows.verdict, import_writers.write_verdicts),
    "traces": _TableImport(import_rows.series, import_writers.write_traces),
}
_FARM_NAME = Column("origin", "text", "the farm that it was imported from", "", "Name")
