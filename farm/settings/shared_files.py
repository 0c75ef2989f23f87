"""Files and folders at names that other users of this host may have made.

Any user can put a symbolic link, a pipe, a folder, a huge file or a second name of another user's
file at a name that the farm uses in a shared folder. So the farm opens such names only with this
module:

- A path is opened folder by folder, through descriptors. A symbolic link is followed only in a
  folder that only root and this user can change, below no folder that others can change. Any other
  link is refused.
- A file is opened without waiting. It must be a regular file with one name. A read has a limit.
- Only what this process has just created gets another mode, through its descriptor. The umask has
  no effect on it.

docs/design/shared-folders.md describes the rules for users.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

#: Modes of a folder for this user only, and of one in which all users create files and delete only
#: their own ones.
PRIVATE, SHARED = 0o700, 0o1777
#: Most entries of a folder that are listed: another user may have created any number.
MOST_ENTRIES = 100_000
#: Of a name, in the name of its unfinished file: both fit into the 255 bytes of a name.
MOST_START_BYTES = 100
_MOST_LINKS = 40  # as in the kernel
_MOST_TRIES = 10
_OWNED = "owned"  # the locked file in a `TemporaryFolder`
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# O_PATH needs no permission to read a folder. Systems without it open the folder for reading.
_AS_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_FILE = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class UntrustedPath(OSError):
    """What lies at a path may be the work of another user, so it is not used. ``strerror`` says
    what it is.
    """


@dataclass(frozen=True)
class Folder:
    """An open folder. Its methods act on the folder that was opened, even if another one gets its
    path.

    Attributes:
        descriptor: of the folder; for the functions of `os` with ``dir_fd``.
        stays: only root and this user can put another folder at the path.
        exclusive: the folder also belongs to one of them, and no other user can change its entries.
    """

    path: Path
    descriptor: int
    stays: bool
    exclusive: bool

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def names(self, suffix: str = "") -> list[str]:
        """Return the sorted names of the entries that end with ``suffix``, at most
        `MOST_ENTRIES`.
        """
        descriptor = os.open(
            ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor
        )
        try:
            with os.scandir(descriptor) as entries:
                names = (entry.name for entry in entries if entry.name.endswith(suffix))
                return sorted(itertools.islice(names, MOST_ENTRIES))
        finally:
            os.close(descriptor)

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry; of a symbolic link, its own."""
        with self._named(name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str, descriptor: int) -> bool:
        """True if an open file still has this name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self.status(name), os.fstat(descriptor))
        return False

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file with one name, without waiting; return its descriptor.

        Raises:
            UntrustedPath: it is something else.
            OSError: it does not exist, or this user may not open it.
        """
        # Look first: for some kinds, the error of `open` does not tell what they are.
        self._check(name, self.status(name))
        with self._named(name):
            descriptor = os.open(name, flags | _AS_FILE, dir_fd=self.descriptor)
        try:
            self._check(name, os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, name: str, mode: int | None) -> int:
        """Create a file and return its descriptor. Raises `FileExistsError` if the name is in use.

        Args:
            mode: of the file, whatever the umask; None: as the umask allows.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _AS_FILE
        with self._named(name):
            descriptor = os.open(
                name, flags, 0o666 if mode is None else mode, dir_fd=self.descriptor
            )
        if mode is not None:
            with contextlib.suppress(OSError):  # some file systems have no modes
                os.fchmod(descriptor, mode)
        return descriptor

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a file of at most ``most_bytes``. Raises as `open`, and `UntrustedPath` if it is
        larger.
        """
        with os.fdopen(self.open(name), "rb") as file:
            return self.read_opened(name, file, most_bytes)

    def read_opened(self, name: str, file: IO[bytes], most_bytes: int) -> bytes:
        """Read an opened file. Raises `UntrustedPath` if it is larger than ``most_bytes``."""
        data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise UntrustedPath(
                errno.EFBIG, f"is larger than {most_bytes} bytes", str(self.path / name)
            )
        return data

    @contextlib.contextmanager
    def replacing(self, name: str, mode: int | None = 0o600) -> Iterator[IO[bytes]]:
        """A context with a new file, which gets the name at the end of the block. If the block or
        the disk fails, nothing changes. ``mode``: see `create`."""
        start = os.fsdecode(os.fsencode(name)[:MOST_START_BYTES])
        unfinished = f".{start}.{secrets.token_hex(4)}.part"
        file = os.fdopen(self.create(unfinished, mode), "wb")
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.rename(unfinished, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(unfinished)
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, or replace it. Only this user can read it."""
        with self.replacing(name) as file:
            file.write(data)

    def rename(self, name: str, new_name: str, into: Folder | None = None) -> None:
        """Give an entry another name, also in another folder."""
        target = self.descriptor if into is None else into.descriptor
        with self._named(name):
            os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=target)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself."""
        with self._named(name):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a folder with its contents, as far as this user may. Links are removed, not
        followed.
        """
        shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Put the whole path into the errors of a block: a function with ``dir_fd`` knows only the
        name.
        """
        try:
            yield
        except OSError as error:
            error.filename = str(self.path / name)
            raise

    def _check(self, name: str, status: os.stat_result) -> None:
        _check_status(self.path / name, status)


def why_not_own(path: Path) -> str:
    """Create a folder for files that contain code, with mode 0700, unless it exists. Return why
    other users may have changed its files; "" if they cannot. Raises `OSError` if it cannot be
    created."""
    try:
        with open_folder(path, create=PRIVATE) as folder:
            return _why_not_own(folder)
    except UntrustedPath as error:
        return f"{error.filename} {error.strerror}"


def _why_not_own(folder: Folder) -> str:
    status = os.fstat(folder.descriptor)
    if status.st_uid != os.geteuid():
        return f"it belongs to user {user_name(status.st_uid)}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"other users can write to it ({stat.filemode(status.st_mode)})"
    if not folder.stays:
        return "other users can write to a folder above it, so they can replace it"
    return ""


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[IO[bytes]]:
    """A context with a new file, which gets the path at the end of the block (see
    `Folder.replacing`). For files that the user has named: links to their folder are followed, and
    the umask decides about their mode."""
    descriptor = os.open(path.parent, _AS_FOLDER & ~os.O_NOFOLLOW)
    with (
        Folder(path.parent, descriptor, False, False) as folder,
        folder.replacing(path.name, None) as file,
    ):
        yield file


def check_file(path: Path) -> None:
    """Check a file that another program opens at a path that the user has named. Raises
    `UntrustedPath` if it is something else than a regular file with one name, and other users can
    change its folder."""
    if not _is_exclusive(path.parent.stat()):
        with contextlib.suppress(FileNotFoundError):
            _check_status(path, path.lstat())


def _check_status(path: Path, status: os.stat_result) -> None:
    """Raise `UntrustedPath` unless the status is that of a regular file with one name."""
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedPath(
            errno.ELOOP, f"is a symbolic link of user {user_name(status.st_uid)}", str(path)
        )
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedPath(errno.EPERM, "is not a regular file", str(path))
    if status.st_nlink > 1:
        what = f"is one of {status.st_nlink} names (hard links) of a file"
        raise UntrustedPath(errno.EPERM, what, str(path))


def user_name(uid: int) -> str:
    """The name of a user; its number if it has none."""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


# ---- opening a folder


def open_folder(path: Path | str, *, create: int | None = None) -> Folder:
    """Open the folder at a path; close it after use.

    Args:
        create: if the folder or its parents do not exist, create them with this mode (parents of a
            shared folder: 0755). The mode of an existing folder does not change.

    Raises:
        UntrustedPath: a part of the path is a symbolic link, and other users can change the folder
            in which it is.
        OSError: the folder does not exist, cannot be created, or this user may not search it.
    """
    path = Path(path)
    absolute = path.absolute()
    parts = list(absolute.parts[1:])
    links = 0
    folder = _root(absolute.anchor)
    try:
        while parts:
            name = parts.pop(0)
            target = _target_of_link(folder, name)
            if target is None:
                folder = _descend(folder, name, _mode_of_part(create, last=not parts))
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            parts = [part for part in target.parts if part != target.anchor] + parts
            if target.is_absolute():
                folder.close()
                folder = _root(target.anchor)
    except BaseException:
        folder.close()
        raise
    return Folder(path, folder.descriptor, folder.stays, folder.exclusive)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, accessible only to this user. Existing folders are
    not changed. Raises `OSError` if the folder cannot be created."""
    if not folder.is_dir():
        open_folder(folder, create=PRIVATE).close()


def _mode_of_part(create: int | None, *, last: bool) -> int | None:
    """The mode with which a missing part of a path is created; None: it is not created."""
    if create is None or last:
        return create
    return 0o755 if create & stat.S_IRWXO else PRIVATE


def _root(path: str) -> Folder:
    descriptor = os.open(path, _AS_FOLDER)
    return Folder(Path(path), descriptor, True, _is_exclusive(os.fstat(descriptor)))


def _is_exclusive(status: os.stat_result) -> bool:
    """True if only root and this user can change the entries of a folder."""
    return _is_ours(status) and not status.st_mode & _WRITABLE_BY_OTHERS


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _target_of_link(folder: Folder, name: str) -> Path | None:
    """The target of a symbolic link; None for anything else. Raises `UntrustedPath` if another user
    may have made or changed the link."""
    try:
        status = folder.status(name)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(status.st_mode):
        return None
    if not folder.exclusive:
        what = (
            f"is a symbolic link of user {user_name(status.st_uid)}, in a folder that other users "
            "can change"
        )
        raise UntrustedPath(errno.ELOOP, what, str(folder.path / name))
    return Path(os.readlink(name, dir_fd=folder.descriptor))


def _descend(folder: Folder, name: str, mode: int | None) -> Folder:
    """Close a folder and return an entry of it, which is a folder, or is created as one with this
    mode.
    """
    path = folder.path / name
    try:
        descriptor = os.open(name, _AS_FOLDER, dir_fd=folder.descriptor)
    except FileNotFoundError as error:
        if mode is None:
            error.filename = str(path)
            raise
        descriptor = _created(folder, name, mode)
    except OSError as error:
        error.filename = str(path)
        raise
    status = os.fstat(descriptor)
    stays = folder.stays and (folder.exclusive or (_is_sticky(folder) and _is_ours(status)))
    folder.close()
    return Folder(path, descriptor, stays, stays and _is_exclusive(status))


def _is_sticky(folder: Folder) -> bool:
    """True if only root, this user and the owner of an entry can rename or delete the entry."""
    status = os.fstat(folder.descriptor)
    return _is_ours(status) and bool(status.st_mode & stat.S_ISVTX)


def _created(folder: Folder, name: str, mode: int) -> int:
    """Create a folder and return its descriptor. If another process creates it first, return that
    of its folder.
    """
    with folder._named(name):
        try:
            os.mkdir(name, mode, dir_fd=folder.descriptor)
        except FileExistsError:
            return os.open(name, _AS_FOLDER, dir_fd=folder.descriptor)
        descriptor = os.open(name, _AS_FOLDER, dir_fd=folder.descriptor)
        status = os.fstat(descriptor)
        # Elsewhere, another user may already have put another folder at this name. Then the umask
        # decides.
        in_place = folder.stays and (folder.exclusive or _is_sticky(folder))
        if in_place and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
            _set_mode(descriptor, mode)
    return descriptor


def _set_mode(folder: int, mode: int) -> None:
    """Set the mode of an open folder. A descriptor of O_PATH cannot do it itself."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with contextlib.suppress(OSError):  # some file systems have no modes
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


# ---- temporary folders


class TemporaryFolder:
    """A new folder of mode 0700. The lock on a file in it shows that its process lives, or a child
    that inherited `descriptor`. `remove_left` removes the folders of killed processes. Raises
    `OSError` if it cannot be created."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        for _ in range(_MOST_TRIES):
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # `remove_left` has removed it
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self.descriptor = _lock_of(path)
                self.path = path
                return
        raise OSError(errno.EBUSY, "other processes remove each new folder", prefix)

    def remove(self) -> None:
        """Remove the folder. Its lock stays until `close`."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder and release its lock. A second call does nothing."""
        if self.descriptor >= 0:
            self.remove()
            os.close(self.descriptor)
            self.descriptor = -1


def _lock_of(path: Path) -> int:
    """Create and lock the file that shows that a new folder is in use; return its descriptor.
    Raises `BlockingIOError` or `FileNotFoundError` if another process removes the folder."""
    with Folder(path, os.open(path, _AS_FOLDER), False, False) as folder:
        descriptor = folder.create(_OWNED, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not folder.has(_OWNED, descriptor):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def remove_left(prefix: str, parent: Path | None = None, *, also_empty: bool = False) -> None:
    """Remove the temporary folders of this user's killed processes. ``also_empty``: only
    `TemporaryFolder` uses this prefix, so an empty folder is one whose process was killed before it
    locked the folder."""
    with contextlib.suppress(OSError), open_folder(parent or tempfile.gettempdir()) as folder:
        for name in folder.names():
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    _remove_if_left(folder, name, also_empty)


def _remove_if_left(folder: Folder, name: str, also_empty: bool) -> None:
    """Remove a `TemporaryFolder` of this user. Raises `OSError` if it is in use, or another
    folder.
    """
    path = folder.path / name
    if also_empty and folder.status(name).st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(name, dir_fd=folder.descriptor)
            return
    with Folder(path, os.open(name, _AS_FOLDER, dir_fd=folder.descriptor), False, False) as left:
        descriptor = left.open(_OWNED, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.remove_tree(name)
        finally:
            os.close(descriptor)
