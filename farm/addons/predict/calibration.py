"""Calibrate conformal prediction intervals, so that they are valid for models without readings.

The calibration compares predictions with readings. Each family of models is predicted by a
predictor that was trained without the family's tuples. With random folds, the training data would
contain other tuples of the same model, and the intervals would be too narrow. Each family has the
same weight. The intervals scale with the predictor's own spread. Predicted sums of models are
calibrated separately, with the sums of held-out models (a jackknife over models), because the
errors of a model's parts are correlated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from farm.addons.predict.regressors import Floats, Names

SHARE = 0.9  # share of cases that an interval should cover
SUM_FLOOR = 0.08  # least spread of a sum, even if the predictor gives each part a small spread
SUM_LEAST = 0.02  # least half-width of a sum's interval: a sum of readings has this error, too
#: Factor that widens the intervals of tuples, because the left-out families were known when
#: features, rules and the growth of spreads with the distance were chosen. Two frozen predictors,
#: of 15 and 26 families, needed 1.3 to cover 90 % of later times; a third, of 48 families, needed
#: 1.0.
WIDENED = 1.1
UNSEEN = 1.7  # least factor on intervals of operator types without a reading
LEAST_UNSEEN = 20  # least number of errors for a separate calibration of such types
LEAST_CASES = 10  # least number of cases of a family for `IntervalCoverage.worst`


@dataclass(frozen=True)
class PredictionErrors:
    """For each prediction: log(predicted / measured), its spread, and the family of models."""

    log_ratio: Floats
    spread: Floats
    families: Names
    known: npt.NDArray[np.bool_]  # True if the operator type has a reading; for sums always True

    def where(self, chosen: npt.NDArray[Any]) -> PredictionErrors:
        return PredictionErrors(*(values[chosen] for values in vars(self).values()))


def quantile(errors: PredictionErrors, share: float = SHARE) -> float:
    """Return the number of spreads that covers `share` of the errors. Each family has the same
    weight.
    """
    errors = errors.where(np.isfinite(errors.log_ratio) & (errors.spread > 0))
    if not len(errors.log_ratio):
        return math.nan
    scores = np.abs(errors.log_ratio) / errors.spread
    _, at, numbers = np.unique(errors.families, return_inverse=True, return_counts=True)
    return float(np.quantile(scores, share - 1e-9, weights=1 / numbers[at], method="inverted_cdf"))


@dataclass(frozen=True)
class Calibration:
    """Half-widths of the 90 % intervals, as multiples of the spread that the predictor gives. NaN:
    no interval.

    `unseen_*` are for operator types without a reading, `sum_*` for sums of models, the others for
    all other calls."""

    time: float = math.nan
    power: float = math.nan
    energy: float = math.nan
    unseen_time: float = math.nan
    unseen_power: float = math.nan
    unseen_energy: float = math.nan
    sum_time: float = math.nan
    sum_energy: float = math.nan
    families: int = 0  # number of families in the calibration

    @classmethod
    def of(
        cls, errors: Mapping[str, PredictionErrors], sums: Mapping[str, PredictionErrors]
    ) -> Self:
        """``errors``: of calls of left-out families, by time, power and energy; ``sums``: of their
        models.
        """
        factors, families = {}, set[str]()
        for name, errors_of_calls in errors.items():
            predicted = errors_of_calls.where(np.isfinite(errors_of_calls.log_ratio))
            families |= set(errors_of_calls.families) - {""}
            unseen = predicted.where(~predicted.known)
            factors[name] = WIDENED * quantile(predicted.where(predicted.known))
            unseen_factor = quantile(unseen) if len(unseen.known) >= LEAST_UNSEEN else math.nan
            factors[f"unseen_{name}"] = float(np.fmax(unseen_factor, UNSEEN * factors[name]))
        factors |= {
            f"sum_{name}": float(np.maximum(quantile(errors_of_sums), SUM_LEAST / SUM_FLOOR))
            for name, errors_of_sums in sums.items()
        }
        return cls(**factors, families=len(families))

    def half_widths(self, name: str, spread: Floats, known: npt.NDArray[np.bool_]) -> Floats:
        """Return the half-widths of the logarithms of time, power or energy of calls; see
        `PredictionErrors`.
        """
        factor, unseen_factor = {
            "time": (self.time, self.unseen_time),
            "power": (self.power, self.unseen_power),
            "energy": (self.energy, self.unseen_energy),
        }[name]
        factors: Floats = np.where(known, factor, unseen_factor)
        return factors * spread

    def sum_half_widths(self, name: str, spread: Floats) -> Floats:
        """Return the half-widths of the logarithms of time or energy of sums."""
        return {"time": self.sum_time, "energy": self.sum_energy}[name] * spread

    def to_json(self) -> dict[str, Any]:
        return without_nan(dataclasses.asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{name: value for name, value in data.items() if value is not None})


def without_nan(tree: Any) -> Any:
    """Return the tree with None instead of NaN, because JSON has no NaN."""
    if isinstance(tree, dict):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return list(map(without_nan, tree))
    return None if isinstance(tree, float) and tree != tree else tree


@dataclass(frozen=True)
class IntervalCoverage:
    """Share of cases that 90 % intervals cover, the same for the worst family, and the median width
    as a factor.

    Only families with at least `LEAST_CASES` cases can be the worst, if there are any.
    """

    coverage: float
    worst: float
    worst_family: str
    width: float


def coverage(errors: PredictionErrors, half_widths: Floats) -> IntervalCoverage | None:
    """Return how many errors are inside their intervals; None if there are no intervals."""
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


def _without(family: str, errors: Mapping[str, PredictionErrors]) -> dict[str, PredictionErrors]:
    return {
        name: predictions.where(predictions.families != family)
        for name, predictions in errors.items()
    }


def jackknife_half_widths(
    errors: Mapping[str, PredictionErrors], sums: Mapping[str, PredictionErrors]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return the half-widths of each family's intervals, of calls and of sums, calibrated with all
    other families.
    """
    widths = {name: np.full_like(calls.spread, np.nan) for name, calls in errors.items()}
    sum_widths = {name: np.full_like(totals.spread, np.nan) for name, totals in sums.items()}
    families = np.concatenate([predictions.families for predictions in errors.values()])
    for family in np.unique(families):
        calibration = Calibration.of(_without(family, errors), _without(family, sums))
        for name, predictions in errors.items():
            is_family = predictions.families == family
            widths[name][is_family] = calibration.half_widths(
                name, predictions.spread[is_family], predictions.known[is_family]
            )
        for name, predictions in sums.items():
            is_family = predictions.families == family
            sum_widths[name][is_family] = calibration.sum_half_widths(
                name, predictions.spread[is_family]
            )
    return widths, sum_widths
