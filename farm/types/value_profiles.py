"""Value profiles (data classes): a small set of named classes of input values that all models
share.

Switching power depends on the values: half of the inputs of a convolution after a ReLU are zeros,
and in many networks whole channels are zero or nearly constant. But a reading must not depend on
the model that requested it. So the statistics of a call's values are rounded to a class: the share
of zeros in quarters, whether any value is negative, and the share of the total variance that is
between channels. The class is part of a reading's protocol: two calls of a tuple with different
classes have different readings. The classes are coarse, because the effect is small
(docs/design/data.md) and every class needs another reading.

A class is one word for all activations, or one word per activation, separated by commas:

    normal          standard normal
    normal-c90      normal, with 90 % of the variance between channels
    zeros-50        normal, with half of the values set to zero
    zeros-50+       half of the values zero, none negative: the output of a ReLU
    zeros-50+c90    the same, from a ReLU whose channels differ
    zeros-0+        all values positive

Some arguments of a call are buffers or parameters, such as caches. If their contents are not random
weights, a slash and one word (for all of them) or one word each describe the contents:

    normal/zeros-100        an empty cache
    normal/used-50d2        a cache that is half full: the first half along dimension 2
    normal/same             the same value everywhere

This module does not import torch, because job planning uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NORMAL = "normal"
SINGLE = 3  # calls with more activations (concatenations) have one word for all
_WORD = re.compile(r"(?:normal|zeros-(0|25|50|75|100)(\+?))(?:-?c(50|90))?")
_HELD = re.compile(r"normal|same|zeros-(25|50|75|100)|used-(25|50|75)d(\d)")


@dataclass(frozen=True)
class Filling:
    """The values of one activation: the share of zeros, whether the others are positive, and the
    share of the variance that is between channels (before a ReLU)."""

    zeros: float = 0.0
    positive: bool = False
    channels: float = 0.0


@dataclass(frozen=True)
class HeldFilling:
    """The values of a buffer or parameter: the share of zeros, and whether they are at random
    places or after the used part of a dimension; or one value everywhere."""

    zeros: float = 0.0
    dimension: int | None = None
    same: bool = False


def is_class(name: str) -> bool:
    """True if `name` is the name of a class."""
    seen, stroke, weights = name.partition("/")
    if not all(map(_WORD.fullmatch, seen.split(","))):
        return False
    return not stroke or all(map(_HELD.fullmatch, weights.split(",")))


def fillings(name: str, activations: int) -> list[Filling]:
    """Return one filling per activation of a tuple, in the order of its tensors. Raises ValueError
    if the name is not a class, or has another number of words than activations."""
    matches = (_matched(_WORD, word) for word in _words(name, name.partition("/")[0], activations))
    return [
        Filling(int(match[1] or 0) / 100, bool(match[2]), int(match[3] or 0) / 100)
        for match in matches
    ]


def held_fillings(name: str, held: int) -> list[HeldFilling]:
    """Return one filling for each buffer or parameter that is an argument of the tuple, in the
    order of its tensors. Raises ValueError if the name is not a class, or has another number of
    words than such arguments."""
    filled = []
    for word in _words(name, name.partition("/")[2] or NORMAL, held):
        match = _matched(_HELD, word)
        share = 1 - int(match[2]) / 100 if match[2] else int(match[1] or 0) / 100
        filled.append(HeldFilling(share, int(match[3]) if match[2] else None, word == "same"))
    return filled


def _matched(pattern: re.Pattern[str], word: str) -> re.Match[str]:
    if (match := pattern.fullmatch(word)) is None:
        raise ValueError(f"'{word}' is not a value profile")
    return match


def _words(name: str, part: str, number: int) -> list[str]:
    words = part.split(",")
    if len(words) not in (1, number):
        raise ValueError(f"'{name}' describes {len(words)} tensors, but the call has {number}")
    return words * number if len(words) == 1 else words


def class_of(seen: Sequence[Mapping[str, Any] | None] | None) -> str:
    """Return the name of the class of the values at one call. ``seen``: the statistics: first one
    entry per activation with `zeros` and `channels` (shares) and `least`, or None; then one entry
    with `held` per buffer or parameter that is an argument."""
    activations: list[Mapping[str, Any] | None] = []
    held_words = []
    for entry in seen or ():
        if entry and entry.get("held"):
            held_words.append(_held_word(entry))
        else:
            activations.append(entry)
    if len(activations) > SINGLE:
        activations = [_pooled(activations)]
    word, held_word = _joined(list(map(_word, activations))), _joined(held_words)
    return word if held_word == NORMAL else f"{word}/{held_word}"


def _pooled(entries: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """One entry for many activations; None if one of them has none."""
    present = [entry for entry in entries if entry]
    if len(present) < len(entries):
        return None
    pooled = {"least": min(entry["least"] for entry in present)}
    for name in ("zeros", "channels"):
        pooled[name] = sum(entry.get(name, 0.0) for entry in present) / len(present)
    return pooled


def _joined(words: Sequence[str]) -> str:
    """Join words with commas. If all are equal, return one word; if there are none, return
    `NORMAL`.
    """
    if not words:
        return NORMAL
    return ",".join(words) if len(set(words)) > 1 else words[0]


def _held_word(entry: Mapping[str, Any]) -> str:
    zeros = round(entry.get("zeros", 0.0) * 4) * 25
    if zeros == 100:
        return "zeros-100"
    if entry.get("used_dimension") is not None:
        used = round(entry["used"] * 4) * 25
        if used in (25, 50, 75):
            return f"used-{used}d{entry['used_dimension']}"
    if zeros:
        return f"zeros-{zeros}"
    return "same" if entry.get("same") else NORMAL


def _word(entry: Mapping[str, Any] | None) -> str:
    if not entry:
        return NORMAL
    zeros = round(entry["zeros"] * 4) * 25
    if zeros == 100:
        return "zeros-100"
    share, channels = entry.get("channels", 0.0), ""
    if share > 0.65:
        channels = "c90"
    elif share > 0.25:
        channels = "c50"
    if entry["least"] >= 0:
        return f"zeros-{zeros}+{channels}"
    values = f"zeros-{zeros}" if zeros else NORMAL
    return f"{values}-{channels}" if channels else values
