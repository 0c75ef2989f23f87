"""The packaged readings: exports in ``farm/data`` (one folder for each card model), queried like a database.

The first query makes an SQLite file of them in the state folder. So the same queries work on them and on a farm's own
database. The package has this file compressed; if the exports or the schema differ, the exports are imported instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sqlmodel import Session

from farm.devices.shared_files import make_private
from farm.errors import Ambiguous, FarmError, NoDatabase, NoReadings, UnsupportedModel, UsageError
from farm.settings import settings
from farm.store.database import Database, newest_schema, open_database

Answer = TypeVar("Answer")

FOLDER = Path(__file__).parent.parent / "data"


def packaged_files(folder: Path = FOLDER) -> list[Path]:
    """Return the packaged exports. Each one is a file of readings or a folder with all tables."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == ".parquet" or next(path.glob("*.parquet"), None))


def export_at(path: Path) -> Path:
    """Return the path of an export: `path` if it exists, else the packaged export with this name."""
    return path if path.exists() else packaged_named(str(path)) or path


def _tables(exports: Sequence[Path]) -> Iterator[Path]:
    """The Parquet files of exports, in a fixed order."""
    for path in exports:
        yield from sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def packaged_named(name: str, folder: Path = FOLDER) -> Path | None:
    """Return the packaged export with this name (of its file or folder, without the suffix), or None."""
    return next((path for path in packaged_files(folder) if path.stem == name), None)


def compressed_database(files: Sequence[Path], folder: Path = FOLDER) -> Path:
    """Return the path of the compressed database of these exports in the current schema. The file may be missing."""
    about = hashlib.sha256(newest_schema().encode())
    for file in _tables(files):
        about.update(hashlib.sha256(file.read_bytes()).digest())
    return folder / f"packaged-{about.hexdigest()[:16]}.db.zst"


def database_of(files: Sequence[Path], cache: Path) -> Database:
    """Open a database with the contents of these exports. Create it in folder `cache` if it is missing. Raises
    `ImportRefused` if a file is not an export."""
    from farm.exchange.importer import import_export

    about = hashlib.sha256(newest_schema().encode())
    for file in _tables(files):
        about.update(f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode())
    made = cache / f"exports-{about.hexdigest()[:16]}.db"
    if not made.exists():
        make_private(cache)
        unfinished = cache / f".{made.name}.{os.getpid()}"
        database = Database(f"sqlite:///{unfinished}")
        try:
            if (ready := compressed_database(files)).is_file():
                import pyarrow

                with pyarrow.input_stream(ready, compression="zstd") as stream, unfinished.open("wb") as out:
                    shutil.copyfileobj(stream, out)
            else:
                database.upgrade()
                for path in files:
                    import_export(database, path)
            with database.engine.connect() as connection:  # one file, without a write-ahead log
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
            database.close()
            unfinished.replace(made)
        finally:
            database.close()
            for left in cache.glob(f"{unfinished.name}*"):
                left.unlink(missing_ok=True)
    return Database(f"sqlite:///{made}")


def packaged_database() -> Database:
    """Open the database of the packaged readings. `database_of` creates it if it is missing."""
    return database_of(packaged_files(), settings().state_dir / "packaged")


def first_answer(
    ask: Callable[[Session], Answer],
    knows: Callable[[Answer], bool] = lambda _: True,
    say: Callable[[str], None] = lambda _: None,
    database: Database | None = None,
) -> Answer:
    """Query the user's own database; if it has no matching readings, query the packaged readings and `say` so. `knows`
    is True for an answer that is based on readings. With `database`, query only this one. Raises a `FarmError` if no
    query has an answer (see `_joined_error`), or if the own database cannot be read."""
    if database is not None:
        with database.read() as session:
            return ask(session)
    files = packaged_files()
    problem: FarmError | None = None
    answers: list[Answer] = []
    try:
        with open_database().read() as session:
            answers.append(ask(session))
        if not files or knows(answers[0]):
            return answers[0]
    except (NoDatabase, UsageError) as error:  # no database yet, or no such operator or card in it
        if not files or isinstance(error, Ambiguous):
            raise
        problem = error
    try:
        with packaged_database().read() as session:
            answers.append(ask(session))
        if knows(answers[-1]):
            say("Using the packaged readings: your own database has no readings for this.")
            return answers[-1]
    except UsageError as error:
        problem = _joined_error(problem, error)
    if answers:
        return answers[0]
    assert problem is not None
    raise problem


def _joined_error(own: FarmError | None, packaged: FarmError) -> FarmError:
    """Choose the error to raise if neither the own database nor the packaged readings have an answer."""
    from farm.exchange.filters import NO_READINGS

    came_further = (UnsupportedModel,) if isinstance(own, NoReadings) else (NoReadings, UnsupportedModel)
    knows_more = isinstance(packaged, came_further)  # it has that card or operator
    if not isinstance(own, UsageError) or own.next_step == NO_READINGS or knows_more:
        return packaged
    suggests = ["Did you mean" in error.next_step for error in (own, packaged)]
    if own.message != packaged.message or suggests[0] or own.next_step == packaged.next_step:
        return own
    if suggests[1]:
        return packaged
    return UsageError(
        own.message,
        f"{own.next_step} In the packaged readings, {packaged.next_step[:1].lower()}{packaged.next_step[1:]}",
    )
