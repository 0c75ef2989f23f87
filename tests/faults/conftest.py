"""A real farm on simulated cards with short leases, the ways to hurt it, and what must hold
afterwards.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from sqlmodel import select

from farm.store import tables
from farm.store.tables import CLOSED, ItemState
from tasks.message_filter import CONTROL_QUEUE
from tasks.servers import BrokerServer
from tests.farms import QUICK, TIMEOUT_S, Farm, SharedFarm, running


class Hurt:
    """One farm under test: its processes by what they do, and the promise that is checked after
    each fault.
    """

    def __init__(self, farm: Farm, broker: BrokerServer) -> None:
        self.farm = farm
        self.broker = broker
        self._log_begins = farm.log.stat().st_size if farm.log.exists() else 0
        self.delivered_again: list[
            tuple[str, Any]
        ] = []  # task and id of messages that nobody had acknowledged

    # -------------------------------------------------------------------------------------------
    # processes

    def benchmark(self, card: int = 0) -> psutil.Process:
        """The benchmark process of a card; its parent is the pool process, whose parent is the
        worker.
        """

        def find() -> psutil.Process | None:
            for process in self.farm.processes("farm.benchmark_process.server"):
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    if line[line.index("--card") + 1].endswith(f"-{card}"):
                        return process
            return None

        return self.farm.wait_for(find)

    def pool(self, card: int = 0) -> psutil.Process:
        return self.benchmark(card).parent()

    def worker(self, card: int = 0) -> psutil.Process:
        return self.pool(card).parent()

    def supervisor(self, card: int = 0) -> psutil.Process:
        return self.worker(card).parent()

    def everything(self) -> list[psutil.Process]:
        return self.farm.processes()

    def said(self) -> str:
        """What the farm has logged since the test began."""
        return self.farm.log.read_bytes()[self._log_begins :].decode()

    # ------------------------------------------------------------------------------------------------
    # items

    def submit(self, behaviours: Sequence[str], seconds: float | None = None, **how: Any) -> str:
        return self.farm.submit(behaviours, seconds, **how)

    def in_work(self, job_id: str, attempts: int = 1) -> tables.Item:
        """Wait until an item is being measured, for the so manyth time."""

        def find() -> tables.Item | None:
            claimed = [item for item in self.farm.items(job_id) if item.state == ItemState.CLAIMED]
            return next((item for item in claimed if item.attempts == attempts), None)

        item = self.farm.wait_for(find)
        time.sleep(0.2)  # into the middle of it
        return item

    def done(self, job_id: str, number: int = 1) -> None:
        """Wait until so many items are done."""
        self.farm.wait_for(
            lambda: sum(item.state == ItemState.DONE for item in self.farm.items(job_id)) >= number
        )

    def settled(self, job_id: str, timeout_s: float = TIMEOUT_S) -> Counter[str]:
        """Wait for the job's end and check what must always hold; its items by state.

        One terminal row per item, one accepted reading at most, one verdict per job and round, no
        message that waits, and none that comes back later and begins anything."""
        self.farm.wait_for(lambda: self.farm.ended(job_id), timeout_s)
        self.check(job_id)
        return Counter(item.state for item in self.farm.items(job_id))

    def check(self, job_id: str) -> None:
        self._check_rows(job_id)
        self.farm.wait_for(lambda: self.messages() == 0)
        self._deliver_again(job_id)
        self._check_rows(job_id)

    def _check_rows(self, job_id: str) -> None:
        items = self.farm.items(job_id)
        with self.farm.database.read() as session:
            subjects = {item.subject_id for item in items}
            read = Counter(
                r.subject_id
                for r in session.exec(select(tables.ReadingRow))
                if r.subject_id in subjects
            )
            verdicts = Counter(
                v.round
                for v in session.exec(
                    select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)
                )
            )
            job = session.get_one(tables.Job, job_id)
        assert all(item.state in CLOSED for item in items)
        assert len({(item.subject_id, item.role, item.card_id) for item in items}) == len(items)
        assert all(number == 1 for number in read.values()), read
        assert all(
            (item.reading_id is not None) == (item.state == ItemState.DONE)
            for item in items
            if job.state == "done"
        )
        if job.state == "done":
            assert verdicts == {number: 1 for number in range(1, job.round + 1)}

    def messages(self) -> int:
        """That wait, in all the queues."""
        with (
            redis.Redis.from_url(self.broker.redis_url) as client,
            contextlib.suppress(redis.ConnectionError),
        ):
            return sum(client.llen(key) for key in [*client.keys("card.*"), CONTROL_QUEUE])
        return -1

    def _deliver_again(self, job_id: str) -> None:
        """Do at once what the broker does after the visibility timeout: give out again what was
        never acknowledged.

        A worker that was killed leaves its message so. None may be of an open item or round, which
        would wait that long, and none may begin an item again."""
        before = {item.id: item.attempts for item in self.farm.items(job_id)}
        self.farm.wait_for(lambda: not self._awaited(job_id))
        with redis.Redis.from_url(self.broker.redis_url) as client:
            for tag, entry in self._unacknowledged(client, job_id).items():
                message, _exchange, queue = json.loads(entry)
                with client.pipeline() as together:
                    together.hdel("unacked", tag).zrem("unacked_index", tag).rpush(
                        queue, json.dumps(message)
                    ).execute()
                self.delivered_again.append(_task(entry))
            self.farm.wait_for(
                lambda: self.messages() == 0 and not self._unacknowledged(client, job_id)
            )
        assert {item.id: item.attempts for item in self.farm.items(job_id)} == before

    def _unacknowledged(self, client: redis.Redis, job_id: str) -> dict[bytes, bytes]:
        """The broker's list of messages that a worker took and is not through with, as far as they
        are of a job.
        """
        items = {item.id for item in self.farm.items(job_id)}
        found = {}
        for tag, entry in client.hgetall("unacked").items():
            name, about = _task(entry)
            if about in items if name == "measure" else str(about).startswith(f"{job_id}/"):
                found[tag] = entry
        return found

    def _awaited(self, job_id: str) -> list[tuple[str, Any]]:
        """Messages out of those whose item or round is still open."""
        with redis.Redis.from_url(self.broker.redis_url) as client:
            entries = self._unacknowledged(client, job_id).values()
        states = {item.id: ItemState(item.state) for item in self.farm.items(job_id)}
        with self.farm.database.read() as session:
            is_open = session.get_one(tables.Job, job_id).state == tables.JobState.OPEN
        return [
            (name, about)
            for name, about in map(_task, entries)
            if (states[about] not in CLOSED if name == "measure" else is_open)
        ]


def _task(entry: bytes) -> tuple[str, Any]:
    """The task of an entry in the broker's list of the unacknowledged, and the id that it
    carries.
    """
    message = json.loads(entry)[0]
    return message["headers"]["task"], json.loads(base64.b64decode(message["body"]))[0][0]


@pytest.fixture
def hurt(one_card: SharedFarm) -> Hurt:
    """A farm of one card that the test hurts, and that is well again before the next has it."""
    return Hurt(*one_card.whole())


@pytest.fixture
def pair(two_cards: SharedFarm) -> Hurt:
    """As `hurt`, of two cards."""
    return Hurt(*two_cards.whole())


@pytest.fixture
def private_broker() -> Iterator[BrokerServer]:
    """A broker that keeps its data over a restart, as a farm's should."""
    with BrokerServer(options={"appendonly": "yes"}) as broker:
        yield broker


@pytest.fixture
def start(tmp_path: Path, private_broker: BrokerServer, sqlite_url: str) -> Iterator[object]:
    """Start a farm of one's own, for other settings than those of `hurt`: ``start(cards=2,
    FARM_HARD_LIMIT_S="5")``.
    """
    with contextlib.ExitStack() as stack:

        def begin(
            *,
            cards: int = 1,
            fit: int | None = None,
            database_url: str = sqlite_url,
            **settings: str,
        ) -> Hurt:
            farm = stack.enter_context(
                running(
                    tmp_path,
                    private_broker.url,
                    database_url,
                    cards=cards,
                    fit=fit,
                    **{**QUICK, **settings},
                )
            )
            return Hurt(farm, private_broker)

        yield begin
