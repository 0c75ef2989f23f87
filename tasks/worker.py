"""The workers of one host: a pinned Celery worker per card, one control worker beside them, and their supervisor.

    python -m tasks.main card ID      serve one card (CUDA_VISIBLE_DEVICES is set before Python starts)
    python -m tasks.main control      aggregation, rounds, reconciling; no card

`farm worker` supervises all of a host's (`run`).

Celery's own processes never import torch: the card's benchmark process alone owns the CUDA context.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from celery.exceptions import SecurityWarning
from celery.signals import worker_shutting_down
from celery.worker import state as worker_state

from farm.devices.device import Card
from farm.devices.host import find_card
from farm.devices.lock import CardLock
from farm.errors import DatabaseUnreachable, FarmError, NoSuchCard
from farm.jobs import cards, items
from farm.jobs.spool import Spool
from farm.settings import Settings, environment_of_children, settings
from farm.store.database import Database
from tasks import logs, remote_control  # noqa: F401 - what a worker answers to others
from tasks.app import CARD_VARIABLE, CONTROL_QUEUE, EMBEDDED_VARIABLE, HOLDER_VARIABLE, app, configure
from tasks.queues import card_queue, follow_up
from tasks.servers import STOPPING, die_with_parent
from tasks.stall_watchdog import Hearing

log = logging.getLogger("farm.worker")

#: A worker that dies is started again after these pauses; one that ran this long starts over at the first.
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_AFTER_S = 60.0
#: Beyond the longest time that one item may take; deploy/ gives a host's workers a little more than both.
STOP_MARGIN_S = 30.0


# ---------------------------------------------------------------------------------------------- one worker


def serve_card(card_id: str) -> int:
    """Be the worker of one card until told to stop.

    Raises:
        CardBusy: another worker on this host serves the card.
        SettingsError: there can be no locks where the setting has them.
    """
    current = settings()
    holder = cards.holder_name(
        card_id, current.host, os.getpid(), uuid.uuid4().hex[:8], os.environ.get(EMBEDDED_VARIABLE, "")
    )
    os.environ[HOLDER_VARIABLE] = holder
    os.environ[CARD_VARIABLE] = card_id
    database = Database(current.database)
    database.check_schema()
    with CardLock(card_id, current.lock_dir, started_by=os.getppid()):
        # What waits on disk first, before a new claim takes its token away.
        _flush(Spool(current.state_dir / "spool"), database, card_id)
        # Nobody else can be measuring on this card now: what an earlier worker held is free at once.
        items.release_card(database, card_id)
        _announce(database, card_id, holder, current)
        ended = threading.Event()
        beat = threading.Thread(target=_heartbeat, args=(database, card_id, holder, current, ended), daemon=True)
        beat.start()
        try:
            return _celery_worker(
                name=f"card-{card_id}", queues=[card_queue(card_id)], pool="prefork", host=current.host
            )
        finally:
            ended.set()
            with contextlib.suppress(FarmError):
                cards.stopped(database, holder)
            database.close()


def _announce(database: Database, card_id: str, holder: str, current: Settings) -> None:
    """Be seen as the card's worker from the start: importing torch takes long, and what fails then has a row to say so.

    Raises:
        NoSuchCard: this host has no such card now, and the database knows none.
    """
    try:
        card: Card | None = find_card(card_id, current)
    except NoSuchCard:
        if not cards.written_state(database, card_id):
            raise
        card = None  # its benchmark process will say the same, and why it is in quarantine
    cards.announce(database, card_id, card, holder=holder, queue=card_queue(card_id))


def serve_control() -> int:
    """Be the control worker of this host."""
    current = settings()
    Database(current.database).check_schema()
    if current.metrics_port and not os.environ.get(EMBEDDED_VARIABLE):
        from tasks import metrics  # the workers of cards start faster without

        metrics.serve(current)
    ended = threading.Event()
    threading.Thread(target=_reconcile_regularly, args=(current, ended), daemon=True).start()
    try:
        return _celery_worker(name="control", queues=[CONTROL_QUEUE], pool="threads", host=current.host)
    finally:
        ended.set()


def _celery_worker(*, name: str, queues: Sequence[str], pool: str, host: str) -> int:
    # It names an option that is not ours. As root or not, nothing that travels is executable (docs/security.md).
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = app.Worker(
        hostname=f"{name}@{host}",
        queues=list(queues),
        pool=pool,
        concurrency=1,
        prefetch_multiplier=1,
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
        loglevel=logging.INFO,
        optimization="fair",
    )
    logs.keep_form()
    signal.signal(STOPPING, signal.SIG_IGN)  # as a pool process begins that cannot hear it yet

    @worker_shutting_down.connect(weak=False)
    def _tell_pool(**_: Any) -> None:
        for pid in worker.pool.info.get("processes", ()) if worker.pool is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STOPPING)

    worker.start()
    return int(worker.exitcode or 0)


def _heartbeat(database: Database, card_id: str, holder: str, current: Settings, ended: threading.Event) -> None:
    """Renew what the pool process holds, from outside it: it may be busy, hung or dead."""
    spool = Spool(current.state_dir / "spool")
    hearing = Hearing(card_id, current.deaf_after_s)
    while not ended.wait(min(current.heartbeat_s, current.lease_s / 3)):
        # What waits on disk first: its claims may have ended while the database was away.
        _flush(spool, database, card_id)
        try:
            items.renew(database, holder, current.lease_s, _in_work())
            cards.seen(database, holder)
            hearing.leave_if_lost(database, current)
        except FarmError as error:
            log.warning("Heartbeat: %s", error.message)
        except Exception:
            log.exception("Heartbeat failed")


def _flush(spool: Spool, database: Database, card_id: str) -> None:
    try:
        for closed in spool.flush(database, card_id):
            follow_up(database, closed)
    except FarmError as error:
        log.warning("Spool: %s", error.message)
    except Exception:  # a file that cannot be read or removed must not make the card seem lost
        log.exception("The spool in %s could not be emptied", spool.folder)


def _in_work() -> set[int]:
    """The items whose messages this worker holds. A claim without one has lost its work, and its lease may end."""
    for _ in range(10):
        with contextlib.suppress(RuntimeError):  # the sets change while they are read
            requests = {*worker_state.active_requests, *worker_state.reserved_requests}
            return {request.args[0] for request in requests if request.args and isinstance(request.args[0], int)}
    return set()


def _reconcile_regularly(current: Settings, ended: threading.Event) -> None:
    from tasks.recovery import lost_after_s, reconcile_now

    database = Database(current.database)
    steady_since_s = time.monotonic()
    while not ended.wait(current.reconcile_s):
        try:
            may_move = time.monotonic() - steady_since_s > lost_after_s(current)
            reconcile_now(database, current, os.environ.get(EMBEDDED_VARIABLE, ""), may_move=may_move)
        except DatabaseUnreachable as error:
            steady_since_s = time.monotonic()
            log.warning("Reconciling: %s", error.message)
        except FarmError as error:
            log.warning("Reconciling: %s", error.message)
        except Exception:
            log.exception("Reconciling failed")


# ---------------------------------------------------------------------------------------------- the supervisor


@dataclass
class Child:
    """One worker process under the supervisor."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    deaths: int = 0
    not_before_s: float = 0.0
    last_exit: int | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Starts a host's workers, restarts with back-off what dies, stops all in order.

    Children are in sessions of their own, so that Ctrl-C reaches only the supervisor, and die with it.
    """

    def __init__(
        self, card_ids: Sequence[str], *, environment: Mapping[str, str] | None = None, log_dir: Path | None = None
    ) -> None:
        shared = dict(environment or {})
        self.log_dir = log_dir
        self.children = [Child("control", ("control",), {**shared, "CUDA_VISIBLE_DEVICES": ""})]
        self.children += [
            Child(card_id, ("card", card_id), {**shared, "CUDA_VISIBLE_DEVICES": visible_devices(card_id)})
            for card_id in card_ids
        ]

    def start(self) -> None:
        for child in self.children:
            self._start(child)

    def tend(self) -> list[Child]:
        """Restart what died and whose pause is over; the children found dead by this call."""
        now = time.monotonic()
        found = []
        for child in self.children:
            if child.running:
                continue
            if child.process is not None:
                child.last_exit = child.process.returncode
                steady = now - child.started_s > STEADY_AFTER_S
                child.deaths = 1 if steady else child.deaths + 1
                child.not_before_s = now + BACK_OFF_S[min(child.deaths, len(BACK_OFF_S)) - 1]
                child.process = None
                found.append(child)
                log.warning(
                    "Worker %s ended with %s; starting it again in %.1f s",
                    child.name,
                    child.last_exit,
                    child.not_before_s - now,
                )
            elif now >= child.not_before_s:
                self._start(child)
        return found

    def stop(self, grace_s: float, at_once: Callable[[], bool] = lambda: False) -> None:
        """SIGTERM: each finishes its item; what is not gone after the grace is killed with its whole group.

        Args:
            at_once: asked again and again; the grace is over when it says so.
        """
        for child in self.children:
            if child.running:
                assert child.process is not None
                child.process.terminate()
        deadline = time.monotonic() + grace_s
        try:
            while any(child.running for child in self.children) and time.monotonic() < deadline and not at_once():
                time.sleep(0.05)
        finally:
            self.kill()

    def kill(self) -> None:
        for child in self.children:
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()

    def last_words(self, child: Child, lines: int = 5) -> str:
        """The end of a child's log, for a message."""
        if self.log_dir is None:
            return ""
        with contextlib.suppress(OSError):
            text = (self.log_dir / f"{child.name}.log").read_text(errors="replace").strip().splitlines()
            return " | ".join(text[-lines:])
        return ""

    def _start(self, child: Child) -> None:
        output: IO[bytes] | None = None
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            output = (self.log_dir / f"{child.name}.log").open("ab")
        try:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.main", *child.arguments, "--parent", str(os.getpid())],
                env=environment_of_children(child.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        child.started_s = time.monotonic()


def visible_devices(card_id: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES that pins a process to a card: nothing but a GPU sees CUDA."""
    return card_id if card_id.startswith("GPU-") else ""


def run(chosen: Sequence[Card], *, json_logs: bool = False) -> int:
    """`farm worker`: supervise this host's workers until SIGTERM or Ctrl-C.

    Raises:
        CardBusy: another worker serves one of the cards; named before anything is started.
    """
    current = settings()
    configure(current)
    for card in chosen:
        with CardLock(card.id, current.lock_dir):
            pass
    logs.set_up(json_logs)
    # A list, not an Event: its lock may be held by the very code that the signal interrupts.
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    supervisor = Supervisor([card.id for card in chosen], environment={logs.JSON_VARIABLE: "1"} if json_logs else None)
    supervisor.start()
    log.info("Serving %s", ", ".join(str(card) for card in chosen))
    try:
        while not asked:
            supervisor.tend()
            time.sleep(0.2)
        log.info("Stopping: items in work are finished first; again to stop at once")
        supervisor.stop(stop_grace_s(current), at_once=lambda: len(asked) > 1)
    finally:
        supervisor.kill()
    _hand_back(supervisor, current)
    return 0


def stop_grace_s(current: Settings) -> float:
    """How long a worker that was told to stop may go on with its item."""
    return current.item_timeout_s + STOP_MARGIN_S


def _hand_back(supervisor: Supervisor, current: Settings) -> None:
    """Let what the stopped workers could not finish wait again: for them it was no attempt."""
    database = Database(current.database)
    try:
        spooled = Spool(current.state_dir / "spool").items()
        for child in supervisor.children:
            if child.process is not None and child.arguments[0] == "card":
                worker = cards.holder_of_process(child.name, current.host, child.process.pid)
                if items.hand_back(database, worker, spooled=spooled):
                    log.info("The item in work on %s waits again", child.name)
                cards.stopped(database, worker)
    except FarmError as error:
        log.warning("What was in work waits again when its lease has ended: %s", error.message)
    finally:
        database.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.main")
    parser.add_argument("role", choices=("card", "control"))
    parser.add_argument("card", nargs="?")
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args(arguments)
    # An embedded farm's broker dies with the command too, and Celery would wait for it before it stops in order.
    embedded = bool(os.environ.get(EMBEDDED_VARIABLE))
    die_with_parent(signal.SIGKILL if embedded else signal.SIGTERM, options.parent or None)
    logs.set_up()
    role: Callable[[], int] = serve_control if options.role == "control" else lambda: serve_card(options.card)
    try:
        return role()
    except FarmError as error:
        log.error("%s %s", error.message, error.next_step)
        return error.exit_code
