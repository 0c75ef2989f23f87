"""The connection to the database: SQLite (WAL, foreign keys, busy timeout) or PostgreSQL, chosen by
a URL.

A process has one `Database`; its sessions are short. Write transactions on SQLite start with
``BEGIN IMMEDIATE``. If a transaction reads first and writes later while another process writes, it
fails at once instead of waiting."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    create_engine,
    event,
    exc,
    inspect,
    make_url,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import Float
from sqlmodel import Session, SQLModel, and_, case, col, func, or_, select

from farm.errors import DatabaseUnreachable, NoDatabase, SchemaMismatch, SettingsError
from farm.errors.safe_text import keep_secret, shown_url
from farm.settings import settings
from farm.settings.shared_files import UntrustedPath, check_file, make_private
from farm.store import postgresql
from farm.store.tables import CardRow, Item, Job, JobState, ReadingRow

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"
SQLITE_BUSY_TIMEOUT_MS = 30_000
#: PostgreSQL ends a transaction of a connection that writes if its client is silent for half a
#: minute, unless the server has a limit of its own. The client may be gone, and other processes
#: wait for its locks.
_END_SILENT_TRANSACTIONS = text(
    "SELECT set_config('idle_in_transaction_session_timeout', '30s', false)"
    " WHERE current_setting('idle_in_transaction_session_timeout') = '0'"
)
#: The options of a connection to SQLite that a URL can have.
SQLITE_OPTIONS = {
    "cached_statements",
    "check_same_thread",
    "detect_types",
    "isolation_level",
    "timeout",
}
#: PostgreSQL's error code of a read-only server: a standby, or one that was made read-only.
READ_ONLY = "25006"
#: PostgreSQL's error code if the user has no right to read or write a table.
NO_RIGHT = "42501"
#: PostgreSQL's error codes if it ends a connection because the transaction was idle or ran for too
#: long.
TIMED_OUT = ("25P03", "25P04")
UPGRADE_LOCK = 0x6661726D  # "farm": the key of PostgreSQL's advisory lock during an upgrade


class database_now(FunctionElement[float]):
    """SQL function: the database's clock at the start of the statement (not the transaction). Unit:
    s since 1970.
    """

    type = Float(53)
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **kw: Any) -> str:
    # `clock_timestamp` would prevent indexes
    return "extract(epoch from statement_timestamp())::double precision"


def read_clock_s(session: Session) -> float:
    """Return the current time of the database's clock. Unit: s since 1970."""
    return float(session.scalars(sqlalchemy.select(database_now())).one())


def long_ago(time_s: Any, limit_s: float) -> ColumnElement[bool]:
    """SQL condition: a stored time is more than ``limit_s`` ago. So is a time that is as far in the
    future: the clock was set back since it was stored. For actions that do no harm if they are too
    early."""
    return or_(time_s < database_now() - limit_s, time_s > database_now() + limit_s)


def remembered(session: Session, about: str) -> dict[Any, Any]:
    """What this process remembers about the contents of a session's database, by subject. It saves
    queries only: the process that remembers nothing does the same."""
    memory: dict[str, dict[Any, Any]] = session.info.get("remembered", {})
    return memory.setdefault(about, {})


class Database:
    """One engine and its sessions. All methods raise `DatabaseUnreachable` if the database does not
    answer, is read-only or refuses its user, or its file is damaged."""

    def __init__(self, url: str | URL, *, read_only: bool = False) -> None:
        """``read_only``: of a SQLite file that no program changes: open it without locks and
        without a log.
        """
        self.url = make_url_or_explain(url)
        keep_secret(url if isinstance(url, str) else self.url.render_as_string(hide_password=False))
        self.engine = _read_only_engine(self.url) if read_only else _engine(self.url)
        self._restoring = f"Delete the file {self.url.database}: the next command makes it again."
        if not read_only:
            self._restoring = (
                "Restore the file from a backup, or set FARM_DATABASE_URL to another file."
            )
        self._is_sqlite = self.url.get_backend_name() == "sqlite"
        self._remembered: dict[str, dict[Any, Any]] = {}

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading. Objects stay usable after it closes."""
        with self._explained(), self._session(self.engine) as session:
            yield session

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """Open a transaction: commit at the end, roll back on any exception. A commit keeps the
        connection.
        """
        with self._explained(), self.engine.connect() as connection:
            connection.execution_options(sqlite_begin="IMMEDIATE")
            self._limit_silence(connection)
            with self._session(connection) as session:
                session.connection()
                yield session
                session.commit()

    def _session(self, bind: Engine | Connection) -> Session:
        return Session(bind, expire_on_commit=False, info={"remembered": self._remembered})

    def _limit_silence(self, connection: Connection) -> None:
        """Set the limit at the first write of a connection. A command that only reads may wait for
        its reader.
        """
        if self._is_sqlite or connection.info.get("silence is limited"):
            return
        with connection.begin():
            connection.execute(_END_SILENT_TRANSACTIONS)
        connection.info["silence is limited"] = True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except exc.DatabaseError as error:
            state = getattr(error.orig, "sqlstate", None)
            # An error while connecting, not of a statement:
            if (
                isinstance(error, exc.ProgrammingError)
                and error.statement is None
                and state is None
            ):
                raise _unknown_option("PostgreSQL") from None
            line, said = first_line(error), str(error.orig)
            if isinstance(error, exc.OperationalError) or state in TIMED_OUT:
                problem = f"does not answer: {line}"
                step = (
                    "Check FARM_DATABASE_URL and whether the server runs, then try again. No data "
                    "was lost."
                )
                if self._is_sqlite:
                    problem, step = f"{problem}.", _sqlite_step(line)
            elif state == READ_ONLY:
                problem = f"is read-only: {line}."
                step = (
                    "Make the database writable, or set FARM_DATABASE_URL to a writable server. "
                    "No data was lost."
                )
            elif state == NO_RIGHT:
                problem = f"refuses its user: {line}."
                step = (
                    "Give the user the rights to read and write all tables, or correct "
                    "FARM_DATABASE_URL."
                )
            elif "not a database" in said or "malformed" in said:  # SQLite's NOTADB and CORRUPT
                problem = f"cannot be read: {line}."
                step = self._restoring
            else:
                raise
            raise DatabaseUnreachable(f"The database {self} {problem}", step) from error

    @property
    def missing(self) -> bool:
        """True if the database is an SQLite file that does not exist. A connection would create an
        empty file.
        """
        return not is_there(self.url)

    def schema_version(self) -> str | None:
        """Return the schema version of the database; None if it has no farm tables."""
        with self._explained(), self.engine.connect() as connection:
            if not inspect(connection).has_table(VERSION_TABLE):
                return None
            version: str | None = connection.scalar(
                text(f"SELECT version_num FROM {VERSION_TABLE}")
            )
            return version

    def _readable_schema(self) -> str | None:
        """Return the schema version; None if the database is empty. Raises `SchemaMismatch` if the
        schema is newer than this program or too old, or if another program owns the tables."""
        with self._explained(), self.engine.connect() as connection:
            # first: another process may create the tables, and their version, at any time
            if _is_empty(connection):
                return None
        version, schemas = self.schema_version(), known_schemas()
        if version in schemas:
            return version
        if version is None:
            raise SchemaMismatch(
                f"The database {self} has tables of another program.",
                "Set FARM_DATABASE_URL to a database for the farm alone. Nothing was changed.",
            )
        if version < min(schemas):
            raise SchemaMismatch(
                f"The database {self} has the old schema {version}; this program reads "
                f"{min(schemas)} and newer.",
                "Run `farm export` with the program that wrote the database, then `farm import` "
                "with this program.",
            )
        raise SchemaMismatch(
            f"The database {self} has schema {version}; this program knows schemas up to "
            f"{newest_schema()}.",
            "Update farm on this host to the version of the other hosts.",
        )

    def check_schema(self) -> None:
        """Check that the database has the schema of this program. Raises `NoDatabase` if it does
        not exist or is empty; `SchemaMismatch` if the schema is older or newer, or the tables
        belong to another program."""
        if self.missing:
            raise NoDatabase(
                f"The database {self} does not exist yet.",
                "`farm run resnet18` and `farm import h200` (packaged readings) create the "
                "database; `farm db upgrade` creates an empty one.",
            )
        version = self._readable_schema()
        if version is None:
            raise NoDatabase(
                f"The database {self} has no tables yet.",
                "Create the tables with `farm db upgrade`.",
            )
        if version != newest_schema():
            raise SchemaMismatch(
                f"The database {self} has schema {version}, but this program needs schema "
                f"{newest_schema()}.",
                "Stop the workers, then run `farm db upgrade`.",
            )

    def check_writes(self) -> None:
        """Check that the database accepts writes; change nothing. Raises `DatabaseUnreachable` if
        it does not, for example because it is a standby or the user has no right to write."""
        with self.write() as session:
            for table in (Item, CardRow, ReadingRow):
                session.execute(
                    sqlalchemy.update(table).where(sqlalchemy.false()).values(id=table.id)
                )
                none = sqlalchemy.select(table).where(sqlalchemy.false())
                names = [column.name for column in table.__table__.columns]  # type: ignore[union-attr]
                session.execute(sqlalchemy.insert(table).from_select(names, none))

    def older_schema(self) -> str | None:
        """Return the schema version if `upgrade` would migrate the database, else None. Raises as
        `upgrade`.
        """
        version = None if self.missing else self._readable_schema()
        return None if version == newest_schema() else version

    def create_or_check(self) -> None:
        """Create the tables if the database is missing or empty; otherwise check its schema.

        Every command and function that stores something begins with this or `check_stores`. It
        migrates nothing: other programs may use the database. Raises `SchemaMismatch` if the schema
        is older or newer, or another program owns the tables."""
        if self.missing or self._readable_schema() is None:
            self._create()
        self.check_schema()

    def check_stores(self) -> None:
        """Check, before something is measured, that it can be stored: `create_or_check`, then
        `check_writes`.
        """
        self.create_or_check()
        self.check_writes()

    def _create(self) -> None:
        """Create the tables, unless another process has just created them."""
        self._make_folder()
        with self._explained(), self._alone() as connection:
            if _is_empty(connection):
                _create_tables(connection)

    def upgrade(self) -> None:
        """Create the tables in an empty database, or migrate an older schema to the newest.

        Only `farm db upgrade` and `farm.store.upgrades` may call this. Raises `SchemaMismatch`, and
        changes nothing, if the schema is newer or too old, or another program owns the tables."""
        self._make_folder()
        if self._readable_schema() == newest_schema():
            return
        with self._explained(), self._alone() as connection:
            if _is_empty(connection):
                _create_tables(connection)
            else:
                _migrate(connection)

    def _make_folder(self) -> None:
        if self._is_sqlite:
            make_private(Path(self.url.database).parent)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Connection]:
        """Open a transaction that excludes other upgrades, since several hosts may start at the
        same time.
        """
        with self.engine.connect().execution_options(sqlite_begin="IMMEDIATE") as connection:
            if not self._is_sqlite:
                with connection.begin():
                    connection.execute(
                        text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK}
                    )
                    yield connection
                return
            driver: Any = connection.connection.dbapi_connection
            # SQLite changes a table by copying and dropping it; a drop would cascade to the rows
            # that refer to it.
            driver.execute("PRAGMA foreign_keys=OFF")
            try:
                with connection.begin():
                    yield connection
                    if broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first():
                        raise SchemaMismatch(
                            f"The upgrade of the database {self} would break a foreign key of the "
                            f"table {broken[0]}.",
                            "Nothing was changed. Restore the database from a backup, or report "
                            "this bug.",
                        )
            finally:
                driver.execute("PRAGMA foreign_keys=ON")

    def close(self) -> None:
        self.engine.dispose()

    def __str__(self) -> str:
        return shown_url(self.url.render_as_string())


def _is_empty(connection: Connection) -> bool:
    return not set(inspect(connection).get_table_names()) - {VERSION_TABLE}


def _create_tables(connection: Connection) -> None:
    from alembic import command

    SQLModel.metadata.create_all(connection)
    command.stamp(_migration_settings(connection), "head")


def _migrate(connection: Connection) -> None:
    from alembic import command

    command.upgrade(_migration_settings(connection), "head")


def _migration_settings(connection: Connection) -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def database_url() -> str:
    """The URL of the database of the settings."""
    return settings().database


def open_database() -> Database:
    """Open the database of the settings. Raises the errors of `Database.check_schema`."""
    database = Database(database_url())
    database.check_schema()
    return database


def is_there(url: str | URL) -> bool:
    """True unless the URL names an SQLite file that does not exist. Raises `SettingsError` if the
    URL is malformed.
    """
    parsed = make_url_or_explain(url)
    return parsed.get_backend_name() != "sqlite" or Path(parsed.database).exists()


def make_url_or_explain(url: str | URL) -> Any:
    """Parse a database URL. Raises `SettingsError` if it is malformed or names an unsupported
    database. The message never quotes the URL, because a malformed one may show its password."""
    try:
        parsed = make_url(url)
        account = str(url).rpartition("@")[0]
        # A part of the password: a connection error would show it as the host.
        if "@" in (parsed.host or "") or (
            "://" in account and "?" in account and isinstance(url, str)
        ):
            raise ValueError("@ or ? in the password")
        if parsed.get_backend_name() == "sqlite" and ":" in account.partition("://")[2]:
            raise ValueError("a server's account in the place of a path")
        if "%" in (parsed.host or ""):
            raise ValueError("an encoded : or @ before the host")
    except (exc.ArgumentError, ValueError):
        raise SettingsError(
            "The database URL is malformed.",
            "Write FARM_DATABASE_URL as sqlite:////path/farm.db or postgresql://user@host/farm. "
            "In a password, write @ "
            "as %40, : as %3A and ? as %3F.",
        ) from None  # the error may quote the password, and `--debug` shows it
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise SettingsError(
            f"The database kind '{parsed.get_backend_name()}' is not supported.",
            "Use SQLite or PostgreSQL.",
        )
    file, mode = parsed.database, parsed.query.get("mode")
    if parsed.get_backend_name() == "sqlite" and (
        file in (None, "", ":memory:") or mode == "memory" or "mode=memory" in file
    ):
        raise SettingsError(
            "The processes of a farm cannot share an SQLite database in memory.",
            "Give a file: FARM_DATABASE_URL=sqlite:////path/farm.db.",
        )
    return parsed


def _engine(url: Any) -> Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url)
    return _postgresql_engine(url)


def _sqlite_engine(url: Any) -> Engine:
    if "uri" not in url.query and url.query.keys() - SQLITE_OPTIONS:
        raise _unknown_option("SQLite")  # SQLite itself ignores unknown options of a URI
    try:
        make_private(Path(url.database).parent)
        check_file(Path(url.database))
    except UntrustedPath as error:
        raise DatabaseUnreachable(
            f"The database is not opened: {error.filename} {error.strerror}.",
            "Set FARM_STATE_DIR or FARM_DATABASE_URL to a folder that other users cannot change.",
        ) from error
    except OSError as error:
        raise DatabaseUnreachable(
            f"The folder of {url.database} cannot be created: {error}.",
            "Set FARM_STATE_DIR or FARM_DATABASE_URL to another place.",
        ) from error
    with _explained_driver(url):
        timeout = {"timeout": SQLITE_BUSY_TIMEOUT_MS / 1000}
        engine = create_engine(url, json_deserializer=_from_json, connect_args=timeout)
    try:
        engine.dialect.create_connect_args(url)
    except (ValueError, TypeError):
        raise _unknown_option("SQLite") from None
    event.listen(engine, "do_connect", _create_private)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _postgresql_engine(url: Any) -> Engine:
    with _explained_driver(url):
        engine = create_engine(
            url,
            json_deserializer=_from_json,
            connect_args=postgresql.OPTIONS,
            pool_size=4,
            pool_pre_ping=True,
        )

    def connect(
        _dialect: Any, _record: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        return postgresql.connect(*arguments, **options)

    event.listen(engine, "do_connect", connect)
    return engine


@contextlib.contextmanager
def _explained_driver(url: Any) -> Iterator[None]:
    """Raise `SettingsError` if the driver is not installed."""
    try:
        yield
    except (exc.NoSuchModuleError, ImportError) as error:
        raise SettingsError(
            f"The Python driver for {url.drivername} is not installed.",
            "Install it with `pip install 'operator-farm[postgresql]'`.",
        ) from error


def _read_only_engine(url: Any) -> Engine:
    """An engine for a SQLite file that nobody changes."""
    file = f"file:{quote(url.database)}?immutable=1"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(file, uri=True, check_same_thread=False, isolation_level=None)

    engine = create_engine(url, json_deserializer=_from_json, creator=connect)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _unknown_option(program: str) -> SettingsError:
    return SettingsError(
        f"The database URL has an option after '?' that {program} does not know, or an option "
        "with a wrong value.",
        "Correct the options in FARM_DATABASE_URL; docs/operate.md has an example.",
    )


def _create_private(_dialect: Any, _record: Any, arguments: Sequence[Any], _options: Any) -> None:
    """Create the file with access for this user only, before SQLite does. SQLite's other files get
    the same mode.
    """
    if not str(arguments[0]).startswith("file:"):
        # the file exists, or SQLite reports why it cannot be created
        with contextlib.suppress(OSError):
            os.close(os.open(arguments[0], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_begin_sqlite` starts the transactions, not the driver
    connection.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT_MS}")
    _write_ahead(connection)
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(
        f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'DEFERRED')}"
    )


_DECODER = json.JSONDecoder()


def _from_json(text: str | bytes) -> Any:
    """Decode a JSON column; return None if it is malformed or nested too deeply: a query must not
    fail for one bad row. This is faster than `json.loads`: a job has tens of thousands of short
    values, and half of them are empty lists."""
    if text == "[]":
        return []
    try:
        text = (text if isinstance(text, str) else text.decode()).strip()
        value, end = _DECODER.raw_decode(text)
        return value if end == len(text) else None
    except (ValueError, RecursionError):
        return None


def _write_ahead(connection: Any) -> None:
    """Set a database file to write-ahead logging, which is permanent.

    This needs exclusive access: if another process has the file open, it fails at once and ignores
    the busy timeout. Other processes do the same with a new file, so another try soon succeeds."""
    deadline_s = time.monotonic() + SQLITE_BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def _sqlite_step(problem: str) -> str:
    """Return the next step for an error of an SQLite file."""
    if "locked" in problem:
        return (
            "Another process writes to the database: try again when it has finished. No data was "
            "lost."
        )
    elsewhere = (
        "or choose another folder with FARM_STATE_DIR (another file with FARM_DATABASE_URL)."
    )
    if "full" in problem:
        return f"Free disk space, {elsewhere}"
    if "readonly" in problem or "open" in problem:
        return f"Give this user write access to the file and its folder, {elsewhere}"
    return f"Check whether the disk of the database is full, read-only or failing, {elsewhere}"


@functools.cache
def known_schemas() -> frozenset[str]:
    """Return the versions of all migrations, from their file names."""
    return frozenset(
        file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*_*.py")
    )


def newest_schema() -> str:
    return max(known_schemas())


def first_line(error: exc.SQLAlchemyError) -> str:
    text = str(getattr(error, "orig", error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ----------------------------------------------------- reading and locking many rows

# Older builds of SQLite accept at most 999 values in a statement.
AT_ONCE = 500

T = TypeVar("T")
Row = TypeVar("Row", bound=SQLModel)


def in_batches(values: Iterable[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield the values without repetitions, in order, in batches."""
    distinct = list(dict.fromkeys(values))
    for start in range(0, len(distinct), size):
        yield distinct[start : start + size]


def by_key(key: Callable[[Any], Any], rows: Iterable[Any]) -> dict[Any, list[Any]]:
    """Group rows by a key, in the order of its first occurrence."""
    groups: dict[Any, list[Any]] = collections.defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def among(session: Session, query: Any, column: Any, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of a query in which the column has one of the values."""
    for batch in in_batches(values):
        yield from session.execute(query.where(column.in_(batch)))


def fetch(session: Session, table: type[Row], keys: Iterable[Any]) -> dict[Any, Row]:
    """Return rows by primary key ``id``, sorted by it."""
    identity = table.id  # type: ignore[attr-defined]
    rows = {row.id: row for (row,) in among(session, select(table), identity, keys)}
    return dict(sorted(rows.items()))


def fetch_values(session: Session, columns: Sequence[Any], keys: Iterable[Any]) -> dict[Any, Any]:
    """Return key -> named tuple of columns, sorted by key; the first column is the key. Much faster
    than objects for many rows.
    """
    rows = {}
    for batch in in_batches(keys):
        for row in values(session, columns, columns[0].in_(batch)):
            rows[row[0]] = row
    return dict(sorted(rows.items()))


def values(
    session: Session,
    columns: Sequence[Any],
    *where: Any,
    in_order_of: Any = None,
    grouped_by: Sequence[Any] = (),
) -> list[Any]:
    """Return columns of all matching rows as named tuples, whose fields are ten times as fast as
    those of SQLAlchemy. ``grouped_by``: the first columns. The groups are sorted by them: the two
    kinds of databases sort texts and empty values differently, or not at all."""
    query = sqlalchemy.select(*columns).where(*where).group_by(*grouped_by)
    rows = session.execute(query if in_order_of is None else query.order_by(in_order_of)).all()
    groups = list(map(_named(tuple(column.name for column in columns))._make, rows))
    if grouped_by:
        groups.sort(
            key=lambda row: [(value is not None, value) for value in row[: len(grouped_by)]]
        )
    return groups


def in_fixed_order(
    columns: Sequence[ColumnElement[Any]], *where: Any, by: Sequence[Any]
) -> sqlalchemy.Subquery:
    """Return a subquery of the matching rows, sorted. For sums and means of floating-point numbers:
    the same numbers have another sum in another order, and a database chooses an order."""
    return sqlalchemy.select(*columns).where(*where).order_by(*by).subquery()


def streamed(
    session: Session, tables: Sequence[Sequence[Any]], query: sqlalchemy.Select[Any], size: int
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a query in lists of at most `size`, while the database still reads.

    Args:
        tables: the columns of each joined table, its id first.
        query: the join, without columns.

    A row is one named tuple for each table, or None for a table without a matching row."""
    columns = list(itertools.chain.from_iterable(tables))
    bounds: list[tuple[int, int, Any]] = []
    for of_table in tables:
        start = bounds[-1][1] if bounds else 0
        make = _named(tuple(column.name for column in of_table))._make
        bounds.append((start, start + len(of_table), make))

    def divided(row: Any) -> tuple[Any, ...]:
        return tuple(
            None if row[start] is None else make(row[start:end]) for start, end, make in bounds
        )

    selected = query.with_only_columns(*columns, maintain_column_froms=True)
    for rows in session.execute(selected.execution_options(yield_per=size)).partitions():
        yield [divided(row) for row in rows]


@functools.cache
def _named(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Values", names)


def locked(session: Session, table: type[Row], key: str) -> Row | None:
    """Lock a row until the end of the transaction and return its current state; None if it does not
    exist.
    """
    return session.get(table, key, populate_existing=True, with_for_update={"key_share": True})


def lock_open_jobs(session: Session, job_ids: Iterable[str]) -> dict[str, Job]:
    """Lock jobs and return the open ones, which stay open until the end of the transaction."""
    locked: dict[str, Job] = {}
    for batch in in_batches(sorted(job_ids)):
        query = (
            select(Job)
            .where(col(Job.id).in_(batch))
            .order_by(col(Job.id))
            .with_for_update(key_share=True)
        )
        locked.update(
            (job.id, job) for job in session.exec(query.execution_options(populate_existing=True))
        )
    return {job_id: job for job_id, job in locked.items() if job.state == JobState.OPEN}


def lock_with_open_jobs(session: Session, *which: Any) -> tuple[dict[str, Job], list[Item]]:
    """Lock the jobs, then the items, that match conditions on both; return the open jobs and their
    items.
    """
    with_job = col(Job.id) == col(Item.job_id)
    jobs = lock_open_jobs(
        session, session.exec(select(Item.job_id).join(Job, with_job).where(*which).distinct())
    )
    query = (
        select(Item)
        .join(Job, with_job)
        .where(*which)
        .order_by(col(Item.id))
        .with_for_update(of=Item)
    )
    return jobs, [item for item in session.exec(query) if item.job_id in jobs]


def lock_items(session: Session, *which: Any) -> None:
    """Lock the matching items in the order of their ids, against deadlocks: an UPDATE locks rows in
    any order.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(
            select(Item.id).where(*which).order_by(col(Item.id)).with_for_update()
        ).all()


def without_index(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """The same condition as an expression, for which a database searches no index. For a condition
    beside one that finds few rows: with old statistics, PostgreSQL would rather search the items in
    work of all cards."""
    return case((condition, 1), else_=0) == 1


def id_ranges(session: Session, job_id: str, size: int = 10_000) -> list[ColumnElement[bool]]:
    """Return conditions that divide the items of a job by id: a statement for a million rows would
    block others. ``job_id || ''`` has no index: otherwise SQLite would read all items of the job
    for each condition."""
    first, last = session.execute(
        select(func.min(Item.id), func.max(Item.id)).where(Item.job_id == job_id)
    ).one()
    starts = () if first is None else range(first, last + 1, size)
    return [
        and_(col(Item.job_id) + "" == job_id, col(Item.id).between(start, start + size - 1))
        for start in starts
    ]
