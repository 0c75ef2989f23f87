"""Measure how the farm behaves with up to 1,000 cards: curves of throughput, pauses, database,
broker and reconciler.

    python benchmarks/thousand_cards.py --cards 10,50,100,300,1000 --item-s 10 --json cards.json

Real PostgreSQL, real broker, real reconciler and aggregation in a control process. The cards are
threads that send the requests of real workers: they take messages with kombu, run items with the
driver of a card's worker (`tasks.measure.CardWorker`), count the parts of chords with Celery's
backend and renew their leases. Only the measurement is a pause of ``--item-s``, and no process
starts per card. All cards of a client process share its database connections, as behind a
connection pool; ``--connections`` sets their number.

The clients need CPU time too, and more than real workers of many hosts would take from these cores.
So their CPU time is measured separately, and the curve ends where they take more than half of the
cores (``generator_limited``). The pause is from the end of an item to the start of the next on the
same card, on the database's clock."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import redis
from celery.app.task import Context
from celery.exceptions import Ignore
from sqlalchemy import text
from sqlmodel import Session, col, select

from benchmarks.scale import _operators
from benchmarks.simulated_cards import _processor_s
from farm.benchmark_process.client import CardReading
from farm.devices.device import Card
from farm.devices.simulated import SOFTWARE, SimulatedDevice
from farm.devices.simulated import measure as simulate
from farm.jobs import jobs, leases
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database, database_now, in_batches
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request, Sweep
from tasks import control
from tasks.app import app, configure
from tasks.measure import CardWorker, run_item
from tasks.message_filter import CONTROL_QUEUE
from tasks.queues import card_queue, publish_round
from tasks.servers import BrokerServer
from tests.servers import PostgresServer

MODEL = "a card"


def card_of(number: int) -> Card:
    return Card(f"SIM-{number}", "simulated", MODEL, 0, "simulated", number, "here")


class Pause:
    """A benchmark process that only waits."""

    unhealthy = ""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.device = SimulatedDevice(card)

    def wait_ready(self) -> Any:
        return SOFTWARE

    def measure(self, subject: Any, protocol: Any, stopping: Any, **_: Any) -> CardReading:
        return CardReading(
            simulate(subject, protocol, self.device, None, lambda phase, details: None),
            SOFTWARE,
            self.card,
        )


# ------------------------------------------------------------------------------------------------
# one client process


def client(numbers: range, connections: int, host_cards: int) -> None:
    """Serve these cards, one thread each, until the process is ended."""
    configure(settings())
    database = Database(settings().database)
    database.engine.pool._pool.maxsize = connections  # type: ignore[attr-defined]
    database.engine.pool._max_overflow = 0  # type: ignore[attr-defined]
    held: dict[str, set[int]] = {}
    threading.stack_size(512 * 1024)
    for number in numbers:
        card = card_of(number)
        worker = CardWorker(
            card.id, f"holder-{number}", database, Pause(card), queue=card_queue(card.id)
        )  # type: ignore[arg-type]
        worker.software = SOFTWARE  # the coordinator has registered the card
        held[worker.holder] = set()
        threading.Thread(target=work, args=(worker, held[worker.holder]), daemon=True).start()
    while True:
        began_s = time.monotonic()
        for holders in in_batches(held, host_cards):
            if host_cards == 1:
                leases.renew(database, holders[0], settings().lease_s, set(held[holders[0]]))
            else:
                leases.renew_together(
                    database, {holder: set(held[holder]) for holder in holders}, settings().lease_s
                )
        time.sleep(max(0.1, settings().heartbeat_s - (time.monotonic() - began_s)))


def work(worker: CardWorker, held: set[int]) -> None:
    """Take the messages of a card and do what Celery's worker does with them."""
    with app.connection_for_read() as connection, connection.SimpleQueue(worker.queue) as queue:
        while True:
            message = queue.get(block=True)
            (item_id,), _, embedded = message.payload
            held.add(item_id)
            with contextlib.suppress(Ignore):
                status = run_item(None, worker, item_id)
                about = Context(
                    message.headers, chord=embedded.get("chord"), args=(item_id,), kwargs={}
                )
                if about.chord:
                    app.backend.on_chord_part_return(about, "SUCCESS", status)
            held.discard(item_id)
            message.ack()


def reconciler() -> None:
    """The control worker of all hosts: they take turns."""
    configure(settings())
    control.database().check_schema()
    threading.Thread(target=_aggregations, daemon=True).start()
    while True:
        began_s = time.monotonic()
        control.reconcile_now(control.database(), settings(), "")
        took_s = time.monotonic() - began_s
        print(round(took_s, 3), flush=True)
        time.sleep(
            max(settings().reconcile_s - took_s, 4 * took_s)
        )  # as a worker: a long pass has a long pause


def _aggregations() -> None:
    with app.connection_for_read() as connection, connection.SimpleQueue(CONTROL_QUEUE) as queue:
        while True:
            message = queue.get(block=True)
            control.aggregate(message.payload[0][0])
            message.ack()


# ------------------------------------------------------------------------------------------------
# the coordinator


def prepare(database: Database, cards: int, number: int) -> str:
    """Register the cards and plan a sweep of that many items; return the job's id."""
    with database.write() as session:
        from farm.store.content import store_software

        software_id = store_software(session, SOFTWARE)
        for index in range(cards):
            card = card_of(index)
            row = tables.CardRow(
                id=card.id, kind=card.kind, model=MODEL, host="here", index=index, state="idle"
            )
            row.queue, row.worker, row.software_id = (
                card_queue(card.id),
                f"holder-{index}",
                software_id,
            )
            row.last_seen_at_s = database_now()  # type: ignore[assignment]
            session.add(row)
    request = Request(
        sweep=Sweep("Conv2d", {"in_channels": tuple(range(number))}, "many cards"),
        protocol=Protocol(launch="eager"),
        stopping=Stopping(),
        reuse="model",
    )
    ids = [card_of(index).id for index in range(cards)]
    operator_ids = _operators(database, "many", 0, number)
    return jobs.create(database, request, ids, operator_ids=operator_ids).job_id


def finished_before(database: Database, number: int) -> None:
    """Store a finished job of that many items: the cost per item must not depend on them."""
    from benchmarks.scale import _job

    if number:
        _job(database, ["SIM-0"], number, "finished")


def measure(postgres: PostgresServer, cards: int, options: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(BrokerServer(options={"appendonly": "yes"}))
        url = postgres.new_database()
        changes = {
            "FARM_DATABASE_URL": url,
            "FARM_BROKER_URL": broker.url,
            "FARM_STATE_DIR": str(folder),
        }
        changes |= {"FARM_SIMULATED_ITEM_S": str(options.item_s)}
        os.environ.update(changes)
        settings.cache_clear()
        configure(Settings())
        database = Database(url)
        stack.callback(database.close)
        database.create_or_check()
        job_id = prepare(
            database,
            cards,
            int(cards * ((options.warm_up_s + options.seconds) / options.item_s + 8)),
        )
        finished_before(database, options.finished)
        with database.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(
                "VACUUM ANALYZE"
            )
        server = psutil.Process(postgres.pid)
        publishing = (time.process_time(), _processor_s(server), time.monotonic())
        messages = publish_round(database, job_id, 1)
        published = [
            now - then
            for now, then in zip(
                (time.process_time(), _processor_s(server), time.monotonic()),
                publishing,
                strict=True,
            )
        ]
        inspect = stack.enter_context(redis.Redis.from_url(broker.redis_url))
        full_mb = inspect.info("memory")["used_memory"] / 1e6
        here = [sys.executable, __file__]
        given = ["--connections", str(options.connections), "--host-cards", str(options.host_cards)]
        log = stack.enter_context((folder / "log").open("w+"))
        shares = [
            range(cards * n // options.clients, cards * (n + 1) // options.clients)
            for n in range(options.clients)
        ]
        clients = [
            subprocess.Popen([*here, "--serve", f"{share.start}-{share.stop}", *given], stderr=log)
            for share in shares
        ]
        reconciling = subprocess.Popen([*here, "--reconcile"], stdout=log, stderr=log)
        for process in (*clients, reconciling):
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(options.warm_up_s + 2 * options.item_s)

        def times() -> tuple[float, ...]:
            generating = sum(
                sum(psutil.Process(process.pid).cpu_times()[:2]) for process in clients
            )
            control_s = sum(psutil.Process(reconciling.pid).cpu_times()[:2])
            cpu = inspect.info("cpu")
            return (
                generating,
                control_s,
                _processor_s(server),
                cpu["used_cpu_user"] + cpu["used_cpu_sys"],
                time.monotonic(),
            )

        with database.read() as session:
            since_s, rows_before = session.scalar(select(database_now())), rows_read(session)
        before, waits = times(), watch_locks(postgres, url, options.seconds)
        generating_s, control_s, database_s, broker_s, wall_s = (
            now - then for now, then in zip(times(), before, strict=True)
        )
        with database.read() as session:
            rows = session.exec(
                select(tables.Item.card_id, tables.Item.started_at_s, tables.Item.ended_at_s)
                .where(
                    col(tables.Item.started_at_s) >= since_s - options.item_s - 10,
                    tables.Item.job_id == job_id,
                )
                .order_by(col(tables.Item.card_id), col(tables.Item.started_at_s))
            ).all()
            rows_after = rows_read(session)
            repeated = session.exec(
                select(tables.Item.id).where(col(tables.Item.attempts) > 1)
            ).all()
        memory = inspect.info("memory")
        log.seek(0)
        passes = [float(line) for line in log.read().split() if line.replace(".", "", 1).isdigit()]
    done = sum(ended is not None and since_s < ended <= since_s + wall_s for *_, ended in rows)
    pauses_ms = sorted(
        1e3 * (after[1] - one[2])
        for one, after in itertools.pairwise(rows)
        if one[0] == after[0] and one[2] is not None and after[1] is not None and after[1] > since_s
    )
    cores = os.cpu_count() or 1
    return {
        "cards": cards,
        "item_s": options.item_s,
        "host_cards": options.host_cards,
        "items": done,
        "items_per_s": round(done / wall_s, 1),
        "busy_share": round(done * options.item_s / cards / wall_s, 3),
        "pause_p50_ms": round(statistics.median(pauses_ms), 1) if pauses_ms else None,
        "pause_p99_ms": round(pauses_ms[int(0.99 * len(pauses_ms))], 1) if pauses_ms else None,
        "database_ms_per_item": round(1e3 * database_s / done, 2),
        "rows_read_per_item": {
            name: round((rows_after[name] - rows_before[name]) / done, 1) for name in rows_before
        },
        "database_cores": round(database_s / wall_s, 3),
        "waiting_for_locks": round(waits["Lock"], 4),
        "waiting_for_internal_locks": round(waits["LWLock"], 4),
        "broker_ms_per_item": round(1e3 * broker_s / done, 2),
        "broker_full_mb": round(full_mb, 1),
        "broker_peak_mb": round(memory["used_memory_peak"] / 1e6, 1),
        "messages": messages,
        "publish_client_ms_per_message": round(1e3 * published[0] / messages, 2),
        "publish_database_ms_per_message": round(1e3 * published[1] / messages, 2),
        "reconciler_cores": round(control_s / wall_s, 3),
        "reconciler_pass_s": round(statistics.median(passes), 3) if passes else None,
        "generator_ms_per_item": round(1e3 * generating_s / done, 2),
        "generator_cores": round(generating_s / wall_s, 3),
        "generator_limited": generating_s / wall_s > cores / 2,
        "begun_again": len(repeated),
        "load_of_machine": round(os.getloadavg()[0], 1),
    }


def rows_read(session: Session) -> dict[str, int]:
    """Return table -> number of rows that statements have read so far, and the same of the entries
    of indexes.
    """
    of_table = (
        "SELECT relname, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM "
        "pg_stat_user_tables"
    )
    of_index = "SELECT relname || ' indexes', sum(idx_tup_read) FROM pg_stat_user_indexes"
    found = session.execute(
        text(f"{of_table} UNION ALL {of_index} GROUP BY relname")
    )  # no input in it
    return {
        name: int(number)
        for name, number in found
        if name.split()[0] in ("item", "reading", "job", "card")
    }


def watch_locks(postgres: PostgresServer, url: str, seconds: float) -> dict[str, float]:
    """Return kind of wait -> number of statements that waited so at one time, on average."""
    found, samples = dict.fromkeys(("Lock", "LWLock"), 0), 0
    name = url.rpartition("/")[2].partition("?")[0]
    query = (
        "SELECT wait_event_type, wait_event, query FROM pg_stat_activity WHERE wait_event_type IN "
        "('Lock', 'LWLock')"
    )
    waiting: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds
    with postgres.connect(name) as connection:
        while time.monotonic() < ends_s:
            for kind, event, statement in connection.execute(query).fetchall():
                found[kind] += 1
                waiting[f"{event}: {' '.join(statement.split())[:100]}"] += 1
            samples += 1
            time.sleep(0.1)
    for wait, number in waiting.most_common(5):
        print(f"{number} times in {samples} samples: {wait}", file=sys.stderr)
    return {kind: number / max(1, samples) for kind, number in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cards", default="10,30,100,300,1000", help="numbers of cards, the points of the curve"
    )
    parser.add_argument("--item-s", type=float, default=1.0)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="duration of the measurement of each point"
    )
    parser.add_argument(
        "--warm-up-s", type=float, default=15.0, help="time for the start of the clients"
    )
    parser.add_argument("--clients", type=int, default=2, help="number of client processes")
    parser.add_argument(
        "--connections", type=int, default=20, help="database connections of a client process"
    )
    parser.add_argument(
        "--host-cards", type=int, default=8, help="cards of a host, whose heartbeats are combined"
    )
    parser.add_argument(
        "--finished",
        type=int,
        default=0,
        help="number of finished items that the database has before",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--reconcile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        first, _, end = options.serve.partition("-")
        client(range(int(first), int(end)), options.connections, options.host_cards)
    elif options.reconcile:
        reconciler()
    else:
        found = []
        with PostgresServer() as postgres:
            for cards in map(int, options.cards.split(",")):
                found.append(measure(postgres, cards, options))
                print(json.dumps(found[-1]), flush=True)
                if found[-1]["generator_limited"]:
                    print(
                        "The clients take more than half of the cores: the curve ends here.",
                        file=sys.stderr,
                    )
                    break
        if options.json:
            options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
