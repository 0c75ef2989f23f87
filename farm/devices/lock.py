"""One holder per card and host: a second worker on the same card must refuse to start, and say whom it met.

`flock` on a file in a host-wide directory: the kernel lets go of it when the holder dies, however it dies. The
directory is to be mounted into containers, and is world-writable and sticky because two users' workers must meet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farm.errors import CardBusy, SettingsError


class CardLock:
    """The exclusive right to measure on a card, as a context manager or through `acquire` and `release`.

    A child made by `fork` shares the lock until both have closed it; one made by `exec` does not.

    Args:
        started_by: the process that a person started and that began this one; the one to be named to whoever comes next.
    """

    def __init__(self, card_id: str, lock_dir: Path | str, started_by: int | None = None) -> None:
        self.card_id = card_id
        self.started_by = started_by
        self.path = Path(lock_dir) / f"{_file_name(card_id)}.lock"
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> Self:
        """Take the lock at once or not at all.

        Raises:
            CardBusy: another process holds it; the message names pid, host and command.
            SettingsError: there can be no lock in that directory.
        """
        if self._descriptor is not None:
            return self
        _make_directory(self.path.parent)
        try:
            descriptor = _open(self.path)
        except OSError as error:
            raise SettingsError(
                f"The lock of card {self.card_id} cannot be opened: {error}.",
                "Give FARM_LOCK_DIR a directory that all workers of this host may write to.",
            ) from error
        try:
            taken = _taken(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise SettingsError(
                f"The lock of card {self.card_id} cannot be taken: {error}.",
                "Give FARM_LOCK_DIR a directory on a local file system.",
            ) from error
        if not taken:
            holder = _read(descriptor)
            os.close(descriptor)
            raise CardBusy(
                f"The card {self.card_id} is taken by {_describe(holder)}.",
                "Wait for it, end it, or choose another card with --card."
                if _has_another(self.card_id)
                else "Wait for it, or end it.",
            )
        _sign(descriptor, self.started_by)
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Let go. The file stays: removing it would let two holders meet on two files of one name."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextlib.contextmanager
def turn(name: str, lock_dir: Path | str, timeout_s: float) -> Iterator[None]:
    """Wait until nobody else of this host is at what has that name, which its cards share.

    Raises:
        CardBusy: somebody was for all that time; the message names them.
        SettingsError: there can be no lock in that directory.
    """
    path = Path(lock_dir) / f"{_file_name(name)}.lock"
    until_s = time.monotonic() + timeout_s
    _make_directory(path.parent)
    with contextlib.ExitStack() as stack:
        try:
            descriptor = _open(path)
            stack.callback(os.close, descriptor)
            while not _taken(descriptor):
                if time.monotonic() > until_s:
                    raise CardBusy(
                        f"This host's {name} was taken for {timeout_s:g} s, last by {_describe(_read(descriptor))}.",
                        "Wait for it, or end it.",
                    )
                time.sleep(0.02)
            _sign(descriptor)
        except OSError as error:
            raise SettingsError(
                f"The lock of this host's {name} cannot be taken: {error}.",
                "Give FARM_LOCK_DIR a directory on a local file system that all workers of this host may write to.",
            ) from error
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _sign(descriptor: int, started_by: int | None = None) -> None:
    """Write down who holds it, for whoever comes next."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_by": started_by or os.getpid(),
        "command": _command(started_by or os.getpid()),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _file_name(card_id: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in card_id)


def _make_directory(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o1777 != 0o1777:
            folder.chmod(0o1777)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(3):
        # First without O_CREAT: with it, fs.protected_regular refuses another user's file in a sticky directory,
        # even to root.
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # whatever the umask
        return descriptor
    raise FileNotFoundError(errno.ENOENT, "the file comes and goes", str(path))


def _read(descriptor: int) -> dict[str, Any]:
    try:
        data = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    pid, host = holder.get("started_by", holder.get("pid")), holder.get("host")
    return f"`{holder.get('command')}` (process {pid} on {host}) since {holder.get('since')}"


def _command(pid: int) -> str:
    """What the process was started as: `farm` and all its words, of other programs the first two."""
    import psutil

    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
    for number, word in enumerate(words[:3]):
        if Path(word).name == "farm" or words[number - 1 : number + 1] == ["-m", "cli"]:
            return " ".join(["farm", *words[number + 1 :]])[:200]
    return " ".join([Path(words[0]).name, *words[1:2]])[:200] if words else "a process that has ended"


def _has_another(card_id: str) -> bool:
    """Whether this host has another card to choose."""
    from farm.devices.host import discover
    from farm.settings import settings

    return any(card.id != card_id and not card.refusal for card in discover(settings()))
