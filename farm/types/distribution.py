"""The canonical form of values that decide how much work a call does (`farm.types.deciding`).

A `Distribution` is rounded, so that calls with about the same work are the same tuple, and it has
at most `MOST_NUMBERS` numbers. It is a form with numbers:

    lengths    (class, class, ...): the segments in their order; each has a length above
               (class - 1) * `LENGTH_STEP` and up to class * `LENGTH_STEP`. For at most
               `MOST_NUMBERS` segments: which of them are long decides when the last tiles of a
               product run. On an H100, one order of eight experts takes 9 % longer than another
    segments   (step, class, number, class, number, ...): so many segments have a length above
               (class - 1) * step and up to class * step. Products are computed in tiles, so the
               class decides their number. The order of the segments is not part of it. For more
               segments than `lengths` can hold
    places     (distinct, order): 16ths of the largest possible number of different values, and
               0, 1 or 2 for random order, short runs and long runs of ascending or equal values
    marks      (number, order): the number of marks, and 0 or 2 for scattered marks and one block
    distinct   (number,): the number of different values, or of runs of equal values
    repeats    (total, used): the sum of all counts, and how many of them are not zero
    below      (number,): the least number that is larger than all values

This module does not import torch: job planning uses it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_NUMBERS = 64
MOST_SEGMENTS = 2**20
MOST_CLASSES = (MOST_NUMBERS - 1) // 2
LENGTH_STEP = 16  # rows; no kernel has tiles of fewer
FORMS = ("lengths", "segments", "places", "marks", "distinct", "repeats", "below")
ORDERS = (0, 1, 2)
PARTS = 16  # `places` counts different values in this many parts of the largest possible number


@dataclass(frozen=True)
class Distribution:
    """A rounded description of values; see the module docstring."""

    form: str
    numbers: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"form": self.form, "numbers": list(self.numbers)}

    @property
    def step(self) -> int:
        return self.numbers[0]

    @property
    def classes(self) -> tuple[tuple[int, int], ...]:
        """The (class, number) pairs of segments."""
        return tuple(zip(self.numbers[1::2], self.numbers[2::2], strict=True))

    @property
    def least_lengths(self) -> list[int]:
        """The least length of each segment: in order for `lengths`, the longest first for
        `segments`.
        """
        if self.form == "lengths":
            return [_least_length(position, LENGTH_STEP) for position in self.numbers]
        lengths: list[int] = []
        for position, number in self.classes:
            lengths += [_least_length(position, self.step)] * number
        return lengths

    @property
    def segments(self) -> int:
        """The number of segments."""
        if self.form == "lengths":
            return len(self.numbers)
        return sum(number for _, number in self.classes)

    @property
    def used_segments(self) -> int:
        """The number of segments that are not empty."""
        if self.form == "lengths":
            return sum(position > 0 for position in self.numbers)
        return sum(number for position, number in self.classes if position)

    @property
    def shortest(self) -> int:
        """The least total length of the segments."""
        if self.form == "lengths":
            return sum(self.least_lengths)
        return sum(number * _least_length(position, self.step) for position, number in self.classes)

    @property
    def tiles(self) -> int:
        """The number of tiles of `step` rows, or of `LENGTH_STEP` rows, that the segments fill."""
        if self.form == "lengths":
            return sum(self.numbers)
        return sum(position * number for position, number in self.classes)

    def problem(self) -> str:
        """Say what is wrong with the numbers; "" if nothing is."""
        if self.form not in FORMS:
            return f"has the unknown form {self.form!r}"
        if len(self.numbers) > MOST_NUMBERS or any(number < 0 for number in self.numbers):
            return f"must have at most {MOST_NUMBERS} numbers from 0"
        if self.form == "lengths":
            return "" if self.numbers else "must have a number for each segment"
        if self.form == "segments":
            return _segments_problem(self.numbers)
        if self.form == "repeats":
            return _repeats_problem(self.numbers)
        if self.form in ("below", "distinct"):
            is_one = len(self.numbers) == 1 and self.numbers[0]
            return "" if is_one else "must have one number from 1"
        return _order_problem(self)


def _least_length(position: int, step: int) -> int:
    return (position - 1) * step + 1 if position else 0


def _segments_problem(numbers: Sequence[int]) -> str:
    if len(numbers) < 3 or len(numbers) % 2 == 0 or not numbers[0]:
        return "must have a step, and pairs of a class and a number"
    classes = list(numbers[1::2])
    if classes != sorted(set(classes), reverse=True) or 0 in numbers[2::2]:
        return "must have each class once, in descending order, with a number"
    return ""


def _repeats_problem(numbers: Sequence[int]) -> str:
    is_sum = len(numbers) == 2 and numbers[1] <= numbers[0] and bool(numbers[0]) == bool(numbers[1])
    return "" if is_sum else "must have a sum, and a number of counts that are not zero"


def _order_problem(values: Distribution) -> str:
    if len(values.numbers) != 2 or values.numbers[1] not in ORDERS:
        return "must have two numbers, and the second one must be an order"
    if values.form == "places" and not 0 < values.numbers[0] <= PARTS:
        return f"must have from 1 to {PARTS} parts"
    return ""


# ----- segments


def ordered_lengths(lengths: Sequence[int]) -> Distribution:
    """Describe the lengths of at most `MOST_NUMBERS` segments in their order."""
    return Distribution("lengths", tuple(-(-length // LENGTH_STEP) for length in lengths))


def segments_of(lengths: Sequence[int], least_step: int) -> Distribution:
    """Describe the lengths of segments. The step doubles until there are at most `MOST_CLASSES`
    classes.
    """
    step = least_step

    while True:
        number_of = Counter(-(-length // step) for length in lengths)
        if len(number_of) <= MOST_CLASSES:
            break
        step *= 2

    pairs = sorted(number_of.items(), reverse=True)
    return Distribution("segments", (step, *(number for pair in pairs for number in pair)))


def lengths_of(values: Distribution, total: int) -> list[int]:
    """Return lengths that a distribution describes: in their order, or if that is unknown in a
    random one, which is the same at each call.

    Their sum is ``total``, or less if the segments do not fill it. The caller has checked that they
    fit."""
    lengths = values.least_lengths
    step = LENGTH_STEP if values.form == "lengths" else values.step
    used = [index for index, length in enumerate(lengths) if length]
    rest = min(total - sum(lengths), len(used) * (step - 1))

    if used:
        each, more = divmod(rest, len(used))
        for position, index in enumerate(used):
            lengths[index] += each + (position < more)

    if values.form == "segments":
        random.Random(0).shuffle(lengths)
    return lengths


def equal_lengths(segments: int, total: int) -> list[int]:
    """Return the lengths if nothing is known about them."""
    ends = [(index + 1) * total // segments for index in range(segments)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def spreading_step(size: int) -> int:
    """Return a step such that ``number * step % size`` gives each of ``size`` numbers its own
    place.

    The places of the first few numbers are already spread evenly: the step is near the golden
    ratio."""
    step = max(1, round(size * 0.618))
    while math.gcd(step, size) > 1:
        step += 1
    return step
