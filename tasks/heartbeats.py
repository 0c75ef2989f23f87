"""The heartbeats of all workers of a host, in one transaction of the database.

Each worker notes in a file that it is alive, and of which items it has messages. The first one in each period renews
the leases of all workers with a fresh note. A worker whose leases nobody renewed for longer than a period does it
alone. So a worker that hangs in its turn stops no other worker's leases, nor does a locked row or a lost file. A worker
whose main loop stands still (`tasks.watchdog`) notes and renews nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.devices.lock import turn
from farm.errors import FarmError
from farm.jobs import items
from farm.jobs.cards import process_started
from farm.settings import Settings, make_private
from farm.store.database import Database
from tasks.watchdog import PULSE, SILENT_AFTER_S

#: Errors if the notes are damaged, or another process has them for long, or the disk is full.
_UNUSABLE = (OSError, FarmError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class HostHeartbeat:
    """The part of one worker in the heartbeats of its host."""

    holder: str
    current: Settings

    @property
    def path(self) -> Path:
        """The file with the notes of all workers of this host that use the same database."""
        return self.current.state_dir / f"heartbeats-{hashlib.sha256(self.current.database.encode()).hexdigest()[:12]}"

    def beat(self, database: Database, item_ids: Collection[int]) -> None:
        """Renew the leases of this worker, unless another worker does, or its main loop stands still. ``item_ids``: see
        `items.renew`."""
        if PULSE.silent_s >= SILENT_AFTER_S:
            return
        now_s, lease_s, period_s = time.monotonic(), self.current.lease_s, self.current.beat_s
        first, held, renewed = False, dict[str, Any](), set[str]()
        with contextlib.suppress(*_UNUSABLE), self._notes() as notes:
            own = {"pid": os.getpid(), "started": process_started(str(os.getpid())), "items": sorted(item_ids)}
            notes["workers"].setdefault(self.holder, {}).update(own, at_s=now_s)
            for holder, one in list(notes["workers"].items()):
                if 0 <= now_s - one["at_s"] < 1.5 * period_s and process_started(str(one["pid"])) == one["started"]:
                    held[holder] = one
                else:
                    del notes["workers"][holder]
            if first := not 0 <= now_s - notes["begun_at_s"] < 0.9 * period_s:
                notes["begun_at_s"] = now_s
        if first:
            renewed = items.renew_together(database, {holder: one["items"] for holder, one in held.items()}, lease_s)
        elif 0 <= now_s - held.get(self.holder, {}).get("renewed_at_s", -math.inf) < 1.2 * period_s:
            return
        if self.holder not in renewed:
            items.renew(database, self.holder, lease_s, item_ids)
        with contextlib.suppress(*_UNUSABLE), self._notes() as notes:
            for holder in {*renewed, self.holder} & notes["workers"].keys():
                notes["workers"][holder]["renewed_at_s"] = now_s

    @contextlib.contextmanager
    def _notes(self) -> Iterator[dict[str, Any]]:
        """The notes, which are written back at the end. Raises one of `_UNUSABLE` if that is impossible."""
        with turn("heartbeats", self.current.lock_dir, timeout_s=0.2):
            notes: dict[str, Any] = {"begun_at_s": -self.current.beat_s, "workers": {}}
            with contextlib.suppress(FileNotFoundError, ValueError):  # a process may have been killed while it wrote
                notes = json.loads(self.path.read_text())
            yield notes
            make_private(self.path.parent)
            self.path.write_text(json.dumps(notes))
