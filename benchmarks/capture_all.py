"""Capture every model of the catalog and print counts: gaps, overlaps, failures, FLOPs, rebuild
mismatches.

    python benchmarks/capture_all.py                    # torchvision's 80 classification models
    python benchmarks/capture_all.py --tasks classification segmentation video
    python benchmarks/capture_all.py --real cpu         # also run tuples for real (all of
    attention, samples of others)

One process, no GPU needed. All counts use fake tensors; only ``--real`` computes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

from replay_tuples import mismatches

from farm.models import catalog, torchvision
from farm.operators.capture import capture, predict
from farm.operators.captured import CapturedPass
from farm.operators.cost import cost, model_flops

_ATTENTION = ("MultiheadAttention", "scaled_dot_product_attention", "TransformerEncoderLayer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["classification"])
    parser.add_argument("--models", nargs="+", help="only these models")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory-format", default="contiguous")
    parser.add_argument("--mode", default="eval")
    parser.add_argument(
        "--real", metavar="DEVICE", help="run tuples for real on this device, at batch 1"
    )
    parser.add_argument(
        "--every", type=int, default=10, help="with --real: every n-th tuple of the others"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.models or [name for task in options.tasks for name in catalog.names(task)]
    figures = capture_models(names, options)
    if options.real:
        figures |= replay_for_real(names, options)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:32} {value}")


def capture_models(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    torchvision.torchvision_models()  # exclude imports from the times
    variant = {"dtype": options.dtype, "memory_format": options.memory_format}
    figures: dict[str, Any] = {
        "models": 0,
        "calls": 0,
        "tuples_summed": 0,
        "gaps": 0,
        "overlaps": 0,
        "failures": 0,
    }
    captures: dict[str, CapturedPass] = {}
    begun, begun_cpu, build_s = time.perf_counter(), time.process_time(), 0.0
    for name in names:
        try:
            begun_model = time.perf_counter()
            model = catalog.build(catalog.variant(name, mode=options.mode, **variant))
            build_s += time.perf_counter() - begun_model
            captures[name] = predict(model, _inputs(name, options.batch, **variant))
        except Exception as error:  # count every failure
            figures["failures"] += 1
            print(f"{name}: {error}", file=sys.stderr)
    figures["build_s"] = round(build_s, 1)
    figures["capture_s"] = round(time.perf_counter() - begun - build_s, 1)
    figures["cpu_s"] = round(
        time.process_time() - begun_cpu, 1
    )  # minimum of both, for a machine with other load
    figures["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    unique: set[str] = set()
    for name, found in captures.items():
        figures["models"] += 1
        figures["calls"] += len(found.calls)
        figures["tuples_summed"] += len(found.tuples)
        figures["gaps"] += len(found.gaps)
        figures["overlaps"] += len(found.overlaps)
        for text in (*found.gaps, *found.overlaps):
            print(f"{name}: {text}", file=sys.stderr)
        unique |= found.tuples.keys()
    figures["unique_tuples"] = len(unique)
    figures["operators"] = len(
        {spec.operator for found in captures.values() for spec in found.tuples.values()}
    )
    figures["equal_flops"] = 0
    begun = time.perf_counter()
    for name, found in captures.items():
        summed = sum(
            count * cost(found.tuples[tuple_id]).flops for tuple_id, count in found.counts.items()
        )
        whole = model_flops(
            catalog.build(catalog.variant(name, mode=options.mode, **variant)),
            _inputs(name, options.batch, **variant),
        )
        figures["equal_flops"] += summed == whole
        if summed != whole:
            print(f"{name}: {summed} FLOPs summed, {whole} counted over the model", file=sys.stderr)
    figures["flops_s"] = round(time.perf_counter() - begun, 1)
    figures["fake_replays"], figures["fake_mismatches"] = 0, 0
    begun, seen = time.perf_counter(), set[str]()
    for found in captures.values():
        fresh = frozenset(found.tuples.keys() - seen)
        seen |= fresh
        different = mismatches(found, only=fresh)
        figures["fake_replays"] += len(fresh)
        figures["fake_mismatches"] += len(different)
        for text in different:
            print(text, file=sys.stderr)
    figures["replay_s"] = round(time.perf_counter() - begun, 1)
    return figures


def replay_for_real(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Capture each model for real at batch 1, and run every attention tuple and every n-th other
    tuple.
    """
    variant = {"dtype": options.dtype, "memory_format": options.memory_format}
    figures = {"real_replays": 0, "real_mismatches": 0, "real_against_predicted": 0}
    seen: set[str] = set()
    others = 0
    for name in names:
        model = catalog.build(
            catalog.variant(name, mode=options.mode, **variant), device=options.real
        )
        device_type = options.real.split(":")[0]
        found = capture(
            model, _inputs(name, 1, device=options.real, **variant), device_type=device_type
        )
        predicted = predict(
            catalog.build(catalog.variant(name, mode=options.mode, **variant)),
            _inputs(name, 1, **variant),
            device_type=device_type,
        )
        figures["real_against_predicted"] += found.counts != predicted.counts
        chosen = set()
        for tuple_id in found.tuples.keys() - seen:
            attention = found.tuples[tuple_id].short_name in _ATTENTION
            others += not attention
            if attention or others % options.every == 0:
                chosen.add(tuple_id)
        seen |= found.tuples.keys()
        different = mismatches(found, options.real, only=frozenset(chosen))
        figures["real_replays"] += len(chosen)
        figures["real_mismatches"] += len(different)
        for text in different:
            print(f"{name}: {text}", file=sys.stderr)
    return figures


def _inputs(name: str, batch: int, device: str = "meta", **options: Any) -> tuple[Any, ...]:
    batch = batch if catalog.find(name).task == "classification" else 1
    return catalog.example_inputs(catalog.variant(name, batch, **options), device=device)


if __name__ == "__main__":
    main()
