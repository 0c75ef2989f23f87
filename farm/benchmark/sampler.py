"""A thread that samples a card's sensors during a measurement. Each value has its own timestamp.

The thread must not slow down the benchmark. NVML's calls release the GIL, and the thread sleeps
between them. It queries clocks, temperature and throttle reasons only ten times a second. The
energy counter of an H200 changes every 100 ms: the thread queries it only from shortly before the
next change, every millisecond."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Self

import torch

from farm.benchmark.counter_period import LAST_CHANGES, SHARP_S, CounterPeriod
from farm.devices.device import Device
from farm.types.intervals import power_of_ticks, slope, time_average
from farm.types.reading import Trace

THROTTLED_SHARE = 0.05  # of the samples: a smaller share with a throttle reason does not count
BASE_PAUSE_S = 0.005
TICK_PAUSE_S = 0.001
SLOW_PAUSE_S = 0.1
PROCESS_PAUSE_S = 0.25
# frequent queries of the energy counter begin this long before its next expected change
TICK_GUARD_S = 0.008

SLOW_FIELDS = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "memory_temperature_c")
POWER_FIELDS = ("power_instant_w", "power_average_w")


@dataclass
class _Series:
    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, time_s: float, value: float) -> None:
        # Append the value first: other threads use the length of `times_s`, so each time must have
        # its value.
        self.values.append(value)
        self.times_s.append(time_s)

    def span(self, begin_s: float, end_s: float) -> tuple[list[float], list[float]]:
        count = len(self.times_s)
        chosen = [index for index in range(count) if begin_s <= self.times_s[index] <= end_s]
        return [self.times_s[index] for index in chosen], [self.values[index] for index in chosen]


@dataclass(frozen=True)
class SampledWindow:
    """Averages of the samples between two times."""

    # time average of the instant power; without it, of the driver's averaged power
    power_w: float | None = None
    power_source: str = ""
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    temperature_slope_c_per_s: float | None = None
    memory_temperature_c: float | None = None
    # reason -> share of the samples with it
    throttle_shares: Mapping[str, float] = field(default_factory=dict)
    foreign_processes: frozenset[int] = frozenset()  # ids of other processes on the card

    def throttled(self, *reasons: str) -> bool:
        """True if one of these reasons slowed the card during a relevant share of the window."""
        return any(self.throttle_shares.get(name, 0.0) >= THROTTLED_SHARE for name in reasons)


class Sampler:
    """While active, samples one device's sensors in its own thread.

    If the device has no sensors, the sampler starts no thread, and windows are empty.

    Args:
        own_processes: process ids of the benchmark; None: the sampler does not look for other
            processes.
    """

    def __init__(self, device: Device, own_processes: frozenset[int] | None = None) -> None:
        self.device = device
        capabilities = device.capabilities
        self._power_field = next((name for name in POWER_FIELDS if name in capabilities), "")
        self._slow_fields = tuple(name for name in SLOW_FIELDS if name in capabilities)
        # then windows begin and end at ticks
        self.counts_energy = "energy_counter_mj" in capabilities
        if device.counter_period is None:
            device.counter_period = CounterPeriod()
        self.period: CounterPeriod = device.counter_period
        self._throttles = "throttle_reasons" in capabilities
        self._series: dict[str, _Series] = {
            name: _Series() for name in ("energy_mj", self._power_field, *self._slow_fields) if name
        }
        self._reasons: list[tuple[float, tuple[str, ...]]] = []
        self._own_processes = own_processes if "compute_processes" in capabilities else None
        self._foreign: list[tuple[float, frozenset[int]]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.began_s = 0.0
        self._last_mj: float | None = None
        self._asked_s = 0.0
        self._sharp_s: list[float] = []
        # when the energy counter changes next; -inf if unknown, or at every query
        self._expected_s = -math.inf
        self._power_due_s = self._slow_due_s = self._process_due_s = 0.0
        self.busy_s = 0.0  # time that the thread spent in the driver

    @property
    def active(self) -> bool:
        return bool(self._series and (self.counts_energy or self._power_field or self._slow_fields))

    def __enter__(self) -> Self:
        self.began_s = time.perf_counter()
        if self.active and self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        if self.counts_energy:
            self.period.learn(*self.ticks(), frozenset(self._sharp_s))

    def ticks(self, since_s: float = 0.0) -> tuple[list[float], list[float]]:
        """The times in s, from `since_s`, at which a query saw that the energy counter changed, and
        its new values in mJ. See `regular`."""
        return self._series["energy_mj"].span(since_s, float("inf"))

    def regular(self, times_s: Sequence[float]) -> list[float]:
        """The times of ticks, moved to whole periods of the counter if these are known. Unit: s."""
        return self.period.regular(times_s, self._sharp_s[-LAST_CHANGES:])

    def power_values(self, begin_s: float, end_s: float) -> list[float]:
        """Samples of the power sensor in [begin_s, end_s]. Unit: W."""
        return self._series[self._power_field].span(begin_s, end_s)[1] if self._power_field else []

    def temperature_slope_c_per_s(self, begin_s: float, end_s: float) -> float | None:
        """The rate of the chip's temperature over [begin_s, end_s], by least squares over samples
        in whole degrees.

        None if the card has no temperature sensor or there are fewer than two samples.
        """
        if "temperature_c" not in self._slow_fields:
            return None
        times, values = self._series["temperature_c"].span(begin_s, end_s)
        return slope(times, values).rate if len(times) >= 2 else None

    def average_power_w(
        self, begin_s: float, end_s: float = math.inf, least_ticks: int = 3
    ) -> float | None:
        """Average power: from the ticks since `begin_s`; if they are too few, from the sensor over
        [begin_s, end_s].
        """
        times_s, energies_mj = self.ticks(begin_s)
        if len(times_s) >= least_ticks:
            return power_of_ticks(self.regular(times_s), energies_mj).rate
        return self.window(begin_s, end_s).power_w

    @property
    def tick_s(self) -> float | None:
        """The period of the energy counter: the median time between its last 20 changes; None if
        unknown. Unit: s.
        """
        times = self._series["energy_mj"].times_s
        steps = [b - a for a, b in itertools.pairwise(times)]
        return median(steps[-20:]) if steps else None

    def window(self, begin_s: float, end_s: float) -> SampledWindow:
        means: dict[str, float] = {}
        for name in self._slow_fields:
            # Slow fields are sampled ten times a second: a short window also uses the value just
            # before it.
            if values := self._series[name].span(begin_s - SLOW_PAUSE_S * 1.5, end_s)[1]:
                means[name] = fmean(values)
        power_w = None
        if self._power_field:
            power_w = time_average(
                *self._series[self._power_field].span(begin_s, end_s), begin_s, end_s
            )
        reasons_before = [
            (time_s, words) for time_s, words in list(self._reasons) if time_s <= end_s
        ]
        # If the window is so short that it has no sample, use the last sample before it.
        reasons = [words for time_s, words in reasons_before if begin_s <= time_s] or [
            words for _, words in reasons_before[-1:]
        ]
        counts = Counter(word for words in reasons for word in words)
        return SampledWindow(
            power_w=power_w,
            power_source=self._power_field.removesuffix("_w"),
            **{name: means.get(name) for name in SLOW_FIELDS},
            temperature_slope_c_per_s=self.temperature_slope_c_per_s(begin_s, end_s),
            throttle_shares={word: counts[word] / len(reasons) for word in sorted(counts)},
            foreign_processes=self.foreign_processes(begin_s - PROCESS_PAUSE_S, end_s),
        )

    def foreign_processes(self, begin_s: float, end_s: float) -> frozenset[int]:
        """The ids of other processes that were on the card between two times."""
        return frozenset().union(
            *(processes for time_s, processes in list(self._foreign) if begin_s <= time_s <= end_s)
        )

    def trace(self, window_s: tuple[float, float]) -> Trace | None:
        """All samples so far, with times in s since the sampler's start. None if there are no
        samples.
        """
        reasons, foreign = list(self._reasons), list(self._foreign)
        trace = {name: kept.span(self.began_s, math.inf) for name, kept in self._series.items()}
        if not any(times for times, _ in trace.values()):
            return None
        times = [moment for moment, _ in reasons]
        trace["throttle_reasons"] = (times, [len(words) for _, words in reasons])
        for word in sorted({word for _, words in reasons for word in words}):
            trace[f"throttle_{word}"] = (times, [int(word in words) for _, words in reasons])
        trace["foreign_processes"] = (
            [moment for moment, _ in foreign],
            [len(ids) for _, ids in foreign],
        )
        series = {
            name: ([round(moment - self.began_s, 4) for moment in times], values)
            for name, (times, values) in trace.items()
            if times
        }
        return Trace((window_s[0] - self.began_s, window_s[1] - self.began_s), series)

    def _poll(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self._look())

    def _look(self) -> float:
        """Query the sensors that are due; return the seconds until the next query."""
        energy = self._series["energy_mj"]
        now_s = begin_s = time.perf_counter()
        if self.counts_energy and (
            now_s >= self._expected_s - TICK_GUARD_S or self.period.period_s is None
        ):
            value_mj = self.device.energy_counter_mj()
            if value_mj is not None and value_mj != self._last_mj:
                if self._last_mj is not None:
                    # The newest change was after the begin of the last query, and at most a period
                    # before this one.
                    done_s = time.perf_counter()
                    after_s = max(self._asked_s, now_s - (self.period.period_s or math.inf))
                    seen_s = (after_s + done_s) / 2
                    if done_s - after_s <= SHARP_S:
                        self._sharp_s.append(seen_s)
                    energy.add(seen_s, value_mj)
                    self._expected_s = self._next_change_s(energy.times_s[-LAST_CHANGES:])
                self._last_mj = value_mj
            self._asked_s = now_s
        if self._power_field and now_s >= self._power_due_s:
            self._add(self._power_field)
            self._power_due_s = now_s + BASE_PAUSE_S
        if now_s >= self._slow_due_s:
            self._slow_due_s = now_s + SLOW_PAUSE_S
            for name in self._slow_fields:
                self._add(name)
            if self._throttles and (words := self.device.throttle_reasons()) is not None:
                self._reasons.append((time.perf_counter(), words))
        if self._own_processes is not None and now_s >= self._process_due_s:
            self._process_due_s = now_s + PROCESS_PAUSE_S
            if (processes := self.device.compute_processes()) is not None:
                self._foreign.append((time.perf_counter(), processes - self._own_processes))
        self.busy_s += time.perf_counter() - begin_s
        left_s = self._expected_s - time.perf_counter()
        if left_s > TICK_GUARD_S:
            return min(BASE_PAUSE_S, left_s - TICK_GUARD_S + 1e-4)
        return TICK_PAUSE_S if left_s > -2 * TICK_GUARD_S else BASE_PAUSE_S

    def _add(self, name: str) -> None:
        value = getattr(self.device, name)()
        if value is not None:
            self._series[name].add(time.perf_counter(), value)

    def _next_change_s(self, times_s: list[float]) -> float:
        """The expected time of the counter's change after these."""
        period_s = self.period.period_s or (times_s[-1] - times_s[-2] if len(times_s) > 1 else 0.0)
        if period_s < 4 * BASE_PAUSE_S:  # RAPL changes every millisecond: each query sees a change
            return -math.inf
        return self.regular(times_s)[-1] + period_s


LEVEL_S = 0.5  # window in which the idle or base power is measured
LEVEL_AGE_S = 1800.0  # an older base power is measured again


class PowerLevels:
    """Idle power and base power (full clocks, almost no work) of a card. Unit: W; None if unknown.

    Each reading contains both, so that users can compute the energy above idle. Create the object
    before the process uses CUDA, so that the card is idle; or pass the idle power if it is known.
    """

    def __init__(
        self, device: Device, torch_device: torch.device, idle_power_w: float | None = None
    ) -> None:
        self._device = device
        self._torch_device = torch_device
        self._taken_s = -math.inf
        self.idle_power_w = _average_power_w(device) if idle_power_w is None else idle_power_w
        self.base_power_w: float | None = None

    def refresh(self) -> None:
        """Measure the base power once per process, and again if it is older than `LEVEL_AGE_S`."""
        if self._torch_device.type != "cuda" or time.perf_counter() - self._taken_s < LEVEL_AGE_S:
            return
        self.base_power_w = _average_power_w(self._device, tiny_kernels(self._torch_device))
        self._taken_s = time.perf_counter()


def tiny_kernels(device: torch.device) -> Callable[[], None]:
    """Return a function that runs a one-element kernel and waits 2 ms: the card has full clocks and
    almost no work.
    """
    tiny = torch.zeros(1, device=device)

    def run() -> None:
        tiny.add_(1)
        torch.cuda.synchronize(device)
        time.sleep(0.002)

    return run


def _average_power_w(
    device: Device, work: Callable[[], None] = lambda: time.sleep(0.01)
) -> float | None:
    """Average power in W over `LEVEL_S`, while `work` runs again and again; None if the device has
    no sensors.
    """
    with Sampler(device) as sampler:
        if not sampler.active:
            return None
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < LEVEL_S + (0.15 if sampler.counts_energy else 0.0):
            work()
        end_s = time.perf_counter()
    return sampler.average_power_w(begin_s, end_s)
