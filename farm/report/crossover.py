"""Between which sizes a change of cost changes its sign: "slower at 8, faster at 64".

The change is measured at a few sizes. Between two of them, the logarithm of the ratio is
interpolated linearly over the logarithm of the size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farm.types.figure import Figure, value_of
from farm.verdict.cost_line import Change


@dataclass(frozen=True)
class Crossover:
    """A change of sign between two measured sizes.

    Attributes:
        gains: True if the cost is less at sizes above, False if it is less at sizes below.
        below, above: the nearest measured sizes at which the change is certain.
        size: where the interpolated ratio is 1.
        low, high: the same for the bounds of the 95 % interval of the ratio.
    """

    gains: bool
    below: int
    above: int
    size: float
    low: float
    high: float

    def words(self, axis: str) -> str:
        """``from batch 23 on (19 to 28; between 8 and 64)``."""
        size, low, high = (f"{value:.3g}" for value in (self.size, self.low, self.high))
        where = f"from {axis} {size} on" if self.gains else f"up to {axis} {size}"
        return f"{where} ({low} to {high}; between {self.below} and {self.above})"


@dataclass(frozen=True)
class Trend:
    """Where a cost gains and where it loses against another.

    Attributes:
        changes: size -> the change at it, by rising size; only those with both figures.
    """

    changes: Mapping[int, Change]
    crossovers: tuple[Crossover, ...]

    @classmethod
    def of(cls, changes: Mapping[int, Change]) -> Trend:
        """Find the crossovers of changes, by size."""
        with_change = {size: changes[size] for size in sorted(changes) if changes[size].change}
        points = [_Point.of(size, change) for size, change in with_change.items()]
        certain = [number for number, point in enumerate(points) if point.sign]
        crossovers = []
        for first, last in itertools.pairwise(certain):
            if points[first].sign != points[last].sign:
                crossovers.append(_crossover(points[first : last + 1]))
        return cls(with_change, tuple(crossovers))

    def sizes(self, verdict: str) -> list[int]:
        """The sizes with a verdict: ``faster``, ``slower`` or ``same``."""
        return [size for size, change in self.changes.items() if change.verdict == verdict]

    def words(self, axis: str) -> str:
        """``gains at batch 64; loses at batch 1, 8; gains from batch 23 on ...``."""
        parts = [f"gains {crossover.words(axis)}" for crossover in self.crossovers]
        for verb, verdict in (("gains", "faster"), ("loses", "slower"), ("is equal", "same")):
            if sizes := self.sizes(verdict):
                parts.append(f"{verb} at {axis} {', '.join(map(str, sizes))}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "gains_at": self.sizes("faster"),
            "loses_at": self.sizes("slower"),
            "equal_at": self.sizes("same"),
            "crossovers": [asdict(crossover) for crossover in self.crossovers],
        }


@dataclass(frozen=True)
class _Point:
    """A change at one size. `log_ratio`: log(B / A). `sign`: 1 if B surely costs more, -1 if surely
    less, else 0."""

    size: int
    log_ratio: Figure
    sign: int

    @classmethod
    def of(cls, size: int, change: Change) -> _Point:
        relative = change.change
        assert relative
        ratio = 1 + relative.value
        sign = {"slower": 1, "faster": -1}.get(change.verdict, 0)
        return cls(size, Figure(math.log(ratio), relative.half_width / ratio), sign)


def _crossover(points: Sequence[_Point]) -> Crossover:
    """The crossover between the first and the last point, whose signs differ."""
    first, last = points[0], points[-1]
    sizes = [math.log(point.size) for point in points]
    # So that the ratio falls: that of the first point is positive.
    ratios = [first.sign * point.log_ratio.value for point in points]
    half_widths = [point.log_ratio.half_width for point in points]
    least = [ratio - width for ratio, width in zip(ratios, half_widths, strict=True)]
    most = [ratio + width for ratio, width in zip(ratios, half_widths, strict=True)]
    return Crossover(
        gains=last.sign < 0,
        below=first.size,
        above=last.size,
        size=_zeros(sizes, ratios)[-1],
        low=_zeros(sizes, least)[0],
        high=_zeros(sizes, most)[-1],
    )


def _zeros(sizes: Sequence[float], values: Sequence[float]) -> list[float]:
    """Where a piecewise linear function falls to 0 or below. The end of the range if it does not.

    Args:
        sizes: logarithms of sizes, rising.
    """
    zeros = []
    for number in range(1, len(sizes)):
        before, after = values[number - 1], values[number]
        if before > 0 >= after:
            share = before / (before - after)
            zeros.append(sizes[number - 1] + share * (sizes[number] - sizes[number - 1]))
    if not zeros:
        zeros = [sizes[0] if values[0] <= 0 else sizes[-1]]
    return [math.exp(zero) for zero in zeros]


def ratio_of(change: Change) -> float | None:
    """B / A; None if a figure is unknown."""
    relative = value_of(change.change)
    return None if relative is None else 1 + relative
