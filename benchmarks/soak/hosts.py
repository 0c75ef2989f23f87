"""The farm of the soak test: three hosts with simulated cards, and a broker and a PostgreSQL on a
fourth host.

Each host has its own network namespace, file system of 8 MiB for its state folder, lock folder,
clock and log. Only root can have namespaces; without them, `Site.without` names the reason, and the
hosts share one network and disk."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
import redis

from farm.settings import Settings
from farm.store.database import Database
from tasks.app import configure
from tasks.servers import BrokerServer
from tests import disks, namespaces
from tests.clock import hide_server_clock
from tests.disks import SmallDisk
from tests.farms import Farm
from tests.half_open import HalfOpenProxy
from tests.namespaces import Network
from tests.servers import PostgresServer

HOSTS = 3
DATABASE = "soak"
BEACON_PORT = 9
#: The pause before `farm worker` starts again. Unit: s.
RESTART_S = 2.0
LEASE_S = 5.0
SETTINGS = {
    "FARM_LEASE_S": str(LEASE_S),
    "FARM_HEARTBEAT_S": "1.5",
    "FARM_RECONCILE_S": "2",
    "FARM_MAX_ATTEMPTS": "15",
    # Longer than the longest stop, so that a stopped process does not look hung. The messages of a
    # killed worker return during the soak.
    "FARM_ITEM_TIMEOUT_S": "20",
    "FARM_HARD_LIMIT_S": "30",
    "FARM_VISIBILITY_TIMEOUT_S": "60",
    "FARM_DEAF_AFTER_S": "60",
    "OMP_NUM_THREADS": "1",
}
COMMANDS = {
    "benchmark": ("farm.benchmark_process.server",),
    "worker": ("tasks.main", "card"),
    "control": ("tasks.main", "control"),
    "supervisor": ("cli", "worker"),
}
#: The place of the card's id in the command of a worker: python -m tasks.main card ID ...
COMMAND_CARD = 4


class NotObserved(Exception):
    """The effect of a fault was not observed, or there was no target: the fault does not count and
    is drawn again.
    """


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Wait for a condition and return its value.

    Raises:
        NotObserved: it did not become true.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise NotObserved(what)
        time.sleep(0.1)
    return found


def ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def kill(*processes: psutil.Process) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: all(map(ended, processes)), 10, "a killed process did not end")


class Link(HalfOpenProxy):
    """The connections of a host to the broker."""

    def open_number(self) -> int:
        """The number of connections that are neither frozen nor closed."""
        return sum(link.left is None and not link.ended for link in self._links)


class KeptPostgres(PostgresServer):
    """A PostgreSQL whose data stay in a folder, for the next part of the soak."""

    def __init__(self, kept: Path, address: str) -> None:
        self._kept = kept
        super().__init__(address)
        if self._user is not None:
            os.chown(kept, *self._user)

    @property
    def data(self) -> Path:
        return self._kept / "data"


class Host:
    """One host and its `farm worker`."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, str],
        cards: int,
        network: namespaces.Host | None,
        database: Database,
    ) -> None:
        self.name = folder.name
        self.network = network
        self.state = folder / "disk" / "state"
        self.spool = self.state / "spool"
        self.locks = folder / "locks"
        self.unhealthy = folder / "unhealthy"
        self.cards = [f"SIM-{self.name}-{number}" for number in range(cards)]
        self.disk: SmallDisk | None = None
        self.link: Link
        self._ended_at_s: float | None = None
        self._clock = folder / "clock"
        folder.mkdir(exist_ok=True)
        for lock in self.locks.glob("*.lock"):
            if lock.is_fifo():  # of a part that was interrupted
                lock.unlink()
        self.unhealthy.write_text("")
        self.set_clock(0)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FARM_")},
            **SETTINGS,
            **settings,
            "FARM_HOST": self.name,
            "FARM_HOST_ID": self.name,
            "FARM_SIMULATED_CARDS": str(cards),
            "FARM_SIMULATED_UNHEALTHY": str(self.unhealthy),
            "FARM_STATE_DIR": str(self.state),
            "FARM_LOCK_DIR": str(self.locks),
            "PYTHONPATH": str(Path(__file__).parent / "in_hosts"),
            "SOAK_CLOCK": str(self._clock),
            "SOAK_EXECUTIONS": str(folder / "executions.log"),
        }
        self.farm = Farm(database, environment, folder / "farm.log")
        self.farm.log.touch()

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """The network of this host, for the calling thread and the processes that it starts."""
        return self.network or contextlib.nullcontext()

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with self.inside():
            return self.farm.start(*command)

    def tend(self) -> None:
        """Start `farm worker` if it has ended, as systemd does: after a pause, and after the
        processes that it left.
        """
        if self.farm.worker is not None and self.farm.worker.poll() is None:
            self._ended_at_s = None
            return
        now_s = time.monotonic()
        self._ended_at_s = now_s if self._ended_at_s is None else self._ended_at_s
        pause_s = RESTART_S if self.farm.worker is not None else 0.0
        if now_s >= self._ended_at_s + pause_s and (
            not self.processes("worker") or now_s > self._ended_at_s + 15
        ):
            self.farm.worker = self.start("worker")

    def processes(self, role: str = "") -> list[psutil.Process]:
        return self.farm.processes(*COMMANDS[role]) if role else self.farm.processes()

    def works(self) -> bool:
        """True if each card has its benchmark process, and the control worker and the supervisor
        run.
        """
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                lines.append(process.cmdline())
        found = Counter(
            role for line in lines for role, words in COMMANDS.items() if set(words) <= set(line)
        )
        each = len(self.cards)
        return all(
            found[role] >= (each if role in ("benchmark", "worker") else 1) for role in COMMANDS
        )

    def ranks(self) -> list[psutil.Process]:
        """The processes of groups."""
        return self.farm.processes(*COMMANDS["benchmark"], "--rank")

    def one(self, role: str, chance: Random) -> psutil.Process:
        """Draw a process of a role. A pool process is the parent of a benchmark process."""
        found = until(
            lambda: self.processes("benchmark" if role == "pool" else role),
            20,
            f"no {role} process",
        )
        process = chance.choice(found)
        return process.parent() if role == "pool" else process

    def card_at_work(self, chance: Random) -> tuple[str, list[psutil.Process]]:
        """Draw a card with a worker; return it, its worker and all of the worker's descendants."""
        worker = self.one("worker", chance)
        return worker.cmdline()[COMMAND_CARD], [worker, *worker.children(recursive=True)]

    def lock_of(self, card: str) -> Path:
        return self.locks / f"{card}.lock"

    def set_clock(self, ahead_s: float) -> None:
        new = self._clock.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.replace(self._clock)

    def log_size(self) -> int:
        return self.farm.log.stat().st_size

    def log_since(self, size: int) -> str:
        with self.farm.log.open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace")


class Site:
    """The three hosts, the broker and the database, as long as the context manager `running_site`
    lasts.
    """

    def __init__(self, folder: Path, broker: BrokerServer, postgres: KeptPostgres) -> None:
        self.folder, self.broker, self.postgres = folder, broker, postgres
        self.hosts: list[Host] = []
        self.without: dict[str, str] = {}  # "network", "disk" -> why this machine cannot have it
        self.beacon = (
            "",
            0,
        )  # an address on the host of the broker that always accepts connections
        self._middle: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        # A server ends with the thread that started it, so one thread starts them all.
        self._servers = ThreadPoolExecutor(1, "servers")
        self.database: Database

    def serve(self, act: Callable[[], None]) -> None:
        """Start or end a server."""

        def there() -> None:
            with self._middle:
                act()

        self._servers.submit(there).result(60)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.broker.redis_url, retry=None, socket_timeout=5)

    def connect(self, **options: Any) -> Any:
        """A connection of the superuser to the farm's database."""
        import psycopg

        where = {"host": str(self.postgres.folder), "user": "postgres", "dbname": DATABASE}
        return psycopg.connect(**where, autocommit=True, **options)

    def alter_system(self, change: str) -> None:
        with self.connect() as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER SYSTEM {change}")
            connection.execute("SELECT pg_reload_conf()")


@contextlib.contextmanager
def running_site(folder: Path, cards: int, item_s: float) -> Iterator[Site]:
    """Start the servers; end them and the hosts afterwards. The database, logs and records stay in
    the folder.
    """
    os.chmod(folder, 0o711)  # PostgreSQL runs as another user
    kept = folder / "postgres"
    kept.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        without = {"network": namespaces.why_not(), "disk": disks.why_not()}
        network = None if without["network"] else stack.enter_context(Network())
        middle = network.host() if network else None
        places = [network.host() if network else None for _ in range(HOSTS)]
        small: list[SmallDisk | None] = []
        for number in range(1, HOSTS + 1):
            path = folder / f"host{number}" / "disk"
            path.mkdir(parents=True, exist_ok=True)
            small.append(None if without["disk"] else SmallDisk(path))
            if small[-1] is not None:
                # Its namespace is not left: a process with threads cannot do that. It ends with
                # this process.
                small[-1].__enter__()
                stack.callback(subprocess.run, ["umount", "--lazy", path], check=True)
        address = middle.address if middle else ""
        site = Site(
            folder, BrokerServer(options={"appendonly": "yes"}), KeptPostgres(kept, address)
        )
        stack.callback(site._servers.shutdown)
        site.without = {what: reason for what, reason in without.items() if reason}
        if middle:
            site._middle = middle
            with middle:
                beacon = stack.enter_context(
                    socket.create_server((address, BEACON_PORT), backlog=4096)
                )
            site.beacon = beacon.getsockname()
        for server in (site.broker, site.postgres):
            stack.callback(site.serve, server.close)
            site.serve(server.start)
        with site.postgres.connect() as connection:
            if not connection.execute(
                "SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)
            ).fetchone():
                connection.execute(f"CREATE DATABASE {DATABASE}")
        with site.connect() as connection:
            hide_server_clock(connection)
        for setting in ("default_transaction_read_only", "idle_in_transaction_session_timeout"):
            site.alter_system(f"RESET {setting}")  # of a part that was interrupted
        configure(Settings(broker_url=site.broker.url))
        site.database = Database(site.postgres.url(DATABASE))
        stack.callback(site.database.close)
        site.database.create_or_check()
        settings = {
            "FARM_DATABASE_URL": site.postgres.url_over_tcp(DATABASE)
            if middle
            else site.postgres.url(DATABASE),
            "FARM_SIMULATED_ITEM_S": str(item_s),
        }
        for number, place, disk in zip(range(1, HOSTS + 1), places, small, strict=True):
            with site._middle:
                link = stack.enter_context(Link(site.broker.socket, address or "127.0.0.1"))
            settings["FARM_BROKER_URL"] = f"redis://{link.address}:{link.port}/0"
            host = Host(folder / f"host{number}", settings, cards, place, site.database)
            host.disk, host.link = disk, link
            host.state.mkdir(exist_ok=True)
            site.hosts.append(host)
            stack.callback(lambda host=host: kill(*host.processes()))
        yield site
