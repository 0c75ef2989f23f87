"""A worker that hears of nothing any more while items wait notices, and only then."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from farm.jobs import cards, listing
from farm.store import tables
from tasks.worker import StallWatchdog
from tests.planned import plan, register

HEARTBEAT_S = 5.0


def ago(database, seconds, **columns):
    """Set times of all items so long ago."""
    from farm.store.database import database_now

    with database.write() as session:
        session.execute(
            update(tables.Item).values({name: database_now() - seconds for name in columns if columns[name]})
        )


@pytest.fixture
def watchdog():
    return StallWatchdog("SIM-0", limit_s=60.0)


def test_a_worker_is_deaf_when_items_wait_and_nothing_comes_through_for_so_long(any_database, watchdog):
    register(any_database, 0)
    plan(any_database, ["SIM-0"])

    def lost(now_s, **changes):
        return watchdog.stalled(any_database, **{"taken": 1, "at_work": False, "now_s": now_s, **changes})

    assert not any(lost(now_s) for now_s in (0, 100, 1000)), "no message is out"
    ago(any_database, 0, published_at_s=True)
    assert [lost(now_s) for now_s in (1050, 1061)] == [False, True]
    assert not lost(1062, taken=2), "a message has come"
    assert not lost(1150, taken=2, at_work=True), "it is at work"
    assert [lost(now_s, taken=2) for now_s in (1200, 1211)] == [False, True]
    cards.drain(any_database, "SIM-0")
    assert not lost(1300, taken=2), "it is to take nothing"


def test_a_worker_may_be_told_never_to_leave(any_database):
    register(any_database, 0)
    plan(any_database, ["SIM-0"])
    ago(any_database, 0, published_at_s=True)
    assert not any(
        StallWatchdog("SIM-0", 0.0).stalled(any_database, taken=0, at_work=False, now_s=now_s) for now_s in (0, 1e6)
    )


def test_a_card_that_is_idle_while_its_items_wait_is_told_so(any_database):
    register(any_database, 0, 1)
    plan(any_database, ["SIM-0"])

    def told():
        with any_database.read() as session:
            return {row["id"]: row["state_reason"] for row in listing.registered_cards(session, HEARTBEAT_S)}

    assert told() == {"SIM-0": "", "SIM-1": ""}
    ago(any_database, 20, published_at_s=True)
    assert told() == {"SIM-0": "", "SIM-1": ""}, "it may come any moment"
    ago(any_database, 45, published_at_s=True)
    assert told() == {"SIM-0": "has taken no item for 45 s, though items wait", "SIM-1": ""}
    ago(any_database, 2, started_at_s=True)
    assert told() == {"SIM-0": "", "SIM-1": ""}, "it has just begun one"
