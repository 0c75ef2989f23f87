"""Cards that are not there: for tests of the farm itself, in numbers that no machine bears with torch.

Their figures are a function of the subject's id, so that two cards agree and a repeated run gives the same verdict.
Readings made of them are marked, and never reused.
"""

from __future__ import annotations

import hashlib
import os

from farm.devices.device import Card, Device
from farm.settings import Settings

MODEL = "simulated card"
DURATION_VARIABLE = "FARM_SIMULATED_ITEM_S"


def simulated_cards(settings: Settings) -> list[Card]:
    return [
        Card(
            id=f"SIM-{settings.host}-{number}",
            kind="simulated",
            model=MODEL,
            memory_bytes=64 * 2**30,
            driver="simulated",
            index=number,
            host=settings.host,
        )
        for number in range(settings.simulated_cards)
    ]


def item_s() -> float:
    """How long one item takes on a simulated card, in seconds: from the environment, 0 by default."""
    try:
        return max(0.0, float(os.environ.get(DURATION_VARIABLE, "0")))
    except ValueError:
        return 0.0


class SimulatedDevice(Device):
    """Deterministic figures by subject id."""

    def __init__(self, card: Card) -> None:
        self.card = card

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"simulated"})

    def time_us(self, subject_id: str) -> float:
        """Duration of one pass of a subject: 10 to 1000. Unit: µs."""
        return 10.0 * 100.0 ** _fraction("time", subject_id)

    def power_w(self, subject_id: str) -> float:
        """Power while a subject runs: 150 to 650. Unit: W."""
        return 150.0 + 500.0 * _fraction("power", subject_id)


def _fraction(word: str, subject_id: str) -> float:
    digest = hashlib.sha256(f"{word} {subject_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
