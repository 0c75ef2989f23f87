"""What a person does while faults are injected: it is no fault, and the farm must do what the
person asks.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import Counter
from random import Random
from types import TracebackType

import psycopg

from benchmarks.soak.hosts import NotObserved, Site, until
from benchmarks.soak.jobs import Jobs
from farm.errors import CardBusy, FarmError
from farm.jobs import cards, jobs

#: The mean pause between two operations. Unit: s.
PAUSE_S = 15.0


class Person:
    """A thread: drains and resumes cards, cancels jobs, starts second workers, releases cards,
    counts open items.

    Attributes:
        busy: faults are injected: do operations, and submit more items before the last ones are
            done.
        done: operation -> how often.
    """

    def __init__(self, site: Site, own_jobs: Jobs, seed: int, begun: int) -> None:
        self.site, self.jobs = site, own_jobs
        self.busy = True
        self.open_items = -1  # not known
        self.done: Counter[str] = Counter()
        self._chance = Random(f"{seed}/person/{begun}")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="person")

    def __enter__(self) -> Person:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        operations = (self._drain, self._cancel, self._second_worker, self._fail_health_check)
        next_s = time.monotonic() + PAUSE_S / 2
        while not self._ended.wait(0.5):
            # A fault may be at work: what fails now is repeated later.
            with contextlib.suppress(FarmError, psycopg.Error, NotObserved, OSError):
                self._release()
                self.open_items = self.jobs.open_items()
                if self.busy and self.open_items < 5 * sum(
                    len(host.cards) for host in self.site.hosts
                ):
                    self.jobs.submit("more", 100, self._chance, bad=1)
                    if len(self.site.hosts[0].cards) > 1:
                        self.jobs.submit("more", 10, self._chance, bad=0, cards=2)
                if self.busy and time.monotonic() > next_s:
                    next_s = time.monotonic() + self._chance.uniform(0.5, 1.5) * PAUSE_S
                    self._chance.choice(operations)()

    def _release(self) -> None:
        """Release the cards in quarantine: a benchmark process that a fault keeps from starting
        twice is put there.

        Also end a drain whose end a fault prevented.
        """
        with self.site.connect(connect_timeout=5) as connection:
            found = connection.execute(
                "SELECT id, state FROM card WHERE state IN ('quarantined', 'draining')"
            ).fetchall()
        for card_id, state in found:
            released = cards.resume(self.site.database, card_id, quarantined=state == "quarantined")
            self.done["cards_released"] += released and state == "quarantined"

    def _card(self) -> str:
        return self._chance.choice(self._chance.choice(self.site.hosts).cards)

    def _drain(self) -> None:
        card = self._card()
        cards.drain(self.site.database, card, "soak")
        self.done["cards_drained"] += 1
        time.sleep(self._chance.uniform(0.5, 4))
        cards.resume(self.site.database, card)

    def _cancel(self) -> None:
        job_id = self.jobs.submit("cancelled", 8, self._chance, bad=0)
        time.sleep(self._chance.uniform(0, 20))
        for _ in range(20):
            with contextlib.suppress(FarmError):
                self.done["jobs_cancelled"] += bool(jobs.cancel(self.site.database, job_id))
                return
            time.sleep(1)

    def _second_worker(self) -> None:
        host = self._chance.choice(self.site.hosts)
        if not host.processes("worker"):
            return
        second = host.start("worker")
        try:
            self.done["second_workers_refused"] += second.wait(20) == CardBusy.exit_code
        except (
            subprocess.TimeoutExpired
        ):  # it is slow, or it serves the cards since the first one has just ended
            second.terminate()

    def _fail_health_check(self) -> None:
        """A card fails its health check before its next item, until its file is empty again."""
        host = self._chance.choice(self.site.hosts)
        card = self._chance.choice(host.cards)
        host.unhealthy.write_text(card)
        try:
            until(lambda: self._state(card) == "quarantined", 15, "the card was not checked")
            self.done["health_checks_failed"] += 1
        finally:
            host.unhealthy.write_text("")

    def _state(self, card: str) -> str:
        with self.site.connect(connect_timeout=5) as connection:
            return str(
                connection.execute("SELECT state FROM card WHERE id = %s", (card,)).fetchone()[0]
            )
