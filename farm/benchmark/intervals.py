"""Figures and honest intervals from timed passes and counter ticks. No torch, no numpy: a window has at most a few
thousand values, and the parent of a benchmark process reads these functions too.

Passes within a window are not independent (clocks, temperature and the memory controller drift slowly), so an
interval from their plain spread is too narrow by far. Intervals come from batch means instead: the window is cut into
consecutive batches, long against the correlation, and the spread *between* batches decides. (C. Alexopoulos and
A. F. Seila, "Output data analysis", in: Handbook of Simulation, 1998.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Two-sided 95 % quantiles of Student's t by degrees of freedom; between the entries, the next smaller one is used.
_T_95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    12: 2.179,
    15: 2.131,
    20: 2.086,
    25: 2.060,
    30: 2.042,
    40: 2.021,
    60: 2.000,
    120: 1.980,
}


def student_t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; infinite without a degree of freedom."""
    if degrees < 1:
        return math.inf
    return _T_95[max(known for known in _T_95 if known <= degrees)]


def trimmed_mean(values: Sequence[float], sigmas: float = 3.0) -> float:
    """Mean of the values within `sigmas` standard deviations of their mean: one pass of trimming, never empty."""
    centre = fmean(values)
    widest = sigmas * stdev(values) if len(values) > 1 else 0.0
    kept = [value for value in values if abs(value - centre) <= widest]
    return fmean(kept) if kept else centre


def midmean(values: Sequence[float]) -> float:
    """Mean of the middle half: blind to outliers of either side, and finer than a median of a coarse clock."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def batch_half_width(
    values: Sequence[float], figure: Callable[[Sequence[float]], float] = fmean, batches: int = 10
) -> float:
    """95 % half-width of a figure over a window of correlated values, in the values' unit.

    The values are cut into up to `batches` consecutive batches; fewer than three values have no interval (inf).
    """
    count = min(batches, len(values))
    if count < 3:
        return math.inf
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    parts = [figure(values[low:high]) for low, high in itertools.pairwise(edges)]
    return student_t_95(count - 1) * stdev(parts) / math.sqrt(count)


@dataclass(frozen=True)
class Slope:
    """A rate with its 95 % half-width, in y's unit per x's unit."""

    rate: float
    half_width: float
    points: int


def line(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least-squares rate of y over x, with the half-width of its 95 % interval where the points scatter independently.

    Raises:
        ValueError: fewer than two points, or all at one x.
    """
    count = len(x)
    if count < 2 or max(x) == min(x):
        raise ValueError("a slope needs two points apart")
    centre_x, centre_y = fmean(x), fmean(y)
    spread = math.fsum((value - centre_x) ** 2 for value in x)
    rate = math.fsum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True)) / spread
    if count < 3:
        return Slope(rate, math.inf, count)
    rest = math.fsum((b - centre_y - rate * (a - centre_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(rate, student_t_95(count - 2) * math.sqrt(rest / (count - 2) / spread), count)


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """The rate of a counter y over a rising x, with the half-width of its 95 % interval.

    For a counter that adds up a fluctuating power the residuals are a random walk, and their plain standard error is
    too narrow. So the interval is the wider of two: the residuals', and that of the rates of the single steps.

    Raises:
        ValueError: fewer than two points, or all at one x.
    """
    fit = line(x, y)
    count = fit.points
    if count < 3:
        return fit
    # A late-seen tick makes one step short and the next long: in the sum over steps it cancels, so the steps' own
    # interval is taken over pairs of steps where there are enough.
    stride = 2 if count >= 7 else 1
    picked = list(range((count - 1) % stride, count, stride))
    rates = [(y[b] - y[a]) / (x[b] - x[a]) for a, b in itertools.pairwise(picked) if x[b] > x[a]]
    steps = student_t_95(len(rates) - 1) * stdev(rates) / math.sqrt(len(rates)) if len(rates) >= 3 else 0.0
    return Slope(fit.rate, max(fit.half_width, steps), count)


def time_average(times: Sequence[float], values: Sequence[float], begin: float, end: float) -> float | None:
    """Average of a sampled quantity over [begin, end] by trapezoids between the samples (the integral over time,
    divided by it). None where no sample lies in the span."""
    inside = [(time, value) for time, value in zip(times, values, strict=True) if begin <= time <= end]
    if not inside:
        return None
    if len(inside) == 1 or inside[-1][0] == inside[0][0]:
        return inside[0][1]
    area = math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(inside))
    return area / (inside[-1][0] - inside[0][0])


def relative(half_width: float, figure: float) -> float:
    """Half-width as a share of the figure; infinite for a figure of zero."""
    return half_width / abs(figure) if figure else math.inf


def finite(half_width: float, figure: float) -> float:
    """A half-width that JSON can carry: with too few values for an interval, as wide as the figure itself."""
    return half_width if math.isfinite(half_width) else abs(figure)


def ratio_half_width(
    value: float, first: float, first_half_width: float, second: float, second_half_width: float
) -> float:
    """Half-width of a product or quotient `value` of two independent figures."""
    return abs(value) * math.hypot(relative(first_half_width, first), relative(second_half_width, second))
