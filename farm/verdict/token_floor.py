"""Which implementation the tokens per second of a language model are of, what its tokens cost at
least (its weights and its cache at the card's bandwidth), and what copies of keys and values add.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.types.figure import share_of
from farm.types.format import TIME, count_of, percent, quantity
from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.causes import COPIES

#: Operators that read a few rows of their table.
_TABLES = ("embedding", "Embedding")
#: Operators that write the keys and values of new tokens into the cache.
_CACHE_WRITES = ("index_copy_", "index_copy", "index_put_", "slice_scatter")


@dataclass(frozen=True)
class TokenFloor:
    """The least time of a pass of a language model.

    Attributes:
        weights_bytes: all weights that a pass reads, without tables of which it reads rows.
        cache_bytes: the whole cache of keys and values; 0 without one.
        bytes_per_s: the bandwidth of the card.
        copies_us: the time of calls that copy or convert a tensor at least as large as the cache
            of one layer.
    """

    weights_bytes: int
    cache_bytes: int
    bytes_per_s: float
    copies_us: float

    @property
    def time_us(self) -> float:
        return (self.weights_bytes + self.cache_bytes) / self.bytes_per_s * 1e6

    def in_words(self, time_us: float) -> str:
        """Text about the floor of a pass that takes `time_us`."""
        parts = f"{count_of(self.weights_bytes, 'B')} of weights"
        if self.cache_bytes:
            parts += f" and {count_of(self.cache_bytes, 'B')} of cache"
        bandwidth = count_of(self.bytes_per_s, "B/s")
        times = f"{time_us / self.time_us:.1f} times as long"
        return f"{quantity(self.time_us, TIME)}: {parts} at {bandwidth}; the pass takes {times}"

    def copies_in_words(self, sum_us: float) -> str:
        """Text about the copies, as a share of the sum over all calls; "" without copies."""
        if not self.copies_us:
            return ""
        share = percent(share_of(self.copies_us, sum_us))
        return (
            f"{quantity(self.copies_us, TIME)}, {share} of the sum, copy or convert keys and values"
        )

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "time_us": self.time_us}


def implementation_of(variant: Variant | None) -> str:
    """Return which implementation tokens per second are of; "" for a model without tokens."""
    if variant is None or not variant.tokens:
        return ""
    if variant.generates_kernels:
        return "the kernels of torch.compile"
    cache = ", with a static cache" if variant.phase == "decode" else ""
    return f"PyTorch's operators one by one, as the model's library calls them{cache}"


def has_floor(variant: Variant | None) -> bool:
    """True for a decode whose operators read the weights and the cache of one card."""
    if variant is None or variant.phase != "decode":
        return False
    return not variant.generates_kernels and variant.cards == 1


def token_floor(
    needed: Sequence[NeededTuple], times_us: Mapping[str, float], peaks: Roofline
) -> TokenFloor | None:
    """The floor of a model; None if it has no weights.

    Args:
        needed: the tuples of a model of which `has_floor` is true.
        times_us: the time of one call, by tuple id, of those whose time is known.
        peaks: of the card.
    """
    weights_bytes = cache_bytes = largest_bytes = 0
    for entry in needed:
        if entry.short_name in _CACHE_WRITES:
            layer_bytes = entry.bytes_of("buffer")
            cache_bytes += entry.all_calls * layer_bytes
            largest_bytes = max(largest_bytes, layer_bytes)
        elif not entry.short_name.startswith(_TABLES):
            weights_bytes += entry.all_calls * entry.bytes_of("parameter")
    if not weights_bytes:
        return None
    copies_us = [
        entry.all_calls * times_us.get(entry.operator_id, 0.0)
        for entry in _copies(needed, largest_bytes)
    ]
    return TokenFloor(weights_bytes, cache_bytes, peaks.bytes_per_s, math.fsum(copies_us))


def _copies(needed: Sequence[NeededTuple], least_bytes: int) -> Iterable[NeededTuple]:
    """The calls that copy a tensor of at least `least_bytes`; none without a cache."""
    if not least_bytes:
        return []
    return [
        entry
        for entry in needed
        if entry.short_name in COPIES and entry.bytes_moved >= 2 * least_bytes
    ]
