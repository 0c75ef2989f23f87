"""A steady window that has run, worked out: its time, its power and its flags, each for itself.

How it is run is `farm.benchmark.measure`; what its intervals mean is in docs/method.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from farm.benchmark import intervals
from farm.benchmark.clock import TimedRound, pass_times_us, starved_share
from farm.benchmark.power import Power
from farm.benchmark.sampler import Window
from farm.benchmark.workload import Workload
from farm.types.reading import METHOD, Details

THROTTLED_SHARE = 0.05  # of the samples
STARVED = 0.005  # of a window's time
BUSY = 0.1  # of the cores' time in a window, for other processes
DRIFT = 0.03  # difference of power between the halves of a window
LEAST_ROUNDS = 3  # for an interval

THERMAL = ("thermal", "hardware_thermal")
OTHER_SLOWDOWNS = ("hardware_slowdown", "power_brake", "sync_boost")


@dataclass(frozen=True)
class Times:
    """Time of one pass over some rounds, by three figures with their 95 % half-widths. Units: us."""

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
            rounds: one at least.
            with_power: whether there is a power to go with the time.
        """
        values = pass_times_us(rounds)
        figure: Callable[[Sequence[float]], float]
        if with_power:
            # Power is the mean over the window, so the time that it is multiplied with is the mean as well.
            time_us, figure = sum(one.took_s for one in rounds) / passes_of(rounds) * 1e6, statistics.fmean
        else:
            # Nothing must agree with an energy, and on a CPU that others use too the mean is mostly theirs.
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
    """Energy of one pass and its 95 % half-width (mJ), and the power's half-width (W) that it was made with."""

    energy_mj: float
    half_width_mj: float
    power_half_width_w: float

    @classmethod
    def of(cls, power: Power, times: Times) -> Self | None:
        """Power times time; None without a power."""
        if power.power_w is None:
            return None
        power_half_width_w = intervals.finite(power.half_width_w or 0.0, power.power_w)
        energy_mj = power.power_w * times.time_us * 1e-3
        half_width_mj = intervals.ratio_half_width(
            energy_mj, power.power_w, power_half_width_w, times.time_us, times.half_width_us
        )
        return cls(energy_mj, half_width_mj, power_half_width_w)


@dataclass(frozen=True)
class SteadyWindow:
    """A steady window as it ran, before anything is worked out.

    Attributes:
        rounds: those that were done within it.
        power: its mean power, and where it began and ended.
        seen: by the sensors meanwhile.
        converged: whether the stopping rule was met, within `ceiling_s`.
        warm_up_slope_c_per_s: how fast the chip's temperature changed when the warm-up ended; None where that is not known.
        unsettled: it still changed too fast, or nobody knows, on a card that tells its temperature.
        foreign: ids of the processes on the card, before, meanwhile and after, that are not the benchmark's.
        foreign_cpu_share: of the time of a CPU's cores, that other processes had; None where that is not known.
        lacking: what the card does not tell of what a reading is known to be good by.
    """

    workload: Workload
    rounds: Sequence[TimedRound]
    power: Power
    seen: Window
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
        """Of its time, in which the card waited for the host; only a replayed graph can tell."""
        return starved_share(self.rounds) if self.workload.replayed else 0.0

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        return tuple(name for name in self.seen.throttle_shares if name != "idle" and self._throttled(name))

    @property
    def flags(self) -> tuple[str, ...]:
        """What is to be known before its figures are believed."""
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

    def details(self, times: Times) -> Details:
        """What goes beside its figures, with what was said of the workload."""
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
