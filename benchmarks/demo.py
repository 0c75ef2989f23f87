"""Run the demo (`farm run resnet18` on the CPU) several times: its gaps, verdicts and durations.

    python -m benchmarks.demo --runs 10              # half of the runs beside a process that keeps
    one core busy python -m benchmarks.demo --runs 4 --busy 1      # all of them python -m
    benchmarks.demo --runs 4 --slow 2.2    # each max pooling takes 2.2 times as long: 15 % of the
    sum more

Each run has a database of its own. Do not use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.slowed_operator import slowed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--busy", choices=("0", "1", "both"), default="both", help="number of busy processes"
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=1.0,
        help="factor for the time of MaxPool2d outside of the model",
    )
    options = parser.parse_args()
    print("busy  verdict     gap         sum       whole  converged  waited  took")
    outcomes: Counter[tuple[int, str]] = Counter()
    for run in range(options.runs):
        busy = run % 2 if options.busy == "both" else int(options.busy)
        slow = (
            slowed("MaxPool2d", options.slow) if options.slow != 1 else contextlib.nullcontext({})
        )
        with tempfile.TemporaryDirectory() as folder, _busy(busy), slow as environment:
            report, took_s = _demo(folder, environment)
        verdict = report["verdict"]
        outcomes[busy, verdict["outcome"]] += 1
        sum_us, whole_us = verdict["sum_time_us"], verdict["whole_time_us"]
        readings = verdict["measured"] + len(verdict["wholes"])
        converged = readings - verdict["flags"].get("not_converged", 0)
        waited = verdict["flags"].get("busy_host", 0)
        gap = f"{(sum_us / whole_us - 1) * 100:+6.1f} %"
        print(
            f"{busy:4}  {verdict['outcome']:7}  {gap}  {sum_us / 1e3:7.1f} ms  "
            f"{whole_us / 1e3:7.1f} ms  "
            f"{converged:3} of {readings:2}  {waited:6}  {took_s:.0f} s",
            flush=True,
        )
    for (busy, outcome), number in sorted(outcomes.items()):
        print(f"{busy} busy processes: {number} x {outcome}")


def _demo(folder: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], float]:
    """Run the demo with an empty database. Return its report and its duration in s."""
    environment = {
        **os.environ,
        **environment,
        "FARM_DATABASE_URL": f"sqlite:///{folder}/demo.db",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "cli", "run", "resnet18", "--card", "cpu", "--json"]
    begin_s = time.monotonic()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return json.loads(done.stdout)["reports"][0], time.monotonic() - begin_s


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    """Run processes that keep a core busy each."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
