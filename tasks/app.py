"""The Celery application: one set of settings for everybody who publishes or works.

Why each setting stands here is a measured fact of Celery on Redis (``docs/architecture.md``): above all, the
database is the truth and the queue only transport, so nothing here tries to make the broker remember.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import kombu.pools
import redis
from celery import Celery
from celery.loaders.app import AppLoader
from kombu.exceptions import OperationalError
from kombu.utils.url import parse_url

from farm.errors import BrokerUnreachable, SettingsError
from farm.settings import Settings, settings
from farm.types.format import masked
from tasks import message_filter

#: How these reach a worker process: in its environment, before Python starts. Not settings: the supervisor's own.
CARD_VARIABLE = "FARM_WORKER_CARD"
HOLDER_VARIABLE = "FARM_WORKER_HOLDER"
EMBEDDED_VARIABLE = "FARM_WORKER_EMBEDDED"

CONTROL_QUEUE = "control"

POOL_START_S = 120.0

#: How long a chord is counted after its last part. One that takes longer, or lost a part that moved to another card, is
#: forgotten: whoever closes the round's last item asks for the aggregation in any case. Unit: s.
CHORD_EXPIRES_S = 24 * 3600

# What goes on inside them tells nobody anything: the lines of these are warnings and worse. That a worker did not answer
# Flower in time is no more than its page shows.
logging.getLogger("alembic").setLevel(logging.WARNING)
logging.getLogger("flower.inspector").setLevel(logging.ERROR)

message_filter.install()


class Loader(AppLoader):  # type: ignore[misc]
    """Imports what is installed. Celery's own puts the current folder first while it imports."""

    override_backends = dict.fromkeys(("redis", "rediss"), "tasks.queues:UnsubscribedResults")

    def import_from_cwd(self, module: str, imp: Any = None, package: str | None = None) -> Any:
        return self.import_module(module, package=package)


app = Celery(
    "farm", loader="tasks.app:Loader", amqp="tasks.message_filter:Amqp", include=["tasks.measure", "tasks.control"]
)


def hard_time_limit_s(current: Settings) -> float:
    """The backstop behind the item's own time limit, which ends the benchmark process and keeps the worker."""
    # An attempt at a whole model verifies it and then measures it; one task makes all attempts that crash.
    return current.hard_limit_s or 2 * current.item_timeout_s * current.max_attempts + 60.0


def configure(current: Settings) -> Celery:
    """Set the application up for a broker; again for another one (the embedded farm has its own)."""
    hard_s = hard_time_limit_s(current)
    # Not extended while a task runs, so a running item must never look abandoned.
    visible_s = current.visibility_timeout_s or 4 * hard_s
    app.close()
    app.conf.update(
        broker_url=current.broker_url or "redis+socket:///nonexistent/no-broker-is-configured",
        # Celery reads it from the URL itself; Flower only from here.
        broker_use_ssl=tls_options(current.broker_url) or False,
        result_backend=current.broker_url or None,
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            "visibility_timeout": visible_s,
            # How often abandoned messages are looked for: ten of these pass between two looks.
            "unacked_restore_interval": min(10.0, visible_s / 10),
            "socket_keepalive": True,
        },
        # Nothing that travels is executable.
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        # A message is done with when the work is done; a dead worker's message comes back.
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_concurrency=1,
        # A forked copy of a process that has touched CUDA cannot use it.
        worker_pool_start_method="spawn",
        # It imports Celery and the farm before it says that it is up; what takes longer is killed and begun again. When all
        # workers of a host start at once on a few cores, Celery's 4 s would have them kill theirs for ever.
        worker_proc_alive_timeout=POOL_START_S,
        task_time_limit=hard_s,
        # Nobody reads results, and the broker must not fill with them: progress and outcomes are in the database.
        task_ignore_result=True,
        task_track_started=False,
        result_expires=CHORD_EXPIRES_S,
        result_chord_expires=CHORD_EXPIRES_S,
        result_backend_always_retry=True,
        result_backend_max_retries=20,
        task_default_queue=CONTROL_QUEUE,
        # Not when it is sent: that event knows neither operator nor label, and where it comes late it overwrites both.
        task_send_sent_event=False,
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        enable_utc=True,
    )
    # Celery and kombu keep the backend, the producers and the connections that they made from the earlier settings.
    app._backend_cache = None
    app._local = threading.local()
    app.__dict__.pop("amqp", None)
    app.__dict__.pop("events", None)
    kombu.pools.reset()
    return app


def tls_options(url: str) -> dict[str, Any]:
    """What a ``rediss://`` URL says about certificates; nothing of other URLs, nor of one that is none."""
    if url.startswith("rediss://"):
        with contextlib.suppress(ValueError, LookupError, TypeError):  # told by who connects
            return dict(parse_url(url).get("ssl", {}))
    return {}


def refuses(error: BaseException) -> bool:
    """Whether what went wrong with a broker is its answer to the user and password that it was given."""
    return isinstance(error, redis.AuthenticationError) or isinstance(error.__cause__, redis.AuthenticationError)


def check_broker(current: Settings) -> None:
    """Raises:
    BrokerUnreachable: no broker is configured, or it does not answer.
    SettingsError: the URL is not of a broker that the farm can use.
    """
    if not current.broker_url:
        raise BrokerUnreachable(
            "No broker is configured.",
            "Set FARM_BROKER_URL to your Redis or Valkey, or measure here and now with `farm run`.",
        )
    form = "Write it as redis://:password@host:6379/0, rediss://... or redis+socket:///path."
    if not current.broker_url.startswith(("redis://", "rediss://", "redis+socket://")):
        raise SettingsError(f"The broker URL '{masked(current.broker_url)}' cannot be used.", form)
    try:
        with app.connection_for_write(current.broker_url) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=3)
            connection.default_channel.client.ping()
    except (OperationalError, redis.RedisError, OSError) as error:
        if refuses(error):
            raise BrokerUnreachable(
                f"The broker {masked(current.broker_url)} refuses the user or the password: {str(error).rstrip('.')}.",
                "Correct them in FARM_BROKER_URL.",
            ) from error
        raise BrokerUnreachable(
            f"The broker {masked(current.broker_url)} does not answer: {str(error).rstrip('.')}.",
            "Start it, or correct FARM_BROKER_URL.",
        ) from error
    except (ValueError, LookupError, TypeError) as error:  # a port or a database that is no number, an unknown option
        # Without the error's own words: what it takes for a port may be a piece of the password.
        raise SettingsError("The broker URL cannot be read.", form) from error


configure(settings())
