"""Formats numbers for users: suitable units, and as many digits as the interval supports."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from farm.types.figure import Figure

Units = Sequence[tuple[str, float]]  # (unit, factor to the base unit), largest unit first

TIME: Units = (("s", 1e6), ("ms", 1e3), ("µs", 1.0))  # base: µs
ENERGY: Units = (("kJ", 1e6), ("J", 1e3), ("mJ", 1.0), ("µJ", 1e-3))  # base: mJ
POWER: Units = (("W", 1.0),)
_COUNT = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))

NOTHING = "–"
MARK = 6  # characters of an id at the end of a label


def quantity(value: float | None, units: Units, digits: int = 3) -> str:
    """Format a value in the base unit: ``5.31 ms``; None as a dash."""
    if value is None:
        return NOTHING
    unit, factor = fitting_unit(value, units)
    return f"{_rounded(value / factor, digits)} {unit}"


def interval(figure: Figure | None, units: Units) -> str:
    """Format ``7.460 ± 0.021 ms``: two significant digits for the half-width, as many decimals for
    the value.
    """
    if figure is None:
        return NOTHING
    unit, factor = fitting_unit(figure.value, units)
    value, half_width = figure.value / factor, figure.half_width / factor
    if half_width <= 0 or not math.isfinite(half_width):
        return f"{_rounded(value, 4)} {unit}"
    decimals = min(4, max(0, 1 - math.floor(math.log10(half_width))))
    return f"{value:.{decimals}f} ± {half_width:.{decimals}f} {unit}"


def percent(fraction: float | None, decimals: int = 1) -> str:
    """Format ``99.7 %``. Only exactly 1 is shown as 100 %, and only exactly 0 as 0 %: values near 0
    are ``<0.1 %`` or ``>-0.1 %``.
    """
    if fraction is None:
        return NOTHING
    scaled = fraction * 100
    if scaled and round(scaled, decimals) == 0:
        sign = "<" if scaled > 0 else ">-"
        return f"{sign}{10**-decimals:.{decimals}f} %"
    if scaled < 100 and round(scaled, decimals) >= 100:
        scaled = math.floor(scaled * 10**decimals) / 10**decimals
    return f"{scaled:.{decimals}f} %"


def gap(figure: Figure | None) -> str:
    """Format a relative gap with its sign: ``+0.3 ± 0.4 %``."""
    return (
        NOTHING
        if figure is None
        else f"{figure.value * 100:+z.1f} ± {figure.half_width * 100:.1f} %"
    )


def count_of(number: float | None, unit: str) -> str:
    """Format a count with decimal prefixes: ``4.09 GFLOP``, ``102 MB``."""
    if number is None:
        return NOTHING
    prefix, factor = fitting_unit(number, _COUNT)
    return f"{_rounded(number / factor, 3)} {prefix}{unit}" if prefix else f"{number:.0f} {unit}"


def span(seconds: float | None) -> str:
    """Format a duration: ``280 ms``, ``8 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 3 h``."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 0.5:
        return quantity(seconds * 1e6, TIME, 2)
    whole = max(0, round(seconds))
    for size, unit, smaller, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def day(seconds: float | None) -> str:
    """Format a date and time: ``2026-11-25 18:03 UTC``; None as a dash."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else NOTHING


def part_of(part: int, whole: int) -> str:
    """Format ``3/5``; if both numbers are 5, ``5``."""
    return str(whole) if part == whole else f"{part}/{whole}"


def plural(word: str, number: int) -> str:
    """Return the word for a number of things: ``tuple`` or ``tuples``."""
    return word if number == 1 else f"{word}s"


def few(names: Sequence[str], most: int = 2) -> str:
    """The first names, and the number of the others: ``add, relu + 2 more``."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" + {left} more" if left > 0 else "")


def fitting_unit(value: float, units: Units) -> tuple[str, float]:
    """Choose a unit for a value in the base unit. Return the unit and its factor."""
    return next(((unit, factor) for unit, factor in units if abs(value) >= factor), units[-1])


def _rounded(value: float, digits: int) -> str:
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def told_apart(labels: Mapping[str, str]) -> dict[str, str]:
    """Return id -> label. If several tuples have the same label, the beginning of the id is
    appended.
    """
    number = Counter(labels.values())
    return {
        id_: text if number[text] == 1 else f"{text} #{id_[:MARK]}" for id_, text in labels.items()
    }
