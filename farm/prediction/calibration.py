"""Intervals that hold for models nobody has read: conformal, by families of models, scaled by the predictor's own spread.

Random folds would calibrate for tuples whose siblings were learnt from, and promise too much. Here the errors are those of each
family of models while none of its tuples was learnt from, every family counts alike, and the interval is as many spreads wide as
covers the share asked for, and somewhat more. Sums of models have a calibration of their own, by the sums of the held-out models (a jackknife over
models), as parts of a model are wrong together.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from farm.prediction.regressor import Floats

SHARE = 0.9  # of cases that an interval is to cover
SUM_FLOOR = 0.08  # of a sum's spread: what a predictor that is sure of every part can still be wrong by
SUM_LEAST = 0.02  # half of a sum's interval, at least: what the sum of readings itself misses by
WIDENED = 1.1  # times as wide for times and energies as families left out ask for: features and rules were chosen with these in sight.
# Two frozen predictors, of 15 and 26 families, would have asked for 1.3 to cover 90 % of what was read afterwards; a third, of 48, for 1.0.
UNSEEN = 1.5  # times as wide, at least, where an operator type was never read


@dataclass(frozen=True)
class Errors:
    """Logarithms of predicted over measured, the spreads that were told, and the family of models of each."""

    off: Floats
    spread: Floats
    families: npt.NDArray[np.str_]

    def where(self, chosen: npt.NDArray[Any]) -> Errors:
        return Errors(self.off[chosen], self.spread[chosen], self.families[chosen])


def quantile(errors: Errors, share: float = SHARE) -> float:
    """How many spreads cover the share of errors, each family counting alike."""
    usable = np.isfinite(errors.off) & (errors.spread > 0)
    if not usable.any():
        return math.nan
    errors = errors.where(usable)
    scores = np.abs(errors.off) / errors.spread
    names, at, numbers = np.unique(errors.families, return_inverse=True, return_counts=True)
    weights = 1 / numbers[at] / len(names)
    order = np.argsort(scores)
    place = int(np.searchsorted(np.cumsum(weights[order]), share - 1e-9))
    return float(scores[order][min(place, len(scores) - 1)])


@dataclass(frozen=True)
class Calibration:
    """How many spreads a 90 % interval is on either side, for tuples of types that were read, of others, and for sums."""

    time: float
    power: float
    energy: float
    unseen_time: float
    unseen_power: float
    unseen_energy: float
    sum_time: float
    sum_energy: float
    families: int  # that it rests on

    @classmethod
    def none(cls) -> Self:
        """No interval at all."""
        return cls.from_json(dict.fromkeys([field.name for field in dataclasses.fields(cls)]) | {"families": 0})

    def to_json(self) -> dict[str, Any]:
        return {name: None if value != value else value for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        told: dict[str, Any] = {name: math.nan if value is None else value for name, value in data.items()}
        return cls(**told)


def unseen(known: float, errors: Errors) -> float:
    """For operator types that were never read: by their own errors where there are some, never narrower than it should be."""
    own = quantile(errors) if len(errors.off) >= 20 else math.nan
    return float(np.nanmax([own, UNSEEN * known])) if known == known else own
