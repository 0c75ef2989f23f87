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

Behind a stroke stands what the buffers and parameters hold that the call was given as arguments, caches above all,
where that is not the random values of a weight; one word for all, or one each:

    normal/zeros-100        an empty cache
    normal/used-50d2        a cache half of which holds values: the first half along dimension 2
    normal/same             one and the same value throughout

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
_HELD = re.compile(r"normal|same|zeros-(25|50|75|100)|used-(25|50|75)d(\d)")


@dataclass(frozen=True)
class Filling:
    """How one activation is filled: what share of it is zero, whether the rest is positive, and how much of the
    variance (before a ReLU) lies between its channels."""

    zeros: float = 0.0
    positive: bool = False
    channels: float = 0.0


@dataclass(frozen=True)
class HeldFilling:
    """How a buffer or parameter is filled: what share of it is zero, at random places or all behind the part that is
    used along a dimension, or whether it holds one value."""

    zeros: float = 0.0
    dimension: int | None = None
    same: bool = False


def is_class(name: str) -> bool:
    """Whether the name is that of a class."""
    seen, stroke, held = name.partition("/")
    return all(map(_WORD.fullmatch, seen.split(","))) and (not stroke or all(map(_HELD.fullmatch, held.split(","))))


def fillings(name: str, activations: int) -> list[Filling]:
    """One filling per activation of a tuple, in the order of its tensors.

    Raises:
        ValueError: the name is no class, or one for another number of activations.
    """
    return [_filling(word) for word in _words(name, name.partition("/")[0], activations)]


def held_fillings(name: str, held: int) -> list[HeldFilling]:
    """One filling for each buffer and parameter that a tuple is given as an argument, in the order of its tensors.

    Raises:
        ValueError: the name is no class, or one for another number of them.
    """
    return [_held_filling(word) for word in _words(name, name.partition("/")[2] or NORMAL, held)]


def holds_nothing(name: str) -> bool:
    """Whether a buffer that calls of the class read holds zeros alone: an empty cache."""
    return "zeros-100" in name.partition("/")[2].split(",")


def _words(name: str, part: str, number: int) -> list[str]:
    words = part.split(",")
    if len(words) == 1:
        words *= number
    if len(words) != number:
        raise ValueError(f"'{name}' is for {len(words)} tensors, and there are {number}")
    return words


def class_of(seen: Sequence[Mapping[str, Any] | None] | None) -> str:
    """The class of what was seen at one call: an entry per activation with `zeros` and `channels` (shares) and
    `least`, or None; then one per buffer or parameter that it was given, marked `held`."""
    held = [entry for entry in seen or () if entry and entry.get("held")]
    activations = _activations_class([entry for entry in seen or () if not (entry and entry.get("held"))])
    words = [_held_word(entry) for entry in held]
    if all(word == NORMAL for word in words):
        return activations
    return f"{activations}/{words[0] if len(set(words)) == 1 else ','.join(words)}"


def _activations_class(seen: Sequence[Mapping[str, Any] | None]) -> str:
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


def _held_word(entry: Mapping[str, Any]) -> str:
    zeros = round(entry.get("zeros", 0.0) * 4) * 25
    if zeros == 100:
        return "zeros-100"
    if entry.get("used_dimension") is not None and (used := round(entry["used"] * 4) * 25) in (25, 50, 75):
        return f"used-{used}d{entry['used_dimension']}"
    if zeros:
        return f"zeros-{zeros}"
    return "same" if entry.get("same") else NORMAL


def _held_filling(word: str) -> HeldFilling:
    match = _HELD.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word}' is no class of data")
    if match[2]:
        return HeldFilling(1 - int(match[2]) / 100, int(match[3]))
    return HeldFilling(int(match[1] or 0) / 100, same=word == "same")


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
