"""Measure planning and publishing of a large sweep, and queries in a large database.

    python benchmarks/scale.py submit --items 20000
    python benchmarks/scale.py ask --items 1000000 --postgres
    python benchmarks/scale.py begin --items 20000
    python benchmarks/scale.py look --items 200000 --postgres

`submit` plans a sweep of that many combinations of Conv2d for simulated cards without a worker,
with a reconciler in another process. It prints when the first messages existed, the planning rate
in each tenth, the memory of this process and of the broker, and the size of the database. Then it
prints the durations of list, status, report, cancel and resume, each with its slowest statement.
`ask` does the latter with a waiting job that is written without planning it (`--report`: also its
report). `begin` submits the same sweep to a running farm of one simulated card with `farm submit`,
and prints the time until the card works. `look` fills a database with that many items (finished
sweeps of 20,000, one waiting sweep of half of all items, and a hundred finished ones of 200), and
prints the duration of each repeated query (`cold` is the first one); `--plans` prints the
database's query plans. `judge` writes a job with readings for all items but one, runs the callback
of its chords (`close`), and reports it (`report`); both also accept a database and a job."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import redis
from sqlalchemy import event, insert, text, update
from sqlmodel import col, select

from farm.devices.simulated import SOFTWARE
from farm.jobs import closing, jobs, listing
from farm.report import report
from farm.requests.resolved import ResolvedRequest
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.content import reading_row
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request, Sweep
from tasks.doctor.database import card_checks
from tasks.servers import BrokerServer
from tests.farms import running
from tests.planned import READING, register
from tests.servers import PostgresServer

LARGE = 20_000


@contextlib.contextmanager
def fresh_database(postgres: bool) -> Iterator[Database]:
    with contextlib.ExitStack() as stack:
        if postgres:
            url = stack.enter_context(PostgresServer()).new_database()
        else:
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/farm.db"
        database = Database(url)
        stack.callback(database.close)
        database.create_or_check()
        yield database


# -------------------------------------------------------------------------------------------------
# submit


def sweep_of(number: int) -> Request:
    sizes = tuple(range(7, 7 + max(1, number // 400)))
    grid = {
        "in_channels": tuple(range(8, 88, 8)),
        "out_channels": (16, 32, 48, 64, 96),
        "kernel_size": (1, 3),
        "batch": (1, 2, 4, 8),
        "image_size": sizes,
    }
    return Request(
        sweep=Sweep("Conv2d", grid, "a large sweep"),
        protocol=Protocol(launch="eager"),
        stopping=Stopping(),
    )


def submit(number: int, postgres: bool, cards: int) -> dict[str, Any]:
    from tasks import submissions
    from tasks.app import configure

    with contextlib.ExitStack() as stack:
        database = stack.enter_context(fresh_database(postgres))
        broker = stack.enter_context(BrokerServer())
        url = database.url.render_as_string(hide_password=False)
        os.environ.update(
            FARM_BROKER_URL=broker.url, FARM_DATABASE_URL=url, FARM_HEARTBEAT_S="100000"
        )
        settings.cache_clear()
        configure(settings())
        chosen = register(database, *range(cards))
        client = stack.enter_context(redis.Redis.from_url(broker.redis_url))
        reconciler = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "thousand_cards.py", "--reconcile"]
        )
        stack.callback(reconciler.wait)
        stack.callback(reconciler.kill)
        began_s, found = time.monotonic(), dict[str, Any](items=number)
        planned: list[
            tuple[float, float, float]
        ] = []  # per tenth: time, CPU time, load of the machine

        @contextlib.contextmanager
        def progress() -> Iterator[Callable[[str, int, int], None]]:
            def report(doing: str, done: int, of: int) -> None:
                if client.llen(f"card.{chosen[0]}"):
                    found.setdefault("first_message_s", round(time.monotonic() - began_s, 1))
                if of and done * 10 >= of * (len(planned) + 1):
                    planned.append(
                        (time.monotonic() - began_s, time.process_time(), os.getloadavg()[0])
                    )
                    after = "{:.0f} s, {:.0f} s of a core, load {:.1f}".format(*planned[-1])
                    print(
                        f"{done} of {of} planned after {after}, {_peak_mib()} MiB",
                        file=sys.stderr,
                        flush=True,
                    )

            yield report

        with progress() as report:
            opened = submissions.submit(
                database, ResolvedRequest.of(sweep_of(number), chosen), progress=report
            )
        found["submitted_s"] = round(time.monotonic() - began_s, 1)
        steps, tenth = itertools.pairwise([(0.0, 0.0, 0.0), *planned]), opened.new / 10
        by_tenth = [
            (round(tenth / (b[0] - a[0])), round((b[1] - a[1]) / tenth * 1e3, 2), b[2])
            for a, b in steps
        ]
        found["by_tenth: items per s, ms of a core per item, load"] = by_tenth
        found |= {"cpu_s": round(time.process_time(), 1), "submitter_mib": _peak_mib()}
        found["messages"] = sum(client.llen(f"card.{card}") for card in chosen)
        found["broker_peak_mib"] = client.info("memory")["used_memory_peak"] >> 20
        found["database_mib"] = _size_mib(database)
        found |= _asked(database, opened.job_id, with_report=True)
        found["broker_peak_mib_at_the_end"] = client.info("memory")["used_memory_peak"] >> 20
    return found


def ask(number: int, postgres: bool, cards: int, with_report: bool) -> dict[str, Any]:
    from tasks.app import configure
    from tasks.control import reconcile_now

    with fresh_database(postgres) as database, BrokerServer() as broker:
        os.environ.update(FARM_BROKER_URL=broker.url, FARM_HEARTBEAT_S="100000")
        settings.cache_clear()
        configure(settings())
        job_id = _job(
            database,
            register(database, *range(cards)),
            number,
            "waiting",
            finished=False,
            waiting=True,
        )
        with database.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
        found: dict[str, Any] = {
            "items": number,
            "on_cards": cards,
            "database_mib": _size_mib(database),
        }
        found |= _asked(database, job_id, with_report=with_report)
        reconcile_now(database, settings(), "")
        found |= _slowest(database, "reconciler", lambda: reconcile_now(database, settings(), ""))
        with redis.Redis.from_url(broker.redis_url) as client:
            found["broker_peak_mib"] = client.info("memory")["used_memory_peak"] >> 20
    return found


def _asked(database: Database, job_id: str, *, with_report: bool) -> dict[str, Any]:
    """Measure what people do with a large job."""
    from tasks.submissions import resume

    def reading(question: Callable[[Any], Any]) -> Callable[[], Any]:
        def ask() -> Any:
            with database.read() as session:
                return question(session)

        return ask

    questions: dict[str, Callable[[], Any]] = {
        "jobs": reading(lambda session: listing.jobs(session, 20)),
        "status": reading(lambda session: jobs.progress(session, job_id)),
        "cards": reading(lambda session: listing.registered_cards(session, 5.0)),
        "resume": lambda: resume(database, job_id),
        "cancel": lambda: jobs.cancel(database, job_id),
        "resume --failed": lambda: jobs.retry_failed(database, job_id),
        "resume again": lambda: resume(database, job_id),
    }
    if with_report:
        questions["report"] = reading(lambda session: report.build(session, job_id).to_json())
    found: dict[str, Any] = {}
    for name, ask in questions.items():
        found |= _slowest(database, name, ask)
    return found


def _slowest(database: Database, name: str, ask: Callable[[], Any]) -> dict[str, Any]:
    """Return the duration of an action, and its slowest statement with its duration."""
    slowest, began = [(0.0, "")], dict[Any, float]()

    def begin(_connection: Any, cursor: Any, *_: Any) -> None:
        began[cursor] = time.monotonic()

    def end(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        slowest.append((time.monotonic() - began.pop(cursor), " ".join(statement.split())[:60]))

    event.listen(database.engine, "before_cursor_execute", begin)
    event.listen(database.engine, "after_cursor_execute", end)
    began_s = time.monotonic()
    ask()
    took_s = time.monotonic() - began_s
    event.remove(database.engine, "before_cursor_execute", begin)
    event.remove(database.engine, "after_cursor_execute", end)
    statement_s, statement = max(slowest)
    found = {
        name: {"took_s": round(took_s, 2), "slowest_s": round(statement_s, 2), "slowest": statement}
    }
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _size_mib(database: Database) -> int:
    with database.engine.connect() as connection:
        if database.engine.dialect.name == "sqlite":
            pages, size = (
                connection.scalar(text(f"PRAGMA {name}")) for name in ("page_count", "page_size")
            )
            return int(pages * size) >> 20  # type: ignore[operator]
        return (
            int(connection.scalar(text("SELECT pg_database_size(current_database())")) or 0) >> 20
        )


def begin(number: int, postgres: bool) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(fresh_database(postgres))
        broker = stack.enter_context(BrokerServer(options={"appendonly": "yes"}))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = database.url.render_as_string(hide_password=False)
        farm = stack.enter_context(running(folder, broker.url, url))
        sweep = sweep_of(number).sweep
        assert sweep is not None
        asked = {
            "sweep": sweep.operator,
            "grid": {name: list(values) for name, values in sweep.grid.items()},
        }
        (folder / "sweep.yml").write_text(json.dumps({"measurements": [asked]}))  # JSON is YAML
        began_s = time.monotonic()
        submitting = farm.start("submit", "-f", str(folder / "sweep.yml"))
        found = {}
        for what, state in (
            ("at_work_s", tables.ItemState.CLAIMED),
            ("first_reading_s", tables.ItemState.DONE),
        ):
            reached = (
                select(tables.Item.id)
                .where(col(tables.Item.state).in_((state, tables.ItemState.DONE)))
                .limit(1)
            )
            while True:
                with database.read() as session:
                    if session.exec(reached).first() is not None:
                        break
                time.sleep(0.05)
            found[what] = round(time.monotonic() - began_s, 1)
        submitting.kill()
        submitting.wait()
    return {"items": number, **found}


# ---------------------------------------------------------------------------------------------------
# look


def fill(database: Database, number: int) -> tuple[str, str, str]:
    """Fill a database with items; return the ids of a large finished sweep, a small one, and a
    waiting one.
    """
    cards = register(database, 0, 1, 2, 3)
    for index in range(100):
        small = _job(database, cards, 200, f"small{index}")
    for index in range(max(1, number // 2 // LARGE)):
        large = _job(database, cards, LARGE, f"large{index}")
    waiting = _job(database, cards, number // 2, "waiting", finished=False)
    with database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    return large, small, waiting


def _job(
    database: Database,
    cards: list[str],
    number: int,
    name: str,
    *,
    finished: bool = True,
    waiting: bool = False,
    judged: bool = True,
) -> str:
    request = sweep_of(number)
    first = _operators(database, name, 0, 1)
    job_id = jobs.create(database, request, cards, operator_ids=first).job_id
    with database.read() as session:
        item = (
            session.exec(select(tables.Item).where(tables.Item.job_id == job_id)).one().model_dump()
        )
    item_id = item.pop("id")
    row = reading_row(READING)
    row["details"] = {**row["details"], "histogram": list(range(40))}
    row |= {"subject_kind": "operator", "card_model": "a card", "software_id": SOFTWARE.id}
    row |= {
        "protocol_id": item["protocol_id"],
        "created_at_s": item["created_at_s"],
        "simulated": True,
    }
    for start in range(1, number, 5000):
        ids = _operators(database, name, start, min(number, start + 5000))
        placed = [(operator_id, cards[index % len(cards)]) for index, operator_id in enumerate(ids)]
        if waiting:
            rows = [
                {**item, "subject_id": operator_id, "card_id": card_id}
                for operator_id, card_id in placed
            ]
            with database.write() as session:
                session.execute(insert(tables.Item), rows)
            continue
        with database.write() as session:
            session.execute(
                insert(tables.ReadingRow),
                [
                    {**row, "id": f"r{operator_id}", "subject_id": operator_id, "card_id": c}
                    for operator_id, c in placed
                ],
            )
            done = {
                "state": "done",
                "started_at_s": item["created_at_s"],
                "ended_at_s": item["created_at_s"] + 1,
            }
            done |= {"published_at_s": item["created_at_s"]}
            session.execute(
                insert(tables.Item),
                [
                    {
                        **item,
                        **done,
                        "subject_id": operator_id,
                        "card_id": c,
                        "reading_id": f"r{operator_id}",
                    }
                    for operator_id, c in placed
                ],
            )
    if finished:
        with database.write() as session:
            failed = update(tables.Item).where(col(tables.Item.id) == item_id)
            session.execute(failed.values(state="failed", reason="hung"))
        if judged:
            closing.close_round(database, job_id, 1)
    return job_id


def _operators(database: Database, name: str, start: int, end: int) -> list[str]:
    parameters = {
        "in_channels": 64,
        "out_channels": 64,
        "kernel_size": [3, 3],
        "stride": [1, 1],
        "padding": [1, 1],
    }
    tensors = [
        {"role": "activation", "shape": [1, 64, 56, 56], "dtype": "float32", "storage": 0}
    ] * 3
    rows = [
        {
            "id": f"{name}-{index}",
            "schema_version": 1,
            "name": "torch.nn.Conv2d",
            "short_name": "Conv2d",
            "kind": "module",
            "label": f"Conv2d 64→64 k3 {name} {index}",
            "flops": 10**9,
            "bytes_moved": 10**6,
            "parameters": parameters,
            "spec": {"parameters": parameters, "tensors": tensors},
        }
        for index in range(start, end)
    ]
    with database.write() as session:
        session.execute(insert(tables.Operator), rows)
    return [str(row["id"]) for row in rows]


def look(number: int, postgres: bool, plans: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"items": number}
    with fresh_database(postgres) as database:
        large, small, waiting = fill(database, number)
        questions: dict[str, Callable[[Any], Any]] = {
            "status": lambda session: jobs.progress(session, waiting),
            "jobs": lambda session: listing.jobs(session, 20),
            f"report of {LARGE}": lambda session: report.build(session, large).to_json(),
            "report of 200": lambda session: report.build(session, small).to_json(),
            "doctor": lambda session: list(card_checks(session, Settings())),
            "cards": lambda session: listing.registered_cards(session, 5.0),
        }
        for name, ask in questions.items():
            if plans:
                _explain(database, name, ask)
            took_s, worked_s = [], []
            for _ in range(4):
                began_s, worked_before_s = time.perf_counter(), time.process_time()
                with database.read() as session:
                    ask(session)
                took_s.append(time.perf_counter() - began_s)
                worked_s.append(time.process_time() - worked_before_s)
            figures = {
                "cold_s": took_s[0],
                "warm_s": min(took_s[1:]),
                "warm_cpu_s": min(worked_s[1:]),
            }
            found[name] = {figure: round(value, 3) for figure, value in figures.items()}
    return found


def judge(number: int, postgres: bool, cards: int) -> dict[str, Any]:
    with fresh_database(postgres) as database:
        job_id = _job(database, register(database, *range(cards)), number, "large", judged=False)
        with database.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
        found: dict[str, Any] = {
            "items": number,
            "on_cards": cards,
            "database_mib": _size_mib(database),
        }
        for what in (
            "close",
            "report",
        ):  # each in its own process, whose memory is that of the action
            command = [
                sys.executable,
                __file__,
                what,
                "--url",
                database.url.render_as_string(hide_password=False),
            ]
            found |= json.loads(
                subprocess.run(
                    [*command, "--job", job_id], check=True, stdout=subprocess.PIPE
                ).stdout
            )
    return found


def act(what: str, url: str, job_id: str) -> dict[str, Any]:
    """Run the callback of a job's chords, which closes its first round, or report the job."""
    os.environ["FARM_DATABASE_URL"] = url
    settings.cache_clear()
    from tasks import control

    database = control.database()

    def action() -> None:
        if what == "close":
            found[what]["closing"] = control.aggregate(f"{job_id}/1")["closing"]
            return
        with database.read() as session:
            built = report.build(session, job_id)
        found[what] |= {
            "tuples": len(built.tuples),
            "of": built.verdict.parts,
            "json_mib": len(json.dumps(built.to_json())) >> 20,
        }

    found: dict[str, Any] = {what: {}}
    found[what] |= _slowest(database, what, action)[what]
    return {
        what: found[what] | {"cpu_s": round(time.process_time(), 1), "largest_mib": _peak_mib()}
    }


def _explain(database: Database, name: str, ask: Callable[[Any], Any]) -> None:
    """Print the query plan of each statement of a query."""
    asked: dict[str, Any] = {}

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.setdefault(statement, parameters)

    event.listen(database.engine, "before_cursor_execute", note)
    with database.read() as session:
        ask(session)
    event.remove(database.engine, "before_cursor_execute", note)
    how = "EXPLAIN QUERY PLAN " if database.engine.dialect.name == "sqlite" else "EXPLAIN ANALYZE "
    with database.engine.connect() as connection:
        for statement, parameters in asked.items():
            if not statement.lstrip().upper().startswith("SELECT"):
                continue
            print(f"-- {name}: {' '.join(statement.split())[:400]}")
            for row in connection.exec_driver_sql(how + statement, parameters):
                print("   ", row[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=("submit", "ask", "begin", "look", "judge", "close", "report")
    )
    parser.add_argument("--items", type=int, default=20000)
    parser.add_argument(
        "--cards", type=int, default=1, help="number of simulated cards of `submit`"
    )
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--url", help="the database of `close` and `report`")
    parser.add_argument("--job", help="the job of `close` and `report`")
    options = parser.parse_args()
    if options.what == "submit":
        print(json.dumps(submit(options.items, options.postgres, options.cards), indent=2))
    elif options.what == "ask":
        print(
            json.dumps(
                ask(options.items, options.postgres, options.cards, options.report), indent=2
            )
        )
    elif options.what == "judge":
        print(json.dumps(judge(options.items, options.postgres, options.cards), indent=2))
    elif options.what in ("close", "report"):
        print(json.dumps(act(options.what, options.url, options.job), indent=2))
    elif options.what == "begin":
        print(json.dumps(begin(options.items, options.postgres), indent=2))
    else:
        print(json.dumps(look(options.items, options.postgres, options.plans), indent=2))


if __name__ == "__main__":
    main()
