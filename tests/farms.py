"""A complete farm for a test: a broker, a database and a real ``farm worker`` on simulated cards,
as processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil
import redis
from sqlmodel import select
from typer.testing import CliRunner

from cli.main import app
from farm.devices.simulated import UNHEALTHY_VARIABLE
from farm.errors import DatabaseUnreachable
from farm.jobs import jobs
from farm.jobs.cards import views
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request, Sweep
from tasks.app import configure
from tasks.queues import _rows, _send_single, publish_round
from tasks.servers import BrokerServer

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 180.0  # generous: reached only if the event never happens, however busy the machine is
#: Leases, heartbeats and items as short as possible with real processes; for tests that wait for
#: their end.
QUICK = {
    "FARM_GROUP_IDLE_S": "0",
    "FARM_LEASE_S": "4",
    "FARM_HEARTBEAT_S": "1",
    "FARM_RECONCILE_S": "1",
    "FARM_MAX_ATTEMPTS": "2",
    "FARM_SIMULATED_ITEM_S": "0.05",
    "FARM_ITEM_TIMEOUT_S": "60",
}
PUBLISHER_KILLED_HALF_WAY = """
import os, signal
from kombu import Producer
from farm.settings import settings
from farm.store.database import Database
publish, sent = Producer.publish, []
def count(self, *arguments, **options):
    sent.append(1)
    if len(sent) > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(self, *arguments, **options)
Producer.publish = count
from tasks.queues import publish_round
publish_round(Database(settings().database), os.environ["JOB"], 1)
"""


class Farm:
    """A running farm. `running` ends all processes that it started; their output is in ``log``."""

    def __init__(self, database: Database, environment: dict[str, str], log: Path) -> None:
        self.database = database
        self.environment = environment
        self.log = log
        self.worker: subprocess.Popen[bytes] | None = None  # `farm worker`, if it runs on this host
        self.from_here: dict[
            str, str
        ] = {}  # settings of the farm that differ from those of the test's process

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``farm ...`` as a separate process."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cli", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def publish_and_die(self, job_id: str) -> subprocess.Popen[bytes]:
        """Start a process that publishes the job's first round and kills itself after three
        messages.
        """
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", PUBLISHER_KILLED_HALF_WAY],
                cwd=ROOT,
                env={**self.environment, "JOB": job_id},
                stdout=log,
                stderr=log,
            )

    def start_again(self) -> None:
        """Start a new `farm worker` in place of one that has ended or is ending."""
        assert self.worker is not None
        self.worker.wait(TIMEOUT_S)
        self.worker = self.start("worker")

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``farm ...`` and wait for its end."""
        return subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def alive(self) -> list[tables.CardRow]:
        with self.database.read() as session:
            return [view.card for view in views(session, 10.0) if view.state in ("idle", "busy")]

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Context manager: this process has the farm's settings and publishes on its broker."""
        with mock.patch.dict(os.environ, {**self.environment, **self.from_here}):
            settings.cache_clear()
            configure(settings())
            try:
                yield
            finally:
                settings.cache_clear()
                configure(Settings())

    def say(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Like `ask` in this process, for short commands: the start of a separate process takes
        longer than the command."""
        with self.here():
            said = CliRunner().invoke(app, arguments)
        assert said.exception is None or isinstance(said.exception, SystemExit), said.exception
        return subprocess.CompletedProcess(arguments, said.exit_code, said.stdout, said.stderr)

    def submit(
        self,
        behaviours: Sequence[str],
        seconds: float | None = None,
        *,
        to: Sequence[str] | None = None,
        publish: bool = True,
        cards: int = 1,
    ) -> str:
        """Submit a job of one item per behaviour of a simulated card ("crash", "" is normal);
        return its id.

        Args:
            to: the ids of cards, in any state; default: all live cards.
            cards: of one host, that measure each item together.
        """
        ids = store_operators(self.database, behaviours, seconds)
        request = Request(
            sweep=Sweep("Conv2d", {"in_channels": tuple(range(len(ids)))}, "a test"),
            protocol=Protocol(launch="eager", cards=cards),
            stopping=Stopping(),
        )
        card_ids = [card.id for card in self.alive()] if to is None else to
        job_id = jobs.create(self.database, request, card_ids, operator_ids=ids).job_id
        if publish:
            with self.here():
                publish_round(self.database, job_id, 1)
        return job_id

    def publish_again(self, job_id: str) -> None:
        """Publish a message for every item of the job in any state, like a broker that repeats
        messages.
        """
        with self.here():  # `publish_items` skips closed items
            _send_single(
                _rows(
                    self.database, [item.id for item in self.items(job_id) if item.id is not None]
                )
            )

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"it took too long\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return found

    def ended(self, job_id: str) -> bool:
        with self.database.read() as session:
            job = session.get(tables.Job, job_id)
            assert job is not None
            return job.state == tables.JobState.DONE

    def items(self, job_id: str) -> list[tables.Item]:
        with self.database.read() as session:
            return list(session.exec(select(tables.Item).where(tables.Item.job_id == job_id)))

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the processes of this host (with its state directory in their environment) whose
        command contains all words.

        Ordered by command, so that a seed has the same meaning in every run.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if (
                    process.pid != os.getpid()
                    and all(word in line for word in words)
                    and process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get("FARM_STATE_DIR")
                    == self.environment["FARM_STATE_DIR"]
                ):
                    found.append((line, process))
        return [process for _, process in sorted(found, key=lambda one: one[0])]


@contextlib.contextmanager
def running(
    folder: Path,
    broker_url: str,
    database_url: str,
    *,
    cards: int = 1,
    fit: int | None = None,
    options: Sequence[str] = (),
    in_order: bool = False,
    **changes: str,
) -> Iterator[Farm]:
    """Start a farm of one host with simulated cards, and wait until they (or `ready` of them) can
    measure.

    Args:
        in_order: stop it in order at the end, which takes seconds; else kill it.
    """
    environment = {
        **os.environ,
        "FARM_BROKER_URL": broker_url,
        "FARM_DATABASE_URL": database_url,
        "FARM_SIMULATED_CARDS": str(cards),
        "FARM_STATE_DIR": str(folder / "state"),
        "FARM_LOCK_DIR": str(folder / "locks"),
        "FARM_RECONCILE_S": "1",
        **changes,
    }
    database = Database(database_url)
    database.upgrade()
    farm = Farm(database, environment, folder / "farm.log")
    farm.worker = farm.start("worker", *options)
    try:
        farm.wait_for(
            lambda: (
                farm.worker.poll() is not None
                or len(farm.alive()) == (cards if fit is None else fit)
            )
        )
        assert farm.worker.poll() is None, farm.log.read_text()[-3000:]
        yield farm
    finally:
        try:
            if in_order:
                farm.worker.terminate()
                farm.worker.wait(60)
        finally:
            kill_all_of(farm.worker)
            database.close()


class SharedFarm:
    """A farm for many tests: started at first use, and restarted if the last test did not leave it
    intact.

    Using it instead of a separate farm saves five seconds of a core. A test that damages it waits
    until it is intact again (`whole` does that), and restores what it changed: a drained card, a
    stopped broker.

    Args:
        new_folder: creates a folder for each start.
        cards: number of simulated cards.
        new_database: returns the URL of an empty database for each start; default: SQLite in the
            folder.
    """

    _all: ClassVar[list[SharedFarm]] = []

    @classmethod
    def end_all(cls) -> None:
        """End all running farms; the next use of one starts it again."""
        for farm in cls._all:
            farm.close()

    def __init__(
        self,
        new_folder: Callable[[], Path],
        cards: int,
        new_database: Callable[[], str] | None = None,
    ) -> None:
        self._new_folder, self._cards, self._new_database = new_folder, cards, new_database
        self._stack = contextlib.ExitStack()
        self._running: tuple[Farm, BrokerServer] | None = None
        self._all.append(self)

    def whole(self, within_s: float = 15.0) -> tuple[Farm, BrokerServer]:
        """Return the farm with all cards idle and no open job, and its empty broker."""
        if self._running is not None:
            deadline = time.monotonic() + within_s
            while not self._is_whole(*self._running):
                if time.monotonic() > deadline:
                    self.close()
                    break
                time.sleep(0.1)
        if self._running is None:
            folder = self._new_folder()
            unhealthy = folder / "unhealthy"  # cards listed in this file fail their health check
            unhealthy.write_text("")
            changes = {**QUICK, UNHEALTHY_VARIABLE: str(unhealthy)}
            broker = self._stack.enter_context(
                BrokerServer(options={"appendonly": "yes"})
            )  # like a real farm's broker
            database_url = (
                self._new_database() if self._new_database else f"sqlite:///{folder / 'farm.db'}"
            )
            farm = running(folder, broker.url, database_url, cards=self._cards, **changes)
            self._running = self._stack.enter_context(farm), broker
        with redis.Redis.from_url(self._running[1].redis_url) as client:
            client.flushall()  # counters of other chords, and messages of killed workers
        return self._running

    def _is_whole(self, farm: Farm, broker: BrokerServer) -> bool:
        if farm.worker is None or farm.worker.poll() is not None or broker.pid is None:
            return False
        with contextlib.suppress(DatabaseUnreachable), farm.database.read() as session:
            seen = views(session, 1.0)
            is_open = session.exec(
                select(tables.Job.id).where(tables.Job.state == tables.JobState.OPEN)
            ).first()
            return (
                is_open is None
                and [view.state for view in seen] == [tables.CardState.IDLE] * self._cards
            )
        return False

    def close(self) -> None:
        self._running = None
        self._stack.close()


def kill_all_of(worker: subprocess.Popen[bytes]) -> None:
    """Send kill -9 to a `farm worker` and all its descendants, and wait until they are gone.

    Processes that start in the meantime end with their parent: each requests that from the kernel.
    """
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(worker.pid)
        top.suspend()  # so that it restarts nothing
        found = [top, *top.children(recursive=True)]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    worker.wait()
    psutil.wait_procs(found[1:], 10)


def store_operators(
    database: Database, behaviours: Sequence[str], seconds: float | None = None
) -> list[str]:
    """Store operators that only simulated cards can measure, one per behaviour."""
    ids = []
    with database.write() as session:
        for number, behaviour in enumerate(behaviours):
            parameters: dict[str, Any] = {"number": number, "simulate": behaviour}
            if seconds is not None:
                parameters["seconds"] = seconds
            operator_id = hashlib.sha256(
                f"{behaviour} {number} {time.time_ns()}".encode()
            ).hexdigest()[:32]
            session.add(
                tables.Operator(
                    id=operator_id,
                    schema_version=1,
                    name="torch.nn.Conv2d",
                    short_name="Conv2d",
                    kind="module",
                    label=f"Conv2d 64->64 k3 p1 | {number}x64x56x56 fp32",
                    flops=1000,
                    bytes_moved=1000,
                    parameters=parameters,
                    spec={"operator": "torch.nn.Conv2d", "parameters": parameters},
                )
            )
            ids.append(operator_id)
    return ids
