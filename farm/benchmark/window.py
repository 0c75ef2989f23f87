"""Compute the results of a measurement window: its power, its flags and its reading.

`farm.benchmark.steady` runs the window. docs/method.md describes the power sources and the
intervals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from farm.benchmark.clock import TimedRound, pass_times_us, starved_share
from farm.benchmark.policies import FLOOR_TICKS
from farm.benchmark.sampler import PowerLevels, SampledWindow, Sampler
from farm.benchmark.workload import Workload
from farm.types import intervals
from farm.types.details import CardConditions, Details, Powering, TimeFigure, Timing
from farm.types.figure import Figure, value_of
from farm.types.measured_constants import MEASURED
from farm.types.reading import CPU_METHOD, METHOD, Reading, Trace

STARVED = 0.005  # flag it if the card waited for the host during a larger share of the window
BUSY = 0.5  # flag it if a CPU did other work during a larger share of the window
DRIFT = 0.03  # flag it if the power of the window's halves differs by a larger share
LEAST_ROUNDS = 3  # an interval needs this many rounds
# steps of the energy counter whose mean power is compared with that of the next steps
BATCH_STEPS = 4
LEAST_BATCHES = 5  # from this number of batches, their scatter is known well enough
SENSOR_HOLDS_S = 0.15  # a power sensor may keep its value for this long
# flag the reading if the powers of energy counter and instant sensor differ by a larger share
DISAGREE = 0.02
#: Half-width of the power of the energy counter's first step, taken for that of a long run.
FIRST_STEP = MEASURED["first_step"].value
# a step of the energy counter does not count if passes had a smaller share of its time
LEAST_WORK = 0.2
MOVED = 2.0  # factor by which the values that an operator writes may grow or shrink
# values that began at zero may grow to this, for example weights at a tiny learning rate
NOTHING = 1e-6
# the first step of a window is dropped as warm-up if its power differs more from the other steps'
# median
RAMP = 0.02

THERMAL = ("thermal", "hardware_thermal")
OTHER_SLOWDOWNS = ("hardware_slowdown", "power_brake", "sync_boost")


@dataclass(frozen=True)
class WindowPower:
    """Mean power of a window; `power_w` is None if the card has no power source. Unit: W."""

    power_w: Figure | None
    source: str
    begin_s: float  # a tick of the energy counter if the card has one
    end_s: float
    drift: float = 0.0
    ticks: int | None = None  # number of the energy counter's ticks in the window
    ramp_ticks_dropped: int | None = None
    integral_w: float | None = None  # mean power by the instant sensor, to check the energy counter

    @property
    def relative(self) -> float:
        """Half-width as a share of the power."""
        return self.power_w.relative if self.power_w is not None else 0.0


class Pauses(NamedTuple):
    """The pauses between the rounds of a window, in which the card draws its base power."""

    until_s: Callable[[float], float]  # the total of all pauses until a time (s)
    power_w: float

    def share(self, begin_s: float, end_s: float) -> float:
        """How much of the time between two moments the card paused (0 to 1)."""
        return (
            (self.until_s(end_s) - self.until_s(begin_s)) / (end_s - begin_s)
            if end_s > begin_s
            else 0.0
        )


NO_PAUSES = Pauses(lambda at_s: 0.0, 0.0)


def window_power(
    sampler: Sampler,
    begin_s: float,
    end_s: float,
    *,
    least_steps: int = FLOOR_TICKS,
    pauses: Pauses = NO_PAUSES,
) -> WindowPower:
    """Mean power of a window: from the energy counter if the window has three ticks, else from the
    power sensor.

    ``least_steps``: if it is 1, two ticks are enough, with the half-width `FIRST_STEP`, if they are
    one known period apart. ``pauses``: their time and their energy are subtracted, so the power is
    that of the rounds alone."""
    pairs, ticks_s = _ticks_of_work(sampler, begin_s, end_s, pauses)
    period_s = sampler.period.period_s
    is_first_step = least_steps == 1 and len(pairs) == 2
    if is_first_step and period_s and pairs[1][0] - pairs[0][0] < 1.5 * period_s:
        (first_s, first_mj), (last_s, last_mj) = pairs
        power_w = (last_mj - first_mj) / (last_s - first_s) / 1e3
        return WindowPower(
            power_w=Figure(power_w, FIRST_STEP * power_w),
            source=sampler.device.counter_source,
            begin_s=ticks_s[0],
            end_s=ticks_s[1],
            ticks=2,
        )
    if len(pairs) >= 3:
        return _power_of_counter(sampler, pairs, ticks_s, pauses)
    return _power_of_sensor(sampler, begin_s, end_s, pauses)


def _ticks_of_work(
    sampler: Sampler, begin_s: float, end_s: float, pauses: Pauses
) -> tuple[list[tuple[float, float]], list[float]]:
    """The ticks of a window that have enough work since the tick before: pairs of time (s) and
    energy (mJ) without the pauses, and the times with them.
    """
    times, energies = sampler.ticks(begin_s)
    pairs, ticks_s = list[tuple[float, float]](), list[float]()
    for tick_s, energy_mj in zip(
        sampler.regular([at for at in times if at <= end_s]), energies, strict=False
    ):
        paused_s = pauses.until_s(tick_s)
        if not pairs or tick_s - paused_s - pairs[-1][0] > LEAST_WORK * (tick_s - ticks_s[-1]):
            pairs.append((tick_s - paused_s, energy_mj - pauses.power_w * paused_s * 1e3))
            ticks_s.append(tick_s)
    return pairs, ticks_s


def _power_of_counter(
    sampler: Sampler, pairs: list[tuple[float, float]], ticks_s: list[float], pauses: Pauses
) -> WindowPower:
    dropped = _ramp(pairs)
    pairs = pairs[dropped:]
    times, energies = [a for a, _ in pairs], [b for _, b in pairs]
    fit = intervals.power_of_ticks(times, energies)
    drift = _drift(times, energies)
    begin_s, end_s = ticks_s[dropped], ticks_s[-1]
    window = sampler.window(begin_s, end_s)
    checks = window.power_source == "power_instant" and not pauses.share(begin_s, end_s)
    return WindowPower(
        # If the power drifts, its uncertainty is at least half of the drift.
        power_w=Figure(fit.rate, math.hypot(fit.half_width, fit.rate * drift / 2)),
        source=sampler.device.counter_source,
        begin_s=begin_s,
        end_s=end_s,
        drift=drift,
        ticks=len(pairs),
        ramp_ticks_dropped=dropped,
        integral_w=_rounded(window.power_w, 3) if checks else None,
    )


def _power_of_sensor(sampler: Sampler, begin_s: float, end_s: float, pauses: Pauses) -> WindowPower:
    window = sampler.window(begin_s, end_s)
    if window.power_w is None:
        return WindowPower(None, "", begin_s, end_s)
    values = sampler.power_values(begin_s, end_s)
    # A sensor may keep its value for a tenth of a second: batches must be longer.
    half_width = intervals.batch_half_width(
        values, batches=max(3, min(10, int((end_s - begin_s) / SENSOR_HOLDS_S)))
    )
    source = {"power_instant": "instant_power", "power_average": "average_power"}[
        window.power_source
    ]
    share = pauses.share(begin_s, end_s)
    power_w = (window.power_w - share * pauses.power_w) / (1 - share)
    return WindowPower(Figure(power_w, half_width / (1 - share)), source, begin_s, end_s)


def _ramp(pairs: list[tuple[float, float]]) -> int:
    """The number of ticks to drop at the begin of a window, because the power has not yet
    settled.
    """
    dropped = 0
    while len(pairs) - dropped > FLOOR_TICKS + 1:
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(pairs[dropped:])]
        usual = statistics.median(rates[1:])
        # Use the power of two steps together: a late tick makes one step longer and the next
        # shorter.
        first = (pairs[dropped + 2][1] - pairs[dropped][1]) / (
            pairs[dropped + 2][0] - pairs[dropped][0]
        )
        if abs(first / usual - 1) <= RAMP:
            break
        dropped += 1
    return dropped


def _drift(times: list[float], energies: list[float]) -> float:
    """Power in the second half of the ticks minus power in the first half, relative to the mean of
    both.

    In a long window, without the part that the scatter of the steps explains: on an H100 the steps
    of a decoding on two cards scattered by 14 %, because the counter adds short samples of the
    power."""
    if len(times) < 5:
        return 0.0
    middle = len(times) // 2
    first = (energies[middle] - energies[0]) / (times[middle] - times[0])
    second = (energies[-1] - energies[middle]) / (times[-1] - times[middle])
    mean = (second + first) / 2
    ends = range(0, len(times), BATCH_STEPS)
    rates = [
        (energies[b] - energies[a]) / (times[b] - times[a]) for a, b in itertools.pairwise(ends)
    ]
    noise = 0.0
    if len(rates) >= LEAST_BATCHES:
        # The changes from batch to batch contain little of a slow drift. Two halves: two standard
        # deviations.
        variance = statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(rates)) / 2
        noise = 2 * math.sqrt(variance * 4 / len(rates))
    return math.copysign(max(0.0, abs(second - first) - noise), second - first) / mean


@dataclass(frozen=True)
class SteadyWindow:
    workload: Workload
    rounds: Sequence[TimedRound]  # the rounds that ended in the window
    power: WindowPower  # also has the begin and end of the window
    converged: bool  # the stopping rule was met within `ceiling_s`
    ceiling_s: float
    sampled: SampledWindow = field(default_factory=SampledWindow)
    warm_up_s: float = 0.0
    # rate of the chip's temperature at its end; None if unknown
    warm_up_slope_c_per_s: float | None = None
    # the temperature still changed too fast or is unknown, on a card with a temperature sensor
    unsettled: bool = False
    policy_flags: tuple[str, ...] = ()
    # ids of other processes on the card before, during or after the window
    foreign: frozenset[int] = frozenset()
    lacking: tuple[str, ...] = ()  # sensors that the card lacks and a good reading needs
    # share of the window in which a CPU did other work; None: not a CPU
    waited_share: float | None = None
    fastest_us: Figure | None = None  # of a CPU; None: from the rounds

    @property
    def starved_share(self) -> float:
        """The share of the window in which the card waited for the host; 0 if the passes do not
        replay CUDA graphs.
        """
        return starved_share(self.rounds) if self.workload.replayed else 0.0

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the conditions that make the figures doubtful, sorted."""
        power = self.power
        known = power.power_w is not None
        mean_w = value_of(power.power_w)
        apart = abs(power.integral_w / mean_w - 1) if mean_w and power.integral_w else 0.0
        holds = {
            "not_converged": not self.converged,
            "few_passes": len(self.rounds) < LEAST_ROUNDS,
            "not_cold": self.workload.not_cold,
            "unsettled": self.unsettled,
            "lacks_sensors": bool(self.lacking),
            "starved": self.starved_share > STARVED,
            "shared": bool(self.foreign),
            "busy_host": (self.waited_share or 0.0) > BUSY,
            "throttled_power": self.sampled.throttled("power_cap"),
            "throttled_thermal": self.sampled.throttled(*THERMAL),
            "throttled_other": self.sampled.throttled(*OTHER_SLOWDOWNS),
            "no_energy": not known,
            "lesser_power_source": known and power.source not in ("energy_counter", "rapl"),
            "power_disagrees": apart > DISAGREE,
            "drifting": known and abs(power.drift) > DRIFT,
        }
        names = [name for name, so in holds.items() if so]
        return tuple(sorted([*names, *self.policy_flags]))

    @property
    def time_us(self) -> tuple[Figure, TimeFigure]:
        """The time of a pass, and the name of the figure."""
        if self.fastest_us:
            return self.fastest_us, "fastest"
        return figure_of(self.rounds, self.power)

    def reading(self, levels: PowerLevels, trace: Trace | None) -> Reading:
        """The reading of the window. Its details combine the workload's details and the
        window's.
        """
        power, sampled, flags = self.power, self.sampled, self.flags
        values, passes = pass_times_us(self.rounds), sum(one.passes for one in self.rounds)
        time, _ = self.time_us
        time_us = intervals.finite_figure(time.value, time.half_width)

        window_s = power.end_s - power.begin_s
        power_w = energy_mj = None
        if power.power_w is not None:
            power_w = intervals.finite_figure(power.power_w.value, power.power_w.half_width)
            energy_mj = intervals.pass_energy(power_w, time_us)
        return Reading(
            time_us=time_us,
            time_median_us=statistics.median(values),
            time_trimmed_us=intervals.trimmed_mean(values),
            passes=passes,
            window_s=window_s,
            warm_up_s=self.warm_up_s,
            power_w=power_w,
            power_source=power.source,
            energy_mj=energy_mj,
            idle_power_w=levels.idle_power_w,
            base_power_w=levels.base_power_w,
            sm_clock_mhz=sampled.sm_clock_mhz,
            memory_clock_mhz=sampled.memory_clock_mhz,
            temperature_c=sampled.temperature_c,
            throttle_reasons=tuple(
                name
                for name in sampled.throttle_shares
                if name != "idle" and sampled.throttled(name)
            ),
            flags=flags,
            details=self._details(values),
            cost_s={"warm_up": self.warm_up_s, "window": window_s},
            trace=trace,
        )

    def _details(self, values: Sequence[float]) -> Details:
        """The workload's details with those of the window. ``values``: times of passes in us."""
        details = self.workload.details
        return dataclasses.replace(
            details,
            method=METHOD if self.waited_share is None else CPU_METHOD,
            timing=self._timing(values, details.timing),
            powering=self._powering(),
            conditions=self._conditions(),
        )

    def _timing(self, values: Sequence[float], of_workload: Timing) -> Timing:
        time, time_figure = self.time_us

        def half_width_us(figure: Callable[[Sequence[float]], float]) -> float:
            return intervals.finite(intervals.batch_half_width(values, figure), time.value)

        return dataclasses.replace(
            of_workload,
            rounds=len(self.rounds),
            late_rounds=sum(one.late for one in self.rounds) or None,
            starved_share=round(self.starved_share, 4) if "starved" in self.flags else None,
            time_figure=time_figure,
            time_mean_us=Figure(statistics.fmean(values), half_width_us(statistics.fmean)),
            time_median_half_width_us=half_width_us(statistics.median),
            time_trimmed_half_width_us=half_width_us(intervals.trimmed_mean),
            ceiling_s=None if self.converged else self.ceiling_s,
        )

    def _powering(self) -> Powering:
        power = self.power
        return Powering(
            ticks=power.ticks,
            ramp_ticks_dropped=power.ramp_ticks_dropped,
            power_integral_w=power.integral_w,
            power_drift=round(power.drift, 4) if "drifting" in self.flags else None,
        )

    def _conditions(self) -> CardConditions:
        sampled = self.sampled
        throttle_shares = {name: round(share, 3) for name, share in sampled.throttle_shares.items()}
        return CardConditions(
            lacks=self.lacking or None,
            throttle_shares=throttle_shares or None,
            foreign_processes=tuple(sorted(self.foreign)[:16]) or None,
            waited_share=_rounded(self.waited_share, 3),
            temperature_slope_c_per_s=_rounded(sampled.temperature_slope_c_per_s, 2),
            warm_up_slope_c_per_s=_rounded(self.warm_up_slope_c_per_s, 2),
            memory_temperature_c=sampled.memory_temperature_c,
        )


def figure_of(rounds: Sequence[TimedRound], power: WindowPower) -> tuple[Figure, TimeFigure]:
    """The time of a pass that a reading states, in us, and the name of the figure."""
    values = pass_times_us(rounds)
    if power.power_w is None:
        half_width_us = intervals.batch_half_width(values, statistics.median)
        return Figure(statistics.median(values), half_width_us), "median"
    # Energy is mean power times pass time, so the pass time must be a mean, too.
    time_us = sum(one.took_s for one in rounds) / sum(one.passes for one in rounds) * 1e6
    return Figure(time_us, intervals.batch_half_width(values)), "mean"


def with_power(timed: Reading, powered: Reading) -> Reading:
    """Return the first reading with the power of the second, whose window has nothing but passes of
    the subject.
    """
    energy_mj = None
    if powered.power_w is not None:
        energy_mj = intervals.pass_energy(powered.power_w, timed.time_us)
    powering = dataclasses.replace(
        timed.details.powering,
        ticks=powered.details.powering.ticks,
        ramp_ticks_dropped=powered.details.powering.ramp_ticks_dropped,
        power_integral_w=powered.details.powering.power_integral_w,
        power_drift=powered.details.powering.power_drift,
        sampler_busy_share=powered.details.powering.sampler_busy_share,
    )
    flags = (set(timed.flags) - {"no_energy"}) | (
        set(powered.flags) & {"no_energy", "drifting", "power_disagrees"}
    )
    return dataclasses.replace(
        timed,
        power_w=powered.power_w,
        power_source=powered.power_source,
        idle_power_w=powered.idle_power_w,
        base_power_w=powered.base_power_w,
        trace=powered.trace,
        energy_mj=energy_mj,
        flags=tuple(sorted(flags)),
        details=dataclasses.replace(timed.details, powering=powering),
        cost_s={name: seconds + powered.cost_s[name] for name, seconds in timed.cost_s.items()},
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def moved(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the values of a written input have grown or shrunk too much, or are no longer
    finite.
    """
    return any(
        not math.isfinite(late) or not early / MOVED <= late <= max(early * MOVED, NOTHING)
        for early, late in zip(before, after, strict=True)
    )
