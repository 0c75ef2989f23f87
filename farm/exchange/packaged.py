"""The packaged readings: exports in ``farm/data`` (one folder for each card model), queried like a database.

The first query imports them into a SQLite file in the state folder, so the same queries work on them and on a farm's
database.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from farm.store.database import Database, newest_schema

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
        cache.mkdir(parents=True, exist_ok=True)
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
