"""Capture every model of transformers, without a card, and write the table of
docs/results/architectures.md.

    python benchmarks/architectures.py                     # all models that the state file does not
    have yet python benchmarks/architectures.py gpt2 bert-base      # these models, again python
    benchmarks/architectures.py --again             # all models, again

Batch 1, as on a GPU. The table has calls, tuples, seconds, whether the FLOPs of the tuples equal
those of PyTorch's counter over the whole model, gaps and overlaps, or the reason for a refusal.
Each architecture has one size, the first of the catalog, in each of its phases. The state file has
JSON lines, one per variant; an interrupted run continues from it. A model that exceeds the time
limit is ended and listed as such."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from farm.models import catalog, transformers
from farm.types.variant import Variant

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "results" / "architectures.md"
STATE = TABLE.with_suffix(".jsonl")
MODELS = json.loads(Path(transformers.__file__).with_name("transformers.json").read_text())


def class_name(name: str) -> str:
    """The class name of a model. Models of one class are sizes of one architecture."""
    return MODELS[name.rpartition("/")[2]]["class"]


def variants(names: list[str]) -> list[Variant]:
    """The variants of one size per architecture, or of the given models: each phase, decoders in
    bfloat16.
    """
    classes: dict[str, str] = {}
    for name in transformers.Transformers().entries():
        classes.setdefault(class_name(name), name)
    entries = [catalog.find(f"transformers/{name}") for name in names or classes.values()]
    return [
        catalog.variant(
            entry.name, phase=phase or None, dtype="bfloat16" if entry.generates else "float32"
        )
        for entry in entries
        for phase in entry.phases or ("",)
    ]


def extract_in_process(variant: Variant) -> dict[str, Any]:
    """Capture a variant and return its row of the table."""
    from farm.errors import FarmError
    from farm.training.extract import extract

    begun = time.perf_counter()
    try:
        apart = extract(variant, device_type="cuda")
    except FarmError as error:
        return {"reason": error.message}
    taken, refusal = apart.capture, apart.refusal(variant.model)
    return {
        "calls": len(taken.calls),
        "tuples": len(taken.tuples),
        "seconds": round(time.perf_counter() - begun, 2),
        "flops": apart.flops,
        "equal": apart.flops == apart.model_flops,
        "gaps": len(taken.gaps),
        "overlaps": len(taken.overlaps),
        "reason": refusal.message if refusal else "",
    }


def serve(pipe: Connection) -> None:
    """Capture every variant received, until None arrives."""
    extract_in_process(
        catalog.variant("transformers/bert-base", layers=1)
    )  # exclude imports from the times
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        pipe.send(extract_in_process(Variant.from_json(asked)))


class Worker:
    """A process that captures models and can be ended, so that a hang or a lack of memory costs one
    row only.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def ask(self, variant: Variant, limit_s: float) -> dict[str, Any] | None:
        """Return the row; None if the time limit passed and the process was ended."""
        self.pipe.send(variant.to_json())
        try:
            if self.pipe.poll(limit_s):
                return self.pipe.recv()
            found = None
        except EOFError:
            found = {"reason": "the process ended"}
        self.process.kill()
        self.process.join()
        return found


def table(rows: dict[str, dict[str, Any]]) -> str:
    import torch
    from transformers import __version__

    done = [row for row in rows.values() if not row["reason"]]
    architectures = {row["class"] for row in done}
    lines = [
        "# Architectures of transformers, captured without a card",
        "",
        "`python benchmarks/architectures.py` captured one model of each architecture on the meta "
        "device, with the "
        "operators of a GPU and batch 1.",
        f"The software was transformers {__version__} and torch "
        f"{torch.__version__.partition('+')[0]}.",
        "",
        f"- {len(architectures)} of {len({row['class'] for row in rows.values()})} architectures "
        "were captured "
        "completely.",
        f"- For {sum(row['equal'] for row in done)} of {len(done)} variants, the FLOPs of the "
        "tuples equal those of "
        "PyTorch's own counter for the whole model.",
        "",
        "A *gap* is an aten operator that belongs to no call. An *overlap* is one that belongs to "
        "two.",
        "",
        "| variant | class | calls | tuples | capture, s | FLOP | equal to PyTorch's count | gaps "
        "| overlaps |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    lines += [
        f"| {row['title']} | {row['class']} | {row['calls']} | {row['tuples']} | {row['seconds']} "
        f"| {row['flops']:.3g} "
        f"| {'yes' if row['equal'] else 'no'} | {row['gaps']} | {row['overlaps']} |"
        for row in done
    ]
    if refused := [row for row in rows.values() if row["reason"]]:
        lines += ["", "Not captured:", "", "| variant | class | reason |", "| --- | --- | --- |"]
        lines += [
            f"| {row['title']} | {row['class']} | {' '.join(row['reason'].split())[:300]} |"
            for row in refused
        ]
    absent = [f"{name} ({reason})" for name, reason in transformers._REFUSED.items()]
    lines += ["", f"The catalog knows these models, but cannot build them: {'; '.join(absent)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*")
    parser.add_argument(
        "--again", action="store_true", help="also capture the models in the state file"
    )
    parser.add_argument(
        "--limit", type=float, default=120, help="time limit of a variant in seconds"
    )
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.state.exists():
        rows = {row["id"]: row for row in map(json.loads, options.state.read_text().splitlines())}
    worker: Worker | None = None
    for variant in variants(options.models):
        if variant.id in rows and not (options.again or options.models):
            continue
        worker = worker if worker and worker.process.is_alive() else Worker()
        found = worker.ask(variant, options.limit) or {
            "reason": f"the capture took longer than {options.limit:.0f} s"
        }
        about = {
            "id": variant.id,
            "title": str(variant),
            "variant": variant.to_json(),
            "class": class_name(variant.model),
        }
        rows[variant.id] = about | {"reason": "", **found}
        with options.state.open("a") as file:
            print(json.dumps(rows[variant.id]), file=file)
        print(
            variant,
            found.get("reason")
            or f"{found['calls']} calls, {found['tuples']} tuples, {found['seconds']} s",
        )
    if worker and worker.process.is_alive():
        worker.pipe.send(None)
    wanted = [variant.id for variant in [*variants([]), *variants(options.models)]]
    rows = {id_: rows[id_] for id_ in dict.fromkeys(wanted) if id_ in rows}
    options.state.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    options.table.write_text(table(rows))


if __name__ == "__main__":
    main()
