"""Sum against whole over a list of models, on the cards of this host. Prints, and writes, one JSON and one table.

    python benchmarks/card_results.py --plan                       # what there is to read; needs no card
    python benchmarks/card_results.py --budget-s 540 --out docs/results
    python benchmarks/card_results.py resnet18:32:float32 vit_b_16:1:float32

Each variant is read on one card in one go, its tuples and its whole; the variants are spread over the host's cards,
one job each. What is done is in the database (`FARM_STATE_DIR`), so a go that was cut short is continued by the same
command, and the table is made of all that is done so far. Nothing is fitted: a sum is calls times readings.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlmodel import Session, select

from farm import catalog, jobs
from farm.defaults import Wish, by_model, choose_cards, complete
from farm.devices.device import Card, discover
from farm.report.report import Report, build
from farm.request import Request
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
from tasks.embedded import EmbeddedFarm
from tasks.submit import submit

BATCHED = [
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "densenet121",
    "googlenet",
    "inception_v3",
    "regnet_y_400mf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "maxvit_t",
]
HALF = ["convnext_tiny", "vit_b_16", "swin_t", "maxvit_t"]
SINGLE = ["resnet18", "resnet50", "mobilenet_v2", "vit_b_16", "swin_t"]
VARIANTS = (
    [f"{name}:32:float32" for name in BATCHED]
    + [f"{name}:32:bfloat16" for name in HALF]
    + [f"{name}:1:float32" for name in SINGLE]
)
SECONDS_PER_TUPLE = 1.1  # what the plan reckons with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=VARIANTS, metavar="NAME:BATCH:DTYPE")
    parser.add_argument("--plan", action="store_true", help="count tuples and seconds; measure nothing")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="no waiting beyond this; what is open is cancelled"
    )
    parser.add_argument("--card", action="append", help="as in `farm run`")
    parser.add_argument("--data", default=None, help="data policy, as in `farm run`")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    began_s = time.monotonic()
    cards = choose_cards(discover(settings()), options.card or [])
    assert len(by_model(cards)) == 1, "choose cards of one model with --card"
    requests = [_request(text, cards[0].kind, options.data) for text in options.variants]
    sizes = {request.id: _tuples(request) for request in requests} if options.plan else {}
    if options.plan:
        for request in requests:
            print(f"{request.title:40} {sizes[request.id]:5} tuples")
        total = sum(sizes.values())
        print(f"{total} tuples, about {total * SECONDS_PER_TUPLE / len(cards):.0f} s on {len(cards)} card(s)")
        return
    database = Database(settings().database)
    database.upgrade()
    with database.read() as session:
        done = jobs.done_entries(session, requests)
    missing = [request for request in requests if request.id not in done]
    if missing:
        _measure(database, missing, cards, began_s + options.budget_s)
    with database.read() as session:
        reports = [built for request in requests if (built := _newest(session, request)) is not None]
    _write(reports, requests, options.out)


def _request(text: str, card_kind: str, data: str | None) -> Request:
    name, batch, dtype = text.split(":")
    # Strictly the same card: no tuple of a variant comes from another card than its whole.
    wish = Wish(model=name, batch=int(batch), dtype=dtype, reuse="card", data=data)
    return complete(wish, card_kind, target=settings().target)


def _tuples(request: Request) -> int:
    """How many tuples a variant has."""
    from farm.operators.capture import predict

    assert request.variant is not None
    variant = request.variant
    model = catalog.build(variant.model, device="meta", dtype=variant.dtype)
    inputs = catalog.example_inputs(
        variant.model, variant.batch, variant.input_size, dtype=variant.dtype, device="meta"
    )
    return len(predict(model, inputs).tuples)


def _measure(database: Database, requests: Sequence[Request], cards: Sequence[Card], until_s: float) -> None:
    """Spread the variants over the cards, heaviest first, and wait for them."""
    free_at = {card.id: 0 for card in cards}
    with EmbeddedFarm(settings(), cards) as farm:
        submitted: list[str] = []
        for weight, request in sorted(((_tuples(one), one) for one in requests), key=lambda pair: -pair[0]):
            card_id = min(free_at, key=lambda one: free_at[one])
            free_at[card_id] += weight
            one = submit(database, request, [card_id], ready=farm.wait_ready)
            submitted.append(one.job_id)
            print(f"{card_id[:12]} {request.title}: {one.new} to measure, {one.reused} known", flush=True)
        while time.monotonic() < until_s:
            with database.read() as session:
                standing = [jobs.progress(session, job_id) for job_id in submitted]
            if all(one.state != JobState.OPEN for one in standing):
                break
            farm.tend()
            time.sleep(1.0)
        closed, total = sum(one.closed for one in standing), sum(one.total for one in standing)
        print(f"{closed} of {total} items closed", flush=True)


def _newest(session: Session, request: Request) -> Report | None:
    query = select(tables.Job).where(tables.Job.request_id == request.id, tables.Job.state == JobState.DONE)
    found = sorted(session.exec(query), key=lambda job: job.created_at_s)
    return build(session, found[-1].id) if found else None


def _row(report: Report) -> dict[str, Any]:
    verdict, readings = report.verdict, report.readings
    return {
        "variant": report.title,
        "card": report.cards[0].id,
        "calls": sum(row.calls for row in report.tuples),
        "tuples": len(report.tuples),
        "measured": verdict.measured,
        "sum_time_us": verdict.time.total.value,
        "whole_time_us": verdict.time.whole.value if verdict.time.whole else None,
        "gap_time": verdict.time.gap.value if verdict.time.gap else None,
        "sum_energy_mj": verdict.energy.total.value if verdict.energy else None,
        "whole_energy_mj": verdict.energy.whole.value if verdict.energy and verdict.energy.whole else None,
        "gap_energy": verdict.energy.gap.value if verdict.energy and verdict.energy.gap else None,
        "coverage": verdict.coverage,
        "card_time_median_s": readings.card_time_median_s,
        "busy_share": readings.window_time_s / readings.card_time_s if readings.card_time_s else None,
        "operators": "as predicted" if report.verification.get("matches") else "seen on the card",
        "rounds": report.round,
        "flags": dict(verdict.flags),
        "types": [
            {
                "name": row.short_name,
                "calls": row.calls,
                "time_us": row.time_us,
                "energy_mj": row.energy_mj,
                "in_model_us": row.in_model_us,
            }
            for row in report.types
        ],
        "unmeasured": [f"{one.label}: {one.reason}" for one in verdict.unmeasured],
    }


def _write(reports: Sequence[Report], requests: Sequence[Request], folder: Path) -> None:
    rows = [_row(report) for report in reports]
    if not rows:
        print("nothing is done yet")
        return
    card, software = reports[0].cards[0], reports[0].software[0]
    summary = {name: _summary(rows, name) for name in ("gap_time", "gap_energy")}
    cards = Counter(row["card"] for row in rows)
    medians = [row["card_time_median_s"] for row in rows if row["card_time_median_s"]]
    shares = [row["busy_share"] for row in rows if row["busy_share"]]
    head = (
        f"{card.model}, driver {card.driver}; torch {software['torch']}, CUDA {software['cuda']}, "
        f"cuDNN {software['cudnn']}; {reports[0].protocol}; {len(rows)} of {len(requests)} variants on {len(cards)} card(s)"
    )
    names = {card_id: chr(ord("A") + number) for number, card_id in enumerate(sorted(cards))}
    lines = [
        f"# Sum against whole: {card.model}",
        "",
        head + ".",
        "",
        "| variant | card | calls | tuples | time: sum | whole | gap | energy: sum | whole | gap | coverage | s a tuple |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['variant']} | {names[row['card']]} | {row['calls']} | {row['tuples']} "
            f"| {_ms(row['sum_time_us'])} | {_ms(row['whole_time_us'])} | {_percent(row['gap_time'])} "
            f"| {_mj(row['sum_energy_mj'])} | {_mj(row['whole_energy_mj'])} | {_percent(row['gap_energy'])} "
            f"| {(row['coverage'] or 0):.1%} | {row['card_time_median_s'] or 0:.2f} |"
        )
    lines += ["", *(f"- absolute {name.replace('_', ' in ')}: {text}" for name, text in summary.items())]
    if medians and shares:
        lines.append(
            f"- card time a reading: median of the variants' medians {statistics.median(medians):.2f} s; "
            f"{statistics.median(shares):.0%} of it inside warm-ups, windows and bursts"
        )
    lines += [f"- card {letter}: {card_id}" for card_id, letter in names.items()]
    unmeasured = defaultdict(list)
    for row in rows:
        for one in row["unmeasured"]:
            unmeasured[row["variant"]].append(one)
    lines += [f"- not measured in {variant}: {'; '.join(which)}" for variant, which in unmeasured.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{card.model.replace(' ', '-').lower()}-{datetime.date.today().isoformat()}"
    (folder / f"{stem}.md").write_text(text)
    data = {
        "card_model": card.model,
        "driver": card.driver,
        "software": software,
        "rows": rows,
        "protocol": reports[0].protocol.to_json(),
    }
    (folder / f"{stem}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(f"written: {folder / stem}.md, .json")


def _summary(rows: Sequence[dict[str, Any]], name: str) -> str:
    gaps = sorted(abs(row[name]) for row in rows if row[name] is not None)
    if not gaps:
        return "not available"
    return f"median {statistics.median(gaps):.1%}, largest {gaps[-1]:.1%}, {sum(gap <= 0.03 for gap in gaps)} of {len(gaps)} within 3 %"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e3:.3f} ms"


def _mj(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} mJ"


if __name__ == "__main__":
    main()
