"""What stands in a tuple's inputs, as a small set of named classes that any model may share.

Switching power depends on the values: a convolution behind a ReLU multiplies zeros half of the time, and in many
networks whole channels are zero or nearly constant, so that the operands hardly change from one multiplication to the
next. But a reading may never depend on the model that asked for it. So what was seen at a call when its model ran is
rounded to a class - the share of zeros in quarters, whether any value was negative, how much of the variance lies
between channels - and the class, not the values, is part of the protocol under which the tuple is read. Two calls of
one tuple in two classes are two readings. The steps are coarse because the effect is small (docs/method.md) and every
class is a reading more.

A class is one word, or one word per activation joined by commas where they differ:

    normal          standard normal
    normal-c90      the same, nine tenths of the variance between channels
    zeros-50        standard normal, half of the values set to zero
    zeros-50+       none negative and half of them zero: what a ReLU hands on
    zeros-50+c90    the same, behind a ReLU whose channels differ
    zeros-0+        positive throughout

No torch here: jobs are planned by the classes, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NORMAL = "normal"
SINGLE = 3  # calls with more activations than this (concatenations) get one word for all
_WORD = re.compile(r"(?:normal|zeros-(0|25|50|75|100)(\+?))(?:-?c(50|90))?")


@dataclass(frozen=True)
class Filling:
    """How one activation is filled: what share of it is zero, whether the rest is positive, and how much of the
    variance (before a ReLU) lies between its channels."""

    zeros: float = 0.0
    positive: bool = False
    channels: float = 0.0


def is_class(name: str) -> bool:
    """Whether the name is that of a class."""
    return all(_WORD.fullmatch(word) for word in name.split(","))


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
    """The class of what was seen at one call: an entry per activation with `zeros` and `channels` (shares) and
    `least`, or None."""
    if not seen:
        return NORMAL
    if len(seen) > SINGLE:
        known = [entry for entry in seen if entry]
        if len(known) < len(seen):
            return NORMAL
        pooled = {name: sum(entry.get(name, 0.0) for entry in known) / len(known) for name in ("zeros", "channels")}
        return _word({**pooled, "least": min(entry["least"] for entry in known)})
    words = [_word(entry) for entry in seen]
    return words[0] if len(set(words)) == 1 else ",".join(words)


def _word(entry: Mapping[str, Any] | None) -> str:
    if not entry:
        return NORMAL
    zeros = round(entry["zeros"] * 4) * 25
    if zeros == 100:
        return "zeros-100"
    share = entry.get("channels", 0.0)
    channels = "c90" if share > 0.65 else "c50" if share > 0.25 else ""
    if entry["least"] >= 0:
        return f"zeros-{zeros}+{channels}"
    return "-".join(filter(None, [NORMAL if zeros == 0 else f"zeros-{zeros}", channels]))


def _filling(word: str) -> Filling:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word}' is no class of data")
    return Filling(int(match[1] or 0) / 100, bool(match[2]), int(match[3] or 0) / 100)
