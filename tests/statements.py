"""Control single SQL statements in tests: run another writer just before one, count the values of
one, or choose the order of its rows.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import event

from farm.store.database import Database

#: Time limit of the second thread. If the first holds a lock that it needs, it waits and ends
#: later.
HEAD_START_S = 0.5

#: Settings of a connection with which a database returns the rows of a query without an order in
#: different orders, by the kind of the database.
ORDERS = {
    "sqlite": (
        ("PRAGMA reverse_unordered_selects=OFF",),
        ("PRAGMA reverse_unordered_selects=ON",),
    ),
    "postgresql": (
        ("SET enable_sort=off", "SET enable_mergejoin=off", "SET enable_indexscan=off"),
        ("SET enable_hashagg=off", "SET enable_hashjoin=off", "SET enable_seqscan=off"),
    ),
}


@contextlib.contextmanager
def rows_in_order(database: Database, order: int) -> Iterator[None]:
    """Let the database return the rows of queries without an order in one of its two `ORDERS`."""
    settings = ORDERS[database.url.get_backend_name()][order]

    def configure(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        for setting in settings:
            cursor.execute(setting)
        connection.commit()

    database.engine.dispose()
    event.listen(database.engine, "connect", configure)
    try:
        yield
    finally:
        event.remove(database.engine, "connect", configure)
        database.engine.dispose()


@contextlib.contextmanager
def meanwhile(database: Database, statement: str, action: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run an action in another thread just before this thread's first statement that matches.

    The list contains the action's result afterwards.
    """
    returned: list[Any] = []
    errors: list[Exception] = []
    own = threading.get_ident()

    def act() -> None:
        try:
            returned.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=act)

    def before(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        if (
            threading.get_ident() == own
            and thread.ident is None
            and re.match(statement, " ".join(text.split()))
        ):
            thread.start()
            thread.join(HEAD_START_S)

    event.listen(database.engine, "before_cursor_execute", before)
    try:
        yield returned
    finally:
        event.remove(database.engine, "before_cursor_execute", before)
    assert thread.ident is not None, f"no statement matched {statement}"
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def values_at_once(database: Database) -> Iterator[list[int]]:
    """Record the number of values of each executed statement."""
    numbers: list[int] = []

    def before(_connection: Any, _cursor: Any, _text: str, parameters: Any, *_: Any) -> None:
        numbers.extend(map(len, parameters if isinstance(parameters, list) else [parameters]))

    event.listen(database.engine, "before_cursor_execute", before)
    try:
        yield numbers
    finally:
        event.remove(database.engine, "before_cursor_execute", before)
