"""Counters of a card's errors, as its driver reports them. A check of a card stores them with its
readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The key of the counters in the details of a reading.
ERROR_COUNTERS = "error_counters"


@dataclass(frozen=True)
class ErrorCounters:
    """Errors since the driver or the card began to count.

    Attributes:
        counts: counter -> number, such as ``{"ecc_uncorrected": 0, "pcie_replays": 2}``.
        not_read: counter -> the reason why it could not be read. Never a zero instead.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    not_read: Mapping[str, str] = field(default_factory=dict)

    def increases(self, earlier: ErrorCounters) -> dict[str, int]:
        """The counters that have increased since ``earlier``, which both have."""
        increases = {}
        for name, count in self.counts.items():
            before = earlier.counts.get(name, count)
            if count > before:
                increases[name] = count - before
        return increases
