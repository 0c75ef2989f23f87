"""A complete farm for one command: a private broker, a control worker and a worker per card.

The processes are the same as in a shared farm, but the command starts and stops them. If the
command ends, even by SIGKILL, the kernel ends them too."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sqlmodel import col, select

from farm.devices.device import Card
from farm.devices.host import check_semaphores
from farm.devices.lock import CardLock
from farm.errors import FarmError, NoWorker
from farm.jobs import cards, jobs
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database, fetch, read_clock_s
from farm.store.tables import CardState, JobState
from tasks.app import EMBEDDED_VARIABLE, configure
from tasks.servers import BrokerServer, last_lines
from tasks.supervisor import Supervisor

#: How long workers may take to start; importing torch from a slow disk takes most of it. Unit: s.
READY_TIMEOUT_S = 180.0
STOP_GRACE_S = 3.0
#: How often `tend` looks for workers without a heartbeat. Unit: s.
LOOK_S = 5.0


@dataclass(eq=False)
class EmbeddedFarm:
    """A context manager. Inside its block, the settings of this process are those of the embedded
    farm.

    Broker and workers start only in `start`: if readings exist for all items of a job, it needs
    neither. On exit, open jobs are cancelled, since their broker ends; their readings are kept.

    Args:
        database: the database of the settings, with its schema up to date; it stays open.
        starting: called before broker and workers start.
        uninterrupted: a context that defers interruptions during the start: a partly started farm
            could not be stopped.
        say: gets a line about a worker without a heartbeat, such as on a full disk.
    """

    settings: Settings
    database: Database
    cards: Sequence[Card]
    starting: Callable[[], None] = lambda: None
    uninterrupted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    say: Callable[[str], None] = lambda line: None
    supervisor: Supervisor | None = field(default=None, init=False)
    _looked_s: float = field(default=0.0, init=False)
    _said: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.id = cards.farm_name(self.settings.host, os.getpid(), uuid.uuid4().hex[:6])
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> EmbeddedFarm:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment(**{EMBEDDED_VARIABLE: self.id}))
            # of farms that were killed
            self._cancel_jobs(lambda farm: cards.is_gone(farm, self.settings.host))
            stack.callback(self._cancel_own_jobs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def registered(self) -> bool:
        """True if the database has all cards with the installed software: jobs can then be planned
        without workers.
        """
        with self.database.read() as session:
            return all(cards.is_registered_as_now(session, card) for card in self.cards)

    def start(self) -> None:
        """Start the broker and the workers unless they run; `wait_ready` waits for them. Raises
        `CardBusy` if another worker serves one of the cards; `BrokerUnreachable` if there is no
        broker program, or it does not start."""
        if self.supervisor is not None:
            return
        check_semaphores()
        for card in self.cards:
            with CardLock(card.id, self.settings.lock_dir):
                pass  # the lock is free; the worker locks it later
        self.starting()
        # of earlier farms
        cards.end_embedded_quarantines(self.database, [card.id for card in self.cards])
        with self.uninterrupted():
            broker = self._stack.enter_context(BrokerServer())
            self._stack.enter_context(_environment(FARM_BROKER_URL=broker.url))
            # Logs and temporary files are in the broker's folder. If this farm is killed, the next
            # farm removes the folder. TMPDIR is not a subfolder, since the path of a socket must be
            # shorter than 108 bytes.
            self.supervisor = Supervisor(
                [card.id for card in self.cards],
                environment={"TMPDIR": str(broker.folder)},
                log_dir=broker.folder / "logs",
            )
            self._stack.callback(self._stop)
            self.supervisor.start()

    def wait_ready(self) -> None:
        """Start the farm unless it runs, and wait until the worker of every card has registered.
        Raises as `start`, and `NoWorker` if a worker ended (the message has its log's end) or took
        too long, or all cards are quarantined."""
        self.start()
        assert self.supervisor is not None
        assert self.supervisor.log_dir is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while missing := {card.id for card in self.cards} - self._ready():
            for child in self.supervisor.tend():
                raise NoWorker(
                    f"The worker of {child.name} ended with exit code {child.last_exit}: "
                    f"{last_lines(self.supervisor.log_dir / f'{child.name}.log', 5)}",
                    "Correct the cause, then run the same command again. No reading was lost.",
                )
            if time.monotonic() > deadline:
                text = (
                    f"The workers of {', '.join(sorted(missing))} were not ready within "
                    f"{READY_TIMEOUT_S:.0f} s."
                )
                raise NoWorker(
                    text, "Run the same command again: the first import of torch can be slow."
                )
            time.sleep(0.1)

    def _ready(self) -> set[str]:
        """Return the ids of the cards whose workers have registered. Raises `NoWorker` if all are
        in quarantine.
        """
        assert self.supervisor is not None
        workers = self.supervisor.holders(self.settings.host)
        with self.database.read() as session:
            by_id = fetch(session, tables.CardRow, list(workers))
        rows = [by_id[card_id] for card_id in workers if card_id in by_id]
        # Use only rows that the current workers wrote: rows of an earlier farm look the same
        # otherwise.
        ready = [
            row
            for row in rows
            if row.worker.startswith(workers[row.id]) and row.state != CardState.STARTING
        ]
        unfit = [row for row in ready if row.state == CardState.QUARANTINED]
        if len(unfit) == len(self.cards):
            # A person must release cards that no process has put in quarantine.
            others = [row.id for row in unfit if not row.quarantined_by]
            releasing = f" after `farm cards release {others[0]}`" if others else ""
            reasons = "; ".join(f"{row.id} is quarantined: {row.state_reason}" for row in unfit)
            raise NoWorker(
                f"No card can measure: {reasons}",
                f"Correct the cause, then run the same command again{releasing}: it checks the "
                "card again.",
            )
        return {row.id for row in ready}

    def tend(self) -> None:
        """Restart workers that died, and say why a worker has no heartbeat; call it regularly."""
        if self.supervisor is None:
            return
        self.supervisor.tend()
        if time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            line = next(self._silent_workers(), "")
            if line and line != self._said:
                self.say(line)
            self._said = line

    def _silent_workers(self) -> Iterator[str]:
        """Yield a line for each card whose worker has no heartbeat, with the end of its log."""
        assert self.supervisor is not None
        assert self.supervisor.log_dir is not None
        with self.database.read() as session:
            rows = fetch(session, tables.CardRow, [card.id for card in self.cards])
            now_s = read_clock_s(session)
        for card_id, row in rows.items():
            if cards.present_state(row, now_s) == CardState.LOST:
                last = last_lines(self.supervisor.log_dir / f"{card_id}.log", 1)
                yield f"The worker of {card_id} has no heartbeat. Its log ends: {last}"

    def _stop(self) -> None:
        assert self.supervisor is not None
        self._cancel_own_jobs()
        self.supervisor.stop(STOP_GRACE_S)
        with contextlib.suppress(FarmError):
            for worker in self.supervisor.holders(self.settings.host).values():
                cards.stopped(self.database, worker)

    def _cancel_own_jobs(self) -> None:
        with contextlib.suppress(FarmError):
            self._cancel_jobs(lambda farm: farm == self.id)

    def _cancel_jobs(self, is_over: Callable[[str], bool]) -> None:
        """Cancel the open jobs of this host's embedded farms for which ``is_over(farm name)`` is
        True.
        """
        of_this_host = col(tables.Job.farm).startswith(
            cards.farm_prefix(self.settings.host), autoescape=True
        )
        query = select(tables.Job.id, tables.Job.farm).where(
            of_this_host, tables.Job.state == JobState.OPEN
        )
        with self.database.read() as session:
            open_jobs = list(session.exec(query))
        for job_id, farm in open_jobs:
            if is_over(farm):
                jobs.cancel(self.database, job_id)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables during a block; load the settings and configure Celery again before
    and after it.
    """
    before = {name: os.environ.get(name) for name in variables}

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        settings.cache_clear()
        configure(settings())

    put(variables)
    try:
        yield
    finally:
        put(before)
