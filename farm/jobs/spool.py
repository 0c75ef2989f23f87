"""The spool: readings on disk that could not be written because the database was away.

A spooled reading is accepted like any other: only if the token of its claim is still valid when it is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from farm.errors import DatabaseUnreachable, FarmError
from farm.jobs.items import Claim, Closed, complete
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping, Subject
from farm.types.reading import Reading

log = logging.getLogger("farm.worker")


class Spool:
    """A folder with one file per reading. Files that cannot be read are moved to its folder `unreadable`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable = folder / "unreadable"
        self._stuck: set[Path] = set()  # files that this process could neither use nor move

    def keep(self, claimed: Claim, reading: Reading, *, card_id: str, software_id: str) -> Path:
        """Write one reading atomically; returns its file.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        path = self.folder / f"{claimed.item_id}-{claimed.token}.json"
        about = {"card_id": card_id, "software_id": software_id}
        write_whole(path, {"claim": dataclasses.asdict(claimed), "reading": reading.to_json(), **about})
        return path

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.json"))

    def items(self) -> set[int]:
        """The ids of the items whose readings are in the spool."""
        numbers = [path.name.partition("-")[0] for path in self.folder.glob("*-*.json")]
        return {int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) < 19}

    def put_aside(self) -> list[Path]:
        """The files that could not be used: unreadable ones, and readings that the database refused."""
        return [*sorted(self.unreadable.glob("*")), *sorted(self.folder.glob("*.refused"))]

    def flush(self, database: Database, card_id: str) -> list[Closed]:
        """Write the readings of one card into the database, and remove their files whether accepted or not.

        A file that cannot be read, or that the database refuses for ever, is put aside, so that it blocks no other.

        Raises:
            DatabaseUnreachable: the database is still away; the remaining files stay.
            OSError: this host lacks memory, open files or locks.
        """
        done = []
        for path in sorted(set(self.folder.glob("*.json")) - self._stuck):
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(open(path, encoding="utf-8", opener=_open_file))
                    # One process of this host at a time: a reading that is written twice would count as repeated work.
                    fcntl.flock(file, fcntl.LOCK_EX)
                    if not os.fstat(file.fileno()).st_nlink:
                        continue  # written by another process just now
                    if (parsed := _parse(file.read(), card_id)) is None:
                        continue
                except FileNotFoundError:
                    continue
                except _UNREADABLE as error:
                    if isinstance(error, OSError) and error.errno in _OF_THE_HOST:
                        raise
                    log.error("%s cannot be read and is moved to %s: %s", path, self.unreadable, error)
                    self._move(path, self.unreadable / path.name)
                    continue
                if (closed := self._write(path, database, card_id, *parsed)) is not None:
                    done.append(closed)
        return done

    def _write(
        self, path: Path, database: Database, card_id: str, claimed: Claim, reading: Reading, software_id: str
    ) -> Closed | None:
        """Write the reading of one file; None if the database refuses it."""
        try:
            closed = complete(database, claimed, reading, card_id=card_id, software_id=software_id)
        except DatabaseUnreachable:
            raise
        except Exception:
            log.exception("The database refuses %s, which is renamed", path)
            self._move(path, path.with_name(path.name + ".refused"))
            return None
        self._move(path, None)
        return closed

    def _move(self, path: Path, target: Path | None) -> None:
        """Move a file, or remove it. If that fails, this process leaves it alone from now on."""
        try:
            if target is None:
                path.unlink()
            else:
                target.parent.mkdir(exist_ok=True)
                path.rename(target)
        except FileNotFoundError:
            pass  # another process did
        except OSError as error:
            self._stuck.add(path)
            log.error("%s stays where it is: %s", path, error)


_UNREADABLE = (OSError, FarmError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
#: Errors of the host, not of the file: it can be read later.
_OF_THE_HOST = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK}


def _open_file(path: str, flags: int) -> int:
    """Open a regular file; anything else would block, or is no reading."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a file")
    return descriptor


def _parse(text: str, card_id: str) -> tuple[Claim, Reading, str] | None:
    """Claim, reading and software of a file; None if it belongs to another card."""
    data = json.loads(text)
    if data["card_id"] != card_id:
        return None
    parsed = {name: kind.from_json(data["claim"][name]) for name, kind in _PARSED.items()}
    return Claim(**{**data["claim"], **parsed}), Reading.from_json(data["reading"]), data["software_id"]


_PARSED: dict[str, Any] = {"subject": Subject, "protocol": Protocol, "stopping": Stopping}


def write_whole(path: Path, data: Any) -> None:
    """Write a JSON file atomically; its folder is created if necessary.

    Raises:
        OSError: the disk is full, or the folder is not writable; nothing is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("w") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
