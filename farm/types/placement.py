"""Placements of a tuple's tensors in slow memory: their words, and which of them are measured."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Self, get_args

from farm.errors import UsageError

Placements = Literal["none", "each", "all"]
PLACEMENTS = get_args(Placements)
#: Up to this number n of tensors, all 2^n configurations are measured; above it, each tensor alone
#: and all together.
FEW = 5
#: Above this number of tensors (such as an optimizer's call), only all tensors together are
#: measured.
MANY = 64
_PART = re.compile(r"(in|out)(0|[1-9]\d{0,5})(?:-([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Placement:
    """The tensors of a tuple that are in slow memory. Empty: all are in fast memory."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, word: str) -> Self:
        """
        Raises:
            UsageError: the word is not a placement in canonical form.
        """
        numbers_of: dict[str, set[int]] = {"in": set(), "out": set()}
        for part in word.split("+") if word else ():
            if (match := _PART.fullmatch(part)) is None:
                raise _unknown(word)
            side, first, last = match[1], int(match[2]), int(match[3] or match[2])
            numbers_of[side].update(range(first, last + 1))
        placement = cls(frozenset(numbers_of["in"]), frozenset(numbers_of["out"]))
        if str(placement) != word:
            raise _unknown(word)
        return placement

    def __str__(self) -> str:
        return "+".join([*_ranges("in", self.inputs), *_ranges("out", self.outputs)])

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)

    def __len__(self) -> int:
        return len(self.inputs) + len(self.outputs)


def configurations(inputs: Collection[int], outputs: int, how: str) -> list[str]:
    """Return the words of all requested configurations. The one with all tensors in fast memory is
    left out.

    Args:
        inputs: the numbers of the input storages that can be in slow memory.
        how: ``each`` (each tensor alone, and all together), ``all`` (every subset; above `FEW`
            tensors as ``each``) or ``none``.
    """
    tensors = [("in", number) for number in sorted(inputs)] + [
        ("out", number) for number in range(outputs)
    ]
    if how == "none" or not tensors:
        return []
    every = len(tensors)
    if every > MANY:
        sizes: Collection[int] = [every]
    else:
        sizes = range(1, every + 1) if how == "all" and every <= FEW else sorted({1, every})
    words = []
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(tensors, size) for size in sizes
    ):
        slow = {
            direction: frozenset(number for side, number in chosen if side == direction)
            for direction in ("in", "out")
        }
        words.append(str(Placement(slow["in"], slow["out"])))
    return words


def _ranges(side: str, numbers: Collection[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield f"{side}{members[0]}" + (f"-{members[-1]}" if len(members) > 1 else "")


def _unknown(word: str) -> UsageError:
    return UsageError(
        f"'{word[:80]}' is not a placement of tensors in slow memory.",
        "Name the slow tensors, inputs before outputs, in rising order: in0, in0+out0 or "
        "in1-3+out0.",
    )
