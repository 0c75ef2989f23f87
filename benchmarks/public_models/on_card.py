"""Measure the models of `card_list.py` end to end on one card: sum of the tuples against the whole.

    python -m benchmarks.public_models.on_card verdicts.jsonl --database public.db --budget-s 480
    python -m benchmarks.public_models.on_card verdicts.jsonl --table      # only print the table
    PUBLIC_MODELS_TINY=1 python -m benchmarks.public_models.on_card try.jsonl --database try.db \
        --card cpu --models transformers_roberta                           # try it without a card

An embedded farm does the work. Up to `OPEN_JOBS` jobs are open at a time, so that the next models
are captured on the CPU while the card measures. With ``--within 0.02`` the interval of a sum's time
is +- 2 %, and windows of tuples are rough: a model takes 10 to 25 s of card time, of which the
whole model and its verification take 5 to 10 s.

The verdict of each model is written to the file (JSON lines) when its job ends. Models that the
file has are not measured again, nor are tuples that have a reading in the database. So the same
command continues after an interruption. After ``--budget-s`` seconds no job begins, and jobs that
are open end without a verdict; their readings stay in the database.

``--wheels`` prints the packages, with the versions of this environment, that a card's host needs
beside PyTorch, torchvision, timm, transformers, torch_geometric, torchdiffeq, e3nn, gpytorch, peft
and the farm. Install them there with ``--no-deps``. A model whose package is missing is a row with
the reason; remove its line from the file to measure it later."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

OPEN_JOBS = 3
MODULE = "benchmarks.public_models.card_list"
ROOT = Path(__file__).parents[2]
MOST_REASONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", help="JSON lines with the verdicts")
    parser.add_argument("--database", type=Path, default=Path("public_models.db"))
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--within", type=float, default=0.02, help="0: precise readings")
    parser.add_argument("--card", help="as for `farm run`; default: the first GPU of this host")
    parser.add_argument("--models", nargs="+", help="only these, in this order")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--wheels", action="store_true", help="only print the packages")
    options = parser.parse_args()

    if options.wheels:
        print("\n".join(wheels()))
        return
    if options.file is None:
        parser.error("the file of the verdicts is missing")
    if not options.table:
        measure(options, time.monotonic() + options.budget_s)
    print_table(rows_of(options.file))


def wheels() -> list[str]:
    from benchmarks.public_models.card_list import WHEELS

    packages = sorted({name for names in WHEELS.values() for name in names})
    return [f"{package}=={metadata.version(package)}" for package in packages]


def model_names() -> list[str]:
    """The names of the functions of the list that return a model, in their order."""
    from benchmarks.public_models import card_list

    return [
        name
        for name, function in vars(card_list).items()
        if inspect.isfunction(function)
        and function.__module__ == MODULE
        and inspect.signature(function).return_annotation == "Any"
        and not inspect.signature(function).parameters
    ]


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def measure(options: argparse.Namespace, until_s: float) -> None:
    os.environ["FARM_DATABASE_URL"] = f"sqlite:///{options.database.resolve()}"
    locations = {name: f"{MODULE}:{name}" for name in model_names()}
    os.environ["FARM_MODELS"] = json.dumps(locations)
    os.environ["FARM_MODELS_PATH"] = str(ROOT)

    from farm.jobs.cards import chosen_own_cards
    from farm.settings import settings
    from farm.store.upgrades import writable_database
    from tasks.embedded import EmbeddedFarm

    settings.cache_clear()
    done = {row["model"] for row in rows_of(options.file)}
    pending = [name for name in options.models or model_names() if name not in done]
    card = chosen_own_cards([options.card or "gpu"], print)[0]
    database = writable_database()
    opened: dict[str, str] = {}  # job -> model
    with EmbeddedFarm(settings(), database, [card]) as farm:
        farm.wait_ready()
        while (pending or opened) and time.monotonic() < until_s:
            if pending and len(opened) < OPEN_JOBS:
                name = pending.pop(0)
                try:
                    opened[opened_job(name, card, database, farm, options.within)] = name
                except Exception as error:  # the other models are measured nevertheless
                    write(options.file, {"model": name, "outcome": "refused", "reason": str(error)})
            farm.tend()
            for job_id in [job_id for job_id in opened if is_closed(database, job_id)]:
                row = {"model": opened.pop(job_id), **row_of(database, job_id)}
                write(options.file, row)
                left_s = until_s - time.monotonic()
                print(f"{line_of(row)}; {left_s:.0f} s left", flush=True)
            time.sleep(0.1)


def opened_job(name: str, card: Any, database: Any, farm: Any, within: float) -> str:
    from farm.requests.partial_request import PartialRequest
    from farm.requests.resolved import resolve
    from tasks.submissions import submit

    precision = within if within and card.is_gpu else None  # a CPU times all tuples in turn
    partial = PartialRequest(model=name, within=precision, reuse="card")
    resolved = resolve(partial, [card], target=0.95, pinned=True)
    plan = submit(database, resolved, farm=farm)
    print(f"{plan.title}: {plan.new} to measure, {plan.reused} measured already", flush=True)
    return plan.job_id


def is_closed(database: Any, job_id: str) -> bool:
    from farm.store import tables

    with database.read() as session:
        return session.get_one(tables.Job, job_id).state != tables.JobState.OPEN


def row_of(database: Any, job_id: str) -> dict[str, Any]:
    """The result of a job. Times are in us, energies in mJ; a gap is sum / whole - 1 with the
    half-width of its 95 % interval."""
    from farm.report import report

    with database.read() as session:
        built = report.build(session, job_id)
    verdict, verification = built.verdict, built.verification
    return {
        "title": built.title,
        "job": job_id,
        "state": built.state,
        "outcome": verdict.outcome,
        "calls": sum(line.count for line in built.tuples),
        "tuples": len(built.tuples),
        "coverage": verdict.coverage,
        "whole_time_us": verdict.time.whole.value if verdict.time.whole else None,
        "sum_time_us": verdict.time.total.value,
        "time_gap": gap_of(verdict.time),
        "energy_gap": gap_of(verdict.energy),
        "card_s": built.readings.card_time_s,
        "rounds": len(built.rounds),
        "differences": list(verification.differences[:MOST_REASONS]),
        "reasons": list(verdict.reasons),
        "unmeasured": [[one.label, one.reason] for one in verdict.unmeasured[:MOST_REASONS]],
        "flags": verdict.flags,
        "software": list(built.software),
        "verdict": verdict.to_json(),
    }


def gap_of(comparison: Any) -> list[float] | None:
    gap = comparison.gap if comparison else None
    return [gap.value, gap.half_width] if gap else None


def write(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row, default=str) + "\n")


def line_of(row: dict[str, Any]) -> str:
    if "title" not in row:
        return f"{row['model']}: {row['outcome']}: {row['reason'][:100]}"
    gaps = []
    for name in ("time", "energy"):
        gap = row[f"{name}_gap"]
        gaps.append(f"{name} {gap[0]:+.1%} +- {gap[1]:.1%}" if gap else f"no gap in {name}")
    return f"{row['model']}: {row['outcome']}, {', '.join(gaps)}, {row['card_s']:.0f} s of the card"


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| model | calls | tuples | whole, ms | gap, time | gap, energy | outcome | card, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for row in rows:
        if "title" not in row:
            print(f"| {row['model']} | | | | | | {row['outcome']}: {row['reason'][:80]} | |")
            continue
        whole = f"{row['whole_time_us'] / 1e3:.2f}" if row["whole_time_us"] else ""
        gaps = []
        for name in ("time", "energy"):
            gap = row[f"{name}_gap"]
            gaps.append(f"{gap[0]:+.1%} ± {gap[1]:.1%}" if gap else "")
        print(
            f"| {row['model']} | {row['calls']} | {row['tuples']} | {whole} | {gaps[0]} | "
            f"{gaps[1]} | {row['outcome']} | {row['card_s']:.0f} |"
        )
    long = [row for row in rows if row.get("time_gap") and row["whole_time_us"] > 1000]
    near = [row for row in long if abs(row["time_gap"][0]) <= 0.03]
    print(f"\n{len(long)} passes above 1 ms, {len(near)} of them within 3 % in time")


if __name__ == "__main__":
    main()
