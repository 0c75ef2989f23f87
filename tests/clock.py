"""The clock of a test's database, which a test can set forward instead of waiting for minutes, and
back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.compiler import compiles
from sqlmodel import SQLModel

from farm.store import database as module
from farm.store.database import Database, database_now

_REAL: dict[str, Callable[..., str]] = {
    "sqlite": module._sqlite_now,
    "postgresql": module._postgresql_now,
}


class Clock:
    """Controls `database_now` in statements of this process: leases, heartbeats and all else that
    depends on it.

    The clock also runs by itself.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.write() as session:
            session.execute(text("CREATE TABLE clock_of_the_test (ahead_s DOUBLE PRECISION)"))
            session.execute(text("INSERT INTO clock_of_the_test VALUES (0)"))
        self._compile(_set_forward)

    def forward(self, seconds: float) -> None:
        """Set the clock forward."""
        with self._database.write() as session:
            session.execute(
                text("UPDATE clock_of_the_test SET ahead_s = ahead_s + :by"), {"by": seconds}
            )

    def back(self, seconds: float) -> None:
        """Set the clock back: all stored times may then lie in the future."""
        self.forward(-seconds)

    def close(self) -> None:
        with self._database.write() as session:
            session.execute(text("DROP TABLE clock_of_the_test"))
        self._compile(lambda real: real)

    def _compile(self, change: Callable[[Callable[..., str]], Callable[..., str]]) -> None:
        for dialect, real in _REAL.items():
            compiles(database_now, dialect)(change(real))
        self._database.engine.clear_compiled_cache()
        for mapper in SQLModel._sa_registry.mappers:  # they keep compiled statements of their own
            mapper._compiled_cache.clear()


def _set_forward(real: Callable[..., str]) -> Callable[..., str]:
    def compiled(*arguments: Any, **options: Any) -> str:
        return f"({real(*arguments, **options)} + (SELECT ahead_s FROM clock_of_the_test))"

    return compiled


#: The schema with a function that hides the clock of a PostgreSQL; and a table that the search path
#: does not show.
_HIDING, _AHEAD = "clock_of_the_test", "data_of_the_test.clock_ahead"


def hide_server_clock(connection: Any) -> None:
    """Give a PostgreSQL database a clock that `set_server_clock_back` sets, for all sessions that
    begin later.

    A function of the same name hides that of the server, so all processes see the same time.
    ``connection``: of psycopg, in autocommit mode, as the owner of the database."""
    for schema in (_HIDING, _AHEAD.partition(".")[0]):
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    connection.execute(f"CREATE TABLE IF NOT EXISTS {_AHEAD} (seconds double precision NOT NULL)")
    connection.execute(f"INSERT INTO {_AHEAD} SELECT 0 WHERE NOT EXISTS (SELECT FROM {_AHEAD})")
    connection.execute(
        f"CREATE OR REPLACE FUNCTION {_HIDING}.statement_timestamp() RETURNS timestamptz LANGUAGE "
        "sql STABLE AS $$"
        " SELECT pg_catalog.statement_timestamp() + make_interval(secs => (SELECT seconds FROM "
        f"{_AHEAD})) $$"
    )
    (name,) = connection.execute("SELECT current_database()").fetchone()
    connection.execute(f'ALTER DATABASE "{name}" SET search_path = public, {_HIDING}, pg_catalog')


def set_server_clock_back(connection: Any, seconds: float) -> None:
    connection.execute(f"UPDATE {_AHEAD} SET seconds = seconds - %s", [seconds])
