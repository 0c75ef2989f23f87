"""A connection to PostgreSQL that does not wait for ever for an answer.

With libpq's options the system notices that a host is gone. They do not help if something between both hosts, such as
a load balancer, keeps the connection open and forwards nothing. This module needs the driver, so it is imported late.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg

#: A worker must notice a lost network within the time of a lease. Without these options, a statement can hang in the
#: kernel for 15 minutes.
OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
}
#: If a statement has no answer for so long, the client asks the server whether it works on it. Unit: s.
ANSWER_TIMEOUT_S = 10.0

_STATE = "SELECT state FROM pg_stat_activity WHERE pid = %s"


class Connection(psycopg.Connection[Any]):
    """A statement may take minutes, or wait for a lock. So a late answer alone is no error: the server is asked over
    another connection whether it works on the statement."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        return super().wait(self._limited(gen), *arguments, **options)

    def _limited(self, waiting: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Pass on what psycopg waits for. It resumes this generator several times per second."""
        heard_at_s = time.monotonic()
        try:
            wanted = next(waiting)
            while True:
                ready = yield wanted
                if ready:
                    heard_at_s = time.monotonic()
                elif time.monotonic() - heard_at_s > ANSWER_TIMEOUT_S:
                    self._check_server()
                    heard_at_s = time.monotonic()
                wanted = waiting.send(ready)
        except StopIteration as end:
            return end.value

    def _check_server(self) -> None:
        """Close this connection and raise `psycopg.OperationalError` unless the server works on its statement."""
        if self._works():
            return
        self.close()
        raise psycopg.OperationalError(f"the connection is lost: no answer for {ANSWER_TIMEOUT_S:g} s")

    def _works(self) -> bool:
        info = self.info
        try:
            with _Question.connect(info.dsn, password=info.password, autocommit=True) as question:
                row = question.execute(_STATE, [info.backend_pid]).fetchone()
        except psycopg.Error:
            return False
        return row is not None and row[0] == "active"


class _Question(Connection):
    def _works(self) -> bool:
        return False
