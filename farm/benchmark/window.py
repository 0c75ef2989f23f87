"""The results of a window: its power, the time and energy of a pass, and its flags.

`farm.benchmark.measure` runs the window. docs/method.md describes the power sources and the intervals.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from farm.benchmark import intervals
from farm.benchmark.clock import TimedRound, pass_times_us, starved_share
from farm.benchmark.sampler import SampledWindow, Sampler
from farm.benchmark.workload import Workload
from farm.types.reading import METHOD, Details

THROTTLED_SHARE = 0.05  # of the samples
STARVED = 0.005  # of a window's time
BUSY = 0.1  # of the cores' time in a window, for other processes
DRIFT = 0.03  # relative difference of power between the halves of a window
LEAST_ROUNDS = 3  # for an interval
FLOOR_TICKS = 5  # a window has at least so many steps of the energy counter
SENSOR_HOLDS_S = 0.15  # a power sensor may keep its value for so long
DISAGREE = 0.02  # relative difference between the counter's power and the instant sensor's
RAMP = 0.02  # a first step is still warm-up if its power differs more from the median of the others

THERMAL = ("thermal", "hardware_thermal")
OTHER_SLOWDOWNS = ("hardware_slowdown", "power_brake", "sync_boost")


# ------------------------------------------------------------------------------------------ power


@dataclass(frozen=True)
class WindowPower:
    """Mean power of a window; `power_w` is None if the card has no power source. Unit: W.

    Attributes:
        begin_s, end_s: the window, moved to ticks of the energy counter if the card has one.
        ticks: of the energy counter, in the window.
        integral_w: mean power of the instant sensor, beside the counter.
    """

    power_w: float | None
    half_width_w: float | None
    source: str
    begin_s: float
    end_s: float
    drift: float = 0.0
    ticks: int | None = None
    ramp_ticks_dropped: int | None = None
    integral_w: float | None = None

    @property
    def relative(self) -> float:
        """Half-width as a share of the power."""
        if self.power_w is None:
            return 0.0
        return math.inf if self.half_width_w is None else intervals.relative(self.half_width_w, self.power_w)

    @property
    def disagrees(self) -> bool:
        """True if the counter and the instant sensor give different powers."""
        if not self.power_w or not self.integral_w:
            return False
        return abs(self.integral_w / self.power_w - 1) > DISAGREE


def window_power(sampler: Sampler, begin_s: float, end_s: float) -> WindowPower:
    """Mean power of a window: from the energy counter's ticks, else from the power sensor."""
    times, energies = sampler.ticks(begin_s)
    pairs = [(a, b) for a, b in zip(times, energies, strict=True) if a <= end_s]
    if len(pairs) >= 3:
        dropped = _ramp(pairs)
        pairs = pairs[dropped:]
        times, energies = [a for a, _ in pairs], [b for _, b in pairs]
        fit = intervals.power_of_ticks(times, energies)
        drift = _drift(times, energies)
        window = sampler.window(times[0], times[-1])
        integral_w = window.power_w if window.power_source == "power_instant" else None
        return WindowPower(
            power_w=fit.rate,
            # A power that drifts is known no better than to half of its drift.
            half_width_w=math.hypot(fit.half_width, fit.rate * drift / 2),
            source="rapl" if sampler.device.card.kind == "cpu" else "energy_counter",
            begin_s=times[0],
            end_s=times[-1],
            drift=drift,
            ticks=len(pairs),
            ramp_ticks_dropped=dropped,
            integral_w=None if integral_w is None else round(integral_w, 3),
        )
    window = sampler.window(begin_s, end_s)
    if window.power_w is None:
        return WindowPower(None, None, "", begin_s, end_s)
    values = sampler.power_values(begin_s, end_s)
    # However often it is queried, a sensor may keep its value for a tenth of a second: batches must be longer.
    half_width = intervals.batch_half_width(values, batches=max(3, min(10, int((end_s - begin_s) / SENSOR_HOLDS_S))))
    source = {"power_instant": "instant_power", "power_average": "average_power"}[window.power_source]
    return WindowPower(window.power_w, half_width, source, begin_s, end_s)


def _ramp(pairs: list[tuple[float, float]]) -> int:
    """The number of first ticks that are still warm-up: power rises towards that of the later steps."""
    dropped = 0
    while len(pairs) - dropped > FLOOR_TICKS + 1:
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(pairs[dropped:])]
        usual = statistics.median(rates[1:])
        # Two steps together: a late tick makes one step long and the next short.
        first = (pairs[dropped + 2][1] - pairs[dropped][1]) / (pairs[dropped + 2][0] - pairs[dropped][0])
        if abs(first / usual - 1) <= RAMP:
            break
        dropped += 1
    return dropped


def _drift(times: list[float], energies: list[float]) -> float:
    """Relative difference of power between the second and the first half of the ticks."""
    if len(times) < 5:
        return 0.0
    middle = len(times) // 2
    first = (energies[middle] - energies[0]) / (times[middle] - times[0])
    second = (energies[-1] - energies[middle]) / (times[-1] - times[middle])
    return (second - first) / ((second + first) / 2)


# ------------------------------------------------------------------------------------------ time and energy of a pass


@dataclass(frozen=True)
class PassTimes:
    """Time of one pass over a window's rounds, by three figures with their 95 % half-widths. Units: us."""

    figure: Literal["mean", "median"]  # which of them is `time_us`
    time_us: float
    half_width_us: float
    mean_us: float
    mean_half_width_us: float
    median_us: float
    median_half_width_us: float
    trimmed_us: float
    trimmed_half_width_us: float

    @classmethod
    def of(cls, rounds: Sequence[TimedRound], *, with_power: bool) -> Self:
        """
        Args:
            rounds: at least one.
            with_power: True if the window has a power.
        """
        values = pass_times_us(rounds)
        figure: Callable[[Sequence[float]], float]
        if with_power:
            # Power is the mean over the window, so the time that is multiplied with it is the mean as well.
            time_us, figure = sum(one.took_s for one in rounds) / passes_of(rounds) * 1e6, statistics.fmean
        else:
            # There is no energy to agree with, and on a CPU that others use too, the mean mostly measures the others.
            time_us, figure = statistics.median(values), statistics.median

        def half_width_us(figure: Callable[[Sequence[float]], float]) -> float:
            return intervals.finite(intervals.batch_half_width(values, figure), time_us)

        return cls(
            figure="mean" if with_power else "median",
            time_us=time_us,
            half_width_us=half_width_us(figure),
            mean_us=statistics.fmean(values),
            mean_half_width_us=half_width_us(statistics.fmean),
            median_us=statistics.median(values),
            median_half_width_us=half_width_us(statistics.median),
            trimmed_us=intervals.trimmed_mean(values),
            trimmed_half_width_us=half_width_us(intervals.trimmed_mean),
        )


def passes_of(rounds: Sequence[TimedRound]) -> int:
    return sum(one.passes for one in rounds)


@dataclass(frozen=True)
class Energy:
    """Energy of one pass and its 95 % half-width (mJ), and the half-width of the power (W)."""

    energy_mj: float
    half_width_mj: float
    power_half_width_w: float

    @classmethod
    def of(cls, power: WindowPower, times: PassTimes) -> Self | None:
        """Power times time; None without a power."""
        if power.power_w is None:
            return None
        power_half_width_w = intervals.finite(power.half_width_w or 0.0, power.power_w)
        energy_mj = power.power_w * times.time_us * 1e-3
        half_width_mj = intervals.ratio_half_width(
            energy_mj, power.power_w, power_half_width_w, times.time_us, times.half_width_us
        )
        return cls(energy_mj, half_width_mj, power_half_width_w)


# ------------------------------------------------------------------------------------------ the window


@dataclass(frozen=True)
class SteadyWindow:
    """A steady window as it ran.

    Attributes:
        rounds: the rounds that ended in the window.
        power: the mean power, and the begin and end of the window.
        seen: the samples of the sensors.
        converged: True if the stopping rule was met within `ceiling_s`.
        warm_up_slope_c_per_s: rate of the chip's temperature at the end of the warm-up; None if unknown.
        unsettled: the temperature still changed too fast or is unknown, on a card with a temperature sensor.
        foreign: ids of processes on the card, before, during and after the window, that are not the benchmark's.
        foreign_cpu_share: the share of a CPU's core time that other processes had; None if unknown.
        lacking: sensors that the card lacks and a good reading needs.
    """

    workload: Workload
    rounds: Sequence[TimedRound]
    power: WindowPower
    seen: SampledWindow
    converged: bool
    ceiling_s: float
    warm_up_s: float
    warm_up_slope_c_per_s: float | None
    unsettled: bool
    foreign: frozenset[int]
    foreign_cpu_share: float | None
    lacking: tuple[str, ...]

    @property
    def starved_share(self) -> float:
        """The share of the window in which the card waited for the host; known for replayed graphs only."""
        return starved_share(self.rounds) if self.workload.replayed else 0.0

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        return tuple(name for name in self.seen.throttle_shares if name != "idle" and self._throttled(name))

    @property
    def flags(self) -> tuple[str, ...]:
        """Conditions that make the figures doubtful."""
        power = self.power
        known = power.power_w is not None
        holds = {
            "not_converged": not self.converged,
            "few_passes": len(self.rounds) < LEAST_ROUNDS,
            "not_cold": self.workload.not_cold,
            "unsettled": self.unsettled,
            "lacks_sensors": bool(self.lacking),
            "starved": self.starved_share > STARVED,
            "shared": bool(self.foreign),
            "busy_host": (self.foreign_cpu_share or 0.0) > BUSY,
            "throttled_power": self._throttled("power_cap"),
            "throttled_thermal": self._throttled(*THERMAL),
            "throttled_other": self._throttled(*OTHER_SLOWDOWNS),
            "no_energy": not known,
            "lesser_power_source": known and power.source not in ("energy_counter", "rapl"),
            "power_disagrees": power.disagrees,
            "drifting": known and abs(power.drift) > DRIFT,
        }
        return tuple(sorted(name for name, so in holds.items() if so))

    def _throttled(self, *reasons: str) -> bool:
        return any(self.seen.throttle_shares.get(name, 0.0) >= THROTTLED_SHARE for name in reasons)

    def details(self, times: PassTimes) -> Details:
        """The workload's details with those of the window."""
        slope_c_per_s, warm_up_c_per_s = self.seen.temperature_slope_c_per_s, self.warm_up_slope_c_per_s
        flags = self.flags
        return dataclasses.replace(
            self.workload.details,
            method=METHOD,
            rounds=len(self.rounds),
            late_rounds=sum(one.late for one in self.rounds) or None,
            starved_share=round(self.starved_share, 4) if "starved" in flags else None,
            time_figure=times.figure,
            time_mean_us=times.mean_us,
            time_mean_half_width_us=times.mean_half_width_us,
            time_median_half_width_us=times.median_half_width_us,
            time_trimmed_half_width_us=times.trimmed_half_width_us,
            ceiling_s=None if self.converged else self.ceiling_s,
            ticks=self.power.ticks,
            ramp_ticks_dropped=self.power.ramp_ticks_dropped,
            power_integral_w=self.power.integral_w,
            power_drift=round(self.power.drift, 4) if "drifting" in flags else None,
            lacks=self.lacking or None,
            throttle_shares={name: round(share, 3) for name, share in self.seen.throttle_shares.items()} or None,
            foreign_processes=tuple(sorted(self.foreign)[:16]) or None,
            foreign_cpu_share=None if self.foreign_cpu_share is None else round(self.foreign_cpu_share, 3),
            temperature_slope_c_per_s=None if slope_c_per_s is None else round(slope_c_per_s, 2),
            warm_up_slope_c_per_s=None if warm_up_c_per_s is None else round(warm_up_c_per_s, 2),
            memory_temperature_c=self.seen.memory_temperature_c,
        )
