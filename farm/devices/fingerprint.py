"""Fingerprints of cards as the database stores them: which entries no worker could have measured.

`farm.benchmark.fingerprinting` measures fingerprints. A stored one may be damaged, or come from a
file of another farm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: The version of fingerprints (`farm.benchmark.fingerprinting`). Workers replace fingerprints of
#: older versions.
FINGERPRINT_VERSION = 2

#: Entries of a fingerprint that are numbers.
_NUMBERS = {
    "version",
    "copy_bytes_per_s",
    "launch_floor_us",
    "idle_power_w",
    "base_power_w",
    "power_limit_w",
}
#: Entries of a fingerprint that have numbers by name, and the names that they need.
_PARTS = {
    "matmul_flops_per_s": set[str](),
    "power_instant": {"lag_s", "rise_s"},
    "power_average": {"lag_s", "rise_s"},
    "w_per_c": {"value", "half_width"},
    "base_w_per_c": {"value", "half_width"},
}


def sound_fingerprint(stored: Any) -> dict[str, Any]:
    """Return a stored fingerprint without the entries that no worker could have measured; {} if it
    is damaged.
    """
    if not isinstance(stored, Mapping):
        return {}
    return {name: value for name, value in stored.items() if _is_sound(name, value)}


def _is_sound(name: str, value: Any) -> bool:
    if name in _NUMBERS:
        return _is_number(value)
    if name not in _PARTS:
        return True
    if not isinstance(value, Mapping) or not _PARTS[name] <= value.keys():
        return False
    return all(map(_is_number, value.values()))


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
