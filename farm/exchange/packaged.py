"""Readings that come with the package: exports under ``farm/data``, answered from as from a database of one's own.

They are taken into a SQLite file in the state folder the first time they are asked, so that the same questions work on both.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from farm.store.database import Database, newest_schema

FOLDER = Path(__file__).parent.parent / "data"


def packaged_files(folder: Path = FOLDER) -> list[Path]:
    """The exports that are installed: files of readings, or folders with all tables."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == ".parquet" or next(path.glob("*.parquet"), None))


def packaged_named(name: str, folder: Path = FOLDER) -> Path | None:
    """The export that is installed under this name (its file or folder without the suffix)."""
    return next((path for path in packaged_files(folder) if path.stem == name), None)


def database_of(files: Sequence[Path], cache: Path) -> Database:
    """A database with what some exports hold, made in `cache` where it is not there yet.

    Raises:
        Refused: one of them is no export.
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
