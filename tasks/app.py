"""The Celery application, with the same settings for publishers and workers.

``celery.toml`` has the settings that depend on nothing; ``docs/design/celery.md`` has the reasons.
The state of the farm is in the database, and queues only transport messages. So no setting makes
the broker persistent."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kombu.pools
import redis
from celery import Celery
from celery.loaders.app import AppLoader
from kombu.exceptions import OperationalError
from kombu.utils.url import parse_url

from farm.errors import BrokerUnreachable, SettingsError
from farm.errors.safe_text import UNREADABLE_URL, shown_url
from farm.settings import START_TIMEOUT_S, Settings, settings
from tasks import message_filter
from tasks.message_filter import CONTROL_QUEUE
from tasks.transport import BACKEND_OPTIONS, TRANSPORT_OPTIONS

#: Environment variables that the supervisor sets for a worker process. They are not settings.
CARD_VARIABLE = "FARM_WORKER_CARD"
HOLDER_VARIABLE = "FARM_WORKER_HOLDER"
EMBEDDED_VARIABLE = "FARM_WORKER_EMBEDDED"

#: Options of a connection for a check: a broker may accept the connection and never answer. Unit:
#: s.
SOCKET_OPTIONS = {"socket_timeout": 3.0, "socket_connect_timeout": 3.0}

# Less output from these loggers. Flower's page already shows if a worker did not answer in time.
logging.getLogger("alembic").setLevel(logging.WARNING)
logging.getLogger("flower.inspector").setLevel(logging.ERROR)

message_filter.install()


class Loader(AppLoader):  # type: ignore[misc]
    """Imports installed modules only. Celery's own loader would search the current folder first."""

    override_backends = dict.fromkeys(("redis", "rediss"), "tasks.queues:UnsubscribedResults")

    def import_from_cwd(self, module: str, imp: Any = None, package: str | None = None) -> Any:
        return self.import_module(module, package=package)


app = Celery(
    "farm",
    loader="tasks.app:Loader",
    amqp="tasks.message_filter:Amqp",
    events="tasks.transport:Events",
    include=["tasks.measure", "tasks.control"],
)
_CONSTANT = tomllib.loads(Path(__file__).with_name("celery.toml").read_text("utf-8"))
app.conf.update(_CONSTANT, task_default_queue=CONTROL_QUEUE)


def hard_time_limit_s(current: Settings) -> float:
    """Return the time limit of a task. It is longer than the limits of all attempts, so they end
    first. Unit: s.
    """
    # One task makes all attempts. A group may hold the card before. In the longest attempt, a group
    # waits until another card has verified and measured a whole model; then its ranks start and
    # measure the item.
    attempt_s = 3 * current.item_timeout_s + START_TIMEOUT_S
    return current.hard_limit_s or attempt_s * (current.max_attempts + 1) + 60.0


def configure(current: Settings) -> None:
    """Configure the application for a broker. A later call changes the broker (an embedded farm has
    its own).
    """
    hard_s = hard_time_limit_s(current)
    # A running task does not extend this time, so it must be longer than any task.
    visible_s = current.visibility_timeout_s or 4 * hard_s
    app.close()
    app.conf.update(
        broker_url=current.broker_url or "redis+socket:///nonexistent/no-broker-is-configured",
        # Celery gets the options from the URL; Flower only from this setting.
        broker_use_ssl=tls_options(current.broker_url) or False,
        result_backend=current.broker_url or None,
        broker_transport_options={
            "visibility_timeout": visible_s,
            # kombu searches for abandoned messages once in ten of these intervals.
            "unacked_restore_interval": min(10.0, visible_s / 10),
            **TRANSPORT_OPTIONS,
        },
        **BACKEND_OPTIONS,
        task_time_limit=hard_s,
    )
    # Celery and kombu cache the backend, the producers and the connections of the earlier settings.
    app._backend_cache = None
    app._local = threading.local()
    app.__dict__.pop("amqp", None)
    app.__dict__.pop("events", None)
    kombu.pools.reset()


def tls_options(url: str) -> dict[str, Any]:
    """Return the certificate options of a ``rediss://`` URL; {} for other or malformed URLs."""
    if url.startswith("rediss://"):
        # the connection reports a malformed URL
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return dict(parse_url(url).get("ssl", {}))
    return {}


#: Code of an error of the broker -> what is wrong, as the end of a sentence that begins with "The
#: broker", and a step.
_REFUSALS: Mapping[str, list[str]] = json.loads(
    Path(__file__).with_name("broker_errors.json").read_text("utf-8")
)
_CODES: Mapping[
    type[redis.RedisError], str
] = {  # redis-py removes the code from the text of these errors
    redis.ReadOnlyError: "READONLY",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.BusyLoadingError: "LOADING",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.AuthenticationError: "WRONGPASS",
}


#: What the broker's client says if the server ends the connection, as a port for TLS does with a
#: client without it.
_CLOSED = re.compile("closed|reset by peer", re.IGNORECASE)


def broker_unreachable(
    url: str, error: BaseException, *, about: str = "", then: str = ""
) -> BrokerUnreachable:
    """Return the error that says what an error of the broker's client means, and what to do.
    ``about`` replaces the error's own text; ``then`` is added to the next step."""
    codes = (
        code
        for kind, code in _CODES.items()
        if any(isinstance(cause, kind) for cause in (error, error.__cause__))
    )
    # of a pipeline: "Command # 1 (...) of pipeline caused error: "
    reason = str(error).rpartition("caused error: ")[2]
    code = next(codes, reason.partition(" ")[0])
    # a BRPOP ends so if its server becomes a replica
    code = "READONLY" if code == "UNBLOCKED" else code
    problem, step = _REFUSALS.get(
        code, ("does not answer", "Start the broker, or correct FARM_BROKER_URL.")
    )
    if code not in _REFUSALS and url.startswith("redis://") and _CLOSED.search(reason):
        step = f"If the port expects TLS, write rediss:// instead of redis://. {step}"
    message = f"The broker {shown_url(url)} {problem}: {about or reason.rstrip('.')}."
    return BrokerUnreachable(message, f"{step} {then}".strip())


@contextlib.contextmanager
def broker_client(current: Settings) -> Iterator[Any]:
    """Provide a Redis client of the broker, with time limits. Raises `BrokerUnreachable` if it does
    not answer.
    """
    try:
        with app.connection_for_write(current.broker_url) as connection:
            connection.transport_options = {**connection.transport_options, **SOCKET_OPTIONS}
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=3)
            yield connection.default_channel.client
    except (OperationalError, redis.RedisError, OSError) as error:
        raise broker_unreachable(current.broker_url, error) from error


def check_broker(current: Settings | None = None) -> None:
    """Check that the broker of the settings (default: those of this process) answers. Raises
    `BrokerUnreachable` if none is configured or it does not answer; `SettingsError` if the URL is
    malformed or not a Redis URL."""
    current = current or settings()
    if not current.broker_url:
        raise BrokerUnreachable(
            "No broker is configured.",
            "Set FARM_BROKER_URL to the URL of your Redis or Valkey, or measure on this host with "
            "`farm run`.",
        )
    form = "Write FARM_BROKER_URL as redis://:password@host:6379/0, rediss://... or redis+socket:///path."
    if not current.broker_url.startswith(("redis://", "rediss://", "redis+socket://")):
        raise SettingsError(
            f"The broker URL '{shown_url(current.broker_url)}' is not a Redis URL.", form
        )
    try:
        with broker_client(current) as client:
            client.ping()
    except (ValueError, LookupError, TypeError):
        # A malformed port or database, or an unknown option.
        # Without the error: the malformed port may be a part of the password, and `--debug` shows
        # it.
        if "?" in current.broker_url and shown_url(current.broker_url) != UNREADABLE_URL:
            problem = "has an option after '?' that is unknown or has a wrong value"
            step = "Correct the options in FARM_BROKER_URL; docs/operate.md has an example."
            raise SettingsError(f"The broker URL {problem}.", step) from None
        raise SettingsError("The broker URL is malformed.", form) from None


configure(settings())
