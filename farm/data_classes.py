"""What stands in a tuple's inputs, as a small set of named classes that any model may share.

Switching power depends on the values: a convolution behind a ReLU multiplies zeros half of the time. But a reading may
never depend on the model that asked for it. So what was seen at a call when its model ran is rounded to a class - the
share of zeros to 10 %, and whether any value was negative - and the class, not the values, is part of the protocol
under which the tuple is read. Two calls of one tuple in two classes are two readings.

A class is one word, or one word per activation joined by commas where they differ:

    normal        standard normal
    zeros-50      standard normal, half of the values set to zero
    zeros-50+     the same, none negative: what a ReLU hands on
    zeros-0+      positive throughout

No torch here: jobs are planned by the classes, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NORMAL = "normal"
SINGLE = 3  # calls with more activations than this (concatenations) get one word for all
_WORD = re.compile(r"zeros-(0|[1-9]0|100)(\+?)")


@dataclass(frozen=True)
class Filling:
    """How one activation is filled: what share of it is zero, and whether the rest is positive."""

    zeros: float = 0.0
    positive: bool = False


def is_class(name: str) -> bool:
    """Whether the name is that of a class."""
    return all(word == NORMAL or _WORD.fullmatch(word) for word in name.split(","))


def fillings(name: str, activations: int) -> list[Filling]:
    """One filling per activation of a tuple, in the order of its tensors.

    Raises:
        ValueError: the name is no class, or one for another number of activations.
    """
    words = name.split(",")
    if len(words) == 1:
        words *= activations
    if len(words) != activations:
        raise ValueError(f"'{name}' is for {len(words)} activations, and there are {activations}")
    return [_filling(word) for word in words]


def class_of(seen: Sequence[Mapping[str, Any] | None] | None) -> str:
    """The class of what was seen at one call: an entry per activation with `zeros` (a share) and `least`, or None."""
    if not seen:
        return NORMAL
    if len(seen) > SINGLE:
        known = [entry for entry in seen if entry]
        if len(known) < len(seen):
            return NORMAL
        zeros = sum(entry["zeros"] for entry in known) / len(known)
        return _word({"zeros": zeros, "least": min(entry["least"] for entry in known)})
    words = [_word(entry) for entry in seen]
    return words[0] if len(set(words)) == 1 else ",".join(words)


def _word(entry: Mapping[str, Any] | None) -> str:
    if not entry:
        return NORMAL
    zeros = round(entry["zeros"] * 10) * 10
    positive = entry["least"] >= 0 and zeros < 100
    return NORMAL if zeros == 0 and not positive else f"zeros-{zeros}{'+' if positive else ''}"


def _filling(word: str) -> Filling:
    if word == NORMAL:
        return Filling()
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word}' is no class of data")
    return Filling(int(match[1]) / 100, bool(match[2]))
