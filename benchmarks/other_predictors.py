"""Predictors of publications and of the nearest readings, to compare the farm's predictors with.

    python -m benchmarks.other_predictors neural-power best --card H200   # arguments of `farm
    predict evaluate`

Without names, it evaluates these predictors and those of the farm.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from farm.addons.predict.predictors import _IN_MODEL, PREDICTORS, PredictorSpec
from farm.addons.predict.regressors import (
    Floats,
    Inputs,
    Names,
    Trees,
    fit_trees,
    needs_scikit_learn,
    squared_distances,
)


@dataclass(frozen=True)
class NearestReadings:
    """The five nearest readings, weighted by 1 / distance. The fields are the training data.

    Distances are in standard deviations of each feature. A different type or family counts as one
    more feature."""

    numbers: Floats
    types: Names
    families: Names
    values: Floats

    TYPE_DISTANCE, FAMILY_DISTANCE, COUNT = 1.0, 8.0, 5

    def _columns(self, numbers: Floats, types: Names, families: Names) -> Floats:
        means, deviations = self.numbers.mean(axis=0), self.numbers.std(axis=0)
        # Two different one-hot rows are sqrt(2) apart.
        of_type = (types[:, None] == np.unique(self.types)) * self.TYPE_DISTANCE / math.sqrt(2)
        of_family = (
            (families[:, None] == np.unique(self.families)) * self.FAMILY_DISTANCE / math.sqrt(2)
        )
        return np.hstack(
            [(numbers - means) / np.where(deviations < 1e-12, 1.0, deviations), of_type, of_family]
        )

    def _nearest(self, inputs: Inputs) -> tuple[Floats, npt.NDArray[np.intp]]:
        """Return distances and indices of the nearest readings. Shapes: calls x COUNT."""
        points = self._columns(inputs.numbers, inputs.types, inputs.families)
        squared = squared_distances(points, self._columns(self.numbers, self.types, self.families))
        places = np.argsort(squared, axis=1, kind="stable")[:, : self.COUNT]
        return np.sqrt(np.maximum(np.take_along_axis(squared, places, axis=1), 0.0)), places

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        distances, places = self._nearest(inputs)
        weights = 1 / (distances + 0.05)
        weights /= weights.sum(axis=1, keepdims=True)
        found = (weights * self.values[places]).sum(axis=1)
        variances = (weights * (self.values[places] - found[:, None]) ** 2).sum(axis=1)
        return found, np.sqrt(variances + (0.02 + 0.05 * distances[:, 0]) ** 2)


def fit_nearest(inputs: Inputs, values: Floats) -> NearestReadings:
    return NearestReadings(inputs.numbers, inputs.types, inputs.families, values)


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
    own = np.nan_to_num(
        np.column_stack([inputs.column(name) for name in (*LAYER_PARAMETERS, *PRODUCT_PARAMETERS)])
    )
    physical = np.column_stack([inputs.column(name) for name in PHYSICAL])
    return np.hstack([own, *([np.log2(own + 1)] if logarithms else []), physical])


def _terms(parameters: Floats, powers: npt.NDArray[np.int8]) -> Floats:
    """Terms of the polynomial. Shape: calls x terms."""
    return np.prod(parameters[:, None, :] ** powers[None, :, :], axis=2)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PortableTrees(Trees):
    """Braun et al. (2020): trees with portable features only, without the operator's type and the
    card.

    The paper counts features in a kernel's instructions. Here they must be known before a call
    runs: tiles (blocks), elements (threads), operations, bytes, bytes of parameters and arithmetic
    intensity."""

    PORTABLE = ("tiles", "elements", "flops", "bytes_moved", "parameter_bytes", "flops_per_byte")

    def columns(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        return np.column_stack([inputs.column(name) for name in self.PORTABLE]).astype(np.float32)


_RANDOM = partial(
    fit_trees, estimator="RandomForestRegressor", kind=PortableTrees, n_estimators=100, n_jobs=-1
)
_LOGARITHMS = partial(fit_polynomials, logarithms=True)
OTHERS = {
    one.name: one
    for one in (
        PredictorSpec("neural-power", fit_polynomials, _LOGARITHMS, over="", raw_power=True),
        PredictorSpec("braun", _RANDOM, _RANDOM, over="", raw_power=True),
        PredictorSpec("neighbours", fit_nearest, fit_nearest, in_model=_IN_MODEL),
    )
}


def main() -> None:
    """Run `farm predict evaluate`, which then knows these predictors, too."""
    from cli.main import main as farm

    PREDICTORS.update(OTHERS)
    sys.argv = ["farm", "predict", "evaluate", *sys.argv[1:]]
    farm()


if __name__ == "__main__":
    main()
