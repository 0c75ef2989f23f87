"""Whoever can write to the broker can waste a worker's time, and nothing else."""

from __future__ import annotations

import json
import random

import pytest
import redis

from tasks.message_filter import FilteringTransport, refusal
from tests import slow
from tests.security import mangled


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [1_100, pytest.param(11_000, marks=slow.ALIKE)])
def test_mangled_messages_execute_nothing_and_stop_no_worker(two_cards, tmp_path, number):
    trap = tmp_path / "trap"
    farm, broker = two_cards.whole()
    log_begins = farm.log.stat().st_size
    with redis.Redis.from_url(broker.redis_url) as client:
        queues = [*(f"card.{card.id}" for card in farm.alive()), "control"]
        sent = mangled.garbage(number // 11, seed=2)
        for seed, queue in enumerate(queues):
            sent += mangled.messages(queue, str(trap), number // 11 * 10 // 3 + 1, seed=seed)
        random.Random(3).shuffle(sent)
        for first, queue in enumerate(queues):
            client.rpush(queue, *sent[first :: len(queues)])
        farm.wait_for(lambda: not any(client.llen(queue) for queue in queues), timeout_s=240)
        # Nor does anything that is published to all of them, or that Celery knows and the farm
        # never says.
        commands = [
            json.dumps(mangled.command(*words)).encode()
            for words in mangled.HARMFUL_COMMANDS.items()
        ]
        for raw in (*mangled.NO_COMMANDS, *commands):
            assert client.publish("/0.celery.pidbox", raw) == 3
        # After all that the farm still measures, on the same processes.
        job_id = farm.submit(["", ""])
        for item in farm.items(job_id):
            for headers in mangled.HARMFUL_HEADERS:
                message = mangled.good(queue := f"card.{item.card_id}", item.id)
                message["headers"].update(headers)
                client.rpush(queue, json.dumps(message))
        farm.wait_for(lambda: farm.ended(job_id))
        assert [item.state for item in farm.items(job_id)] == ["done", "done"]
        farm.wait_for(
            lambda: not client.hlen("unacked") and not any(client.llen(queue) for queue in queues)
        )
    log = farm.log.read_bytes()[log_begins:].decode()
    assert len(sent) >= number
    assert log.count("Dropped ") > 0.8 * number
    assert "ended with" not in log, "a worker died"
    assert not trap.exists(), "something was executed"


def test_messages_of_the_farm_pass():
    for task, argument in (("measure", 1), ("measure", 2**40), ("aggregate", "bj9myz7v/1")):
        queues = {"measure": "card.x", "aggregate": "control"}
        assert refusal(mangled.good(queues[task], argument, task), queues.pop(task)) == ""
        (other,) = queues.values()
        assert (
            refusal(mangled.good(other, argument, task), other)
            == "its task belongs to another queue"
        )


@pytest.mark.parametrize(
    ("task", "argument"),
    [
        ("measure", True),
        ("measure", "1"),
        ("measure", 2**63),
        ("measure", 0),
        ("aggregate", "../x/1"),
        ("chain", 1),
    ],
)
def test_a_message_that_carries_no_id_is_dropped(task, argument):
    queue = "card.x" if task == "measure" else "control"
    assert refusal(mangled.good(queue, argument, task), queue)


class Queue:
    """A consumer that keeps what it is given."""

    def __init__(self):
        self.taken = []

    def transport(self, name):
        transport = FilteringTransport.__new__(FilteringTransport)
        transport._callbacks = {name: self.taken.append}
        transport.channels = []
        return transport


@pytest.mark.parametrize(
    ("queue", "task", "argument"),
    [("control", "measure", 1), ("card.x", "aggregate", "bj9myz7v/1")],
)
def test_a_message_in_the_queue_of_another_task_is_dropped(queue, task, argument, caplog):
    consumer = Queue()
    consumer.transport(queue)._deliver(mangled.good("card.x", argument, task), queue)
    assert consumer.taken == []
    assert f"Dropped a message from queue {queue}: " in caplog.text


@pytest.mark.parametrize("headers", mangled.HARMFUL_HEADERS)
def test_a_header_that_no_message_of_the_farm_has_is_taken_out(headers):
    queue, message = Queue(), mangled.good("card.x", 1)
    ours = {
        name: value
        for name, value in message["headers"].items()
        if name not in headers and name != "timelimit"
    }
    message["headers"].update(headers)
    queue.transport("card.x")._deliver(message, "card.x")
    assert [taken["headers"] for taken in queue.taken] == [ours]


@pytest.mark.parametrize(
    "headers",
    [
        {"id": "a\n2026-01-01 INFO farm  forged"},
        {"retries": "1"},
        {"group_index": 10**400},
        {"shadow": []},
    ],
)
def test_a_message_with_a_header_of_another_kind_is_dropped(headers):
    queue, message = Queue(), mangled.good("card.x", 1)
    message["headers"].update(headers)
    message["properties"]["correlation_id"] = message["headers"]["id"]
    queue.transport("card.x")._deliver(message, "card.x")
    assert queue.taken == []


@pytest.mark.parametrize("message", [1, "x", None, [], {}, {"properties": 1}])
@pytest.mark.parametrize("queue", ["card@gpu1.celery.pidbox", "elsewhere", "card.x"])
def test_what_is_no_message_at_all_does_not_get_past_the_guard(message, queue, caplog):
    def take(message):
        raise TypeError(message["properties"])

    transport = Queue().transport(queue)
    transport._callbacks[queue] = take
    transport._deliver(message, queue)
    assert "Dropped a message" in caplog.text


def test_commands_of_flower_and_of_the_doctor_pass_and_what_is_none_does_not():
    queue = "card@gpu1.celery.pidbox"
    asked = {"ticket": "x", "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "x"}}
    assert refusal(mangled.command("ping", destination=["card@gpu1"], **asked), queue) == ""
    assert (
        refusal(
            mangled.command("enable_events", destination=None, pattern=None, matcher=None), queue
        )
        == ""
    )
    for wrong in (
        mangled.command(["ping"]),
        mangled.command("ping", [1]),
        mangled.command("ping", destination="card@gpu1"),
        mangled.command("ping", pattern="(a+)+$", matcher="pcre"),
        mangled.command("ping", reply_to="x"),
        mangled.command("ping") | {"headers": {"clock": "late"}},
        mangled.command("ping") | {"body": "%"},
    ):
        assert refusal(wrong, queue)


def test_a_worker_refuses_what_would_keep_it_from_measuring_and_knows_all_that_it_allows():
    from celery.worker.control import Panel

    from tasks.worker import ALLOWED

    assert set(Panel.data) >= ALLOWED
    for name, arguments in mangled.HARMFUL_COMMANDS.items():
        assert Panel.data[name](None, **arguments)["error"].startswith("refused"), name


def test_screening_never_raises():
    for raw in mangled.messages("card.x", "/nowhere/trap", 2_000, seed=9):
        assert isinstance(refusal(json.loads(raw), "card.x"), str)
    for value in (None, 1, "x", [], {}, {"headers": None}, {"headers": {"task": []}}):
        assert refusal(value, "card.x")
