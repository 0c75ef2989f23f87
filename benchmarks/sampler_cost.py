"""Measure the cost of the sampling thread: the same tuples with it and without it, alternating, on
one card.

    python benchmarks/sampler_cost.py --json sampler_cost.json               # tuples of resnet18 at
    batch 1 and 32

Both ways use the farm's own `Bench`; "without" it gets a device without sensors, so no thread
starts. Order A B B A, so that drift cancels. Prints per tuple the change of the mean and of the
median time of a pass with the sampler, with the 95 % interval of the differences between neighbours
in time; last, the median over all tuples. Tuples that are in the JSON file are not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from farm.devices.device import Card, Device
from farm.devices.host import discover, open_device
from farm.settings import settings
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types import intervals
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant


class Silent(Device):
    """The card without sensors."""

    def __init__(self, card: Card) -> None:
        self.card = card

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["resnet18:1", "resnet18:32"])
    parser.add_argument(
        "--tuples",
        type=int,
        default=4,
        help="number of tuples of each model, from the fastest to the slowest",
    )
    parser.add_argument("--pairs", type=int, default=6, help="readings per tuple in each way")
    parser.add_argument("--window-s", type=float, default=0.6)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--json", type=Path, default=Path("sampler_cost.json"))
    options = parser.parse_args()
    began_s = time.perf_counter()
    card = discover(settings())[0]

    import torch

    from farm.benchmark.bench import Bench

    cuda = card.is_gpu
    torch_device = "cuda:0" if cuda else "cpu"
    sampled = Bench(open_device(card), torch_device)
    silent = Bench(Silent(card), torch_device)
    protocol = Protocol(launch="graph" if cuda else "eager")
    # The same length for both: no gate may wait for a temperature that only one of them has.
    stopping = Stopping(
        0.5, options.window_s, options.window_s * 1.2, time_half_width=1.0, energy_half_width=1.0
    )
    rows: list[dict[str, Any]] = (
        json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    )
    for text in options.models:
        for label, subject in _subjects(text, options.tuples, sampled.torch_device):
            known = any(row["subject"] == subject.id for row in rows)
            if known or time.perf_counter() - began_s > options.budget_s:
                print(f"left out ({'known' if known else 'budget spent'}): {label}")
                continue
            rows.append(
                _compare(label, subject, sampled, silent, protocol, stopping, options.pairs)
            )
            options.json.write_text(
                json.dumps({"card": vars(card), "torch": torch.__version__, "rows": rows})
            )
    print(
        f"\n{card}, torch {torch.__version__}: with the sampler against without, windows of "
        f"{options.window_s} s"
    )
    for row in rows:
        print(
            f"{row['label'][:52]:52} {row['time_us']:>10.2f} us  mean {row['mean']:+.3%} ± "
            f"{row['mean_half_width']:.3%}"
            f"  median {row['median']:+.3%} ± {row['median_half_width']:.3%}  thread busy "
            f"{row['busy_share']:.2%}"
        )
    if rows:
        middle = statistics.median([row["mean"] for row in rows])
        most = max((row["mean"] for row in rows), key=abs)
        print(f"all: mean {middle:+.3%} in the median over {len(rows)} tuples, {most:+.3%} at most")


def _subjects(text: str, wanted: int, device: Any) -> list[tuple[str, Subject]]:
    from farm.benchmark import verification

    name, batch, dtype, *_ = [*text.split(":"), "", ""]
    variant = Variant(name, int(batch or 32), 224, dtype or "float32")
    subject = Subject("variant", variant.id, variant.to_json())
    observed = verification.verify(subject, Protocol(), device, None).observed
    assert observed is not None
    order = sorted(observed["tuples"], key=lambda key: (observed["costs"][key]["bytes"], key))
    spread = {order[round(step * (len(order) - 1) / max(1, wanted - 1))] for step in range(wanted)}

    return [
        (
            label_of(parse(observed["tuples"][key])),
            Subject("operator", key, observed["tuples"][key]),
        )
        for key in order
        if key in spread
    ]


def _compare(
    label: str,
    subject: Subject,
    sampled: Any,
    silent: Any,
    protocol: Protocol,
    stopping: Stopping,
    pairs: int,
) -> dict[str, Any]:
    figures: dict[str, list[float]] = {"mean": [], "median": []}
    busy: list[float] = []
    time_us = 0.0
    for number in range(pairs):
        pair = {}
        for bench in (sampled, silent) if number % 2 == 0 else (silent, sampled):
            pair[bench] = bench.measure(subject, protocol, stopping)
        with_it, without = pair[sampled], pair[silent]
        mean_us, silent_us = (one.details.timing.time_mean_us for one in (with_it, without))
        figures["mean"].append(mean_us.value / silent_us.value - 1)
        figures["median"].append(with_it.time_median_us / without.time_median_us - 1)
        busy.append(with_it.details.powering.sampler_busy_share or 0.0)
        time_us = with_it.time_us.value
    row: dict[str, Any] = {
        "label": label,
        "subject": subject.id,
        "time_us": time_us,
        "pairs": pairs,
    }
    for name, values in figures.items():
        row[name] = statistics.fmean(values)
        row[f"{name}_half_width"] = 1.0
        if len(values) > 1:
            spread = statistics.stdev(values) / len(values) ** 0.5
            row[f"{name}_half_width"] = intervals.student_t_95(len(values) - 1) * spread
    return {**row, "busy_share": statistics.fmean(busy)}


if __name__ == "__main__":
    main()
