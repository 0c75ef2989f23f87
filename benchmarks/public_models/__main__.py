"""Capture public models as a user does, and tell what became of each.

    python -m pip install --constraint constraints.txt -r benchmarks/public_models/requirements.txt
    python -m benchmarks.public_models outcome.jsonl                    # all models, forward passes
    python -m benchmarks.public_models outcome.jsonl --step training
    python -m benchmarks.public_models outcome.jsonl --models torch_cond vit_navit

Each model is captured in a process of its own by ``farm operators models.py:NAME --json``. The
FLOPs of a forward pass are compared with those that PyTorch's `FlopCounterMode` counts in a run.
Outcomes are appended to the file as they come; a model that the file has is not tried again."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models.py"
TIME_LIMIT_S = 300
#: Counts the FLOPs of one run, in a process of its own. PyTorch's counter knows neither the fused
#: attention of CPUs nor grouped products.
COUNT = """
import sys
sys.path.insert(0, {folder!r})
import models, torch
from torch.utils import flop_counter

aten = torch.ops.aten

def attention(query, key, value, *others, out_shape=None, **named):
    return flop_counter.sdpa_flop_count(query, key, value)

def grouped_product(left, right, *others, out_shape=None, **named):
    return 2 * left[-2] * left[-1] * right[-1]

torch.manual_seed(0)
model, *inputs = models.{name}()
given = inputs[0] if inputs else ()
positional, named = (given, {{}}) if not isinstance(given, dict) else ((), given)
if len(positional) == 2 and isinstance(positional[0], tuple) and isinstance(positional[1], dict):
    positional, named = positional
mapping = {{
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._grouped_mm: grouped_product,
}}
with torch.no_grad(), flop_counter.FlopCounterMode(display=False, custom_mapping=mapping) as counter:
    model(*positional, **named)
print("FLOPS", counter.get_total_flops())
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON lines with the outcomes")
    parser.add_argument("--step", choices=["forward", "training"], default="forward")
    parser.add_argument("--models", nargs="+", help="only these models")
    options = parser.parse_args()

    tried = {(row["model"], row["step"]) for row in rows_of(options.file)}
    for name in options.models or model_names():
        if (name, options.step) in tried:
            continue
        row = outcome(name, options.step)
        with options.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['outcome']:10} {name:32} {row.get('reason', '')[:120]}", flush=True)
    print_totals(rows_of(options.file))


def model_names() -> list[str]:
    """The names of the functions of models.py that return a model, in their order."""
    sys.path.insert(0, str(MODELS.parent))
    import models

    return [
        name
        for name, function in vars(models).items()
        if inspect.isfunction(function)
        and function.__module__ == "models"
        and inspect.signature(function).return_annotation == "Any"
        and not inspect.signature(function).parameters
    ]


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def outcome(name: str, step: str) -> dict[str, Any]:
    """What becomes of one model: captured, differs (in FLOPs), partial, refused or failed."""
    command = ["operators", f"{MODELS}:{name}", "--json"]
    if step == "training":
        command += ["--step", "training"]
    begin = time.monotonic()
    try:
        process = run("-m", "cli", *command)
    except subprocess.TimeoutExpired:
        reason = f"no end after {TIME_LIMIT_S} s"
        return {"model": name, "step": step, "outcome": "failed", "reason": reason}
    row: dict[str, Any] = {"model": name, "step": step, "seconds": time.monotonic() - begin}

    if process.returncode != 0:
        reason = error_of(process.stderr)
        failed = "bug in farm" in reason or "Traceback" in process.stderr
        return row | {"outcome": "failed" if failed else "refused", "reason": reason}

    capture = json.loads(process.stdout)
    row |= {key: capture[key] for key in ("calls", "tuples", "flops")}
    if capture["gaps"] or capture["mismatches"]:
        reasons = [*map(str, capture["gaps"]), *capture["mismatches"].values()]
        return row | {"outcome": "partial", "reason": "; ".join(sorted(set(reasons)))}
    if step == "forward":
        counted = counted_flops(name)
        row["counted_flops"] = counted
        if counted is None:
            return row | {"outcome": "captured", "reason": "PyTorch's counter raises"}
        if counted != capture["flops"]:
            reason = f"{capture['flops']:,} FLOP, PyTorch counts {counted:,}"
            return row | {"outcome": "differs", "reason": reason}
    return row | {"outcome": "captured"}


def counted_flops(name: str) -> int | None:
    """FLOPs of one run by PyTorch's counter; None if the counter raises."""
    process = run("-c", COUNT.format(folder=str(MODELS.parent), name=name))
    lines = [line for line in process.stdout.splitlines() if line.startswith("FLOPS ")]
    return int(lines[-1].split()[1]) if lines else None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIME_LIMIT_S
    )


def error_of(text: str) -> str:
    """The error message in the output of a command, in one line."""
    lines = [line.strip() for line in text.partition("nanobind:")[0].splitlines()]
    begin = next((n for n, line in enumerate(lines) if line.startswith("error")), 0)
    return " ".join(line for line in lines[begin:] if line)


def print_totals(rows: list[dict[str, Any]]) -> None:
    for step in sorted({row["step"] for row in rows}):
        counts = Counter(row["outcome"] for row in rows if row["step"] == step)
        total = sum(counts.values())
        shares = ", ".join(f"{number} {word}" for word, number in counts.most_common())
        print(f"{step}: {total} models: {shares}")


if __name__ == "__main__":
    main()
