"""Messages are looked at before Celery sees them: what no publisher of the farm would send is dropped, and said so.

Without this a message with a broken body ends the worker that takes it, goes back to the queue when the worker dies,
and ends the next one: one line in the broker would stop a card for good. Nothing here makes a message trusted. It may
only name a task of the farm and carry ids; what the ids mean is looked up in the database.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import kombu
import kombu.transport
from celery.app.amqp import AMQP
from kombu.transport import redis

from farm.masking import masked

log = logging.getLogger("farm.screening")

#: What a body or its envelope can raise while it is taken apart. Not OSError or a client's error: the broker is away.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

MAXIMUM_ID = 2**63 - 1


def _item(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAXIMUM_ID


def _round(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9A-Za-z_-]{1,32}/[0-9]{1,9}", value) is not None


def carries_tasks(queue: str) -> bool:
    """Not so 'control@gpu1.celery.pidbox', by which a worker is asked how it is."""
    return queue == "control" or queue.startswith("card.")


#: The tasks that a message may name, and the one argument that each takes.
ARGUMENTS: Mapping[str, Callable[[Any], bool]] = {"measure": _item, "aggregate": _round}

_TEXTS = ("id", "root_id", "parent_id", "group", "origin", "argsrepr", "kwargsrepr", "shadow", "eta", "expires")


def refusal(message: Any) -> str:
    """Why a message is not one of the farm's, '' when it is. Never raises."""
    try:
        return _refusal(message)
    except MALFORMED as error:
        return f"{type(error).__name__}: {error}"


def _refusal(message: Any) -> str:
    headers, properties = message["headers"], message["properties"]
    if (task := headers["task"]) not in ARGUMENTS:
        return "it names no task of the farm"
    if message["content-type"] != "application/json" or message["content-encoding"] != "utf-8":
        return "it is not JSON"
    for name in _TEXTS:
        if not isinstance(headers.get(name), str | None):
            return f"its header '{name}' is no text"
    if not headers["id"] or properties["correlation_id"] != headers["id"]:
        return "it has no id of its own"
    if type(headers.get("retries", 0)) is not int or not _time_limits(headers.get("timelimit")):
        return "its retries or time limits are no numbers"
    information = properties["delivery_info"]
    if not all(isinstance(information[name], str) for name in ("exchange", "routing_key")):
        return "it does not say where it was sent"
    if not isinstance(properties["delivery_tag"], str) or not isinstance(properties.get("reply_to"), str | None):
        return "it cannot be acknowledged"
    if properties.get("body_encoding") != "base64" or type(properties.get("priority", 0)) not in (int, type(None)):
        return "its encoding or priority is not the farm's"
    arguments, keywords, options = json.loads(base64.b64decode(message["body"], validate=True))
    if keywords != {} or len(arguments) != 1 or not ARGUMENTS[task](arguments[0]):
        return "it carries something other than an id"
    if not isinstance(options, dict) or not all(_harmless(value) for value in options.values()):
        return "what is to follow it is no task of the farm"
    return ""


def _time_limits(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(type(limit) in (int, float, type(None)) for limit in value)
    )


def _harmless(value: Any) -> bool:
    """Callbacks, errbacks and the body of a chord: signatures of the farm's own tasks, however deep."""
    if value is None:
        return True
    if isinstance(value, list):
        return all(_harmless(entry) for entry in value)
    if not isinstance(value, dict) or value.get("task") not in ARGUMENTS:
        return False
    options = value.get("options") or {}
    return all(_harmless(options.get(name)) for name in ("link", "link_error", "chord"))


class Connection(kombu.Connection):  # type: ignore[misc]
    """Tells of itself without passwords: workers answer with this when Flower asks them."""

    def info(self) -> dict[str, Any]:
        # A socket's URL keeps its password in the host's place. The password itself stays: `as_uri` looks it up to mask it
        # (and Flower to connect), and Celery takes it out before a worker tells.
        return {name: value if name == "password" else _masked(value) for name, value in super().info().items()}


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list | tuple):
        return [_masked(entry) for entry in value]
    return value


class Amqp(AMQP):  # type: ignore[misc]
    Connection = Connection


class Channel(redis.Channel):  # type: ignore[misc]
    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except MALFORMED as error:  # not even JSON: it has left the queue, and nothing knows of it
            log.warning("Dropped what is no message: %.200s", f"{type(error).__name__}: {error}")
            return True


class Transport(redis.Transport):  # type: ignore[misc]
    """kombu's Redis, with a look at every task message."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        # Events and remote control (Flower, `farm doctor`) have queues and checks of their own.
        if carries_tasks(queue) and (reason := refusal(message)):
            log.warning("Dropped a message from %s: %.200s", queue, reason)
            return
        try:
            super()._deliver(message, queue)
        except MALFORMED:
            log.warning("Dropped a message from %s that Celery could not take", queue, exc_info=True)
            self._forget(message["properties"]["delivery_tag"])

    def _forget(self, tag: str) -> None:
        """Acknowledge it, or it would come back as soon as this worker ends."""
        for channel in self.channels:
            if tag in channel.qos._delivered:
                channel.basic_reject(tag, requeue=False)


def install() -> None:
    """From now on every connection of this process to a Redis is made by `Transport`."""
    for scheme in ("redis", "rediss"):
        kombu.transport.TRANSPORT_ALIASES[scheme] = "tasks.screening:Transport"
