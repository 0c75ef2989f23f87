"""Celery's consumer, except that it waits for a broker that does not work, and gives signs of life.

Celery ends the worker if the broker refuses a command, for example because it is a replica or full;
this would end the running measurement too. If the broker is down, Celery logs every try. This
consumer logs the reason once, with the next step, and once that the broker works again."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery.worker import consumer
from celery.worker.consumer.consumer import CONNECTION_RETRY
from celery.worker.state import maybe_shutdown

from farm.errors import BrokerUnreachable
from farm.jobs.outage import Outage
from farm.settings import settings
from tasks.app import broker_unreachable
from tasks.broker_probe import check_broker_works
from tasks.watchdog import Pulse

#: The longest pause between two tries. A worker that has to stop notices it after `_STEP_S`. Unit:
#: s.
LONGEST_PAUSE_S = 5.0
_STEP_S = 0.25


def _is_news(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, tuple) and record.args[:1] == (CONNECTION_RETRY,))


# `Consumer` logs these errors
logging.getLogger("celery.worker.consumer.consumer").addFilter(_is_news)


class Consumer(consumer.Consumer):  # type: ignore[misc]
    """See the module. `worker_consumer` of the application names it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._outage = Outage(logging.getLogger("farm.worker"), f"{self.hostname} gets no messages")
        self._failures = 0  # connections that failed although the broker seemed to work
        self._connected_s = 0.0

    @property
    def _pulse(self) -> Pulse:
        """That of the worker, which `tasks.worker` has created."""
        pulse: Pulse = self.controller.pulse
        return pulse

    def register_with_event_loop(self, hub: Any) -> None:
        super().register_with_event_loop(hub)
        hub.on_tick.add(self._pulse.beat)

    def stop(self) -> None:
        self._pulse.stop()
        super().stop()

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        self._note(exc)
        super().on_connection_error_after_connected(exc)

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        self._note(exc)

    def ensure_connected(self, conn: Any) -> Any:
        """Return the connection when the broker works."""
        if self._failures > 1:
            self._pause(min(0.5 * 2**self._failures, LONGEST_PAUSE_S))
        pause_s = _STEP_S
        while True:
            self._pulse.beat()
            maybe_shutdown()
            try:
                check_broker_works(settings())
                conn.connect()
                break
            except BrokerUnreachable as error:
                self._outage.note(error)
            except self.connection_errors as error:
                self._outage.note(broker_unreachable(settings().broker_url, error))
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self.first_connection_attempt = False
        self._outage.over()
        self._connected_s = time.monotonic()
        return conn

    def _note(self, error: Exception) -> None:
        self._pulse.beat()
        self._failures = (
            self._failures + 1 if time.monotonic() - self._connected_s < LONGEST_PAUSE_S else 1
        )
        self._outage.note(broker_unreachable(settings().broker_url, error))

    def _pause(self, pause_s: float) -> None:
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            self._pulse.beat()
            maybe_shutdown()
            time.sleep(_STEP_S)
