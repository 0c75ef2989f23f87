"""What every test may use: isolated settings, real servers, and the promise that no process outlives the tests."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.testing
from sqlalchemy import make_url

from farm.exchange.packaged import database_of as _database_of
from farm.settings import settings
from farm.store.database import Database
from tasks.servers import BrokerServer
from tests import workers
from tests.clock import Clock
from tests.farms import SharedFarm
from tests.namespaces import Network, why_not
from tests.servers import PostgresServer

# One thread of torch per test process: with one process per core, more of them only get into each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A benchmark process on a CPU takes more of them all the same: they are not to spin where they wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# pytest loads readline, which tells its children, the workers of xdist, of a terminal of 80 columns that is not there.
os.environ.pop("COLUMNS", None)
# Hundreds of processes import the farm, and pytest rewrites every assertion: what is compiled once is kept for the others,
# also on a machine that asks Python not to (an image's habit). It lies in __pycache__, which git ignores.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Torch and what tests are made of are no garbage: no looking for some until all tests are collected.
gc.disable()
# The tree of all verbs is the same for each call of one, and takes longer to make than most of them take.
typer.testing._get_command = functools.cache(typer.main.get_command)

_SLOW_TESTS = bool(os.environ.get("FARM_SLOW_TESTS"))  # now: the tests' own environment has no FARM_* in it
_MARK = "OPERATOR_FARM_TESTS"  # in the environment of every process that a test starts, however deep


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden", action="store_true", help="Write the golden files anew; a reviewer reads what changed."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not _SLOW_TESTS:
            item.add_marker(
                pytest.mark.skip(
                    "it waits for a minute, or is one of many alike; FARM_SLOW_TESTS=1 runs it, as .ci/run does"
                )
            )
    items[:] = workers.in_order(items)


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage, nor are most of the objects of a capture: a tenth of all time went into looking."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    """An interpreter that ends looks for garbage once more, which takes two seconds after a thousand tests.

    DuckDB would complain of all that it has left: a worker that has imported it takes them.
    """
    if "duckdb" not in sys.modules:
        gc.freeze()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """A farm that nobody will ask for any more is ended: as long as it runs, it beats and looks every second."""
    if nextitem is not None and not workers.starts_farms(nextitem):
        SharedFarm.end_all()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return workers.number_of_workers(waiting=config.option.numprocesses == "auto")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> workers.InRows:
    config.option.loadscopereorder = False
    return workers.InRows(config, log)


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    mark = os.environ[_MARK] = uuid.uuid4().hex
    yield
    deadline = time.monotonic() + 30
    while left := _marked_processes(mark):
        if time.monotonic() > deadline:
            told = [" ".join(process.cmdline())[:200] for process in left if process.is_running()]
            for process in left:
                process.kill()
            pytest.fail(f"These processes outlived the tests: {told}")
        time.sleep(0.1)


def _marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(_MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="session")
def _packaged_readings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run's: the workers of pytest-xdist have theirs in it."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "packaged"


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _packaged_readings: Path) -> Iterator[None]:
    """No setting of the machine reaches a test; state and locks are the test's own.

    But the readings that come with the package, which nobody changes, become a database once.
    """
    from farm.exchange import packaged

    monkeypatch.setattr(packaged, "database_of", functools.partial(_database_made_once, _packaged_readings))
    for name in [name for name in os.environ if name.startswith("FARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setattr("farm.settings.SERVICE_LOCK_DIR", tmp_path / "no service is here")
    settings.cache_clear()
    yield
    settings.cache_clear()


def _database_made_once(folder: Path, files: Sequence[Path], _cache: Path) -> Database:
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that ask at once would both make it
        return _database_of(files, folder)


@pytest.fixture(scope="session")
def _broker_server() -> Iterator[BrokerServer]:
    with BrokerServer() as server:
        yield server


@pytest.fixture
def broker(_broker_server: BrokerServer) -> BrokerServer:
    """A running, empty broker. Tests that stop or kill one make their own `BrokerServer`."""
    import redis

    _broker_server.start()
    with redis.Redis.from_url(_broker_server.redis_url) as client:
        client.flushall()
    return _broker_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server per test process. Tests that stop or restart one make their own `PostgresServer`."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh, empty PostgreSQL database."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch to plug hosts into; skips, with the reason, where this machine cannot have network namespaces."""
    if reason := why_not():
        pytest.skip(reason)
    with Network() as network:
        yield network


@pytest.fixture
def sqlite_url(_sqlite_file: Path) -> str:
    """The URL of a file that is not there."""
    for file in _sqlite_file.parent.iterdir():
        file.unlink()
    return f"sqlite:///{_sqlite_file}"


@pytest.fixture
def database(sqlite_url: str, _sqlite_with_tables: Path) -> Iterator[Database]:
    """A fresh SQLite database with all tables."""
    shutil.copyfile(_sqlite_with_tables, make_url(sqlite_url).database)
    yield from _opened(sqlite_url)


@pytest.fixture
def other_database(tmp_path: Path, _sqlite_with_tables: Path) -> Iterator[Database]:
    """One more as `database`, always of SQLite."""
    file = tmp_path / "other.db"
    shutil.copyfile(_sqlite_with_tables, file)
    yield from _opened(f"sqlite:///{file}")


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh, empty database, of each kind in turn."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest) -> Database:
    """A fresh database with all tables, of each kind in turn."""
    return request.getfixturevalue("database" if request.param == "sqlite" else "postgres_database")


@pytest.fixture
def clock(any_database: Database) -> Iterator[Clock]:
    """The clock of `any_database`, which the test sets forward: ``clock.forward(60)``."""
    with contextlib.closing(Clock(any_database)) as clock:
        yield clock


@pytest.fixture
def postgres_database(
    postgres_server: PostgresServer, _postgres_with_tables: str, _emptied: list[str]
) -> Iterator[Database]:
    """An empty PostgreSQL database with all tables: the one that a test before has had, as long as these are the same."""
    url = _emptied.pop() if _emptied else postgres_server.new_database(like=_postgres_with_tables)
    yield from _opened(url)
    if postgres_server.empty_database(url, like=_postgres_with_tables):
        _emptied.append(url)
    else:
        postgres_server.drop_database(url)


@pytest.fixture(scope="session")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFarm]:
    """A running farm of one simulated card, shared by all tests that leave it whole: ``one_card.whole()``."""
    with contextlib.closing(SharedFarm(lambda: tmp_path_factory.mktemp("farm"), 1)) as shared:
        yield shared


@pytest.fixture(scope="session")
def two_cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFarm]:
    """As `one_card`, of two."""
    with contextlib.closing(SharedFarm(lambda: tmp_path_factory.mktemp("farm"), 2)) as shared:
        yield shared


# The tables are made once; a copy takes a fifth of the time that the migrations take. A `Database` is made once for a URL,
# and opened for each test: what it has learned of the statements, which takes longer than most of them, is kept.


@pytest.fixture(scope="session")
def _sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("database") / "farm.db"


@pytest.fixture(scope="session")
def _sqlite_with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tables") / "farm.db"
    _upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def _postgres_with_tables(postgres_server: PostgresServer) -> str:
    url = postgres_server.new_database()
    _upgrade(url)
    return str(make_url(url).database)


@pytest.fixture(scope="session")
def _emptied() -> list[str]:
    """Databases of `postgres_database` that nobody uses."""
    return []


def _upgrade(url: str) -> None:
    for database in _opened(url):
        database.upgrade()


_database = functools.cache(Database)


def _opened(url: str) -> Iterator[Database]:
    database = _database(url)
    yield database
    database.close()
