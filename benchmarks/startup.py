"""Measure how fast the command line answers, and check that commands without need of torch do not
import it.

    python benchmarks/startup.py

Times are the best of several new interpreters; the ratios matter. The target is 3 for `farm
--help`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

REPEATS = 15
#: Commands that need no torch, after `farm db upgrade` on an empty state directory.
TORCH_FREE = (
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["models", "resnet"],
    ["jobs"],
    ["status"],
    ["cards"],
    ["settings"],
    ["db", "significant"],
    ["db", "check"],
)
_WITNESS = (
    "import sys, cli.main\n"
    "try:\n"
    "    cli.main.main()\n"
    "finally:\n"
    "    print('TORCH' if 'torch' in sys.modules else 'NO TORCH', file=sys.stderr)\n"
)


def best_s(arguments: list[str]) -> float:
    """Return the wall time of a new interpreter in seconds, the best of several."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> int:
    failures = 0
    with tempfile.TemporaryDirectory() as state_dir:
        os.environ["FARM_STATE_DIR"] = state_dir
        os.environ["FARM_LOCK_DIR"] = state_dir
        subprocess.run(
            [sys.executable, "-m", "cli", "db", "upgrade"], check=True, stdout=subprocess.DEVNULL
        )
        reference_s = best_s(["-c", "import typer"])
        print(f"{'import typer':<20} {reference_s * 1e3:6.0f} ms   1.0 x")
        for arguments in TORCH_FREE:
            taken_s = best_s(["-m", "cli", *arguments])
            done = subprocess.run(
                [sys.executable, "-c", _WITNESS, *arguments], capture_output=True, text=True
            )
            clean = done.stderr.strip().splitlines()[-1] == "NO TORCH"
            ratio = taken_s / reference_s
            failures += not clean or (arguments == ["--help"] and ratio > 3)
            print(
                f"{'farm ' + ' '.join(arguments):<20} {taken_s * 1e3:6.0f} ms {ratio:5.1f} x"
                f"   {'no torch' if clean else 'IMPORTS TORCH'}"
            )
    print("ok" if not failures else f"{failures} beyond the target")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
