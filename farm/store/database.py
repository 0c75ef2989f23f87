"""Opening the database named by one URL: SQLite (WAL, foreign keys, busy timeout) or PostgreSQL.

A process has one `Database`; its sessions are short. Writes on SQLite begin as writers (``BEGIN IMMEDIATE``):
a transaction that reads first and upgrades later would fail at once under contention instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, select, text
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import Float
from sqlmodel import Session

from farm.errors import DatabaseUnreachable, NoDatabase, SchemaMismatch, SettingsError
from farm.types.format import masked

if TYPE_CHECKING:  # to ask at what schema a database is needs none of it, and every process of the farm asks
    from alembic.config import Config

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"
SQLITE_BUSY_TIMEOUT_MS = 30_000
# A host that is cut off must notice within a lease: without these, a statement hangs in the kernel for 15 minutes.
POSTGRESQL_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
}
#: PostgreSQL's code for a server that only reads: a standby, or one that its operator or a full disk closed for writes.
READ_ONLY = "25006"
UPGRADE_LOCK = 0x6661726D  # "farm", a key of PostgreSQL's advisory locks


class database_now(FunctionElement[float]):
    """Unix seconds on the database's clock, at the moment of the statement (not of the transaction)."""

    type = Float(53)
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **kw: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


def read_clock_s(session: Session) -> float:
    """The database's clock now. Unit: s since 1970."""
    return float(session.scalars(select(database_now())).one())


class Database:
    """Sessions on one engine."""

    def __init__(self, url: str) -> None:
        self.url = make_url_or_explain(url)
        self.engine = _engine(self.url)

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading; objects stay usable after it closes."""
        with self._explained(), Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed at the end, rolled back on any exception."""
        with self._explained(), Session(self.engine, expire_on_commit=False) as session:
            if self.engine.dialect.name == "sqlite":
                session.connection(execution_options={"sqlite_begin": "IMMEDIATE"})
            yield session
            session.commit()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OperationalError as error:
            if self.engine.dialect.name == "sqlite":
                raise DatabaseUnreachable(
                    f"The database {self} does not answer: {first_line(error)}.", _sqlite_step(first_line(error))
                ) from error
            raise DatabaseUnreachable(
                f"The database {self} does not answer: {first_line(error)}",
                "Check FARM_DATABASE_URL and that the server runs, then try again; nothing was lost.",
            ) from error
        except DatabaseError as error:
            if getattr(error.orig, "sqlstate", None) == READ_ONLY:
                raise DatabaseUnreachable(
                    f"The database {self} takes no writes: {first_line(error)}.",
                    "Make it writable again, or name the server that is in FARM_DATABASE_URL; nothing was lost.",
                ) from error
            if "not a database" in str(error.orig) or "malformed" in str(error.orig):  # SQLite's NOTADB and CORRUPT
                raise DatabaseUnreachable(
                    f"{self} cannot be read: {first_line(error)}.",
                    "Name another file in FARM_DATABASE_URL, or restore this one from a backup.",
                ) from error
            raise

    @property
    def missing(self) -> bool:
        """Whether it is a file that is not there; SQLite would make an empty one for whoever only wanted to look."""
        return _is_missing(self.url)

    def schema_version(self) -> str | None:
        """The migration the database is at, None where it is empty."""
        with self._explained(), self.engine.connect() as connection:
            if not inspect(connection).has_table(VERSION_TABLE):
                return None
            version: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
            return version

    def _is_foreign(self) -> bool:
        """Whether it has tables, none of which says at what schema the farm's are: they are somebody else's."""
        with self._explained(), self.engine.connect() as connection:
            return bool(set(inspect(connection).get_table_names()) - {VERSION_TABLE})

    def check_schema(self) -> None:
        """Raises:
        SchemaMismatch: the database is older or newer than this program; NoDatabase: not there; and what to do.
        """
        if self.missing:
            raise NoDatabase(
                f"There is no database {self} yet.",
                "`farm run` and `farm import` make it, `farm db upgrade` an empty one.",
            )
        version, head = self.schema_version(), newest_schema()
        if version == head:
            return
        if version is None:
            if self._is_foreign():
                raise self._of_somebody_else()
            raise NoDatabase(f"The database {self} is empty.", "Create its tables with `farm db upgrade`.")
        if version in known_schemas():
            raise SchemaMismatch(
                f"The database {self} has schema {version}, this program needs {head}.",
                "Stop the workers, then run `farm db upgrade`.",
            )
        raise SchemaMismatch(
            f"The database {self} has schema {version}, which is newer than this program ({head}).",
            "Update this host's program to the version that the other hosts run.",
        )

    def upgrade(self) -> None:
        """Bring the schema up to date (creates it where there is none)."""
        if self.engine.dialect.name == "sqlite" and self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        version = self.schema_version()
        if version == newest_schema():
            return
        if version is not None and version not in known_schemas():
            self.check_schema()
        if version is None and self._is_foreign():
            raise self._of_somebody_else()
        from alembic import command

        config = alembic_config()
        with self._explained(), self._alone() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def _of_somebody_else(self) -> SchemaMismatch:
        return SchemaMismatch(
            f"The database {self} has tables that are not the farm's.",
            "Name a database of its own in FARM_DATABASE_URL; this one is left as it is.",
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Connection]:
        """One transaction that no second upgrade can overlap: hosts that start together migrate one after the other."""
        connection = self.engine.connect().execution_options(sqlite_begin="IMMEDIATE")
        sqlite = self.engine.dialect.name == "sqlite"
        driver: Any = connection.connection.dbapi_connection
        try:
            if sqlite:
                # Changing a table on SQLite means copying and dropping it, and a drop would cascade to its children.
                driver.execute("PRAGMA foreign_keys=OFF")
            with connection.begin():
                if not sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})
                yield connection
                if sqlite and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()):
                    raise SchemaMismatch(
                        f"Upgrading {self} would break a reference of the table {broken[0]}.",
                        "Nothing was changed. Restore a backup or report the fault.",
                    )
        finally:
            if sqlite:
                driver.execute("PRAGMA foreign_keys=ON")
            connection.close()

    def close(self) -> None:
        self.engine.dispose()

    def __str__(self) -> str:
        return masked(self.url.render_as_string(hide_password=False))


def is_there(url: str) -> bool:
    """Whether there is something at a URL to be opened: anything but a file of SQLite that nobody has made yet.

    Raises:
        SettingsError: see `make_url_or_explain`.
    """
    return not _is_missing(make_url_or_explain(url))


def _is_missing(url: Any) -> bool:
    return url.get_backend_name() == "sqlite" and bool(url.database) and not Path(url.database).exists()


def make_url_or_explain(url: str) -> Any:
    """Raises:
    SettingsError: it cannot be read, or is of no database that the farm can use; never with the URL's own words.
    """
    try:
        parsed = make_url(url)
        if "@" in (parsed.host or ""):  # a piece of the password, which would be told as a host that is not found
            raise ValueError("@ in the host's name")
    except (ArgumentError, ValueError):
        raise SettingsError(
            "The database URL cannot be read.",
            "Write it as sqlite:////path/farm.db or postgresql://user@host/farm, in a password @ as %40 and : as %3A.",
        ) from None  # its words may be a piece of the password, and `--debug` shows them
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise SettingsError(
            f"The database '{parsed.get_backend_name()}' is not supported.", "Use SQLite or PostgreSQL."
        )
    if parsed.get_backend_name() == "sqlite" and _in_memory(parsed):
        raise SettingsError(
            "A SQLite database in memory is seen by one process alone, and a farm has several.",
            "Name a file: sqlite:////path/farm.db.",
        )
    return parsed


def _in_memory(url: Any) -> bool:
    return url.database in (None, "", ":memory:") or url.query.get("mode") == "memory" or "mode=memory" in url.database


def _engine(url: Any) -> Engine:
    try:
        if url.get_backend_name() == "postgresql":
            return create_engine(
                url,
                pool_size=4,
                pool_pre_ping=True,
                connect_args=POSTGRESQL_OPTIONS,
                json_deserializer=_from_json,
            )
        if url.get_backend_name() == "sqlite":
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(
            url, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_MS / 1000}, json_deserializer=_from_json
        )
    except (NoSuchModuleError, ImportError) as error:
        raise SettingsError(
            f"The driver for {url.drivername} is missing.", "Install it with `pip install 'operator-farm[postgresql]'`."
        ) from error
    except OSError as error:
        raise DatabaseUnreachable(
            f"The folder of {url.database} cannot be made: {error}.", "Set FARM_STATE_DIR or FARM_DATABASE_URL."
        ) from error

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT_MS}")
        _write_ahead(cursor)
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        mode = connection.get_execution_options().get("sqlite_begin", "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")

    return engine


_DECODER = json.JSONDecoder()


def _from_json(text: str | bytes) -> Any:
    """A JSON column's value; None for what is none, or is nested too deep. One such row must not hide all others.

    A job has tens of thousands, most of them shorter than what `json.loads` does besides, and half of them empty.
    """
    if text == "[]":
        return []
    try:
        text = (text if isinstance(text, str) else text.decode()).strip()
        value, end = _DECODER.raw_decode(text)
        return value if end == len(text) else None
    except (ValueError, RecursionError):
        return None


def _write_ahead(cursor: Any) -> None:
    """Switch a file to write-ahead logging, once for good.

    The switch wants the file for itself and fails at once where others have it: SQLite does not wait for them here,
    whatever the busy timeout. They are opening the same new file, so they are soon done.
    """
    deadline_s = time.monotonic() + SQLITE_BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def _sqlite_step(problem: str) -> str:
    """What helps against a problem of the file: there is no server to look at."""
    if "locked" in problem:
        return "Another process writes to it: try again when that is done; nothing was lost."
    elsewhere = "or choose another folder with FARM_STATE_DIR (another file with FARM_DATABASE_URL)."
    if "full" in problem:
        return f"Make room on its disk, {elsewhere}"
    if "readonly" in problem or "open" in problem:
        return f"Let this user write to the file and to its folder, {elsewhere}"
    return f"Look whether its disk is full, read-only or failing, {elsewhere}"


def alembic_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


@functools.cache
def known_schemas() -> frozenset[str]:
    """The names of all migrations: what their files begin with."""
    return frozenset(file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


def newest_schema() -> str:
    return max(known_schemas())


def first_line(error: SQLAlchemyError) -> str:
    text = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
