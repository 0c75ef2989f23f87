"""The period of an energy counter, from the times at which queries see that it changes.

A step of the counter has the energy of one period. Queries see each change late, so the time
between two of them is wrong by several per cent (docs/design/counter-period.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from statistics import fmean, median

LAST_CHANGES = 9  # the newest changes, from which the times of others are computed
MOST_CHANGES = 1000  # the period is learned from at most so many changes of one sampler
SHARP_S = 0.012  # a change is sharp if its time is known to this long
NEAR_S = 30.0  # a sharp change tells the periods of later changes for this long
PERIODS_S = 0.01  # the period is rounded to a multiple of this,
USUAL = 0.01  # if the difference is at most this share of the multiple
PERIOD_ERROR = 0.001  # another period is used if its standard error is at most this share of it,
LEAST_DEGREES = 20  # with at least so many degrees of freedom
# a run of changes does not count if a step differs from the median step by a larger share
UNUSUAL = 0.3


class CounterPeriod:
    """The period of a device's energy counter, from the changes that all its samplers have seen.

    The counter of an H200 adds up the energy of 0.1 s each. A query sees each change some
    milliseconds late, more if several programs use the driver. So the power of a step is its energy
    divided by the period, not by the time between two queries. A counter without a regular period
    is recognised by its steps: their powers then differ more.

    Only *sharp* changes count: the time between the last query before the change and the query that
    saw it is at most `SHARP_S`. They also tell to which period a change belongs whose time is
    uncertain."""

    def __init__(self) -> None:
        # Sums of squares and products over all runs of changes, each relative to its mean number
        # and mean time.
        self._numbers = self._products = self._times = 0.0
        self._degrees = 0  # of freedom
        # differences between powers of consecutive steps that are smaller with the period
        self._votes = 0
        self._newest_s: list[float] = []  # sharp changes

    @property
    def period_s(self) -> float | None:
        """None if the period is not known well enough, or if the counter has none. Unit: s.

        It is a multiple of `PERIODS_S` unless the changes contradict this.
        """
        if self._votes <= 0:
            return None
        period_s = self._products / self._numbers
        if period_s < 4 * SHARP_S:  # queries are too slow to tell to which period a change belongs
            return None
        rest = max(0.0, self._times - period_s * self._products) / self._degrees
        error_s, usual_s = math.sqrt(rest / self._numbers), PERIODS_S * round(period_s / PERIODS_S)
        if error_s <= PERIODS_S / 8 and abs(period_s - usual_s) <= USUAL * usual_s:
            return usual_s
        is_known = self._degrees >= LEAST_DEGREES and error_s <= PERIOD_ERROR * period_s
        return period_s if is_known else None

    def learn(
        self, times_s: Sequence[float], energies_mj: Sequence[float], sharp_s: Collection[float]
    ) -> None:
        """Add a series of changes: their times, the counter's new values, and the times of the
        sharp changes.
        """
        times_s, energies_mj = times_s[-MOST_CHANGES:], energies_mj[-MOST_CHANGES:]
        self._newest_s = [*self._newest_s, *(at for at in times_s if at in sharp_s)][-LAST_CHANGES:]
        ends = [number for number, at in enumerate([*times_s, math.nan]) if at not in sharp_s]
        for begin, end in itertools.pairwise([-1, *ends]):
            if end - begin > 3:
                self._add(times_s[begin + 1 : end], energies_mj[begin + 1 : end])

    def _add(self, times_s: Sequence[float], energies_mj: Sequence[float]) -> None:
        steps_s = [b - a for a, b in itertools.pairwise(times_s)]
        usual_s = median(steps_s)
        # no query came between two changes
        if any(abs(step_s / usual_s - 1) > UNUSUAL for step_s in steps_s):
            return
        numbers = range(len(times_s))
        number, time_s = fmean(numbers), fmean(times_s)
        self._numbers += math.fsum((tick - number) ** 2 for tick in numbers)
        self._products += math.fsum(
            (tick - number) * (at - time_s) for tick, at in zip(numbers, times_s, strict=True)
        )
        self._times += math.fsum((at - time_s) ** 2 for at in times_s)
        self._degrees += len(times_s) - 2
        energies = [b - a for a, b in itertools.pairwise(energies_mj)]
        corrected = [
            energy / step_s * usual_s for energy, step_s in zip(energies, steps_s, strict=True)
        ]
        for regular, other in zip(
            itertools.pairwise(energies), itertools.pairwise(corrected), strict=True
        ):
            better = abs(other[1] - other[0]) - abs(regular[1] - regular[0])
            self._votes += (better > 0) - (better < 0)

    def regular(self, times_s: Sequence[float], sharp_s: Sequence[float]) -> list[float]:
        """Move the times of changes to whole periods; ``sharp_s`` has the newest sharp changes.
        Unit: s.

        If the period is not known, or no sharp change, return the times as they are.
        """
        period_s = self.period_s
        known_s = [at for at in (*self._newest_s, *sharp_s) if times_s and at > times_s[0] - NEAR_S]
        if period_s is None or not known_s:
            return list(times_s)
        last_s = known_s[-1]
        phases = ((at - last_s) / period_s for at in known_s)
        begin_s = last_s + period_s * median(phase - round(phase) for phase in phases)
        numbers = [round((at - begin_s) / period_s) for at in times_s]
        # If two changes have the same number, the first one was seen a period late.
        numbers = list(
            itertools.accumulate(reversed(numbers), lambda later, number: min(later - 1, number))
        )[::-1]
        return [begin_s + number * period_s for number in numbers]
