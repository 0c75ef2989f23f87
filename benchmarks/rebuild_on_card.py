"""Check on a card that every rebuilt tuple does the same as the call that it was made from.

    python benchmarks/rebuild_on_card.py --json rebuild_on_card.json        # vit_b_16, swin_t,
    convnext_tiny python benchmarks/rebuild_on_card.py vit_b_16:32:bfloat16 --device cpu

A model is NAME[:BATCH[:DTYPE]]. Each model is captured while it runs on the card; every tuple is
rebuilt from its JSON and run there. The script compares it with the call in the model: aten
operators in order, shapes and strides of the outputs, and on a GPU the names and numbers of the
kernels. All must be equal; the last line counts the differences. Models that are in the JSON file
are not run again."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.protocol import Protocol
from farm.types.variant import Variant

MODELS = [
    f"{name}:32:{dtype}"
    for dtype in ("float32", "bfloat16")
    for name in ("vit_b_16", "swin_t", "convnext_tiny")
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--device", default="")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--json", type=Path, default=Path("rebuild_on_card.json"))
    options = parser.parse_args()
    began_s = time.perf_counter()
    import torch

    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = (
        json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    )
    for text in options.models:
        if any(row["model"] == text for row in rows):
            continue
        if time.perf_counter() - began_s > options.budget_s:
            print(f"budget spent: {text} and what follows is left out")
            break
        rows.append({"model": text, **compare(_variant(text), device)})
        options.json.write_text(
            json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1)
        )
    print(
        f"\n{'model':<28} {'calls':>6} {'tuples':>6} {'gaps':>5} {'observer':>8} "
        f"{'operators':>9} {'kernels':>8} {'s':>6}"
    )
    for row in rows:
        kernels = len(row["kernels"]) if row["kernels"] is not None else "-"
        print(
            f"{row['model']:<28} {row['calls']:>6} {row['tuples']:>6} {len(row['gaps']):>5} "
            f"{len(row['observer_effect']):>8} {len(row['operators']):>9} {kernels:>8} "
            f"{row['took_s']:>6.1f}"
        )
    for row in rows:
        for kind in ("gaps", "observer_effect", "operators", "kernels"):
            for line in (row[kind] or [])[:5]:
                print(f"  {row['model']}, {kind}: {line[:400]}")
    wrong = sum(
        len(row[kind] or [])
        for row in rows
        for kind in ("gaps", "observer_effect", "operators", "kernels")
    )
    print(
        f"mismatches: {wrong} in {sum(row['tuples'] for row in rows)} tuples of {len(rows)} "
        "variants"
    )


def _variant(text: str) -> Variant:
    name, batch, dtype, *_ = [*text.split(":"), "", ""]
    return Variant(name, int(batch or 32), 224, dtype or "float32")


def _kernels_of_calls(run: Any, capture: Any, device: Any) -> dict[str, Counter[str]]:
    """Tuple id -> the kernels that the first call of the tuple launches in the running model. Only
    on a GPU.
    """
    from farm.benchmark.verification import kernels_by_call, profiled_calls

    found: dict[int, Counter[str]] = defaultdict(Counter)
    for number, kernels in kernels_by_call(profiled_calls(run, device, passes=1)):
        found[number].update(name for name, *_ in kernels)
    named: dict[str, Counter[str]] = {}
    for number, index in enumerate(capture.slots):
        if index is not None:
            named.setdefault(capture.calls[index].tuple_id, found[number])
    return named


def _one_pass(model: Any, arguments: Any, device: Any, around: Any) -> None:
    from farm.operators.capture import run_with_owners

    run_with_owners(model, arguments, device_type=device.type, around=around)


def compare(variant: Variant, device: Any) -> dict[str, Any]:
    """Compare the rebuilt tuples of one variant with its calls; return the differences as texts.
    `operators`: aten operators, shapes or strides."""
    import torch
    from replay_tuples import mismatches

    from farm.benchmark.passes import numeric_flags
    from farm.benchmark.subjects.model_variant import build_variant
    from farm.operators.profiler import profiled, verify_on_device
    from farm.operators.rebuild import rebuild

    began_s = time.perf_counter()
    with numeric_flags(Protocol()), torch.no_grad():
        model, arguments = build_variant(variant, device)
        found = verify_on_device(model, arguments, device)
        kernels: list[str] | None = None
        one_pass = functools.partial(_one_pass, model, arguments, device)
        expected = (
            _kernels_of_calls(one_pass, found.capture, device) if device.type == "cuda" else {}
        )
        del model, arguments, one_pass
        different = mismatches(found.capture, device)
        if device.type == "cuda":
            kernels = []
            for tuple_id, spec in found.capture.tuples.items():
                rebuilt = rebuild(parse(json.loads(json.dumps(spec.to_json()))), device)
                rebuilt.run()  # exclude one-time work of cuDNN and cuBLAS
                seen, _ = profiled(rebuilt.run, device)
                if seen != expected[tuple_id]:
                    kernels.append(
                        f"{label_of(spec)}: only in the model {dict(expected[tuple_id] - seen)}, "
                        f"only rebuilt {dict(seen - expected[tuple_id])}"
                    )
                del rebuilt
    return {
        "calls": len(found.capture.calls),
        "tuples": len(found.capture.tuples),
        "gaps": [*found.capture.gaps, *found.capture.overlaps],
        "observer_effect": found.differences,
        "operators": different,
        "kernels": kernels,
        "took_s": round(time.perf_counter() - began_s, 1),
    }


if __name__ == "__main__":
    main()
