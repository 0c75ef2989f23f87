"""Write docs/results/public-models.md from the outcomes of a trial.

    python -m benchmarks.public_models.page outcome.jsonl

Several files may be given; the last outcome of a model and step counts. The outcomes are written
beside the page (public-models.jsonl)."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.public_models.__main__ import model_names, rows_of

FOLDER = Path(__file__).parents[2] / "docs" / "results"
PAGE = FOLDER / "public-models.md"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
KEPT = ("model", "step", "outcome", "reason", "calls", "tuples", "flops", "counted_flops", "note")
COMPARED = ("operators", "differences")

OPENING = """# Models of public packages

`python -m benchmarks.public_models` captured {models} models and layers of {packages} public packages: a forward pass, and a training step. The
list (`benchmarks/public_models/models.py`) was committed before the first of them was tried. The sizes are small and the weights random.
`python -m benchmarks.public_models.page` writes this page.

Versions: {versions}. The other versions are in `benchmarks/public_models/requirements.txt`.

{totals}

*Captured*: all operators of the pass have a tuple, and no check found a difference.

- The FLOPs are equal to those that PyTorch's `FlopCounterMode` counts in a run of the model on the CPU. The counter does not know the fused attention of
  CPUs, `_native_multi_head_attention` and `_grouped_mm`; `benchmarks/public_models/plain_run.py` adds their counts, which follow from the shapes.
- The operators of a forward pass, with names, input shapes and numbers of calls, are equal to those that PyTorch's profiler sees in a run of the model without the
  farm. The operators of the tuples come from a run of each rebuilt tuple, multiplied by its number of calls. Views and operators that only make memory do not count.
  The operators of a training step are not compared in this way: a capture without a card has the attention, dropout and optimizer of a GPU.

*Differs*: captured, and a check found a difference. *Partial*: some rows are not measured, and the output of the farm names them. *Refused*: the farm
says why and what to do. Reasons are below the table.

"""


def main() -> None:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for file in map(Path, sys.argv[1:]):
        for row in rows_of(file):
            rows[row["model"], row["step"]] = row
    names = [name for name in model_names() if (name, "forward") in rows]
    outcomes = [
        rows[name, step]
        for name in names
        for step in ("forward", "training")
        if (name, step) in rows
    ]
    PAGE.write_text(page(names, rows))
    lines = []
    for row in outcomes:
        kept = KEPT if row["outcome"] == "captured" else (*KEPT, *COMPARED)
        lines.append(json.dumps({key: row[key] for key in kept if row.get(key) is not None}))
    PAGE.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")


def page(names: list[str], rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = ["| model | calls | tuples | MFLOP | forward pass | training step |"]
    lines.append("| --- | ---: | ---: | ---: | --- | --- |")
    reasons = []
    for name in names:
        forward, training = rows[name, "forward"], rows.get((name, "training"))
        counts = [forward.get("calls", ""), forward.get("tuples", "")]
        flops = f"{forward['flops'] / 1e6:,.3f}" if "flops" in forward else ""
        cells = [f"`{name}`", *counts, flops, forward["outcome"], word_of(training)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        for row in (forward, training):
            if row is not None and row["outcome"] != "captured":
                reasons.append(f"- `{name}`, {row['step']}: {row['outcome']}. {plain(row)}")
    opening = OPENING.format(
        models=len(names),
        packages=len(packages()) + 2,  # with PyTorch and torchvision
        versions=versions(),
        totals=totals(rows),
    )
    return "\n".join([opening + "\n".join(lines), "", "## Reasons", "", *reasons, ""])


def word_of(row: dict[str, Any] | None) -> str:
    return "not tried" if row is None else row["outcome"]


def plain(row: dict[str, Any]) -> str:
    text = row["reason"].replace("\n", " ").replace("|", "/").removeprefix("error: ")
    text = text.replace(f"models:{row['model']}", "the model")
    return text.replace("<", "&lt;").rstrip(".") + "."


def totals(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = []
    for step, what in (("forward", "forward passes"), ("training", "training steps")):
        counts = Counter(row["outcome"] for (_, of), row in rows.items() if of == step)
        total = sum(counts.values())
        shares = ", ".join(f"{number} {word}" for word, number in counts.most_common())
        lines.append(f"- {total} {what}: {shares} ({counts['captured'] / total:.1%} captured).")
    return "\n".join(lines)


def packages() -> list[str]:
    lines = REQUIREMENTS.read_text().splitlines()
    return [line.partition("==")[0] for line in lines if "==" in line]


def versions() -> str:
    names = ("torch", "torchvision", "transformers", "timm")
    told = [f"{name} {metadata.version(name).partition('+')[0]}" for name in names]
    return ", ".join([f"Python {platform.python_version()}", *told])


if __name__ == "__main__":
    main()
