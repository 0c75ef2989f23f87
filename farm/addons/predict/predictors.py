"""Predictors by name: how to fit each, what it predicts, and its stored form as arrays and JSON.

`PredictorSpec.fit` learns from a `Dataset`, and `FittedPredictor.predict` gives the costs of calls
with their spreads. For an operator type without a reading, the prediction uses readings of its
family and is marked. If the family has no reading either, it is roofline x median."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
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
    FittedRegressor,
    Floats,
    Inputs,
    Mean,
    Medians,
    Names,
    Regressor,
    Trees,
    fit_mean,
    fit_medians,
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
    known: npt.NDArray[np.bool_]  # True if its operator type has a reading
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
        shift_us = np.maximum(
            self.neighbours_us - cached_share * self.fetching_us, -0.9 * self.time_us
        )
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

        def of(values: Floats, spreads: Floats) -> tuple[float, float]:
            costs = np.array(counts, dtype=float) * values
            errors = [float((costs * spreads)[types == one].sum()) for one in np.unique(types)]
            total = float(costs.sum())
            return total, float(
                np.hypot(np.linalg.norm(errors) / total, SUM_FLOOR)
            ) if total > 0 else SUM_FLOOR

        time_us, energy_mj = self.in_model(cached_share)
        return PredictedSum(*of(time_us, self.time_spread), *of(energy_mj, self.energy_spread))


@dataclass(frozen=True)
class PredictedSum:
    """The cost of a model. Spreads are standard deviations of the logarithm, before calibration."""

    time_us: float
    time_spread: float
    energy_mj: float
    energy_spread: float


@dataclass(frozen=True)
class PredictorSpec:
    """How to fit a predictor: to log(time / roofline) and log(power), or to raw us and W."""

    name: str
    time: Regressor
    power: Regressor
    over: str = "tile_roofline_us"  # the roofline of `time`; "": raw microseconds
    raw_power: bool = False
    in_model: Regressor = fit_medians  # for the effects of neighbours and of fetching weights

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
        times, added, fetching, powers = (
            np.array([getattr(row, name) for row in data.rows], dtype=float)
            for name in ("time_us", "neighbours_us", "fetching_us", "power_w")
        )
        power = fallback_power = None
        with_power = np.flatnonzero(np.isfinite(powers))
        if len(with_power) >= LEAST_ROWS:
            own, watts = inputs.at(with_power), powers[with_power]
            fallback_power = fit_medians(own, np.log(watts))
            # The fit uses measured times; a prediction uses predicted times.
            power = self.power(
                with_times(own, times[with_power]), watts if self.raw_power else np.log(watts)
            )
        return FittedPredictor(
            self.name,
            self.over,
            self.raw_power,
            data.card.base_power_w,
            self.time(inputs, np.log(times / inputs.column(self.over)) if self.over else times),
            power,
            self.in_model(inputs, np.log1p(added / times)),
            self.in_model(inputs, np.log1p(-fetching / times)),
            fit_medians(inputs, np.log(times / inputs.column("roofline_us"))),
            fallback_power,
            TypicalData.of(inputs),
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
        own = np.column_stack([inputs.column(name) for name in ("zeros", "positive", "channels")])
        types = np.unique(inputs.types)
        groups = [own, *(own[inputs.types == one] for one in types)]
        means = np.array([group.mean(axis=0) for group in groups])
        return cls(np.array(["", *types], dtype=np.str_), means, np.unique(inputs.families))

    def filled(self, calls: Sequence[CallDescription]) -> list[CallDescription]:
        rows = (dict(zip(("zeros", "positive", "channels"), row, strict=True)) for row in self.data)
        values: dict[str, dict[str, Any]] = dict(zip(map(str, self.types), rows, strict=True))
        return [
            call
            if call.data_known
            else dataclasses.replace(call, **values.get(call.operator_type, values[""]))
            for call in calls
        ]


#: Stored name -> class of a regressor.
_KINDS: dict[str, type[Any]] = {"Factors": Medians, "Forest": Trees, "Process": GaussianProcess}
_STORED_NAME = {kind: name for name, kind in _KINDS.items()}
_REGRESSORS = ("time", "power", "neighbours", "fetching")


@dataclass(frozen=True)
class FittedPredictor:
    name: str
    over: str
    raw_power: bool
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
        times, time_spread, unanswered = self._times(inputs)
        powers, power_spread = self._powers(with_times(inputs, times), unanswered)
        parts = self.time.parts if isinstance(self.time, Mean) else (self.time,)
        process = next((part for part in parts if isinstance(part, GaussianProcess)), None)
        distance = np.full(len(calls), np.nan) if process is None else process.distances(inputs)
        # The spreads are too small for calls unlike all readings. Types without a reading have
        # their own calibration.
        known = np.isin(inputs.types, self.typical.types)
        beyond = np.where(known, np.fmax(distance - NEAR, 0.0), 0.0)
        least = np.hypot(LEAST_TIME_SPREAD, LEAST_TIME_SPREAD_US / times)
        of_card = CARD_SPREAD * np.maximum(1 - self.base_power_w / powers, 0.0)
        return CallCosts(
            times,
            np.hypot(time_spread, least) * (1 + GROWTH * beyond),
            powers,
            np.hypot(power_spread, of_card) * (1 + POWER_GROWTH * beyond),
            times * np.expm1(np.clip(self.neighbours.predict(inputs)[0], -0.4, 2.0)),
            -times * np.expm1(np.clip(self.fetching.predict(inputs)[0], -2.0, 0.2)),
            known,
            distance,
            self.base_power_w,
        )

    def _times(self, inputs: Inputs) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Return times, spreads, and for each call True if the fallback predicts it."""
        times, spreads, failed = _raw(
            self.time.predict(inputs), inputs.column(self.over) if self.over else None
        )
        unanswered = ~np.isin(inputs.families, self.typical.families) | failed
        fallback, fallback_spreads, _ = _raw(
            self.fallback_time.predict(inputs), inputs.column("roofline_us")
        )
        return (
            np.where(unanswered, fallback, times),
            np.where(unanswered, fallback_spreads, spreads),
            unanswered,
        )

    def _powers(self, inputs: Inputs, unanswered: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        if self.power is None or self.fallback_power is None:
            return np.full(len(inputs), np.nan), np.full(len(inputs), np.nan)
        one = np.ones(len(inputs))
        powers, spreads, failed = _raw(self.power.predict(inputs), None if self.raw_power else one)
        fallback, fallback_spreads, _ = _raw(self.fallback_power.predict(inputs), one)
        unanswered = unanswered | failed
        return np.where(unanswered, fallback, powers), np.where(
            unanswered, fallback_spreads, spreads
        )

    def arrays(self) -> Arrays:
        found: Arrays = {}
        for name in ("typical", *_REGRESSORS, "fallback_time", "fallback_power"):
            if (part := getattr(self, name)) is not None:
                found |= _arrays(part, name.replace("_", " "))
        return found

    def about(self) -> dict[str, Any]:
        """Return everything except the arrays, as plain JSON."""
        kinds = {
            name: _kind(part) if (part := getattr(self, name)) else None for name in _REGRESSORS
        }
        plain = {name: getattr(self, name) for name in ("over", "raw_power", "base_power_w")}
        return {"predictor": self.name, **plain, **kinds}

    @classmethod
    def from_arrays(cls, about: Mapping[str, Any], arrays: Arrays) -> FittedPredictor:
        """Restore a predictor from the results of `arrays` and `about`. Raises `KeyError` or
        `TypeError` for another form."""
        given: dict[str, Any] = {
            name: about[name] for name in ("over", "raw_power", "base_power_w")
        }
        given |= {
            name: _from_arrays(about[name], arrays, name) if about[name] else None
            for name in _REGRESSORS
        }
        return cls(
            about["predictor"],
            **given,
            fallback_time=_fields(Medians, arrays, "fallback time"),
            fallback_power=_fields(Medians, arrays, "fallback power") if about["power"] else None,
            typical=_fields(TypicalData, arrays, "typical"),
        )


def _raw(
    predicted: tuple[Floats, Floats], times: Floats | None
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Return values, spreads of their logarithms, and for each value True if it is unusable.

    ``times``: factor of the exponential of a predicted logarithm; None if the predicted values are
    raw."""
    values, spreads = predicted
    with np.errstate(invalid="ignore"):
        raw, spreads = (
            (values, spreads / values) if times is None else (np.exp(values) * times, spreads)
        )
        return raw, spreads, ~np.isfinite(values) | ~(raw > 0)


def _kind(regressor: FittedRegressor) -> str | list[Any]:
    """Return the stored name of a regressor; for a mean, the list of its regressors' names."""
    return (
        [_kind(part) for part in regressor.parts]
        if isinstance(regressor, Mean)
        else _STORED_NAME[type(regressor)]
    )


def _arrays(stored: Any, prefix: str) -> Arrays:
    """Return the fields of a dataclass of arrays, by `prefix` plus field name."""
    if isinstance(stored, Mean):
        parts = (_arrays(part, f"{prefix}/{number}") for number, part in enumerate(stored.parts))
        return dict(itertools.chain.from_iterable(part.items() for part in parts))
    return {f"{prefix}/{one.name}": getattr(stored, one.name) for one in dataclasses.fields(stored)}


def _from_arrays(kind: str | list[Any], arrays: Arrays, prefix: str) -> Any:
    """Restore a regressor from the results of `_kind` and `_arrays`."""
    if isinstance(kind, list):
        return Mean(
            tuple(
                _from_arrays(one, arrays, f"{prefix}/{number}") for number, one in enumerate(kind)
            )
        )
    return _fields(_KINDS[kind], arrays, prefix)


def _fields(kind: type[Any], arrays: Arrays, prefix: str) -> Any:
    return kind(**{one.name: arrays[f"{prefix}/{one.name}"] for one in dataclasses.fields(kind)})


_IN_MODEL = partial(fit_trees, n_estimators=40, min_samples_leaf=4, n_jobs=-1)
_EXTRA = partial(fit_trees, n_estimators=100, n_jobs=-1)
_SLOWLY = {
    "n_estimators": 300,
    "learning_rate": 0.05,
    "subsample": 0.7,
    "max_depth": 5,
    "min_samples_leaf": 2,
}
_BOOSTED = partial(fit_trees, estimator="GradientBoostingRegressor", max_features=0.5, **_SLOWLY)  # type: ignore[arg-type]
_TIME, _POWER = (
    partial(
        fit_mean,
        regressors=(
            fit_process,
            partial(fit_trees, n_estimators=60, min_samples_leaf=n, n_jobs=-1),
        ),
    )
    for n in (1, 2)
)
_ONE_MEDIAN = partial(fit_medians, grouped=False)

PREDICTORS: dict[str, PredictorSpec] = {
    one.name: one
    for one in (
        # A lower bound from the card's peaks.
        PredictorSpec("roofline", fit_zero, _ONE_MEDIAN, over="roofline_us", in_model=fit_zero),
        PredictorSpec("family", fit_medians, fit_medians, over="roofline_us"),
        PredictorSpec("boosting", _BOOSTED, _BOOSTED, in_model=_IN_MODEL),
        PredictorSpec("trees", _EXTRA, _EXTRA, in_model=_IN_MODEL),
        PredictorSpec("process", fit_process, fit_process, in_model=_IN_MODEL),
        PredictorSpec("best", _TIME, _POWER, in_model=_IN_MODEL),
    )
}


def predictor_spec(name: str) -> PredictorSpec:
    """Raises `UsageError` if there is no such predictor."""
    if name not in PREDICTORS:
        near = did_you_mean(name, PREDICTORS)
        raise UsageError(
            f"There is no predictor '{name}'.", near or f"Choose one of {', '.join(PREDICTORS)}."
        )
    return PREDICTORS[name]
