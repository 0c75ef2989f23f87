"""A worker that receives nothing any more while items wait notices, and only then; so does one that
hangs.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import update

from farm.jobs import cards, listing
from farm.store import tables
from tasks.watchdog import Pulse, StallWatchdog
from tasks.worker import _items_wait
from tests.planned import plan, register

HEARTBEAT_S = 5.0


def ago(database, seconds, **columns):
    """Set times of all items so long ago."""
    from farm.store.database import database_now

    with database.write() as session:
        session.execute(
            update(tables.Item).values(
                {name: database_now() - seconds for name in columns if columns[name]}
            )
        )


def watchdog_of(database, limit_s=60.0):
    return StallWatchdog("card SIM-0", limit_s, partial(_items_wait, database, "SIM-0"))


def test_a_worker_is_deaf_when_items_wait_and_nothing_comes_through_for_so_long(any_database):
    register(any_database, 0)
    plan(any_database, ["SIM-0"])
    watchdog = watchdog_of(any_database)

    def lost(now_s, taken=1, at_work=False):
        return watchdog.stalled(taken=taken, at_work=at_work, now_s=now_s)

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
    watchdog = watchdog_of(any_database, limit_s=0.0)
    assert not any(watchdog.stalled(taken=0, at_work=False, now_s=now_s) for now_s in (0, 1e6))


def test_a_main_loop_is_silent_from_its_last_sign_of_life_until_it_is_told_to_stop():
    pulse = Pulse()
    pulse.wait(0.001)
    assert pulse.silent_s == 0.0, "it has not begun"
    pulse.beat()
    pulse.wait(0.001)
    pulse.wait(0.002)
    assert pulse.silent_s == 0.003
    pulse.beat()
    assert pulse.silent_s == 0.0
    pulse.stop()
    pulse.beat()
    pulse.wait(0.001)
    assert pulse.silent_s == 0.0, "a stopping worker waits for the end of its item"


def test_a_card_that_is_idle_while_its_items_wait_is_told_so(any_database):
    register(any_database, 0, 1)
    plan(any_database, ["SIM-0"])

    def told():
        with any_database.read() as session:
            return {
                row["id"]: row["state_reason"]
                for row in listing.registered_cards(session, HEARTBEAT_S)
            }

    assert told() == {"SIM-0": "", "SIM-1": ""}
    ago(any_database, 20, published_at_s=True)
    assert told() == {"SIM-0": "", "SIM-1": ""}, "it may come any moment"
    ago(any_database, 45, published_at_s=True)
    assert "no item for 45 s" in told()["SIM-0"]
    assert told()["SIM-1"] == ""
    ago(any_database, 2, started_at_s=True)
    assert told() == {"SIM-0": "", "SIM-1": ""}, "it has just begun one"
