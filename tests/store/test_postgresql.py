"""No statement waits for ever for PostgreSQL over a half-open connection, and no slow one is given
up.
"""

from __future__ import annotations

import pytest
from sqlalchemy import text

from farm.errors import DatabaseUnreachable
from farm.store import postgresql
from farm.store.database import Database
from tests.half_open import HalfOpenProxy

LIMIT = text("SELECT current_setting('idle_in_transaction_session_timeout')")


@pytest.fixture
def proxy(postgres_server, monkeypatch):
    monkeypatch.setattr(postgresql, "ANSWER_TIMEOUT_S", 0.5)
    with HalfOpenProxy(postgres_server.socket) as proxy:
        yield proxy


@pytest.fixture
def database(postgres_url, proxy):
    """A database behind the proxy."""
    name = postgres_url.rpartition("/")[2].partition("?")[0]
    database = Database(f"postgresql+psycopg://postgres@{proxy.address}:{proxy.port}/{name}")
    yield database
    database.close()


def ask(database, statement="SELECT 7"):
    with database.read() as session:
        return session.execute(text(statement)).scalar()


def test_connections_that_became_half_open_are_replaced(database, proxy):
    assert ask(database) == 7
    assert proxy.freeze() == 1
    assert ask(database) == 7


@pytest.mark.parametrize("writes", [False, True])
def test_a_statement_over_a_half_open_connection_ends_as_an_outage(database, proxy, writes):
    def ask_while_it_becomes_half_open():
        with database.write() if writes else database.read() as session:
            session.execute(text("SELECT 7"))
            proxy.freeze()
            session.execute(text("SELECT 8"))

    with pytest.raises(DatabaseUnreachable, match="the connection is lost"):
        ask_while_it_becomes_half_open()
    assert ask(database) == 7


def test_a_statement_that_the_server_works_on_may_take_longer(database):
    assert ask(database, "SELECT 7 FROM pg_sleep(2)") == 7


def test_the_locks_of_a_client_that_is_gone_end_unless_the_server_has_a_limit(
    database, postgres_url
):
    with database.read() as session:
        assert session.execute(LIMIT).scalar() == "0", (
            "a command that reads may wait for its reader"
        )
    with database.write() as session:
        assert session.execute(LIMIT).scalar() == "30s"
    own = Database(f"{postgres_url}&options=-c idle_in_transaction_session_timeout=5000")
    with own.write() as session:
        assert session.execute(LIMIT).scalar() == "5s"
    own.close()
