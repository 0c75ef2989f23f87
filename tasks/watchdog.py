"""Ends a worker whose main loop hangs, or that gets no messages; its supervisor then starts a new
one.

The main loop of a worker receives its messages, sends its events and acknowledges what is done. A
thread outside of it watches the loop. So does the heartbeat: a worker whose loop stands still does
not renew its leases. Nothing here waits for the network: what may hang cannot judge itself."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from celery.worker import state as worker_state

from farm.errors import BrokerUnreachable
from farm.settings import Settings
from tasks.broker_probe import check_broker_works

log = logging.getLogger("farm.worker")

#: The exit code of a worker that ends because it hangs or receives no messages any more
#: (EX_TEMPFAIL).
STALLED = 75
#: A worker ends if its main loop stands still for so long. If its host is cut off, each of the
#: loop's connections takes a few seconds to fail, and together up to 40 s. Unit: s.
HUNG_AFTER_S = 45.0
#: A worker renews its leases while its main loop stands still for less than this. Unit: s.
SILENT_AFTER_S = 30.0
#: The worker ends even if nobody reads its log. Unit: s.
_LOG_WITHIN_S = 2.0


class Pulse:
    """The signs of life of a worker's main loop, from the first one until the loop is told to stop.

    Attributes:
        silent_s: how long the main loop has shown no sign of life, while this process ran; 0.0 if
            it is not watched.
    """

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._watched = False
        self._stopped = False

    def beat(self) -> None:
        """Note that the main loop runs. Only the main loop calls this, many times per minute."""
        self._watched = not self._stopped
        self.silent_s = 0.0

    def stop(self) -> None:
        """End the watch: a stopping worker waits for the end of its item."""
        self._stopped = True
        self._watched = False

    def wait(self, for_s: float) -> None:
        """Let time pass. A process that was suspended does not count it, as its main loop could not
        run either.
        """
        time.sleep(for_s)
        self.silent_s = self.silent_s + for_s if self._watched else 0.0


def guard(worker: str, pulse: Pulse) -> None:
    """Start the thread that ends this process if its main loop hangs. ``worker``: its name in the
    log.
    """
    threading.Thread(target=_watch, args=(worker, pulse), name="watchdog", daemon=True).start()


def _watch(worker: str, pulse: Pulse) -> None:
    while pulse.silent_s < HUNG_AFTER_S:
        pulse.wait(1.0)
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack = "".join(traceback.format_stack(frame)[-4:])
    _leave(
        "The main loop of %s did nothing for %g s; it restarts. It hung here:\n%s",
        worker,
        HUNG_AFTER_S,
        stack,
    )


def _leave(message: str, *arguments: object) -> None:
    """Log why, and end this process at once. A normal stop would wait for the loop, and requeue the
    message that stalled it."""
    # The loop may hang because nobody reads the log, with its lock held.
    teller = threading.Thread(target=log.error, args=(message, *arguments), daemon=True)
    teller.start()
    teller.join(_LOG_WITHIN_S)
    os._exit(STALLED)


@dataclass
class StallWatchdog:
    """Ends a worker that gets no messages although there are some for it, for ``limit_s`` (0: no
    limit).

    A worker may send heartbeats and answer pings, but process no messages: after an error between
    receiving a message and passing it to the pool, Celery waits for this message for ever. No other
    worker reads the card's queue.

    Args:
        worker: its name in the log.
        work_waits: True if there is work for the worker.
    """

    worker: str
    limit_s: float
    work_waits: Callable[[], bool]
    _taken: int = -1
    _progress_at_s: float = 0.0

    def stalled(self, *, taken: int, at_work: bool, now_s: float) -> bool:
        """Return True if the worker has stalled. Called regularly, with the number of messages that
        the pool has received so far, and whether the worker has one in work. ``now_s``: of a
        monotonic clock."""
        if taken != self._taken or at_work or not self.limit_s or not self.work_waits():
            self._taken, self._progress_at_s = taken, now_s
        return now_s - self._progress_at_s > self.limit_s > 0

    def exit_if_stalled(self, current: Settings) -> None:
        """End this process at once if it has stalled, unless the broker is the cause."""
        now_s = time.monotonic()
        messages, at_work = worker_state.all_total_count[0], bool(worker_state.active_requests)
        if not self.stalled(taken=messages, at_work=at_work, now_s=now_s):
            return
        self._progress_at_s = now_s
        try:
            check_broker_works(current)
        except BrokerUnreachable:
            return  # the cause: the consumer waits for the broker, and has logged it
        _leave(
            "Work waits for %s, but the worker received no message for %g s; it restarts",
            self.worker,
            self.limit_s,
        )
