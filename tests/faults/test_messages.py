"""The broker dies, forgets or repeats; publishers die half-way: the database brings every job to
its end.
"""

from __future__ import annotations

import base64
import json
import time

import psutil
import pytest
import redis

from farm.settings import Settings
from tasks.app import app, configure, hard_time_limit_s
from tasks.queues import PASS_KEY, reserves_pass
from tests import slow


def client_of(hurt):
    return redis.Redis.from_url(hurt.broker.redis_url)


def test_the_broker_is_wiped_in_the_middle_of_a_job(hurt):
    job_id = hurt.submit(["slow"] * 8, 0.4)
    hurt.done(job_id)
    with client_of(hurt) as client:
        client.flushall()
    assert hurt.settled(job_id) == {"done": 8}


def test_the_broker_is_killed_and_restarted_three_times(hurt):
    job_id = hurt.submit(["slow"] * 8, 0.5)
    for number in range(3):
        hurt.done(job_id, number + 1)
        hurt.broker.kill()
        time.sleep(0.5)
        hurt.broker.start()
    assert hurt.settled(job_id) == {"done": 8}


@pytest.mark.parametrize("refusing", ["without its replicas", "refusing a command"])
def test_a_broker_that_refuses_commands_ends_no_measurement_and_is_told_once(hurt, refusing):
    job_id = hurt.submit(["slow"] * 4, 1.0)
    item = hurt.in_work(job_id)
    with client_of(hurt) as client:
        if refusing == "without its replicas":
            client.config_set("min-replicas-to-write", 1)
        else:
            client.execute_command("ACL", "SETUSER", "default", "-brpop")
        try:
            hurt.farm.wait_for(lambda: hurt.said().count("gets no messages: The broker") == 2)
            time.sleep(8)  # a worker tries again after 5 s at most, the reconciler after 1 s
            said = hurt.said()
        finally:
            client.config_set("min-replicas-to-write", 0)
            client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert hurt.settled(job_id) == {"done": 4}
    (begun,) = [one for one in hurt.farm.items(job_id) if one.id == item.id]
    assert (begun.attempts, begun.repeated) == (1, 0), "its measurement went on"
    lines = [
        line.partition("  ")[2].partition(": ")[0]
        for line in said.splitlines()
        if "The broker" in line
    ]
    assert len(lines) == len(set(lines)), said
    assert {line.partition("@")[0] for line in lines} >= {"card-" + item.card_id, "control"}
    # Celery reports once, with three tracebacks, that it could not store the result of the item in
    # work.
    assert said.count("Traceback (most recent call last)") <= (
        3 if refusing == "without its replicas" else 0
    )
    hurt.farm.wait_for(lambda: hurt.said().count("gets no messages: it works again") == 2)


def test_a_message_delivered_again_is_dropped(hurt):
    """As after the visibility timeout of an item that took longer, or from a publisher in doubt."""
    job_id = hurt.submit(["slow"] * 3, 1.0)
    hurt.in_work(job_id)
    with client_of(hurt) as client:
        repeated = [json.loads(entry)[0] for entry in client.hvals("unacked")]
        assert repeated
        (queue,) = [key for key in client.keys("card.*")]
        for message in repeated:
            client.rpush(queue, json.dumps(message))
        for waiting in client.lrange(queue, 0, -1):
            client.lpush(queue, waiting)
    assert hurt.settled(job_id) == {"done": 3}
    assert all((item.attempts, item.repeated) == (1, 0) for item in hurt.farm.items(job_id))


@slow.FAULT
def test_the_broker_delivers_a_running_item_again(start):
    """An item that outlasts the visibility timeout: the broker gives its message away once more
    while it runs.
    """
    hurt = start(FARM_VISIBILITY_TIMEOUT_S="1")
    job_id = hurt.submit(["slow"] * 2, 6.0)
    item = hurt.in_work(job_id)
    with client_of(hurt) as client:
        hurt.farm.wait_for(lambda: item.id in redelivered(client))
    (running,) = [one for one in hurt.farm.items(job_id) if one.id == item.id]
    assert (running.state, running.attempts) == ("claimed", 1), (
        "the copy waits while the first is at work"
    )
    assert hurt.settled(job_id) == {"done": 2}
    assert all((one.attempts, one.repeated) == (1, 0) for one in hurt.farm.items(job_id))


def redelivered(client):
    """The items of whose messages the broker took a second copy out of its list of the
    unfinished.
    """
    waiting = [
        json.loads(message)
        for key in client.keys("card.*")
        for message in client.lrange(key, 0, -1)
    ]
    return {
        json.loads(base64.b64decode(message["body"]))[0][0]
        for message in waiting
        if message["headers"].get("redelivered")
    }


def test_a_running_item_never_looks_abandoned():
    current = Settings(broker_url="redis://nowhere", item_timeout_s=1000)
    try:
        configure(current)
        assert (
            app.conf.broker_transport_options["visibility_timeout"] >= 4 * app.conf.task_time_limit
        )
        assert app.conf.task_time_limit == hard_time_limit_s(current) > 1000
    finally:
        configure(Settings())


def test_a_publisher_killed_half_way_is_continued(hurt):
    job_id = hurt.submit([""] * 9, publish=False)
    with hurt.farm.here():  # no reconciler publishes it first, however slowly the publisher starts
        reserves_pass(60, longer=True)
    assert hurt.farm.publish_and_die(job_id).wait() == -9
    with client_of(hurt) as client:
        client.delete(PASS_KEY)
    assert hurt.settled(job_id) == {"done": 9}


@slow.SOAK
def test_a_broker_away_for_a_minute(start):
    hurt = start()
    job_id = hurt.submit(["slow"] * 4, 1.0)
    hurt.done(job_id)
    hurt.broker.kill()
    time.sleep(60)
    hurt.broker.start()
    assert hurt.settled(job_id) == {"done": 4}


def test_the_broker_keeps_nothing_of_what_is_done(hurt):
    """It refuses rather than forgets when it is full: results that nobody reads would stop the farm
    in the end.
    """
    job_id = hurt.submit(["", "oom", "crash", *[""] * 20])
    assert hurt.settled(job_id) == {"done": 21, "failed": 2}
    with client_of(hurt) as client:
        assert client.keys("celery-task-meta-*") == []
        counted = {key: client.ttl(key) for key in client.keys("celery-taskset-meta-*")}
        # The chord's body was published, or this mark would not be there.
        assert [client.get(key) for key in counted] == [b"done"]
    assert all(0 < left_s <= app.conf.result_chord_expires for left_s in counted.values())


def test_a_chord_that_never_completes_is_forgotten(hurt):
    """A part that moved to another card, or whose message was wiped, never comes."""
    job_id = hurt.submit(["slow"] * 6, 0.4)
    hurt.done(job_id)
    with client_of(hurt) as client:
        for queue in client.keys("card.*"):
            client.delete(queue)
        assert hurt.settled(job_id) == {"done": 6}
        counted = {key: client.ttl(key) for key in client.keys("celery-taskset-meta-*")}
    assert counted
    assert all(0 < left_s <= app.conf.result_chord_expires for left_s in counted.values())


@slow.FAULT
def test_the_broker_stands_still_while_an_item_ends(hurt):
    """Longer than the deadlines of two tries, so that the message of the item cannot be
    acknowledged.
    """
    job_id = hurt.submit(["slow"] * 4, 2.0)
    hurt.in_work(job_id)
    process = psutil.Process(hurt.broker.pid)
    process.suspend()
    time.sleep(20)
    process.resume()
    assert hurt.settled(job_id) == {"done": 4}
    assert all((item.attempts, item.repeated) == (1, 0) for item in hurt.farm.items(job_id))
