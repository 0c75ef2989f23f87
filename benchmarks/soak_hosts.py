"""Inject random faults into three hosts while they work on one large job, and count losses: there must be none.

    python benchmarks/soak_hosts.py --minutes 15 --json soak-hosts.json
    python benchmarks/soak_hosts.py --items 400 --faults 30 --minutes 2 --seed 7

`benchmarks/soak.py` injects many kinds of faults on one host. This script draws few kinds at random, often
several at once, from a seed:

- a process killed with SIGKILL: a benchmark, pool, worker or control process, the current publisher, a whole host;
- a process stopped with SIGSTOP for longer than a lease and then continued, alone, with all of its card, or with
  all of its host; its late result must be rejected;
- the broker wiped; the database frozen for longer than a lease.

Each host is a separate supervisor with simulated cards. They share a PostgreSQL and a broker.

The faults are spread over the job: at the pace of --minutes, and faster if the items would be finished before
the faults. Prints the faults, items lost, measured twice or missing (all must be 0: exit code 1 otherwise), repeated
work, and the largest number of messages in the broker compared with the open items at that time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import redis
from sqlmodel import col, select

from benchmarks.accounts import NEVER, all_ended, judge, open_items, release_all
from farm.errors import FarmError
from farm.jobs import jobs
from farm.store import tables
from tasks.message_filter import CONTROL_QUEUE
from tasks.servers import BrokerServer
from tests.farms import QUICK, Farm, running, store_operators
from tests.planned import sweep
from tests.servers import PostgresServer

LEASE_S = float(QUICK["FARM_LEASE_S"])
SETTINGS = {
    **QUICK,
    "FARM_MAX_ATTEMPTS": "15",
    # Longer than the longest stop, so that a stopped process does not look hung. Items of a killed worker return
    # within the soak.
    "FARM_ITEM_TIMEOUT_S": "30",
    "FARM_HARD_LIMIT_S": "40",
    "FARM_VISIBILITY_TIMEOUT_S": "60",
}
HOSTS = 3
WEIGHTS = {
    "killed: benchmark": 10,
    "killed: pool": 8,
    "killed: worker": 8,
    "killed: control": 5,
    "killed: publisher": 3,
    "killed: host": 2,
    "stopped: benchmark": 3,
    "stopped: pool": 3,
    "stopped: worker": 3,
    "stopped: card": 5,
    "stopped: control": 2,
    "stopped: host": 1,
    "broker wiped": 5,
    "database frozen": 2,
}
COMMANDS = {
    "benchmark": ("farm.benchmark_process.server",),
    "worker": ("tasks.main", "card"),
    "card": ("tasks.main", "card"),
    "control": ("tasks.main", "control"),
    "host": ("cli", "worker"),
}
STOPPED_S = (1.5 * LEASE_S, 2.5 * LEASE_S)
FROZEN_S = (1.25 * LEASE_S, 2 * LEASE_S)
#: The last faults occur while this share of the items is open, or after this share of the time.
ALL_FAULTS_BY, IN_THE_TIME = 0.97, 0.75
PATIENCE_S = 180.0


@dataclass(frozen=True)
class Messages:
    """The number of messages in the broker at one time, and the number of open items just before."""

    number: int = 0
    open_items: int = 0


class Soak:
    def __init__(self, hosts: Sequence[Farm], broker: BrokerServer, postgres: PostgresServer, seed: int) -> None:
        self.hosts, self.broker, self.postgres = hosts, broker, postgres
        self.database = hosts[0].database
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.released = 0
        self.most = Messages()
        self.over_s = 0.0  # end of the last fault
        self.frozen_until_s = 0.0
        self._publisher_wanted = False

    @property
    def faults(self) -> int:
        return sum(self.done.values())

    @property
    def frozen(self) -> bool:
        """True if the database answers nobody."""
        return time.monotonic() < self.frozen_until_s

    def fault(self) -> None:
        (kind,) = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        with contextlib.suppress(psutil.Error, redis.RedisError):
            if kind == "killed: publisher":
                self._publisher_wanted = True  # kill the publisher as soon as there is one
            elif kind == "broker wiped":
                with redis.Redis.from_url(self.broker.redis_url) as client:
                    client.flushall()
                self._note(kind)
            elif kind == "database frozen":
                self._freeze_database(kind)
            else:
                how, _, what = kind.partition(": ")
                self._hurt(kind, how, what)

    def tend(self) -> None:
        """Start hosts that are off, and release cards in quarantine."""
        for host in self.hosts:
            if host.worker is None or host.worker.poll() is not None:
                host.worker = host.start("worker")
        if self.frozen:
            return
        with contextlib.suppress(FarmError):
            self.released += release_all(self.database)

    def kill_publisher(self, job_id: str) -> None:
        """Kill the current publisher of the job, if requested."""
        if not self._publisher_wanted or self.frozen:
            return
        with contextlib.suppress(FarmError, psutil.Error), self.database.read() as session:
            query = select(tables.Round.publisher).where(
                tables.Round.job_id == job_id, col(tables.Round.publisher).is_not(None)
            )
            if not (publisher := session.exec(query).first()):
                return
            pid = int(publisher.split("/")[1])
            for process in [one for host in self.hosts for one in host.processes()]:
                if process.pid == pid:
                    process.kill()
                    self._publisher_wanted = False
                    self._note("killed: publisher")

    def count_messages(self, still_open: int) -> None:
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(self.broker.redis_url) as client:
            together = client.pipeline()
            for key in [CONTROL_QUEUE, *client.keys("card.*")]:
                together.llen(key)
            number = sum(together.hlen("unacked").execute())
            if number > self.most.number:
                self.most = Messages(number, still_open)

    def _hurt(self, kind: str, how: str, what: str) -> None:
        host = self.chance.choice(self.hosts)
        found = host.processes(*COMMANDS["benchmark" if what == "pool" else what])
        found = [process for process in found if process.status() != psutil.STATUS_STOPPED]
        if not found:
            return
        victim = self.chance.choice(found)
        if what == "pool":
            victim = victim.parent()
        if how == "killed":
            victim.kill()  # the other processes of a host end with its supervisor
            self._note(kind)
            return
        for_s = self.chance.uniform(*STOPPED_S)
        stopped = [victim, *(victim.children(recursive=True) if what in ("card", "host") else ())]
        self._stop(stopped, for_s)
        self._note(kind, for_s)

    def _freeze_database(self, kind: str) -> None:
        if self.frozen or self.postgres.pid is None:
            return
        for_s = self.chance.uniform(*FROZEN_S)
        server = psutil.Process(self.postgres.pid)
        server.suspend()  # so that it starts no other process
        self.frozen_until_s = time.monotonic() + for_s + 0.1
        self._stop([server, *server.children(recursive=True)], for_s)
        self._note(kind, for_s)

    def _stop(self, processes: Sequence[psutil.Process], for_s: float) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        # In a separate thread: a query to a frozen database waits.
        thaw = threading.Timer(for_s, let_go_on, [processes])
        thaw.daemon = True
        thaw.start()

    def _note(self, kind: str, for_s: float = 0.0) -> None:
        print(f"{time.strftime('%H:%M:%S')} {kind}", file=sys.stderr)  # with the time, to compare with the hosts' logs
        self.done[kind] += 1
        self.over_s = max(self.over_s, time.monotonic() + for_s)


def let_go_on(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.resume()


@contextlib.contextmanager
def three_hosts(
    folder: Path, broker: BrokerServer, postgres: PostgresServer, cards: int, item_s: float
) -> Iterator[list[Farm]]:
    url = postgres.new_database()
    hosts: list[Farm] = []
    with contextlib.ExitStack() as stack:
        for number in range(1, HOSTS + 1):
            name = f"host{number}"
            (folder / name).mkdir(parents=True)
            changes = {**SETTINGS, "FARM_HOST": name, "FARM_HOST_ID": name, "FARM_SIMULATED_ITEM_S": str(item_s)}
            host = running(folder / name, broker.url, url, cards=cards, fit=number * cards, **changes)
            hosts.append(stack.enter_context(host))
        yield hosts


def soak(
    hosts: Sequence[Farm], broker: BrokerServer, postgres: PostgresServer, options: argparse.Namespace
) -> dict[str, Any]:
    database = hosts[0].database
    ids = store_operators(database, [""] * options.items)
    with database.read() as session:
        cards = list(session.exec(select(tables.CardRow.id)))
    job_id = jobs.create(database, sweep(options.items), cards, operator_ids=ids).job_id
    hurt = Soak(hosts, broker, postgres, options.seed)
    began_s = time.monotonic()
    hosts[0].publish_and_die(job_id).wait()
    hurt._note("killed: publisher")
    within_s = 60 * options.minutes
    still_open, next_s, tended_s, last_item_s = options.items, 0.0, 0.0, 0.0
    while True:
        now_s = time.monotonic()
        if now_s > tended_s + 0.5:
            hurt.tend()
            tended_s = now_s
        hurt.kill_publisher(job_id)
        if not hurt.frozen:
            with contextlib.suppress(FarmError):
                still_open = open_items(database, [job_id])
                if not still_open:
                    last_item_s = last_item_s or time.monotonic()
                    if all_ended(database, [job_id]):
                        break
        hurt.count_messages(still_open)
        in_time = now_s < began_s + within_s
        if hurt.faults < options.faults and in_time:
            ahead = 1 - still_open / options.items > ALL_FAULTS_BY * hurt.faults / options.faults
            if ahead or now_s > next_s:
                hurt.fault()
                next_s = now_s + hurt.chance.uniform(0, 2) * IN_THE_TIME * within_s / options.faults
        if now_s > began_s + within_s + PATIENCE_S:
            break
        time.sleep(0.05)
    found = judge(database, [job_id])
    return {
        "seed": options.seed,
        "hosts": HOSTS,
        "cards": len(cards),
        "seconds": round(time.monotonic() - began_s, 1),
        "faults": hurt.faults,
        "by_kind": {kind: hurt.done[kind] for kind in WEIGHTS if hurt.done[kind]},
        **found,
        "begun_again_share": round(found["begun_again"] / (found["items"] + found["begun_again"]), 4),
        "most_messages": hurt.most.number,
        "open_items_then": hurt.most.open_items,
        "released": hurt.released,
        # None: not finished at the time limit.
        "last_fault_to_last_item_s": round(max(0.0, last_item_s - hurt.over_s), 1) if last_item_s else None,
    }


def show(found: dict[str, Any]) -> None:
    last_s = found["last_fault_to_last_item_s"]
    rows = {
        "seed": found["seed"],
        "hosts, cards": f"{found['hosts']}, {found['cards']}",
        "seconds": found["seconds"],
        "faults": found["faults"],
        **{f"  {kind}": number for kind, number in found["by_kind"].items()},
        "items": found["items"],
        "lost": found["lost"],
        "doubled (read twice)": found["two_readings"],
        "missing (done without a reading, verdicts)": f"{found['without_reading']}, {found['verdicts_missing']}",
        "begun again": f"{found['begun_again']}, {100 * found['begun_again_share']:.1f} % of all that was begun",
        "readings that arrived too late and were rejected": found["repeated_and_fenced_out"],
        "largest number of messages": f"{found['most_messages']}, with {found['open_items_then']} items open",
        "cards quarantined and released": found["released"],
        "time from the last fault to the last item": "never" if last_s is None else f"{last_s} s",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5000, help="items of the job")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument(
        "--minutes",
        type=float,
        default=15.0,
        help="no faults after this time; the run ends with an error three minutes later",
    )
    parser.add_argument("--cards", type=int, default=2, help="cards of each host")
    parser.add_argument("--item-s", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=None, help="default: a random seed, which is printed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a new folder for the hosts' logs")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(10**6)
    print(f"seed {options.seed}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(BrokerServer(persistent=True))
        postgres = stack.enter_context(PostgresServer())
        hosts = stack.enter_context(three_hosts(folder, broker, postgres, options.cards, options.item_s))
        found = soak(hosts, broker, postgres, options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found))
    return 1 if any(found[name] for name in NEVER) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
