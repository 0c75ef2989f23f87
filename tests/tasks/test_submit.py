"""Submitting, where it is interrupted."""

from collections import Counter

import pytest
import redis
from sqlmodel import col, select

from farm.errors import BrokerUnreachable
from farm.jobs import cards, items, leases
from farm.jobs.items import Claim, DeclineReason, FollowUp
from farm.operators import sweep_builder as sweeps
from farm.requests.resolved import ResolvedRequest
from farm.settings import settings
from farm.store.tables import CardRow, Item, Job, Round
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request, Sweep
from tasks import queues, submissions
from tasks.app import configure
from tasks.message_filter import CONTROL_QUEUE
from tasks.queues import follow_up, publish_items, queue_depths
from tests.farms import store_operators
from tests.planned import claim, complete, items_of, plan, register
from tests.statements import values_at_once


def test_ctrl_c_while_a_job_is_published_leaves_none_open(database, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(queues, "publish_round", interrupted)
    request = Request(
        sweep=Sweep("Linear", {"in_features": (16,), "out_features": (16,)}, "a test"),
        protocol=Protocol(launch="eager"),
        stopping=Stopping(),
    )
    with pytest.raises(KeyboardInterrupt):
        submissions.submit(database, ResolvedRequest.of(request, register(database, 0)))
    with database.read() as session:
        assert [job.state for job in session.exec(select(Job))] == ["cancelled"]
        assert [item.state for item in session.exec(select(Item))] == ["cancelled"]


def test_ctrl_c_after_a_part_of_a_sweep_is_published_cancels_its_items(database, monkeypatch):
    """The items are cancelled as well, so a worker that gets their messages begins none."""
    published = []

    def interrupted_later(database, job_id, number):
        if published:
            raise KeyboardInterrupt
        with database.read() as session:
            published.extend(session.exec(select(Item.id)))

    monkeypatch.setattr(queues, "publish_round", interrupted_later)
    request = Request(
        sweep=Sweep("Linear", {"in_features": (16,), "out_features": (16, 32)}, "a test"),
        protocol=Protocol(launch="eager"),
        stopping=Stopping(),
    )
    with pytest.raises(KeyboardInterrupt):
        submissions.submit(database, ResolvedRequest.of(request, register(database, 0)))
    assert published
    with database.read() as session:
        states = session.exec(select(Item.state).where(col(Item.id).in_(published))).all()
    assert set(states) == {"cancelled"}


@pytest.fixture
def at_broker(broker, monkeypatch):
    """This process publishes to a real broker, and an item may be begun twice."""
    with monkeypatch.context() as patched:
        patched.setenv("FARM_BROKER_URL", broker.url)
        patched.setenv("FARM_MAX_ATTEMPTS", "2")
        settings.cache_clear()
        configure(settings())
        yield broker
    settings.cache_clear()
    configure(settings())


def test_resuming_puts_right_what_the_reconciler_would_and_publishes_the_rest(
    any_database, at_broker
):
    drained, peer = register(any_database, 0, 1)
    shared, *others = store_operators(any_database, [""] * 5)
    elsewhere = plan(any_database, [peer], operators=[shared])
    assert isinstance(claim(any_database, items_of(any_database, elsewhere)[0], "elsewhere"), Claim)
    job_id = plan(any_database, [drained], operators=[shared, *others])
    deferred, exhausted, let_go, held, _ = items_of(any_database, job_id)
    assert claim(any_database, deferred).why is DeclineReason.DEFERRED
    for holder in ("first", "second"):
        claim(any_database, exhausted, holder, lease_s=-1000)
    claim(any_database, let_go, lease_s=-1)
    still = claim(any_database, held)
    leases.hand_back(any_database, "elsewhere")
    cards.drain(any_database, drained)
    assert submissions.resume(any_database, job_id) == 3
    now = items_of(any_database, job_id)
    assert [item.state for item in now] == ["waiting", "failed", "waiting", "claimed", "waiting"]
    assert [item.card_id for item in now] == [peer, drained, peer, drained, peer]
    with redis.Redis.from_url(at_broker.redis_url) as client:
        assert Counter({card: client.llen(f"card.{card}") for card in (drained, peer)}) == {
            drained: 0,
            peer: 3,
        }
    assert complete(any_database, still, drained).accepted


def test_a_full_broker_is_said_to_be_full_and_its_job_waits_for_room(any_database, at_broker):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=2)
    with redis.Redis.from_url(at_broker.redis_url) as client:
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(BrokerUnreachable, match="is full") as caught:
                submissions.resume(any_database, job_id)
        finally:
            client.config_set("maxmemory", "0")
        assert "maxmemory" in caught.value.next_step
        assert submissions.resume(any_database, job_id) == 2
        assert client.llen(f"card.{card}") == 2


def test_the_first_items_of_a_sweep_are_published_while_the_others_are_planned(
    any_database, at_broker, monkeypatch
):
    monkeypatch.setattr(sweeps, "FIRST_BATCH", 2)
    monkeypatch.setattr(sweeps, "BATCH", 3)
    (card,) = register(any_database, 0)
    request = Request(
        sweep=Sweep("Linear", {"in_features": tuple(range(1, 11)), "out_features": (4,)}, "ten"),
        protocol=Protocol(launch="eager"),
    )
    said = []
    with redis.Redis.from_url(at_broker.redis_url) as client:

        def told(doing, done, of):
            said.append((doing, done, of, client.llen(f"card.{card}")))

        submissions.submit(any_database, ResolvedRequest.of(request, [card]), progress=told)
        assert client.llen(f"card.{card}") == 10
    assert said == [
        ("Planning ten", 2, 10, 0),
        ("Planning ten", 5, 10, 2),
        ("Planning ten", 8, 10, 5),
        ("Planning ten", 10, 10, 8),
        ("Publishing ten", 0, 0, 10),
    ]
    with any_database.read() as session:
        its_round = session.exec(select(Round)).one()
    assert its_round.planned_at_s
    assert its_round.published_at_s
    assert its_round.publisher is None


def test_resuming_publishes_also_what_a_dead_worker_held(any_database, at_broker):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=2)
    late = claim(any_database, items_of(any_database, job_id)[0], lease_s=-1)
    assert submissions.resume(any_database, job_id) == 2
    assert complete(any_database, late, card).accepted, "nobody else has taken it"


def own(database, job_id, farm):
    with database.write() as session:
        job = session.get_one(Job, job_id)
        job.farm = farm
        session.add(job)


def test_who_resumes_a_job_whose_own_farm_is_gone_looks_after_it(any_database, at_broker):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card])
    own(any_database, job_id, "embedded:here:1:abc")
    with any_database.write() as session:
        row = session.get_one(CardRow, card)
        row.worker = cards.holder_name(card, "here", 7, "ab", "embedded:here:1:abc")
        session.add(row)
    assert submissions.resume(any_database, job_id) == 0
    with any_database.write() as session:
        assert session.get_one(Job, job_id).farm == "embedded:here:1:abc", "its farm is there"
        row = session.get_one(CardRow, card)
        row.last_seen_at_s -= 1000
        session.add(row)
    assert submissions.resume(any_database, job_id) == 1
    with any_database.read() as session:
        assert session.get_one(Job, job_id).farm == ""


def test_what_another_farm_waits_for_is_left_to_its_own_broker(any_database, at_broker):
    (card,) = register(any_database, 0)
    operators = store_operators(any_database, [""])
    ours, theirs = (plan(any_database, [card], operators=operators) for _ in range(2))
    own(any_database, theirs, "embedded:here:1:abc")
    held = claim(any_database, items_of(any_database, ours)[0])
    claim(any_database, items_of(any_database, theirs)[0])
    closed = items.fail(any_database, held, "raised", "no")
    assert closed.woken
    follow_up(any_database, closed)
    with redis.Redis.from_url(at_broker.redis_url) as client:
        assert client.llen(f"card.{card}") == 0
        assert client.llen(CONTROL_QUEUE) == 1
    closed = complete(any_database, claim(any_database, items_of(any_database, theirs)[0]), card)
    follow_up(any_database, closed)
    with redis.Redis.from_url(at_broker.redis_url) as client:
        assert client.llen(CONTROL_QUEUE) == 1


def test_what_wakes_at_once_is_published_with_few_values_in_a_statement(any_database, at_broker):
    (item,) = items_of(any_database, plan(any_database, register(any_database, 0)))
    many = (item.id, *range(10_000, 11_200))
    with values_at_once(any_database) as numbers:
        follow_up(
            any_database,
            FollowUp(tuple((f"job {number}", 1) for number in range(1200)), many),
        )
        publish_items(any_database, many)
    assert max(numbers) < 600
    with redis.Redis.from_url(at_broker.redis_url) as client:
        assert client.llen(f"card.{item.card_id}") == 2


def test_all_queues_are_counted_over_one_connection(at_broker, broker):
    with redis.Redis.from_url(broker.redis_url) as client:
        for number in range(20):
            client.rpush(f"card.SIM-{number}", *["message"] * (number + 1))
        before = client.info("stats")["total_connections_received"]
        depths = queue_depths([f"SIM-{number}" for number in range(21)])
        opened = client.info("stats")["total_connections_received"] - before
    assert depths == {f"SIM-{number}": number + 1 for number in range(20)} | {"SIM-20": 0}
    assert opened == 1
    assert queue_depths([]) == {}
