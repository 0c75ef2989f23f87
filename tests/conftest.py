"""Fixtures of all tests: isolated settings, real servers, and a check that no process outlives the
tests.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest
import typer.testing
from sqlalchemy import make_url

from farm.errors import safe_text
from farm.exchange.packaged import database_of as _database_of
from farm.settings import settings, user_models
from farm.store.database import Database
from tasks.servers import BrokerServer
from tests import extracted, slow, workers
from tests.clock import Clock
from tests.farms import SharedFarm
from tests.namespaces import Network, why_not
from tests.servers import PostgresServer

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# No test of a property fails because the machine is slow.
hypothesis.settings.register_profile(
    "farm", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("farm")

# One thread of torch per test process: there is one process per core, and more threads would only
# compete.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A benchmark process on a CPU uses more threads nevertheless; they must not spin while they wait
# for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The compiler's pool of processes, each with torch imported, takes longer than the few kernels of
# the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# g++ knows the vector instructions of the CPU: to try that takes a compilation and an import of
# torch for each set.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# pytest loads readline, which sets COLUMNS=80 for its children, the workers of xdist, although
# there is no terminal.
os.environ.pop("COLUMNS", None)
# Hundreds of processes import the farm, and pytest rewrites every assertion, so keep compiled
# modules for the others, even if the machine's environment disables that. They are in __pycache__,
# which git ignores.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that starts the tests in the background lets them and their children ignore Ctrl-C, which
# some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch and the tests are not garbage: no garbage collection until all tests are collected.
gc.disable()
# The tree of all commands is the same for each call, and building it takes longer than most
# commands.
typer.testing._get_command = functools.cache(typer.main.get_command)

# Read here, because the tests' environment has no FARM_* variables.
_SLOW_TESTS = os.environ.get("FARM_SLOW_TESTS", "")
# in the environment of every process that a test starts, directly or indirectly
_MARK = "OPERATOR_FARM_TESTS"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="Write the golden files anew, also those of slow tests; a reviewer reads what changed.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = "1" if config.getoption("--regenerate-golden") else _SLOW_TESTS
    for item in items:
        if reason := slow.is_left_out(item, wanted):
            item.add_marker(pytest.mark.skip(reason))
    items[:] = workers.in_order(items)


def pytest_collection_finish() -> None:
    """Freeze torch, the tests and later most objects of captures: garbage collection took a tenth
    of all time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    """Skip the interpreter's final garbage collection, which takes two seconds after a thousand
    tests.

    A process that has imported DuckDB runs it, because DuckDB would complain about the remaining
    objects. Forked workers need neither: they leave without the interpreter's finalization."""
    if "duckdb" not in sys.modules:
        gc.freeze()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the shared farms if no further test needs them: a running farm uses the CPU every
    second.
    """
    if nextitem is not None and not workers.starts_farms(nextitem):
        SharedFarm.end_all()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return workers.number_of_workers(waiting=config.option.numprocesses == "auto")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    workers.fork_workers(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the files keep their order
    return workers.scheduler(config, log)


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
    """A folder of this test run; it contains the folders of the workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "packaged"


@pytest.fixture(autouse=True)
def _own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _packaged_readings: Path
) -> Iterator[None]:
    """Isolate the settings: no setting of the machine reaches a test, and state and locks belong to
    the test.

    Only the database of the packaged readings, which no test changes, the compiler's cache and the
    extractions of the catalog are shared."""
    from farm.exchange import packaged

    monkeypatch.setattr(
        packaged, "database_of", functools.partial(_database_made_once, _packaged_readings)
    )
    for name in [name for name in os.environ if name.startswith("FARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("FARM_COMPILER_CACHE_DIR", str(_packaged_readings.with_name("compiler")))
    monkeypatch.setattr("farm.settings.SERVICE_LOCK_DIR", tmp_path / "no service is here")
    extracted.share(monkeypatch)
    settings.cache_clear()
    yield
    settings.cache_clear()
    user_models.forget()
    # the passwords of one test may be words in the messages of the next one
    safe_text._secrets.clear()
    safe_text._pattern_of_secrets.cache_clear()


def _database_made_once(folder: Path, files: Sequence[Path], _cache: Path) -> Database:
    return _database_of(files, folder)


@pytest.fixture(scope="session")
def _broker_server() -> Iterator[BrokerServer]:
    with BrokerServer() as server:
        yield server


@pytest.fixture
def broker(_broker_server: BrokerServer) -> BrokerServer:
    """A running, empty broker. Tests that stop or kill a broker create their own `BrokerServer`."""
    import redis

    _broker_server.start()
    with redis.Redis.from_url(_broker_server.redis_url) as client:
        client.flushall()
    return _broker_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server per test process. Tests that stop or restart a server create their own
    `PostgresServer`.
    """
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A new, empty PostgreSQL database."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def network() -> Iterator[Network]:
    """A virtual switch for hosts. Skips, with the reason, if this machine has no network
    namespaces.
    """
    if reason := why_not():
        pytest.skip(reason)
    with Network() as network:
        yield network


@pytest.fixture
def sqlite_url(_sqlite_file: Path) -> str:
    """The URL of a SQLite file that does not exist."""
    for file in _sqlite_file.parent.iterdir():
        file.unlink()
    return f"sqlite:///{_sqlite_file}"


@pytest.fixture
def database(sqlite_url: str, _sqlite_with_tables: Path) -> Iterator[Database]:
    """A new SQLite database with all tables."""
    shutil.copyfile(_sqlite_with_tables, make_url(sqlite_url).database)
    yield from _opened(sqlite_url)


@pytest.fixture
def other_database(tmp_path: Path, _sqlite_with_tables: Path) -> Iterator[Database]:
    """A second database like `database`."""
    file = tmp_path / "other.db"
    shutil.copyfile(_sqlite_with_tables, file)
    yield from _opened(f"sqlite:///{file}")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Callable[[], Any]], Any]:
    """Fill a SQLite file once for all tests of a module: ``made_once(file, make)`` returns what
    ``make()`` returns, which fills the file in the first test; later tests get a copy of the file,
    and the same result."""
    stored = tmp_path_factory.mktemp("made") / "farm.db"
    results: list[Any] = []

    def fill(file: Path, make: Callable[[], Any]) -> Any:
        if results:
            file.parent.mkdir(parents=True, exist_ok=True)
            _copy_database(stored, file)
        else:
            results.append(make())
            _copy_database(file, stored)
        return results[0]

    return fill


def _copy_database(file: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(file)) as source,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a new, empty database, of each kind in turn."""
    return str(
        request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    )


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=slow.OTHER_DATABASE)])
def any_database(request: pytest.FixtureRequest) -> Database:
    """A new database with all tables, of each kind in turn. (`make test` takes SQLite. Tests of the
    store and of claims always take both: `tests/store/conftest.py`.)"""
    return request.getfixturevalue("database" if request.param == "sqlite" else "postgres_database")


@pytest.fixture
def clock(any_database: Database) -> Iterator[Clock]:
    """The clock of `any_database`, which a test can set: ``clock.forward(60)``,
    ``clock.back(3600)``.
    """
    with contextlib.closing(Clock(any_database)) as clock:
        yield clock


@pytest.fixture
def postgres_database(
    postgres_server: PostgresServer, _postgres_with_tables: str, _emptied: list[str]
) -> Iterator[Database]:
    """An empty PostgreSQL database with all tables; an earlier test's database is emptied and
    reused if its schema is the same."""
    url = _emptied.pop() if _emptied else postgres_server.new_database(like=_postgres_with_tables)
    yield from _opened(url)
    if postgres_server.empty_database(url, like=_postgres_with_tables):
        _emptied.append(url)
    else:
        postgres_server.drop_database(url)


@pytest.fixture(scope="session")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFarm]:
    """A running farm of one simulated card, shared by all tests that leave it intact:
    ``one_card.whole()``.
    """
    with contextlib.closing(SharedFarm(lambda: tmp_path_factory.mktemp("farm"), 1)) as shared:
        yield shared


@pytest.fixture(scope="session")
def two_cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFarm]:
    """Like `one_card`, with two cards."""
    with contextlib.closing(SharedFarm(lambda: tmp_path_factory.mktemp("farm"), 2)) as shared:
        yield shared


# The tables are created once; a copy takes a fifth of the time of the migrations. A `Database` is
# created once per URL and opened for each test, to keep its compiled statements: compiling takes
# longer than running most of them.


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
    """Unused databases of `postgres_database`."""
    return []


def _upgrade(url: str) -> None:
    for database in _opened(url):
        database.upgrade()


_database = functools.cache(Database)


def _opened(url: str) -> Iterator[Database]:
    database = _database(url)
    yield database
    database.close()
