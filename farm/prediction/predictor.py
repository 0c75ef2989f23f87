"""What a call would cost that nobody has read: the seam where predictors come in, and the roofline as the only one so far.

An estimate takes predictions only where a person names a predictor; they never stand in for a reading unasked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from farm.prediction.roofline import Roofline


@dataclass(frozen=True)
class Asked:
    """One call to be predicted: the stored operator tuple with its counted cost."""

    operator_id: str
    short_name: str
    flops: int
    bytes_moved: int
    spec: dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """One call. Half-widths are of the 95 % interval, None where the predictor knows none; so is the energy."""

    time_us: float
    time_half_width_us: float | None = None
    energy_mj: float | None = None
    energy_half_width_mj: float | None = None


class Predictor(Protocol):
    """Predicts calls on one card under one protocol and software, which it was made for."""

    @property
    def name(self) -> str: ...

    def predict(self, asked: Asked) -> Prediction | None:
        """None where it knows nothing of such an operator."""


@dataclass(frozen=True)
class RooflinePredictor:
    """The least time at the card's peaks: a lower bound without an interval, and no energy."""

    roofline: Roofline
    name: str = "roofline"

    def predict(self, asked: Asked) -> Prediction | None:
        return Prediction(self.roofline.estimate_us(asked.flops, asked.bytes_moved))
