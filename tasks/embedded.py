"""A complete farm for one command: a private broker, a control worker and a worker per card.

They are the same processes as on many hosts; embedded means that the command starts and stops them. All end with the
command,
even after SIGKILL: the kernel ends them with their parent.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from sqlmodel import col, select

from farm.devices.device import Card
from farm.devices.host import is_installed
from farm.devices.lock import CardLock
from farm.errors import FarmError, NoWorker
from farm.jobs import cards as registry
from farm.jobs import jobs
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import CardState, JobState
from farm.types.protocol import Software
from tasks.app import EMBEDDED_VARIABLE, configure
from tasks.servers import BrokerServer
from tasks.supervisor import Supervisor

#: How long workers may take to start; importing torch from a slow disk takes most of it. Unit: s.
READY_TIMEOUT_S = 180.0
STOP_GRACE_S = 3.0


class EmbeddedFarm:
    """A context manager; inside, the settings of this process point at this farm.

    `start` starts servers and workers, and not before: a job that readings serve completely needs none of them.
    On exit, open jobs are cancelled, since their broker is gone; their readings are kept.

    Args:
        database: the database of the settings, with its schema up to date; it stays open.
        starting: called before servers and workers start.
        held: a context that defers interruptions: a half-started farm could not be stopped.
    """

    def __init__(
        self,
        current: Settings,
        database: Database,
        cards: Sequence[Card],
        *,
        starting: Callable[[], None] = lambda: None,
        held: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.settings = current
        self.database = database
        self.cards = list(cards)
        self.starting = starting
        self.held = held
        self.id = registry.farm_name(current.host, os.getpid(), uuid.uuid4().hex[:6])
        self._stack = contextlib.ExitStack()
        self.supervisor: Supervisor | None = None

    def __enter__(self) -> EmbeddedFarm:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment(**{EMBEDDED_VARIABLE: self.id}))
            _cancel_abandoned(self.database, self.settings.host)
            stack.callback(self._cancel_open_jobs)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def registered(self) -> bool:
        """Whether the database has all cards with the installed software: jobs can then be planned without workers."""
        with self.database.read() as session:
            for card in self.cards:
                row = session.get(tables.CardRow, card.id)
                software = session.get(tables.SoftwareRow, row.software_id) if row and row.software_id else None
                if software is None or not is_installed(Software(**software.model_dump(exclude={"id"})), card):
                    return False
        return True

    def start(self) -> None:
        """Start the broker and the workers unless they run; `wait_ready` waits for them.

        Raises:
            CardBusy: another worker serves one of the cards.
            BrokerUnreachable: there is no broker program, or it does not start.
        """
        if self.supervisor is not None:
            return
        for card in self.cards:
            with CardLock(card.id, self.settings.lock_dir):
                pass  # free now; the worker takes it
        self.starting()
        registry.end_embedded_quarantines(
            self.database, [card.id for card in self.cards]
        )  # quarantines of earlier embedded farms
        with self.held():
            self._start()

    def _start(self) -> None:
        broker = self._stack.enter_context(BrokerServer())
        self._stack.enter_context(_environment(FARM_BROKER_URL=broker.url))
        # Logs and temporary files are in the broker's folder, which the next farm removes if this one is killed. Not in
        # a folder below it: paths of sockets must stay below 108 bytes.
        self.supervisor = Supervisor(
            [card.id for card in self.cards],
            environment={"TMPDIR": str(broker.folder)},
            log_dir=broker.folder / "logs",
        )
        self._stack.callback(self._stop)
        self.supervisor.start()

    def wait_ready(self) -> None:
        """Start the farm unless it runs, and wait until the worker of every card has registered.

        Raises:
            CardBusy, BrokerUnreachable: see `start`.
            NoWorker: a worker ended (with the end of its log) or took too long, or all cards are in quarantine.
        """
        self.start()
        assert self.supervisor is not None
        wanted = {card.id for card in self.cards}
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            with self.database.read() as session:
                rows = {
                    card.id: card
                    for card in session.exec(select(tables.CardRow).where(col(tables.CardRow.id).in_(wanted)))
                }
            # Only rows written by the current workers: rows of an earlier farm look the same.
            ours = {
                child.name: rows[child.name]
                for child in self.supervisor.children
                if child.process is not None
                and child.name in rows
                and f":{child.process.pid}:" in rows[child.name].worker
            }
            ready = {card_id for card_id, row in ours.items() if row.state != CardState.STARTING}
            if ready == wanted:
                unfit = [row for row in ours.values() if row.state == CardState.QUARANTINED]
                if len(unfit) == len(wanted):
                    raise NoWorker(
                        "No card can measure: "
                        + "; ".join(f"{row.id} is quarantined: {row.state_reason}" for row in unfit),
                        f"Correct that and run again: the card is checked again{_releasing(unfit)}.",
                    )
                return
            for child in self.supervisor.tend():
                raise NoWorker(
                    f"The worker of {child.name} ended with exit code {child.last_exit}: "
                    f"{self.supervisor.log_tail(child) or 'it wrote nothing'}",
                    "Correct that and run again; nothing was lost.",
                )
            if time.monotonic() > deadline:
                raise NoWorker(
                    f"The workers of {', '.join(sorted(wanted - ready))} did not get ready "
                    f"within {READY_TIMEOUT_S:.0f} s.",
                    "Run again; the first import of torch can be slow.",
                )
            time.sleep(0.1)

    def tend(self) -> None:
        """Restart workers that died; call it regularly."""
        if self.supervisor is not None:
            self.supervisor.tend()

    def _stop(self) -> None:
        assert self.supervisor is not None
        self._cancel_open_jobs()
        self.supervisor.stop(STOP_GRACE_S)
        with contextlib.suppress(FarmError):
            _mark_stopped(self.database, [card.id for card in self.cards])

    def _cancel_open_jobs(self) -> None:
        with contextlib.suppress(FarmError):
            _cancel(self.database, self.id)


def _releasing(unfit: Sequence[tables.CardRow]) -> str:
    """The command to run first if another farm put a card in quarantine, else ""."""
    others = [row.id for row in unfit if not row.quarantined_by]
    return f" after `farm cards release {others[0]}`" if others else ""


def _cancel(database: Database, farm: str) -> None:
    with database.read() as session:
        query = select(tables.Job.id).where(tables.Job.farm == farm, tables.Job.state == JobState.OPEN)
        open_jobs = list(session.exec(query))
    for job_id in open_jobs:
        jobs.cancel(database, job_id)


def _cancel_abandoned(database: Database, host: str) -> None:
    """Cancel the jobs of embedded farms on this host that were killed."""
    with database.read() as session:
        query = select(tables.Job.farm).where(
            col(tables.Job.farm).startswith(registry.farm_prefix(host), autoescape=True),
            tables.Job.state == JobState.OPEN,
        )
        farms = set(session.exec(query))
    for farm in farms:
        if registry.is_gone(farm, host):
            _cancel(database, farm)


def _mark_stopped(database: Database, card_ids: Sequence[str]) -> None:
    with database.write() as session:
        for card_id in card_ids:
            card = session.get(tables.CardRow, card_id)
            if card is not None and card.state in (CardState.IDLE, CardState.STARTING):
                card.state, card.worker = CardState.STOPPED, ""
                session.add(card)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and configure the settings and the Celery application of this process again."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    settings.cache_clear()
    configure(settings())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        settings.cache_clear()
        configure(settings())
