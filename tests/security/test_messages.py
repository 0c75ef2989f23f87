"""Whoever can write to the broker can waste a worker's time, and nothing else."""

from __future__ import annotations

import random

import pytest
import redis

from tasks.screening import refusal
from tests.farms import running
from tests.security import mangled

MESSAGES, GARBAGE = 10_000, 1_000


@pytest.mark.serial
@pytest.mark.timeout(300)
def test_ten_thousand_mangled_messages_execute_nothing_and_stop_no_worker(tmp_path, broker, sqlite_url):
    trap = tmp_path / "trap"
    with (
        redis.Redis.from_url(broker.redis_url) as client,
        running(tmp_path, broker.url, sqlite_url, cards=2, FARM_HOST="gpu1") as farm,
    ):
        queues = ["card.SIM-gpu1-0", "card.SIM-gpu1-1", "control"]
        sent = mangled.garbage(GARBAGE, seed=2)
        for number, queue in enumerate(queues):
            sent += mangled.messages(queue, str(trap), MESSAGES // 3 + 1, seed=number)
        random.Random(3).shuffle(sent)
        for number, queue in enumerate(queues):
            client.rpush(queue, *sent[number :: len(queues)])
        farm.wait_for(lambda: not any(client.llen(queue) for queue in queues), timeout_s=240)
        # After all that the farm still measures, on the same processes.
        job_id = farm.submit(["", ""])
        farm.wait_for(lambda: farm.ended(job_id))
        assert [item.state for item in farm.items(job_id)] == ["done", "done"]
        assert client.hlen("unacked") == 0, "what was dropped does not come back"
    log = farm.log.read_text()
    assert len(sent) > 10_000
    assert log.count("Dropped ") > 9_000
    assert "ended with" not in log, "a worker died"
    assert not trap.exists(), "something was executed"


def test_messages_of_the_farm_pass():
    for task, argument in (("measure", 1), ("measure", 2**40), ("aggregate", "bj9myz7v/1")):
        assert refusal(mangled.good("card.x", argument, task)) == ""


@pytest.mark.parametrize(
    ("task", "argument"),
    [("measure", True), ("measure", "1"), ("measure", 2**63), ("measure", 0), ("aggregate", "../x/1"), ("chain", 1)],
)
def test_a_message_that_carries_no_id_is_dropped(task, argument):
    assert refusal(mangled.good("card.x", argument, task))


def test_screening_never_raises():
    import json

    for raw in mangled.messages("card.x", "/nowhere/trap", 2_000, seed=9):
        assert isinstance(refusal(json.loads(raw)), str)
    for value in (None, 1, "x", [], {}, {"headers": None}, {"headers": {"task": []}}):
        assert refusal(value)
