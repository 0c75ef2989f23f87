"""Fingerprints of cards as the database stores them: which entries no worker could have measured.

`farm.benchmark.fingerprinting` measures fingerprints. A stored one may be damaged, or come from a
file of another farm."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def median_fingerprint(fingerprints: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the fingerprint of a card model: of each figure, the median over its cards.

    One card may be an outlier: of 67 packaged NVIDIA H200s, one computes float32 at two thirds of
    the usual rate.

    Args:
        fingerprints: of the cards of one model, as stored; None or an empty one for a card
            without. Entries that no worker could have measured do not count.

    Returns:
        The figures that are numbers, and the rates of matrix products by dtype; {} without a
        fingerprint.
    """
    figures: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for fingerprint in map(sound_fingerprint, fingerprints):
        for name, value in fingerprint.items():
            if is_number(value):
                figures[name].append(value)
        for dtype, rate in (fingerprint.get("matmul_flops_per_s") or {}).items():
            if is_number(rate):
                rates[dtype].append(rate)

    medians: dict[str, Any] = {name: statistics.median(values) for name, values in figures.items()}
    if rates:
        medians["matmul_flops_per_s"] = {
            dtype: statistics.median(values) for dtype, values in rates.items()
        }
    return medians


def _is_sound(name: str, value: Any) -> bool:
    if name in _NUMBERS:
        return is_number(value)
    if name not in _PARTS:
        return True
    if not isinstance(value, Mapping) or not _PARTS[name] <= value.keys():
        return False
    return all(map(is_number, value.values()))


def is_number(value: Any) -> bool:
    """True for a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
