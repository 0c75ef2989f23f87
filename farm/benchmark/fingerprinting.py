"""The fingerprint of a card: bandwidth, arithmetic rates, idle and base power, delays of its power
sensors.

A worker measures the fingerprint once for each card and driver version: about twelve seconds on a
GPU, one second on a CPU. The roofline (`farm.types.roofline`) uses the measured rates instead
of a data sheet's. The delays of the sensors limit how short a measurement window can be."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark.passes import numeric_flags
from farm.benchmark.sampler import Sampler, tiny_kernels
from farm.benchmark.torch_device import capture_graph, synchronize
from farm.types import intervals
from farm.types.fingerprint import FINGERPRINT_VERSION
from farm.types.protocol import Protocol

if TYPE_CHECKING:
    from farm.benchmark.bench import Bench

CPU_LOOPS = 20  # of calls on a CPU, of which the fastest counts
RATE_S = 0.25  # time to measure each rate, after a tenth of it to warm up
REST_S = 1.2  # idle time before the load begins
# load on a cold card: a larger rise of temperature gives more precise watts per degree
LOAD_S = 5.0
# settling time after a change of the load; later changes of the power come from the temperature
REACH_S = 0.3
COOL_S = 3.0  # time at full clocks with almost no work, after the load


def take(bench: Bench) -> dict[str, Any]:
    """Measure the fingerprint of a bench's card. If the card does not provide a value, its key is
    missing.
    """
    began_s = time.perf_counter()
    fingerprint: dict[str, Any] = {
        "version": FINGERPRINT_VERSION,
        "driver": bench.device.card.driver,
    }
    if bench.cuda:
        bench.levels.refresh()
        fingerprint |= _sensors(bench)  # before other work warms the card
    fingerprint["launch_floor_us"] = _launch_floor_us(bench)
    fingerprint["copy_bytes_per_s"] = _copy_bytes_per_s(bench)
    fingerprint["matmul_flops_per_s"] = _matmul_flops_per_s(bench)
    if bench.cuda:
        fingerprint["idle_power_w"], fingerprint["base_power_w"] = (
            bench.levels.idle_power_w,
            bench.levels.base_power_w,
        )
        fingerprint["power_limit_w"] = bench.device.power_limit_w()
    fingerprint["taken_in_s"] = time.perf_counter() - began_s
    return {name: _rounded(value) for name, value in fingerprint.items() if value is not None}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _seconds_each(work: Callable[[], object], bench: Bench) -> float:
    """Seconds of one call, by the fastest of several loops: a rate is a peak rate."""
    work()
    synchronize(bench.torch_device)
    count, best_s = 1, float("inf")
    until_s = time.perf_counter() + 1.1 * RATE_S
    while time.perf_counter() < until_s:
        begin_s = time.perf_counter()
        for _ in range(count):
            work()
        synchronize(bench.torch_device)
        spent_s = time.perf_counter() - begin_s
        best_s = min(best_s, spent_s / count)
        if spent_s < RATE_S / 10:
            count *= 2
    return best_s


def _copy_bytes_per_s(bench: Bench) -> float:
    size = 2**30 if bench.cuda else 2**27
    source = torch.zeros(size // 4, device=bench.torch_device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_each(lambda: target.copy_(source), bench)


def _matmul_flops_per_s(bench: Bench) -> dict[str, float]:
    size = 8192 if bench.cuda else 1024
    kinds = {"float32": torch.float32}
    if bench.cuda:
        kinds |= {"tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    rates: dict[str, float] = {}
    for name, dtype in kinds.items():
        # suppress: the card may not support the dtype
        with numeric_flags(Protocol(tf32=name == "tf32")), contextlib.suppress(RuntimeError):
            left, right = (
                torch.randn(size, size, device=bench.torch_device).to(dtype) for _ in range(2)
            )
            out = torch.empty_like(left)
            each_s = _seconds_each(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), bench)  # type: ignore[misc]
            rates[name] = 2 * size**3 / each_s
    return rates


def _cpu_time_s(work: Callable[[], object], calls: int) -> float:
    """The CPU time of this thread for one of so many calls in a loop: without the time in which
    other programs use the core. Unit: s."""
    begin_s = time.thread_time()
    for _ in range(calls):
        work()
    return (time.thread_time() - begin_s) / calls


def _launch_floor_us(bench: Bench) -> float:
    """The time of a one-element kernel: no call takes less. On a GPU, that of a kernel in a graph;
    on a CPU, that of a call with all that PyTorch does for it. Unit: us."""
    tiny = torch.zeros(1, device=bench.torch_device)
    nodes = 1000
    if not bench.cuda:
        return min(_cpu_time_s(lambda: tiny.add_(1), nodes) for _ in range(CPU_LOOPS)) * 1e6
    tiny.add_(1)
    graph = capture_graph([lambda: tiny.add_(1)] * nodes, bench.torch_device)
    return _seconds_each(graph.replay, bench) / nodes * 1e6


def _sensors(bench: Bench) -> dict[str, Any]:
    """Measure the delays of the power sensors after a step from idle to full load, and the watts
    per degree.
    """
    left, right = (torch.randn(4096, 4096, device=bench.torch_device) for _ in range(2))
    out = torch.mm(left, right)  # loads the library before the step
    torch.cuda.synchronize(bench.torch_device)
    device = bench.device
    averages: list[tuple[float, float]] = []
    with Sampler(device) as sampler:
        time.sleep(REST_S)
        step_s = time.perf_counter()
        while (now_s := time.perf_counter()) < step_s + LOAD_S:
            for _ in range(4):
                torch.mm(left, right, out=out)
            torch.cuda.synchronize(bench.torch_device)
            if (value := device.power_average_w()) is not None:
                averages.append((now_s, value))
        cool_s = time.perf_counter()
        rest = tiny_kernels(bench.torch_device)
        while time.perf_counter() < cool_s + COOL_S:
            rest()
        end_s = time.perf_counter()
    trace = sampler.trace((0.0, 0.0))
    if trace is None:
        return {}
    offset_s, cool_s, end_s = (when - sampler.began_s for when in (step_s, cool_s, end_s))
    instant = zip(*trace.series.get("power_instant_w", ([], [])), strict=True)
    return {
        "counter_tick_s": sampler.tick_s,
        "power_instant": step_answer(
            [(when - offset_s, value) for when, value in instant if when < cool_s]
        ),
        "power_average": step_answer([(when - step_s, value) for when, value in averages]),
        "w_per_c": _w_per_c(trace.series, offset_s + REACH_S, cool_s),
        "base_w_per_c": _w_per_c(trace.series, cool_s + REACH_S, end_s),
    }


def step_answer(points: list[tuple[float, float]]) -> dict[str, float] | None:
    """The delay of a power sensor after a load step at 0 s; None if unknown.

    `lag_s` is the time until the sensor shows half of the step, `rise_s` its time from 10 to 90 %
    of the step. `points` are (s since the step, W). Points before 0, or else the first point, give
    the level before the step."""
    after = [(when, value) for when, value in points if when >= 0]
    if len(after) < 10:
        return None
    before = [value for when, value in points if when < 0] or [after[0][1]]
    low = statistics.median(before)
    # The level after the sensor has settled and before the temperature raises the power.
    high = statistics.median(
        [value for when, value in after if 1.5 <= when <= 2.5] or [after[-1][1]]
    )
    if high <= low * 1.05:
        return None

    def reached(share: float) -> float:
        return next(
            (when for when, value in after if value >= low + share * (high - low)), after[-1][0]
        )

    return {"lag_s": reached(0.5), "rise_s": reached(0.9) - reached(0.1)}


def _w_per_c(
    series: dict[str, tuple[list[float], list[float]]], begin_s: float, end_s: float
) -> dict[str, float] | None:
    """Watts per degree (C) at constant work, by the energy counter; None if the temperature changed
    less than 2 C.
    """
    if "energy_mj" not in series or "temperature_c" not in series:
        return None
    temperatures = list(zip(*series["temperature_c"], strict=True))
    near_c: list[float] = []
    powers_w: list[float] = []
    times_s, energies_mj = series["energy_mj"]
    for first_s, next_s, power_w in intervals.power_by_step(times_s[::2], energies_mj[::2]):
        near = [value for when, value in temperatures if first_s - 0.1 <= when <= next_s + 0.1]
        if begin_s <= first_s and next_s <= end_s and near:
            near_c.append(statistics.fmean(near))
            powers_w.append(power_w)
    if len(near_c) < 4 or max(near_c) - min(near_c) < 2:
        return None
    fit = intervals.line(near_c, powers_w)
    return {"value": fit.rate, "half_width": fit.half_width, "at_w": statistics.fmean(powers_w)}
