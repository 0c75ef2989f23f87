"""Another user of this host, who puts files in the way of the farm in a shared folder.

Only root can act as another user. The tests run as root or not at all; what they show holds for
every user."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

USER = pwd.getpwnam("nobody")
#: No test of this kind takes so long, unless the farm waits for what it must not wait for. Unit: s.
HANGS_AFTER_S = 60

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_other_user(act: Callable[[], object]) -> None:
    """Call a function in a child process of the other user."""
    child = _child(act)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the function failed for the other user"


@contextlib.contextmanager
def running_as_other_user(act: Callable[[], object]) -> Iterator[int]:
    """A child process of the other user, which calls a function and then stays until the end of the
    block.
    """
    reader, writer = os.pipe()

    def stay() -> None:
        act()
        os.write(writer, b"1")
        signal.pause()

    child = _child(stay)
    try:
        os.close(writer)
        assert os.read(reader, 1) == b"1", "the function failed for the other user"
        yield child
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _child(act: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(USER.pw_gid)
            os.setuid(USER.pw_uid)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return child


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder like /tmp: every user may create files in it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shared-") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


class Victim:
    """Files of root, outside of all folders that the farm may use. Other users know their names
    only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)
        self.file = folder / "precious"
        self.file.write_text("precious")
        self.file.chmod(0o600)
        (folder / "owned").touch()
        (folder / "1-a.json").write_text("{}")
        self._before = self._state()

    def _state(self) -> dict[str, tuple[int, int, int, bytes]]:
        found = {}
        for path in (self.folder, *sorted(self.folder.iterdir())):
            status = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found[path.name] = (status.st_mode, status.st_uid, status.st_gid, content)
        return found

    def assert_unchanged(self) -> None:
        assert self._state() == self._before


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    """The test fails if anything has changed it."""
    made = Victim(tmp_path / "victim")
    yield made
    made.assert_unchanged()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp. The test fails if it hangs."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"it hangs: nothing happened for {HANGS_AFTER_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_AFTER_S)
    try:
        with shared_folder() as folder:
            yield folder
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- what another user can put at a name


def _link_to_file(path: Path, victim: Victim) -> None:
    path.symlink_to(victim.file)


def _link_to_folder(path: Path, victim: Victim) -> None:
    path.symlink_to(victim.folder)


def _link_to_nothing(path: Path, victim: Victim) -> None:
    path.symlink_to(victim.folder / "new")


def _pipe(path: Path, victim: Victim) -> None:
    os.mkfifo(path)


def _folder(path: Path, victim: Victim) -> None:
    path.mkdir()
    (path / "within").write_text("of the other user")


def _socket(path: Path, victim: Victim) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


#: Kind -> function that puts it at a path. None of them is a regular file.
PLANTED = {
    "link to a file": _link_to_file,
    "link to a folder": _link_to_folder,
    "link to nothing": _link_to_nothing,
    "pipe": _pipe,
    "folder": _folder,
    "socket": _socket,
}


def plant(kind: str, path: Path, victim: Victim) -> None:
    """Let the other user put something at a path. A hard link to root's file needs root where the
    kernel protects.
    """
    if kind == "hard link":
        os.link(victim.file, path)
    else:
        as_other_user(lambda: PLANTED[kind](path, victim))


IN_PLACE_OF_A_FILE = (*PLANTED, "hard link")
