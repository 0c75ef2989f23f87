"""The jobs of the soak test, and the record of what was submitted: one JSON line before, and one
after each job.

The record is written before the database knows the job, so that the audit can tell a lost job from
an unknown one."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from sqlmodel import select

from benchmarks.soak.hosts import NotObserved, Site
from farm.jobs import jobs
from farm.store import tables
from farm.types.protocol import Protocol
from tests.farms import store_operators
from tests.planned import sweep

#: The behaviours of bad items. They end as failed.
BAD = ("poison", "oom", "raise", "exit", "crash", "hang")


class Jobs:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.path = site.folder / "jobs.jsonl"
        self.ids: list[str] = []
        self._lock = threading.Lock()
        self._submissions = 0
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            record = json.loads(line)
            self._submissions = max(self._submissions, record["submission"] + 1)
            self.ids += [record["job"]] if "job" in record else []

    @property
    def main_id(self) -> str:
        """The first job, which has nearly all items."""
        return self.ids[0]

    def submit(
        self,
        purpose: str,
        items: int,
        chance: Random,
        *,
        bad: int,
        cards: int = 1,
        to: Sequence[str] = (),
    ) -> str:
        """Submit a job and return its id. Hosts publish it; `bad` of its items fail.

        Args:
            purpose: "main", "side", "more", or "cancelled" if it will be cancelled.
            cards: of one host, that measure each item together.
            to: the ids of its cards; default: all cards.
        """
        behaviours = [""] * (items - bad) + [chance.choice(BAD) for _ in range(bad)]
        chance.shuffle(behaviours)
        ids = store_operators(self.site.database, behaviours)
        with self._lock:
            number, self._submissions = self._submissions, self._submissions + 1
        self._note(
            submission=number, purpose=purpose, subjects=dict(zip(ids, behaviours, strict=True))
        )
        with self.site.database.read() as session:
            chosen = list(to) or list(session.exec(select(tables.CardRow.id)))
        request = sweep(items, protocol=Protocol(launch="eager", cards=cards))
        job_id = jobs.create(self.site.database, request, chosen, operator_ids=ids).job_id
        self._note(submission=number, job=job_id)
        self.ids.append(job_id)
        return job_id

    def item_id(self, chance: Random) -> int:
        """Draw an open item of the main job, or any of its items if none is open."""
        query = (
            "SELECT id, state IN ('waiting', 'claimed', 'deferred') FROM item WHERE job_id = %s "
            "ORDER BY id"
        )
        try:
            with self.site.connect(connect_timeout=2) as connection:
                rows = connection.execute(query, (self.main_id,)).fetchall()
        except psycopg.Error as error:
            raise NotObserved("the database does not answer") from error
        return int(
            chance.choice([item for item, is_open in rows if is_open] or [item for item, _ in rows])
        )

    def open_items(self) -> int:
        """The number of open items; of jobs without open items, those that have not ended count as
        one.
        """
        query = (
            "SELECT (SELECT count(*) FROM item WHERE state IN ('waiting', 'claimed', 'deferred'))"
            " + (SELECT count(*) FROM job WHERE state = 'open')"
        )
        with self.site.connect(connect_timeout=5) as connection:
            return int(connection.execute(query).fetchone()[0])

    def _note(self, **record: Any) -> None:
        with self._lock, Path(self.path).open("a") as file:
            file.write(json.dumps(record) + "\n")
