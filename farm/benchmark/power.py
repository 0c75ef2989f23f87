"""Mean power of a window, and where the window lies once it is moved to the ticks of the energy counter.

The sources, best first, and what the interval is made of: docs/method.md, "Power and energy" and "Intervals".
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from farm.benchmark import intervals
from farm.benchmark.sampler import Sampler

FLOOR_TICKS = 5  # steps of the energy counter that a window holds at least
SENSOR_HOLDS_S = 0.15
DISAGREE = 0.02  # difference of the counter's power and the instant sensor's
RAMP = 0.02  # a first step whose power is further than this from the others' median is still warm-up


@dataclass(frozen=True)
class Power:
    """Power of a window; `power_w` is None where the card tells none."""

    power_w: float | None
    half_width_w: float | None
    source: str
    begin_s: float
    end_s: float
    drift: float = 0.0
    ticks: int | None = None  # of the energy counter, within
    ramp_ticks_dropped: int | None = None
    integral_w: float | None = None  # what the instant sensor says beside the counter

    @property
    def relative(self) -> float:
        if self.power_w is None:
            return 0.0
        return math.inf if self.half_width_w is None else intervals.relative(self.half_width_w, self.power_w)

    @property
    def disagrees(self) -> bool:
        """Whether the counter and the instant sensor tell different powers."""
        if not self.power_w or not self.integral_w:
            return False
        return abs(self.integral_w / self.power_w - 1) > DISAGREE


def power_of_ticks(times_s: Sequence[float], energies_mj: Sequence[float]) -> intervals.Slope:
    """Mean power over some ticks of an energy counter, by `intervals.slope`, with its half-width. Units: W.

    Raises:
        ValueError: fewer than two ticks, or all at one time.
    """
    in_mw = intervals.slope(times_s, energies_mj)
    return intervals.Slope(in_mw.rate / 1e3, in_mw.half_width / 1e3, in_mw.points)


def power_by_step(times_s: Sequence[float], energies_mj: Sequence[float]) -> list[tuple[float, float, float]]:
    """Power from one tick of an energy counter to the next: (begin in s, end in s, W) of each step that took time."""
    ticks = itertools.pairwise(zip(times_s, energies_mj, strict=True))
    return [
        (begin_s, end_s, (end_mj - begin_mj) / (end_s - begin_s) / 1e3)
        for (begin_s, begin_mj), (end_s, end_mj) in ticks
        if end_s > begin_s
    ]


def average_power_w(sampler: Sampler, begin_s: float, end_s: float = math.inf, least_ticks: int = 3) -> float | None:
    """Average power since a moment: by the counter's ticks, by the sensor's samples where there are too few of them."""
    times_s, energies_mj = sampler.ticks(begin_s)
    if len(times_s) >= least_ticks:
        return power_of_ticks(times_s, energies_mj).rate
    return sampler.window(begin_s, end_s).power_w


def window_power(sampler: Sampler, begin_s: float, end_s: float) -> Power:
    """Mean power of a window and where the window, once moved to ticks, begins and ends."""
    times, energies = sampler.ticks(begin_s)
    pairs = [(a, b) for a, b in zip(times, energies, strict=True) if a <= end_s]
    if len(pairs) >= 3:
        dropped = _ramp(pairs)
        pairs = pairs[dropped:]
        times, energies = [a for a, _ in pairs], [b for _, b in pairs]
        fit = power_of_ticks(times, energies)
        drift = _drift(times, energies)
        # A power on its way somewhere is known no better than to half the way that it made.
        half_width_w = math.hypot(fit.half_width, fit.rate * drift / 2)
        window = sampler.window(times[0], times[-1])
        integral_w = window.power_w if window.power_source == "power_instant" else None
        source = "rapl" if sampler.device.card.kind == "cpu" else "energy_counter"
        return Power(
            power_w=fit.rate,
            half_width_w=half_width_w,
            source=source,
            begin_s=times[0],
            end_s=times[-1],
            drift=drift,
            ticks=len(pairs),
            ramp_ticks_dropped=dropped,
            integral_w=None if integral_w is None else round(integral_w, 3),
        )
    window = sampler.window(begin_s, end_s)
    if window.power_w is None:
        return Power(None, None, "", begin_s, end_s)
    values = sampler.power_values(begin_s, end_s)
    # A sensor may hold its value for a tenth of a second, however often it is asked: batches are to be longer.
    half_width = intervals.batch_half_width(values, batches=max(3, min(10, int((end_s - begin_s) / SENSOR_HOLDS_S))))
    source = {"power_instant": "instant_power", "power_average": "average_power"}[window.power_source]
    return Power(window.power_w, half_width, source, begin_s, end_s)


def _ramp(pairs: list[tuple[float, float]]) -> int:
    """How many first ticks still belong to the warm-up: power is rising towards what the later steps show."""
    dropped = 0
    while len(pairs) - dropped > FLOOR_TICKS + 1:
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(pairs[dropped:], pairs[dropped + 1 :], strict=False)]
        usual = statistics.median(rates[1:])
        # Two steps together: one late tick makes a short step and a long one.
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
