"""A connection to PostgreSQL that does not wait for ever for an answer.

With libpq's options the system notices that a host is gone. They do not help if something between
both hosts, such as a load balancer, keeps the connection open and forwards nothing. The driver is
optional, so it is imported late."""

from __future__ import annotations

import functools
import time
from collections.abc import Generator
from typing import Any

#: A worker must notice a lost network within the time of a lease. Without these options, a
#: statement can hang in the kernel for 15 minutes.
OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
}
#: If a statement has no answer for so long, the client asks the server whether it works on it.
#: Unit: s.
ANSWER_TIMEOUT_S = 5.0

_STATE = "SELECT state FROM pg_stat_activity WHERE pid = %s"


def connect(*arguments: Any, **options: Any) -> Any:
    """Connect as `psycopg.connect` does.

    A statement may take minutes, or wait for a lock. So a late answer alone is no error: the client
    asks the server over another connection whether it works on the statement. If it does not, the
    connection is closed, and the statement raises `psycopg.OperationalError`."""
    return _connection_type(asks=True).connect(*arguments, **options)


@functools.cache
def _connection_type(*, asks: bool) -> Any:
    """``asks``: whether a connection asks the server before it gives up."""
    import psycopg

    class Connection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            return super().wait(_limited(self, gen, asks), *arguments, **options)

    return Connection


def _limited(
    connection: Any, waiting: Generator[Any, Any, Any], asks: bool
) -> Generator[Any, Any, Any]:
    """Pass on what psycopg waits for. It resumes this generator several times per second."""
    heard_at_s = time.monotonic()
    try:
        waited_for = next(waiting)
        while True:
            ready = yield waited_for
            if ready:
                heard_at_s = time.monotonic()
            elif time.monotonic() - heard_at_s > ANSWER_TIMEOUT_S:
                if not (asks and _server_works(connection)):
                    _give_up(connection)
                heard_at_s = time.monotonic()
            waited_for = waiting.send(ready)
    except StopIteration as end:
        return end.value


def _server_works(connection: Any) -> bool:
    """Return True if the server works on the statement of a connection."""
    import psycopg

    info = connection.info
    try:
        with _connection_type(asks=False).connect(
            info.dsn, password=info.password, autocommit=True
        ) as other:
            row = other.execute(_STATE, [info.backend_pid]).fetchone()
    except psycopg.Error:
        return False
    return row is not None and row[0] == "active"


def _give_up(connection: Any) -> None:
    import psycopg

    connection.close()
    raise psycopg.OperationalError(f"the connection is lost: no answer for {ANSWER_TIMEOUT_S:g} s")
