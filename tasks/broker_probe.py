"""Does the broker accept the commands of Celery and the farm? A broker may answer PING and refuse
everything else.

The commands are sent in one transaction (MULTI, EXEC) on names that no other program uses. The
broker checks each of them before it executes any, so the probe finds every refused command. If one
is refused, the broker executes none; otherwise the transaction deletes what it wrote. No other
program sees a part of it."""

from __future__ import annotations

import contextlib
import shlex
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from farm.settings import Settings
from tasks.app import broker_client, broker_unreachable, check_broker


def check_broker_works(current: Settings) -> None:
    """Check that the broker answers and accepts all commands that the farm needs. Raises as
    `check_broker`, and `BrokerUnreachable` with the reason if the broker refuses commands."""
    check_broker(current)
    with broker_client(current) as client:
        refused = _refused(client)
    if refused:
        first = next(iter(refused.values()))
        denied = [
            name
            for name, error in refused.items()
            if isinstance(error, redis.exceptions.NoPermissionError)
        ]
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
        send("SCRIPT", "EXISTS", name)
        send("PSUBSCRIBE", f"/0.celery.pidbox.{name}")
    finally:
        with contextlib.suppress(redis.RedisError, OSError):
            connection.disconnect()
        client.connection_pool.release(connection)
    return refused


def _transaction(name: str) -> Iterator[list[str]]:
    """Yield the commands that the farm needs, with arguments for a test. ``name`` is a part of all
    written names.
    """
    for line in Path(__file__).with_name("broker_commands.txt").read_text("utf-8").splitlines():
        if command := shlex.split(line.format(name=name), comments=True):
            yield command
