"""One worker process of a host: the Celery worker of one card, or the control worker.

    python -m tasks.main card ID         serve one card (CUDA_VISIBLE_DEVICES is set before Python
                                         starts)
    python -m tasks.main control ID...   aggregation, rounds, reconciling, regular checks of these
                                         cards; no CUDA context

`tasks.supervisor` starts them. Celery's own processes never import torch: only the benchmark
process of the card has a CUDA context. Only a worker may import this module, since it removes most
of Celery's remote commands from the process."""

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
from functools import partial
from pathlib import Path
from typing import Any

from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from celery.signals import worker_shutting_down
from celery.worker import state as worker_state
from celery.worker.control import Panel, inspect_command

from farm.devices.device import Card
from farm.devices.host import check_semaphores, find_card
from farm.devices.lock import CardLock
from farm.devices.software import program_versions
from farm.errors import FarmError, FarmUnavailable, NoSuchCard
from farm.jobs import cards, leases
from farm.jobs.outage import Outage
from farm.jobs.own_card import heartbeat
from farm.jobs.spool import Spool
from farm.settings import Settings, die_with_parent, settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import CardState
from tasks import logs
from tasks.app import CARD_VARIABLE, HOLDER_VARIABLE, app
from tasks.doctor.broker import QUESTION, SUPERVISOR
from tasks.heartbeats import HostHeartbeat
from tasks.message_filter import CONTROL_QUEUE
from tasks.queues import card_queue, control_messages, follow_up, own_farm
from tasks.servers import STOPPING
from tasks.supervisor import state_of_supervisor
from tasks.watchdog import Pulse, StallWatchdog, guard

log = logging.getLogger("farm.worker")

_SUPERVISOR = os.getppid()


def serve_card(card_id: str) -> int:
    """Run the worker of one card until it is stopped; return the exit code. Raises `CardBusy` if
    another worker on this host serves the card; `SettingsError` if locks do not work in the lock
    folder of the settings; `FarmUnavailable` if this host cannot create semaphores."""
    check_semaphores()
    current = settings()
    holder = cards.holder_name(card_id, current.host, os.getpid(), uuid.uuid4().hex[:8], own_farm())
    os.environ[HOLDER_VARIABLE] = holder
    os.environ[CARD_VARIABLE] = card_id
    database = _answering_database(current)
    spool = Spool(current.state_dir / "spool")
    watchdog = StallWatchdog(
        f"card {card_id}", current.deaf_after_s, partial(_items_wait, database, card_id)
    )
    pulse = Pulse()
    beats = HostHeartbeat(holder, current, pulse)

    def beat() -> None:
        """Renew the claims of the pool process. This runs in the main process: the pool process may
        hang or be dead.
        """
        # Spooled readings first: their leases may have ended while the database was unreachable.
        _flush(spool, database, card_id)
        beats.beat(database, _claimed_items())
        watchdog.exit_if_stalled(current)

    with CardLock(card_id, current.lock_dir, started_by=os.getppid()):
        # Spooled readings first, before a new claim invalidates their tokens.
        _flush(spool, database, card_id)
        # This process has the card's lock, so no other worker measures: end the leases of an
        # earlier worker.
        leases.release_card(database, card_id)
        _announce(database, card_id, holder, current)
        try:
            with heartbeat(beat):
                return _celery_worker(
                    f"card-{card_id}@{current.host}", card_queue(card_id), pulse, pool="prefork"
                )
        finally:
            with contextlib.suppress(FarmError):
                ended = state_of_supervisor(_SUPERVISOR) == "ended"
                cards.stopped(
                    database,
                    holder,
                    "its supervisor (`farm worker`) ended unexpectedly" if ended else "",
                )
            database.close()


def _announce(database: Database, card_id: str, holder: str, current: Settings) -> None:
    """Register the worker of the card before the import of torch, which takes long and may fail.
    Raises `NoSuchCard` if this host does not find the card, and it is not registered."""
    card: Card | None = None
    try:
        card = find_card(card_id, current)
    except NoSuchCard:
        # if the card is registered, its benchmark process fails too, and the card is quarantined
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
        log.exception(
            "The readings in the spool %s could not be written to the database", spool.folder
        )


def _claimed_items() -> set[int]:
    """Return the ids of items whose messages this worker has. `beat` renews only their leases."""
    for _ in range(10):
        with contextlib.suppress(RuntimeError):  # the sets change while they are read
            requests = {*worker_state.active_requests, *worker_state.reserved_requests}
            return {
                request.args[0]
                for request in requests
                if request.args and isinstance(request.args[0], int)
            }
    return set()


def _items_wait(database: Database, card_id: str) -> bool:
    """Return True if the card is idle and published items wait for it."""
    with database.read() as session:
        card = session.get(tables.CardRow, card_id)
        return (
            card is not None
            and card.state == CardState.IDLE
            and bool(cards.silent_times_s(session, [card]))
        )


def serve_control(card_ids: Sequence[str]) -> int:
    """Run the control worker of this host until it is stopped; return the exit code. ``card_ids``:
    the cards that its supervisor serves, which it checks regularly if the settings say so."""
    current = settings()
    database = _answering_database(current)
    ended = threading.Event()
    checks = None
    if current.check_every_s and not own_farm():
        from tasks.card_checks import RegularChecks  # here, so that other workers start faster

        checks = RegularChecks(current, card_ids, database)
        threading.Thread(target=checks.run, args=(ended,), daemon=True).start()
    if current.metrics_port and not own_farm():
        from tasks import metrics  # imported here, so that the workers of cards start faster

        metrics.serve(current, supervisor=_SUPERVISOR, checks=checks)
    threading.Thread(target=_reconcile_regularly, args=(current, ended), daemon=True).start()
    threading.Thread(target=_watch_control_queue, args=(current, ended), daemon=True).start()
    try:
        return _celery_worker(f"control@{current.host}", CONTROL_QUEUE, Pulse(), pool="threads")
    finally:
        ended.set()


def _watch_control_queue(current: Settings, ended: threading.Event) -> None:
    watchdog = StallWatchdog(
        "the control worker", current.deaf_after_s, lambda: control_messages() > 0
    )
    while not ended.wait(current.heartbeat_s):
        with contextlib.suppress(FarmError):  # the broker is away: the consumer logs it
            watchdog.exit_if_stalled(current)


def _reconcile_regularly(current: Settings, ended: threading.Event) -> None:
    # imported here, so that the workers of cards start faster
    from tasks.reconciler import Reconciler

    Reconciler(current, Database(current.database)).run(ended)


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


def _celery_worker(name: str, queue: str, pulse: Pulse, *, pool: str) -> int:
    """Run a worker until it is stopped; return its exit code. ``pulse`` gets the signs of life of
    its main loop.
    """
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
    worker.pulse = pulse
    # At every lost connection. Celery sets another filter when it sets up logging.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    # with it, child processes log billiard's plain text at their start
    os.environ.pop("_MP_FORK_LOGLEVEL_", None)
    guard(name, pulse)
    # a new pool process inherits this until it sets its handler
    signal.signal(STOPPING, signal.SIG_IGN)

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
    parser.add_argument("cards", nargs="*")
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args(arguments)
    # SIGKILL in an embedded farm: its broker dies with the command too, and a normal stop of Celery
    # would wait for it.
    die_with_parent(signal.SIGKILL if own_farm() else signal.SIGTERM, options.parent)
    logs.set_up()
    try:
        if options.role == "control":
            return serve_control(options.cards)
        return serve_card(options.cards[0])
    except FarmError as error:
        log.error("%s %s", error.message, error.next_step)
        return error.exit_code


# ----------------------------------------------------------------------------------------------
# remote control

_commands = Path(__file__).with_name("remote_commands.txt").read_text("utf-8").splitlines()
#: The remote commands that a worker executes for Flower, `farm doctor` and others. It refuses
#: Celery's other commands.
ALLOWED = frozenset({QUESTION}.union(*(line.partition("#")[0].split() for line in _commands)))

_loaded = program_versions()  # the versions at the start: a later installation does not change them
inspect_command(name=QUESTION)(
    lambda _state: {**_loaded, SUPERVISOR: state_of_supervisor(_SUPERVISOR)}
)


for _name in set(Panel.data) - ALLOWED:
    Panel.data[_name] = lambda _state, **_: {
        "error": "refused: this command would disturb measurements (tasks/remote_commands.txt)"
    }
