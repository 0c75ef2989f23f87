"""The database's clock was set back: waits begin again, and no living worker loses anything."""

from __future__ import annotations

import pytest
from sqlmodel import select

from farm.jobs import cards, leases
from farm.jobs.future_times import correct_future_times
from farm.jobs.items import Claim, DeclineReason
from farm.store import tables
from tests.planned import claim, complete, items_of, plan, register

HOUR_S = 3600.0
LEASE_S = 60.0


def correct(database):
    return correct_future_times(database, LEASE_S)


def states(database, heartbeat_s=5.0):
    with database.read() as session:
        return [view.state for view in cards.views(session, heartbeat_s)]


@pytest.fixture
def item(any_database):
    (item,) = items_of(any_database, plan(any_database, register(any_database, 0)))
    return item


def test_a_lease_ends_although_the_clock_was_set_back_by_an_hour(any_database, clock, item):
    claim(any_database, item, "holder-0", lease_s=LEASE_S)
    clock.back(HOUR_S)
    assert correct(any_database) == 2, "the lease, and the card's heartbeat"
    assert claim(any_database, item, "another").why is DeclineReason.GONE
    clock.forward(LEASE_S + 1)
    assert isinstance(claim(any_database, item, "another"), Claim)


def test_a_living_worker_keeps_its_lease(any_database, clock, item):
    claimed = claim(any_database, item, "holder-0", lease_s=LEASE_S)
    clock.back(HOUR_S)
    for _ in range(4):
        correct(any_database)
        clock.forward(LEASE_S / 2)
        leases.renew(any_database, "holder-0", LEASE_S)
        assert claim(any_database, item, "another").why is DeclineReason.GONE
    assert complete(any_database, claimed, item.card_id).accepted


def test_an_item_that_was_cancelled_in_work_gives_its_key_back(any_database, clock, item):
    with any_database.write() as session:
        claimed = session.get_one(tables.Item, item.id)
        claimed.state, claimed.claim_key, claimed.ended_at_s = "cancelled", "key", 1.0
        claimed.token, claimed.holder, claimed.lease_until_s = "token", "holder-0", 9e9
    assert correct(any_database) == 1
    with any_database.read() as session:
        assert session.get_one(tables.Item, item.id).lease_until_s < 9e9


def test_a_card_whose_worker_died_is_lost_soon(any_database, clock):
    register(any_database, 0, 1)
    clock.back(HOUR_S)
    correct(any_database)
    assert states(any_database) == ["idle", "idle"]
    clock.forward(20)
    leases.renew(any_database, "holder-1", LEASE_S)
    correct(any_database)
    assert states(any_database) == ["lost", "idle"]


def test_nothing_is_corrected_while_the_clock_runs_forward(any_database, clock, item):
    claim(any_database, item, "holder-0", lease_s=LEASE_S)
    for seconds in (0, 30, HOUR_S):
        clock.forward(seconds)
        assert correct(any_database) == 0


def test_a_planner_that_was_killed_is_noticed(any_database, clock, item):
    with any_database.write() as session:
        its_round = session.exec(select(tables.Round)).one()
        its_round.planned_at_s = None
    clock.back(HOUR_S)
    correct(any_database)
    with any_database.read() as session:
        (its_round,) = session.exec(select(tables.Round))
        assert its_round.planning_at_s < its_round.created_at_s - HOUR_S / 2
