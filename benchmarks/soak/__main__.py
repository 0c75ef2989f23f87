"""Inject 1,000 seeded faults of 31 kinds into three hosts that work on one job of 5,000 items, and
audit the result.

    python -m benchmarks.soak --folder FOLDER --minutes 20        # a part; again for the next part,
    until all are done python -m benchmarks.soak --folder FOLDER --audit             # the audit
    again, after the last part python -m benchmarks.soak --faults 25 --items 60 --cards 1 --every 1
    --minutes 1

The hosts are separate supervisors with simulated cards; a broker and a PostgreSQL are on a fourth
host. A fault counts only if its effect was observed: a process is gone or stopped, a write or a
connection is refused, a file is moved aside. Otherwise it is tried again. Faults of different
places (three hosts, broker, database) overlap. One item in a hundred is bad: it poisons, ends or
fails its process, or hangs. With two cards or more per host, other jobs have items on two cards.
Meanwhile, a person drains and resumes cards, cancels jobs, starts a second `farm worker`, and
releases cards that failed their health check.

The folder has the database, the records and the logs; a next part starts new hosts on the same
database and job. At the end `benchmarks/soak/audit.py` compares what was submitted with the
database, its events, and what the cards executed. Exit code 1: the audit found something, or faults
or items are left; 2: the next part has to do the rest."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
import psycopg
import redis

from benchmarks.soak.audit import EVENTS, audit
from benchmarks.soak.faults import KINDS, Scene
from benchmarks.soak.hosts import HOSTS, NotObserved, Site, kill, running_site
from benchmarks.soak.jobs import Jobs
from benchmarks.soak.person import Person
from benchmarks.soak.schedule import Fault, Outcome, Record, drawn
from farm.errors import FarmError

#: The errors of a fault without a target or an effect.
EXPECTED = (NotObserved, psutil.Error, psycopg.Error, redis.RedisError, FarmError, OSError)
PATIENCE_S = 600.0
START_S = 400.0


class Part:
    """One part of a soak: the threads that inject faults, at most one per place at a time."""

    def __init__(
        self,
        site: Site,
        jobs: Jobs,
        record: Record,
        faults: list[Fault],
        options: argparse.Namespace,
    ) -> None:
        self.site, self.jobs, self.record, self.options = site, jobs, record, options
        self.left = record.left(fault for fault in faults if not self.missing(fault.kind))
        self.running: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(HOSTS + 2, "fault")  # one thread per place
        self._chance = Random(f"{options.seed}/{len(record.outcomes)}")
        self._next_s = 0.0

    def missing(self, kind: str) -> str:
        """Why this machine cannot have a kind of fault; "" if it can."""
        return self.site.without.get(KINDS[kind].needs, "")

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def step(self) -> None:
        """Collect the faults that have ended, and begin the next one if it is time."""
        for place, future in [*self.running.items()]:
            if future.done():
                del self.running[place]
                future.result()
        if time.monotonic() < self._next_s:
            return
        for fault in [*self.left]:
            place = self._place(fault)
            if place not in self.running:
                self.left.remove(fault)
                self.running[place] = self._threads.submit(self._inject, fault, place)
                self._next_s = (
                    time.monotonic() + self._chance.uniform(0.5, 1.5) * self.options.every
                )
                return

    def _place(self, fault: Fault) -> str:
        """Where a fault is injected: on the host that was drawn, or on another if faults are at
        work there.
        """
        if KINDS[fault.kind].place != "host":
            return KINDS[fault.kind].place
        names = [host.name for host in self.site.hosts]
        turned = names[fault.host :] + names[: fault.host]
        return next((name for name in turned if name not in self.running), turned[0])

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Wait for the running faults."""
        while any(not future.done() for future in self.running.values()):
            meanwhile()
            time.sleep(0.2)
        for future in self.running.values():
            future.result()

    def _inject(self, fault: Fault, place: str) -> None:
        kind, begin_s, observed, why_not = KINDS[fault.kind], time.time(), "", ""
        host = next(
            (host for host in self.site.hosts if host.name == place), self.site.hosts[fault.host]
        )
        try:
            observed = kind.inject(
                Scene(self.site, self.jobs, host, fault.chance(self.options.seed))
            )
        except Exception as error:  # often another fault is at work
            why_not = f"{type(error).__name__}: {error}".splitlines()[0]
            if not isinstance(error, EXPECTED):
                traceback.print_exc()
            self.left.append(Fault(fault.number, fault.kind, fault.host, fault.tries + 1))
        self.record.add(
            Outcome(
                fault.number, fault.tries, kind.name, place, begin_s, time.time(), observed, why_not
            )
        )
        print(
            f"{time.strftime('%H:%M:%S')} {place:<8} {kind.name}: "
            f"{observed or 'NOT OBSERVED ' + why_not}",
            flush=True,
        )


def run_part(site: Site, jobs: Jobs, record: Record, options: argparse.Namespace) -> bool:
    """Run one part; return whether all faults are done and all jobs have ended."""
    began_s = time.monotonic()
    with site.connect() as connection:
        connection.execute(EVENTS)
    _start_hosts(site)
    if not jobs.ids:
        jobs.submit("main", options.items, Random(options.seed), bad=options.items // 100)
        if options.cards > 1:
            jobs.submit("groups", -(-options.items // 20), Random(options.seed), bad=0, cards=2)
    part = Part(
        site, jobs, record, drawn(options.kinds, options.faults, HOSTS, options.seed), options
    )
    person = Person(site, jobs, options.seed, len(record.outcomes))

    def tend() -> None:
        for host in site.hosts:
            host.tend()

    ready_s = time.monotonic()
    with person, part:
        while time.monotonic() - ready_s < 60 * options.minutes and (part.left or part.running):
            tend()
            part.step()
            person.busy = bool(part.left)
            time.sleep(0.1)
        person.busy = False
        part.finish(tend)
        deadline_s = time.monotonic() + (PATIENCE_S if not part.left or options.last else 0)
        while person.open_items and time.monotonic() < deadline_s:
            tend()
            time.sleep(0.3)
    _stop_hosts(site)
    seconds = time.monotonic() - began_s
    totals = {"seconds": round(seconds, 1), "open": person.open_items, **person.done}
    with (site.folder / "parts.jsonl").open("a") as file:
        file.write(json.dumps(totals) + "\n")
    return person.open_items == 0 and (not part.left or options.last)


def _start_hosts(site: Site) -> None:
    for host in site.hosts:
        host.tend()
    deadline_s = time.monotonic() + START_S
    cards = sum(len(host.cards) for host in site.hosts)
    query = (
        "SELECT count(*) FROM card WHERE state NOT IN ('starting', 'stopped') AND software_id IS "
        "NOT NULL"
    )
    while True:
        with site.connect() as connection:
            ready = connection.execute(query).fetchone()[0]
        if ready == cards and all(host.works() for host in site.hosts):
            return
        if time.monotonic() > deadline_s:
            raise SystemExit("\n".join(host.log_since(0)[-2000:] for host in site.hosts))
        time.sleep(0.3)


def _stop_hosts(site: Site) -> None:
    """Stop the hosts in order, so that no item stays claimed; kill what does not stop."""
    workers = [host.farm.worker for host in site.hosts if host.farm.worker is not None]
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.terminate()
    deadline_s = time.monotonic() + 60
    for worker in workers:
        with contextlib.suppress(Exception):
            worker.wait(max(0.1, deadline_s - time.monotonic()))
    for host in site.hosts:
        kill(*host.processes())


def summary(site: Site, record: Record) -> dict[str, Any]:
    with site.connect() as connection:
        found = audit(connection, site.folder)
    parts = [json.loads(line) for line in (site.folder / "parts.jsonl").read_text().splitlines()]
    logs = "".join(host.log_since(0) for host in site.hosts)
    variants: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for (kind, variant), number in sorted(record.by_variant().items()):
        variants[kind][variant] = number
    operations = Counter[str]()
    for part in parts:
        operations.update(
            {name: number for name, number in part.items() if name not in ("seconds", "open")}
        )
    return {
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "parts": len(parts),
        "faults": len(record.observed),
        "tried_in_vain": len(record.outcomes) - len(record.observed),
        "by_kind": {kind: record.by_kind()[kind] for kind in KINDS},
        "by_variant": variants,
        "not_on_this_machine": site.without,
        "operations": dict(operations),
        "readings_in_memory": logs.count("waits in memory"),
        "readings_in_spool": logs.count("The database does not answer; the reading of"),
        "deaf_workers_restarted": logs.count("but the worker received no message for"),
        "errors_logged": logs.count("Traceback (most recent call last)"),
        **found.figures,
        "checks": found.checks,
        "wrong": found.wrong,
    }


def show(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, dict) and name != "by_variant":
            print(f"{name}:")
            for one, number in value.items():
                print(f"  {one:<60} {number}")
        elif name != "by_variant":
            print(f"{name:<62} {value}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, help="records, logs and database; default: a temporary folder"
    )
    parser.add_argument("--faults", type=int, default=1000, help="number of faults")
    parser.add_argument(
        "--kinds",
        type=_kinds,
        default=list(KINDS),
        help="kinds of faults, with commas; default: all",
    )
    parser.add_argument("--items", type=int, default=5000, help="items of the job")
    parser.add_argument("--cards", type=int, default=2, help="cards of each host")
    parser.add_argument("--item-s", type=float, default=2.0, help="duration of an item, in seconds")
    parser.add_argument(
        "--every",
        type=float,
        default=2.5,
        help="mean time between the begins of faults, in seconds",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="begin no fault after this time; then end the part",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="default: of the folder, or a random one"
    )
    parser.add_argument(
        "--last", action="store_true", help="end all jobs after this part, even if faults are left"
    )
    parser.add_argument("--audit", action="store_true", help="only audit the folder")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    options.last |= options.folder is None
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        _remember(folder / "state.json", options)
        site = stack.enter_context(running_site(folder.resolve(), options.cards, options.item_s))
        record = Record(folder / "faults.jsonl")
        complete = options.audit or run_part(site, Jobs(site), record, options)
        if not complete:
            print(
                f"{len(record.observed)} faults are done; the next part: the same command again",
                file=sys.stderr,
            )
            if not options.last:
                return 2
        found = {
            "seed": options.seed,
            "hosts": HOSTS,
            "cards": HOSTS * options.cards,
            **summary(site, record),
        }
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if complete and not found["wrong"] else 1


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(unknown)}; known: {', '.join(KINDS)}"
        )
    return names


def _remember(file: Path, options: argparse.Namespace) -> None:
    """Keep what all parts of a soak have in common."""
    same = json.loads(file.read_text()) if file.exists() else {}
    if not same:
        seed = secrets.randbelow(10**6) if options.seed is None else options.seed
        same = {
            "seed": seed,
            "faults": options.faults,
            "items": options.items,
            "cards": options.cards,
        }
        same["kinds"] = options.kinds
        file.write_text(json.dumps(same))
    vars(options).update(same)
    print(f"seed {options.seed}", file=sys.stderr)


if __name__ == "__main__":
    threading.current_thread().name = "soak"
    sys.exit(main())
