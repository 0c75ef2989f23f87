"""What canaries show: the largest deviation of repeated readings of one tuple."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from farm.verdict.figures import ReadingView

#: The key of the canary of the benchmark processes, a matrix product (`farm.benchmark.checks`).
REFERENCE_OPERATOR = "reference operator"

#: Id of a reference tuple -> its readings. Several ones show drift and differences between cards.
CanaryReadings = Mapping[str, Sequence[ReadingView]]


@dataclass(frozen=True)
class Systematic:
    """The largest relative deviation of a canary from its mean; errors that all readings share."""

    relative: Mapping[str, float]  # time or energy -> the deviation
    note: str


def systematic_of(
    readings: Iterable[ReadingView], canaries: CanaryReadings, *, are_checked: bool = False
) -> Systematic:
    """Return the largest deviation of a canary, and a sentence about what the intervals include.

    Args:
        readings: those of the verdict; a card without a canary is named.
        are_checked: card checks show the differences of the cards.
    """
    compared = [repeated for repeated in canaries.values() if len(repeated) > 1]
    cards = {reading.card_id for reading in readings if reading.card_id}
    if not compared:
        note = (
            "No canary tuple was measured twice, so the intervals do not include drift of the card."
        )
        if len(cards) > 1:
            note = f"No canary compares the {len(cards)} cards"
            note += "." if are_checked else ", so the intervals do not include their differences."
        return Systematic({"time": 0.0, "energy": 0.0}, note)

    time, energy = 0.0, 0.0
    places: set[str] = set()
    for repeated in compared:
        energies = [canary.energy_mj for canary in repeated]
        time = max(time, _spread([canary.time_us.value for canary in repeated]))
        energies_mj = [figure.value for figure in energies if figure]
        if len(energies_mj) > 1:
            energy = max(energy, _spread(energies_mj))
        places.update(canary.card_id for canary in repeated)

    where = f"{len(places)} cards" if len(places) > 1 else "one card"
    note = f"{len(compared)} canary tuple{'s' if len(compared) > 1 else ''}, measured on {where}."
    others = sorted(cards - places)
    if others:
        where = others[0] if len(others) == 1 else f"{len(others)} other cards"
        note += f" No canary was measured on {where}"
        note += "." if are_checked else ", so the intervals do not include that difference."
    return Systematic({"time": time, "energy": energy}, note)


def _spread(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0
