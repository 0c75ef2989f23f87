"""A filter in front of Celery: it drops and logs malformed messages and messages that the farm
never sends.

Without the filter, a malformed body ends the worker that gets the message; the message returns to
the queue and ends the next worker, so that one message would stop a card for ever. A header that
Celery cannot handle is as harmful: the worker lives but gets no more messages. The filter removes
all headers that the farm does not send. A message can still be forged, but it can only name a task
of the farm and ids of rows in the database."""

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

from farm.errors.safe_text import shown_url, without_secrets
from tasks import transport

log = logging.getLogger("farm.message_filter")

#: The errors of a malformed body or envelope. OSError and errors of the Redis client mean an
#: unreachable broker.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

MAXIMUM_ID = 2**63 - 1
MAXIMUM_COUNT = 2**31

CONTROL_QUEUE = "control"


def carries_tasks(queue: str) -> bool:
    """True if the messages of a queue name tasks."""
    return queue == CONTROL_QUEUE or queue.startswith("card.")


#: Name of each allowed task -> check of its only argument.
ARGUMENTS: Mapping[str, Callable[[Any], object]] = {
    "measure": lambda value: type(value) is int and 0 < value <= MAXIMUM_ID,
    "aggregate": lambda value: (
        isinstance(value, str) and re.fullmatch(r"[0-9A-Za-z_-]{1,32}/[0-9]{1,9}", value)
    ),
}

#: A header of messages that go to the front of their queue. Workers remove it like all headers that
#: are not below.
FRONT = "front"

_TEXTS = (
    "lang",
    "task",
    "id",
    "root_id",
    "parent_id",
    "group",
    "origin",
    "argsrepr",
    "kwargsrepr",
    "shadow",
)
_NUMBERS = ("retries", "group_index", "replaced_task_nesting")
_FLAGS = ("ignore_result", "redelivered")
#: The headers of the farm's own messages and their types; all other headers are removed. For
#: example, these headers of Celery are harmful: the due time and the expiry (a card that waits for
#: a message gets no other), the time limit (it overrides the worker's limit), stamps, and
#: compression.
_HEADERS: Mapping[str, type] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(_FLAGS, bool),
}
#: The format of the ids of messages and groups.
_ID = re.compile(r"[0-9A-Za-z._:-]{1,200}")
_IDS = ("id", "root_id", "parent_id", "group")


def refusal(message: Any, queue: str) -> str:
    """Return why a message is not a task of the farm or a valid remote command; '' if it is one.
    Never raises. Messages in other queues, such as that of remote commands
    ('control@gpu1.celery.pidbox'), are not checked."""
    of_commands = queue.endswith(".celery.pidbox") and "@" in queue
    if not of_commands and not carries_tasks(queue):
        return ""
    try:
        if message["content-type"] != "application/json" or message["content-encoding"] != "utf-8":
            return "its content is not JSON"
        return _command_refusal(message) if of_commands else _task_refusal(message, queue)
    except MALFORMED as error:
        return f"{type(error).__name__}: {error}"


def _task_refusal(message: Any, queue: str) -> str:
    headers, properties = message["headers"], message["properties"]
    if (task := headers["task"]) not in ARGUMENTS:
        return "its task is not a task of the farm"
    if (task == "aggregate") != (queue == CONTROL_QUEUE):
        return "its task belongs to another queue"
    for name, kind in _HEADERS.items():
        if type(headers.get(name)) not in (kind, type(None)):
            return f"its header '{name}' has another type than in the farm's messages"
    if any(headers.get(name) is not None and not _ID.fullmatch(headers[name]) for name in _IDS):
        return "one of its ids is malformed"
    if not headers["id"] or properties["correlation_id"] != headers["id"]:
        return "its id and its correlation id differ"
    if any(not 0 <= (headers.get(name) or 0) < MAXIMUM_COUNT for name in _NUMBERS):
        return "one of its numbers is out of range"
    information = properties["delivery_info"]
    if not all(isinstance(information[name], str) for name in ("exchange", "routing_key")):
        return "its exchange or routing key is missing"
    if not isinstance(properties["delivery_tag"], str) or not isinstance(
        properties.get("reply_to"), str | None
    ):
        return "its delivery tag or reply address is malformed"
    if properties.get("body_encoding") != "base64" or type(properties.get("priority", 0)) not in (
        int,
        type(None),
    ):
        return "its encoding or priority is not the farm's"
    arguments, keywords, options = json.loads(base64.b64decode(message["body"], validate=True))
    if keywords != {} or len(arguments) != 1 or not ARGUMENTS[task](arguments[0]):
        return "its argument is not an id"
    if not isinstance(options, dict) or not all(_harmless(value) for value in options.values()):
        return "a callback is not a task of the farm"
    return ""


def _command_refusal(message: Any) -> str:
    """Return why a message is not a valid command to a worker. The arguments of the command are not
    checked: if they raise an error, Celery returns it to the sender."""
    properties = message["properties"]
    if (
        not isinstance(properties["delivery_tag"], str)
        or properties.get("body_encoding") != "base64"
    ):
        return "its delivery tag or encoding is not the farm's"
    clock = message["headers"].get("clock") or 0
    if type(clock) is not int or not 0 <= clock < MAXIMUM_ID:
        return "its clock is out of range"
    command = json.loads(base64.b64decode(message["body"], validate=True))
    if not isinstance(command["method"], str) or not isinstance(
        command.get("arguments"), dict | None
    ):
        return "its command is malformed"
    to, answer = command.get("destination"), command.get("reply_to")
    if to is not None and not (isinstance(to, list) and all(isinstance(name, str) for name in to)):
        return "its destination is malformed"
    if command.get("pattern") or command.get("matcher"):
        return "it selects workers by a pattern"  # matching a regular expression can take for ever
    if not isinstance(command.get("ticket"), str | None) or not (
        answer is None or all(isinstance(answer[name], str) for name in ("exchange", "routing_key"))
    ):
        return "its reply address is malformed"
    return ""


def _harmless(value: Any) -> bool:
    """True if all callbacks, errbacks and chord bodies, at any depth, are signatures of the farm's
    own tasks.
    """
    if value is None:
        return True
    if isinstance(value, list):
        return all(_harmless(entry) for entry in value)
    if not isinstance(value, dict) or value.get("task") not in ARGUMENTS:
        return False
    options = value.get("options") or {}
    return all(_harmless(options.get(name)) for name in ("link", "link_error", "chord"))


class Connection(kombu.Connection):  # type: ignore[misc]
    """A connection whose `info`, which workers send to Flower, has no password in its texts."""

    def info(self) -> dict[str, Any]:
        # The URL of a socket has its password in the place of the host. The password itself stays:
        # `as_uri` needs it to mask it, Flower to connect, and Celery removes it from the answers of
        # a worker.
        return {
            name: value if name == "password" else _hidden(value)
            for name, value in super().info().items()
        }


def _hidden(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_hidden(entry) for entry in value]
    if not isinstance(value, str) or not ("@" in value or "://" in value):
        return without_secrets(value) if isinstance(value, str) else value
    return (
        shown_url(value)
        if "://" in value
        else shown_url(f"socket://{value}").removeprefix("socket://")
    )


class Amqp(AMQP):  # type: ignore[misc]
    Connection = Connection


class FilteringChannel(transport.Channel):
    def _put(self, queue: str, message: Any, **options: Any) -> None:
        if not (message.get("headers") or {}).get(FRONT):
            super()._put(queue, message, **options)
            return
        with self.conn_or_acquire() as client:
            client.rpush(queue, json.dumps(message))

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except MALFORMED as error:  # the message is not JSON; it is no longer in the queue
            log.warning("Dropped a malformed message: %.200s", f"{type(error).__name__}: {error}")
            return True

    def _receive_one(self, client: Any) -> Any:
        try:
            return super()._receive_one(client)
        except MALFORMED as error:
            log.warning("Dropped a malformed command: %.200s", f"{type(error).__name__}: {error}")
            return None


class FilteringTransport(transport.Transport):
    """The farm's transport with a check of every message to a worker. Events and answers are not
    checked.
    """

    Channel = FilteringChannel

    def _deliver(self, message: Any, queue: str) -> None:
        if reason := refusal(message, queue):
            log.warning("Dropped a message from queue %s: %.200s", queue, reason)
            return
        try:
            if carries_tasks(queue):
                message["headers"] = {
                    name: value for name, value in message["headers"].items() if name in _HEADERS
                }
            super()._deliver(message, queue)
        except MALFORMED:
            log.warning(
                "Dropped a message from queue %s: Celery could not decode it", queue, exc_info=True
            )
            with contextlib.suppress(*MALFORMED):  # a malformed message may have no tag
                tag = message["properties"]["delivery_tag"]
                # acknowledge it; otherwise it returns to the queue when this worker ends
                for channel in self.channels:
                    if tag in channel.qos._delivered:
                        channel.basic_reject(tag, requeue=False)


def install() -> None:
    """Make `FilteringTransport` the transport of every Redis connection in this process."""
    for scheme in ("redis", "rediss"):
        kombu.transport.TRANSPORT_ALIASES[scheme] = "tasks.message_filter:FilteringTransport"
