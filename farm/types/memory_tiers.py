"""Placements: which tensors of a call are in slow memory. A word in the protocol of a reading, not part of the tuple.

Fast is the card's own memory; slow is memory that it reaches over a link. A word names the slow tensors:

    ""              everything fast
    in0             the first input
    in1-3+out0      three inputs, the second to the fourth, and the first output

Inputs are the storages of the tuple's tensors by number, with parameters and buffers. Outputs are the storages that a
call creates, in the order of its results. A tensor that the call writes in place is an input.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Self, get_args

from farm.errors import UsageError

Placements = Literal["none", "each", "all"]
PLACEMENTS = get_args(Placements)
#: Up to so many tensors, all 2^n configurations are measured; of more tensors, each alone and all together.
FEW = 5
#: Of more tensors (an optimizer's call on all parameters), only all together.
MANY = 64
_PART = re.compile(r"(in|out)(0|[1-9]\d{0,5})(?:-([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Placement:
    """The slow tensors. Empty: all are fast."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, word: str) -> Self:
        """
        Raises:
            UsageError: the word is not a placement, or not in its canonical form.
        """
        found: dict[str, set[int]] = {"in": set(), "out": set()}
        for part in word.split("+") if word else ():
            if (match := _PART.fullmatch(part)) is None:
                raise _unknown(word)
            kind, first, last = match[1], int(match[2]), int(match[3] or match[2])
            found[kind].update(range(first, last + 1))
        placement = cls(frozenset(found["in"]), frozenset(found["out"]))
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
    """The words of all requested configurations, except the one with all tensors fast.

    Args:
        inputs: the numbers of the storages that can be placed.
        how: ``all`` (every subset of up to `FEW` tensors, of more each alone and all), ``each`` (each alone and all)
            or ``none``.
    """
    tensors = [("in", number) for number in sorted(inputs)] + [("out", number) for number in range(outputs)]
    if how == "none" or not tensors:
        return []
    every = len(tensors)
    if every > MANY:
        sizes: Collection[int] = [every]
    else:
        sizes = range(1, every + 1) if how == "all" and every <= FEW else sorted({1, every})
    words = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(tensors, size) for size in sizes):
        slow = {wanted: frozenset(number for kind, number in chosen if kind == wanted) for wanted in ("in", "out")}
        words.append(str(Placement(slow["in"], slow["out"])))
    return words


def _ranges(kind: str, numbers: Collection[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield f"{kind}{members[0]}" + (f"-{members[-1]}" if len(members) > 1 else "")


def _unknown(word: str) -> UsageError:
    return UsageError(
        f"'{word[:80]}' is not a placement.",
        "Name what is slow, inputs first, in rising order: in0, in0+out0 or in1-3+out0.",
    )
