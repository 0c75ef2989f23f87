"""The task on a card's queue: claim the item, have the card's benchmark process measure it, write the result.

It always returns a status and never raises for what happened on the card: a chord whose header task raises never
runs its body. Only a copy of a message that finds nothing to do raises ``Ignore``, so that it does not count as
the chord's part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from celery import Task
from celery.exceptions import Ignore, Reject
from celery.signals import worker_process_init, worker_process_shutdown

from farm.benchmark_process.client import Answer, BenchmarkProcess
from farm.devices.host import open_device
from farm.errors import DatabaseUnreachable, FarmError, NoSuchCard, UnhealthyCard, Unmeasurable
from farm.jobs import cards, items
from farm.jobs.items import Claim, Closed, Declined
from farm.jobs.spool import Spool
from farm.settings import settings
from farm.store import tables
from farm.store.content import predicted_counts, store_observed
from farm.store.database import Database
from farm.store.tables import CardState
from farm.types.protocol import Software
from tasks import logs  # noqa: F401 - a pool process logs in its worker's form
from tasks.app import CARD_VARIABLE, HOLDER_VARIABLE, app
from tasks.events import ItemRequest, tell_retry
from tasks.parent_death import STOPPING, die_with_parent
from tasks.queues import card_queue, follow_up

log = logging.getLogger("farm.worker")

T = TypeVar("T")


@dataclass
class CardWorker:
    """What one pool process of one card's worker holds: the way to the database and the benchmark process."""

    card_id: str
    holder: str
    database: Database
    benchmark: BenchmarkProcess
    spool: Spool
    software: Software | None = None  # what the card is registered with; None while it is not

    def register(self) -> str:
        """Wait for the benchmark process and write the card down with its software; its software id.

        Raises:
            UnhealthyCard: it failed its check; the process is gone, and the next one checks again.
        """
        software = self.benchmark.wait_ready()
        if reason := self.benchmark.unhealthy:
            self.benchmark.kill()
            raise UnhealthyCard(reason, f"Look at the card, then `farm cards release {self.card_id}`.")
        if software != self.software:
            card = self.benchmark.card
            capabilities: tuple[str, ...] = ()
            with contextlib.suppress(FarmError):
                capabilities = tuple(open_device(card).capabilities)
            cards.register(
                self.database,
                card,
                software,
                holder=self.holder,
                queue=card_queue(card.id),
                capabilities=capabilities,
            )
            self.software = software
            self._fingerprint(card.id, card.driver)
        return software.id

    def _fingerprint(self, card_id: str, driver: str) -> None:
        """Take the card's fingerprint if it has none with this driver; the card is measured without one, too."""
        try:
            if cards.wants_fingerprint(self.database, card_id, driver):
                cards.keep_fingerprint(self.database, card_id, self.benchmark.fingerprint())
        except FarmError as error:
            log.warning("The card %s has no fingerprint: %s", card_id, error.message)


_worker: CardWorker | None = None
# The benchmark process is shared by the thread that registers and the tasks.
_lock = threading.Lock()
_ended = threading.Event()
# A list, not an Event: a signal adds to it, and may interrupt who holds an Event's lock.
_told_to_stop: list[int] = []
_parent: int | None = None  # the worker's main process


def _ending() -> bool:
    """Whether this process is on its way out: what ends with it was not the card's doing."""
    return _ended.is_set() or bool(_told_to_stop) or (_parent is not None and os.getppid() != _parent)


@worker_process_init.connect(weak=False)
def begin(**_: Any) -> None:
    """A fresh pool process: tie it to its worker, start the benchmark process, register the card when it is ready."""
    global _worker, _parent
    card_id = os.environ.get(CARD_VARIABLE)
    if not card_id:
        return
    _parent = os.getppid()
    die_with_parent()
    signal.signal(STOPPING, lambda number, _frame: _told_to_stop.append(number))
    current = settings()
    _worker = CardWorker(
        card_id,
        os.environ[HOLDER_VARIABLE],
        Database(current.database),
        BenchmarkProcess(card_id),
        Spool(current.state_dir / "spool"),
    )
    _worker.benchmark.start()
    threading.Thread(target=_stay_registered, args=(_worker, current.heartbeat_s), name="register", daemon=True).start()


def _stay_registered(worker: CardWorker, heartbeat_s: float) -> None:
    """Register the card, and again whenever its row awaits that: after a release, or where it failed before.

    The thread lives as long as its process, because a benchmark process that it starts ends with it.
    """
    _register(worker)
    while not _ended.wait(heartbeat_s):
        try:
            state = cards.written_state(worker.database, worker.card_id)
        except FarmError:
            continue  # the worker's heartbeat says so
        if state == CardState.STARTING or (worker.software is None and state != CardState.QUARANTINED):
            _register(worker)


def _register(worker: CardWorker) -> None:
    try:
        with _lock:
            worker.software = None  # so that it is written down again
            _ready(worker)
    except FarmError as error:
        log.error("The card %s cannot be served: %s %s", worker.card_id, error.message, error.next_step)
    except Exception:  # nobody else would register it later
        log.exception("The card %s cannot be served", worker.card_id)


@worker_process_shutdown.connect(weak=False)
def end(**_: Any) -> None:
    _ended.set()
    if _worker is not None:
        _worker.benchmark.close()
        _worker.database.close()


@app.task(
    name="measure",
    bind=True,
    max_retries=settings().max_attempts,
    default_retry_delay=0,
    retry_on_worker_lost=True,
    Request=ItemRequest,
)
def measure(self: Task, item_id: int) -> dict[str, Any]:
    """Measure one item on this worker's card.

    Returns:
        {"item": id, "status": "done" | "reused" | "failed" | "spooled", "reason": ..., "message": ...}
    """
    assert _worker is not None, "card queues are consumed by pinned workers only"
    with _lock:
        try:
            return _measure(self, _worker, item_id)
        except DatabaseUnreachable as error:
            if not _told_to_stop:
                raise
            raise Reject(error.message, requeue=True) from error  # for the next worker


def _measure(task: Task, worker: CardWorker, item_id: int) -> dict[str, Any]:
    current = settings()
    if item_id in worker.spool.items():
        # A new claim would take the token away from the reading that is there.
        for closed in _when_there(partial(worker.spool.flush, worker.database, worker.card_id), held=False):
            _follow_up(worker, closed)
    while True:
        if worker.software is None and _when_there(partial(_quarantined, worker), held=False):
            raise Ignore()  # no process is begun for each of its messages; released, it is given its items again
        software_id = _ready(worker)
        if software_id is None and _ending():
            raise Reject("The worker is stopping.", requeue=True)  # for the next one
        if software_id is None:
            raise Ignore()  # the card measures nothing any more; its items wait in the database
        taken = _when_there(
            lambda software_id=software_id: items.claim(  # type: ignore[misc]
                worker.database,
                item_id,
                card_id=worker.card_id,
                holder=worker.holder,
                software_id=software_id,
                lease_s=current.lease_s,
                max_attempts=current.max_attempts,
            ),
            held=False,
        )
        if isinstance(taken, Claim):
            status = _attempt(task, worker, taken)
            if status is not None:
                return status
            continue  # the process died under it; the next claim counts the attempt
        if taken.why is Declined.DEFERRED and item_id in taken.closed.woken:
            continue
        _follow_up(worker, taken.closed)
        if taken.why in (Declined.GONE, Declined.DEFERRED):
            raise Ignore()
        if taken.why is Declined.REUSED:
            return {"item": item_id, "status": "reused"}
        with worker.database.read() as session:
            item = session.get(tables.Item, item_id)
        told = {"reason": item.reason, "message": item.message[:300]} if item is not None else {}
        return {"item": item_id, "status": "failed", **told}


def _attempt(task: Task, worker: CardWorker, claimed: Claim) -> dict[str, Any] | None:
    """One attempt at a claimed item; None when it may be tried again."""
    current = settings()

    def tell(phase: str, details: dict[str, Any]) -> None:
        task.send_event(f"task-{phase}", item=claimed.item_id, operator=claimed.label)

    predicted, verify = None, False
    if claimed.role == "whole" and claimed.capture_id is not None:
        predicted, verify = _when_there(partial(predicted_counts, worker.database, claimed.capture_id, claimed.job_id))
        if not verify and worker.benchmark.card.kind != "simulated":
            predicted = None  # they serve verifying; only a simulated card makes its figures of them
    try:
        answer = worker.benchmark.measure(
            claimed.subject,
            claimed.protocol,
            claimed.stopping,
            predicted=predicted,
            verify=verify,
            timeout_s=current.item_timeout_s,
            on_phase=tell,
        )
    except Unmeasurable as error:
        log.warning("%s: %s (%s)", claimed.label, error.message, error.reason)
        if error.reason == "crashed":
            noted = _when_there(partial(items.note_attempt, worker.database, claimed, error.reason, error.message))
            _follow_up(worker, noted)
            tell_retry(task, error.reason, error.message)
            return None
        _follow_up(worker, _when_there(partial(items.fail, worker.database, claimed, error.reason, error.message)))
        return {"item": claimed.item_id, "status": "failed", "reason": error.reason, "message": error.message[:300]}
    if answer.verification is not None and claimed.capture_id is not None:
        observed_id = _when_there(
            partial(
                store_observed,
                worker.database,
                claimed.capture_id,
                answer.observed,
                answer.verification,
                card_id=worker.card_id,
            )
        )
        if observed_id is not None:
            _when_there(partial(items.drop_not_run, worker.database, claimed.job_id, observed_id))
    closed = _write_down(worker, claimed, answer)
    if closed is None:
        return {"item": claimed.item_id, "status": "spooled"}
    _follow_up(worker, closed)
    if not closed.accepted:
        raise Ignore()
    return {"item": claimed.item_id, "status": "done"}


def _write_down(worker: CardWorker, claimed: Claim, answer: Answer) -> Closed | None:
    """Write the reading into the database or, while that is away, into the spool (None): it cost card time.

    Where both are full, often on one disk, it waits here until one of them has room, as long as a task may take. Its
    token decides in the end, wherever it waited. What the database refuses for another reason is kept as well, and told.
    """
    pauses_s = _pauses_s(0.5)
    keep = partial(worker.spool.keep, claimed, answer.reading, card_id=worker.card_id, software_id=answer.software.id)
    while True:
        try:
            return items.complete(
                worker.database, claimed, answer.reading, card_id=worker.card_id, software_id=answer.software.id
            )
        except DatabaseUnreachable as away:
            try:
                keep()
            except OSError as error:
                log.warning("The reading of %s waits in memory: %s The spool: %s", claimed.label, away.message, error)
                time.sleep(next(pauses_s))
                continue
            log.warning("The database is away; the reading of %s waits in %s", claimed.label, worker.spool.folder)
            return None
        except Exception:
            with contextlib.suppress(OSError):
                keep()
                log.error("The reading of %s could not be written and waits in %s", claimed.label, worker.spool.folder)
            raise


def _quarantined(worker: CardWorker) -> bool:
    return cards.written_state(worker.database, worker.card_id) == CardState.QUARANTINED


def _ready(worker: CardWorker) -> str | None:
    """The software id once the card can measure; None when it cannot, and the card is put in quarantine.

    Not where this process is ending: its benchmark process is ended then while it gets ready, and no fault is the card's.
    """
    for last in (False, True):
        try:
            return str(_when_there(worker.register, held=False))
        except UnhealthyCard as error:
            reason = error.message
            break
        except Unmeasurable as error:
            reason = error.message
            if _ending():
                worker.software = None
                return None
            if last:
                break
            log.warning("The benchmark process of %s did not get ready: %s", worker.card_id, error.message)
    worker.software = None
    try:
        _when_there(
            partial(cards.quarantine, worker.database, worker.card_id, reason, farm=cards.farm_of(worker.holder)),
            held=False,
        )
    except NoSuchCard:
        log.error("The card %s cannot be served: %s", worker.card_id, reason)
    else:
        log.error("The card %s is put in quarantine: %s", worker.card_id, reason)
    return None


def _when_there(ask: Callable[[], T], *, held: bool = True) -> T:
    """Ask the database, and wait while it is away: without it there is nothing that this card could do.

    Args:
        held: the worker has a claim whose outcome is to be written, and goes on trying when it is told to stop.

    Raises:
        DatabaseUnreachable: it stayed away for as long as an item may take; the task fails, and the item's claim, if
            it had one, ends by itself. Or the worker is to stop.
    """
    deadline_s = time.monotonic() + max(settings().item_timeout_s, 60.0)
    pauses_s = _pauses_s(2.0)
    while True:
        try:
            return ask()
        except DatabaseUnreachable as error:
            pause_s = next(pauses_s)
            if time.monotonic() + pause_s > deadline_s or (_told_to_stop and not held):
                raise
            log.warning("Waiting for the database: %s", error.message)
            time.sleep(pause_s)


def _pauses_s(most_s: float) -> Iterator[float]:
    """How long to wait before each next try: twice as long as before, up to a limit."""
    pause_s = 0.1
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)


def _follow_up(worker: CardWorker, closed: Closed) -> None:
    """Publish what follows; what cannot be published now, the reconciler finds in the database."""
    try:
        follow_up(worker.database, closed)
    except FarmError as error:
        log.warning("Left to the reconciler: %s", error.message)
