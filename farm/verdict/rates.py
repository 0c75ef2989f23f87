"""How fast calls compute and move data, as shares of the card's roofline, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from farm.types.figure import share_of
from farm.types.format import count_of, percent
from farm.types.roofline import Bound, Roofline
from farm.verdict.cost_line import CostLine

# A row has room for improvement if it has at least this share of the sum, and less than this share
# of the roofline.
LEAST_SHARE, MOST_OF_ROOFLINE = 0.01, 0.5


@dataclass(frozen=True)
class Rates:
    """The rates of the calls of a line.

    Attributes:
        time_share: of all its calls in the sum over the model; None if they are not measured.
        peaks: of the card.
    """

    line: CostLine
    time_share: float | None
    peaks: Roofline

    @classmethod
    def of(cls, line: CostLine, total_us: float, peaks: Roofline) -> Self:
        """The rates of a line's calls. `total_us`: the sum of the model."""
        measured = line.time_us is not None and line.time_us.value
        return cls(line, share_of(line.total_us, total_us) if measured else None, peaks)

    @property
    def time_us(self) -> float:
        """The time of one call; 0 if the calls are not measured."""
        return self.line.time_us.value if self.line.time_us else 0.0

    @property
    def flops(self) -> int:
        """The FLOPs of one call."""
        return self.line.subject.flops

    @property
    def bytes_per_s(self) -> float | None:
        return self.line.subject.bytes_moved / (self.time_us * 1e-6) if self.time_us else None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / (self.time_us * 1e-6) if self.time_us else None

    @property
    def ideal_us(self) -> float:
        """The time of one call at the card's peak rates, without its launch."""
        call = self.line.subject
        return max(self.peaks.compute_s(call), self.peaks.memory_s(call)) * 1e6

    @property
    def roofline_share(self) -> float | None:
        """The time at the card's peak rates / the time. Above 1 only if the time is measured: see
        `rule_of`."""
        if not self.time_us:
            return None
        share = self.ideal_us / self.time_us
        return min(share, 1.0) if self.line.origin == "estimated" else share

    @property
    def bound(self) -> Bound:
        """What limits a call at best."""
        return self.peaks.bound_of(self.line.subject)

    @property
    def excess_us(self) -> float:
        """The time of all calls above that of calls at the peak rates; 0 if not measured."""
        least_us = max(self.ideal_us, self.peaks.launch_floor_us)
        return self.line.count * max(self.time_us - least_us, 0.0)

    @property
    def improvable(self) -> bool:
        """True if the calls have room for improvement."""
        heavy = (self.time_share or 0.0) >= LEAST_SHARE
        return heavy and (self.roofline_share or 1.0) < MOST_OF_ROOFLINE

    def to_json(self) -> dict[str, Any]:
        return {
            "time_share": self.time_share,
            "bytes_per_s": self.bytes_per_s,
            "flops_per_s": self.flops_per_s,
            "roofline_share": self.roofline_share,
            "improvable": self.improvable,
        }


def rule_of(peaks: Roofline) -> str:
    """What the mark of a row and the column `roofline` mean."""
    rates = f"{count_of(peaks.bytes_per_s, 'B/s')}, {count_of(peaks.flops_per_s, 'FLOP/s')}"
    share, of_roofline = percent(LEAST_SHARE, 0), percent(MOST_OF_ROOFLINE, 0)
    limits = f"at least {share} of the sum and below {of_roofline} of the roofline"
    return (
        f"* room for improvement: {limits} ({rates}). A measured call above 100 %: if its bound is "
        "memory, the data was in the cache; if it is compute, its algorithm multiplies less "
        "(Winograd), or the clock was above that of the peak. The share of a prediction ends "
        "at 100 %."
    )
