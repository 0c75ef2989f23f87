"""Predictors by name: how to fit each, what it predicts, and its stored form as arrays and JSON.

`PredictorSpec.fit` learns from a `Dataset`, and `FittedPredictor.predict` gives the costs of calls
with their spreads. For an operator type without a reading, the prediction uses readings of its
family and is marked. If the family has no reading either, it is roofline x median."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.addons.predict.calibration import SUM_FLOOR
from farm.addons.predict.call_features import CallDescription
from farm.addons.predict.dataset import Dataset
from farm.addons.predict.gaussian_process import GaussianProcess, fit_process
from farm.addons.predict.regressors import (
    Booleans,
    FittedRegressor,
    Floats,
    Inputs,
    Mean,
    Medians,
    Names,
    PlainRoofline,
    Regressor,
    Trees,
    fit_mean,
    fit_median,
    fit_medians,
    fit_roofline,
    fit_trees,
    fit_zero,
    with_times,
)
from farm.errors import UsageError, did_you_mean

LEAST_ROWS = 20  # least number of readings for a fit
NEAR = 0.3  # distance from which spreads grow
GROWTH, POWER_GROWTH = 1.0, 0.3  # growth of the spreads of time and power per length scale
FAR = 0.8  # distance from which an estimate marks a prediction
LEAST_TIME_SPREAD, LEAST_TIME_SPREAD_US = 0.03, 0.07
CARD_SPREAD = 0.05  # of the power above the base power: cards of one model differ
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class CallCosts:
    """Predicted costs of calls, in their order. Spreads are standard deviations of the logarithm,
    before calibration.

    `power_w` is NaN if no reading had a power, `distance` is NaN if the predictor has no process.
    """

    time_us: Floats
    time_spread: Floats
    power_w: Floats
    power_spread: Floats
    neighbours_us: Floats  # time that other operators add if the call is part of a model
    fetching_us: Floats  # part of the time: loading weights that are not in the cache
    known: Booleans  # True if its operator type has a reading
    distance: Floats  # from the nearest reading (`GaussianProcess.distances`)
    waiting_w: float = 0.0  # maximum power of the card while a kernel waits

    @classmethod
    def empty(cls, calls: int) -> CallCosts:
        """Return costs that are NaN for every call."""
        time, time_spread, power, power_spread, neighbours, fetching, distance = np.full(
            (7, calls), np.nan
        )
        return cls(
            time,
            time_spread,
            power,
            power_spread,
            neighbours,
            fetching,
            np.zeros(calls, dtype=bool),
            distance,
        )

    def put(self, positions: npt.NDArray[np.intp], costs: CallCosts) -> None:
        """Replace the costs of some calls, in place."""
        source = vars(costs)
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                values[positions] = source[name]

    @property
    def energy_mj(self) -> Floats:
        return self.time_us * self.power_w * 1e-3

    @property
    def energy_spread(self) -> Floats:
        return np.hypot(self.time_spread, self.power_spread)

    def in_model(self, cached_share: float) -> tuple[Floats, Floats]:
        """Time in us and energy in mJ of each call as part of a model (`farm.verdict.corrections`).

        ``cached_share``: share of the model's weights (0 to 1) that the next pass finds in the
        card's cache."""
        saved_us = cached_share * self.fetching_us
        shift_us = np.maximum(self.neighbours_us - saved_us, -0.9 * self.time_us)
        shift_w = (self.power_w + np.minimum(self.power_w, self.waiting_w)) / 2
        return self.time_us + shift_us, self.energy_mj + shift_us * shift_w * 1e-3

    def sum(
        self, calls: Sequence[CallDescription], counts: Sequence[int], cached_share: float
    ) -> PredictedSum:
        """Return the cost of a model that makes each call `counts` times; for `cached_share` see
        `in_model`.

        The spread assumes equal errors in a type and independent errors between types. It is at
        least `SUM_FLOOR`."""
        types = np.array([call.operator_type for call in calls])
        numbers = np.array(counts, dtype=float)
        time_us, energy_mj = self.in_model(cached_share)
        return PredictedSum(
            *_sum(types, numbers * time_us, self.time_spread),
            *_sum(types, numbers * energy_mj, self.energy_spread),
        )


def _sum(types: Names, costs: Floats, spreads: Floats) -> tuple[float, float]:
    """Return the sum of costs and its spread."""
    total = float(costs.sum())
    if not total > 0:
        return total, SUM_FLOOR
    errors = [float((costs * spreads)[types == name].sum()) for name in np.unique(types)]
    return total, float(np.hypot(np.linalg.norm(errors) / total, SUM_FLOOR))


@dataclass(frozen=True)
class PredictedSum:
    """The cost of a model. Spreads are standard deviations of the logarithm, before calibration."""

    time_us: float
    time_spread: float
    energy_mj: float
    energy_spread: float


@dataclass(frozen=True)
class PredictorSpec:
    """How to fit a predictor: to log(time / tile roofline) and log(power)."""

    name: str
    time: Callable[..., FittedRegressor]  # a `Regressor`, which may take `like`
    power: Callable[..., FittedRegressor]
    in_model: Regressor  # for the effects of neighbours and of fetching weights
    has_scales: bool = False  # True if `time` and `power` take length scales: `like`

    def like(self, fitted: FittedPredictor) -> PredictorSpec:
        """Return this predictor with the length scales of a fitted one, so that it is fitted three
        times as fast.
        """
        if not self.has_scales:
            return self
        time = partial(self.time, like=fitted.time)
        return dataclasses.replace(self, time=time, power=partial(self.power, like=fitted.power))

    def fit(self, data: Dataset) -> FittedPredictor:
        """Raises `UsageError` if there are too few readings, or scikit-learn is not installed."""
        if len(data) < LEAST_ROWS:
            raise UsageError(
                f"{data.card.model} has {len(data)} operator readings; fitting a predictor needs "
                f"{LEAST_ROWS}.",
                "Measure some models first, for instance `farm run resnet18`, or choose another "
                "card with --card.",
            )
        inputs = Inputs.of(data.calls)
        times_us = np.array([row.cost.time_us.value for row in data.rows])
        neighbours_us = np.array([row.neighbours_us for row in data.rows])
        fetching_us = np.array([row.fetching_us for row in data.rows])
        powers_w = np.array([row.cost.mean_power_w for row in data.rows], dtype=float)

        power = fallback_power = None
        with_power = np.flatnonzero(np.isfinite(powers_w))
        if len(with_power) >= LEAST_ROWS:
            inputs_with_power = inputs.at(with_power)
            log_powers = np.log(powers_w[with_power])
            fallback_power = fit_medians(inputs_with_power, log_powers)
            # The fit uses measured times; a prediction uses predicted times.
            power = self.power(with_times(inputs_with_power, times_us[with_power]), log_powers)
        return FittedPredictor(
            name=self.name,
            base_power_w=data.card.base_power_w,
            time=self.time(inputs, np.log(times_us / inputs.tile_roofline_us)),
            power=power,
            neighbours=self.in_model(inputs, np.log1p(neighbours_us / times_us)),
            fetching=self.in_model(inputs, np.log1p(-fetching_us / times_us)),
            fallback_time=fit_medians(inputs, np.log(times_us / inputs.roofline_us)),
            fallback_power=fallback_power,
            typical=TypicalData.of(inputs),
        )


@dataclass(frozen=True)
class TypicalData:
    """Assumed values of unknown inputs: the mean over the readings of an operator type ("": all
    readings).
    """

    types: Names
    data: Floats  # types x (zeros, positive, channels)
    families: Names  # families with readings

    @classmethod
    def of(cls, inputs: Inputs) -> TypicalData:
        data = np.array([(call.zeros, call.positive, call.channels) for call in inputs.calls])
        types = np.unique(inputs.types)
        means = [data.mean(axis=0)]
        means += [data[inputs.types == name].mean(axis=0) for name in types]
        return cls(
            np.array(["", *types], dtype=np.str_), np.array(means), np.unique(inputs.families)
        )

    def filled(self, calls: Sequence[CallDescription]) -> list[CallDescription]:
        data_of = dict(zip(map(str, self.types), self.data.tolist(), strict=True))
        filled = []
        for call in calls:
            if not call.data_known:
                zeros, positive, channels = data_of.get(call.operator_type, data_of[""])
                call = dataclasses.replace(call, zeros=zeros, positive=positive, channels=channels)
            filled.append(call)
        return filled


#: Stored name -> class of a regressor.
_KINDS: dict[str, type[Any]] = {
    "Roofline": PlainRoofline,
    "Factors": Medians,
    "Forest": Trees,
    "Process": GaussianProcess,
}
_STORED_NAME = {kind: name for name, kind in _KINDS.items()}
#: Stored values of predictors that learned other values than log(time / tile roofline).
_TARGETS = {"over": "tile_roofline_us", "raw_power": False}


@dataclass(frozen=True)
class FittedPredictor:
    name: str
    base_power_w: float
    time: FittedRegressor
    power: FittedRegressor | None
    neighbours: FittedRegressor
    fetching: FittedRegressor
    fallback_time: Medians
    fallback_power: Medians | None
    typical: TypicalData

    def predict(self, calls: Sequence[CallDescription]) -> CallCosts:
        if not calls:
            return CallCosts.empty(0)
        inputs = Inputs.of(self.typical.filled(calls))
        times_us, time_spread, unanswered = self._times(inputs)
        powers_w, power_spread = self._powers(with_times(inputs, times_us), unanswered)
        distance = self._distances(inputs)
        # The spreads are too small for calls unlike all readings. Types without a reading have
        # their own calibration.
        known = np.isin(inputs.types, self.typical.types)
        beyond = np.where(known, np.fmax(distance - NEAR, 0.0), 0.0)
        least = np.hypot(LEAST_TIME_SPREAD, LEAST_TIME_SPREAD_US / times_us)
        of_card = CARD_SPREAD * np.maximum(1 - self.base_power_w / powers_w, 0.0)
        neighbours = np.clip(self.neighbours.predict(inputs)[0], -0.4, 2.0)
        fetching = np.clip(self.fetching.predict(inputs)[0], -2.0, 0.2)
        return CallCosts(
            time_us=times_us,
            time_spread=np.hypot(time_spread, least) * (1 + GROWTH * beyond),
            power_w=powers_w,
            power_spread=np.hypot(power_spread, of_card) * (1 + POWER_GROWTH * beyond),
            neighbours_us=times_us * np.expm1(neighbours),
            fetching_us=-times_us * np.expm1(fetching),
            known=known,
            distance=distance,
            waiting_w=self.base_power_w,
        )

    def _distances(self, inputs: Inputs) -> Floats:
        parts = self.time.parts if isinstance(self.time, Mean) else (self.time,)
        for part in parts:
            if isinstance(part, GaussianProcess):
                return part.distances(inputs)
        return np.full(len(inputs), np.nan)

    def _times(self, inputs: Inputs) -> tuple[Floats, Floats, Booleans]:
        """Return times in us, spreads, and for each call True if the fallback predicts it."""
        values, spreads = self.time.predict(inputs)
        times_us, unusable = _exponentials(values, inputs.tile_roofline_us)
        values, fallback_spreads = self.fallback_time.predict(inputs)
        fallback_us, _ = _exponentials(values, inputs.roofline_us)

        unanswered = ~np.isin(inputs.families, self.typical.families) | unusable
        return (
            np.where(unanswered, fallback_us, times_us),
            np.where(unanswered, fallback_spreads, spreads),
            unanswered,
        )

    def _powers(self, inputs: Inputs, unanswered: Booleans) -> tuple[Floats, Floats]:
        """Return powers in W and spreads."""
        ones = np.ones(len(inputs))
        if self.power is None or self.fallback_power is None:
            return ones * np.nan, ones * np.nan
        values, spreads = self.power.predict(inputs)
        powers_w, unusable = _exponentials(values, ones)
        values, fallback_spreads = self.fallback_power.predict(inputs)
        fallback_w, _ = _exponentials(values, ones)

        unanswered = unanswered | unusable
        return (
            np.where(unanswered, fallback_w, powers_w),
            np.where(unanswered, fallback_spreads, spreads),
        )

    @property
    def _regressors(self) -> dict[str, FittedRegressor | None]:
        """The regressors of which the JSON names the kind."""
        return {
            "time": self.time,
            "power": self.power,
            "neighbours": self.neighbours,
            "fetching": self.fetching,
        }

    def arrays(self) -> Arrays:
        parts = {
            **self._regressors,
            "typical": self.typical,
            "fallback time": self.fallback_time,
            "fallback power": self.fallback_power,
        }
        arrays: Arrays = {}
        for prefix, part in parts.items():
            if part is not None:
                arrays |= _arrays(part, prefix)
        return arrays

    def about(self) -> dict[str, Any]:
        """Return everything except the arrays, as plain JSON."""
        kinds = {name: part and _kind(part) for name, part in self._regressors.items()}
        return {
            "predictor": self.name,
            **_TARGETS,
            "base_power_w": self.base_power_w,
            **kinds,
        }

    @classmethod
    def from_arrays(cls, about: Mapping[str, Any], arrays: Arrays) -> FittedPredictor:
        """Restore a predictor from the results of `arrays` and `about`. Raises `KeyError`,
        `TypeError` or `ValueError` for another form."""
        name = about["predictor"]
        if name not in PREDICTORS or {key: about[key] for key in _TARGETS} != _TARGETS:
            raise ValueError(f"this version has no predictor '{name}' of this form")
        return cls(
            name=name,
            base_power_w=about["base_power_w"],
            time=_from_arrays(about["time"], arrays, "time"),
            power=_from_arrays(about["power"], arrays, "power"),
            neighbours=_from_arrays(about["neighbours"], arrays, "neighbours"),
            fetching=_from_arrays(about["fetching"], arrays, "fetching"),
            fallback_time=_fields(Medians, arrays, "fallback time"),
            fallback_power=_from_arrays(about["power"] and "Factors", arrays, "fallback power"),
            typical=_fields(TypicalData, arrays, "typical"),
        )


def _exponentials(logarithms: Floats, units: Floats) -> tuple[Floats, Booleans]:
    """Return exp(logarithm) x unit for each call, and True for values that are unusable."""
    with np.errstate(invalid="ignore"):
        values = np.exp(logarithms) * units
        return values, ~np.isfinite(logarithms) | ~(values > 0)


def _kind(regressor: FittedRegressor) -> str | list[Any]:
    """Return the stored name of a regressor; for a mean, the list of its regressors' names."""
    if isinstance(regressor, Mean):
        return [_kind(part) for part in regressor.parts]
    return _STORED_NAME[type(regressor)]


def _arrays(part: Any, prefix: str) -> Arrays:
    """Return the fields of a dataclass of arrays, by `prefix` plus field name."""
    if not isinstance(part, Mean):
        arrays = vars(part)
        return {f"{prefix}/{field.name}": arrays[field.name] for field in dataclasses.fields(part)}
    arrays = {}
    for number, regressor in enumerate(part.parts):
        arrays |= _arrays(regressor, f"{prefix}/{number}")
    return arrays


def _from_arrays(kind: str | list[Any] | None, arrays: Arrays, prefix: str) -> Any:
    """Restore a regressor from the results of `_kind` and `_arrays`; None if there is none."""
    if kind is None:
        return None
    if isinstance(kind, str):
        return _fields(_KINDS[kind], arrays, prefix)
    parts = (
        _from_arrays(part, arrays, f"{prefix}/{position}") for position, part in enumerate(kind)
    )
    return Mean(tuple(parts))


def _fields(kind: type[Any], arrays: Arrays, prefix: str) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: arrays[f"{prefix}/{name}"] for name in names})


def _fit_best(inputs: Inputs, values: Floats, least_leaf: int, like: Mean | None = None) -> Mean:
    fitted = like.parts[0] if like else None
    assert fitted is None or isinstance(fitted, GaussianProcess)
    process = partial(fit_process, like=fitted)
    trees = partial(fit_trees, trees=60, least_leaf=least_leaf)
    return fit_mean(inputs, values, (process, trees))


fit_effects = partial(fit_trees, trees=40, least_leaf=4)

PREDICTORS: dict[str, PredictorSpec] = {
    # A lower bound from the card's peaks.
    "roofline": PredictorSpec("roofline", fit_roofline, fit_median, in_model=fit_zero),
    "best": PredictorSpec(
        "best",
        partial(_fit_best, least_leaf=1),
        partial(_fit_best, least_leaf=2),
        in_model=fit_effects,
        has_scales=True,
    ),
}


def predictor_spec(name: str) -> PredictorSpec:
    """Raises `UsageError` if there is no such predictor."""
    if name not in PREDICTORS:
        near = did_you_mean(name, PREDICTORS)
        raise UsageError(
            f"There is no predictor '{name}'.", near or f"Choose one of {', '.join(PREDICTORS)}."
        )
    return PREDICTORS[name]
