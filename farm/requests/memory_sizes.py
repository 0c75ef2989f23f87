"""Amounts of memory as people say them: `80GB`, `24 GiB`, `55GB/s`, `50%`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from farm.errors import UsageError

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def bytes_of(option: str, text: str, *, per_second: bool = False) -> int:
    """
    Args:
        option: what it was said for.
        per_second: it is a bandwidth; `/s` may stand behind it.

    Raises:
        UsageError: it is no amount, or nothing.
    """
    found = _AMOUNT.fullmatch(text.removesuffix("/s") if per_second else text)
    amount = float(found[1]) * _PREFIXES[found[2].lower()] if found else 0.0
    if not math.isfinite(amount) or amount < 1:
        example, what = ("55GB/s", "a bandwidth") if per_second else ("80GB", "an amount of memory")
        raise UsageError(f"{option} wants {what}, not '{text}'.", f"Give {option} {example}, say.")
    return int(amount)


@dataclass(frozen=True)
class Amount:
    """So many bytes, or a share of a whole."""

    size_bytes: int = 0
    share: float = 0.0

    def of(self, whole_bytes: int) -> int:
        return int(self.share * whole_bytes) if self.share else self.size_bytes


def amounts_of(option: str, text: str) -> list[Amount]:
    """``75%,8GB``

    Raises:
        UsageError: one is neither an amount of memory nor a share.
    """
    found = []
    for word in text.split(","):
        if (percent := _SHARE.fullmatch(word)) and float(percent[1]) > 0:
            found.append(Amount(share=float(percent[1]) / 100))
        elif "%" in word:
            raise UsageError(f"{option} wants a share above nothing, not '{word.strip()}'.", f"Give {option} 50%, say.")
        else:
            found.append(Amount(bytes_of(option, word)))
    return found
