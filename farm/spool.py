"""Readings that could not be written because the database was away: kept on disk until it is back.

A spooled reading is fenced like any other: it is accepted only if its claim still stands then.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from farm.benchmark.protocol import Protocol, Reading, Stopping, Subject
from farm.items import Claim, Closed, complete
from farm.json_file import write_whole
from farm.store.database import Database

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
        return {int(path.name.partition("-")[0]) for path in self.folder.glob("*-*.json")}

    def flush(self, database: Database, card_id: str) -> list[Closed]:
        """Write what waits for one card; what is accepted or fenced out leaves the disk.

        Raises:
            DatabaseUnreachable: still away; the rest stays.
        """
        done = []
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            try:
                data = json.loads(path.read_text())
                if data["card_id"] != card_id:
                    continue
                claimed, reading = _claim(data["claim"]), Reading.from_json(data["reading"])
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                # Of another version or half of it lost: it must not keep the others from the database.
                log.error("%s cannot be read and is put aside", path)
                path.rename(path.with_name(path.name + ".unreadable"))
                continue
            done.append(complete(database, claimed, reading, card_id=card_id, software_id=data["software_id"]))
            path.unlink()
        return done


def _claim(data: dict[str, Any]) -> Claim:
    return Claim(
        **{
            **data,
            "subject": Subject.from_json(data["subject"]),
            "protocol": Protocol.from_json(data["protocol"]),
            "stopping": Stopping.from_json(data["stopping"]),
        }
    )
