"""The Celery task on a card's queue. It adapts `farm.jobs.item_driver` to Celery.

If an item fails on the card, the task returns a status and does not raise: a chord with a failed
header task never runs its body. If a message has nothing to do, the task raises ``Ignore``, which
does not count as a part of the chord. For Celery, every returned status is a success; `ItemRequest`
changes the *event* of a failed item to a failure."""

from __future__ import annotations

import ast
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject
from celery.signals import worker_process_init, worker_process_shutdown
from celery.worker.request import Request
from kombu.exceptions import OperationalError
from redis import RedisError

from farm.devices.device import Card
from farm.errors import (
    CardUnavailable,
    DatabaseUnreachable,
    FarmError,
    SchemaMismatch,
    UnhealthyCard,
)
from farm.jobs import cards
from farm.jobs.compile_ahead import CompileAhead
from farm.jobs.item_driver import ItemDriver, log
from farm.jobs.items import Claim, FollowUp
from farm.jobs.outage import Outage
from farm.jobs.spool import Spool
from farm.settings import die_with_parent, settings
from farm.store.database import Database
from farm.store.tables import CardState
from tasks import logs  # noqa: F401 - a pool process logs in the same form as its worker
from tasks.app import CARD_VARIABLE, HOLDER_VARIABLE, app, broker_unreachable
from tasks.queues import card_queue, follow_up
from tasks.servers import STOPPING


class PoolProcess:
    """The state of a pool process; the task `measure` has it, of which Celery creates one per
    process.

    Attributes:
        worker: measures on the card; None before `begin`.
        parent: the process id of the worker's main process; None before `begin`.
        ended: set when the process ends.
        stop_signals: the signals to stop. A list, not an Event: the signal handler may interrupt
            code that holds the lock of an Event.
        lock: the thread that registers the card and the Celery tasks use the same benchmark
            process, one at a time.
    """

    def __init__(self) -> None:
        self.worker: CardWorker | None = None
        self.parent: int | None = None
        self.ended = threading.Event()
        self.stop_signals: list[int] = []
        self.lock = threading.Lock()

    @property
    def is_orphan(self) -> bool:
        """True if the worker's main process has ended."""
        return self.parent is not None and os.getppid() != self.parent


@dataclass
class CardWorker(ItemDriver):
    """The item driver of a pool process. It also publishes messages, sends Celery events and stops
    with its worker.
    """

    task: Any = None  # the Celery task that runs now
    process: PoolProcess = field(default_factory=PoolProcess)
    _events: Outage = field(
        default_factory=partial(Outage, log, "No events for Flower"), init=False
    )

    def registered(self, card: Card) -> None:
        """Store a fingerprint of the card. Without one, the card can measure too."""
        try:
            self.take_fingerprint(card)
        except FarmError as error:
            log.warning(
                "The fingerprint of card %s could not be measured: %s", card.id, error.message
            )

    def follow_up(self, closed: FollowUp) -> None:
        """Publish the messages that follow from a closed item. If this fails, the reconciler
        publishes them later.
        """
        try:
            follow_up(self.database, closed)
        except FarmError as error:
            log.warning(
                "Messages could not be published; the reconciler publishes them later: %s",
                error.message,
            )

    def phase(self, claimed: Claim, phase: str, details: dict[str, Any]) -> None:
        # With the cards of a group as its arguments, Flower shows which item holds them.
        group = {"args": f"{claimed.label} on {', '.join(claimed.cards)}"} if claimed.cards else {}
        self._send_event(f"task-{phase}", item=claimed.item_id, operator=claimed.label, **group)

    def retrying(self, reason: str, message: str) -> None:
        self._send_event("task-retried", exception=f"{reason}: {message}", traceback="")

    def _send_event(self, kind: str, **fields: Any) -> None:
        """Send an event for Flower. If the broker does not accept it, the measurement continues
        without it.
        """
        try:
            self.task.send_event(kind, **fields)
            self._events.over()
        except (OperationalError, RedisError) as error:
            self._events.note(broker_unreachable(settings().broker_url, error))

    def ending(self) -> bool:
        return self.process.ended.is_set() or self.stop_requested() or self.process.is_orphan

    def stop_requested(self) -> bool:
        return bool(self.process.stop_signals)

    def stay_registered(self, heartbeat_s: float) -> None:
        """Register the card; register it again after its release from quarantine, or if registering
        failed.

        This runs in a thread until the process ends, since a benchmark process ends with the thread
        that started it."""
        self._register_again()
        while not self.process.ended.wait(heartbeat_s):
            if time.monotonic() - self.claimed_at_s < heartbeat_s:
                continue  # the claim read the state of the card
            try:
                state = cards.stored_state(self.database, self.card_id)
            except FarmError:
                continue  # the worker's heartbeat logs it
            if state == CardState.STARTING or (
                self.software is None and state != CardState.QUARANTINED
            ):
                self._register_again()

    def _register_again(self) -> None:
        try:
            with self.process.lock:
                self.software = None  # with None, `prepare_card` writes the card's row again
                self.prepare_card()
        except FarmError as error:
            log.error(
                "The card %s cannot measure: %s %s", self.card_id, error.message, error.next_step
            )
        except Exception:  # the thread must live on
            log.exception("The card %s cannot measure", self.card_id)


@worker_process_init.connect(weak=False)
def begin(**_: Any) -> None:
    """Prepare a pool process: let it end with its worker, start the benchmark process, register the
    card.
    """
    card_id = os.environ.get(CARD_VARIABLE)
    if not card_id:
        return
    process = measure.process
    process.parent = os.getppid()
    die_with_parent()
    signal.signal(STOPPING, lambda number, _frame: process.stop_signals.append(number))
    current = settings()
    worker = CardWorker.with_process(
        card_id,
        os.environ[HOLDER_VARIABLE],
        Database(current.database),
        spool=Spool(current.state_dir / "spool"),
        queue=card_queue(card_id),
        process=process,
    )
    worker.ahead = CompileAhead(
        worker.database, card_id, lambda ids: worker.follow_up(FollowUp(woken=tuple(ids)))
    )
    process.worker = worker
    worker.benchmark.start()
    threading.Thread(
        target=worker.stay_registered, args=(current.heartbeat_s,), name="register", daemon=True
    ).start()


@worker_process_shutdown.connect(weak=False)
def end(**_: Any) -> None:
    """End the benchmark process when its pool process ends."""
    process = measure.process
    process.ended.set()
    if process.worker is not None:
        process.worker.close()
        process.worker.database.close()


class ItemRequest(Request):  # type: ignore[misc]
    """One message in the worker's main process; Celery creates it (`Task.Request`). It changes only
    the events.
    """

    def send_event(self, type: str, **fields: Any) -> None:
        if type == "task-succeeded" and (reason := failure(fields.get("result"))):
            type, fields = (
                "task-failed",
                {"exception": reason, "traceback": "", "runtime": fields.get("runtime")},
            )
        super().send_event(type, **fields)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        returned = super().on_failure(
            exc_info, send_failed_event=send_failed_event, return_ok=return_ok
        )
        exception = exc_info.exception
        if isinstance(getattr(exception, "exc", exception), Ignore):
            # Celery sends no event for an ignored message; without one, Flower shows it as started
            # for ever.
            self.send_event(
                "task-declined",
                exception="nothing to do: the item is closed, moved or claimed by another worker",
            )
        return returned


def failure(result: object) -> str:
    """Return 'REASON: MESSAGE' from the text of a failed item's status; '' for any other result."""
    try:
        status = ast.literal_eval(str(result))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    if not isinstance(status, Mapping) or status.get("status") != "failed":
        return ""
    reason, message = status.get("reason") or "failed", status.get("message")
    return f"{reason}: {message}" if message else str(reason)


class MeasureTask(Task):  # type: ignore[misc]
    """Has the state of its pool process."""

    def __init__(self) -> None:
        self.process = PoolProcess()


@app.task(
    name="measure",
    base=MeasureTask,
    bind=True,
    max_retries=settings().max_attempts,
    default_retry_delay=0,
    retry_on_worker_lost=True,
    Request=ItemRequest,
)
def measure(self: MeasureTask, item_id: int) -> dict[str, Any]:
    """Measure one item on this worker's card.

    Returns:
        {"item": id, "status": a status of `farm.jobs.item_driver.ItemOutcome`}. If the item
        failed, also "reason" and "message".
    """
    worker = self.process.worker
    assert worker is not None, "card queues are consumed by pinned workers only"
    with self.process.lock:
        return run_item(self, worker, item_id)


def run_item(task: Task | None, worker: CardWorker, item_id: int) -> dict[str, Any]:
    """Run one item and return its status.

    Raises:
        Ignore: there is nothing to do, or the card cannot measure; its items wait in the database.
        Reject: this worker is stopping; the message returns to the queue.
        DatabaseUnreachable, SchemaMismatch: see `ItemDriver.retried`.
    """
    worker.task = task
    try:
        outcome = worker.run(item_id)
    except (DatabaseUnreachable, SchemaMismatch) as error:
        if not worker.stop_requested():
            raise
        raise Reject(error.message, requeue=True) from error
    except CardUnavailable as error:
        if worker.ending():
            raise Reject(error.message, requeue=True) from error
        raise Ignore() from error
    except UnhealthyCard as error:
        raise Ignore() from error
    if outcome.status in ("declined", "fenced"):
        raise Ignore()
    why = (
        {"reason": outcome.reason, "message": outcome.message[:300]}
        if outcome.status == "failed"
        else {}
    )
    return {"item": item_id, "status": outcome.status, **why}
