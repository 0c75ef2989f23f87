"""The figures of a card check, and how much they usually differ (`figures.toml`)."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from farm.errors import reading_package
from farm.types.protocol import Protocol
from farm.types.request import CARD_CHECK

Quantity = Literal["time", "power"]

_FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class CheckFigure:
    """One operator tuple of a check.

    Attributes:
        name: for programs.
        label: for people.
        operator: the id of the operator tuple.
        conditions: what differs from the protocol of the check.
        wire_bytes: the bytes that cross a link in one direction during a pass; 0: it measures none.
        spread_time, spread_power: the expected standard deviations between cards of one model, as
            fractions. 0: not judged.
        repetition_time, repetition_power: those of repeated readings of one card.
    """

    name: str
    label: str
    operator: str
    conditions: Mapping[str, Any] = field(default_factory=dict)
    wire_bytes: int = 0
    spread_time: float = 0.003
    spread_power: float = 0.03
    repetition_time: float = 0.003
    repetition_power: float = 0.012

    def spread(self, quantity: Quantity) -> float:
        return self.spread_time if quantity == "time" else self.spread_power

    def repetition(self, quantity: Quantity) -> float:
        return self.repetition_time if quantity == "time" else self.repetition_power

    def subject(self, usual: Protocol) -> tuple[str, str]:
        """The ids of the tuple and of its protocol in a check with the protocol ``usual``."""
        return self.operator, dataclasses.replace(usual, **self.conditions).id


@functools.cache
def check_figures(checked: str = CARD_CHECK) -> Sequence[CheckFigure]:
    """Return the figures of a check of a card (`CARD_CHECK`) or of a link (`LINK_CHECK`) in their
    order. Raises `DamagedPackage`.
    """
    with reading_package(_FILE):
        entries = tomllib.loads(_FILE.read_text(encoding="utf-8"))[checked]
    return tuple(CheckFigure(name, **entry) for name, entry in entries.items())
