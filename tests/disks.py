"""A disk of a few MiB that a test can fill: a file system in memory, visible only to this thread
and its processes.

It is in a separate mount namespace, so nothing remains, however the tests end.
"""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from tests import setns


def why_not() -> str:
    """Return the reason why this machine cannot have such a disk; empty if it can."""
    if not setns.known():
        return "mount namespaces are a matter of Linux"
    if os.geteuid() != 0:
        return "only root may mount a disk"
    try:
        with tempfile.TemporaryDirectory() as folder, SmallDisk(Path(folder)):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return (
            "this machine does not allow a disk to be mounted: "
            f"{getattr(error, 'stderr', None) or error}"
        )


class SmallDisk:
    """A context manager; inside, ``path`` is on the disk for the calling thread and the processes
    it starts.
    """

    def __init__(self, path: Path, size_mib: int = 8) -> None:
        self.path = path
        self.size_mib = size_mib
        self._before = -1

    def fill(self) -> None:
        """Fill the disk completely."""
        with (self.path / "filler").open("ab", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def make_room(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def __enter__(self) -> SmallDisk:
        self.path.mkdir(parents=True, exist_ok=True)
        self._before = setns.own(setns.MOUNTS)
        try:
            setns.unshare(setns.MOUNTS)
            _mount("--make-rprivate", "/")
            _mount("-t", "tmpfs", "-o", f"size={self.size_mib}m", "tmpfs", str(self.path))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        folder = os.getcwd()  # setns resets it
        setns.go_back(self._before, setns.MOUNTS)
        os.chdir(folder)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True, text=True)
