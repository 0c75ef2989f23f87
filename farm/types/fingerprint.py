"""What a card is like, as its fingerprint says it (`farm.benchmark.fingerprinting` takes one): watts per degree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

#: Of what a fingerprint holds; an older one is taken anew.
VERSION = 2


def w_per_c(fingerprint: Mapping[str, Any], power_w: float) -> float | None:
    """Watts that one degree (C) more costs an operator of this power at constant work.

    Linear between the two levels at which the fingerprint has it, under load and at full clocks with nothing to do;
    None where the card was not seen to change its temperature, or one of the two is not told apart from none.
    """
    low, high = (fingerprint.get(name) or {} for name in ("base_w_per_c", "w_per_c"))
    if not all(one.get("at_w") and one["half_width"] < abs(one["value"]) for one in (low, high)):
        return None
    share = (power_w - low["at_w"]) / (high["at_w"] - low["at_w"])
    return float(low["value"] + share * (high["value"] - low["value"]))


def pooled(fingerprints: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a degree costs on cards of one model, from the fingerprints of several: the surer one counts more."""
    found: dict[str, Any] = {}
    listed = list(fingerprints)
    for name in ("base_w_per_c", "w_per_c"):
        known = [one[name] for one in listed if (one.get(name) or {}).get("at_w") and one[name]["half_width"] > 0]
        if not known:
            continue
        weights = [1 / one["half_width"] ** 2 for one in known]
        total = math.fsum(weights)
        found[name] = {
            key: math.fsum(weight * one[key] for weight, one in zip(weights, known, strict=True)) / total
            for key in ("value", "at_w")
        }
        found[name]["half_width"] = math.sqrt(1 / total)
    return found
