"""Measure the duration of queries in a database of many readings, and of an export of all readings.

    python benchmarks/million.py --readings 1000000
    python benchmarks/million.py --readings 1000000 --postgres --plans

The readings are synthetic, for the real tuples of models at several batches and dtypes: each tuple
on cards of two models, under several software versions and protocols. Prints the duration of each
repeated query (`cold` is the first one), and the duration and memory of an export of all readings
to Parquet. `--plans` prints the database's query plans."""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from sqlalchemy import func, insert, literal, select, text

from benchmarks.scale import _explain, fresh_database
from farm.addons.predict.estimating import estimate
from farm.exchange.export import export
from farm.jobs import listing
from farm.report.compare import compare
from farm.report.lookup import lookup
from farm.store import content, tables
from farm.store.database import Database
from farm.store.query import parse
from farm.types.protocol import Protocol
from farm.types.variant import Variant
from tests.report import filled

MODELS = ("resnet50", "mobilenet_v2", "densenet121", "efficientnet_b0")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def fill(database: Database, number: int) -> int:
    """Store readings of real tuples, copied over cards, software, protocols and days; return the
    number of tuples.
    """
    for model in MODELS:
        for batch in BATCHES:
            filled.fill(database, Variant(model, batch, 224))
    cards = [("GPU-0", "NVIDIA H200"), ("GPU-1", "NVIDIA H200"), ("GPU-2", "NVIDIA H100 80GB HBM3")]
    software = [
        dataclasses.replace(filled.SOFTWARE, torch=f"2.{minor}.0") for minor in (11, 12, 13)
    ]
    protocols = [Protocol(data=data) for data in ("normal", "zeros-50+", "zeros-0+")] + [
        Protocol(launch="eager")
    ]
    with database.write() as session:
        for one in software:
            content.store_software(session, one)
        for protocol in protocols:
            content.store_protocol(session, protocol)
        added = [
            {
                "id": id_,
                "kind": "cuda",
                "model": model,
                "memory_bytes": 10**11,
                "capabilities": [],
                "fingerprint": {},
            }
            for id_, model in cards
        ]
        content.insert_new(session, tables.CardRow, added)
        rows = session.execute(select(tables.ReadingRow.__table__))  # type: ignore[attr-defined]
        like = [dict(row._mapping) for row in rows]
    circumstances = [
        (card, one, protocol) for card in cards for one in software for protocol in protocols
    ]
    own = tables.ReadingRow.__table__.c  # type: ignore[attr-defined]
    made, copies = len(like), 0
    # Copy inside the database: the first eight digits of an id distinguish the copies.
    while made < number:
        (card_id, model), one, protocol = circumstances[copies % len(circumstances)]
        copies += 1
        factor = 1 + 0.001 * (copies % len(circumstances)) + 0.00001 * copies
        changed = {
            "id": literal(f"{copies:08x}") + func.substr(own.id, 9),
            "card_id": literal(card_id),
            "card_model": literal(model),
            "software_id": literal(one.id),
            "protocol_id": literal(protocol.id),
            "time_us": own.time_us * factor,
            "energy_mj": own.energy_mj * factor,
            "created_at_s": own.created_at_s + 3600.0 * copies,
        }
        columns = [changed.get(column.name, column) for column in own]
        first = (
            select(*columns).where(own.id.like("00000000%")).order_by(own.id).limit(number - made)
        )
        with database.write() as session:
            session.execute(
                insert(tables.ReadingRow).from_select([column.name for column in own], first)
            )
        made += len(like)
    with database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(
            text("ANALYZE" if database.engine.dialect.name == "sqlite" else "VACUUM ANALYZE")
        )
    return len(like)


def ask(number: int, postgres: bool, plans: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"readings": number, "database": "PostgreSQL" if postgres else "SQLite"}
    with fresh_database(postgres) as database:
        began_s = time.perf_counter()
        found["tuples"] = fill(database, number)
        found["filled_s"] = round(time.perf_counter() - began_s, 1)
        resnet50 = Variant("resnet50", 32, 224)
        h200 = "card=H200 launch=graph torch=2.13"
        questions: dict[str, Callable[[Any], Any]] = {
            "jobs": lambda session: listing.jobs(session, 50),
            "lookup one tuple": lambda session: lookup(
                session,
                parse(["Conv2d", "in_channels=64", "kernel_size=3", "shape=32x64x56x56"], ["H200"]),
                sort="energy",
            ),
            "lookup Conv2d": lambda session: lookup(
                session, parse(["Conv2d"], ["H200"]), sort="energy"
            ),
            "lookup torch": lambda session: lookup(session, parse(["torch=2.12", "time_us>100"])),
            "estimate resnet50": lambda session: estimate(
                session, resnet50, "NVIDIA H200", Protocol()
            ),
            "compare software": lambda session: compare(
                session, h200, "card=H200 launch=graph torch=2.12"
            ),
            "compare Conv2d": lambda session: compare(
                session, f"Conv2d {h200}", "Conv2d card=H100 launch=graph torch=2.13"
            ),
        }
        for name, question in questions.items():
            if plans:
                _explain(database, name, question)
            took_s = []
            for _ in range(4):
                began_s = time.perf_counter()
                with database.read() as session:
                    question(session)
                took_s.append(time.perf_counter() - began_s)
            found[name] = {"cold_s": round(took_s[0], 3), "warm_s": round(min(took_s[1:]), 3)}
            print(json.dumps({name: found[name]}), flush=True)
        url = database.url.render_as_string(hide_password=False)
        found["export"] = json.loads(
            subprocess.run(
                [sys.executable, __file__, "--export", url],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    return found


def export_all(url: str) -> dict[str, Any]:
    """Export all readings in a separate process, whose memory is that of the export."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        with Database(url).read() as session:
            written = export(session, Path(folder) / "readings.parquet")
        path, rows = written.files["readings"]
        return {
            "rows": rows,
            "took_s": round(time.perf_counter() - began_s, 1),
            "file_mib": path.stat().st_size >> 20,
            "largest_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readings", type=int, default=1_000_000)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument(
        "--export", metavar="URL", help="export this database and print duration and memory"
    )
    options = parser.parse_args()
    if options.export:
        print(json.dumps(export_all(options.export)))
    else:
        print(json.dumps(ask(options.readings, options.postgres, options.plans), indent=2))


if __name__ == "__main__":
    main()
