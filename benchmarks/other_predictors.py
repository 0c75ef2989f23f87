"""Predictors of publications, to compare the farm's predictors with.

    python -m benchmarks.other_predictors neural-power best --card H200   # arguments of `farm
    predict evaluate`

Without names, it evaluates these predictors and those of the farm.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.addons.predict.predictors import PREDICTORS, PredictorSpec
from farm.addons.predict.regressors import (
    LEAST_SPREAD,
    FittedRegressor,
    Floats,
    Inputs,
    Names,
    Regressor,
    fit_medians,
    needs_scikit_learn,
)


@dataclass(frozen=True)
class RawValues:
    """A regressor of microseconds or watts, as in the publications. Its values become logarithms."""

    regressor: FittedRegressor
    unit: Callable[[Inputs], Floats]  # the logarithm is that of value / unit

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        values, spreads = self.regressor.predict(inputs)
        with np.errstate(invalid="ignore"):
            return np.log(values / self.unit(inputs)), spreads / values


def of_times(fit: Regressor) -> Regressor:
    """Fit to times in us; the values are log(time / tile roofline)."""

    def fit_times(inputs: Inputs, values: Floats) -> RawValues:
        times_us = np.exp(values) * inputs.tile_roofline_us
        return RawValues(fit(inputs, times_us), lambda inputs: inputs.tile_roofline_us)

    return fit_times


def of_powers(fit: Regressor) -> Regressor:
    """Fit to powers in W; the values are log(power)."""

    def fit_powers(inputs: Inputs, values: Floats) -> RawValues:
        return RawValues(fit(inputs, np.exp(values)), lambda inputs: np.ones(len(inputs)))

    return fit_powers


LAYER_PARAMETERS = (
    "batch",
    "last_size",
    "rows",
    "channels_in",
    "channels_out",
    "pixels",
    "window",
    "stride",
)
PRODUCT_PARAMETERS = ("n", "k", "products")
PHYSICAL = ("flops", "bytes_moved", "elements")
LEAST_FOR_POLYNOMIAL, MOST_TERMS = 10, 370


@dataclass(frozen=True)
class Polynomials:
    """NeuralPower (Cai et al., 2017): a polynomial of layer parameters for each operator type.

    A lasso selects the terms. Operations and bytes are additional parameters. Values are raw (us or
    W), as in the publication, and NaN for types without a polynomial."""

    logarithms: npt.NDArray[np.bool_]  # True if logarithms of the parameters are also parameters
    types: Names
    intercepts: Floats
    spreads: Floats  # as shares of the value
    least: Floats
    term_types: npt.NDArray[np.intp]  # index into `types`, for each term
    powers: npt.NDArray[np.int8]  # terms x parameters
    coefficients: Floats  # of each term

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        values, spreads = np.full(len(inputs), np.nan), np.full(len(inputs), np.nan)
        parameters = _parameters(inputs, bool(self.logarithms))
        for place, name in enumerate(self.types):
            rows, terms = np.flatnonzero(inputs.types == name), self.term_types == place
            found = (
                _terms(parameters[rows], self.powers[terms]) @ self.coefficients[terms]
                + self.intercepts[place]
            )
            values[rows] = np.maximum(found, self.least[place])
            spreads[rows] = self.spreads[place] * values[rows]
        return values, spreads


def fit_polynomials(inputs: Inputs, values: Floats, logarithms: bool = False) -> Polynomials:
    """Choose the degree (1 to 3) and the weight of the lasso by ten-fold cross-validation."""
    needs_scikit_learn()
    names, counts = np.unique(inputs.types, return_counts=True)
    names = names[counts >= LEAST_FOR_POLYNOMIAL]
    parameters, groups = (
        _parameters(inputs, logarithms),
        [values[inputs.types == name] for name in names],
    )
    found = [
        _polynomial(parameters[inputs.types == name], own)
        for name, own in zip(names, groups, strict=True)
    ]
    return Polynomials(
        np.array(logarithms),
        names,
        intercepts=np.array([intercept for *_, intercept in found]),
        spreads=np.sqrt([error for error, *_ in found]) / [max(own.mean(), 1e-9) for own in groups],
        least=np.array([own.min() / 2 for own in groups]),
        term_types=np.repeat(np.arange(len(names)), [len(powers) for _, powers, *_ in found]),
        powers=np.concatenate(
            [np.empty((0, parameters.shape[1]), np.int8), *(powers for _, powers, *_ in found)]
        ),
        coefficients=np.concatenate(
            [np.empty(0), *(coefficients for *_, coefficients, _ in found)]
        ),
    )


def _polynomial(
    parameters: Floats, values: Floats
) -> tuple[float, npt.NDArray[np.int8], Floats, float]:
    """Return the mean squared error of the folds, and powers, coefficients and intercept of the
    best degree.
    """
    from sklearn.linear_model import LassoCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, PolynomialFeatures

    used = np.flatnonzero(np.ptp(parameters[:, : -len(PHYSICAL)], axis=0) > 0)
    physical = np.eye(parameters.shape[1], dtype=np.int8)[-len(PHYSICAL) :]
    found: list[tuple[float, npt.NDArray[np.int8], Floats, float]] = []
    for degree in (1, 2, 3):
        number = math.comb(len(used) + degree, degree) - 1
        if found and (number > MOST_TERMS or not number):
            break
        powers = np.zeros((number, parameters.shape[1]), dtype=np.int8)
        if number:
            powers[:, used] = (
                PolynomialFeatures(degree, include_bias=False).fit(parameters[:, used]).powers_
            )
        powers = np.concatenate([powers, physical])
        settings = {
            "alphas": 12,
            "eps": 1e-4,
            "max_iter": 1000,
            "tol": 1e-3,
            "precompute": True,
            "random_state": 0,
        }
        pipeline = make_pipeline(MaxAbsScaler(), LassoCV(cv=min(10, len(values)), **settings))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # some lassos do not converge; the fit uses the best one
            scaler, lasso = (
                step for _, step in pipeline.fit(_terms(parameters, powers), values).steps
            )
        error, kept = float(lasso.mse_path_.mean(axis=1).min()), lasso.coef_ != 0
        found.append(
            (error, powers[kept], (lasso.coef_ / scaler.scale_)[kept], float(lasso.intercept_))
        )
    return min(found, key=lambda one: one[0])


def _parameters(inputs: Inputs, logarithms: bool) -> Floats:
    """Layer parameters, their logarithms on request, operations and bytes. Shape: calls x
    parameters.
    """
    parts = [np.nan_to_num(_fields(inputs, (*LAYER_PARAMETERS, *PRODUCT_PARAMETERS)))]
    if logarithms:
        parts.append(np.log2(parts[0] + 1))
    return np.hstack([*parts, _fields(inputs, PHYSICAL)])


def _terms(parameters: Floats, powers: npt.NDArray[np.int8]) -> Floats:
    """Terms of the polynomial. Shape: calls x terms."""
    return np.prod(parameters[:, None, :] ** powers[None, :, :], axis=2)  # type: ignore[no-any-return]


PORTABLE = ("tiles", "elements", "flops", "bytes_moved", "parameter_bytes", "flops_per_byte")


@dataclass(frozen=True)
class PortableForest:
    """Braun et al. (2020): a random forest with portable features only, without the operator's type
    and the card.

    The paper counts features in a kernel's instructions. Here they must be known before a call
    runs: tiles (blocks), elements (threads), operations, bytes, bytes of parameters and arithmetic
    intensity."""

    forest: Any  # of scikit-learn

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        features = _fields(inputs, PORTABLE)
        of_trees = np.array([tree.predict(features) for tree in self.forest.estimators_])
        return of_trees.mean(axis=0), np.sqrt(of_trees.var(axis=0) + LEAST_SPREAD**2)


def fit_forest(inputs: Inputs, values: Floats) -> PortableForest:
    needs_scikit_learn()
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(100, random_state=0, n_jobs=-1)
    return PortableForest(forest.fit(_fields(inputs, PORTABLE), values))


def _fields(inputs: Inputs, names: Sequence[str]) -> Floats:
    """Fields of the calls' descriptions. Shape: calls x names."""
    return np.column_stack([inputs.column(operator.attrgetter(name)) for name in names])


OTHERS = {
    "neural-power": PredictorSpec(
        "neural-power",
        of_times(fit_polynomials),
        of_powers(partial(fit_polynomials, logarithms=True)),
        in_model=fit_medians,
    ),
    "braun": PredictorSpec(
        "braun", of_times(fit_forest), of_powers(fit_forest), in_model=fit_medians
    ),
}


def main() -> None:
    """Run `farm predict evaluate`, which then knows these predictors, too."""
    from cli.main import main as farm

    PREDICTORS.update(OTHERS)
    sys.argv = ["farm", "predict", "evaluate", *sys.argv[1:]]
    farm()


if __name__ == "__main__":
    main()
