"""The sum of the readings of a model's tuples, if tuples reach the power limit of the card."""

from __future__ import annotations

from dataclasses import dataclass, replace

from farm.types.figure import Figure, PassCost
from farm.types.format import percent, plural
from farm.verdict.aggregate import aggregate
from farm.verdict.model_readings import SelectedReadings
from farm.verdict.verdict import Verdict


@dataclass(frozen=True)
class ReadingSum:
    """The sum of the readings, as a verdict and as figures."""

    verdict: Verdict
    cost: PassCost
    notes: tuple[str, ...] = ()


def sum_of_readings(selected: SelectedReadings, launch: str) -> ReadingSum:
    """Add the readings.

    Without a reading of the whole model, its clocks are unknown. Tuples that reach the power limit
    in a loop then count as near to their bursts as the mean power of the sum allows: it is at most
    the power of these loops."""
    limited = [
        part.reading for part in selected.parts if part.reading and part.reading.details.burst
    ]
    loops = _sum_at(selected, launch, 0.0)
    loops_mj = loops.energy.total if loops.energy else None
    loops_sum = ReadingSum(loops, PassCost(loops.time.total, loops_mj))
    if not limited or selected.wholes:
        return loops_sum
    bursts = _sum_at(selected, launch, 1.0)
    if not (loops.energy and loops.power and bursts.energy and bursts.power):
        return loops_sum

    limit_w = max(reading.mean_power_w or 0.0 for reading in limited)
    share = _share_of_bursts(loops.power.total.value, bursts.power.total.value, limit_w)
    at_ends = {0.0: loops, 1.0: bursts}
    note = (
        f"{len(limited)} {plural('tuple', len(limited))} hit the power limit in a loop. By its "
        f"mean power, the sum is {percent(share)} of the way from loops to bursts at full clocks. "
        "The intervals include both ends."
    )
    cost = PassCost(
        _between(loops.time.total, bursts.time.total, share),
        _between(loops.energy.total, bursts.energy.total, share),
    )
    verdict = at_ends.get(share) or _sum_at(selected, launch, share)
    return ReadingSum(verdict, cost, (note,))


def _share_of_bursts(loops_w: float, bursts_w: float, limit_w: float) -> float:
    """How far the sum is between loops (0) and bursts (1), so that its power is at the limit."""
    if bursts_w <= limit_w:
        return 1.0
    if loops_w >= limit_w:
        return 0.0
    return (limit_w - loops_w) / (bursts_w - loops_w)


def _between(loops: Figure, bursts: Figure, share: float) -> Figure:
    """The figure at a share of the way; its interval includes both ends."""
    difference = bursts.value - loops.value
    half_width = max(loops.half_width, bursts.half_width)
    farther = max(share, 1 - share) * abs(difference)
    return Figure(loops.value + share * difference, half_width + farther)


def _sum_at(selected: SelectedReadings, launch: str, share: float) -> Verdict:
    """The sum. ``share``: how far tuples at the power limit are between their loops (0) and their
    bursts (1).
    """
    parts = selected.parts
    if share:
        parts = [
            replace(part, reading=part.reading and part.reading.towards_bursts(share))
            for part in parts
        ]
    return aggregate(parts, selected.wholes, target=0.95, launch=launch)
