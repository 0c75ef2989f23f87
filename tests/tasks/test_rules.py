"""What becomes of items when cards vanish, workers die and messages are lost: the rules, without a
process.

A real database and a real broker. The test does what workers do and sets the database's clock
forward, so that leases end and cards count as lost in milliseconds. That processes do as is done
here, `tests/faults/` shows."""

from __future__ import annotations

import base64
import json

import pytest
import redis
from sqlmodel import select

from farm.jobs import cards, jobs, leases
from farm.jobs.items import Claim, Declined, DeclineReason
from farm.settings import settings
from farm.store import tables
from tasks import control, queues
from tasks.app import configure
from tasks.message_filter import CONTROL_QUEUE
from tasks.queues import follow_up, publish_round
from tests.planned import claim, complete, items_of, plan, readings, register

SOON_S = 20.0  # a card is lost by then, and what has no message left is missed; no lease has ended


class Desk:
    """A farm of two cards whose workers the test is."""

    def __init__(self, database, broker, clock):
        self.database, self.broker, self.clock = database, broker, clock
        self.cards = register(database, 0, 1)
        self.card, self.peer = self.cards

    def submit(self, number, *, to=None, cards=1):
        job_id = plan(self.database, to or self.cards, number=number, cards=cards)
        publish_round(self.database, job_id, 1)
        return job_id

    def later(self, seconds=SOON_S, *, seen=(0, 1), renewed=True):
        """Time goes by, these cards alone are seen and renew what they hold, and the control worker
        looks around.
        """
        self.clock.forward(seconds)
        for number in seen:
            leases.renew(self.database, f"holder-{number}", 0.0, ())
            if renewed:
                leases.renew(self.database, f"holder-{number}", settings().lease_s)
        control.reconcile_now(self.database, settings(), "")

    def take(self, card):
        """The claim on the next message of the card's queue; None where it is empty."""
        if (item_id := self._next(f"card.{card}")) is None:
            return None
        with self.database.read() as session:
            item = session.get_one(tables.Item, item_id)
        item.card_id = card  # it may have moved since
        return claim(
            self.database,
            item,
            f"holder-{card[-1]}",
            lease_s=settings().lease_s,
            max_attempts=settings().max_attempts,
        )

    def give(self, card, claimed):
        """The reading of what it took; whether it counts."""
        closed = complete(self.database, claimed, card)
        follow_up(self.database, closed)
        return closed.accepted

    def work(self, *of):
        """Those cards, or both, measure until no message is left, and the control worker
        aggregates.
        """
        for card in of or self.cards:
            while (taken := self.take(card)) is not None:
                assert isinstance(taken, Declined) or self.give(card, taken)
        while (round_id := self._next(CONTROL_QUEUE)) is not None:
            control.aggregate(round_id)

    def forget(self):
        """The broker is wiped."""
        with redis.Redis.from_url(self.broker.redis_url) as client:
            client.flushall()

    def items(self, job_id):
        return items_of(self.database, job_id)

    def ended(self, job_id):
        """That the job is done: each item in its end, one reading each, one verdict."""
        with self.database.read() as session:
            job = session.get_one(tables.Job, job_id)
            verdicts = session.exec(
                select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)
            ).all()
        of_it = self.items(job_id)
        assert len({item.reading_id for item in of_it if item.reading_id}) == sum(
            i.state == "done" for i in of_it
        )
        return job.state == "done" and len(verdicts) == 1

    def _next(self, queue):
        with redis.Redis.from_url(self.broker.redis_url) as client:
            message = client.rpop(queue)
        return (
            None
            if message is None
            else json.loads(base64.b64decode(json.loads(message)["body"]))[0][0]
        )


@pytest.fixture
def desk(any_database, clock, broker, monkeypatch):
    monkeypatch.setattr(control, "database", lambda: any_database)
    with monkeypatch.context() as patched:
        patched.setenv("FARM_BROKER_URL", broker.url)
        patched.setenv("FARM_MAX_ATTEMPTS", "2")
        settings.cache_clear()
        configure(settings())
        yield Desk(any_database, broker, clock)
    settings.cache_clear()
    configure(settings())


def attempts(desk, job_id):
    return [(item.attempts, item.repeated) for item in desk.items(job_id)]


def test_a_lost_cards_items_are_on_its_peer_soon_and_its_late_reading_is_fenced_out(desk):
    job_id = desk.submit(6)
    held = desk.take(desk.card)
    desk.later(seen=[1])
    assert {item.card_id for item in desk.items(job_id)} == {desk.peer}
    desk.work(desk.peer)
    assert desk.ended(job_id)
    assert not desk.give(desk.card, held)
    assert readings(desk.database) == 6
    assert sorted(attempts(desk, job_id))[-1] == (2, 1), (
        "it was begun twice, and its second reading is counted"
    )


def test_a_card_that_is_seen_keeps_what_it_has_however_long_that_takes(desk):
    job_id = desk.submit(2)
    held = desk.take(desk.card)
    for _ in range(10):
        desk.later(settings().lease_s / 2)
    assert isinstance(desk.take(desk.card), Declined | None), "its message may come again meanwhile"
    assert desk.give(desk.card, held)
    desk.work()
    assert desk.ended(job_id)
    assert set(attempts(desk, job_id)) == {(1, 0)}


def test_a_drained_card_ends_its_item_and_its_peer_takes_the_rest(desk):
    job_id = desk.submit(10)
    held = desk.take(desk.card)
    cards.drain(desk.database, desk.card)
    desk.later()
    assert {item.card_id for item in desk.items(job_id) if item.state == "waiting"} == {desk.peer}
    assert isinstance(desk.take(desk.card), Declined), "of what moved it may still have a message"
    assert desk.give(desk.card, held)
    desk.work()
    assert desk.ended(job_id)
    assert set(attempts(desk, job_id)) == {(1, 0)}


def test_a_job_with_no_card_left_waits_and_says_for_what(desk):
    job_id = desk.submit(3, to=[desk.card])
    for card in desk.cards:
        cards.drain(desk.database, card)
    desk.later()
    desk.work(desk.peer)
    assert {item.card_id for item in desk.items(job_id)} == {desk.card}
    with desk.database.read() as session:
        assert f"farm cards resume {desk.card}" in jobs.progress(session, job_id).message
    cards.resume(desk.database, desk.card)
    desk.later()
    desk.work()
    assert desk.ended(job_id)


def test_an_item_whose_worker_died_is_begun_again_when_its_lease_has_ended_and_not_before(desk):
    job_id = desk.submit(1, to=[desk.card])
    assert isinstance(desk.take(desk.card), Claim)
    cards.drain(desk.database, desk.peer)
    desk.later(settings().lease_s / 2, renewed=False)
    assert desk.take(desk.card) is None
    desk.later(settings().lease_s, renewed=False)
    desk.work(desk.card)
    assert desk.ended(job_id)
    assert attempts(desk, job_id) == [(2, 0)]


def test_an_item_that_ends_its_worker_every_time_ends_as_failed(desk):
    job_id = desk.submit(1)
    for _ in range(settings().max_attempts):
        assert any(isinstance(desk.take(card), Claim) for card in desk.cards)
        desk.later(3 * settings().lease_s, renewed=False)
    desk.work()
    assert desk.ended(job_id)
    assert [(item.state, item.reason) for item in desk.items(job_id)] == [
        ("failed", "attempts_exhausted")
    ]


def test_the_broker_is_wiped_in_the_middle_of_a_job(desk):
    job_id = desk.submit(8)
    held = desk.take(desk.card)
    desk.forget()
    desk.later()
    assert desk.give(desk.card, held)
    desk.work()
    assert desk.ended(job_id)
    assert set(attempts(desk, job_id)) == {(1, 0)}


def test_an_aggregation_that_got_lost_is_made_up_for(desk):
    job_id = desk.submit(2)
    for card in desk.cards:
        assert desk.give(card, desk.take(card))
    desk.forget()
    desk.later()
    desk.work()
    assert desk.ended(job_id)


def test_messages_too_many_begin_nothing_again(desk):
    job_id = desk.submit(4)
    for _ in range(3):
        publish_round(desk.database, job_id, 1, again=True)
    held = desk.take(desk.card)
    publish_round(desk.database, job_id, 1, again=True)
    desk.work(desk.peer)
    assert desk.give(desk.card, held)
    desk.work()
    assert desk.ended(job_id)
    assert set(attempts(desk, job_id)) == {(1, 0)}


def test_a_card_that_has_nothing_takes_half_of_what_waits_for_the_other(desk):
    job_id = desk.submit(9, to=[desk.card])
    held = desk.take(desk.card)
    desk.later()
    assert sum(item.card_id == desk.peer for item in desk.items(job_id)) == 4
    desk.work(desk.peer)
    assert desk.give(desk.card, held)
    desk.work()
    assert desk.ended(job_id)
    assert set(attempts(desk, job_id)) == {(1, 0)}


def test_a_group_that_was_put_off_is_published_in_front_when_its_cards_are_free(desk):
    first, second = desk.submit(1, cards=2), desk.submit(1, cards=2)
    held = desk.take(desk.card)
    assert held.cards == (desk.card, desk.peer)
    assert desk.take(desk.card).why is DeclineReason.PUT_OFF
    desk.submit(6)
    desk.later()
    assert desk.take(desk.peer).why is DeclineReason.RESERVED, (
        "its message stays with the worker, which asks again"
    )
    assert desk.give(desk.card, held)
    desk.later()
    for card in (desk.card, desk.peer):  # each begins an item on one card first
        assert desk.give(card, desk.take(card))
    desk.later()
    assert desk.take(desk.card).item_id == desk.items(second)[0].id, (
        "it is in front of the items that waited longer"
    )
    assert {item.state for item in desk.items(first)} == {"done"}


def test_a_group_whose_leading_worker_died_is_begun_again(desk):
    job_id = desk.submit(1, cards=2)
    assert desk.take(desk.card).cards
    desk.later(settings().lease_s + SOON_S, renewed=False)
    desk.later()
    desk.work()
    assert desk.ended(job_id)
    assert attempts(desk, job_id) == [(2, 0)]


# ---- the database's clock is set back

HOUR_S = 3600.0


def test_a_group_that_is_put_off_after_the_clock_was_set_back_is_published(desk):
    first, second = desk.submit(1, cards=2), desk.submit(1, cards=2)
    held = desk.take(desk.card)
    desk.clock.back(HOUR_S)
    assert desk.take(desk.card).why is DeclineReason.PUT_OFF
    assert desk.give(desk.card, held)
    desk.later()
    assert desk.take(desk.card).item_id == desk.items(second)[0].id
    assert [item.state for item in desk.items(first)] == ["done"]


def test_lost_messages_are_published_after_the_clock_was_set_back(desk):
    job_id = desk.submit(8)
    desk.clock.back(HOUR_S)
    desk.forget()
    desk.later()
    desk.work()
    assert desk.ended(job_id)


def test_a_card_that_died_before_the_clock_was_set_back_gives_its_items_to_its_peer(desk):
    job_id = desk.submit(6)
    held = desk.take(desk.card)
    desk.clock.back(HOUR_S)
    desk.later(seen=[1])  # from now on it waits for the dead card
    desk.later(seen=[1])
    desk.work(desk.peer)
    assert desk.ended(job_id)
    assert not desk.give(desk.card, held)


def test_an_item_of_a_dead_worker_is_begun_again_after_the_clock_was_set_back(desk):
    job_id = desk.submit(1, to=[desk.card])
    assert isinstance(desk.take(desk.card), Claim)
    cards.drain(desk.database, desk.peer)
    desk.clock.back(HOUR_S)
    desk.later(renewed=False)
    desk.later(settings().lease_s, renewed=False)
    desk.work(desk.card)
    assert desk.ended(job_id)
    assert attempts(desk, job_id) == [(2, 0)]


def test_a_publisher_that_died_before_the_clock_was_set_back_is_replaced(desk, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            queues, "_progressed", lambda *_, **__: False
        )  # it stores nothing after its first batch
        job_id = desk.submit(4)
    desk.forget()
    desk.clock.back(HOUR_S)
    desk.later()
    desk.work()
    assert desk.ended(job_id)
