"""Host-wide locks: only one process at a time uses a card, or a resource that the cards of a host
share.

A lock is `flock` on a file in a host-wide directory: the kernel releases it when the holder exits
or is killed. The holder writes its name into the file for messages of other processes. The
directory must be mounted into containers. It is world-writable and sticky, because workers of
different users share it. So its files may be the work of any user (`farm.settings.shared_files`): a
regular file of another user is a valid lock, and what is written in it is only shown."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from farm.errors import CardBusy, SettingsError
from farm.errors.safe_text import printable
from farm.settings import settings
from farm.settings.shared_files import SHARED, Folder, UntrustedPath, open_folder

#: The mode of lock files: workers of all users lock them.
OPEN_TO_ALL = 0o666
#: Longest content of a lock file that is read.
MOST_BYTES = 4096
#: A process of the farm that has a lock signs the file within this time. Unit: s.
SIGNED_WITHIN_S = 0.2
_MOST_TRIES = 3
_DELETED = "another process repeatedly deletes the file"


class CardLock:
    """The exclusive right to measure on a card. Use it as a context manager, or call `acquire` and
    `release`. Messages of other processes name the process ``started_by`` as the holder: the one
    that a person started, by default this one.

    A child process made by `fork` shares the lock until both have closed it; a program started by
    `exec` does not."""

    def __init__(self, card_id: str, lock_dir: Path | str, started_by: int | None = None) -> None:
        self.card_id = card_id
        self.started_by = started_by
        self.path = _path(card_id, lock_dir)
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> Self:
        """Acquire the lock without waiting. Raises `CardBusy`, which names the holder's id, host
        and command, if another process holds it; `SettingsError` if the lock file cannot be created
        or locked."""
        if self._descriptor is None:
            self._descriptor = _lock(
                self.path, f"The card {self.card_id}", self.card_id, started_by=self.started_by
            )
        return self

    def release(self) -> None:
        """Release the lock, but do not delete the file: otherwise two processes could lock two
        files of one name.
        """
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _release(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@contextlib.contextmanager
def host_lock(name: str, lock_dir: Path | str, timeout_s: float) -> Iterator[None]:
    """Acquire the host-wide lock `name`; wait up to `timeout_s` for it. Raises `CardBusy`, which
    names the holder, if another process still holds it then; `SettingsError` if the lock file
    cannot be created or locked."""
    descriptor = _lock(_path(name, lock_dir), f"This host's {name}", timeout_s=timeout_s)
    try:
        yield
    finally:
        _release(descriptor)


def register_process(card_id: str, ids: Collection[int], lock_dir: Path | str) -> None:
    """Note the ids under which the driver lists this process on a card, until the process ends."""
    stem = _path(f"{card_id}-{socket.gethostname()}-{os.getpid()}", lock_dir).stem
    written = json.dumps(sorted(ids)).encode()
    with contextlib.suppress(OSError), open_folder(lock_dir, create=SHARED) as folder:
        for _ in range(_MOST_TRIES):
            name = f"{stem}-{secrets.token_hex(4)}.ids"
            descriptor = folder.create(name, 0o600)
            with _closing_on_error(descriptor):
                os.pwrite(descriptor, written, 0)
                if _try_lock(descriptor) and folder.has(name, descriptor):
                    return  # the kernel closes the file at the end of the process
            os.close(descriptor)  # `registered_processes` of another process took it for a left one


def registered_processes(lock_dir: Path | str | None = None) -> frozenset[int]:
    """The ids of the running benchmark processes of this user on this host (`register_process`).

    None: the folder of locks in this process's settings."""
    if lock_dir is None:
        lock_dir = settings().lock_dir
    ids: set[int] = set()
    with contextlib.suppress(OSError), open_folder(lock_dir) as folder:
        for name in folder.names(".ids"):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                ids |= _registered(folder, name)
    return frozenset(ids)


def _registered(folder: Folder, name: str) -> set[int]:
    """The ids in a file of a running process of this user. Remove the file of a process that has
    ended.
    """
    if folder.status(name).st_uid != os.geteuid():
        return set()
    with os.fdopen(folder.open(name), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            return set()
        if _try_lock(file.fileno()):  # its process has ended
            folder.remove(name)
            return set()
        ids = json.loads(folder.read_opened(name, file, MOST_BYTES))
    return {number for number in ids if type(number) is int}


def lock_problems(lock_dir: Path | str) -> list[tuple[str, str]]:
    """What is wrong with the lock files of this host, each with what to do: files that are no
    locks, and locks that processes other than the farm's hold."""
    problems = []
    with contextlib.suppress(OSError), open_folder(lock_dir) as folder:
        for name in folder.names(".lock"):
            problem = _lock_problem(folder, name, Path(lock_dir, name))
            if problem:
                problems.append(problem)
    return problems


def _lock_problem(folder: Folder, name: str, path: Path) -> tuple[str, str] | None:
    """What is wrong with a lock file, and what to do; None if nothing."""
    try:
        holder = _foreign_holder(folder, name)
    except FileNotFoundError:
        return None
    except UntrustedPath as error:
        return (
            f"{error.filename} cannot be a lock: it {error.strerror}",
            f"Delete {error.filename}.",
        )
    except OSError as error:
        return (
            f"the lock {error.filename} cannot be opened: {error.strerror}",
            "Let its owner or root delete it, or give all users access to it.",
        )
    if not holder:
        return None
    return (
        f"{holder} holds the lock {path}; it is no process of the farm",
        "Wait until this process has ended, or end it. What needs the lock waits.",
    )


def _foreign_holder(folder: Folder, name: str) -> str:
    """A text that names the process that holds a lock and has not signed it; "" if there is
    none.
    """
    descriptor = folder.open(name)
    try:
        pid = _locked_by(descriptor)
        if pid and not _has_signed(pid, _signature(descriptor)):
            time.sleep(SIGNED_WITHIN_S)
            if pid == _locked_by(descriptor) and not _has_signed(pid, _signature(descriptor)):
                return _process_text(pid)
    finally:
        os.close(descriptor)
    return ""


def holder_of(card_id: str, lock_dir: Path | str) -> int | None:
    """The id of the process that has written itself into a card's lock file as the holder; None if
    there is none.
    """
    pid: Any = None
    with contextlib.suppress(OSError), open_folder(lock_dir) as folder:
        descriptor = folder.open(_path(card_id, lock_dir).name)
        pid = _signature(descriptor).get("pid")
        os.close(descriptor)
    return pid if type(pid) is int and 0 < pid < 2**31 else None


def _path(name: str, lock_dir: Path | str) -> Path:
    stem = re.sub(r"[^\w.-]", "_", name)
    return Path(lock_dir) / f"{stem}.lock"


def _lock(
    path: Path,
    what: str,
    card_id: str = "",
    *,
    started_by: int | None = None,
    timeout_s: float = 0.0,
) -> int:
    """Open a file, lock it and write the holder into it. Return the file's descriptor. Error
    messages name `what`.
    """
    until_s = time.monotonic() + timeout_s
    try:
        with open_folder(path.parent, create=SHARED) as folder:
            for _ in range(_MOST_TRIES):
                descriptor = _open(folder, path.name)
                with _closing_on_error(descriptor):
                    if not _locked_until(descriptor, until_s):
                        raise _busy(descriptor, what, card_id, timeout_s)
                    if folder.has(path.name, descriptor):
                        _sign(descriptor, started_by or os.getpid())
                        return descriptor
                # Another process has deleted it: a third one may lock a new file of this name.
                os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, _DELETED, str(path))
    except UntrustedPath as error:
        raise SettingsError(
            f"{what} cannot be locked: {error.filename} {error.strerror}.",
            f"Delete {error.filename}, or set FARM_LOCK_DIR to another folder for all workers of "
            "this host.",
        ) from error
    except OSError as error:
        raise SettingsError(
            f"{what} cannot be locked: {error}.",
            "Set FARM_LOCK_DIR to a folder on a local file system to which all workers of this "
            "host may write.",
        ) from error


@contextlib.contextmanager
def _closing_on_error(descriptor: int) -> Iterator[None]:
    """Close a file, which releases its lock, if the block raises."""
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _busy(descriptor: int, what: str, card_id: str, timeout_s: float) -> CardBusy:
    """The error that names the process which has locked a file."""
    holder = _holder(descriptor)
    been = f"was in use for {timeout_s:g} s, last by" if timeout_s else "is in use by"
    another = card_id and _has_another(card_id)
    choices = "end it, or choose another card with --card" if another else "or end it"
    return CardBusy(f"{what} {been} {holder}.", f"Wait until this process has ended, {choices}.")


def locked_within(descriptor: int, timeout_s: float) -> bool:
    """Lock an open file; return False if another process holds the lock for longer than
    ``timeout_s``.
    """
    return _locked_until(descriptor, time.monotonic() + timeout_s)


def _locked_until(descriptor: int, until_s: float) -> bool:
    """Wait for the lock; return False if another process still holds it at ``until_s`` of the
    monotonic clock.
    """
    while not _try_lock(descriptor):
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.02)
    return True


def _try_lock(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _release(descriptor: int) -> None:
    """Release a lock. Remove the holder from the file, so that no message names a process that has
    ended.
    """
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _open(folder: Folder, name: str) -> int:
    """Open a lock file; create it if necessary."""
    for _ in range(_MOST_TRIES):
        # Try without O_CREAT first: with O_CREAT, the kernel (fs.protected_regular) denies access
        # to another user's file in a sticky directory, even for root.
        with contextlib.suppress(FileNotFoundError):
            return folder.open(name, os.O_RDWR)
        with contextlib.suppress(FileExistsError):
            return folder.create(name, OPEN_TO_ALL)
    raise FileNotFoundError(errno.ENOENT, _DELETED, str(folder.path / name))


# ---- the holder of a lock


def _sign(descriptor: int, started_by: int) -> None:
    """Write this process into the lock file as the holder, for messages of other processes."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_by": started_by,
        "command": _command(started_by),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with contextlib.suppress(OSError):  # a full disk: the lock is valid without it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _signature(descriptor: int) -> dict[str, Any]:
    """What the holder has written into a lock file; {} if nothing. Any user may have written it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        written = json.loads(os.pread(descriptor, MOST_BYTES, 0))
        return written if isinstance(written, dict) else {}
    return {}


def _holder(descriptor: int) -> str:
    """A text that names the holder of a lock, for messages. The kernel names its process, and the
    file its command.
    """
    pid, signature = _locked_by(descriptor), _signature(descriptor)
    if pid and not _has_signed(pid, signature):
        return _process_text(pid)
    of_user = _of_user(pid) if pid else ""
    try:
        named = "`{command}` (process {started_by} on {host}) since {since}".format_map(signature)
        return printable(named) + of_user
    except (ValueError, TypeError, LookupError, AttributeError):
        return f"another process{of_user}"  # not written yet, or another program's file


def _locked_by(descriptor: int) -> int:
    """The id of the process that holds a lock, from /proc/locks. 0 if unknown, as in a
    container.
    """
    file = os.fstat(descriptor)
    inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, at, *_ = line.split()
            if (kind, at) == ("FLOCK", inode):
                return int(pid)
    return 0


def _has_signed(pid: int, signature: Mapping[str, Any]) -> bool:
    """True if a process has written its id into a lock file. In a container, it has another id than
    here.
    """
    signed = signature.get("pid")
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return signed in [int(number) for number in line.split()[1:]]
    return signed == pid


def _process_text(pid: int) -> str:
    import psutil

    name = "unknown"
    with contextlib.suppress(psutil.Error):
        name = psutil.Process(pid).name()
    return f"another process ({pid}, {printable(name)!r}){_of_user(pid)}"


def _of_user(pid: int) -> str:
    """The user of a process, after a comma; "" if unknown."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return f", user {psutil.Process(pid).username()}"
    return ""


def _command(pid: int) -> str:
    """The command line of a process: `farm` with all its arguments; for other programs the first
    two words.
    """
    import psutil

    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
    for number, word in enumerate(words[:3]):
        if Path(word).name == "farm" or words[number - 1 : number + 1] == ["-m", "cli"]:
            return " ".join(["farm", *words[number + 1 :]])[:200]
    if not words:
        return "a process that has ended"
    return " ".join([Path(words[0]).name, *words[1:2]])[:200]


def _has_another(card_id: str) -> bool:
    """True if this host has another card that can be measured."""
    from farm.devices.host import discover

    return any(card.id != card_id and not card.refusal for card in discover(settings()))
