"""What workers, the reconciler and the metrics read in a database with many finished items: none of
these items.
"""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy import Text, cast, event, func, insert, literal, null, select, text
from sqlalchemy.exc import InternalError

from farm.jobs import balance, items, leases, listing
from farm.settings import settings
from farm.store.database import Database, database_now
from farm.store.tables import Item
from tasks.app import configure
from tasks.control import reconcile_now
from tests import planned, slow

FINISHED = 20_000
_READ = """
SELECT (SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables WHERE relname = 'item')
     + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'item')
"""


@pytest.fixture
def store(postgres_url, broker, monkeypatch):
    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    settings.cache_clear()
    configure(settings())
    with contextlib.closing(Database(postgres_url)) as database:
        database.upgrade()
        yield database
    monkeypatch.undo()
    settings.cache_clear()
    configure(settings())


def copy(database, like, name, number=FINISHED, *, ago_s=0.0, **changed):
    """Copy an item: other subjects of the same job and card. One of them ended at the end of each
    millisecond.
    """
    numbers = func.generate_series(1, number).table_valued("n").render_derived()
    ended_s = database_now() - ago_s - numbers.c.n / 1000.0
    changed = {name: literal(value) for name, value in changed.items()} | {"ended_at_s": ended_s}
    changed |= {"subject_id": cast(numbers.c.n, Text) + name, "started_at_s": ended_s - 0.001}
    changed |= {"started_at_s": null()} if "reused" in changed else {}
    own = [column for column in Item.__table__.c if column.name != "id"]
    with database.write() as session:
        copies = select(*(changed.get(column.name, column) for column in own)).where(
            Item.id == like.id
        )
        session.execute(
            insert(Item).from_select(
                [column.name for column in own], copies.join(numbers, text("true"))
            )
        )


def count_at_once(connection):
    """Let the server count at its end what a transaction read."""
    with contextlib.suppress(InternalError):  # a statement of the transaction failed
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")


@contextlib.contextmanager
def few_rows_read(database, doing, at_most=2_000):
    def total():
        with database.read() as session:
            return int(session.scalar(text(_READ)) or 0)

    before = total()
    yield
    assert total() - before < at_most, f"{doing}: rows and entries of indexes"


@slow.MEASURED
def test_finished_items_cost_workers_the_reconciler_and_metrics_nothing(store):
    for ending in ("commit", "rollback"):
        event.listen(store.engine, ending, count_at_once)
    cards = planned.register(store, 0, 1)
    job_id = planned.plan(store, cards, number=100)
    first, *waiting = [item for item in planned.items_of(store, job_id) if item.card_id == cards[0]]
    copy(store, first, "measured", state="done", ago_s=7200)
    copy(store, first, "reused", state="done", ago_s=400, reused=True)
    with store.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE")
    reconcile_now(store, settings(), "")  # publishes
    ended = listing.EndedCounts()
    with store.read() as session:
        listing.count_items(session, "here", 5.0, ended)
    with few_rows_read(store, "reconciler", 5_000):
        reconcile_now(store, settings(), "")
    with few_rows_read(store, "slowness"), store.read() as session:
        balance.slowness(session, cards)
    with few_rows_read(store, "metrics"), store.read() as session:
        (counts, _) = listing.count_items(session, "here", 5.0, ended)
    assert (counts.measured, counts.reused) == (FINISHED, FINISHED)
    with few_rows_read(store, "claim"):
        claimed = planned.claim(store, first, "holder-0")
    with few_rows_read(store, "renew"):
        assert leases.renew(store, "holder-0", 60.0, {first.id}) == 1
    with few_rows_read(store, "result"):
        assert planned.complete(store, claimed, cards[0]).accepted
    failing = planned.claim(store, waiting[0], "holder-0")
    with few_rows_read(store, "failure"):
        assert items.fail(store, failing, "hung", "it did").accepted
    with store.write() as session:
        session.execute(text("UPDATE card SET last_seen_at_s = 0 WHERE id = :id"), {"id": cards[1]})
    with few_rows_read(store, "reconciler, after a card was lost", FINISHED):
        reconcile_now(store, settings(), "")
    assert {
        item.card_id for item in planned.items_of(store, job_id) if item.state == "waiting"
    } == {cards[0]}
    # Items in work of other cards, of which the server knows nothing yet
    copy(store, waiting[1], "in work", 300, state="claimed", holder="another", lease_until_s=9e9)
    claimed = planned.claim(store, waiting[2], "holder-0")
    with few_rows_read(store, "renew together", 100):
        assert leases.renew_together(store, {"holder-0": {waiting[2].id}}, 60.0) == {"holder-0"}
    with few_rows_read(store, "result", 100):
        assert planned.complete(store, claimed, cards[0]).accepted
