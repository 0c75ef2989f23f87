"""Conformal intervals that hold for models without readings.

They are calibrated by families of models and scaled by the predictor's own spread. With random folds, the training data
would hold other tuples of the same model, and the intervals would be too narrow. Here each family is predicted without
its tuples in the training data. Every family counts alike, and the interval covers the wanted share of them, somewhat
widened. Sums of models have a calibration of their own, from the sums of held-out models (a jackknife over models),
because the parts of a model are wrong together.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from farm.prediction.regressors import Floats, Names

SHARE = 0.9  # of cases that an interval should cover
SUM_FLOOR = 0.08  # least spread of a sum: what a predictor can be wrong by that is sure of every part
SUM_LEAST = 0.02  # least half-width of a sum's interval: the error of the sum of readings itself
#: The factor on intervals of times and energies, because features and rules were chosen with the left-out families in
#: sight. Two frozen predictors, of 15 and 26 families, needed 1.3 to cover 90 % of later readings; a third, of 48
#: families, needed 1.0.
WIDENED = 1.1
UNSEEN = 1.5  # least factor for operator types without a reading
LEAST_UNSEEN = 20  # errors of such types for a calibration of their own
LEAST_CASES = 10  # cases of a family whose covered share is compared


@dataclass(frozen=True)
class PredictionErrors:
    """Logarithms of predicted over measured, the predicted spreads, and the family of models of each."""

    log_ratio: Floats
    spread: Floats
    families: Names

    def where(self, chosen: npt.NDArray[Any]) -> PredictionErrors:
        return PredictionErrors(self.log_ratio[chosen], self.spread[chosen], self.families[chosen])


def quantile(errors: PredictionErrors, share: float = SHARE) -> float:
    """The number of spreads that covers the share of errors; each family counts alike."""
    usable = np.isfinite(errors.log_ratio) & (errors.spread > 0)
    if not usable.any():
        return math.nan
    errors = errors.where(usable)
    scores = np.abs(errors.log_ratio) / errors.spread
    names, at, numbers = np.unique(errors.families, return_inverse=True, return_counts=True)
    weights = 1 / numbers[at] / len(names)
    order = np.argsort(scores)
    place = int(np.searchsorted(np.cumsum(weights[order]), share - 1e-9))
    return float(scores[order][min(place, len(scores) - 1)])


def unseen_quantile(known: float, errors: PredictionErrors) -> float:
    """The number of spreads for operator types without a reading, from their own errors if there are enough.

    It is at least `UNSEEN` times ``known``, that of other types.
    """
    own = quantile(errors) if len(errors.log_ratio) >= LEAST_UNSEEN else math.nan
    return float(np.nanmax([own, UNSEEN * known])) if known == known else own


@dataclass(frozen=True)
class Calibration:
    """Half-widths of the 90 % intervals in spreads: of calls, of calls of types without a reading, and of sums.

    NaN: no interval.
    """

    time: float = math.nan
    power: float = math.nan
    energy: float = math.nan
    unseen_time: float = math.nan
    unseen_power: float = math.nan
    unseen_energy: float = math.nan
    sum_time: float = math.nan
    sum_energy: float = math.nan
    families: int = 0  # that it is based on

    def to_json(self) -> dict[str, Any]:
        return without_nan(dataclasses.asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{name: value for name, value in data.items() if value is not None})


def without_nan(tree: Any) -> Any:
    """The tree with None for NaN, which JSON lacks."""
    if isinstance(tree, dict):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return list(map(without_nan, tree))
    return None if isinstance(tree, float) and tree != tree else tree


@dataclass(frozen=True)
class IntervalCoverage:
    """The share that 90 % intervals cover, that of the worst family, and their median width (x and ÷).

    The worst family is one of those with `LEAST_CASES` cases, if there are any.
    """

    coverage: float
    worst: float
    worst_family: str
    width: float


def coverage(errors: PredictionErrors, half_widths: Floats) -> IntervalCoverage | None:
    """None if there is no interval."""
    usable = np.isfinite(errors.log_ratio) & np.isfinite(half_widths)
    if not usable.any():
        return None
    inside = (np.abs(errors.log_ratio) <= half_widths)[usable]
    names = errors.families[usable]
    shares = {str(name): float(inside[names == name].mean()) for name in np.unique(names)}
    frequent = [name for name in shares if (names == name).sum() >= LEAST_CASES]
    worst = min(frequent or shares, key=lambda name: shares[name])
    width = float(np.exp(np.median(half_widths[usable])))
    return IntervalCoverage(float(np.mean(list(shares.values()))), shares[worst], worst, width)


def jackknife_coverage(errors: PredictionErrors, known: npt.NDArray[np.bool_] | None = None) -> IntervalCoverage:
    """The coverage of intervals that are calibrated by the other families.

    ``known`` tells whether the operator type of each error has a reading; None for sums.
    """
    half_widths, usable = np.full(len(errors.log_ratio), np.nan), np.isfinite(errors.log_ratio)
    seen = np.ones_like(usable) if known is None else known
    for name in np.unique(errors.families[usable]):
        others, own = usable & (errors.families != name), usable & (errors.families == name)
        spreads = quantile(errors.where(others & seen))
        half_widths[own & seen] = spreads * errors.spread[own & seen]
        if (new := own & ~seen).any():
            half_widths[new] = unseen_quantile(spreads, errors.where(others & ~seen)) * errors.spread[new]
    return coverage(errors, half_widths) or IntervalCoverage(np.nan, np.nan, "", np.nan)
