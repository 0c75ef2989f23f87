"""Why does a sum of loops differ from the whole model? Compare three ways to run the same calls on
a GPU.

    python benchmarks/in_order.py 'llama-3.2-1b:4:decode:512' 'bert-base:16:encode:128' --json
    in_order.json

*Whole* is the model in a CUDA graph. *In order* replays its calls in one graph from the rebuilt
tuples, with the lifetimes of the model's storages, but with the tuples' own values. *Loops*
measures each tuple by itself. The power of each way, and the time inside kernels and between them
(from the profiler), show the cause:

- in order like the whole, loops not: the neighbours matter (caches, gaps between kernels, power
  while a kernel waits);
- in order like the loops, the whole not: the values or the places of the tensors matter.

A model is NAME:BATCH[:PHASE:LENGTH-OR-CACHE[:DTYPE[:LAYERS]]]. With `--cards 2` it is split by
tensor parallelism, and each rank prints its table and writes a file of its own (`in_order.0.json`).
Collectives whose kernels take longer on one rank than on the other wait for the other."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from farm.benchmark import ranks
from farm.benchmark.bench import Bench
from farm.benchmark.call_context import Player
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import Passes, applied
from farm.benchmark.policies import POLICIES
from farm.benchmark.steady import silent
from farm.benchmark.subjects import passes_of
from farm.benchmark.workload import Workload, arrange
from farm.devices.host import discover, open_device
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.subjects.label import label_of
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject
from farm.types.variant import Variant

REPLAYS = 5


def variant_of(text: str, cards: int = 1) -> Variant:
    name, batch, phase, length, dtype, layers, *_ = [*text.split(":"), *[""] * 6]
    if not phase:
        return Variant(name, int(batch), 224, dtype or "float32")
    sizes: dict[str, Any] = (
        {"cache": int(length), "length": 1} if phase == "decode" else {"length": int(length)}
    )
    sizes |= {"layers": int(layers)} if layers else {}
    sizes |= {"tensor_parallel": cards} if cards > 1 else {}
    return Variant(name, int(batch), 0, dtype or "bfloat16", phase=phase, **sizes)


def kernels_of(
    launch: Callable[[], object], passes: int
) -> tuple[dict[str, tuple[float, float]], float, list[tuple[str, float, float]]]:
    """From the profiler: kernel name -> (calls, us) of one pass; the time between kernels in us;
    and the kernels of a round in order, each with the medians of its time and of the gap before it
    in us."""
    launch()
    torch.cuda.synchronize()
    ranks.largest(0.0)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(REPLAYS):
            launch()
            torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    times = []
    for event in seen.events():
        if event.device_type.name == "CUDA":
            found[event.name][0] += 1 / REPLAYS / passes
            found[event.name][1] += event.time_range.elapsed_us() / REPLAYS / passes
            times.append((event.time_range.start, event.time_range.end, event.name))
    times.sort()
    between = [after[0] - before[1] for before, after in itertools.pairwise(times)]
    each = len(times) // REPLAYS
    gaps_us = [0.0, *between]
    timeline = [
        (
            times[number][2],
            statistics.median(end - begin for begin, end, _ in times[number::each]),
            statistics.median(gaps_us[number::each]),
        )
        for number in range(each)
    ]
    # A gap above 50 us separates two replays.
    between_us = math.fsum(gap for gap in between if gap < 50) / REPLAYS / passes
    return {name: (n, us) for name, (n, us) in found.items()}, between_us, timeline


def plain(reading: Reading) -> dict[str, Any]:
    kept = dataclasses.replace(reading, trace=None).to_json()
    return {name: value for name, value in kept.items() if name not in ("cost_s", "details")}


def compare(variant: Variant, bench: Bench, stopping: Stopping, loops: bool) -> dict[str, Any]:
    protocol, device = Protocol(launch="graph", residency="resident"), bench.torch_device
    subject = Subject("variant", variant.id, variant.to_json())
    answer: dict[str, Any] = {"variant": str(variant)}

    def measured(name: str, workload: Workload, gate: str = "variant") -> dict[str, Any]:
        with contextlib.closing(workload):
            reading = bench.windows.measure(workload, stopping, POLICIES[gate], silent)
            passes = workload.rounds[0].passes
            kernels, between_us, timeline = kernels_of(workload.rounds[0].launch, passes)
        kernel_us = math.fsum(us for _, us in kernels.values())
        about = {"name": name, "kernel_us": kernel_us, "between_us": between_us, "kernels": kernels}
        return {**plain(reading), **about, "timeline": timeline, "passes": passes}

    with applied(protocol), torch.cuda.stream(bench._stream):
        passes = passes_of(subject, protocol, device)
        assert passes.order is not None
        passes.first()
        capture = passes.order()
        answer["whole"] = measured("whole", arrange(passes, protocol, device))
        player = Player(capture, device)
        replay = Passes(HostSteps.of(player.once, device).around(player.once))
        answer["in_order"] = measured("in order", arrange(replay, protocol, device))
        # The whole again: how much do two readings of the same thing differ?
        again = passes_of(subject, protocol, device)
        again.first()
        answer["whole_again"] = measured("whole again", arrange(again, protocol, device))
        answer["loops"] = []
        for tuple_id, spec in capture.tuples.items() if loops else ():
            one = Subject("operator", tuple_id, spec.to_json())
            try:
                workload = arrange(passes_of(one, protocol, device), protocol, device)
                found = measured(label_of(spec), workload, "operator")
            except Unmeasurable as error:
                found = {"name": label_of(spec), "error": str(error)}
            answer["loops"].append({"count": capture.counts[tuple_id], "id": tuple_id, **found})
    return answer


def show(answer: dict[str, Any]) -> None:
    print(f"\n=== {answer['variant']}")
    whole = answer["whole"]
    rows = [answer["whole"], answer["whole_again"], answer["in_order"]]
    if found := [one for one in answer["loops"] if "error" not in one]:
        total: dict[str, Any] = {
            name: math.fsum(one["count"] * one[name] for one in found)
            for name in ("time_us", "energy_mj", "kernel_us", "between_us")
        }
        rows.append(
            {"name": "loops", **total, "power_w": total["energy_mj"] / total["time_us"] * 1e3}
        )
    for row in rows:
        print(
            f"{row['name']:12} {row['time_us']:9.1f} us "
            f"{row['time_us'] / whole['time_us'] - 1:+7.2%}  "
            f"{row['energy_mj']:8.2f} mJ {row['energy_mj'] / whole['energy_mj'] - 1:+7.2%}  "
            f"{row['power_w']:6.1f} W "
            f"{row['power_w'] / whole['power_w'] - 1:+7.2%}  in kernels {row['kernel_us']:9.1f} us "
            f"{row['kernel_us'] / whole['kernel_us'] - 1:+7.2%}, between {row['between_us']:7.1f} "
            "us  "
            f"{row.get('sm_clock_mhz') or 0:.0f} MHz {row.get('temperature_c') or 0:.0f} C "
            f"{row.get('flags', '')}"
        )
    for one in sorted(found, key=lambda one: -one["count"] * one["energy_mj"])[:12]:
        print(
            f"   {one['count']:4}x {one['name'][:60]:60} {one['time_us']:8.2f} us, in kernels "
            f"{one['kernel_us']:8.2f}, "
            f"{one['power_w']:5.0f} W, "
            f"{one['count'] * one['energy_mj'] / whole['energy_mj']:6.1%} of the energy"
        )
    totals: dict[str, Counter[str]] = {"loops": Counter()}
    for one in found:
        for name, (_, us) in one["kernels"].items():
            totals["loops"][name] += one["count"] * us
    for key in ("whole", "in_order"):
        totals[key] = Counter({name: us for name, (_, us) in answer[key]["kernels"].items()})
    for key in ("whole", "in_order"):
        gaps = [(name, us, gap) for name, us, gap in answer[key]["timeline"] if gap < 50]
        after = [
            two[2]
            for one, two in itertools.pairwise(gaps)
            if "nccl" in one[0] and "nccl" not in two[0]
        ]
        ours = [(us, gap) for name, us, gap in gaps if "nccl" in name]
        others = [two[2] for one, two in itertools.pairwise(gaps) if "nccl" not in one[0] + two[0]]
        if ours:
            kernels_us, before_us = (statistics.mean(column) for column in zip(*ours, strict=True))
            after_us, between_us = statistics.mean(after), statistics.mean(others)
            print(
                f"   {len(ours)} collectives in a round, {key}: {kernels_us:.2f} us each, gap "
                "before "
                f"{before_us:.2f} us, after {after_us:.2f} us, between others {between_us:.2f} us"
            )
    for name, us in totals["whole"].most_common(10):
        print(
            f"   kernel {name[:70]:70} {us:8.1f} us, in order "
            f"{totals['in_order'][name] - us:+7.1f}, "
            f"loops {totals['loops'][name] - us:+7.1f}"
        )


def run(rank: int, asked: argparse.Namespace, rendezvous: str) -> None:
    card, device = discover(settings())[rank], torch.device("cuda", rank)
    bench = Bench(open_device(card), device)
    if asked.cards > 1:
        ranks.join(device, rank, asked.cards, rendezvous)
    bench.load_libraries()
    stopping = Stopping(minimum_s=0.5, maximum_s=2.0)
    kept = []
    for text in asked.models:
        answer = compare(variant_of(text, asked.cards), bench, stopping, not asked.no_loops)
        kept.append(answer)
        for turn in range(asked.cards):
            if turn == rank:
                print(f"\nrank {rank} on {card.id}" if asked.cards > 1 else "", flush=True)
                show(answer)
            ranks.largest(0.0)
        if asked.json:
            path = asked.json if asked.cards == 1 else asked.json.with_suffix(f".{rank}.json")
            path.write_text(json.dumps(kept))
    gaps = [abs(one["in_order"]["power_w"] / one["whole"]["power_w"] - 1) for one in kept]
    print(f"\nmedian |difference in power| in order: {statistics.median(gaps):.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--no-loops", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.cards == 1:
        return run(0, asked, "")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (asked, f"{folder}/rendezvous"), asked.cards)
    return None


if __name__ == "__main__":
    main()
