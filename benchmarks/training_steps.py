"""Capture training steps without a card, and write the table of docs/results/training-steps.md.

    python benchmarks/training_steps.py                  # all steps that the state file does not
    have yet python benchmarks/training_steps.py resnet50 gpt2    # these models, again

All classification models of torchvision at batch 32, and BERT, GPT-2, T5's encoder, OPT and a
Llama-like decoder at batch 8, each with SGD, Adam and fused AdamW, as a card updates them: calls,
tuples, owners, calls without owner, seconds, the largest memory of the process. Each step is
captured twice; both lists must be equal."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from farm.models import catalog

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "results" / "training-steps.md"
STATE = TABLE.with_suffix(".jsonl")
OPTIMIZERS = ("sgd", "adam", "adamw-fused")
LANGUAGE = {
    "bert-base": {},
    "gpt2": {},
    "t5-base": {"phase": "encode"},
    "opt-125m": {},
    "llama-3.2-1b": {},
}


def steps(name: str) -> list[dict[str, Any]]:
    """Return the rows of one model; run in a separate process, whose memory is part of the rows."""
    from farm.errors import FarmError
    from farm.training.extract import extract_step

    extract_step(
        catalog.variant("squeezenet1_1", 1, step="training")
    )  # exclude imports from the times
    rows = []
    for optimizer in OPTIMIZERS:
        said = {**LANGUAGE.get(name, {}), "step": "training", "optimizer": optimizer}
        variant = catalog.variant(name, 8 if name in LANGUAGE else 32, **said)
        begun_s = time.perf_counter()
        try:
            seen = extract_step(variant, device_type="cuda")
            took_s = time.perf_counter() - begun_s
            again = extract_step(variant, device_type="cuda")
        except FarmError as error:
            rows.append(
                {
                    "model": name,
                    "optimizer": optimizer,
                    "title": str(variant).partition(" training ")[0],
                    "reason": error.message,
                }
            )
            continue
        rows.append(
            {
                "model": name,
                "optimizer": optimizer,
                "title": str(variant).partition(" training ")[0],
                "calls": len(seen.calls),
                "tuples": len(seen.tuples),
                "owners": len(seen.owners),
                "unowned": len(seen.gaps),
                "overlaps": len(seen.overlaps),
                "same": [call.tuple_id for call in seen.calls]
                == [call.tuple_id for call in again.calls],
                "peak_bytes": max(seen.memory_bytes),
                "seconds": round(took_s, 2),
                "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "reason": "",
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    import torch

    done = [row for row in rows if not row["reason"]]
    seconds = sorted(row["seconds"] for row in done)
    slowest = max(done, key=lambda row: row["seconds"])
    lines = [
        "# Training steps, captured without a card",
        "",
        "`python benchmarks/training_steps.py` captured training steps on the meta device with "
        "torch "
        f"{torch.__version__.partition('+')[0]}.",
        "The operators of the forward and backward pass are those of a CPU, and those of the "
        "optimizer are those of a "
        "GPU. So the list is a prediction for a GPU.",
        "",
        f"- {len(done)} of {len(rows)} steps of {len({row['model'] for row in done})} models were "
        "captured. "
        f"{sum(row['unowned'] for row in done)} operators have no owner.",
        "- Each step was captured twice. Both lists are equal for "
        f"{sum(row['same'] for row in done)} of {len(done)} "
        "steps.",
        f"- A capture took {statistics.median(seconds):.1f} s in the median and "
        f"{slowest['seconds']:.1f} s at most "
        f"({slowest['model']} with {slowest['optimizer']}), on two cores that other programs "
        "used, too.",
        f"- The largest process needed {max(row['process_bytes'] for row in done) / 1e9:.1f} GB.",
        "",
        "*Owners* are the modules and functions that the operators belong to, and *unowned* is "
        "the number of operators "
        "without an owner.",
        "*Peak* is the predicted peak of the step's memory, and the last column is the duration "
        "of the capture.",
        "",
        "| variant | optimizer | calls | tuples | owners | unowned | peak | capture, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['title']} | {row['optimizer']} | {row['calls']} | {row['tuples']} | "
        f"{row['owners']} | "
        f"{row['unowned']} "
        f"| {row['peak_bytes'] / 1e9:.2f} GB | {row['seconds']} |"
        for row in done
    ]
    lines += [
        f"| {row['title']} | {row['optimizer']} | {row['reason']} | | | | | |"
        for row in rows
        if row["reason"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*")
    parser.add_argument("--state", type=Path, default=STATE)
    options = parser.parse_args()
    rows = (
        [json.loads(line) for line in options.state.read_text().splitlines()]
        if options.state.exists()
        else []
    )
    wanted = options.models or [*catalog.names("classification", "torchvision"), *LANGUAGE]
    there = set() if options.models else {row["model"] for row in rows}
    context = multiprocessing.get_context("spawn")
    for name in wanted:
        if name in there:
            continue
        with context.Pool(1, maxtasksperchild=1) as pool:
            found = pool.apply(steps, (name,))
        rows = [row for row in rows if row["model"] != name] + found
        options.state.write_text("".join(json.dumps(row) + "\n" for row in rows))
        TABLE.write_text(table(rows))
        for row in found:
            print(
                row["title"],
                row["optimizer"],
                row["reason"] or f"{row['calls']} calls, {row['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
