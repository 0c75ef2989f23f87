"""Readings that wait on disk while the database is unreachable."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from farm.benchmark_process.requests import MeasureRequest
from farm.devices.lock import locked_within
from farm.errors import (
    DatabaseUnreachable,
    FarmError,
)
from farm.jobs.items import Claim, FollowUp, complete
from farm.settings.shared_files import PRIVATE, Folder, UntrustedPath, open_folder
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject

log = logging.getLogger("farm.worker")

#: Longest time to wait for a process that writes the same spooled reading. Unit: s.
SPOOL_LOCK_S = 30.0
#: Largest file of a spooled reading that is read. Sampled series are the largest part: a few MiB.
MOST_SPOOLED_BYTES = 256 << 20


class Spool:
    """A folder with one file per reading. Files that cannot be read are moved to its folder
    `unreadable`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable = folder / "unreadable"
        self._stuck: set[str] = set()  # files that this process could not move; `flush` skips them
        self._refused = ""  # why the folder is not used; it is logged once

    def keep(self, claimed: Claim, reading: Reading, *, card_id: str, software_id: str) -> Path:
        """Write one reading atomically; return its file. Raises `OSError` if the disk is full, or
        the folder is not writable, or others may have made it (`UntrustedPath`)."""
        name = f"{claimed.item_id}-{claimed.token}.json"
        claim = dataclasses.asdict(claimed)
        claim |= claim.pop("work")  # flat, as in the files of earlier versions
        origin = {"card_id": card_id, "software_id": software_id}
        data = {"claim": claim, "reading": reading.to_json(), **origin}
        with open_folder(self.folder, create=PRIVATE) as folder:
            folder.write(name, json.dumps(data).encode())
        return self.folder / name

    def __len__(self) -> int:
        return len(_names_in(self.folder, ".json"))

    def items(self) -> set[int]:
        """Return the ids of the items whose readings are in the spool."""
        parts = [name.partition("-") for name in _names_in(self.folder, ".json")]
        numbers = [number for number, dash, _ in parts if dash]
        return {
            int(number)
            for number in numbers
            if number.isascii() and number.isdigit() and len(number) < 19
        }

    def put_aside(self) -> list[Path]:
        """Return the files that `flush` moved out of the way: unreadable files, and readings the
        database refused.
        """
        unreadable = [self.unreadable / name for name in _names_in(self.unreadable)]
        return unreadable + [self.folder / name for name in _names_in(self.folder, ".refused")]

    def flush(self, database: Database, card_id: str) -> list[FollowUp]:
        """Write the readings of one card into the database and remove their files, even if a token
        is no longer valid.

        If a file is unreadable, or the database refuses it, rename it, so that it does not block
        the others. Raises `DatabaseUnreachable` if the database is still away (the remaining files
        stay), and `OSError` if this host lacks memory, open files or locks."""
        done = []
        try:
            folder = open_folder(self.folder)
        except FileNotFoundError:
            return []
        except UntrustedPath as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.error(
                    "The spool %s is not used: %s %s", self.folder, error.filename, error.strerror
                )
            return []
        with folder:
            for name in folder.names(".json"):
                if name not in self._stuck:
                    done += self._flush_file(folder, name, database, card_id)
        return done

    def _flush_file(
        self, folder: Folder, name: str, database: Database, card_id: str
    ) -> list[FollowUp]:
        """Write the reading of one file into the database; [] if there is none for this card."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(os.fdopen(folder.open(name), "rb"))
                # One process of this host at a time: writing a reading twice would count as
                # repeated work.
                if not locked_within(file.fileno(), SPOOL_LOCK_S) or not folder.has(
                    name, file.fileno()
                ):
                    return []  # another process writes it, or has written it just now
                parsed = _parse(folder.read_opened(name, file, MOST_SPOOLED_BYTES), card_id)
            except FileNotFoundError:
                return []
            except _UNREADABLE as error:
                if isinstance(error, OSError) and error.errno in _OF_THE_HOST:
                    raise
                path = self.folder / name
                log.error(
                    "The spooled reading %s cannot be read and is moved to %s: %s",
                    path,
                    self.unreadable,
                    error,
                )
                self._put_aside(folder, name)
                return []
            closed = (
                None if parsed is None else self._write(folder, name, database, card_id, *parsed)
            )
            return [] if closed is None else [closed]

    def _write(
        self,
        folder: Folder,
        name: str,
        database: Database,
        card_id: str,
        claimed: Claim,
        reading: Reading,
        software_id: str,
    ) -> FollowUp | None:
        """Write the reading of one file into the database; return None if the database refuses
        it.
        """
        try:
            closed = complete(database, claimed, reading, card_id=card_id, software_id=software_id)
        except DatabaseUnreachable:
            raise
        except Exception:
            path = self.folder / name
            log.exception(
                "The database refuses the spooled reading %s; the file is renamed to *.refused",
                path,
            )
            with self._moving(name):
                folder.rename(name, f"{name}.refused")
            return None
        with self._moving(name):
            folder.remove(name)
        return closed

    def _put_aside(self, folder: Folder, name: str) -> None:
        with self._moving(name), open_folder(self.unreadable, create=PRIVATE) as unreadable:
            folder.rename(name, name, into=unreadable)

    @contextlib.contextmanager
    def _moving(self, name: str) -> Iterator[None]:
        """A context for moving or removing a file. If that fails, this process skips the file from
        now on.
        """
        try:
            yield
        except FileNotFoundError:
            pass  # another process has moved or removed it
        except OSError as error:
            self._stuck.add(name)
            log.error(
                "The spooled reading %s cannot be moved or deleted: %s", self.folder / name, error
            )


def _names_in(path: Path, suffix: str = "") -> list[str]:
    """The sorted names in a folder; [] if it does not exist or cannot be used."""
    with contextlib.suppress(OSError), open_folder(path) as folder:
        return folder.names(suffix)
    return []


_UNREADABLE = (OSError, FarmError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
#: Errors of the host, not of the file: the file may be readable later.
_OF_THE_HOST = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK}


def _parse(data: bytes, card_id: str) -> tuple[Claim, Reading, str] | None:
    """Parse a file of the spool into (claim, reading, software id); None if it belongs to another
    card.
    """
    spooled = json.loads(data)
    if spooled["card_id"] != card_id:
        return None
    claim = spooled["claim"]
    work = MeasureRequest(
        Subject.from_json(claim["subject"]),
        Protocol.from_json(claim["protocol"]),
        Stopping.from_json(claim["stopping"]),
    )
    names = [entry.name for entry in dataclasses.fields(Claim) if entry.name in claim]
    return (
        Claim(**{name: claim[name] for name in names}, work=work),
        Reading.from_json(spooled["reading"]),
        spooled["software_id"],
    )
