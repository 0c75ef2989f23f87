"""What could be done about a step's memory: the largest batch that fits, what can lie elsewhere meanwhile, what may be
computed anew. Each answer is worked out from captures; nothing is run on a card.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farm.errors import CaptureError, UsageError
from farm.training.tensor_lifetime import Inactive, Life
from farm.types.protocol import LARGEST_NUMBER

_MOST_CAPTURES = 16


@dataclass(frozen=True)
class Fit:
    """The largest batch whose peak is within ``limit_bytes``. ``peaks_bytes`` are those that were captured, by batch."""

    limit_bytes: int
    batch: int
    peak_bytes: int
    exact: bool  # whether one more was captured, and does not fit
    peaks_bytes: dict[int, int]


def largest_batch(peak_of: Callable[[int], int], limit_bytes: int, start: int) -> Fit:
    """Where the next batch to be looked at is guessed from two that are known, as bytes grow nearly evenly with the batch.

    Args:
        peak_of: the peak of a batch; it may raise `CaptureError` for a batch of 1, which some models do not train with.
        start: the batch to begin with.

    Raises:
        UsageError: not even the smallest batch fits.
    """
    peaks: dict[int, int] = {}
    fits, beyond, refused = 0, LARGEST_NUMBER + 1, 0
    guess = start
    while beyond - fits > 1 and len(peaks) < _MOST_CAPTURES:
        try:
            peaks[guess] = peak_of(guess)
        except CaptureError:
            if guess > 1:
                raise
            refused = 1
            break
        if peaks[guess] <= limit_bytes:
            fits = max(fits, guess)
        else:
            beyond = min(beyond, guess)
        guess = _next(peaks, limit_bytes, fits, beyond)
    if not fits:
        smallest = min(peaks)
        raise UsageError(
            f"Not even a batch of {smallest} fits: it needs {peaks[smallest] / 1e9:.2f} GB, and there are "
            f"{limit_bytes / 1e9:.2f} GB.",
            "Give --recompute blocks, --amp bfloat16, or sgd as --optimizer, which need less.",
        )
    return Fit(limit_bytes, fits, peaks[fits], beyond - fits == 1 or refused > 0, peaks)


def _next(peaks: dict[int, int], limit_bytes: int, fits: int, beyond: int) -> int:
    nearest = sorted(peaks, key=lambda batch: abs(peaks[batch] - limit_bytes))[:2]
    guess = 2 * fits if fits else beyond // 2
    if len(nearest) == 2:
        (one, other) = nearest
        slope = (peaks[one] - peaks[other]) / (one - other)
        if slope > 0:
            guess = one + int((limit_bytes - peaks[one]) // slope)
    return min(max(guess, fits + 1), beyond - 1)


@dataclass(frozen=True)
class Offload:
    """What lying elsewhere while it waits would take off the curve, at a bandwidth each way.

    Attributes:
        long_enough: periods in which a tensor goes out and comes back before it is used.
        hidden: those that the link has the time for, by most byte-seconds first.
        moved_bytes: that go out in a step, and come back.
        link_share: of the step in which the link is busy, each way.
        held_bytes: the curve that is left.
    """

    bytes_per_s: float
    periods: int
    long_enough: int
    hidden: tuple[Inactive, ...]
    moved_bytes: int
    link_share: float
    held_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.held_bytes)


def offload(life: Life, bytes_per_s: float) -> Offload:
    """Transfers both ways run beside the calls and beside each other, at full bandwidth each; together they take no longer
    than the step."""
    sizes = {tensor.number: tensor.size_bytes for tensor in life.tensors}
    periods = [period for found in life.periods.values() for period in found if sizes[period.tensor]]
    way_us = {number: size / bytes_per_s * 1e6 for number, size in sizes.items()}
    enough = [period for period in periods if period.time_us > 2 * way_us[period.tensor]]
    enough.sort(key=lambda period: -sizes[period.tensor] * (period.time_us - 2 * way_us[period.tensor]))
    left_us, hidden = life.step_us, []
    changes = [0] * (len(life.times_us) + 1)
    for period in enough:
        if way_us[period.tensor] > left_us:
            continue
        left_us -= way_us[period.tensor]
        hidden.append(period)
        for first, behind in away_while(life, period, way_us[period.tensor]):
            changes[first] -= sizes[period.tensor]
            changes[behind] += sizes[period.tensor]
    away, curve = 0, []
    for held, change in zip(life.held_bytes, changes, strict=False):
        away += change
        curve.append(held + away)
    moved = sum(sizes[period.tensor] for period in hidden)
    share = 1 - left_us / life.step_us if life.step_us else 0.0
    return Offload(bytes_per_s, len(periods), len(enough), tuple(hidden), moved, share, tuple(curve))


def away_while(life: Life, period: Inactive, way_us: float) -> list[tuple[int, int]]:
    """The calls, [first, behind), that run while it is elsewhere; two ranges where that is over the end of the step."""
    gone_us, back_us = period.begin_us + way_us, period.end_us - way_us
    begins, calls, ranges = life.begins_us, len(life.times_us), []
    for shift_us in (0.0, life.step_us) if period.over_the_end else (0.0,):
        first = bisect.bisect_left(begins, gone_us - shift_us)
        behind = min(bisect.bisect_right(begins, back_us - shift_us) - 1, calls)
        if 0 <= first < behind:
            ranges.append((first, behind))
    return ranges


@dataclass(frozen=True)
class Recomputed:
    """One module, or all of several, run anew in the backward instead of keeping what it computed."""

    what: str
    peak_bytes: int
    freed_bytes: int
    calls: int
    time_us: float


def recomputed(plain: Life, again: Callable[[str], Life], paths: Sequence[str]) -> list[Recomputed]:
    """
    Args:
        again: the step with these modules (paths with commas between) run anew.
        paths: of the modules; each is looked at alone, and then all of them.
    """
    rows = []
    most = max(plain.held_bytes)
    for what in [*paths, ",".join(paths)] if len(paths) > 1 else paths:
        life = again(what)
        anew = [call.index for call in life.capture.calls if call.part == "recomputation"]
        peak = max(life.held_bytes)
        rows.append(Recomputed(what, peak, most - peak, len(anew), sum((life.times_us[index] for index in anew), 0.0)))
    return rows
