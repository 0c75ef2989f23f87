"""Amounts of memory as people say them: `80GB`, `24 GiB`, `55GB/s`."""

from __future__ import annotations

import math
import re

from farm.errors import UsageError

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
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
