"""What the reconciler finds out of step in the database."""

from __future__ import annotations

import time

import pytest
import redis
from celery.exceptions import Ignore
from sqlalchemy import update
from sqlmodel import select

from farm.jobs import cards, leases
from farm.jobs.items import Claim
from farm.jobs.rounds import add_round
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database
from tasks import control, queues
from tasks.app import configure
from tasks.control import (
    PATIENCE,
    _move_stranded,
    _unfinished,
    _unpublished,
    lost_after_s,
    reconcile_now,
)
from tests.planned import claim, complete, items_of, plan, plan_model, register


def unseen_for(database, card_id, seconds):
    with database.write() as session:
        card = session.get_one(tables.CardRow, card_id)
        card.last_seen_at_s -= seconds
        session.add(card)


def move_stranded(database, current):
    with database.read() as session:
        views = cards.views(session, current.heartbeat_s)
    return _move_stranded(database, current, views, "")


def test_a_lost_cards_tuples_move_at_once_and_its_whole_waits_some_more(any_database):
    current = Settings(heartbeat_s=100)
    lost, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [lost, peer], ["Conv2d", "ReLU", "Linear"])
    of_it = next(item for item in items_of(any_database, job_id, "tuple") if item.card_id == lost)
    complete(any_database, claim(any_database, of_it), lost)
    unseen_for(any_database, lost, lost_after_s(current) + 1)
    move_stranded(any_database, current)
    for item in items_of(any_database, job_id):
        if item.card_id == peer and isinstance(held := claim(any_database, item), Claim):
            complete(any_database, held, peer)
    move_stranded(any_database, current)
    assert {(item.card_id, item.state) for item in items_of(any_database, job_id, "whole")} == {
        (lost, "waiting"),
        (peer, "done"),
    }
    unseen_for(any_database, lost, PATIENCE * lost_after_s(current))
    move_stranded(any_database, current)
    assert {item.card_id for item in items_of(any_database, job_id) if item.state == "failed"} == {
        lost
    }
    with any_database.read() as session:
        assert _unfinished(session, "") == [(job_id, 1)]


def test_a_card_that_is_back_since_it_was_looked_at_keeps_its_items(any_database):
    current = Settings(heartbeat_s=100)
    lost, _ = register(any_database, 0, 1)
    job_id = plan(any_database, [lost], number=3)
    unseen_for(any_database, lost, lost_after_s(current) + 1)
    with any_database.read() as session:
        views = cards.views(session, current.heartbeat_s)
    back = claim(any_database, items_of(any_database, job_id)[0])
    leases.renew(any_database, "holder-0", 0.0, ())
    assert _move_stranded(any_database, current, views, "") == []
    assert {item.card_id for item in items_of(any_database, job_id)} == {lost}
    unseen_for(any_database, lost, lost_after_s(current) + 1)
    assert len(move_stranded(any_database, current)) == 2, (
        "it took one just now, before it was seen again"
    )
    assert complete(any_database, back, lost).accepted


def test_a_round_that_was_answered_from_the_database_is_not_missed_in_the_broker(any_database):
    job_id = plan_model(
        any_database, register(any_database, 0), ["Conv2d", "ReLU"], scope=("Conv2d",)
    )
    with any_database.write() as session:
        assert _unpublished(session, "", -1.0, -1.0) == [(job_id, 1)]
        job = session.get_one(tables.Job, job_id)
        first = session.get_one(tables.Round, (job_id, 1))
        add_round(
            session,
            job,
            scope=("Conv2d", "ReLU"),
            capture_id=first.capture_id,
            reason="below the target",
        )
        assert _unpublished(session, "", -1.0, -1.0) == [(job_id, 2)]


def test_an_aggregation_that_is_asked_for_in_vain_is_asked_for_ever_more_seldom(monkeypatch):
    now_s = [1000.0]
    requests = control.AggregationRequests()
    monkeypatch.setattr(control.time, "monotonic", lambda: now_s[0])
    asked = []
    for _ in range(40):
        asked += [now_s[0] - 1000.0 for _ in requests.due([("job", 1)], 5.0)]
        now_s[0] += 5.0
    assert asked == [0.0, 5.0, 15.0, 35.0, 75.0, 155.0]
    assert requests.due([("other", 1)], 5.0) == [("other", 1)]
    assert requests.due([("job", 1)], 5.0) == [("job", 1)], "it was closed, and begins anew"


def test_what_goes_wrong_with_one_job_ends_the_pass_for_no_other(any_database, monkeypatch):
    cards_there = register(any_database, 0)
    bad, good = (plan(any_database, cards_there) for _ in range(2))
    published = []

    def publish(store, job_id, number):
        published.append(job_id)
        if job_id == bad:
            raise KeyError("what nobody thought of")

    monkeypatch.setattr(queues, "publish_round", publish)
    monkeypatch.setattr(queues, "queue_depths", lambda ids: dict.fromkeys(ids, 1))
    time.sleep(0.05)
    reconcile_now(any_database, Settings(reconcile_s=0.001), "")
    assert set(published) == {bad, good}


def test_a_round_whose_aggregation_always_raises_ends_with_the_reason(any_database, monkeypatch):
    job_id = plan(any_database, register(any_database, 0))
    (item,) = items_of(any_database, job_id)
    complete(any_database, claim(any_database, item), item.card_id)

    def raising(*arguments):
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(control, "database", lambda: any_database)
    monkeypatch.setattr("farm.jobs.closing._close", raising)
    for _ in range(control.TRIES - 1):
        with pytest.raises(KeyError):
            control.aggregate(f"{job_id}/1")
    assert control.aggregate(f"{job_id}/1")["closing"] == "done"
    with any_database.read() as session:
        verdict = session.exec(select(tables.VerdictRow)).one()
        assert session.get_one(tables.Job, job_id).state == "done"
    problem = "KeyError: 'what nobody thought of'"
    (reason,) = verdict.details["reasons"]
    assert reason.endswith(problem)


def test_what_lost_its_messages_is_published_again_also_while_its_card_is_busy(
    any_database, monkeypatch
):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=10)
    assert isinstance(claim(any_database, items_of(any_database, job_id)[0]), Claim)
    published, messages = [], 0
    monkeypatch.setattr(queues, "queue_depths", lambda ids: dict.fromkeys(ids, messages))
    monkeypatch.setattr(queues, "publish_items", lambda store, ids, **_: published.extend(ids))

    def publish_lost():
        published.clear()
        with any_database.read() as session:
            views = cards.views(session, 5.0)
        control._publish_lost(any_database, Settings(), views, "")
        return len(published)

    def published_ago(seconds):
        with any_database.write() as session:
            for item in session.exec(select(tables.Item)):
                item.published_at_s = item.created_at_s = item.created_at_s - seconds
                session.add(item)

    assert publish_lost() == 0, "its publisher may be at it"
    published_ago(60)
    assert publish_lost() == 9
    messages = 7
    assert publish_lost() == 0, "the worker may hold two"


@pytest.fixture
def at_broker(broker, monkeypatch):
    """This process publishes to a real broker, few messages at a time."""
    with monkeypatch.context() as patched:
        patched.setenv("FARM_BROKER_URL", broker.url)
        patched.setattr(queues, "BATCH", 10)
        settings.cache_clear()
        configure(settings())
        yield broker
    settings.cache_clear()
    configure(settings())


def messages_of(broker, card):
    with redis.Redis.from_url(broker.redis_url) as client:
        return client.llen(f"card.{card}")


def aged(database, seconds):
    """All that has happened so far happened so much earlier."""
    with database.write() as session:
        session.execute(
            update(tables.Item).values(
                created_at_s=tables.Item.created_at_s - seconds,
                published_at_s=tables.Item.published_at_s - seconds,
            )
        )
        session.execute(
            update(tables.Round).values(
                created_at_s=tables.Round.created_at_s - seconds,
                progress_at_s=tables.Round.progress_at_s - seconds,
            )
        )


def test_while_a_round_is_published_nobody_else_takes_it_for_lost(
    any_database, at_broker, monkeypatch
):
    """However long that takes, and however many control workers look on."""
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=60)
    aged(any_database, 1000)
    most, send = [], queues._send_chord

    def looked_on(*arguments):
        send(*arguments)
        for _host in range(3):
            reconcile_now(any_database, Settings(heartbeat_s=100), "")
        most.append(messages_of(at_broker, card))

    monkeypatch.setattr(queues, "_send_chord", looked_on)
    assert queues.publish_round(any_database, job_id, 1) == 60
    assert most == [10, 20, 30, 40, 50, 60]


def test_who_takes_over_from_a_dead_publisher_repeats_a_batch_at_most(
    any_database, at_broker, monkeypatch
):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=60)
    send = queues._send_chord

    def killed(*arguments):
        send(*arguments)
        if messages_of(at_broker, card) == 30:
            monkeypatch.setattr(
                queues, "_progressed", lambda *_, **__: False
            )  # it writes down nothing any more
            raise KeyboardInterrupt

    monkeypatch.setattr(queues, "_send_chord", killed)
    with pytest.raises(KeyboardInterrupt):
        queues.publish_round(any_database, job_id, 1)
    monkeypatch.undo()
    current = Settings(heartbeat_s=100, broker_url=at_broker.url)
    monkeypatch.setattr(queues, "BATCH", 10)
    reconcile_now(any_database, current, "")
    assert messages_of(at_broker, card) == 30, "it may only be slow"
    aged(any_database, 40)
    for _host in range(3):
        reconcile_now(any_database, current, "")
    assert messages_of(at_broker, card) == 70


def test_what_several_hosts_find_lost_is_published_once(any_database, at_broker):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=30)
    queues.publish_round(any_database, job_id, 1)
    with redis.Redis.from_url(at_broker.redis_url) as client:
        client.flushall()
    aged(any_database, 1000)
    with any_database.read() as session:
        lost = list(session.scalars(control._without_holder("", 5.0)))
    assert len(lost) == 30
    for _host in range(3):
        queues.publish_items(any_database, lost, unless_within_s=5.0)
    assert messages_of(at_broker, card) == 30


def test_items_that_a_killed_process_marked_are_published(any_database, at_broker):
    """It marked them and died before it became the publisher of their round."""
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=3)
    queues.publish_round(any_database, job_id, 1)
    with any_database.write() as session:
        session.execute(update(tables.Item).values(published_at_s=None))
    queues.publish_items(
        any_database, [item.id for item in items_of(any_database, job_id)], unless_within_s=5.0
    )
    assert messages_of(at_broker, card) == 6


def test_a_queue_gets_only_the_next_messages_of_its_card_and_more_when_it_is_half_empty(
    any_database, at_broker, monkeypatch
):
    monkeypatch.setattr(queues, "MOST_IN_QUEUE", 12)
    busy, other = register(any_database, 0, 1)
    job_id = plan(any_database, [busy, other], number=60)
    client = redis.Redis.from_url(at_broker.redis_url)

    def reconciled(seconds=60):
        aged(any_database, seconds)
        reconcile_now(any_database, Settings(heartbeat_s=100_000, broker_url=at_broker.url), "")
        return messages_of(at_broker, busy), messages_of(at_broker, other)

    assert queues.publish_round(any_database, job_id, 1) == 24
    assert messages_of(at_broker, "control") == 0, "the round has not ended"
    assert reconciled() == (12, 12)
    client.rpop(f"card.{busy}", 5)
    assert reconciled() == (7, 12), "the queue is more than half full"
    client.rpop(f"card.{busy}", 1)
    assert reconciled(0) == (6, 12), "another process has published just now"
    assert reconciled() == (12, 12)
    for _ in range(5):
        client.ltrim(f"card.{busy}", 0, 0)
        client.ltrim(f"card.{other}", 0, 0)
        reconciled()
    with any_database.read() as session:
        its_round = session.get_one(tables.Round, (job_id, 1))
        assert its_round.published_at_s, "every item has got its message"
    client.close()


def test_one_reconciler_at_a_time_looks_around(at_broker):
    assert queues.reserves_pass(60.0)
    assert not queues.reserves_pass(60.0), "another host has just begun"
    assert queues.reserves_pass(0.001, longer=True)
    time.sleep(0.01)
    assert queues.reserves_pass(60.0)
    at_broker.stop()
    try:
        assert queues.reserves_pass(60.0), "a host whose broker is away looks at the database"
    finally:
        at_broker.start()


@pytest.fixture
def planner_killed(any_database, at_broker):
    """A job whose planner was killed after it planned five items, before it published them."""
    job_id = plan(any_database, register(any_database, 0), number=5)
    with any_database.write() as session:
        session.get_one(tables.Round, (job_id, 1)).planned_at_s = None
    return job_id


def test_what_a_killed_planner_has_planned_gets_messages_soon(
    any_database, at_broker, planner_killed
):
    aged(any_database, 10)
    reconcile_now(any_database, Settings(heartbeat_s=100, broker_url=at_broker.url), "")
    assert messages_of(at_broker, "SIM-0") == 5
    with any_database.read() as session:
        assert session.get_one(tables.Round, (planner_killed, 1)).published_at_s is None, (
            "it may get more items"
        )


def test_no_publisher_is_taken_for_the_planner(any_database, at_broker, planner_killed):
    with any_database.write() as session:
        silent_s = control.PLANNING_PATIENCE_S + 1
        session.execute(
            update(tables.Round).values(planning_at_s=tables.Round.planning_at_s - silent_s)
        )
    queues.publish_items(any_database, [item.id for item in items_of(any_database, planner_killed)])
    assert queues.publish_round(any_database, planner_killed, 1, again=True) == 5
    control._cancel_interrupted_planning(any_database, "")
    with any_database.read() as session:
        assert session.get_one(tables.Job, planner_killed).state == "cancelled"


def test_messages_about_a_database_that_is_read_only_are_dropped_with_one_line(
    postgres_database, monkeypatch, caplog
):
    read_only = postgres_database.url.update_query_dict(
        {"options": "-c default_transaction_read_only=on"}
    )
    database = Database(read_only)
    monkeypatch.setattr(control, "database", lambda: database)
    job_id = plan(postgres_database, register(postgres_database, 0), number=1)
    for _ in range(3):
        with pytest.raises(Ignore):
            control.aggregate(f"{job_id}/1")
    (told,) = [record for record in caplog.records if "A round is not closed" in record.message]
    assert "is read-only" in told.message
    assert "Make the database writable" in told.message
    assert told.exc_info is None
    database.close()
