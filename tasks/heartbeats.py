"""The heartbeats of all workers of a host, in one transaction of the database.

Each worker notes in a file that it is alive, and of which items it has messages. The first one in
each period renews the leases of all workers with a fresh note. A worker whose leases nobody renewed
for longer than a period does it alone. So a worker that hangs in its turn stops no other worker's
leases, nor does a locked row or a lost file. A worker whose main loop stands still
(`tasks.watchdog`) notes and renews nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.devices.lock import host_lock
from farm.errors import FarmError
from farm.jobs import leases
from farm.jobs.cards import process_started
from farm.settings import Settings
from farm.settings.shared_files import PRIVATE, Folder, open_folder
from farm.store.database import Database
from tasks.watchdog import SILENT_AFTER_S, Pulse

#: Largest file of notes that is read.
MOST_BYTES = 16 << 20
#: Errors if another process has the notes for long, the disk is full, or another user may have made
#: the file.
_UNUSABLE = (OSError, FarmError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class HostHeartbeat:
    """The part of one worker in the heartbeats of its host."""

    holder: str
    current: Settings
    pulse: Pulse  # of the worker's main loop

    @property
    def path(self) -> Path:
        """The file with the notes of all workers of this host that use the same database."""
        return (
            self.current.state_dir
            / f"heartbeats-{hashlib.sha256(self.current.database.encode()).hexdigest()[:12]}"
        )

    def beat(self, database: Database, item_ids: Collection[int]) -> None:
        """Renew the leases of this worker, unless another worker does, or its main loop stands
        still. ``item_ids``: see `leases.renew`."""
        if self.pulse.silent_s >= SILENT_AFTER_S:
            return
        now_s, lease_s, period_s = time.monotonic(), self.current.lease_s, self.current.beat_s
        first, live_workers, renewed = False, dict[str, Any](), set[str]()
        with contextlib.suppress(*_UNUSABLE), self._notes() as notes:
            own_note = {
                "pid": os.getpid(),
                "started": process_started(str(os.getpid())),
                "items": sorted(item_ids),
            }
            notes["workers"].setdefault(self.holder, {}).update(own_note, at_s=now_s)
            for holder, note in list(notes["workers"].items()):
                if (
                    0 <= now_s - note["at_s"] < 1.5 * period_s
                    and process_started(str(note["pid"])) == note["started"]
                ):
                    live_workers[holder] = note
                else:
                    del notes["workers"][holder]
            if first := not 0 <= now_s - notes["begun_at_s"] < 0.9 * period_s:
                notes["begun_at_s"] = now_s
        if first:
            renewed = leases.renew_together(
                database, {holder: note["items"] for holder, note in live_workers.items()}, lease_s
            )
        elif (
            0
            <= now_s - live_workers.get(self.holder, {}).get("renewed_at_s", -math.inf)
            < 1.2 * period_s
        ):
            return
        if self.holder not in renewed:
            leases.renew(database, self.holder, lease_s, item_ids)
        with contextlib.suppress(*_UNUSABLE), self._notes() as notes:
            for holder in {*renewed, self.holder} & notes["workers"].keys():
                notes["workers"][holder]["renewed_at_s"] = now_s

    @contextlib.contextmanager
    def _notes(self) -> Iterator[dict[str, Any]]:
        """The notes, which are written back at the end. Raises one of `_UNUSABLE` if that is
        impossible.
        """
        alone = host_lock("heartbeats", self.current.lock_dir, timeout_s=0.2)
        with alone, open_folder(self.path.parent, create=PRIVATE) as folder:
            notes = self._read(folder)
            yield notes
            folder.write(self.path.name, json.dumps(notes).encode())

    def _read(self, folder: Folder) -> dict[str, Any]:
        """The notes; without workers if they do not exist or are damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            notes = json.loads(folder.read(self.path.name, MOST_BYTES))
            if isinstance(notes, dict) and _are_notes(notes):
                return notes
        return {"begun_at_s": -self.current.beat_s, "workers": {}}


def _are_notes(found: Mapping[str, Any]) -> bool:
    """True if the values of a file have the types of notes."""
    workers = found.get("workers")
    if not isinstance(found.get("begun_at_s"), (int, float)) or not isinstance(workers, dict):
        return False
    return all(_is_note(note) for note in workers.values())


def _is_note(note: Any) -> bool:
    if not isinstance(note, dict):
        return False
    times = (note.get("at_s"), note.get("renewed_at_s", 0.0))
    items_of_worker = note.get("items")
    if not isinstance(items_of_worker, list) or not all(
        isinstance(time_s, (int, float)) for time_s in times
    ):
        return False
    return {"pid", "started"} <= note.keys() and all(
        type(item_id) is int for item_id in items_of_worker
    )
