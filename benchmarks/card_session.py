"""Everything that waits for one GPU, in the order of value, in pieces that may be interrupted.

    python -m benchmarks.card_session                      # at most 570 s; repeat until it says "all done"
    python -m benchmarks.card_session --seconds 1700       # in one piece
    python -m benchmarks.card_session --list               # the steps, without a card

1. `farm cards check`, twice (about a minute each): its add-on must be installed (`pip install -e .`).
2. Four layers of llama-3.2-1b in all schemes of quantisation, compiled, at two batches (torchao).
3. The variants of `evaluation_2026_11_29.yml`, then those of `card_session.yml`, within 1 % (about
   45 s each), and the table of predicted and needed card time (`benchmarks/card_time.py`).
4. `benchmarks/compile_ahead.py` in both modes (460 s): time to the verdicts with and without it.
5. `tests/gpu`, one step for each file (310 s on an H200; all passed on one on 2026-11-29).

The folder (default `build/card-session`) keeps the steps that are done, the output of each step and
the databases. The same command continues: a step that the time limit has ended begins again, and
what it has stored is kept (`farm run` measures nothing twice). A failed step is done, too; the last
lines name it. `--copy FOLDER` copies results and databases there at the end, also after an error."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = Path(__file__).with_suffix(".yml")
EVALUATION = Path(__file__).with_name("evaluation_2026_11_29.yml")
QUANTIZED = (
    *("llama-3.2-1b", "--phase", "decode", "--cache", "512", "--layers", "4", "-b", "1,64"),
    *("--dtype", "bfloat16", "--compile", "--quantize", "none,int8-weights,fp8,int4-weights,int8"),
)
#: Time that a step gets to end after SIGINT. Unit: s.
END_S = 25.0
#: A step does not begin with less time than this. Unit: s.
LEAST_S = 20.0


@dataclass(frozen=True)
class Step:
    """A command. Its output is ``name``.txt in the folder."""

    name: str
    command: tuple[str, ...]
    #: True if the command ends within its own limit and must not begin with less time.
    least_s: float = LEAST_S


def steps(folder: Path, card: str) -> list[Step]:
    farm = (sys.executable, "-m", "cli")
    check = (*farm, "cards", "check", "--card", card)
    run = (*farm, "run", "--card", card)
    found = [Step("check-1", (*check, "--json")), Step("check-2", check)]
    found.append(Step("quantized", (*run, *QUANTIZED)))
    found += [
        Step(file.stem, (*run, "-f", str(file), "--within", "1%"))
        for file in (EVALUATION, VARIANTS)
    ]
    time_table = (sys.executable, "-m", "benchmarks.card_time", str(folder / "farm.db"))
    found.append(Step("card-time", time_table, 5.0))

    in_folder = ("--card", card, "--folder", str(folder / "compile-ahead"))
    ahead = (sys.executable, "-m", "benchmarks.compile_ahead", *in_folder)
    for mode, limit, limit_s in (("ahead", "--ahead-s", 270), ("in turn", "--turn-s", 190)):
        command = (*ahead, "--mode", mode, limit, str(limit_s))
        found.append(Step(f"compile-{mode.replace(' ', '-')}", command, limit_s + 2 * END_S))
    found += [
        Step(f"tests-{file.stem}", (sys.executable, "-m", "pytest", "-q", "-rs", str(file)))
        for file in sorted(ROOT.glob("tests/gpu/test_*.py"))
    ]
    return found


class Session:
    """The steps that are done, in ``done.json`` of the folder: name -> exit code and time in s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "done.json"
        text = self.file.read_text() if self.file.exists() else "{}"
        self.done: dict[str, dict[str, float]] = json.loads(text)

    def run(self, step: Step, left_s: float) -> bool:
        """Run a step; False if the time limit has ended it."""
        environment = {
            **os.environ,
            "FARM_DATABASE_URL": f"sqlite:///{self.folder / 'farm.db'}",
            "FARM_STATE_DIR": str(self.folder / "state"),
        }
        if step.name.startswith("tests-"):
            environment = dict(os.environ)
        began_s = time.monotonic()
        with (self.folder / f"{step.name}.txt").open("a") as output:
            process = subprocess.Popen(
                step.command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            is_complete = ends_within(process, left_s - END_S)
        took_s = time.monotonic() - began_s
        if is_complete:
            self.done[step.name] = {"exit_code": process.returncode, "took_s": round(took_s, 1)}
            self.file.write_text(json.dumps(self.done, indent=1))
        say(f"{step.name}: {'exit code ' + str(process.returncode) if is_complete else 'ended'}")
        return is_complete

    def copy(self, target: Path) -> None:
        """Copy results and databases, without caches."""
        skipped = shutil.ignore_patterns("cache", "state", "*.lock", "*.sock")
        shutil.copytree(self.folder, target / self.folder.name, ignore=skipped, dirs_exist_ok=True)


def ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a process; end it and all that it has started after the limit."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def make_steps(session: Session, todo: Sequence[Step], seconds: float) -> bool:
    """Run the steps that are not done; False if the time was not enough."""
    until_s = time.monotonic() + seconds
    for step in todo:
        if step.name in session.done:
            continue
        left_s = until_s - time.monotonic()
        if left_s < step.least_s + END_S:
            say(f"{step.name} needs {step.least_s + END_S:.0f} s, {left_s:.0f} s are left")
            return False
        if not session.run(step, left_s):
            return False
    return True


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "card-session")
    parser.add_argument("--seconds", type=float, default=570.0, help="of this piece")
    parser.add_argument("--card", default="0", help="as in `farm run --card`")
    parser.add_argument("--only", default="", help="steps whose name begins with this")
    parser.add_argument("--copy", type=Path, help="copy the results to this folder at the end")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    todo = [step for step in steps(folder, options.card) if step.name.startswith(options.only)]
    if options.list:
        for step in todo:
            say(f"{step.name}: {' '.join(step.command)}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(folder)
    try:
        is_complete = make_steps(session, todo, options.seconds)
    finally:
        if options.copy is not None:
            session.copy(options.copy)
    failed = [name for name, result in session.done.items() if result["exit_code"]]
    say(f"failed: {', '.join(failed) or 'none'}")
    say("all done" if is_complete else "the same command continues")


if __name__ == "__main__":
    main()
