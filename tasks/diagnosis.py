"""The part of ``farm doctor`` that talks to the broker: does it answer, will it forget, does a worker listen?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from celery.exceptions import OperationalError as CeleryError
from kombu.exceptions import OperationalError
from redis import RedisError

from farm.doctor import Check, ok
from farm.errors import BrokerUnreachable
from farm.settings import Settings
from tasks.app import app, check_broker, masked
from tasks.servers import broker_program

#: How often the workers are asked, a second each.
PINGS = 3


def broker_checks(current: Settings) -> Iterator[Check]:
    """The configured broker, or the program that `farm run` would start."""
    if not current.broker_url:
        try:
            yield ok("broker", f"none is configured; `farm run` starts its own ({broker_program().name})")
        except BrokerUnreachable as error:
            yield Check("broker", "problem", error.message, error.next_step)
        return
    try:
        check_broker(current)
        with app.connection_for_read() as connection:
            memory: dict[str, Any] = connection.default_channel.client.info("memory")
    except BrokerUnreachable as error:
        yield Check("broker", "problem", error.message, error.next_step)
        return
    except RedisError as error:
        yield Check("broker", "warning", f"{masked(current.broker_url)} does not tell about itself: {error}")
        return
    yield _transport(current.broker_url)
    yield _memory(memory)
    yield from _listeners()


def _transport(url: str) -> Check:
    parts = urlsplit(url)
    local = (
        "+socket" in parts.scheme or parts.hostname in ("localhost", "::1") or str(parts.hostname).startswith("127.")
    )
    if not local and (not parts.scheme.startswith("rediss") or "ssl_cert_reqs=none" in parts.query.lower()):
        return Check(
            "broker",
            "warning",
            f"{masked(url)} is another host's, and is reached without a checked certificate",
            "Use rediss:// with ssl_cert_reqs=required and ssl_ca_certs (docs/operate.md).",
        )
    if not local and not parts.password:
        return Check(
            "broker",
            "warning",
            f"{masked(url)} asks for no password: whoever reaches it can give the farm work",
            "Give the broker the users of deploy/make-secrets.",
        )
    return ok("broker", masked(url))


def _memory(memory: dict[str, Any]) -> Check:
    policy = memory.get("maxmemory_policy", "noeviction")
    used = f"{int(memory.get('used_memory', 0)) / 2**20:.1f} MiB used"
    if policy != "noeviction" and memory.get("maxmemory"):
        return Check(
            "broker memory",
            "problem",
            f"{used}; its policy '{policy}' throws messages away when it is full",
            "Set `maxmemory-policy noeviction` (deploy/redis/redis.conf).",
        )
    return ok("broker memory", f"{used}, {policy}")


def _listeners() -> Iterator[Check]:
    """The workers that answer over the broker: a card may be alive in the database and deaf to its queue."""
    try:
        found: set[str] = set()
        for _ in range(PINGS):
            found |= {name for answer in app.control.ping(timeout=1.0) or () for name in answer}
            if any(name.startswith("control@") for name in found):
                break  # a busy host answers late; only silence to all of them is a finding
        names = sorted(found)
    except (OperationalError, CeleryError, RedisError) as error:
        yield Check("workers", "warning", f"they could not be asked: {error}")
        return
    controls = [name for name in names if name.startswith("control@")]
    if not names:
        yield Check("workers", "warning", "none listens to the broker", "Start `farm worker` on a host with cards.")
    elif not controls:
        yield Check(
            "workers",
            "problem",
            f"{len(names)} listen, but no control worker: no verdict is made, nothing lost is published again",
            "Every `farm worker` starts one; look at its log on the hosts.",
        )
    else:
        yield ok("workers", f"{len(names) - len(controls)} of cards and {len(controls)} of control listen")
