"""Measure the effect of reuse: the number of saved items and the time to the verdict.

    python benchmarks/reuse.py                         # one CPU is sufficient; takes some minutes
    python benchmarks/reuse.py --first resnet50 --second resnet101 --batch 32 --json reuse.json

On an embedded farm (`farm run`) and through a running one (`farm worker` and `farm submit --wait`),
each with an empty
database: the first model; the same model in another request (`--reuse model`, no measurement file,
so nothing is skipped); then its relative, which measures only new tuples. Windows are short,
because the readings do not matter here."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FARM = (sys.executable, "-m", "cli")
_SAID = re.compile(
    r"job (\w+): .*?, (\d+) calls of (\d+) operator tuples; (\d+) to measure, (\d+) known already"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", default="resnet18")
    parser.add_argument("--second", default="resnet34")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument(
        "--only", choices=("embedded", "running"), help="run only one of the two farms"
    )
    parser.add_argument("--json", type=Path, default=Path("reuse.json"))
    options = parser.parse_args()
    rows = []
    for name, opened in (("embedded", embedded_farm), ("running", running_farm)):
        if options.only in (None, name):
            with (
                tempfile.TemporaryDirectory(prefix="farm-reuse-") as folder,
                opened(Path(folder)) as (verb, known),
            ):
                for model in (options.first, options.first, options.second):
                    rows.append(one(name, model, verb, known, options))
                    options.json.write_text(json.dumps(rows, indent=1))
    show(rows)
    again = [row for row in rows if row["model"] == options.first][1::2]
    return 0 if all(row["new"] == 0 and row["outcome"] is not None for row in again) else 1


@contextmanager
def embedded_farm(folder: Path) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """`farm run` in a separate state directory."""
    yield ("run",), {"FARM_STATE_DIR": str(folder), "FARM_LOCK_DIR": str(folder)}


@contextmanager
def running_farm(folder: Path) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """`farm submit --wait` to a `farm worker` on this host, with a separate broker."""
    from tasks.servers import BrokerServer

    with BrokerServer() as broker:
        known = {
            "FARM_STATE_DIR": str(folder),
            "FARM_LOCK_DIR": str(folder),
            "FARM_BROKER_URL": broker.url,
        }
        environment = {**os.environ, **known}
        subprocess.run(
            [*FARM, "db", "upgrade"],
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with (folder / "worker.log").open("wb") as log:
            worker = subprocess.Popen([*FARM, "worker"], cwd=ROOT, env=environment, stderr=log)
        try:
            _wait_for_cards(environment, worker)
            yield ("submit", "--wait"), known
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)


def _wait_for_cards(
    environment: dict[str, str], worker: subprocess.Popen[bytes], timeout_s: float = 180.0
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        said = subprocess.run(
            [*FARM, "cards", "--json"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if said.returncode == 0 and any(
            c["state"] == "idle" for c in json.loads(said.stdout)["cards"]
        ):
            return
        if worker.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(
                f"The worker did not start:\n{Path(environment['FARM_STATE_DIR'], 'worker.log').read_text()}"
            )
        time.sleep(0.5)


def one(
    farm: str, model: str, verb: Sequence[str], known: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    """Run one command and return its output."""
    words = [
        *FARM,
        *verb,
        model,
        "-b",
        str(options.batch),
        "--input-size",
        str(options.size),
        "--quick",
        "--json",
    ]
    print(f"{farm}: farm {' '.join(words[3:])}", flush=True)
    begin_s = time.monotonic()
    said = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **known}, capture_output=True, text=True
    )
    took_s = time.monotonic() - begin_s
    if said.returncode or not (found := _SAID.search(said.stderr)):
        raise SystemExit(f"It ended with exit code {said.returncode}:\n{said.stderr}")
    (report,) = json.loads(said.stdout)["reports"]
    calls, tuples, new, reused = (int(number) for number in found.groups()[1:])
    return {
        "farm": farm,
        "model": model,
        "calls": calls,
        "tuples": tuples,
        "new": new,
        "reused": reused,
        "took_s": round(took_s, 2),
        "outcome": report["verdict"]["outcome"],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "\n| farm | model | calls | tuples | items known already | items measured | seconds | "
        "verdict |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['farm']} | {row['model']} | {row['calls']} | {row['tuples']} | "
            f"{row['reused']} | {row['new']} "
            f"| {row['took_s']:.1f} | {row['outcome']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
