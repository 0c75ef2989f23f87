"""The processor of a host: measurements that depend on it, and compilations that pause meanwhile.

Two files in the host-wide folder of locks, each with `flock` in shared mode, and one file for each
compilation that may run at the same time:

- ``quiet.gate``: held while a time that depends on the host is measured;
- ``compiling.gate``: held while compilations run;
- ``compiling-N.gate``: held by the process that runs compilation N.

A measurement first holds the one gate and then waits until nobody holds the other. The kernel
releases the gates of a process that ends, so nothing stays paused or waits for ever. If the folder
cannot be used, nothing waits: a card needs the same folder for its lock, and reports it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from farm.devices.lock import OPEN_TO_ALL
from farm.settings import settings
from farm.settings.shared_files import SHARED, Folder, open_folder

QUIET, COMPILING = "quiet", "compiling"
#: Longest time that a measurement waits until compilations have paused. Unit: s.
PAUSED_WITHIN_S = 2.0
POLL_S = 0.02


class HostGate:
    """One gate of this host. Its state is shared by all processes of the host."""

    def __init__(self, name: str, lock_dir: Path | str) -> None:
        """Raises `OSError` if the folder of locks cannot be used."""
        with open_folder(lock_dir, create=SHARED) as folder:
            self._descriptor = _open(folder, f"{name}.gate")

    def hold(self) -> None:
        """Hold the gate together with others. Waits at most for `alone` of another process."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def hold_alone(self) -> bool:
        """Hold the gate alone; False if another process holds it."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Within the block, nobody else holds the gate. Yields False if another process does."""
        succeeded = self.hold_alone()
        try:
            yield succeeded
        finally:
            if succeeded:
                self.release()


@contextlib.contextmanager
def quiet(lock_dir: Path | str = "") -> Iterator[None]:
    """Within the block, the compilations of this host pause. ``lock_dir``: default: that of the
    settings.
    """
    lock_dir = lock_dir or settings().lock_dir
    with contextlib.ExitStack() as stack:
        try:
            gate, compiling = HostGate(QUIET, lock_dir), HostGate(COMPILING, lock_dir)
        except OSError:
            yield
            return
        stack.callback(gate.close)
        stack.callback(compiling.close)
        gate.hold()
        until_s = time.monotonic() + PAUSED_WITHIN_S
        while time.monotonic() < until_s:
            with compiling.alone() as paused:
                if paused:
                    break
            time.sleep(POLL_S)
        yield


def free_slot(lock_dir: Path | str, number: int) -> HostGate | None:
    """One of ``number`` places of this host for a compilation, to be closed at its end; None if
    all are taken, or the folder of locks cannot be used."""
    for position in range(number):
        with contextlib.suppress(OSError):
            slot = HostGate(f"{COMPILING}-{position}", lock_dir)
            if slot.hold_alone():
                return slot
            slot.close()
    return None


def _open(folder: Folder, name: str) -> int:
    """Open the file of a gate; create it if necessary."""
    with contextlib.suppress(FileNotFoundError):
        return folder.open(name, os.O_RDWR)
    with contextlib.suppress(FileExistsError):
        return folder.create(name, OPEN_TO_ALL)
    return folder.open(name, os.O_RDWR)
