"""A SQLite copy of exports in a cache folder, which is made once and checked at each use.

A JSON file beside the copy has its schema, size, time of modification and checksum. If size and
time still match, the copy is as it was written. If only the time differs, its checksum is computed.
Any other copy is made again: one that is damaged, partial, of another schema, or without the JSON
file. A copy is completed by renaming it, and one process at a time makes it, so several processes
can use the same folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from farm.errors import DatabaseUnreachable
from farm.settings.package_files import checksum_of
from farm.settings.shared_files import make_private
from farm.store.database import Database, newest_schema


@dataclass(frozen=True)
class Stamp:
    """What is known of a complete copy."""

    schema: str
    size_bytes: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Stamp:
        status = path.stat()
        return cls(newest_schema(), status.st_size, status.st_mtime_ns, checksum_of(path))

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """Return the stamp in a JSON file; None if there is none or it is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class DatabaseCopy:
    """A copy at `path`, which ends in .db. `make` writes the contents to a new file."""

    path: Path
    make: Callable[[Path], None]

    @property
    def stamp_path(self) -> Path:
        return self.path.with_suffix(".json")

    def open(self) -> Database:
        """Open the copy for reading. Raises `DatabaseUnreachable` if it cannot be made, and the
        errors of `make`.
        """
        if not self.is_sound():
            try:
                with self._making():
                    if not self.is_sound():  # another process may have made it meanwhile
                        self._make_again()
            except (OSError, sqlite3.Error) as error:
                raise DatabaseUnreachable(
                    f"The copy of the packaged readings {self.path} cannot be written: {error}.",
                    "Free disk space and make its folder writable, or choose another folder with "
                    "FARM_STATE_DIR.",
                ) from error
        return Database(f"sqlite:///{self.path}", read_only=True)

    def is_sound(self) -> bool:
        stamp = Stamp.read(self.stamp_path)
        if stamp is None or stamp.schema != newest_schema():
            return False
        try:
            status = self.path.stat()
            if status.st_size != stamp.size_bytes:
                return False
            return status.st_mtime_ns == stamp.modified_ns or checksum_of(self.path) == stamp.sha256
        except OSError:
            return False

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        make_private(self.path.parent)
        with (self.path.parent / "lock").open("a") as lock:
            # a file system without locks: both processes make the copy
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_again(self) -> None:
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.make(unfinished)
            _use_one_file(unfinished)
            stamp = Stamp.of(unfinished)
            self.stamp_path.unlink(missing_ok=True)
            unfinished.replace(self.path)
            unfinished.write_text(json.dumps(asdict(stamp)), encoding="utf-8")
            unfinished.replace(self.stamp_path)
        finally:
            for left in self.path.parent.glob(f"{unfinished.name}*"):
                left.unlink(missing_ok=True)


def _use_one_file(path: Path) -> None:
    """End the write-ahead log of a database and write the file to the disk."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unpack(packed: Path, target: Path) -> None:
    """Write the contents of a file that zstd has compressed."""
    import pyarrow

    with pyarrow.input_stream(packed, compression="zstd") as stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out)
