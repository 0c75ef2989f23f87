"""Compile models ahead of their turn: time to the verdicts, with and without it.

    python -m benchmarks.compile_ahead                        # eight variants, about eight minutes
    python -m benchmarks.compile_ahead --card cpu --only 3    # the same on a CPU, with fewer

Both modes measure `compile_ahead.yml`, each with a database and an empty compiler's cache of its
own: *ahead* with the setting `compile_processes` at half of the cores, *in turn* with 0. A mode ends
after its time limit; then the finished jobs count. The same command with the same folder continues:
its wall time is added.

The output has for each mode the time to the first and to each further verdict, the time in which
the card worked on items, its share of the wall time, and how often models were compiled ahead. The
reference is the card's time for the items when their code was in the cache. During the run, twice a
second, the processes on the card are listed by the driver (NVML) beside the processes that compile:
a compile process without a CUDA context is not on the card and can launch nothing. The worker's log
says for each compilation whether its process has a context."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

FILE = Path(__file__).with_suffix(".yml")
ROOT = Path(__file__).resolve().parent.parent
MODES = ("ahead", "in turn")
PERIOD_S = 0.5
AHEAD = re.compile(r"(\S.*) was compiled ahead in ([\d.]+) s(, with a CUDA context)?")
NOT_AHEAD = re.compile(r"(\S.*) (?:is compiled in its turn|fails: its compiler).*")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("compile-ahead"))
    parser.add_argument("--card", default="0", help="as in `farm run --card`")
    parser.add_argument("--only", type=int, default=0, help="the first variants of the file")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--ahead-s", type=float, default=270.0, help="time limit of the mode ahead")
    parser.add_argument(
        "--turn-s", type=float, default=190.0, help="time limit of the mode in turn"
    )
    half = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--processes", type=int, default=half, help="that compile ahead")
    parser.add_argument("--window", default="0.2", help="of a reading, in seconds")
    options = parser.parse_args()

    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    limits_s = dict(zip(MODES, (options.ahead_s, options.turn_s), strict=True))
    results = {}
    for mode in options.mode or MODES:
        results[mode] = run(options, mode, limits_s[mode])
        file = options.folder / f"{mode.replace(' ', '-')}.json"
        file.write_text(json.dumps(results[mode], indent=1))
        show(mode, results[mode])
    compare(results)


def run(options: argparse.Namespace, mode: str, limit_s: float) -> dict[str, Any]:
    """Measure the file in one mode and return what happened."""
    folder = options.folder / mode.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    content = yaml.safe_load(FILE.read_text())
    if options.only:
        content["measurements"] = content["measurements"][: options.only]
    if options.card == "cpu":
        content = on_cpu(content)
    jobs = folder / "jobs.yml"
    jobs.write_text(yaml.safe_dump(content))
    environment = {
        **os.environ,
        "FARM_DATABASE_URL": f"sqlite:///{folder / 'farm.db'}",
        "FARM_STATE_DIR": str(folder / "state"),
        "FARM_COMPILER_CACHE_DIR": str(folder / "cache"),
        "FARM_COMPILE_PROCESSES": str(options.processes if mode == "ahead" else 0),
    }
    command = [sys.executable, "-m", "cli", "run", "-f", str(jobs), "--card", options.card]
    command += ["--quick", "--window", options.window]

    before = timeline(folder)
    earlier_s = before["wall_s"] if before else 0.0
    logs: dict[str, str] = {}
    samples: list[dict[str, Any]] = []
    began_s, began_at_s = time.monotonic(), time.time()
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
        )
        with Sampling(process.pid, samples, logs):
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    wall_s = time.monotonic() - began_s
    found = read(folder / "farm.db", began_at_s, earlier_s)
    text = "\n".join(logs.values())
    events = [match.groups() for match in AHEAD.finditer(text)]
    found["verdicts"] = (before["verdicts"] if before else []) + found["verdicts"]
    found |= {
        "wall_s": round(earlier_s + wall_s, 1),
        "complete": process.returncode == 0,
        "compiled_ahead": [
            {"variant": name.rpartition("  ")[2], "took_s": float(took_s), "context": bool(context)}
            for name, took_s, context in events
        ],
        "not_compiled_ahead": [match.group(0)[-300:] for match in NOT_AHEAD.finditer(text)],
        "samples": len(samples),
        "most_compile_processes": max((one["compiling"] for one in samples), default=0),
        "most_processes_on_card": max((one["on_card"] for one in samples), default=0),
        "compile_processes_on_card": sorted({pid for one in samples for pid in one["both"]}),
    }
    (folder / "timeline.json").write_text(json.dumps(found))
    (folder / "worker.log").write_text(text)
    return found


def on_cpu(content: dict[str, Any]) -> dict[str, Any]:
    """The same models, small enough for a CPU."""
    content["defaults"]["dtype"] = "float32"
    for entry in content["measurements"]:
        entry["batch"] = 1
        if "layers" in entry:
            entry["layers"] = 1
        if "length" in entry:
            entry["length"] = 16
        if "cache" in entry:
            entry["cache"] = 64
    return content


def timeline(folder: Path) -> dict[str, Any] | None:
    """What an earlier run of the same folder found."""
    file = folder / "timeline.json"
    return json.loads(file.read_text()) if file.exists() else None


class Sampling:
    """Within the block, list the processes on the card and the compile processes, twice a second,
    and keep the logs of the workers, which are deleted with the farm."""

    def __init__(self, pid: int, samples: list[dict[str, Any]], logs: dict[str, str]) -> None:
        self.pid, self.samples, self.logs = pid, samples, logs
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(10)

    def run(self) -> None:
        smi = shutil.which("nvidia-smi")
        while not self.ended.wait(PERIOD_S):
            compiling: set[int] = set()
            for process in children(self.pid):
                try:
                    line, variables = process.cmdline(), process.environ()
                except psutil.Error:
                    continue
                if "--verifier" in line and "TORCHINDUCTOR_COMPILE_THREADS" in variables:
                    compiling.add(process.pid)
                if folder := variables.get("TMPDIR", ""):
                    for log in Path(folder, "logs").glob("*.log"):
                        self.logs[log.name] = log.read_text(errors="replace")
            on_card = processes_on_card(smi) if smi else set()
            self.samples.append(
                {
                    "compiling": len(compiling),
                    "on_card": len(on_card),
                    "both": sorted(compiling & on_card),
                }
            )


def children(pid: int) -> Iterator[psutil.Process]:
    try:
        yield from psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return


def processes_on_card(smi: str) -> set[int]:
    command = [smi, "--query-compute-apps=pid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return {int(line) for line in listed.stdout.split() if line.isdigit()}


def read(file: Path, began_at_s: float, earlier_s: float) -> dict[str, Any]:
    """The verdicts and the card's time for the items, from the database of a mode."""
    from sqlmodel import col, select

    from farm.store import tables
    from farm.store.database import Database

    database = Database(f"sqlite:///{file}")
    with database.read() as session:
        titles = dict(session.exec(select(tables.Job.id, tables.Job.title)).all())
        verdicts = session.exec(
            select(tables.VerdictRow).where(col(tables.VerdictRow.sum_time_us).is_not(None))
        ).all()
        rows = session.exec(
            select(tables.Item).where(
                col(tables.Item.started_at_s).is_not(None), col(tables.Item.ended_at_s).is_not(None)
            )
        ).all()
    database.close()
    times: dict[str, dict[str, float]] = {}
    for item in rows:
        assert item.started_at_s is not None
        assert item.ended_at_s is not None
        title = titles[item.job_id]
        part = "listing_s" if item.role == "compile" else "items_s"
        entry = times.setdefault(title, {"listing_s": 0.0, "items_s": 0.0})
        entry[part] += 0.0 if item.reused else item.ended_at_s - item.started_at_s
    return {
        "verdicts": [
            {
                "variant": titles[row.job_id],
                "at_s": round(earlier_s + row.created_at_s - began_at_s, 1),
                "outcome": row.outcome,
            }
            for row in sorted(verdicts, key=lambda row: row.created_at_s)
            if row.created_at_s >= began_at_s
        ],
        "items": times,
        "card_s": round(sum(sum(entry.values()) for entry in times.values()), 1),
    }


def show(mode: str, result: dict[str, Any]) -> None:
    first = result["verdicts"][0]["at_s"] if result["verdicts"] else None
    say(f"\n{mode}: {result['wall_s']} s, complete: {result['complete']}")
    say(f"  first verdict after {first} s, {len(result['verdicts'])} verdicts")
    say(f"  card worked on items {result['card_s']} s")
    for verdict in result["verdicts"]:
        times = result["items"][verdict["variant"]]
        say(
            f"  {verdict['at_s']:7.1f} s  {verdict['variant']:58} listing "
            f"{times['listing_s']:5.1f} s, other items {times['items_s']:5.1f} s"
        )
    for entry in result["compiled_ahead"]:
        context = "WITH A CUDA CONTEXT" if entry["context"] else "no CUDA context"
        say(f"  ahead in {entry['took_s']:5.1f} s, {context}: {entry['variant']}")
    for line in result["not_compiled_ahead"]:
        say(f"  {line}")
    say(
        f"  {result['samples']} samples: at most {result['most_compile_processes']} compile "
        f"processes, at most {result['most_processes_on_card']} processes on the card, compile "
        f"processes on the card: {result['compile_processes_on_card'] or 'none'}"
    )


def compare(results: dict[str, dict[str, Any]]) -> None:
    """The wall time of each mode over the card's time for the same items in the mode ahead."""
    if set(results) != set(MODES):
        return
    ahead, turn = results["ahead"], results["in turn"]
    say("\nnumber of verdicts, time ahead, time in turn, card time of their items with code cached")
    pairs = zip(ahead["verdicts"], turn["verdicts"], strict=False)
    for number, (one, other) in enumerate(pairs, start=1):
        titles = [verdict["variant"] for verdict in ahead["verdicts"][:number]]
        card_s = sum(sum(ahead["items"][title].values()) for title in titles)
        say(
            f"  {number}: {one['at_s']:6.1f} s ({one['at_s'] / card_s:4.2f} of the card time), "
            f"{other['at_s']:6.1f} s, {card_s:6.1f} s; in turn / ahead "
            f"{other['at_s'] / one['at_s']:4.2f}"
        )
    say(
        f"  card worked on items in {ahead['card_s'] / ahead['wall_s']:.0%} of the time ahead; wall "
        f"over card time {ahead['wall_s'] / ahead['card_s']:.2f}"
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
