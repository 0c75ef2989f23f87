"""Messages that no publisher of the farm would send, made of one that it would: seeded, so that a
failure repeats.
"""

from __future__ import annotations

import base64
import json
import pickle
import random
import uuid
from collections.abc import Callable
from typing import Any

#: Touched by whatever executes a message. Filled in by the test.
Trap = str


class _Bomb:
    """Unpickled, it leaves a file behind: the proof that something was executed."""

    def __init__(self, path: Trap) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return (open, (self.path, "w"))


def good(queue: str, item_id: Any, task: str = "measure") -> dict[str, Any]:
    """What kombu would put into the queue for an item."""
    message_id = str(uuid.uuid4())
    return {
        "body": _encoded(
            [[item_id], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
        ),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": task,
            "id": message_id,
            "root_id": message_id,
            "parent_id": None,
            "group": None,
            "retries": 0,
            "timelimit": [None, None],
            "argsrepr": "",
            "kwargsrepr": "",
            "origin": "somebody",
        },
        "properties": {
            "correlation_id": message_id,
            "reply_to": message_id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }


def _encoded(body: Any) -> str:
    return base64.b64encode(json.dumps(body).encode()).decode()


def messages(queue: str, trap: Trap, number: int, seed: int) -> list[bytes]:
    """That many mangled messages, as bytes for the broker's list."""
    chance = random.Random(seed)
    bomb = base64.b64encode(pickle.dumps([[_Bomb(trap)], {}, {}])).decode()
    code = f"open({trap!r}, 'w')"

    def junk() -> Any:
        plain = [
            None,
            True,
            -1,
            0,
            2**63,
            2**200,
            1e308,
            "",
            "1",
            code,
            "\x00",
            "é" * 50,
            "x" * 5000,
        ]
        nested = [
            [],
            [[]],
            {},
            {"a": {}},
            {"__type__": "datetime", "__value__": code},
            {"py/object": "os.system"},
        ]
        return chance.choice([*plain, *nested])

    def body(message: dict[str, Any]) -> None:
        message["body"] = _encoded(
            chance.choice(
                [
                    junk(),
                    [junk()],
                    [junk(), junk(), junk()],
                    [[junk()], {}, {}],
                    [[1], {"item_id": 2}, {}],
                ]
            )
        )

    def pickled(message: dict[str, Any]) -> None:
        message["body"] = bomb
        message["content-type"] = chance.choice(
            [
                "application/x-python-serialize",
                "application/json",
                "application/x-yaml",
                "application/data",
                "",
            ]
        )
        message["content-encoding"] = chance.choice(["binary", "utf-8", "latin-1"])

    def encoding(message: dict[str, Any]) -> None:
        message["body"] = chance.choice(
            ["%%%", "AAA", "", base64.b64encode(bytes(range(256))).decode()]
        )

    def header(message: dict[str, Any]) -> None:
        message["headers"][chance.choice(list(message["headers"]))] = junk()

    def task(message: dict[str, Any]) -> None:
        message["headers"]["task"] = chance.choice(
            [
                "os.system",
                "builtins.eval",
                "tasks.measure.begin",
                "celery.backend_cleanup",
                "measure ",
                "__import__",
                "",
            ]
        )

    def built_in(message: dict[str, Any]) -> None:
        # The tasks that Celery itself brings run other tasks: of them only what is registered can
        # be meant.
        message["headers"]["task"] = chance.choice(
            ["celery.map", "celery.starmap", "celery.chain", "celery.group"]
        )
        message["body"] = _encoded([[{"task": "os.system"}, [[code]]], {}, {}])

    def embedded(message: dict[str, Any]) -> None:
        options = {
            "callbacks": [{"task": "os.system", "args": [code]}],
            "errbacks": [junk()],
            "chain": [junk()],
        }
        message["body"] = _encoded([[chance.choice([10**9, -1])], {}, options])

    def item(message: dict[str, Any]) -> None:
        message["body"] = _encoded([[chance.choice([10**9, -1, 2**40])], {}, {}])

    def properties(message: dict[str, Any]) -> None:
        message["properties"][
            chance.choice(["correlation_id", "reply_to", "priority", "delivery_mode"])
        ] = junk()

    def shape(message: dict[str, Any]) -> None:
        del message[chance.choice(list(message))]

    kinds: list[Callable[[dict[str, Any]], None]] = [
        *(body, pickled, encoding, header, task, built_in, embedded, item, properties, shape)
    ]
    made = []
    for _ in range(number):
        message = good(queue, 10**9)
        # Fewer of those that are well-formed: each costs the worker a look into the database.
        chance.choices(kinds, [1 if kind in (item, properties, header) else 5 for kind in kinds])[
            0
        ](message)
        made.append(json.dumps(message).encode())
    return made


#: Headers that Celery knows and no message of the farm has: each would silence a card, hold it, or
#: end its process.
HARMFUL_HEADERS: list[dict[str, Any]] = [
    {"stamped_headers": 5},
    {"stamped_headers": [["a"]]},
    {"stamped_headers": ["a"], "stamps": 5},
    {"timelimit": [0.001, None]},
    {"timelimit": [None, 0.001]},
    {"eta": "2999-01-01T00:00:00"},
    {"expires": "1999-01-01T00:00:00"},
    {"compression": "application/x-bz2"},
]
#: Published to all workers; the commands with what they take.
NO_COMMANDS = [
    b"1",
    b'"x"',
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b"\xff",
    b'{"properties": {"delivery_tag": 1}}',
]
HARMFUL_COMMANDS: dict[str, dict[str, Any]] = {
    "cancel_consumer": {"queue": "card.SIM-gpu1-0"},
    "add_consumer": {"queue": "elsewhere"},
    "rate_limit": {"task_name": "measure", "rate_limit": "1/h"},
    "time_limit": {"task_name": "measure", "hard": 0.001},
    "pool_shrink": {"n": 1},
    "pool_grow": {"n": 1},
    "pool_restart": {},
    "autoscale": {"max": 0, "min": 0},
    "disable_events": {},
    "revoke_by_stamped_headers": {"headers": {"a": 5}},
}


def command(method: Any, arguments: Any = None, **more: Any) -> dict[str, Any]:
    """What kombu would publish to the workers' mailboxes."""
    return {
        "body": _encoded({"method": method, "arguments": arguments or {}, **more}),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"clock": 1, "expires": 0},
        "properties": {
            "delivery_mode": 2,
            "delivery_info": {"exchange": "celery.pidbox", "routing_key": ""},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }


def garbage(number: int, seed: int) -> list[bytes]:
    """Bytes that are no message at all."""
    chance = random.Random(seed)
    return [
        chance.choice(
            [b"", b"{", b"null", b"[]", b"17", b'"text"', b"{}", chance.randbytes(40), b"[" * 5000]
        )
        for _ in range(number)
    ]
