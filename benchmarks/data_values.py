"""Measure the effect of tensor values and of temperature on one card.

    python benchmarks/data_values.py --json data_values.json                 # resnet50,
    mobilenet_v2, vit_b_16 python benchmarks/data_values.py resnet50:32 --tuples 4 --no-heat

The heaviest layers of each model are measured alone by the farm's benchmark with: standard normal
inputs; standard normal inputs with the negative half set to zero, as after a ReLU; the class of
data that the farm gives the layer (`farm/types/value_profiles.py`); and the actual activations of a
running model with seeded weights. Normal inputs come first and last, to show drift. Then, for the
first model as a whole, a long window: power against temperature at constant work."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from farm.devices.host import discover, open_device
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types import intervals
from farm.types.fields import figure_json
from farm.types.figure import value_of
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject
from farm.types.variant import Variant

FORMS = ("normal", "half_zeros", "class", "seen", "normal_again")
NAMES = ("Conv2d", "Linear", "BatchNorm2d", "LayerNorm", "MultiheadAttention", "GELU")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=["resnet50:32", "mobilenet_v2:32", "vit_b_16:32"]
    )
    parser.add_argument("--tuples", type=int, default=5, help="number of tuples of each model")
    parser.add_argument(
        "--heat-s", type=float, default=8.0, help="length of the window for the temperature"
    )
    parser.add_argument("--no-heat", action="store_true")
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--json", type=Path, default=Path("data_values.json"))
    options = parser.parse_args()
    began_s = time.perf_counter()
    card = discover(settings())[0]
    device = open_device(card)

    import torch

    from farm.benchmark.bench import Bench

    cuda = card.is_gpu
    bench = Bench(device, "cuda:0" if cuda else "cpu")
    protocol = Protocol(launch="graph" if cuda else "eager")
    stopping = (
        Stopping(minimum_s=0.7) if cuda else Stopping(warm_up_s=0.05, minimum_s=0.1, maximum_s=0.2)
    )
    out: dict[str, Any] = {"card": vars(card), "torch": torch.__version__, "heat": None, "rows": []}
    variants = [_variant(text) for text in options.models]
    if not options.no_heat:
        out["heat"] = heat(variants[0], bench, protocol, options.heat_s if cuda else 1.0)
        options.json.write_text(json.dumps(out))
    for variant in variants:
        if time.perf_counter() - began_s > options.budget_s:
            print(f"budget spent: {variant} is left out")
            break
        for row in layers(variant, bench, protocol, stopping, options.tuples):
            out["rows"].append(row)
            options.json.write_text(json.dumps(out))
    show(out)
    print(f"all in {time.perf_counter() - began_s:.1f} s")


def _variant(text: str) -> Variant:
    name, batch, dtype, *_ = [*text.split(":"), "", ""]
    return Variant(
        name, int(batch or 32), 299 if name == "inception_v3" else 224, dtype or "float32"
    )


# ----------------------------------------------------------------------------------------------
# temperature


def heat(variant: Variant, bench: Any, protocol: Protocol, seconds: float) -> dict[str, Any]:
    """Measure a whole model in one long window from a cold start: power and temperature per counter
    tick.
    """
    subject = Subject("variant", variant.id, variant.to_json())
    stopping = Stopping(
        warm_up_s=0.1,
        minimum_s=seconds,
        maximum_s=seconds,
        time_half_width=1e-9,
        energy_half_width=1e-9,
    )
    with mock.patch("farm.benchmark.bench.REPEATS", 0):  # keep the drifting reading
        reading = bench.measure(subject, protocol, stopping)
    found: dict[str, Any] = {"variant": str(variant)}
    if reading.trace is None or "energy_mj" not in reading.trace.series:
        return found
    series = reading.trace.series
    ticks_s, ticks_mj = series["energy_mj"]
    temperatures = series.get("temperature_c", ([], []))
    points: list[tuple[float, float, float]] = []  # s, W, C
    for index in range(4, len(ticks_s), 4):
        begin_s, end_s = ticks_s[index - 4], ticks_s[index]
        inside = [
            value
            for moment, value in zip(*temperatures, strict=True)
            if begin_s - 0.1 <= moment <= end_s + 0.1
        ]
        if inside and begin_s > 0.6:
            power_w = (ticks_mj[index] - ticks_mj[index - 4]) / (end_s - begin_s) / 1e3
            points.append((begin_s, power_w, statistics.fmean(inside)))
    found["points"] = points
    found["clock_mhz"] = series.get("sm_clock_mhz")
    if len(points) >= 4:
        fit = intervals.line([point[2] for point in points], [point[1] for point in points])
        found |= {"w_per_c": fit.rate, "w_per_c_half_width": fit.half_width}
    return found


# ---------------------------------------------------------------------------------------------------
# layers


def layers(
    variant: Variant, bench: Any, protocol: Protocol, stopping: Stopping, wanted: int
) -> list[dict[str, Any]]:
    """Measure the heaviest layers of a model, each with every form of data."""
    import torch

    from farm.benchmark import verification
    from farm.benchmark.subjects.model_variant import build_variant
    from farm.training.observed_values import describe_values
    from farm.types.value_profiles import class_of

    subject = Subject("variant", variant.id, variant.to_json())
    observed = verification.verify(subject, protocol, bench.torch_device, None).observed
    assert observed is not None
    counts = Counter(call["tuple_id"] for call in observed["calls"])
    paths = {call["tuple_id"]: call["module_path"] for call in reversed(observed["calls"])}
    specs = {tuple_id: parse(data) for tuple_id, data in observed["tuples"].items()}

    def weight(tuple_id: str) -> float:  # seconds on a card such as the H200
        cost = observed["costs"][tuple_id]
        return counts[tuple_id] * max(cost["flops"] / 50e12, cost["bytes"] / 4e12)

    candidates = [
        tuple_id
        for tuple_id, spec in specs.items()
        if spec.kind == "module" and spec.short_name in NAMES and len(spec.activations) == 1
    ]
    chosen = sorted(candidates, key=weight, reverse=True)[:wanted]
    model, arguments = build_variant(variant, bench.torch_device)
    modules = dict(model.named_modules())
    seen: dict[str, torch.Tensor] = {}
    hooks = []
    for tuple_id in chosen:

        def keep(module: Any, given: tuple[Any, ...], tuple_id: str = tuple_id) -> None:
            seen.setdefault(tuple_id, given[0].detach().clone())

        hooks.append(modules[paths[tuple_id]].register_forward_pre_hook(keep))
    with torch.no_grad():
        model(*arguments)
    for hook in hooks:
        hook.remove()
    rows = []
    for tuple_id in chosen:
        if tuple_id not in seen:
            continue
        values = seen[tuple_id].float()
        row: dict[str, Any] = {
            "variant": str(variant),
            "tuple": tuple_id,
            "label": label_of(specs[tuple_id]),
            "path": paths[tuple_id],
            "calls": counts[tuple_id],
            "mean": values.mean().item(),
            "spread": values.std().item(),
            "zeros": (values == 0).float().mean().item(),
            "least": values.min().item(),
            "most": values.max().item(),
        }
        row["data_class"] = class_of([describe_values(seen[tuple_id])])
        for form in FORMS:
            try:
                with data(form, seen[tuple_id]):
                    item = Subject("operator", tuple_id, observed["tuples"][tuple_id])
                    chosen_protocol = (
                        protocol.with_data(row["data_class"]) if form == "class" else protocol
                    )
                    row[form] = brief(bench.measure(item, chosen_protocol, stopping))
            except Unmeasurable as error:
                row[form] = {"failed": f"{error.reason}: {error.message}"}
        rows.append(row)
        seen[tuple_id] = values[:0]
    return rows


def data(form: str, seen: Any) -> Any:
    """Context manager: the activations of every rebuilt operator have this form of data."""
    from farm.operators import rebuild as rebuilding

    original = rebuilding.rebuild

    def with_data(*given: Any, **options: Any) -> Any:
        import torch

        rebuilt = original(*given, **options)
        (tensor,) = rebuilt.activations
        with torch.no_grad():
            if form == "half_zeros":
                tensor.clamp_(min=0)
            elif form == "seen":
                tensor.copy_(seen)
        return rebuilt

    return mock.patch.object(rebuilding, "rebuild", with_data)


def brief(reading: Reading) -> dict[str, Any]:
    return {
        "time_us": reading.time_us.value,
        **figure_json("power", "w", reading.power_w),
        "energy_mj": value_of(reading.energy_mj),
        "clock_mhz": reading.sm_clock_mhz,
        "temperature_c": reading.temperature_c,
        "slope_c_per_s": reading.details.conditions.temperature_slope_c_per_s,
        "flags": list(reading.flags),
        "burst": reading.details.to_json().get("burst"),
        "total_s": reading.cost_s["total"],
    }


# ----------------------------------------------------------------------------------------------------
# table


def show(out: dict[str, Any]) -> None:
    found = out["heat"] or {}
    if "w_per_c" in found:
        first, last = found["points"][0], found["points"][-1]
        print(
            f"\n{found['variant']}: {first[1]:.1f} W at {first[2]:.1f} C -> {last[1]:.1f} W at "
            f"{last[2]:.1f} C; "
            f"{found['w_per_c']:.2f} ± {found['w_per_c_half_width']:.2f} W per C"
        )
        for moment_s, power_w, temperature_c in found["points"][::2]:
            print(f"    {moment_s:5.1f} s {power_w:7.1f} W {temperature_c:5.1f} C")
    header = " ".join(f"{form:>20}" for form in FORMS[1:])
    print(f"\nagainst normal: energy, power (time)\n{'':52} {'normal':>8} {header}")
    changes: dict[str, list[float]] = {}
    for row in out["rows"]:
        base = row["normal"]
        cells = []
        for form in FORMS[1:]:
            entry = row[form]
            if "failed" in entry or "failed" in base:
                cells.append("failed")
                continue
            time_change = entry["time_us"] / base["time_us"] - 1
            if not (entry["power_w"] and base["power_w"]):
                cells.append(f"({time_change:+.1%})")
                continue
            energy_change = entry["energy_mj"] / base["energy_mj"] - 1
            changes.setdefault(form, []).append(energy_change)
            cells.append(
                f"{energy_change:+.1%} {entry['power_w'] / base['power_w'] - 1:+.1%} "
                f"({time_change:+.1%})"
            )
        seen = (
            f"mean {row['mean']:.2f} spread {row['spread']:.2f} zeros {row['zeros']:.0%} = "
            f"{row['data_class']}"
        )
        power = f"{base.get('power_w') or 0:.0f} W"
        print(
            f"{row['calls']:3}x {row['label'][:48]:48} {power:>8} "
            + " ".join(f"{cell:>20}" for cell in cells)
        )
        temperatures = [row[form].get("temperature_c") for form in FORMS]
        print(f"     {seen}; C: {temperatures}; {','.join(base.get('flags', []))}")
    for form, values in changes.items():
        print(
            f"{form:14} energy: median {statistics.median(values):+.2%}, {min(values):+.2%} to "
            f"{max(values):+.2%}"
        )


if __name__ == "__main__":
    main()
