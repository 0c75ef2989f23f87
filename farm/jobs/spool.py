"""The spool: readings on disk that could not be written because the database was away.

A spooled reading is accepted like any other: only if the token of its claim is still valid when it is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

from farm.errors import DatabaseUnreachable
from farm.jobs.items import Claim, Closed, complete
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping, Subject
from farm.types.reading import Reading

log = logging.getLogger("farm.worker")


class Spool:
    """A folder with one file per reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        return {int(number) for number in numbers if number.isascii() and number.isdigit()}

    def flush(self, database: Database, card_id: str) -> list[Closed]:
        """Write the readings of one card into the database, and remove their files whether accepted or not.

        A reading that the database refuses for ever is renamed, so that it does not block the others.

        Raises:
            DatabaseUnreachable: the database is still away; the remaining files stay.
        """
        done = []
        for path in sorted(self.folder.glob("*.json")):
            # One process of this host at a time: a reading that is written twice would count as repeated work.
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                written = not os.fstat(file.fileno()).st_nlink  # by another process just now
                if not written and (closed := _write(file.read(), path, database, card_id)) is not None:
                    done.append(closed)
        return done


def _write(text: str, path: Path, database: Database, card_id: str) -> Closed | None:
    """Write the reading of one file; None if it belongs to another card or was renamed."""
    try:
        data = json.loads(text)
        if data["card_id"] != card_id:
            return None
        parsed = {name: kind.from_json(data["claim"][name]) for name, kind in _PARSED.items()}
        claimed, reading = Claim(**{**data["claim"], **parsed}), Reading.from_json(data["reading"])
        software_id = data["software_id"]
    except (ValueError, KeyError, TypeError, AttributeError):  # of another version, or damaged
        log.error("%s cannot be read and is renamed", path)
        path.rename(path.with_name(path.name + ".unreadable"))
        return None
    try:
        closed = complete(database, claimed, reading, card_id=card_id, software_id=software_id)
    except DatabaseUnreachable:
        raise
    except Exception:
        log.exception("The database refuses %s, which is renamed", path)
        path.rename(path.with_name(path.name + ".refused"))
        return None
    path.unlink()
    return closed


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
