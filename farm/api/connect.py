"""A database by its URL, its file or the settings, ready to be read and written."""

from __future__ import annotations

from pathlib import Path

from farm.settings import settings
from farm.store.database import Database


def open_database(where: str | Path | None = None) -> Database:
    """Open a database of the farm.

    A SQLite file that is not there yet, or is empty, is given its tables; a database that is there stays as it is.

    Args:
        where: a URL (``postgresql://...``, ``sqlite:////...``) or the path of a SQLite file; without it what the settings
            name, as for every command of `farm`.

    Raises:
        SettingsError: it is no such URL.
        SchemaMismatch: it is of another version of the farm, or has tables of somebody else's.
        DatabaseUnreachable: it does not answer.
    """
    if where is None:
        url = settings().database
    elif isinstance(where, Path) or "://" not in where:
        url = f"sqlite:///{Path(where).expanduser().absolute()}"
    else:
        url = where
    database = Database(url)
    if database.missing or (database.engine.dialect.name == "sqlite" and database.schema_version() is None):
        database.upgrade()
    database.check_schema()
    return database
