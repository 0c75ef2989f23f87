"""Host-wide locks: only one process at a time uses a card, or a resource that the cards of a host share.

A lock is `flock` on a file in a host-wide directory: the kernel releases it when the holder exits or is killed. The
holder writes its name into the file for messages of other processes. The directory must be mounted into containers. It
is world-writable and sticky, because workers of different users share it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Self

from farm.errors import CardBusy, SettingsError
from farm.safe_text import printable


class CardLock:
    """The exclusive right to measure on a card. Use it as a context manager, or call `acquire` and `release`. Messages
    of other processes name the process ``started_by`` as the holder: the one that a person started, by default this
    one.

    A child process made by `fork` shares the lock until both have closed it; a program started by `exec` does not.
    """

    def __init__(self, card_id: str, lock_dir: Path | str, started_by: int | None = None) -> None:
        self.card_id = card_id
        self.started_by = started_by
        self.path = _path(card_id, lock_dir)
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> Self:
        """Acquire the lock without waiting. Raises `CardBusy`, which names the holder's id, host and command, if
        another process holds it; `SettingsError` if the lock file cannot be created or locked."""
        if self._descriptor is None:
            self._descriptor = _lock(self.path, f"The card {self.card_id}", self.card_id, started_by=self.started_by)
        return self

    def release(self) -> None:
        """Release the lock, but do not delete the file: otherwise two processes could lock two files of one name."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@contextlib.contextmanager
def turn(name: str, lock_dir: Path | str, timeout_s: float) -> Iterator[None]:
    """Acquire the host-wide lock `name`; wait up to `timeout_s` for it. Raises `CardBusy`, which names the holder, if
    another process still holds it then; `SettingsError` if the lock file cannot be created or locked."""
    descriptor = _lock(_path(name, lock_dir), f"This host's {name}", timeout_s=timeout_s)
    try:
        yield
    finally:
        os.close(descriptor)


def register_process(card_id: str, ids: Collection[int], lock_dir: Path | str) -> None:
    """Note the ids under which the driver lists this process on a card, until the process ends."""
    path = _path(f"{card_id}-{socket.gethostname()}-{os.getpid()}", lock_dir)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor := _open(path), fcntl.LOCK_EX)  # the kernel closes the file at the end of the process
        os.pwrite(descriptor, json.dumps(sorted(ids)).encode(), 0)
        path.rename(path.with_suffix(".ids"))


def registered_processes(lock_dir: Path | str) -> frozenset[int]:
    """The ids of the running benchmark processes of this user on this host (`register_process`)."""
    found: set[int] = set()
    for path in Path(lock_dir).glob("*.ids"):
        with contextlib.suppress(OSError, ValueError), path.open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                continue
            if _try_lock(file.fileno()):  # its process has ended
                path.unlink()
            else:
                found.update(json.load(file))
    return frozenset(found)


def _path(name: str, lock_dir: Path | str) -> Path:
    name = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
    return Path(lock_dir) / f"{name}.lock"


def _lock(path: Path, what: str, card_id: str = "", *, started_by: int | None = None, timeout_s: float = 0.0) -> int:
    """Open a file, lock it and write the holder into it. Return the file's descriptor. Error messages name `what`."""
    until_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            descriptor = _open(path)
            stack.callback(os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingsError(f"{what} cannot be locked: {path} is not a regular file.", f"Delete {path}.")
            while not _try_lock(descriptor):
                if time.monotonic() >= until_s:
                    been = f"was in use for {timeout_s:g} s, last by" if timeout_s else "is in use by"
                    another = card_id and _has_another(card_id)
                    raise CardBusy(
                        f"{what} {been} {_holder(descriptor)}.",
                        "Wait until this process has ended, "
                        + ("end it, or choose another card with --card." if another else "or end it."),
                    )
                time.sleep(0.02)
            _sign(descriptor, started_by or os.getpid())
        except OSError as error:
            raise SettingsError(
                f"{what} cannot be locked: {error}.",
                "Set FARM_LOCK_DIR to a folder on a local file system to which all workers of this host may write.",
            ) from error
        stack.pop_all()
    return descriptor


def _try_lock(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _sign(descriptor: int, started_by: int) -> None:
    """Write this process into the lock file as the holder, for messages of other processes."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_by": started_by,
        "command": _command(started_by),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _open(path: Path) -> int:
    """Open the lock file; create it and its directory if necessary."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.stat().st_mode & 0o1777 != 0o1777:
            path.parent.chmod(0o1777)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(3):
        # Try without O_CREAT first: with O_CREAT, the kernel (fs.protected_regular) denies access to another user's
        # file in a sticky directory, even for root.
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # the umask may have removed permissions
        return descriptor
    raise FileNotFoundError(errno.ENOENT, "another process repeatedly deletes the file", str(path))


def _holder(descriptor: int) -> str:
    """A text that names the holder of a lock, for messages."""
    user = _user(descriptor)
    of_user = f", user {user}" if user else ""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        named = "`{command}` (process {started_by} on {host}) since {since}".format_map(holder)
        return printable(named) + of_user
    except (OSError, ValueError, TypeError, LookupError, RecursionError):  # not written yet, or another program's file
        return f"another process{of_user}"


def _user(descriptor: int) -> str:
    """The user whose process holds a lock, from /proc/locks, since any user may write into the file. "" if unknown."""
    import psutil

    file = os.fstat(descriptor)
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, at, *_ = line.split()
            if (kind, at) == ("FLOCK", place):
                return psutil.Process(int(pid)).username()
    return ""


def _command(pid: int) -> str:
    """The command line of a process: `farm` with all its arguments; for other programs the first two words."""
    import psutil

    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
    for number, word in enumerate(words[:3]):
        if Path(word).name == "farm" or words[number - 1 : number + 1] == ["-m", "cli"]:
            return " ".join(["farm", *words[number + 1 :]])[:200]
    return " ".join([Path(words[0]).name, *words[1:2]])[:200] if words else "a process that has ended"


def _has_another(card_id: str) -> bool:
    """True if this host has another card that can be measured."""
    from farm.devices.host import discover
    from farm.settings import settings

    return any(card.id != card_id and not card.refusal for card in discover(settings()))
