"""One worker process of a host: the Celery worker of one card, or the control worker.

    python -m tasks.main card ID      serve one card (CUDA_VISIBLE_DEVICES is set before Python starts)
    python -m tasks.main control      aggregation, rounds, reconciling; no card

`tasks.supervisor` starts them. Celery's own processes never import torch: only the benchmark process of the card has a
CUDA context. Only a worker may import this module, since it removes most of Celery's remote commands from the process.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from celery.signals import worker_shutting_down
from celery.worker import state as worker_state
from celery.worker.control import Panel, inspect_command

from farm.devices.device import Card
from farm.devices.host import check_semaphores, find_card, program_versions
from farm.devices.lock import CardLock
from farm.errors import BrokerUnreachable, DatabaseUnreachable, FarmError, FarmUnavailable, NoSuchCard
from farm.jobs import cards, items
from farm.jobs.item_driver import Spool, heartbeat
from farm.jobs.outage import Outage
from farm.settings import Settings, die_with_parent, settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import CardState
from tasks import logs
from tasks.app import CARD_VARIABLE, HOLDER_VARIABLE, app
from tasks.broker_checks import QUESTION, SUPERVISOR
from tasks.broker_probe import check_broker_works
from tasks.heartbeats import HostHeartbeat
from tasks.message_filter import CONTROL_QUEUE
from tasks.queues import card_queue, follow_up, own_farm, takes_turn
from tasks.servers import STOPPING
from tasks.supervisor import state_of_supervisor

log = logging.getLogger("farm.worker")

#: The exit code of a worker that ends because it receives no messages any more (EX_TEMPFAIL).
STALLED = 75

_SUPERVISOR = os.getppid()


def serve_card(card_id: str) -> int:
    """Run the worker of one card until it is stopped; return the exit code. Raises `CardBusy` if another worker on this
    host serves the card; `SettingsError` if locks do not work in the lock folder of the settings; `FarmUnavailable` if
    this host cannot create semaphores."""
    check_semaphores()
    current = settings()
    holder = cards.holder_name(card_id, current.host, os.getpid(), uuid.uuid4().hex[:8], own_farm())
    os.environ[HOLDER_VARIABLE] = holder
    os.environ[CARD_VARIABLE] = card_id
    database = _answering_database(current)
    spool = Spool(current.state_dir / "spool")
    watchdog = StallWatchdog(card_id, current.deaf_after_s)
    beats = HostHeartbeat(holder, current)

    def beat() -> None:
        """Renew the claims of the pool process. This runs in the main process: the pool process may hang or be dead."""
        # Spooled readings first: their leases may have ended while the database was unreachable.
        _flush(spool, database, card_id)
        beats.beat(database, _claimed_items())
        watchdog.exit_if_stalled(database, current)

    with CardLock(card_id, current.lock_dir, started_by=os.getppid()):
        # Spooled readings first, before a new claim invalidates their tokens.
        _flush(spool, database, card_id)
        # This process has the card's lock, so no other worker measures: end the leases of an earlier worker.
        items.release_card(database, card_id)
        _announce(database, card_id, holder, current)
        try:
            with heartbeat(beat):
                return _celery_worker(f"card-{card_id}@{current.host}", card_queue(card_id), pool="prefork")
        finally:
            with contextlib.suppress(FarmError):
                ended = state_of_supervisor(_SUPERVISOR) == "ended"
                cards.stopped(database, holder, "its supervisor (`farm worker`) ended unexpectedly" if ended else "")
            database.close()


def _announce(database: Database, card_id: str, holder: str, current: Settings) -> None:
    """Register the worker of the card before the import of torch, which takes long and may fail. Raises `NoSuchCard` if
    this host does not find the card, and it is not registered."""
    card: Card | None = None
    try:
        card = find_card(card_id, current)
    except NoSuchCard:  # if the card is registered, its benchmark process fails too, and the card is quarantined
        if not cards.stored_state(database, card_id):
            raise
    cards.announce(database, card_id, card, holder=holder, queue=card_queue(card_id))


def _flush(spool: Spool, database: Database, card_id: str) -> None:
    try:
        for closed in spool.flush(database, card_id):
            follow_up(database, closed)
    except FarmError:
        return  # the database is away: the caller's next query reports it
    except Exception:  # a file that cannot be read or removed must not make the card look lost
        log.exception("The readings in the spool %s could not be written to the database", spool.folder)


def _claimed_items() -> set[int]:
    """Return the ids of items whose messages this worker has. `beat` renews only their leases."""
    for _ in range(10):
        with contextlib.suppress(RuntimeError):  # the sets change while they are read
            requests = {*worker_state.active_requests, *worker_state.reserved_requests}
            return {request.args[0] for request in requests if request.args and isinstance(request.args[0], int)}
    return set()


@dataclass
class StallWatchdog:
    """Ends a worker that gets no messages although published items wait for ``limit_s`` (0: no limit); its supervisor
    then starts a new worker.

    A worker may send heartbeats and answer pings, but process no messages: after an error between receiving a message
    and passing it to the pool, Celery waits for this message for ever. No other worker reads the card's queue.
    """

    card_id: str
    limit_s: float
    _taken: int = -1
    _progress_at_s: float = 0.0

    def stalled(self, database: Database, *, taken: int, at_work: bool, now_s: float) -> bool:
        """Return True if the worker has stalled. Called at every heartbeat, with the number of messages that the pool
        has received so far, and whether the worker measures an item now. ``now_s``: of a monotonic clock."""
        if taken != self._taken or at_work or not self.limit_s or not self._items_wait(database):
            self._taken, self._progress_at_s = taken, now_s
        return now_s - self._progress_at_s > self.limit_s > 0

    def exit_if_stalled(self, database: Database, current: Settings) -> None:
        """End this process at once if it has stalled, unless the broker is the cause. A normal stop would requeue the
        message that stalled it."""
        now_s = time.monotonic()
        taken, at_work = worker_state.all_total_count[0], bool(worker_state.active_requests)
        if self.stalled(database, taken=taken, at_work=at_work, now_s=now_s):
            self._progress_at_s = now_s
            try:
                check_broker_works(current)
            except BrokerUnreachable:
                return  # the cause: the consumer waits for the broker, and has logged it
            log.error(
                "Items wait for card %s, but the worker received no message for %g s; it restarts",
                self.card_id,
                self.limit_s,
            )
            os._exit(STALLED)

    def _items_wait(self, database: Database) -> bool:
        with database.read() as session:
            card = session.get(tables.CardRow, self.card_id)
            return card is not None and card.state == CardState.IDLE and bool(cards.silent_times_s(session, [card]))


def serve_control() -> int:
    """Run the control worker of this host until it is stopped; return the exit code."""
    current = settings()
    _answering_database(current)
    if current.metrics_port and not own_farm():
        from tasks import metrics  # imported here, so that the workers of cards start faster

        metrics.serve(current, supervisor=_SUPERVISOR)
    ended = threading.Event()
    threading.Thread(target=_reconcile_regularly, args=(current, ended), daemon=True).start()
    try:
        return _celery_worker(f"control@{current.host}", CONTROL_QUEUE, pool="threads")
    finally:
        ended.set()


def _reconcile_regularly(current: Settings, ended: threading.Event) -> None:
    from tasks.control import lost_after_s, reconcile_now

    database = Database(current.database)
    steady_since_s = time.monotonic()
    outage = Outage(log, "Jobs are not repaired, and no message is published again")
    while not ended.wait(current.reconcile_s):
        if not takes_turn(current.reconcile_s):
            continue
        began_s = time.monotonic()
        try:
            may_move = time.monotonic() - steady_since_s > lost_after_s(current)
            reconcile_now(database, current, own_farm(), may_move=may_move)
            if outage.lasts:
                check_broker_works(current)  # a pass that publishes nothing does not show that the broker works
            outage.over()
            # With a million open items a pass takes seconds. Passes may use only a part of the database's time.
            if (pause_s := 4 * (time.monotonic() - began_s)) > current.reconcile_s:
                takes_turn(pause_s, longer=True)
        except Exception as error:
            if isinstance(error, DatabaseUnreachable):
                steady_since_s = time.monotonic()
            outage.note(error)


def _answering_database(current: Settings) -> Database:
    """Wait until the database has the schema of this program and accepts writes; return it."""
    database = Database(current.database)
    outage = Outage(log, "This worker does not start")
    while True:
        try:
            database.check_schema()
            database.check_writes()
            outage.over()
            return database
        except FarmUnavailable as error:
            outage.note(error)
            time.sleep(min(current.heartbeat_s, 5.0))


def _celery_worker(name: str, queue: str, *, pool: str) -> int:
    # Celery warns if it runs as root; messages contain no executable code (docs/security.md).
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = app.Worker(
        hostname=name,
        queues=[queue],
        pool=pool,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
        loglevel=logging.INFO,
    )
    # At every lost connection. Celery sets another filter when it sets up logging.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    os.environ.pop("_MP_FORK_LOGLEVEL_", None)  # with it, child processes log billiard's plain text at their start
    signal.signal(STOPPING, signal.SIG_IGN)  # a new pool process inherits this until it sets its handler

    @worker_shutting_down.connect(weak=False)
    def _tell_pool(**_: Any) -> None:
        for pid in worker.pool.info.get("processes", ()) if worker.pool is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STOPPING)

    worker.start()
    return int(worker.exitcode or 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program of a worker process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks.main")
    parser.add_argument("role", choices=("card", "control"))
    parser.add_argument("card", nargs="?")
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args(arguments)
    # SIGKILL in an embedded farm: its broker dies with the command too, and a normal stop of Celery would wait for it.
    die_with_parent(signal.SIGKILL if own_farm() else signal.SIGTERM, options.parent)
    logs.set_up()
    try:
        return serve_control() if options.role == "control" else serve_card(options.card)
    except FarmError as error:
        log.error("%s %s", error.message, error.next_step)
        return error.exit_code


# ---------------------------------------------------------------------------------------------- remote control

_commands = Path(__file__).with_name("remote_commands.txt").read_text("utf-8").splitlines()
#: The remote commands that a worker executes for Flower, `farm doctor` and others. It refuses Celery's other commands.
ALLOWED = frozenset({QUESTION}.union(name for line in _commands for name in line.partition("#")[0].split()))

_loaded = program_versions()  # the versions at the start: a later installation does not change them
inspect_command(name=QUESTION)(lambda _state: {**_loaded, SUPERVISOR: state_of_supervisor(_SUPERVISOR)})


for _name in set(Panel.data) - ALLOWED:
    Panel.data[_name] = lambda _state, **_: {
        "error": "refused: this command would disturb measurements (tasks/remote_commands.txt)"
    }
