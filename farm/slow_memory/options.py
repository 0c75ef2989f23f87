"""What could be done about a step's memory: the largest batch that fits, what can lie elsewhere meanwhile, what may be
computed anew. Each answer is worked out from captures; nothing is run on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farm.errors import CaptureError, UsageError
from farm.training.tensor_lifetime import Life
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
