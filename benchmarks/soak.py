"""Inject a fault into a farm every few seconds while a job runs, and count losses: there must be none.

    python benchmarks/soak.py --items 2000 --cards 8 --seed 1 --json soak-1.json
    python benchmarks/soak.py --faults 300 --every 0.5 --seed 2

Real processes: a broker with an append-only file, a PostgreSQL, one supervisor with 8 card workers on simulated cards.
The faults are drawn with a seed, each kind once before any kind repeats:

- kill -9 of a benchmark, pool, worker or control process, or of a whole worker tree;
- the broker killed and restarted, or wiped; PostgreSQL crashed and restarted;
- a worker frozen for longer than a card may be unseen; the process that supervises an item stopped for longer than the
  hard time limit;
- a message repeated; a card drained and resumed; the supervisor ended and restarted; a second supervisor for
  the same cards; a job cancelled in the middle; a publisher killed half-way.

One item in twenty of each job is bad: it poisons, ends or fails its process, or hangs. It must end as failed, and harm
no other item. If a fault put a card into quarantine, the script releases it, as a person would. With --faults the job
gets more rounds of items until that many faults are done. Prints lost items, items with two accepted readings, missing
verdicts, and bad items that did not fail (all must be 0: exit code 1 otherwise), and repeated work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import redis
from sqlmodel import select

from benchmarks.accounts import NEVER, all_ended, judge, open_items, release_all
from farm.errors import CardBusy, FarmError
from farm.jobs import cards, jobs
from farm.settings import Settings
from farm.store import tables
from tasks.app import configure
from tasks.queues import publish_round
from tasks.servers import BrokerServer
from tests.farms import Farm, running, store_operators
from tests.planned import sweep
from tests.servers import PostgresServer

FREEZE_S = 6.0  # maximum; an item that is frozen with its worker must not look hung
QUICK = {
    "FARM_LEASE_S": "4",
    "FARM_HEARTBEAT_S": "1",
    "FARM_RECONCILE_S": "1",
    "FARM_MAX_ATTEMPTS": "15",
    "FARM_ITEM_TIMEOUT_S": "8",
    "FARM_HARD_LIMIT_S": "10",
}
BAD = ("poison", "oom", "raise", "exit", "crash", "hang")
WEIGHTS = {
    "benchmark": 6,
    "pool": 4,
    "worker": 3,
    "tree": 1,
    "control": 1,
    "supervisor": 1,
    "freeze": 2,
    "broker killed": 2,
    "broker wiped": 2,
    "database crashed": 1,
    "message repeated": 4,
    "drained": 2,
    "stopped in an item": 2,
    "second worker": 1,
    "cancelled": 2,
    "publisher killed": 2,
}


class Soak:
    def __init__(self, farm: Farm, broker: BrokerServer, postgres: PostgresServer, seed: int) -> None:
        self.farm, self.broker, self.postgres = farm, broker, postgres
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.supervisors: list[Any] = []
        self.seconds: list[subprocess.Popen[bytes]] = []
        self.publishers: list[subprocess.Popen[bytes]] = []
        self.jobs: list[str] = []  # all jobs, including those of the faults
        self.released = 0
        self.first = self.chance.sample(list(WEIGHTS), len(WEIGHTS))

    def fault(self) -> None:
        kind = self.first.pop() if self.first else self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        with contextlib.suppress(psutil.Error, FarmError, redis.RedisError):
            if getattr(self, "_" + kind.replace(" ", "_"))() is not False:
                self.done[kind] += 1
                return
        if not self.done[kind]:  # there was no target for it
            self.first.insert(0, kind)

    def tend(self, *, all_of_it: bool = False) -> None:
        """Do due repairs: continue frozen processes, restart processes, release cards."""
        with contextlib.suppress(FarmError):
            self.released += release_all(self.farm.database)
        now_s = time.monotonic()
        for due_s, act in [*self.later]:
            if all_of_it or due_s <= now_s:
                self.later.remove((due_s, act))
                with contextlib.suppress(psutil.Error, FarmError):
                    act()

    # ------------------------------------------------------------------------------------------- the faults

    def _benchmark(self) -> bool | None:
        return self._kill("farm.benchmark_process.server")

    def _pool(self) -> bool | None:
        found = self.farm.processes("farm.benchmark_process.server")
        return self.chance.choice(found).parent().kill() if found else False

    def _worker(self) -> bool | None:
        return self._kill("tasks.main", "card")

    def _control(self) -> bool | None:
        return self._kill("tasks.main", "control")

    def _tree(self) -> bool | None:
        found = self.farm.processes("tasks.main", "card")
        if not found:
            return False
        victim = self.chance.choice(found)
        for process in [victim, *victim.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return None

    def _supervisor(self) -> bool | None:
        found = self.farm.processes("cli", "worker")
        if not found:
            return False
        found[0].send_signal(self.chance.choice([signal.SIGTERM, signal.SIGKILL]))
        return None

    def start_supervisor_if_none(self) -> None:
        if not self.farm.processes("cli", "worker"):
            self.supervisors.append(self.farm.start("worker"))

    def _freeze(self) -> bool | None:
        found = self.farm.processes("tasks.main", "card")
        if not found:
            return False
        victim = self.chance.choice(found)
        frozen = [victim, *victim.children(recursive=True)]
        for process in frozen:
            process.suspend()

        def thaw() -> None:
            for process in frozen:
                with contextlib.suppress(psutil.Error):
                    process.resume()

        self.later.append((time.monotonic() + self.chance.uniform(1, FREEZE_S), thaw))
        return None

    def _stopped_in_an_item(self) -> bool | None:
        """Stop a process within an item, so that only Celery's hard limit ends it; an idle process continues
        afterwards.
        """
        found = self.farm.processes("farm.benchmark_process.server")
        if not found:
            return False
        pool = self.chance.choice(found).parent()
        pool.suspend()

        def resume() -> None:
            with contextlib.suppress(psutil.Error):
                pool.resume()

        self.later.append((time.monotonic() + float(QUICK["FARM_HARD_LIMIT_S"]) + 3, resume))
        return None

    def _second_worker(self) -> bool | None:
        if not self.farm.processes("cli", "worker"):
            return False
        self.seconds.append(self.farm.start("worker"))
        return None

    def _cancelled(self) -> None:
        job_id = submit(self, 10)
        self.later.append((time.monotonic() + self.chance.uniform(0, 1), lambda: self._cancel(job_id)))

    def _cancel(self, job_id: str) -> None:
        jobs.cancel(self.farm.database, job_id)

    def _publisher_killed(self) -> None:
        job_id = submit(self, 10, publish=False)
        self.publishers.append(self.farm.publish_and_die(job_id))

    def _broker_killed(self) -> None:
        self.broker.kill()
        time.sleep(self.chance.uniform(0, 0.5))
        self.broker.start()

    def _broker_wiped(self) -> None:
        with redis.Redis.from_url(self.broker.redis_url) as client:
            client.flushall()

    def _database_crashed(self) -> None:
        self.postgres.kill()
        time.sleep(self.chance.uniform(0, 1.0))
        self.postgres.start()

    def _message_repeated(self) -> bool | None:
        with redis.Redis.from_url(self.broker.redis_url) as client:
            entries = client.hvals("unacked")
            for entry in entries[:5]:
                message, _exchange, queue = json.loads(entry)
                client.rpush(queue, json.dumps(message))
            return None if entries else False

    def _drained(self) -> bool | None:
        with self.farm.database.read() as session:
            alive = cards.alive(session, 1.0)
        if len(alive) < 2:
            return False
        card = self.chance.choice(alive)
        cards.drain(self.farm.database, card.id, "soak")
        self.later.append((time.monotonic() + self.chance.uniform(0.5, 4), lambda: self._resume(card.id)))
        return None

    def _resume(self, card_id: str) -> None:
        cards.resume(self.farm.database, card_id)

    # -------------------------------------------------------------------------------------------- processes

    def _kill(self, *words: str) -> bool | None:
        found = self.farm.processes(*words)
        if not found:
            return False
        self.chance.choice(found).kill()
        return None


def submit(soak: Soak, items: int, *, publish: bool = True) -> str:
    behaviours = [soak.chance.choice(BAD) if number % 20 == 19 else "" for number in range(items)]
    ids = store_operators(soak.farm.database, behaviours)
    with soak.farm.database.read() as session:
        chosen = [card for card in session.exec(select(tables.CardRow.id))]
    job_id = jobs.create(soak.farm.database, sweep(items), chosen, operator_ids=ids).job_id
    soak.jobs.append(job_id)
    if publish:
        with contextlib.suppress(FarmError):  # the broker is away: the reconciler publishes it
            publish_round(soak.farm.database, job_id, 1)
    return job_id


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=2000, help="items of one job")
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--item-s", type=float, default=0.1)
    parser.add_argument("--every", type=float, default=2.0, help="mean time between two faults, in seconds")
    parser.add_argument("--faults", type=int, default=0, help="add jobs until this number of faults is done")
    parser.add_argument("--limit", type=float, default=420.0, help="begin no further job after this number of seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        BrokerServer(persistent=True) as broker,
        PostgresServer() as postgres,
        running(
            Path(folder),
            broker.url,
            postgres.new_database(),
            cards=options.cards,
            **QUICK,
            FARM_SIMULATED_ITEM_S=str(options.item_s),
        ) as farm,
    ):
        configure(Settings(broker_url=broker.url))
        soak = Soak(farm, broker, postgres, options.seed)
        began_s = time.monotonic()
        submit(soak, options.items)
        next_s = time.monotonic() + 1
        stuck_s = 0.0
        while True:
            soak.tend()
            soak.start_supervisor_if_none()
            with contextlib.suppress(FarmError):
                late = time.monotonic() - began_s > options.limit
                still_open = open_items(farm.database, soak.jobs)
                if sum(soak.done.values()) >= options.faults or late:
                    if not still_open and all_ended(farm.database, soak.jobs):
                        break
                elif still_open < 3 * options.cards:  # before the last items are done: idle cards cannot be affected
                    submit(soak, options.items)
            if time.monotonic() > next_s and time.monotonic() - began_s < options.limit:
                soak.fault()
                next_s = time.monotonic() + soak.chance.uniform(0.5, 1.5) * options.every
            if time.monotonic() - began_s > options.limit + 120:
                stuck_s = time.monotonic() - began_s
                break
            time.sleep(0.05)
        soak.tend(all_of_it=True)
        whole_s = time.monotonic() - began_s
        if stuck_s:
            print(farm.log.read_text()[-4000:], file=sys.stderr)
        found = {
            "seed": options.seed,
            "seconds": round(whole_s, 1),
            "jobs": len(soak.jobs),
            "faults": sum(soak.done.values()),
            "by_kind": dict(sorted(soak.done.items())),
            "released": soak.released,
            **judge(farm.database, soak.jobs),
            # The others replaced a supervisor that had ended, or belong to the next fault.
            "second_workers_refused": sum(second.poll() == CardBusy.exit_code for second in soak.seconds),
        }
        for publisher in soak.publishers:
            publisher.wait(60)
        soak.supervisors += soak.seconds
        for supervisor in soak.supervisors:
            with contextlib.suppress(ProcessLookupError):
                supervisor.terminate()
        for supervisor in soak.supervisors:
            supervisor.wait(60)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found))
    return 1 if any(found[name] for name in NEVER) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
