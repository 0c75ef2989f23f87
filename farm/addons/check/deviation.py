"""The statistics of a card check: how far a figure is from comparable ones, as a score, and the
limit for the largest score of a whole check.

A *figure* is the natural logarithm of a time or a power, so that differences are relative. It is
compared with a *reference*: one figure of each other card of the model (the population), or earlier
figures of the same card (its history). The score of a comparison follows about the standard normal
distribution if the card is like its reference, whatever the number of comparable figures.

Many figures of a check are compared, and the largest score decides. Its distribution is simulated
with the same estimators, so the limit holds for all comparisons of a check together.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FALSE_ALARMS = 0.01  # at most this share of the checks of healthy cards is outside
#: Weight of the prior spread of a figure, in degrees of freedom. A small number allows a figure to
#: have another spread than others of its class.
PRIOR_DEGREES = 4
#: Simulated figures follow Student's t with these degrees of freedom: stored readings have more
#: distant values than the normal distribution. With six, 1.2 % of the checks of H200s in
#: `benchmarks/card_check.py` were outside; with five, 0.8 %, and 0.0 % of those of H100s.
TAIL_DEGREES = 5
#: The numbers of comparable figures that are simulated. Few, so that the checks of a card share
#: simulations: more figures change the limit little.
SIMULATED_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50, 100)
SIMULATED_CHECKS = 20_000
_SIMULATED_AT_ONCE = 2_000
#: Share of the values, the most distant ones, that do not count in a spread: a few cards of the
#: population may be damaged. A spread from the median absolute deviation was too small: times of
#: healthy cards have two groups (batch norm on ten H200s: seven within 0.3 %, three 1.7 % above).
TRIMMED = 0.1
#: The variance of a median of normal values is this number times that of their mean.
_OF_MEDIAN = math.pi / 2
#: The quantile of the standard normal distribution for 95 %, on one side.
_FOUND = 1.645


@dataclass(frozen=True)
class Reference:
    """What a figure is compared with.

    Attributes:
        values: comparable figures, as natural logarithms.
        prior: the expected standard deviation of such figures.

    Example:
        >>> times = [math.log(time_us) for time_us in (100.0, 100.2, 99.9, 100.1, 100.0)]
        >>> Reference(tuple(times), prior=0.002).score(math.log(103.0)) > 4
        True
    """

    values: tuple[float, ...]
    prior: float

    @functools.cached_property
    def center(self) -> float:
        return float(np.median(self.values))

    @functools.cached_property
    def spread(self) -> float:
        """The standard deviation: robust, and moderated by the prior."""
        return float(spreads_of(np.array([self.values]), self.prior)[0])

    def score(self, value: float) -> float:
        """How far a further figure is above the reference: about a standard normal deviate if it
        belongs to it.
        """
        return float(scores_of(np.array([self.values]), self.prior, np.array([value]))[0])


def smallest_found(count: int, spread: float, limit: float) -> float:
    """Return the relative increase that a check finds in 95 % of the cases.

    Args:
        count: the number of comparable figures.
        spread: their standard deviation, as a fraction.
        limit: see `limit_of`.
    """
    return math.expm1((_deviation_at(limit, count) + _FOUND) * spread)


def smallest_outside(count: int, spread: float, limit: float) -> float:
    """Return the relative increase from which a figure is outside; see `smallest_found`."""
    return math.expm1(_deviation_at(limit, count) * spread)


def _degrees(count: int) -> int:
    return PRIOR_DEGREES + count - 1


def scores_of(values: np.ndarray, prior: float, further: np.ndarray) -> np.ndarray:
    """Return the score of one further figure for each row of ``values``, see `Reference.score`."""
    deviations = (further - np.median(values, axis=1)) / spreads_of(values, prior)
    return _scores(deviations, values.shape[1])


def spreads_of(values: np.ndarray, prior: float) -> np.ndarray:
    """Return the moderated standard deviation of each row of ``values``."""
    count = values.shape[1]
    centers = np.median(values, axis=1, keepdims=True)
    distances = np.sort(np.abs(values - centers), axis=1)[:, : _kept(count)]
    robust = np.sqrt(np.mean(distances**2, axis=1)) / _trimmed_spread(count)
    squares = PRIOR_DEGREES * prior**2 + (count - 1) * robust**2
    return np.sqrt(squares / _degrees(count))


def _kept(count: int) -> int:
    """The number of values that count in a spread."""
    return max(1, count - math.ceil(TRIMMED * count))


@functools.cache
def _trimmed_spread(count: int) -> float:
    """The root mean square of the kept distances of ``count`` standard normal values from their
    median."""
    values = np.random.default_rng(count).standard_normal((_SIMULATED_AT_ONCE, count))
    distances = np.abs(values - np.median(values, axis=1, keepdims=True))
    kept = np.sort(distances, axis=1)[:, : _kept(count)]
    return float(np.sqrt(np.mean(kept**2))) or 1.0


def _uncertainty(count: int) -> float:
    """The standard deviation of a further figure minus the median of ``count`` ones."""
    return math.sqrt(1 + _OF_MEDIAN / count)


def _scores(deviations: np.ndarray, count: int) -> np.ndarray:
    """Change deviates of Student's t to normal ones (Wallace's approximation)."""
    degrees = _degrees(count)
    t = deviations / _uncertainty(count)
    factor = (8 * degrees + 1) / (8 * degrees + 3)
    return factor * np.sign(t) * np.sqrt(degrees * np.log1p(t**2 / degrees))


def _deviation_at(score: float, count: int) -> float:
    """The inverse of `_scores`."""
    degrees = _degrees(count)
    factor = (8 * degrees + 1) / (8 * degrees + 3)
    t = math.sqrt(degrees * math.expm1((score / factor) ** 2 / degrees))
    return t * _uncertainty(count)


def limit_of(counts: Iterable[int], false_alarms: float = FALSE_ALARMS) -> float:
    """Return the limit for the largest score of a check.

    Args:
        counts: the number of comparable figures of each comparison, in any order.
        false_alarms: the share of checks of healthy cards with a larger score.

    Returns:
        The quantile of the largest score of simulated checks of healthy cards. Comparisons are
        drawn independently: those of a real check correlate, so fewer are outside. Infinite without
        comparisons.
    """
    alike = Counter(map(_simulated_count, counts))
    if not alike:
        return math.inf
    largest = [_largest_scores(count, comparisons) for count, comparisons in alike.items()]
    return float(np.quantile(np.max(largest, axis=0), 1 - false_alarms))


def _simulated_count(count: int) -> int:
    """The largest of `SIMULATED_COUNTS` that is not above ``count``: with fewer figures, the limit
    is the same or a little higher."""
    return SIMULATED_COUNTS[bisect.bisect_right(SIMULATED_COUNTS, count) - 1]


@functools.cache
def _largest_scores(count: int, comparisons: int) -> np.ndarray:
    """The largest score of so many comparisons in each simulated check of a healthy card."""
    generator = np.random.default_rng((count, comparisons))
    largest = np.full(SIMULATED_CHECKS, -np.inf)
    for _ in range(comparisons):
        for first in range(0, SIMULATED_CHECKS, _SIMULATED_AT_ONCE):
            part = slice(first, first + _SIMULATED_AT_ONCE)
            scores = simulated_scores(generator, _SIMULATED_AT_ONCE, count)
            largest[part] = np.maximum(largest[part], scores)
    return largest


def simulated_scores(
    generator: np.random.Generator, checks: int, count: int, slowdown: float = 0.0
) -> np.ndarray:
    """Return the scores of one comparison in simulated checks of healthy cards.

    The standard deviation of each comparison is drawn from the distribution that `PRIOR_DEGREES`
    stands for, around a prior of 1.

    Args:
        count: the number of comparable figures.
        slowdown: added to the new figure, in standard deviations.
    """
    deviations = np.sqrt(PRIOR_DEGREES / generator.chisquare(PRIOR_DEGREES, checks))
    unit = math.sqrt(TAIL_DEGREES / (TAIL_DEGREES - 2))
    drawn = generator.standard_t(TAIL_DEGREES, (checks, count + 1)) / unit * deviations[:, None]
    values, further = drawn[:, :-1], drawn[:, -1] + slowdown * deviations
    return scores_of(values, 1.0, further)


def share_below(values: Sequence[float], value: float) -> float:
    """Return the share of values that are smaller."""
    return sum(other < value for other in values) / len(values)
