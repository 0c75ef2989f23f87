"""The loop of the reconciler: an outage of the database neither delays repairs nor moves items of
living cards.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import psycopg
import pytest
import redis
from sqlalchemy import make_url, update

from farm.errors import DatabaseUnreachable
from farm.jobs import leases
from farm.jobs.group_driver import GroupInterrupted, check_cards
from farm.jobs.outage import SteadyAnswers
from farm.settings import settings
from farm.store import tables
from tasks import control, queues, reconciler
from tasks.app import configure
from tasks.doctor.broker import _reconciler as reconciler_check
from tasks.reconciler import LONGEST_PAUSE_S, Pace, Reconciler
from tests.planned import claim, items_of, plan, register

#: A pass that waits so long for the database, and counts it as work, reserves a pause of four times
#: as long. Unit: s.
LOCKED_S = 1.5


@pytest.fixture
def current(broker, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("FARM_BROKER_URL", broker.url)
        patched.setenv("FARM_RECONCILE_S", "0.5")
        settings.cache_clear()
        configure(settings())
        yield settings()
    settings.cache_clear()
    configure(settings())


@pytest.fixture
def client(broker):
    with redis.Redis.from_url(broker.redis_url) as client:
        yield client


class Locked:
    """Another session holds a table, so that everybody waits for it, for a time."""

    def __init__(self, database, table="item"):
        where = make_url(database.url)
        self._connection = psycopg.connect(
            host=where.query["host"], user="postgres", dbname=where.database
        )
        self._table = table

    def __enter__(self):
        self._connection.execute(f"LOCK TABLE {self._table} IN ACCESS EXCLUSIVE MODE")
        self._end = threading.Timer(LOCKED_S, self._connection.close)
        self._end.start()
        return self

    def __exit__(self, *_):
        self._end.join()


def test_a_pass_that_waited_for_the_database_is_followed_by_the_next_one_at_once(
    postgres_database, current, client
):
    (card,) = register(postgres_database, 0)
    plan(postgres_database, [card], number=3)
    one = Reconciler(current, postgres_database)
    for _ in range(2):  # the first one compiles its statements
        client.delete(queues.PASS_KEY)
        one.make_pass()
    client.delete(queues.PASS_KEY)
    with Locked(postgres_database):
        one.make_pass()
    assert client.pttl(queues.PASS_KEY) < 2 * 1000 * LOCKED_S


def test_the_pause_grows_with_the_work_and_has_a_bound():
    pace = Pace()
    assert [pace.work_s(pass_s) for pass_s in (600.0, 0.1, 25.0, 0.1)] == [0.0, 0.1, 0.1, 0.1], (
        "it waited twice"
    )
    assert [pace.work_s(pass_s) for pass_s in (3.0, 4.0, 3.5)] == [0.1, 3.0, 3.5]
    assert LONGEST_PAUSE_S <= 60


def test_the_longest_pause_is_reserved_after_passes_that_take_long(
    postgres_database, current, client, monkeypatch
):
    monkeypatch.setattr(reconciler, "reconcile_now", lambda *_, **__: None)
    one = Reconciler(current, postgres_database)
    for _ in range(2):
        one._completed(600.0)
    assert 0 < client.pttl(queues.PASS_KEY) <= 1000 * LONGEST_PAUSE_S


def test_the_doctor_sees_whether_passes_are_completed(
    postgres_database, current, client, monkeypatch
):
    assert reconciler_check(current).level == "problem", "no control worker has begun"
    one = Reconciler(current, postgres_database)
    one.make_pass()
    assert reconciler_check(current).level == "ok"
    client.delete(queues.COMPLETED_KEY)

    def failing(*_, **__):
        raise KeyError("unforeseen")

    monkeypatch.setattr(reconciler, "reconcile_now", failing)
    client.delete(queues.PASS_KEY)
    one.make_pass()
    found = reconciler_check(current)
    assert found.level == "problem"
    assert "logs of the control workers" in found.next_step


def test_a_completed_pass_is_a_sign_for_some_time_only(postgres_database, current, client):
    Reconciler(current, postgres_database).make_pass()
    assert 0 < client.pttl(queues.COMPLETED_KEY) < 60_000


def unseen(database, number):
    with database.write() as session:
        its = tables.CardRow.id == f"SIM-{number}"
        session.execute(update(tables.CardRow).where(its).values(last_seen_at_s=1.0))


def test_after_a_delayed_answer_no_item_moves_until_the_workers_had_time_for_a_heartbeat(
    postgres_database, current
):
    """As after a database that was frozen: no session got an error, and no heartbeat was written
    meanwhile.
    """
    ids = register(postgres_database, 0, 1)
    job_id = plan(postgres_database, ids[:1], number=4)
    unseen(postgres_database, 0)
    answers = SteadyAnswers(LOCKED_S / 2)
    answers._since_s -= 3600
    with Locked(postgres_database, "card"):
        control.reconcile_now(postgres_database, current, "", answers=answers)
    assert {item.card_id for item in items_of(postgres_database, job_id)} == {ids[0]}
    answers._since_s -= 3600
    control.reconcile_now(postgres_database, current, "", answers=answers)
    assert {item.card_id for item in items_of(postgres_database, job_id)} == {ids[1]}


def test_after_the_clock_was_set_forward_no_item_moves_until_the_workers_had_time_for_a_heartbeat(
    any_database, clock, current
):
    ids = register(any_database, 0, 1)
    job_id = plan(any_database, ids[:1], number=4)
    answers = SteadyAnswers(10.0)
    reconcile = partial(control.reconcile_now, any_database, current, "", answers=answers)
    reconcile()
    answers._since_s -= 3600
    clock.forward(3600)
    leases.renew(any_database, "holder-1", 60.0)
    reconcile()
    assert {item.card_id for item in items_of(any_database, job_id)} == {ids[0]}
    answers._since_s -= 3600
    reconcile()
    assert {item.card_id for item in items_of(any_database, job_id)} == {ids[1]}


def test_a_group_does_not_end_for_a_card_that_had_no_time_for_a_heartbeat(any_database):
    ids = register(any_database, 0, 1)
    (item,) = items_of(any_database, plan(any_database, ids, cards=2))
    claimed = claim(any_database, item)
    unseen(any_database, 1)
    answers = SteadyAnswers(10.0)
    check_cards(any_database, claimed, answers)
    answers._since_s -= 3600
    with pytest.raises(GroupInterrupted, match="has ended"):
        check_cards(any_database, claimed, answers)


def test_an_error_and_a_delay_interrupt_steady_answers():
    answers = SteadyAnswers(0.01)
    answers._since_s -= 3600
    with answers.awaited():
        pass
    assert answers.steady_for_s > 3600
    with pytest.raises(DatabaseUnreachable), answers.awaited():
        raise DatabaseUnreachable("It is away.", "Start it.")
    assert answers.steady_for_s < 3600
    answers._since_s -= 3600
    with answers.awaited():
        time.sleep(0.05)
    assert answers.steady_for_s < 3600
