"""Which tensors of a call lie in slow memory: a word in the protocol of a reading, never part of the tuple's id.

Fast is the card's own memory, slow what it reaches over a wire. A word names what is slow; all else is fast:

    ""              everything fast
    in0             the first input
    in1-3+out0      three inputs, the second to the fourth, and the first output

Inputs are the storages of the tuple's tensors by their number, parameters and buffers among them; outputs the storages
that a call makes, in the order in which it returns them. What it writes in place is an input.
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
#: So many tensors have all their configurations read (2^n); of more, each is slow alone, and all of them.
FEW = 5
#: Of more tensors than this (an optimizer's call on all parameters) only all are slow.
MANY = 64
_PART = re.compile(r"(in|out)(0|[1-9]\d{0,5})(?:-([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Placement:
    """What is slow. Empty: all is fast."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, word: str) -> Self:
        """
        Raises:
            UsageError: it is no such word, or not the one way to write it.
        """
        found: dict[str, set[int]] = {"in": set(), "out": set()}
        for part in filter(None, [word] if not word else word.split("+")):
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
    """The words of all configurations that are asked for, without the one that is all fast, which is read in any case.

    Args:
        inputs: the numbers of the storages that can be placed.
        how: ``all``: every subset of up to `FEW` tensors, of more each alone and all; ``each``: each alone and all;
            ``none``.
    """
    tensors = [("in", number) for number in sorted(inputs)] + [("out", number) for number in range(outputs)]
    if how == "none" or not tensors:
        return []
    sizes: list[int]
    if how == "all" and len(tensors) <= FEW:
        sizes = list(range(1, len(tensors) + 1))
    elif len(tensors) <= MANY:
        sizes = sorted({1, len(tensors)})
    else:
        sizes = [len(tensors)]
    return [str(_of(chosen)) for size in sizes for chosen in itertools.combinations(tensors, size)]


def _of(chosen: Collection[tuple[str, int]]) -> Placement:
    return Placement(
        frozenset(number for kind, number in chosen if kind == "in"),
        frozenset(number for kind, number in chosen if kind == "out"),
    )


def _ranges(kind: str, numbers: Collection[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield f"{kind}{members[0]}" + (f"-{members[-1]}" if len(members) > 1 else "")


def _unknown(word: str) -> UsageError:
    return UsageError(
        f"'{word[:80]}' is no placement.",
        "Name what is slow, inputs first, in rising order: in0, in0+out0 or in1-3+out0.",
    )
