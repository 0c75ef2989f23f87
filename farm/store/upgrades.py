"""Which programs may upgrade a database: only `farm db upgrade` upgrades one that other programs
may use.

`writable_database` decides this for every other command and function: it creates an empty database,
and refuses an older schema. The exception is the embedded database: the SQLite file of `farm run`
in the user's own state folder. It may be upgraded by `farm run`, after a note, with a checked
backup beside it, if no other process has it open."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import event

from farm.errors import DatabaseUnreachable, SchemaMismatch
from farm.settings import settings
from farm.store.database import Database, newest_schema
from farm.types.format import count_of

Say = Callable[[str], object]

#: Free space that an upgrade needs, in sizes of the database: its backup, its write-ahead log, and
#: its growth.
SPACE_FACTOR = 3


def writable_database(announce_upgrade: Say | None = None) -> Database:
    """Open the database of the settings, to store something in it.

    Args:
        announce_upgrade: allows the upgrade of an embedded database, and gets a line before it
            begins. None: an older schema is refused.

    Raises:
        SchemaMismatch: the schema is older or newer, or another program owns the tables.
        DatabaseUnreachable: the database does not answer or is read-only, or an upgrade has too
            little disk space.
    """
    database = Database(settings().database)
    if announce_upgrade is not None and _is_embedded(database):
        _upgrade_embedded(database, announce_upgrade)
    database.check_stores()
    return database


def _is_embedded(database: Database) -> bool:
    """True if the database is the default file in the state folder, belongs to this user, and no
    broker is set.
    """
    current = settings()
    if current.database_url or current.broker_url or database.missing:
        return False
    file = Path(database.url.database)
    return not file.is_symlink() and file.stat().st_uid == os.getuid()


def backup_of(file: Path, schema: str) -> Path:
    """Return the path of the backup that an upgrade from this schema makes."""
    return file.with_name(f"{file.name}.backup-{schema}")


def _upgrade_embedded(database: Database, announce: Say) -> None:
    """Upgrade an embedded database with an older schema. If that fails, its file is as before."""
    version = database.older_schema()
    database.close()
    if version is None:
        return
    file = Path(database.url.database)
    with contextlib.closing(_opened_alone(database, version)) as alone:
        version = alone.older_schema()
        if version is None:  # another process has upgraded it meanwhile
            return
        backup = backup_of(file, version)
        _check_space(alone, file)
        announce(
            f"Upgrading the database {database} from schema {version} to {newest_schema()}. "
            f"Backup: {backup}"
        )
        _back_up(alone, backup)
        alone.upgrade()
    _remove_older_backups(file, backup)


def _opened_alone(database: Database, version: str) -> Database:
    """Open an SQLite database so that no other process can open it until it is closed. Raises
    `SchemaMismatch` if another process has it open."""
    alone = Database(database.url)

    def lock_others_out(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        try:
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise SchemaMismatch(
                f"The database {database} has schema {version}, but this program needs schema "
                f"{newest_schema()}. "
                "Another process uses the database, so it cannot be upgraded now.",
                "End the other programs that use the database (a farm run, a notebook), then "
                "repeat this command.",
            ) from None

    event.listen(alone.engine, "connect", lock_others_out, insert=True)
    return alone


def _check_space(database: Database, file: Path) -> None:
    log = file.with_name(f"{file.name}-wal")
    size = file.stat().st_size + (log.stat().st_size if log.exists() else 0)
    free = shutil.disk_usage(file.parent).free
    if free < SPACE_FACTOR * size:
        needed = count_of(SPACE_FACTOR * size, "B")
        raise DatabaseUnreachable(
            f"The upgrade of the database {database} needs {needed} of disk space with its "
            "backup, and "
            f"{count_of(free, 'B')} are free in {file.parent}.",
            "Free disk space, then repeat this command. Nothing was changed.",
        )


def _back_up(database: Database, backup: Path) -> None:
    """Copy a database to a file and check the copy. Raises `DatabaseUnreachable` if the copy is not
    sound.
    """
    unfinished = backup.with_name(f".{backup.name}.{os.getpid()}")
    source = database.engine.raw_connection()
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(sqlite3.connect(unfinished)) as copy:
            driver: Any = source.driver_connection
            driver.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a write-ahead log
            (answer,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise DatabaseUnreachable(
                f"The database {database} is damaged: {answer}.",
                "Restore the file from a backup, or set FARM_STATE_DIR to another folder. Nothing "
                "was changed.",
            )
        _flush_to_disk(unfinished)
        unfinished.replace(backup)
        _flush_to_disk(backup.parent)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseUnreachable(
            f"The backup {backup} cannot be written: {error}.",
            "Make the folder writable, free disk space, then repeat this command. Nothing was "
            "changed.",
        ) from error
    finally:
        source.close()
        unfinished.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_older_backups(file: Path, newest: Path) -> None:
    pattern = re.compile(re.escape(file.name) + r"\.backup-\d{4}")
    for path in file.parent.iterdir():
        if pattern.fullmatch(path.name) and path != newest:
            path.unlink(missing_ok=True)
