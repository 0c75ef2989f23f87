"""Measure a matrix product at the card's power limit: looped, in bursts, and together with light
operators.

    python benchmarks/power_limit.py --json power_limit.json        # 8192 x 8192 x 8192 in
    bfloat16, about 20 s

Which of a tuple's two readings describes the operator in a model? Here the model is synthetic: the
product, then as many light operators (a copy of a tensor several times the size of the cache) as
keep the card below its limit. The light operators are measured alone as well. The difference is the
product among others; its time and its energy are compared with those of its readings, steady and in
bursts."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farm.subjects.label import label_of
from farm.types.figure import value_of

WINDOW_S = 2.0
WARM_UP_S = 1.5
LIGHT_BYTES = 2**28


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--shares",
        default="0.5,0.3",
        help="shares of the time that the product takes among the copies",
    )
    parser.add_argument("--json", type=Path, default=Path("power_limit.json"))
    options = parser.parse_args()
    from farm.devices.host import discover
    from farm.devices.lock import CardLock
    from farm.settings import settings

    card = discover(settings())[0]
    with CardLock(card.id, settings().lock_dir):
        out = compare(card, options)
    options.json.write_text(json.dumps(out, indent=1))
    show(out)


def compare(card: Any, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch import nn

    from farm.benchmark.bench import Bench
    from farm.devices.host import open_device
    from farm.operators.capture import capture
    from farm.operators.rebuild import rebuild
    from farm.types.protocol import Protocol, Stopping
    from farm.types.subject import Subject

    cuda = card.is_gpu
    bench = Bench(open_device(card), "cuda:0" if cuda else "cpu", canary_every=0)
    dtype, size = getattr(torch, options.dtype), options.size
    module = nn.Linear(size, size, bias=False).to("meta", dtype).eval()
    (spec,) = capture(
        module, (torch.empty(size, size, dtype=dtype, device="meta"),)
    ).tuples.values()
    protocol = Protocol(launch="graph" if cuda else "eager", residency="reuse")
    reading = bench.measure(Subject("operator", spec.id, spec.to_json()), protocol, Stopping())
    out: dict[str, Any] = {
        "card": vars(card),
        "torch": torch.__version__,
        "product": label_of(spec),
        "steady": _figures(
            reading.time_us.value,
            value_of(reading.power_w),
            reading.sm_clock_mhz,
            reading.flags,
        ),
        "burst": reading.details.to_json().get("burst"),
        "company": [],
    }
    with torch.no_grad():
        product = rebuild(spec, bench.torch_device).run
        source = torch.randn(LIGHT_BYTES // 4, device=bench.torch_device)
        target = torch.empty_like(source)

        def light() -> None:
            target.copy_(source)

        light_us = _read(bench, [light])["time_us"]
        for share in (float(text) for text in options.shares.split(",")):
            times = max(1, round(reading.time_us.value * (1 / share - 1) / light_us))
            alone, both = _read(bench, [light] * times), _read(bench, [product, *[light] * times])
            out["company"].append(
                {"lights": times, "alone": alone, "both": both, **_rest(both, alone)}
            )
    for one in out["company"]:
        one["chosen"] = _chosen(out, one["both"])
    return out


def _chosen(out: dict[str, Any], both: dict[str, Any]) -> dict[str, Any]:
    """Return what a sum would take from the product's reading, given the card's state with both."""
    from farm.types.details import Details
    from farm.types.figure import Figure, figure_of
    from farm.verdict.corrections import cost_in_model
    from farm.verdict.figures import ReadingView

    def view(one: dict[str, Any], **more: Any) -> ReadingView:
        limited = (
            ("throttled_power",) if {"throttled_power", "power_cap"} & set(one["flags"]) else ()
        )
        return ReadingView(
            Figure(one["time_us"]),
            energy_mj=figure_of(one["energy_mj"], None),
            sm_clock_mhz=one["sm_clock_mhz"],
            flags=limited,
            **more,
        )

    cost = cost_in_model(
        view(out["steady"], details=Details.from_json({"burst": out["burst"]})), [view(both)]
    )
    return {
        "used": cost.used,
        "time_us": cost.time_us.value,
        "energy_mj": cost.energy_mj.value if cost.energy_mj else None,
    }


def _read(bench: Any, calls: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Measure time and power of the calls, one after the other, over a separate window."""
    from farm.benchmark.clock import Clock
    from farm.benchmark.sampler import Sampler
    from farm.benchmark.torch_device import capture_graph
    from farm.benchmark.window import window_power
    from farm.benchmark.workload import Workload, WorkloadRound

    def run() -> None:
        for call in calls:
            call()

    device = bench.torch_device
    run()
    launch = capture_graph([run], device).replay if bench.cuda else run
    clock = Clock(Workload([WorkloadRound(launch, 1)], device, round_s=0.01))
    with Sampler(bench.device) as sampler:
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < WARM_UP_S:
            clock.launch()
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < WINDOW_S:
            clock.launch()
        end_s = time.perf_counter()
        clock.finish()
    power = window_power(sampler, begin_s, end_s)
    rounds = clock.between(power.begin_s, power.end_s)
    window = sampler.window(power.begin_s, power.end_s)
    time_us = math.fsum(entry.took_s for entry in rounds) / len(rounds) * 1e6
    limited = [name for name, share in window.throttle_shares.items() if share >= 0.05]
    return _figures(time_us, value_of(power.power_w), window.sm_clock_mhz, limited)


def _figures(
    time_us: float, power_w: float | None, sm_clock_mhz: float | None, flags: Sequence[str]
) -> dict[str, Any]:
    energy_mj = None if power_w is None else power_w * time_us * 1e-3
    return {
        "time_us": time_us,
        "power_w": power_w,
        "energy_mj": energy_mj,
        "sm_clock_mhz": sm_clock_mhz,
        "flags": list(flags),
    }


def _rest(both: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """What is left for the product."""
    known = both["energy_mj"] is not None and alone["energy_mj"] is not None
    return {
        "time_us": both["time_us"] - alone["time_us"],
        "energy_mj": both["energy_mj"] - alone["energy_mj"] if known else None,
    }


def show(out: dict[str, Any]) -> None:
    print(f"{out['product']} on {out['card']['model']}, torch {out['torch']}\n")
    print("| product | time | energy | clock | flags |\n| --- | --: | --: | --: | --- |")
    for name in ("steady", "burst"):
        if one := out[name]:
            print(_row(f"alone, {name}", one))
    for one in out["company"]:
        share = one["time_us"] / one["both"]["time_us"]
        line = {**one["both"], "time_us": one["time_us"], "energy_mj": one["energy_mj"]}
        print(_row(f"among copies, {share:.0%} of the time", line))
        for name, other in (
            ("steady", out["steady"]),
            ("burst", out["burst"]),
            ("the figure that a sum uses", one["chosen"]),
        ):
            if other:
                energy = (
                    other["energy_mj"] / one["energy_mj"] - 1
                    if one["energy_mj"] and other["energy_mj"]
                    else None
                )
                print(
                    f"| {name} against that | {other['time_us'] / one['time_us'] - 1:+.1%} "
                    f"| {'-' if energy is None else f'{energy:+.1%}'} | | |"
                )


def _row(name: str, one: dict[str, Any]) -> str:
    energy = f"{one['energy_mj']:.1f} mJ" if one.get("energy_mj") else "-"
    clock = f"{one['sm_clock_mhz']:.0f} MHz" if one.get("sm_clock_mhz") else "-"
    return (
        f"| {name} | {one['time_us']:.1f} us | {energy} | {clock} | "
        f"{', '.join(one.get('flags') or []) or '-'} |"
    )


if __name__ == "__main__":
    main()
