"""Measure how often the gate `farm compare --run A B --fail-above X%` is wrong: its false alarms
and its misses.

    python -m benchmarks.gate_rates resnet50 --database rates.db                      # on a GPU: a
    threshold of 3 % python -m benchmarks.gate_rates small --database rates.db --card cpu --slower
    1.5 --limits 0.03,0.2 export FARM_MODELS_PATH=. FARM_MODELS="$(python -m benchmarks.gate_rates
    --models)"         # `small`, for a CPU

Three steps, each by `farm compare --run` itself, so an interrupted script continues when the same
command is repeated:

1. `--rounds` paired rounds of the model against itself.
2. As many rounds of the model against itself with one operator type slowed on side B
   (`benchmarks/slowed_operator.py`).
3. `--comparisons` comparisons of the model against itself from end to end, of `--per-comparison`
   rounds each.

From steps 1 and 2 it resamples comparisons in blocks of consecutive rounds, because drift
correlates neighbouring rounds, and applies the gate's rule to each. In step 1, A and B of a block
are exchanged at random: they are the same. It prints the rate of comparisons that fail for each
threshold, with its 95 % interval (Clopper and Pearson). The interval treats resampled comparisons
as independent. A file beside the database has the jobs of each step."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.slowed_operator import slowed

BLOCK = 3  # consecutive rounds that stay together
SCOPE = "time:type"


def small() -> Any:
    """A model of three operator types that a CPU measures in two seconds."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    first, second = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
    net = nn.Sequential(
        first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 32 * 32, 128)
    )
    return net.eval(), torch.randn(4, 16, 32, 32)


def compared(options: argparse.Namespace, rounds: int, **environment: str) -> dict[str, Any]:
    """One `farm compare --run` of the model against itself, as its JSON."""
    card = ["--card", options.card] if options.card else []
    command = [sys.executable, "-m", "cli", "compare", "--run", options.model, options.model, *card]
    command += [
        "--rounds",
        str(rounds),
        "--fail-above",
        str(options.limits[0]),
        "--scope",
        SCOPE,
        "--json",
    ]
    url = f"sqlite:///{options.database.resolve()}"
    done = subprocess.run(
        command,
        env={**os.environ, "FARM_DATABASE_URL": url, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode not in (0, 5):
        sys.exit(
            f"{' '.join(command)} ended with exit code {done.returncode}; repeat the command to "
            "continue"
        )
    return {"failed": done.returncode == 5, **json.loads(done.stdout)}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The results of all steps. Each finished step is in a file beside the database."""
    file = options.database.with_suffix(".steps.json")
    steps: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def step(name: str, rounds: int, **environment: str) -> None:
        if name not in steps:
            print(f"{name}: {rounds} rounds", file=sys.stderr)
            begin_s = time.time()
            found = compared(options, rounds, **environment)
            load = os.getloadavg()[2] / (os.cpu_count() or 1)
            steps[name] = {**found, "load": load, "began_at_s": begin_s, "ended_at_s": time.time()}
            file.write_text(json.dumps(steps, indent=1))

    step("null", options.rounds)
    with slowed(options.type, options.slower, side_b_in=options.database.resolve()) as environment:
        step("slowed", options.rounds, **environment)
    for number in range(1, options.comparisons + 1):
        step(f"comparison {number}", options.per_comparison)
    return steps


def resampled(
    rounds: Sequence[Any], count: int, number: int, *, swap: bool, seed: int = 0
) -> list[list[Any]]:
    """`number` comparisons of `count` rounds in blocks of consecutive rounds; `swap`: exchange A
    and B at random.
    """
    chance, made = random.Random(seed), []
    for _ in range(number):
        found: list[Any] = []
        while len(found) < count:
            begin = chance.randrange(len(rounds) - BLOCK + 1)
            block = rounds[begin : begin + min(BLOCK, count - len(found))]
            found += [exchanged(one) for one in block] if swap and chance.random() < 0.5 else block
        made.append(found)
    return made


def exchanged(values: Mapping[Any, Any]) -> dict[Any, Any]:
    from farm.report.gate import RowValue

    return {key: RowValue(value.b, value.a, value.share) for key, value in values.items()}


def interval(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a rate by Clopper and Pearson."""
    from scipy.stats import beta

    low = beta.ppf(0.025, hits, of - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, of - hits) if hits < of else 1.0
    return float(low), float(high)


def rate(hits: int, of: int) -> str:
    low, high = interval(hits, of)
    return (
        f"{hits} of {of} ({100 * hits / of:.2f} %; 95 % interval {100 * low:.2f} to "
        f"{100 * high:.2f} %)"
    )


def report(options: argparse.Namespace, steps: Mapping[str, Any]) -> None:
    from farm.report.gate import Gate, judge_rounds, round_values
    from farm.store.database import Database

    gate = Gate.parse(str(options.limits[0]), SCOPE)
    with Database(f"sqlite:///{options.database.resolve()}").read() as session:
        rounds = {
            name: [round_values(session, *jobs, gate) for jobs in steps[name]["rounds"]]
            for name in ("null", "slowed")
        }
    print(
        f"{options.model} on {steps['null']['card']}, {options.rounds} rounds, {options.type} x "
        f"{options.slower}"
    )
    for name in rounds:
        minutes = (steps[name]["ended_at_s"] - steps[name]["began_at_s"]) / 60
        print(
            f"{name}: {minutes:.0f} min, load of the last 15 min {steps[name]['load']:.1f} per core"
        )
    for key in rounds["null"][0]:
        for name, values in rounds.items():
            found = [value[key] for value in values if key in value]
            changes = [value.b.value / value.a.value - 1 for value in found]
            spread, middle = statistics.stdev(changes), statistics.median(changes)
            share = statistics.median(value.share for value in found)
            print(
                f"  {key[2]} ({name}): share {share:.1%}, B/A {middle:+.1%} in the median, "
                f"deviation {spread:.1%}"
            )
    count = options.per_comparison
    drawn = {
        name: resampled(rounds[name], count, options.resamples, swap=name == "null")
        for name in rounds
    }
    wanted = (gate.scopes[0][0], "type", options.type)
    for limit in options.limits:
        at = Gate(limit, gate.scopes, gate.min_share)
        alarms = sum(bool(judge_rounds(one, at).findings) for one in drawn["null"])
        found = sum(
            any(
                (row.quantity, row.level, row.name) == wanted
                for row in judge_rounds(one, at).findings
            )
            for one in drawn["slowed"]
        )
        print(f"threshold {limit:.1%}, {count} rounds, {SCOPE}:")
        print(f"  false alarms {rate(alarms, options.resamples)}")
        print(f"  {options.type} found {rate(found, options.resamples)}")
    ended = [entry for name, entry in steps.items() if name.startswith("comparison ")]
    for limit in options.limits if ended else ():
        failed = sum(any(row["low"] > limit for row in entry["gate"]["rows"]) for entry in ended)
        print(f"from end to end at {limit:.1%}: false alarms {rate(failed, len(ended))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the error rates of `farm compare --run`.")
    parser.add_argument(
        "model", nargs="?", help="a model with options of farm run: 'resnet50 -b 32'"
    )
    parser.add_argument(
        "--models", action="store_true", help="print FARM_MODELS with this file's small model"
    )
    parser.add_argument("--database", type=Path, default=Path("gate_rates.db"))
    parser.add_argument("--card", default="")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--per-comparison", type=int, default=6)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--type", default="Conv2d", help="the operator type that is slowed")
    parser.add_argument("--slower", type=float, default=1.05)
    parser.add_argument(
        "--limits", type=lambda text: [float(one) for one in text.split(",")], default=[0.03]
    )
    options = parser.parse_args()
    if options.models:
        print(json.dumps({"small": "benchmarks.gate_rates:small"}))
        return
    if not options.model:
        parser.error("name a model")
    report(options, measured(options))


if __name__ == "__main__":
    main()
