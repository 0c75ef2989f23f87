"""Figures and 95 % intervals from timed passes and from ticks of an energy counter.

This module needs neither torch nor numpy: a window has at most a few thousand values, and reports
use these functions, too.

Passes within a window are correlated: clocks, temperature and the memory controller drift slowly.
An interval from the standard deviation of the passes is far too narrow. The intervals here come
from batch means: the window is cut into consecutive batches, longer than the correlation, and the
half-width comes from the spread of the batch means. (C. Alexopoulos and A. F. Seila, "Output data
analysis", in: Handbook of Simulation, 1998.)"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from farm.types.figure import Figure

#: Degrees of freedom -> two-sided 95 % quantile of Student's t. For missing degrees use the next
#: lower entry.
_T_95 = dict(
    enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228), start=1)
)
_T_95 |= {12: 2.179, 15: 2.131, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980}


def student_t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; infinite for less than one degree of freedom."""
    if degrees < 1:
        return math.inf
    nearest = max(listed for listed in _T_95 if listed <= degrees)
    return _T_95[nearest]


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean of the values within three standard deviations of their mean, trimmed once."""
    centre = fmean(values)
    widest = 3 * stdev(values) if len(values) > 1 else 0.0
    kept = [value for value in values if abs(value - centre) <= widest]
    return fmean(kept) if kept else centre


def midmean(values: Sequence[float]) -> float:
    """Mean of the middle half of the sorted values: robust to outliers, and finer than a median of
    a coarse clock.
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def fastest(values: Sequence[float]) -> float:
    """Mean of the fastest fifth of the values."""
    return fmean(sorted(values)[: max(1, round(len(values) / 5))])


def batch_half_width(
    values: Sequence[Any], figure: Callable[[Sequence[Any]], float] = fmean, batches: int = 10
) -> float:
    """95 % half-width of a `figure` of correlated values, in their unit; infinite for fewer than
    three values.

    The values are cut into up to `batches` consecutive batches; the half-width comes from the
    figures of the batches."""
    count = min(batches, len(values))
    if count < 3:
        return math.inf
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    parts = [figure(values[low:high]) for low, high in itertools.pairwise(edges)]
    return mean_half_width(parts)


def mean_half_width(values: Sequence[float]) -> float:
    """95 % half-width of the mean of two or more independent values."""
    count = len(values)
    return student_t_95(count - 1) * stdev(values) / math.sqrt(count)


def jackknife_half_width(without: Sequence[float]) -> float:
    """95 % half-width of a figure that is not a mean, such as of the fastest values (M. H.
    Quenouille, Biometrika 43, 1956); infinite for fewer than three groups of values. ``without``:
    for each group, the figure of all values but those of this group."""
    count = len(without)
    if count < 3:
        return math.inf
    return student_t_95(count - 1) * stdev(without) * (count - 1) / math.sqrt(count)


def paired_half_width(
    terms: Sequence[tuple[int, Sequence[float]]], whole: Sequence[float]
) -> float:
    """95 % half-width of the ratio of a sum and a whole that were measured in the same groups, by
    the jackknife.

    Args:
        terms: of the sum: (factor, values). A value belongs to a group; it is the figure of all
            other groups.
        whole: the same values of the whole.
    """
    ratios = []
    for group, of_whole in enumerate(whole):
        ratios.append(math.fsum(factor * values[group] for factor, values in terms) / of_whole)
    return jackknife_half_width(ratios)


@dataclass(frozen=True)
class Slope:
    """A rate with its 95 % half-width, in y's unit per x's unit."""

    rate: float
    half_width: float
    points: int


def line(x: Sequence[float], y: Sequence[float]) -> Slope:
    """The slope of the least-squares line of y over x. Its half-width assumes independent
    residuals. Raises `ValueError` if there are fewer than two points, or all have the same x."""
    count = len(x)
    if count < 2 or max(x) == min(x):
        raise ValueError("a slope needs two points with different x")
    centre_x, centre_y = fmean(x), fmean(y)
    from_x = [value - centre_x for value in x]
    from_y = [value - centre_y for value in y]
    spread = math.fsum(a**2 for a in from_x)
    rate = math.fsum(a * b for a, b in zip(from_x, from_y, strict=True)) / spread
    if count < 3:
        return Slope(rate, math.inf, count)
    residuals = [b - rate * a for a, b in zip(from_x, from_y, strict=True)]
    variance = math.fsum(residual**2 for residual in residuals) / (count - 2)
    return Slope(rate, student_t_95(count - 2) * math.sqrt(variance / spread), count)


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """The rate of a counter y over an increasing x, with the half-width of its 95 % interval.
    Raises as `line`.

    If the power fluctuates, an energy counter's residuals are a random walk, and their standard
    error is too small. So the function uses the wider one of two intervals: from the residuals, and
    from the rates of single steps."""
    fit = line(x, y)
    count = fit.points
    if count < 3:
        return fit
    # A late sample of a tick makes one step longer and the next shorter. Pairs of steps cancel this
    # error.
    stride = 2 if count >= 7 else 1
    picked = list(range((count - 1) % stride, count, stride))
    rates = [(y[b] - y[a]) / (x[b] - x[a]) for a, b in itertools.pairwise(picked) if x[b] > x[a]]
    of_steps = mean_half_width(rates) if len(rates) >= 3 else 0.0
    return Slope(fit.rate, max(fit.half_width, of_steps), count)


def time_average(
    times: Sequence[float], values: Sequence[float], begin: float, end: float
) -> float | None:
    """Time average of samples over [begin, end] by the trapezoidal rule; None if there is no sample
    in it.
    """
    inside = [
        (time, value) for time, value in zip(times, values, strict=True) if begin <= time <= end
    ]
    if not inside:
        return None
    if len(inside) == 1 or inside[-1][0] == inside[0][0]:
        return inside[0][1]
    area = math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(inside))
    return area / (inside[-1][0] - inside[0][0])


def finite(half_width: float, figure: float) -> float:
    """The half-width; the size of the figure if the half-width is infinite, because JSON has no
    infinity.
    """
    return half_width if math.isfinite(half_width) else abs(figure)


def finite_figure(value: float, half_width: float) -> Figure:
    """A figure with a half-width that JSON can hold, see `finite`."""
    return Figure(value, finite(half_width, value))


def pass_energy(power_w: Figure, time_us: Figure) -> Figure:
    """Energy of a pass in mJ. The errors of the mean power and of the time must be independent."""
    return power_w.multiplied_by(time_us).times(1e-3)


def power_of_ticks(times_s: Sequence[float], energies_mj: Sequence[float]) -> Slope:
    """Mean power and its half-width from ticks of an energy counter, by `slope`. Unit: W. Raises as
    `line`.
    """
    in_mw = slope(times_s, energies_mj)
    return Slope(in_mw.rate / 1e3, in_mw.half_width / 1e3, in_mw.points)


def power_by_step(
    times_s: Sequence[float], energies_mj: Sequence[float]
) -> list[tuple[float, float, float]]:
    """The power between each two consecutive ticks of an energy counter: (begin in s, end in s,
    power in W).
    """
    ticks = itertools.pairwise(zip(times_s, energies_mj, strict=True))
    return [
        (begin_s, end_s, (end_mj - begin_mj) / (end_s - begin_s) / 1e3)
        for (begin_s, begin_mj), (end_s, end_mj) in ticks
        if end_s > begin_s
    ]
