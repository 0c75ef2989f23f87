"""What calls would cost that nobody has read: the seam where an estimate takes predictions.

A prediction is told apart from what was read wherever it is shown, and has an interval of its own: 90 %, low and high, since it
is wrong by factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from farm.operators.roofline import Roofline
from farm.prediction.calibration import SUM_FLOOR
from farm.prediction.described import Described, describe
from farm.prediction.measured_models import in_cache, summed
from farm.prediction.predictor_store import Kept
from farm.types.protocol import Software


@dataclass(frozen=True)
class Asked:
    """One call to be predicted: the stored operator tuple with its counted cost, and how often the model calls it."""

    operator_id: str
    short_name: str
    flops: int
    bytes_moved: int
    spec: dict[str, Any]
    calls: int = 1


@dataclass(frozen=True)
class Range:
    """A value with its 90 % interval; low and high are None where the predictor knows none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Prediction:
    """One call where it stands in a model. `known`: some reading is of its operator type."""

    time_us: Range
    energy_mj: Range | None = None
    known: bool = True


@dataclass(frozen=True)
class Predicted:
    """Calls in the order that they were asked in, and their sum, each as often as it is called.

    `narrowing`: their places, those first whose readings would narrow the sum's interval most.
    """

    calls: tuple[Prediction, ...]
    time_us: Range
    energy_mj: Range | None = None
    narrowing: tuple[int, ...] = ()


class Predictor(Protocol):
    """Predicts calls on one card under one protocol and software, which it was made for."""

    @property
    def name(self) -> str: ...

    @property
    def software(self) -> Software | None:
        """That it was fitted to; None where it is of none, and cannot answer for a whole model."""

    @property
    def method(self) -> int: ...

    def predict(self, asked: Sequence[Asked], everything: Sequence[Asked]) -> Predicted:
        """
        Args:
            asked: what is to be predicted.
            everything: all that the model calls: whether its weights stay in the cache.
        """


@dataclass(frozen=True)
class RooflinePredictor:
    """The least time at the card's peaks: a lower bound without an interval, and no energy."""

    roofline: Roofline
    name: str = "roofline"
    software: Software | None = None
    method: int = 0

    def predict(self, asked: Sequence[Asked], everything: Sequence[Asked]) -> Predicted:
        times = [self.roofline.estimate_us(one.flops, one.bytes_moved) for one in asked]
        total = sum(time * one.calls for time, one in zip(times, asked, strict=True))
        return Predicted(tuple(Prediction(Range(time)) for time in times), Range(total))


@dataclass(frozen=True)
class KeptPredictor:
    """What was learnt from readings of the card."""

    kept: Kept

    @property
    def name(self) -> str:
        return self.kept.fitted.name

    @property
    def software(self) -> Software:
        return self.kept.circumstances.software

    @property
    def method(self) -> int:
        return self.kept.circumstances.method

    def described(self, asked: Sequence[Asked]) -> list[Described]:
        tf32 = self.kept.circumstances.protocol.tf32
        return [
            describe(self.kept.card, one.operator_id, one.short_name, one.spec, one.flops, one.bytes_moved, tf32=tf32)
            for one in asked
        ]

    def predict(self, asked: Sequence[Asked], everything: Sequence[Asked]) -> Predicted:
        calls, counts = self.described(asked), [one.calls for one in asked]
        answers, wide = self.kept.fitted.answer(calls), self.kept.calibration
        found_again = in_cache(self.described(everything), [one.calls for one in everything], self.kept.card.l2_bytes)
        times, energies = answers.among_others(found_again)
        time_wide = np.where(answers.known, wide.time, wide.unseen_time) * answers.time_spread
        energy_wide = np.where(answers.known, wide.energy, wide.unseen_energy) * answers.energy_spread
        total = summed(calls, counts, answers, found_again)
        of_energy = bool(len(asked)) and bool(np.isfinite(energies).all())
        unsure = np.array(counts) * times * time_wide
        return Predicted(
            tuple(
                Prediction(
                    _range(times[place], time_wide[place]),
                    _range(energies[place], energy_wide[place]) if of_energy else None,
                    bool(answers.known[place]),
                )
                for place in range(len(asked))
            ),
            _range(total.time_us, wide.sum_time * float(np.hypot(total.time_spread, SUM_FLOOR))),
            _range(total.energy_mj, wide.sum_energy * float(np.hypot(total.energy_spread, SUM_FLOOR)))
            if of_energy
            else None,
            tuple(int(place) for place in np.argsort(-unsure, kind="stable")),
        )

    def explain(self, asked: Asked) -> list[str]:
        """What the time of a call rests on, for people."""
        return self.kept.fitted.explain(self.described([asked])[0])


def _range(value: float, half_width: float) -> Range:
    """
    Args:
        half_width: of the interval of the logarithm; NaN where there is none.
    """
    if not np.isfinite(half_width):
        return Range(float(value))
    return Range(float(value), float(value / np.exp(half_width)), float(value * np.exp(half_width)))
