"""Check the measurement on a card: measure tuples and whole models through the benchmark alone,
without a queue.

    python benchmarks/gpu_smoke.py                                   # resnet50 and vit_b_16,
    float32, batch 32 python benchmarks/gpu_smoke.py vit_b_16:32:bfloat16 resnet18:1 --budget-s 150
    --json smoke.json

A model is NAME[:BATCH[:DTYPE]]. Models begin until the budget is spent; a model that has begun is
finished."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from farm.devices.host import discover, open_device
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.fields import content_id
from farm.types.figure import value_of
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject
from farm.types.variant import Variant


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["resnet50:32", "vit_b_16:32"])
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--launch", default="")
    parser.add_argument("--residency", default="resident")
    parser.add_argument(
        "--repeat",
        type=int,
        default=0,
        help="measure this number of tuples five times, for repeatability",
    )
    parser.add_argument("--json", type=Path, help="file for all readings")
    options = parser.parse_args()
    began_s = time.perf_counter()
    card = discover(settings())[0]
    device = open_device(card)
    print(f"card      {card}, {card.memory_bytes / 2**30:.0f} GiB, driver {card.driver}")
    print(f"sensors   {', '.join(sorted(device.capabilities)) or 'none'}")

    import torch

    from farm.benchmark.bench import Bench

    cuda = card.is_gpu
    launch = options.launch or ("graph" if cuda else "eager")
    protocol = Protocol(launch=launch, residency=options.residency)
    stopping = Stopping() if cuda else Stopping(warm_up_s=0.1, minimum_s=0.2, maximum_s=0.5)
    bench = Bench(device, "cuda:0" if cuda else "cpu")
    print(
        f"torch     {torch.__version__}, start {time.perf_counter() - began_s:.1f} s, protocol: "
        f"{protocol}"
    )
    kept: list[dict[str, Any]] = []
    for text in options.models:
        if time.perf_counter() - began_s > options.budget_s:
            print(f"budget spent: {text} and what follows is left out")
            break
        name, batch, dtype, *_ = [*text.split(":"), "", ""]
        variant = Variant(
            name, int(batch or 32), 299 if name == "inception_v3" else 224, dtype or "float32"
        )
        kept.append(read_model(variant, bench, protocol, stopping, options.repeat))
        if options.json:
            options.json.write_text(
                json.dumps({"card": vars(card), "torch": torch.__version__, "models": kept})
            )
    print(f"\nidle {bench.levels.idle_power_w} W, base {bench.levels.base_power_w} W")
    print(f"all in {time.perf_counter() - began_s:.1f} s")


def read_model(
    variant: Variant, bench: Any, protocol: Protocol, stopping: Stopping, repeat: int
) -> dict[str, Any]:
    from farm.benchmark import verification

    print(f"\n=== {variant}")
    whole_subject = Subject("variant", variant.id, variant.to_json())
    begin_s = time.perf_counter()
    findings = verification.verify(whole_subject, protocol, bench.torch_device, None)
    verify_s = time.perf_counter() - begin_s
    observed = findings.observed
    assert observed is not None
    whole = bench.measure(whole_subject, protocol, stopping)
    counts = Counter(call["tuple_id"] for call in observed["calls"])
    print(
        f"verify    {verify_s:.1f} s: {len(observed['calls'])} calls, {len(counts)} tuples, "
        f"{len(findings.observer_effect)} differences caused by the capture, "
        f"{len(findings.gaps or ())} gaps"
    )
    for text in findings.observer_effect[:5]:
        print(f"          {text[:150]}")
    show("whole", whole)
    readings: dict[str, Reading] = {}
    failed: dict[str, Unmeasurable] = {}
    order = list(counts)
    random.Random(0).shuffle(order)
    tuples_begin_s = time.perf_counter()
    for tuple_id in order:
        subject = Subject("operator", tuple_id, observed["tuples"][tuple_id])
        try:
            readings[tuple_id] = bench.measure(subject, protocol, stopping)
        except Unmeasurable as error:
            failed[tuple_id] = error
    tuples_s = time.perf_counter() - tuples_begin_s
    specs = {tuple_id: parse(data) for tuple_id, data in observed["tuples"].items()}
    for tuple_id, error in failed.items():
        print(
            f"FAILED    {counts[tuple_id]}x {label_of(specs[tuple_id])}: {error.reason}: "
            f"{error.message[:150]}"
        )
    compare("steady", whole, readings, counts, burst=False)
    if any(reading.details.burst for reading in readings.values()):
        compare("bursts", whole, readings, counts, burst=True)
    by_type(readings, counts, specs)
    costs = [reading.cost_s["total"] for reading in readings.values()]
    busy = sum(
        reading.cost_s["warm_up"] + reading.cost_s["window"] for reading in readings.values()
    )
    rebuild = sum(reading.cost_s["rebuild"] for reading in readings.values())
    burst = sum(reading.cost_s["burst"] for reading in readings.values())
    print(
        f"cost      {tuples_s:.1f} s for {len(order)} tuples: median "
        f"{statistics.median(costs):.2f} s, "
        f"most {max(costs):.2f} s; windows and warm-ups {busy / tuples_s:.0%}, rebuild "
        f"{rebuild / tuples_s:.0%}, "
        f"bursts {burst / tuples_s:.0%}"
    )
    print(
        f"flags     {dict(Counter(flag for reading in readings.values() for flag in reading.flags))}"
    )
    repeatability(bench, observed, order[:repeat], protocol, stopping)
    return {
        "variant": variant.to_json(),
        "protocol": protocol.to_json(),
        "whole": plain(whole),
        "counts": dict(counts),
        "labels": {tuple_id: label_of(spec) for tuple_id, spec in specs.items()},
        "readings": {tuple_id: plain(reading) for tuple_id, reading in readings.items()},
        "failed": {tuple_id: [error.reason, error.message] for tuple_id, error in failed.items()},
        "kernels": findings.to_json()["kernels"],
        "verify_s": verify_s,
        "tuples_s": tuples_s,
    }


def plain(reading: Reading) -> dict[str, Any]:
    return dataclasses.replace(reading, trace=None).to_json()


def show(word: str, reading: Reading) -> None:
    energy = (
        f"{reading.energy_mj.value:.1f} mJ at {value_of(reading.power_w):.1f} W"
        if reading.energy_mj
        else "no energy"
    )
    print(
        f"{word:9} {reading.time_us.value:.1f} us ± {reading.time_us.relative:.2%}, "
        f"{energy}, "
        f"SM {reading.sm_clock_mhz} MHz, {reading.temperature_c} C, window {reading.window_s:.2f} "
        "s, "
        f"flags {','.join(reading.flags) or '-'}, cost {reading.cost_s}"
    )


def figures(reading: Reading, burst: bool) -> tuple[float, float]:
    kept = reading.details.burst if burst else None
    if kept:
        return kept.time_us.value, value_of(kept.energy_mj) or 0.0
    return reading.time_us.value, value_of(reading.energy_mj) or 0.0


def compare(
    word: str, whole: Reading, readings: dict[str, Reading], counts: Counter[str], burst: bool
) -> None:
    time_us = sum(
        counts[tuple_id] * figures(reading, burst)[0] for tuple_id, reading in readings.items()
    )
    line = f"SUM {word}  time {time_us / whole.time_us.value:.3f}"
    if whole.energy_mj:
        energy_mj = sum(
            counts[tuple_id] * figures(reading, burst)[1] for tuple_id, reading in readings.items()
        )
        line += f", energy {energy_mj / whole.energy_mj.value:.3f}"
    print(line + " of the whole")


def by_type(readings: dict[str, Reading], counts: Counter[str], specs: dict[str, Any]) -> None:
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for tuple_id, reading in readings.items():
        entry = totals[specs[tuple_id].short_name]
        entry[0] += counts[tuple_id]
        entry[1] += counts[tuple_id] * reading.time_us.value
        entry[2] += counts[tuple_id] * (value_of(reading.energy_mj) or 0.0)
    for name, (calls, time_us, energy_mj) in sorted(totals.items(), key=lambda pair: -pair[1][1]):
        print(f"  {name:28} {calls:5.0f} calls {time_us:12.1f} us {energy_mj:12.1f} mJ")
    slowest = sorted(
        readings, key=lambda tuple_id: -counts[tuple_id] * readings[tuple_id].time_us.value
    )[:6]
    for tuple_id in slowest:
        reading = readings[tuple_id]
        burst = reading.details.burst
        print(
            f"  {counts[tuple_id]:3}x {label_of(specs[tuple_id])[:70]:70} {reading.time_us.value:9.1f} "
            "us "
            f"{value_of(reading.power_w) or 0:6.1f} W {reading.sm_clock_mhz or 0:6.0f} MHz "
            f"{','.join(reading.flags)}"
            + (
                f" | burst {burst.time_us.value:.1f} us {value_of(burst.power_w):.0f} W"
                if burst
                else ""
            )
        )


def repeatability(
    bench: Any, observed: dict[str, Any], chosen: list[str], protocol: Protocol, stopping: Stopping
) -> None:
    spreads: dict[str, list[float]] = {"time": [], "energy": []}
    for tuple_id in chosen:
        subject = Subject(
            "operator", content_id(observed["tuples"][tuple_id]), observed["tuples"][tuple_id]
        )
        again = [bench.measure(subject, protocol, stopping) for _ in range(5)]
        for word, values in (
            ("time", [reading.time_us.value for reading in again]),
            ("energy", [value_of(reading.energy_mj) or 0.0 for reading in again]),
        ):
            if min(values) > 0:
                spreads[word].append((max(values) - min(values)) / statistics.median(values))
    for word, values in spreads.items():
        if values:
            print(
                f"repeated  {word}: {len(values)} tuples five times, (most - least) / median: "
                f"median {statistics.median(values):.2%}, most {max(values):.2%}"
            )


if __name__ == "__main__":
    main()
