"""The figures of a card check, and how much they usually differ (`figures.toml`)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farm.errors import reading_package

Quantity = Literal["time", "power"]

_FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class CheckFigure:
    """One operator tuple of a check.

    Attributes:
        name: for programs.
        label: for people.
        operator: the id of the operator tuple.
        spread_time, spread_power: the expected standard deviations between cards of one model, as
            fractions. 0: not judged.
        repetition_time, repetition_power: those of repeated readings of one card.
    """

    name: str
    label: str
    operator: str
    spread_time: float = 0.003
    spread_power: float = 0.03
    repetition_time: float = 0.003
    repetition_power: float = 0.012

    def spread(self, quantity: Quantity) -> float:
        return self.spread_time if quantity == "time" else self.spread_power

    def repetition(self, quantity: Quantity) -> float:
        return self.repetition_time if quantity == "time" else self.repetition_power


@functools.cache
def check_figures() -> Sequence[CheckFigure]:
    """Return the figures in the order of the check. Raises `DamagedPackage`."""
    with reading_package(_FILE):
        entries = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(CheckFigure(name, **entry) for name, entry in entries.items())
