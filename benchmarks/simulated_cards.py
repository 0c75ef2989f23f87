"""Measure placement over many cards, and the load on the broker and the database.

    python benchmarks/simulated_cards.py --json cards.json              # the placement, by
    simulation python benchmarks/simulated_cards.py --real 6 --items 600           # and real
    workers on simulated cards

The real run uses SQLite and PostgreSQL. It fails if 10,000 items take 100 MB of the broker's memory
or more, if the database is more than half way to its limit (half of the items per second that it
handles when nothing else is done, half of a card's time spent in sessions, half of the time
computed as SQLite's only writer, half a core of PostgreSQL's), or if an item is lost, begun twice
or measured twice.

The simulation runs the arithmetic of the farm's placement, `farm.jobs.balance`: 100 cards, 10,000
items, one card four times slower, one failing half-way. Cards work at their own pace, the
reconciler balances them every five seconds, and a failed card is noticed after 15 s. "Best
possible" knows everything beforehand: all work, divided by the total speed. The arithmetic gets
more information than in a farm: the exact remainder of a running item (`farm.jobs.moving.rebalance`
counts all of it), a card's slowness over all its items (in a farm: over its last 15 minutes, from
five items on), and the slowness of the other cards when a failed card's items move
(`farm.jobs.job_cards.card_for_each` treats all cards as equally fast)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from farm.jobs.balance import CardQueue, QueuedItem, assign, balance

PASS_S, LOST_S = 5.0, 15.0
#: Limit of the broker's memory for 10,000 items, and of the share of the database's capacity that a
#: farm may use.
BROKER_MB, LIMIT = 100.0, 0.5

#: For every process of the farm: number of connections to the database, time with a connection
#: including waits for locks, time as SQLite's only writer, and computing time as such; in a file
#: that remains however the process ends.
TALLY = """
import mmap, os, struct, sys, threading, time
def watch():
    from sqlalchemy import Engine, event
    from sqlalchemy.pool import Pool
    path = os.path.join(os.environ["TALLIES"], str(os.getpid()))
    with open(path, "wb") as file:
        file.write(bytes(32))
    with open(path, "r+b") as file:
        tally = mmap.mmap(file.fileno(), 32)
    lock = threading.Lock()
    @event.listens_for(Pool, "checkout")
    def begin(connection, record, proxy):
        record.info["began_s"] = time.perf_counter()
        record.info["locked_s"] = None
    @event.listens_for(Engine, "after_cursor_execute")
    def statement(connection, cursor, statement, parameters, context, executemany):
        if statement == "BEGIN IMMEDIATE":
            connection.connection.info["locked_s"] = time.perf_counter(), time.thread_time()
    @event.listens_for(Pool, "checkin")
    def end(connection, record):
        now = time.perf_counter(), time.thread_time()
        began = record.info["locked_s"] or now
        more = 1, now[0] - record.info["began_s"], now[0] - began[0], now[1] - began[1]
        with lock:
            tally[:] = struct.pack("dddd", *map(sum, zip(struct.unpack("dddd", tally[:]), more)))
if "TALLIES" in os.environ and "farm.benchmark_process.server" not in sys.orig_argv:
    watch()
"""


def simulate(cards: int, items: int, seed: int, *, balancing: bool = True) -> dict[str, float]:
    chance = random.Random(seed)
    # Expected and actual duration, with a spread of 20 %.
    expected = {number: chance.lognormvariate(0.3, 0.5) for number in range(items)}
    takes = {
        number: seconds * chance.lognormvariate(0.0, 0.2) for number, seconds in expected.items()
    }
    ids = [f"c{number:03d}" for number in range(cards)]
    speed = dict.fromkeys(ids, 1.0)
    speed[ids[1]] = 0.25
    dead, total_s = ids[2], sum(takes.values())
    dies_s = total_s / (cards - 0.75 - 0.5) / 2
    best_s = (total_s - dies_s) / (cards - 1 - 0.75) if cards > 3 else total_s

    waiting: dict[str, list[int]] = {card: [] for card in ids}
    placed = assign((QueuedItem(n, s) for n, s in expected.items()), dict.fromkeys(ids, 0.0))
    for number, card in placed.items():
        waiting[card].append(number)
    for queue in waiting.values():
        chance.shuffle(queue)
    current: dict[str, tuple[int, float]] = {}  # card -> item, when it ends
    spent = {card: [0.0, 0.0] for card in ids}  # expected and actual seconds of finished items
    now_s, done, moves = 0.0, 0, 0
    step_s, next_pass_s, moved_off = 0.05, PASS_S, False
    while done < items:
        now_s += step_s
        for card in ids:
            alive = card != dead or now_s < dies_s
            if not alive:
                continue
            while True:
                if card in current:
                    number, ends_s = current[card]
                    if ends_s > now_s:
                        break
                    del current[card]
                    done += 1
                    spent[card][0] += expected[number]
                    spent[card][1] += takes[number] / speed[card]
                    begin_s = ends_s
                else:
                    begin_s = now_s
                if not waiting[card]:
                    break
                number = waiting[card].pop(0)
                current[card] = (number, begin_s + takes[number] / speed[card])
        if now_s < next_pass_s:
            continue
        next_pass_s += PASS_S
        slowness = {card: (t / e if e > 4 else 1.0) for card, (e, t) in spent.items()}
        if now_s > dies_s + LOST_S and not moved_off:
            moved_off = True
            stranded = waiting[dead] + ([current.pop(dead)[0]] if dead in current else [])
            free_at_s = {c: sum(expected[n] for n in waiting[c]) for c in ids if c != dead}
            for number, card in assign(
                (QueuedItem(n, expected[n]) for n in stranded), free_at_s
            ).items():
                waiting[card].append(number)
            waiting[dead] = []
        if balancing:
            queues = [
                CardQueue(
                    card,
                    [QueuedItem(n, expected[n]) for n in waiting[card]],
                    max(0.0, current[card][1] - now_s) * speed[card] if card in current else 0.0,
                    slowness[card],
                )
                for card in ids
                if card != dead or (now_s < dies_s)
            ]
            for number, card in balance(queues, idle_within_s=2 * PASS_S).items():
                for other in ids:
                    if number in waiting[other]:
                        waiting[other].remove(number)
                        break
                waiting[card].append(number)
                moves += 1
    return {
        "ends_s": round(now_s, 1),
        "best_s": round(best_s, 1),
        "over": round(now_s / best_s - 1, 4),
        "moves": moves,
    }


def real(cards: int, items: int, item_s: float, kind: str) -> dict[str, object]:
    """Run real workers; measure the load of the cards, the broker's memory, and the distance of the
    database to its limit."""
    import psutil
    import redis
    from sqlmodel import func, select

    from farm.jobs import jobs
    from farm.settings import Settings
    from farm.store import tables
    from tasks.app import configure
    from tasks.queues import publish_round
    from tasks.servers import BrokerServer
    from tests.farms import running, store_operators
    from tests.planned import sweep
    from tests.servers import PostgresServer

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(BrokerServer())
        postgres = stack.enter_context(PostgresServer()) if kind == "postgresql" else None
        url = postgres.new_database() if postgres else f"sqlite:///{folder / 'farm.db'}"
        alone_url = postgres.new_database() if postgres else f"sqlite:///{folder / 'alone.db'}"
        alone_per_s = alone(alone_url, items=500)
        tallies = folder / "tallies"
        tallies.mkdir()
        (folder / "sitecustomize.py").write_text(TALLY)
        farm = stack.enter_context(
            running(
                folder,
                broker.url,
                url,
                cards=cards,
                FARM_SIMULATED_ITEM_S=str(item_s),
                PYTHONPATH=str(folder),
                TALLIES=str(tallies),
            )
        )
        processes = psutil.Process().children(recursive=True)
        ids = store_operators(farm.database, [""] * items)
        chosen = [card.id for card in farm.alive()]
        job_id = jobs.create(farm.database, sweep(items), chosen, operator_ids=ids).job_id
        configure(Settings(broker_url=broker.url))
        server = psutil.Process(postgres.pid) if postgres else None
        before_s = _processor_s(server) if server else 0.0
        before = _tallied(tallies)
        began_s = time.monotonic()
        publish_round(farm.database, job_id, 1)
        published_s = time.monotonic() - began_s
        client = stack.enter_context(redis.Redis.from_url(broker.redis_url))
        full_mb = client.info("memory")["used_memory"] / 1e6
        farm.wait_for(lambda: farm.ended(job_id), 1800)
        whole_s = time.monotonic() - began_s
        peak_mb = client.info("memory")["used_memory_peak"] / 1e6
        asked, held_s, locked_s, computed_s = (
            now - then for now, then in zip(_tallied(tallies), before, strict=True)
        )
        database_s = _processor_s(server) - before_s if server else 0.0
        with farm.database.read() as session:
            readings = session.exec(select(func.count()).select_from(tables.ReadingRow)).one()
        done = farm.items(job_id)
        # Repeat, because other programs may have used the machine; the better result is closer to
        # the limit.
        alone_per_s = max(alone_per_s, alone(alone_url, items=500))
    items_per_s = items / whole_s
    return {
        "database": kind,
        "cards": cards,
        "processes": len(processes),
        "items": items,
        "item_s": item_s,
        "published_s": round(published_s, 1),
        "whole_s": round(whole_s, 1),
        "items_per_s": round(items_per_s, 1),
        "card_busy_share": round(items * item_s / cards / whole_s, 3),
        "broker_full_mb": round(full_mb, 1),
        "broker_peak_mb": round(peak_mb, 1),
        "sessions_per_s": round(asked / whole_s, 1),
        "sessions_per_item": round(asked / items, 1),
        "session_ms": round(1e3 * held_s / asked, 2),
        "share_of_a_cards_time_in_sessions": round(held_s / whole_s / cards, 4),
        "share_of_time_sqlite_is_locked": round(locked_s / whole_s, 3) if server is None else None,
        "share_of_time_sqlites_writer_computes": round(computed_s / whole_s, 3)
        if server is None
        else None,
        "database_alone_items_per_s": round(alone_per_s, 1),
        "share_of_what_the_database_bears": round(items_per_s / alone_per_s, 3),
        "database_processor_ms_per_item": round(1e3 * database_s / items, 2) if server else None,
        "database_share_of_one_core": round(database_s / whole_s, 3) if server else None,
        "lost": sum(item.state != "done" for item in done),
        "repeated": sum(item.attempts - 1 + item.repeated for item in done),
        "readings_too_many": readings - items,
    }


def wrong(found: dict[str, Any]) -> list[str]:
    """Return the violated conditions of a real run."""
    said = []
    if found["broker_peak_mb"] / max(found["items"], 10_000) * 10_000 >= BROKER_MB:
        said.append(f"the broker took {found['broker_peak_mb']} MB")
    shares = (
        "share_of_what_the_database_bears",
        "share_of_a_cards_time_in_sessions",
        "share_of_time_sqlites_writer_computes",
        "database_share_of_one_core",
    )
    said += [
        f"{name}: {found[name]}, the database is near its limit"
        for name in shares
        if (found[name] or 0) > LIMIT
    ]
    return said + [
        f"{name}: {found[name]}"
        for name in ("lost", "repeated", "readings_too_many")
        if found[name]
    ]


def alone(url: str, items: int) -> float:
    """Return the items per second that the database handles: one process per core only claims and
    completes.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from farm.store.database import Database
    from tests.planned import items_of, plan, register

    cores = os.cpu_count() or 1
    database = Database(url)
    database.create_or_check()
    (card,) = register(database, 0)
    job_id = plan(database, [card], number=items)
    ids = [item.id for item in items_of(database, job_id)]
    database.close()
    shares = [ids[number::cores] for number in range(cores)]
    with ProcessPoolExecutor(cores, get_context("spawn")) as processes:
        taken = list(processes.map(_claim_and_complete, [url] * cores, [job_id] * cores, shares))
    return items / (max(ended_s for _, ended_s in taken) - max(began_s for began_s, _ in taken))


def _claim_and_complete(url: str, job_id: str, ids: list[int]) -> tuple[float, float]:
    """Claim and complete items; return the times of begin and end."""
    from farm.store.database import Database
    from tests.planned import claim, complete, items_of

    database = Database(url)
    mine = [item for item in items_of(database, job_id) if item.id in set(ids)]
    began_s = time.monotonic()
    for item in mine:
        complete(database, claim(database, item), item.card_id)
    ended_s = time.monotonic()
    database.close()
    return began_s, ended_s


def _tallied(folder: Path) -> tuple[float, ...]:
    """Sum over all processes of the farm: sessions, time in sessions, time as the only writer, and
    computing time as such."""
    return tuple(
        sum(column)
        for column in zip(
            *(struct.unpack("dddd", path.read_bytes()) for path in folder.iterdir()), strict=True
        )
    )


def _processor_s(server) -> float:  # type: ignore[no-untyped-def]
    import psutil

    taken = 0.0
    for process in [server, *server.children()]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        taken += times.user + times.system + times.children_user + times.children_system
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", type=int, default=100, help="number of cards of the simulation")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--real", type=int, default=0, help="number of real workers, instead of the simulation"
    )
    parser.add_argument(
        "--item-s",
        type=float,
        default=0.2,
        help="duration of an item on the simulated card of a real worker, in seconds",
    )
    parser.add_argument(
        "--database",
        choices=("sqlite", "postgresql"),
        action="append",
        help="database of a real run; default: both",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {}
    said = []
    if options.real:
        for kind in options.database or ("sqlite", "postgresql"):
            found[kind] = one = real(options.real, options.items, options.item_s, kind)
            said += [f"{kind}: {what}" for what in wrong(one)]
    else:
        found["balanced"] = [
            simulate(options.cards, options.items, seed) for seed in range(options.seeds)
        ]
        found["first placement only"] = simulate(options.cards, options.items, 0, balancing=False)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found))
    for what in said:
        print(what, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
