"""Ways to fit a step into memory, from captures alone: the largest batch that fits, and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farm.errors import CaptureError, UsageError
from farm.training.tensor_lifetime import Life
from farm.types.protocol import LARGEST_NUMBER

_MOST_CAPTURES = 16


@dataclass(frozen=True)
class Fit:
    """The largest batch whose peak is at most ``limit_bytes``.

    Attributes:
        exact: True if the next batch was captured and does not fit.
        peaks_bytes: the peaks of all captured batches, by batch.
    """

    limit_bytes: int
    batch: int
    allocated_peak_bytes: int
    exact: bool
    peaks_bytes: dict[int, int]


def largest_batch(peak_of: Callable[[int], int], limit_bytes: int, start: int) -> Fit:
    """Find the largest batch that fits. Memory is almost linear in the batch: two known peaks give the next guess.

    Args:
        peak_of: the peak of a batch. It may raise `CaptureError` for a batch of 1, which some models cannot train with.
        start: the first batch to try.

    Raises:
        UsageError: not even the smallest batch fits.
    """
    peaks: dict[int, int] = {}
    fits, beyond, refused = 0, LARGEST_NUMBER + 1, False
    guess = start
    while beyond - fits > 1 and len(peaks) < _MOST_CAPTURES:
        try:
            peaks[guess] = peak_of(guess)
        except CaptureError:
            if guess > 1:
                raise
            refused = True
            break
        if peaks[guess] <= limit_bytes:
            fits = max(fits, guess)
        else:
            beyond = min(beyond, guess)
        guess = 2 * fits if fits else beyond // 2
        if len(peaks) > 1:
            one, other = sorted(peaks, key=lambda batch: abs(peaks[batch] - limit_bytes))[:2]
            slope = (peaks[one] - peaks[other]) / (one - other)
            if slope > 0:
                guess = one + int((limit_bytes - peaks[one]) // slope)
        guess = min(max(guess, fits + 1), beyond - 1)
    if not fits:
        smallest = min(peaks)
        raise UsageError(
            f"Not even a batch of {smallest} fits: it needs {peaks[smallest] / 1e9:.2f} GB, and there are "
            f"{limit_bytes / 1e9:.2f} GB.",
            "Give --recompute blocks, --amp bfloat16, or sgd as --optimizer, which need less.",
        )
    return Fit(limit_bytes, fits, peaks[fits], refused or beyond - fits == 1, peaks)


@dataclass(frozen=True)
class Recomputed:
    """The effect of recomputing one module, or several, in the backward instead of keeping its activations."""

    modules: str
    peak_bytes: int
    freed_bytes: int
    calls: int
    time_us: float


def recomputed(plain: Life, again: Callable[[str], Life], paths: Sequence[str]) -> list[Recomputed]:
    """Compare recomputation of each module, and of all of them, with the plain step.

    Args:
        again: the step with recomputation of these modules: paths separated by commas.
        paths: the modules.
    """
    rows = []
    for modules in [*paths, ",".join(paths)] if len(paths) > 1 else paths:
        life = again(modules)
        times_us = [life.times_us[call.index] for call in life.capture.calls if call.part == "recomputation"]
        peak = max(life.held_bytes)
        rows.append(Recomputed(modules, peak, max(plain.held_bytes) - peak, len(times_us), sum(times_us, 0.0)))
    return rows
