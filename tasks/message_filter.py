"""Messages are looked at before Celery sees them: what no publisher of the farm would send is dropped, and said so.

Without this a message with a broken body ends the worker that takes it, goes back to the queue when the worker dies,
and ends the next one: one line in the broker would stop a card for good. So would a header that Celery stumbles over: the
worker lives, and never takes a message again. Of a message's headers only those pass that ours have. Nothing here makes a
message trusted. It may only name a task of the farm and carry ids; what the ids mean is looked up in the database.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import kombu
import kombu.transport
from celery.app.amqp import AMQP
from kombu.transport import redis

from farm.types.format import masked

log = logging.getLogger("farm.screening")

#: What a body or its envelope can raise while it is taken apart. Not OSError or a client's error: the broker is away.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

MAXIMUM_ID = 2**63 - 1
MAXIMUM_COUNT = 2**31


def _item(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAXIMUM_ID


def _round(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9A-Za-z_-]{1,32}/[0-9]{1,9}", value) is not None


def carries_tasks(queue: str) -> bool:
    return queue == "control" or queue.startswith("card.")


def carries_commands(queue: str) -> bool:
    """Such as 'control@gpu1.celery.pidbox', by which a worker is asked how it is (`tasks.worker`)."""
    return queue.endswith(".celery.pidbox") and "@" in queue


#: The tasks that a message may name, and the one argument that each takes.
ARGUMENTS: Mapping[str, Callable[[Any], bool]] = {"measure": _item, "aggregate": _round}

_TEXTS = ("lang", "task", "id", "root_id", "parent_id", "group", "origin", "argsrepr", "kwargsrepr", "shadow")
_NUMBERS = ("retries", "group_index", "replaced_task_nesting")
_FLAGS = ("ignore_result", "redelivered")
#: The headers of the farm's own messages, with their kinds; whatever else one has is taken out of it. So are, of those that
#: Celery itself knows, what a message of ours never says: when it is due and until when (a card that waits for that takes
#: nothing else), how long it may take (the worker's own limit would not count), stamps, and how it is compressed.
_HEADERS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, (str, type(None))),
    **dict.fromkeys(_NUMBERS, (int, type(None))),
    **dict.fromkeys(_FLAGS, (bool, type(None))),
}
#: What travels as the name of one message or of a group of them.
_ID = re.compile(r"[0-9A-Za-z._:-]{1,200}")
_IDS = ("id", "root_id", "parent_id", "group")


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
    for name, kinds in _HEADERS.items():
        if type(headers.get(name)) not in (*kinds, type(None)):
            return f"its header '{name}' is of another kind than ours"
    if any(headers.get(name) is not None and not _ID.fullmatch(headers[name]) for name in _IDS):
        return "one of its ids is none"
    if not headers["id"] or properties["correlation_id"] != headers["id"]:
        return "it has no id of its own"
    if any(not 0 <= (headers.get(name) or 0) < MAXIMUM_COUNT for name in _NUMBERS):
        return "it counts beyond what there can be"
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


def command_refusal(message: Any) -> str:
    """Why a message is no command to a worker, '' when it is one. Never raises.

    Its arguments are the command's own matter: Celery answers what they raise.
    """
    try:
        return _command_refusal(message)
    except MALFORMED as error:
        return f"{type(error).__name__}: {error}"


def _command_refusal(message: Any) -> str:
    properties = message["properties"]
    if message["content-type"] != "application/json" or message["content-encoding"] != "utf-8":
        return "it is not JSON"
    if not isinstance(properties["delivery_tag"], str) or properties.get("body_encoding") != "base64":
        return "it has no form of ours"
    clock = message["headers"].get("clock") or 0
    if type(clock) is not int or not 0 <= clock < MAXIMUM_ID:
        return "its clock tells no time"
    command = json.loads(base64.b64decode(message["body"], validate=True))
    if not isinstance(command["method"], str) or not isinstance(command.get("arguments"), dict | None):
        return "it names no command"
    to, answer = command.get("destination"), command.get("reply_to")
    if to is not None and not (isinstance(to, list) and all(isinstance(name, str) for name in to)):
        return "it does not say to whom"
    if command.get("pattern") or command.get("matcher"):
        return "it finds workers by a pattern"  # a regular expression may take for ever
    if not isinstance(command.get("ticket"), str | None) or not (
        answer is None or all(isinstance(answer[name], str) for name in ("exchange", "routing_key"))
    ):
        return "it cannot be answered"
    return ""


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

    def _receive_one(self, client: Any) -> Any:
        try:
            return super()._receive_one(client)
        except MALFORMED as error:
            log.warning("Dropped what is no command: %.200s", f"{type(error).__name__}: {error}")
            return None


class Transport(redis.Transport):  # type: ignore[misc]
    """kombu's Redis, with a look at every message to a worker. Events and answers are read by those who asked for them."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        reason = ""
        if carries_tasks(queue):
            reason = refusal(message)
        elif carries_commands(queue):
            reason = command_refusal(message)
        if reason:
            log.warning("Dropped a message from %s: %.200s", queue, reason)
            return
        try:
            if carries_tasks(queue):
                message["headers"] = {name: value for name, value in message["headers"].items() if name in _HEADERS}
            super()._deliver(message, queue)
        except MALFORMED:
            log.warning("Dropped a message from %s that Celery could not take", queue, exc_info=True)
            with contextlib.suppress(*MALFORMED):  # what is no message at all has no tag either
                self._forget(message["properties"]["delivery_tag"])

    def _forget(self, tag: str) -> None:
        """Acknowledge it, or it would come back as soon as this worker ends."""
        for channel in self.channels:
            if tag in channel.qos._delivered:
                channel.basic_reject(tag, requeue=False)


def install() -> None:
    """From now on every connection of this process to a Redis is made by `Transport`."""
    for scheme in ("redis", "rediss"):
        kombu.transport.TRANSPORT_ALIASES[scheme] = "tasks.message_filter:Transport"
