"""How long a job still takes, told from how its cards live up to expectations."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from sqlmodel import select

from farm.jobs import balance, jobs, moving
from farm.store import tables
from farm.store.database import read_clock_s
from farm.store.tables import Item
from tests.planned import claim, complete, items_of, plan, register

PAUSE_S = 0.2


def left_s(database, job_id):
    with database.read() as session:
        return jobs.progress(session, job_id).expected_left_s


def do(database, job_id, card, number, slowness):
    """Measure so many of a job's items on a card, each with its pause in so many times the time
    that was expected.
    """
    with database.read() as session:
        began_s = read_clock_s(session)
    waiting = [
        item
        for item in items_of(database, job_id)
        if item.card_id == card and item.state == "waiting"
    ]
    for place, item in enumerate(waiting[:number], -number):
        complete(database, claim(database, item), card)
        ended_s = began_s + place * slowness * item.expected_s
        took = {
            "started_at_s": ended_s - (slowness * item.expected_s - PAUSE_S),
            "ended_at_s": ended_s,
        }
        with database.write() as session:
            session.execute(update(Item).where(Item.id == item.id).values(**took))


@pytest.mark.parametrize("slowness", [0.3, 1.0, 4.0])
def test_after_a_tenth_the_rest_is_told_by_what_the_first_took(any_database, slowness):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=50)
    expected_s = items_of(any_database, job_id)[0].expected_s
    assert left_s(any_database, job_id) == pytest.approx(50 * expected_s)
    do(any_database, job_id, card, 5, slowness)
    assert left_s(any_database, job_id) == pytest.approx(45 * slowness * expected_s, rel=0.15)


def test_a_slow_card_gives_to_a_fast_one_and_both_end_together(any_database):
    fast, slow = register(any_database, 0, 1)
    job_id = plan(any_database, [fast, slow], number=100)
    expected_s = items_of(any_database, job_id)[0].expected_s
    do(any_database, job_id, fast, 8, 1.0)
    do(any_database, job_id, slow, 5, 4.0)
    assert left_s(any_database, job_id) == pytest.approx(87 * expected_s / (1 + 1 / 4), rel=0.15)


def test_what_waits_ahead_on_its_cards_comes_first(any_database):
    (card,) = register(any_database, 0)
    ahead, job_id = (plan(any_database, [card], number=number) for number in (30, 10))
    plan(any_database, [card], number=20)
    expected_s = items_of(any_database, job_id)[0].expected_s
    assert left_s(any_database, job_id) == pytest.approx(40 * expected_s)
    jobs.cancel(any_database, ahead)
    assert left_s(any_database, job_id) == pytest.approx(10 * expected_s)
    jobs.cancel(any_database, job_id)
    assert left_s(any_database, job_id) == 0


def test_balancing_and_the_time_left_go_by_the_same_slowness(any_database, monkeypatch):
    fast, slow = register(any_database, 0, 1)
    job_id = plan(any_database, [fast, slow], number=60)
    do(any_database, job_id, fast, 4, 1.0)
    do(any_database, job_id, slow, 4, 4.0)
    with any_database.read() as session:
        known = balance.slowness(session, [fast, slow])
        rows = session.exec(select(tables.CardRow).order_by(tables.CardRow.id)).all()
    assert known == {fast: pytest.approx(1.0, rel=0.15), slow: pytest.approx(4.0, rel=0.15)}
    used = []
    balanced = moving.balance_groups
    monkeypatch.setattr(
        moving,
        "balance_groups",
        lambda *about, **more: used.append(about) or balanced(*about, **more),
    )
    moving.rebalance(any_database, rows, idle_within_s=1e6)
    ((_, open_s, slowness),) = used
    assert slowness == pytest.approx(known)
    assert left_s(any_database, job_id) == pytest.approx(
        sum(open_s.values()) / sum(1 / one for one in known.values())
    )
