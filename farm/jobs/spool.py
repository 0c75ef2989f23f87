"""Readings that could not be written because the database was away: kept on disk until it is back.

A spooled reading is fenced like any other: it is accepted only if its claim still stands then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm.errors import DatabaseUnreachable
from farm.jobs.items import Claim, Closed, complete
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping, Subject
from farm.types.reading import Reading

log = logging.getLogger("farm.worker")


class Spool:
    """A folder of one file a reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, claimed: Claim, reading: Reading, *, card_id: str, software_id: str) -> Path:
        """Write one reading down, whole or not at all.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        path = self.folder / f"{claimed.item_id}-{claimed.token}.json"
        data = {
            "claim": {**dataclasses.asdict(claimed)},
            "reading": reading.to_json(),
            "card_id": card_id,
            "software_id": software_id,
        }
        write_whole(path, data)
        return path

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.json")) if self.folder.is_dir() else 0

    def items(self) -> set[int]:
        """The items whose readings wait here."""
        numbers = [path.name.partition("-")[0] for path in self.folder.glob("*-*.json")]
        return {int(number) for number in numbers if number.isascii() and number.isdigit()}

    def flush(self, database: Database, card_id: str) -> list[Closed]:
        """Write what waits for one card; what is accepted or fenced out leaves the disk.

        What the database refuses for good is put aside, so that it does not keep the others from it.

        Raises:
            DatabaseUnreachable: still away; the rest stays.
        """
        done = []
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            try:
                with _alone(path) as text:
                    closed = _write(text, path, database, card_id) if text else None
            except FileNotFoundError:
                continue
            if closed is not None:
                done.append(closed)
        return done


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[str]:
    """The text of a file that no other process of this host writes into the database meanwhile; "" if one just did.

    Written twice, a reading would count as repeated work.
    """
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.read() if os.fstat(file.fileno()).st_nlink else ""


def _write(text: str, path: Path, database: Database, card_id: str) -> Closed | None:
    """One file's reading; None if it is another card's, or was put aside."""
    try:
        data = json.loads(text)
        if data["card_id"] != card_id:
            return None
        claimed, reading = _claim(data["claim"]), Reading.from_json(data["reading"])
        software_id = data["software_id"]
    except (ValueError, KeyError, TypeError, AttributeError):
        # Of another version or half of it lost.
        log.error("%s cannot be read and is put aside", path)
        path.rename(path.with_name(path.name + ".unreadable"))
        return None
    try:
        closed = complete(database, claimed, reading, card_id=card_id, software_id=software_id)
    except DatabaseUnreachable:
        raise
    except Exception:
        log.exception("The database refuses %s, which is put aside", path)
        path.rename(path.with_name(path.name + ".refused"))
        return None
    path.unlink()
    return closed


def _claim(data: dict[str, Any]) -> Claim:
    return Claim(
        **{
            **data,
            "subject": Subject.from_json(data["subject"]),
            "protocol": Protocol.from_json(data["protocol"]),
            "stopping": Stopping.from_json(data["stopping"]),
        }
    )


# ----- merged from farm.jobs.spool
# JSON on disk that is there whole or not at all.


def write_whole(path: Path, data: Any) -> None:
    """Write a JSON file beside its place and move it there; its folder is made if need be.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; nothing is left then.
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
