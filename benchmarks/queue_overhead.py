"""Measure the farm's overhead per item: the pause between two items on a busy card, and items per
second.

    python benchmarks/queue_overhead.py --items 5000 --json overhead.json

A job of items that take no time, on one simulated card of a real farm (a broker, a worker, a
benchmark process). The pause is from the end of one item to the start of the next, both on the
database's clock. Also compares the remaining time that `farm status` showed after the first tenth
with the actual one."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from farm.jobs import jobs
from farm.settings import Settings
from tasks.app import configure
from tasks.queues import publish_round
from tasks.servers import BrokerServer
from tests.farms import Farm, running, store_operators
from tests.planned import sweep


def left_after_a_tenth(farm: Farm, job_id: str) -> float:
    with farm.database.read() as session:
        progress = jobs.progress(session, job_id)
    return progress.expected_left_s if progress.closed >= progress.total / 10 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, BrokerServer() as broker:
        url = f"sqlite:///{folder}/farm.db"
        with running(Path(folder), broker.url, url, FARM_RECONCILE_S="5") as farm:
            ids = store_operators(farm.database, [""] * options.items)
            cards = [card.id for card in farm.alive()]
            job_id = jobs.create(farm.database, sweep(len(ids)), cards, operator_ids=ids).job_id
            configure(Settings(broker_url=broker.url))
            began_s = time.monotonic()
            publish_round(farm.database, job_id, 1)
            published_s = time.monotonic() - began_s
            told_s = farm.wait_for(lambda: left_after_a_tenth(farm, job_id), 600)
            told_at_s = time.monotonic()
            farm.wait_for(lambda: farm.ended(job_id), 600)
            whole_s = time.monotonic() - began_s
            left_s = time.monotonic() - told_at_s
            items = sorted(farm.items(job_id), key=lambda item: item.started_at_s or 0.0)
    pauses_ms = [
        1e3 * (after.started_at_s - before.ended_at_s)
        for before, after in itertools.pairwise(items)
        if after.started_at_s and before.ended_at_s
    ]
    work_ms = [
        1e3 * (item.ended_at_s - item.started_at_s)
        for item in items
        if item.ended_at_s and item.started_at_s
    ]
    found = {
        "items": options.items,
        "whole_s": round(whole_s, 2),
        "publishing_s": round(published_s, 2),
        "items_per_s": round(options.items / whole_s, 1),
        "pause_median_ms": round(statistics.median(pauses_ms), 2),
        "pause_95_percent_ms": round(statistics.quantiles(pauses_ms, n=20)[-1], 2),
        "claim_to_end_median_ms": round(statistics.median(work_ms), 2),
        "left_told_after_a_tenth_s": round(told_s, 1),
        "left_then_s": round(left_s, 1),
    }
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
