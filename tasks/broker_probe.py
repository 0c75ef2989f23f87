"""Does the broker accept the commands of Celery and the farm? A broker may answer PING and refuse everything else.

The commands are sent in one transaction (MULTI, EXEC) on names that no other program uses. The broker checks each of
them before it executes any, so the probe finds every refused command. If one is refused, the broker executes none;
otherwise the transaction deletes what it wrote. No other program sees a part of it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import redis

from farm.settings import Settings
from tasks.app import broker_client, broker_unreachable, check_broker


def check_broker_works(current: Settings) -> None:
    """Check that the broker answers and accepts all commands that the farm needs. Raises as `check_broker`, and
    `BrokerUnreachable` with the reason if the broker refuses commands."""
    check_broker(current)
    with broker_client(current) as client:
        refused = _refused(client)
    if refused:
        first = next(iter(refused.values()))
        denied = [name for name, one in refused.items() if isinstance(one, redis.exceptions.NoPermissionError)]
        raise broker_unreachable(current.broker_url, first, about=", ".join(denied)) from first


def _refused(client: Any) -> dict[str, redis.ResponseError]:
    """Return name -> error of each command that the broker refuses."""
    refused: dict[str, redis.ResponseError] = {}

    def send(*command: Any) -> None:
        connection.send_command(*command)
        try:
            connection.read_response(push_request=True)
        except redis.ResponseError as error:
            if "NOPERM" in str(error):  # EXEC has a general error with this text
                error = redis.exceptions.NoPermissionError(str(error))
            refused.setdefault(str(command[0]), error)

    connection = client.connection_pool.get_connection()
    try:
        name = uuid.uuid4().hex
        send("WATCH", f"unacked.{name}")
        send("MULTI")
        if "MULTI" in refused:
            return refused  # the broker would execute the next commands at once
        for command in _transaction(name):
            send(*command)
        send("DISCARD" if refused else "EXEC")
        # These are not allowed in a transaction.
        for command in (("SCRIPT", "EXISTS", name), ("PSUBSCRIBE", f"/0.celery.pidbox.{name}")):
            send(*command)
    finally:
        with contextlib.suppress(redis.RedisError, OSError):
            connection.disconnect()
        client.connection_pool.release(connection)
    return refused


def _transaction(name: str) -> Iterator[tuple[Any, ...]]:
    """Yield the commands of kombu's transport, Celery's result backend and `queue_depths`, with arguments for a test.

    `name` is a part of all names that are written. The others are those of kombu: they show whether the user's rights
    include them, and nothing in them changes.
    """
    queue, key = f"card.{name}", f"celery-taskset-meta-{name}"
    # a queue: publish, count, receive, return a message
    yield from (("LPUSH", queue, ""), ("RPUSH", queue, ""), ("LLEN", queue), ("BRPOP", queue, 1), ("RPOP", queue))
    # the bindings of queues, and messages that a worker has not acknowledged
    yield from (("SADD", f"_kombu.binding.{name}", ""), ("SREM", f"_kombu.binding.{name}", ""))
    yield from (("SMEMBERS", f"_kombu.binding.{name}"), ("SISMEMBER", f"_kombu.binding.{name}", ""))
    yield from (("HSET", f"unacked.{name}", name, ""), ("HGET", "unacked", name), ("HDEL", "unacked", name))
    yield from (("ZADD", f"unacked_index.{name}", 0, name), ("ZREM", "unacked_index", name))
    yield from (("ZRANGE", "unacked_index", 0, -1), ("ZRANGEBYSCORE", "unacked_index", 0, -1))
    # the counters of chords, locks, scripts
    yield from (("SET", key, 0, "EX", 10, "NX"), ("GET", key), ("INCR", key), ("EXPIRE", key, 10))
    yield from (("ZCOUNT", f"{key}.j", 0, 0), ("TIME",), ("EVALSHA", "0" * 40, 0))
    # events and remote commands
    yield ("PUBLISH", f"/0.celery.pidbox.{name}", "")
    yield ("DEL", queue, key, f"_kombu.binding.{name}", f"unacked.{name}", f"unacked_index.{name}")
