"""Measure twelve operators with the farm, with Zeus and with ``torch.utils.benchmark``, on one card
in one run.

    python benchmarks/second_opinions.py [--card cpu] [--seconds 5]

Each operator is measured three times, one after the other, with the same inputs and the cache of
`reuse`: a reading of the farm; `torch.utils.benchmark.Timer` around the farm's rounds (time); a
`ZeusMonitor` window around a loop of these rounds (power and energy; a GPU and the package ``zeus``
are needed, otherwise the reason is printed). The output is a table of ratios, other / farm, and
their medians. A CPU has times only: the farm counts the CPU time of one thread and the fastest
passes, the timer counts elapsed time, so ratios above 1 are expected there."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import benchmark

from farm.benchmark.bench import Bench
from farm.benchmark.passes import numeric_flags
from farm.benchmark.subjects import prepare
from farm.devices.host import discover, open_device
from farm.devices.lock import CardLock
from farm.operators.capture import capture
from farm.requests.card_selection import matching_cards
from farm.settings import settings
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject

BFLOAT16 = torch.bfloat16
OPERATORS: list[tuple[nn.Module, tuple[int, ...], torch.dtype]] = [
    (nn.Linear(768, 768), (4096, 768), BFLOAT16),
    (nn.Linear(4096, 14336, bias=False), (64, 4096), BFLOAT16),
    (nn.Linear(2048, 8192, bias=False), (2048, 2048), BFLOAT16),
    (nn.Linear(768, 3072), (32, 197, 768), torch.float32),
    (nn.Conv2d(64, 64, 3, padding=1), (32, 64, 56, 56), torch.float32),
    (nn.Conv2d(256, 256, 3, padding=1), (32, 256, 14, 14), BFLOAT16),
    (nn.Conv2d(144, 144, 3, padding=1, groups=144), (32, 144, 56, 56), torch.float32),
    (nn.BatchNorm2d(144), (32, 144, 56, 56), torch.float32),
    (nn.LayerNorm(768), (32, 197, 768), torch.float32),
    (nn.GELU(), (32, 197, 3072), BFLOAT16),
    (nn.MaxPool2d(3, 2, 1), (32, 64, 112, 112), torch.float32),
    (nn.Softmax(-1), (32, 12, 197, 197), torch.float32),
]


def subjects(small: bool) -> list[Subject]:
    """The twelve operators as subjects; `small`: with an eighth of the rows, for a CPU."""
    found = []
    for module, shape, dtype in OPERATORS:
        shape = (max(1, shape[0] // 8), *shape[1:]) if small else shape
        given = torch.empty(shape, dtype=dtype, device="meta")
        (spec,) = capture(module.to(device="meta", dtype=dtype).eval(), (given,)).tuples.values()
        found.append(Subject("operator", spec.id, spec.to_json()))
    return found


def zeus_monitor(cuda: bool) -> Any:
    """A `ZeusMonitor` of the card, or the reason why there is none."""
    if not cuda:
        return "Zeus: skipped, because it measures GPUs and this card is a CPU"
    try:
        from zeus.monitor import ZeusMonitor
    except ImportError:
        return (
            "Zeus: skipped, because the package `zeus` is not installed; `pip install zeus` "
            "installs it"
        )
    return ZeusMonitor(gpu_indices=[torch.cuda.current_device()])


def compare(subject: Subject, bench: Bench, monitor: Any, seconds: float) -> dict[str, float]:
    """The ratios other / farm of one operator: time, and with a monitor power and energy."""
    protocol = Protocol(launch="graph" if bench.cuda else "eager", residency="reuse")
    stopping = Stopping() if bench.cuda else Stopping(warm_up_s=0.1, minimum_s=0.3, maximum_s=0.6)
    reading = bench.measure(subject, protocol, stopping)
    wait: Callable[[], object] = torch.cuda.synchronize if bench.cuda else lambda: None
    with numeric_flags(protocol), torch.set_grad_enabled(protocol.grad):
        workload = prepare(subject, protocol, bench.torch_device)
        one = workload.rounds[0]

        def work() -> None:
            for _ in range(20):
                one.launch()
            wait()

        timer = benchmark.Timer(
            "work()", globals={"work": work}, num_threads=torch.get_num_threads()
        )
        time_us = (
            timer.blocked_autorange(min_run_time=min(1.0, seconds)).median / 20 / one.passes * 1e6
        )
        found = {"time_us": reading.time_us.value, "time": time_us / reading.time_us.value}
        if not isinstance(monitor, str):
            calls, begin_s = 0, time.perf_counter()
            monitor.begin_window("loop")
            while time.perf_counter() - begin_s < seconds:
                work()
                calls += 20 * one.passes
            measured = monitor.end_window("loop")
            if reading.power_w and reading.energy_mj:
                found["power"] = measured.total_energy / measured.time / reading.power_w.value
                found["energy"] = measured.total_energy * 1e3 / calls / reading.energy_mj.value
        workload.close()
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--card", default="", help="as for `farm run`; default: the first card of this host"
    )
    options.add_argument("--seconds", type=float, default=5.0, help="length of a window of Zeus")
    given = options.parse_args()
    cards = matching_cards(discover(settings()), given.card) if given.card else discover(settings())
    if not cards:
        raise SystemExit(f"This host has no card '{given.card}'. List its cards with `farm cards`.")
    card, cuda = cards[0], cards[0].is_gpu
    monitor = zeus_monitor(cuda)
    print(f"{card}\n{monitor if isinstance(monitor, str) else 'Zeus: ZeusMonitor'}\n")
    print("| operator | farm, us | time | power | energy |\n| --- | ---: | ---: | ---: | ---: |")
    rows = []
    with CardLock(card.id, settings().lock_dir), contextlib.closing(open_device(card)) as device:
        bench = Bench(device, f"cuda:{card.index}" if cuda else "cpu", canary_every=0)
        for subject in subjects(small=not cuda):
            rows.append(compare(subject, bench, monitor, given.seconds))
            cells = [
                f"{rows[-1][name]:.3f}" if name in rows[-1] else ""
                for name in ("time", "power", "energy")
            ]
            print(
                f"| {label_of(parse(subject.spec))} | {rows[-1]['time_us']:.4g} | "
                f"{' | '.join(cells)} |",
                flush=True,
            )
    for name in ("time", "power", "energy"):
        if known := [row[name] for row in rows if name in row]:
            print(
                f"median ratio of {name}, other / farm: {statistics.median(known):.3f} "
                f"({len(known)} operators)"
            )


if __name__ == "__main__":
    main()
