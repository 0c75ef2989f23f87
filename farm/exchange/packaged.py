"""The packaged readings: exports in ``farm/data`` (one folder for each card model), queried like a database.

The first query imports them into a SQLite file in the state folder, so the same queries work on them and on a farm's
database.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sqlmodel import Session

from farm.errors import Ambiguous, FarmError, NoDatabase, UsageError
from farm.settings import make_private, settings
from farm.store.database import Database, newest_schema, open_database

Answer = TypeVar("Answer")

FOLDER = Path(__file__).parent.parent / "data"


def packaged_files(folder: Path = FOLDER) -> list[Path]:
    """The packaged exports: files of readings, or folders with all tables."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == ".parquet" or next(path.glob("*.parquet"), None))


def packaged_named(name: str, folder: Path = FOLDER) -> Path | None:
    """The packaged export with this name (its file or folder without the suffix)."""
    return next((path for path in packaged_files(folder) if path.stem == name), None)


def database_of(files: Sequence[Path], cache: Path) -> Database:
    """A database with the contents of these exports, created in `cache` if it is missing.

    Raises:
        ImportRefused: one of them is not an export.
    """
    from farm.exchange.importer import import_export

    about = hashlib.sha256(newest_schema().encode())
    for path in files:
        for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
            about.update(f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode())
    made = cache / f"exports-{about.hexdigest()[:16]}.db"
    if not made.exists():
        make_private(cache)
        unfinished = cache / f".{made.name}.{os.getpid()}"
        database = Database(f"sqlite:///{unfinished}")
        try:
            database.upgrade()
            for path in files:
                import_export(database, path)
            with database.engine.connect() as connection:  # one file, without a log beside it
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
            database.close()
            unfinished.replace(made)
        finally:
            database.close()
            for left in cache.glob(f"{unfinished.name}*"):
                left.unlink(missing_ok=True)
    return Database(f"sqlite:///{made}")


def first_answer(
    ask: Callable[[Session], Answer], knows: Callable[[Answer], bool], say: Callable[[str], None]
) -> Answer:
    """The answer of the user's own database; if it has no readings for it, that of the packaged readings.

    Args:
        ask: computes the answer.
        knows: True if an answer is based on readings.
        say: receives a line if the package answers.

    Raises:
        FarmError: neither has an answer (see `_joined_error`), or the own database cannot be read.
    """
    files = packaged_files()
    problem: FarmError | None = None
    answers: list[Answer] = []
    try:
        with open_database().read() as session:
            answers.append(ask(session))
        if not files or knows(answers[0]):
            return answers[0]
    except Ambiguous:
        raise
    except (NoDatabase, UsageError) as error:  # there is no database yet, or it has no such operator or card
        if not files:
            raise
        problem = error
    try:
        with database_of(files, settings().state_dir / "packaged").read() as session:
            answers.append(ask(session))
        if knows(answers[-1]):
            say("From the readings that come with the package.")
            return answers[-1]
    except UsageError as error:
        problem = _joined_error(problem, error)
    if answers:
        return answers[0]
    assert problem is not None
    raise problem


def _joined_error(own: FarmError | None, packaged: FarmError) -> FarmError:
    """The error if neither the own database nor the package has an answer."""
    if not isinstance(own, UsageError) or own.next_step == "It has no readings at all.":
        return packaged
    suggests = ["Did you mean" in error.next_step for error in (own, packaged)]
    if own.message != packaged.message or suggests[0] or own.next_step == packaged.next_step:
        return own
    if suggests[1]:
        return packaged
    return UsageError(
        own.message, f"{own.next_step} In the package {packaged.next_step[:1].lower()}{packaged.next_step[1:]}"
    )
