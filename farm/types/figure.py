"""A value with its interval, and the arithmetic of such values.

Every time and energy that the farm computes with is a `Figure`. Tables of the database and JSON
store it as two numbers; `farm.types.fields` has the codec."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A value and the half-width of its 95 % interval, in the unit of the value.

    >>> Figure(110.0, 2.0).deviation_from(Figure(100.0)).value
    0.10000000000000009
    """

    value: float
    half_width: float = 0.0

    @property
    def relative(self) -> float:
        """The half-width as a fraction of the value; infinite for a value of 0."""
        return self.half_width / abs(self.value) if self.value else math.inf

    def times(self, number: float) -> Figure:
        """Return the figure multiplied by an exact number that is not negative."""
        return Figure(self.value * number, self.half_width * number)

    def multiplied_by(self, other: Figure) -> Figure:
        """Return ``self * other`` for independent errors."""
        errors = self.half_width * other.value, self.value * other.half_width
        return Figure(self.value * other.value, math.hypot(*errors))

    def divided_by(self, other: Figure) -> Figure:
        """Return ``self / other`` for independent errors. The value of the other must not be 0."""
        ratio = self.value / other.value
        errors = self.half_width / other.value, ratio * other.half_width / other.value
        return Figure(ratio, math.hypot(*errors))

    def minus(self, other: Figure) -> Figure:
        """Return ``self - other`` for independent errors."""
        return Figure(self.value - other.value, math.hypot(self.half_width, other.half_width))

    def deviation_from(self, reference: Figure) -> Figure:
        """Return ``self / reference - 1`` for independent errors. The value of the reference must
        not be 0.
        """
        ratio = self.divided_by(reference)
        return Figure(ratio.value - 1, ratio.half_width)


@dataclass(frozen=True)
class PassCost:
    """The time and energy of one pass of a subject. `energy_mj` is None if it is unknown.

    Records of a cost in one state (bursts, a replay, a rank) add their own fields to these two."""

    time_us: Figure
    energy_mj: Figure | None = None

    @property
    def mean_power_w(self) -> float | None:
        """The energy divided by the time; None if the energy is unknown or the time is 0."""
        if self.energy_mj is None or not self.time_us.value:
            return None
        return self.energy_mj.value / self.time_us.value * 1e3


def figure_of(value: float | None, half_width: float | None) -> Figure | None:
    """Return the figure of two stored numbers; None without a value. An unknown half-width counts
    as 0.
    """
    return None if value is None else Figure(value, half_width or 0.0)


def exact(figure: Figure | None) -> Figure | None:
    """Return the figure without its interval."""
    return Figure(figure.value) if figure else None


def value_of(figure: Figure | None) -> float | None:
    """Return the value of a figure; None without a figure."""
    return figure.value if figure else None


def total_of(terms: Iterable[tuple[Figure | None, int]]) -> Figure | None:
    """Return the sum of figure x exact number, for independent errors; None if a figure is
    missing.
    """
    values, half_widths = [], []  # lists, because a Figure for each of thousands of terms is slow
    for figure, number in terms:
        if figure is None:
            return None
        values.append(figure.value * number)
        half_widths.append(figure.half_width * number)
    return Figure(math.fsum(values), math.hypot(*half_widths))


def share_of(value: float | None, total: float | None) -> float | None:
    """Return value / total; None if one of them is unknown or the total is 0."""
    return None if value is None or not total else value / total
