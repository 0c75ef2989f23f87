"""Regressors: each predicts one number of a call from its features and stores its state as arrays.

A regressor is a function `fit_...(inputs, values)` that returns a frozen dataclass with `predict`. The
fields of the dataclass are the stored arrays (`farm.prediction.predictors`), so stored predictors are never
unpickled. scikit-learn fits lassos and trees; NumPy alone evaluates them.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from farm.errors import UsageError
from farm.prediction.call_features import CallDescription, numbers_of

Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]


def squared_distances(points: Floats, others: Floats) -> Floats:
    """Squared distances of rows. Shape: ... x points x others."""
    own, their = (points**2).sum(axis=-1), (others**2).sum(axis=-1)
    return own[..., :, None] + their[..., None, :] - 2 * points @ np.swapaxes(others, -1, -2)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Inputs:
    """The input of regressors: for each call its features (`numbers`), operator type and operator family."""

    calls: tuple[CallDescription, ...]
    numbers: Floats  # calls x features
    types: Names
    families: Names

    @classmethod
    def of(cls, calls: Sequence[CallDescription]) -> Inputs:
        types = np.array([call.operator_type for call in calls], dtype=np.str_)
        families = np.array([call.operator_family for call in calls], dtype=np.str_)
        return cls(tuple(calls), numbers_of(calls), types, families)

    def __len__(self) -> int:
        return len(self.calls)

    def column(self, name: str) -> Floats:
        """Return one feature of every call."""
        return np.array([getattr(call, name) for call in self.calls], dtype=float)

    def at(self, places: npt.NDArray[np.intp]) -> Inputs:
        calls = tuple(self.calls[place] for place in places)
        return Inputs(calls, self.numbers[places], self.types[places], self.families[places])


def with_times(inputs: Inputs, times_us: Floats) -> Inputs:
    """Add four features for the prediction of power.

    They are the logarithm of each call's time, the logarithm of time / tile roofline, and the estimated times of
    arithmetic and of memory traffic as shares of the time. A kernel that is slower than its roofline draws less power.
    """
    shares = [inputs.column(name) / times_us for name in ("compute_us", "traffic_us")]
    busy = [np.log2(times_us), np.log2(times_us / inputs.column("tile_roofline_us")), *shares]
    return dataclasses.replace(inputs, numbers=np.column_stack([inputs.numbers, *busy]))


class FittedRegressor(Protocol):
    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """Return the value of each call and its spread: a standard deviation before calibration."""


#: Fits a regressor to one value for each call.
Regressor = Callable[[Inputs, Floats], FittedRegressor]


def needs_scikit_learn() -> None:
    """
    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Fitting predictors needs scikit-learn, which is not installed.",
            "Install it with `pip install 'operator-farm[prediction]'`; the predictors of the package do not need it.",
        ) from error


@dataclass(frozen=True)
class Medians:
    """The median and spread of each operator type and family; the name "" means all readings.

    This regressor is the baseline, and the fallback for operator families without a reading.
    """

    names: Names  # type:relu, family:pointwise, or ""
    medians: Floats
    spreads: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        places = self._places(inputs)
        return self.medians[places], self.spreads[places]

    def _places(self, inputs: Inputs) -> list[int]:
        known = {str(name): place for place, name in enumerate(self.names)}
        groups = zip(inputs.types, inputs.families, strict=True)
        return [known.get(f"type:{one}", known.get(f"family:{family}", known[""])) for one, family in groups]


LEAST_FOR_MEDIAN = 3  # least number of readings of a type or family
LEAST_SPREAD = 0.02


def fit_medians(inputs: Inputs, values: Floats, grouped: bool = True) -> Medians:
    """Fit medians. ``grouped=False``: only one median of all readings."""
    groups = {"": values}
    for kind, names in (("type", inputs.types), ("family", inputs.families)) if grouped else ():
        groups |= {f"{kind}:{name}": values[names == name] for name in np.unique(names)}
    groups = {name: found for name, found in groups.items() if not name or len(found) >= LEAST_FOR_MEDIAN}
    medians = [float(np.median(found)) for found in groups.values()]
    # 1.4826 x the median absolute deviation is the standard deviation of a normal distribution.
    spreads = [1.4826 * float(np.median(np.abs(found - np.median(found)))) for found in groups.values()]
    least = max(0.25 * spreads[0], LEAST_SPREAD)
    return Medians(np.array(list(groups), dtype=np.str_), np.array(medians), np.maximum(spreads, least))


def fit_zero(inputs: Inputs, values: Floats) -> Medians:
    """Return a regressor that predicts 0 for every call.

    The predicted value is the logarithm of measured time / roofline, so the predicted time is the roofline.
    """
    return Medians(np.array([""]), np.zeros(1), np.array([max(float(np.sqrt(np.mean(values**2))), LEAST_SPREAD)]))


@dataclass(frozen=True)
class NearestReadings:
    """The five nearest readings, weighted by 1 / distance. The fields are the training data.

    Distances are in standard deviations of each feature. A different type or family counts as one more feature.
    """

    numbers: Floats
    types: Names
    families: Names
    values: Floats

    TYPE_DISTANCE, FAMILY_DISTANCE, COUNT = 1.0, 8.0, 5

    def _columns(self, numbers: Floats, types: Names, families: Names) -> Floats:
        means, deviations = self.numbers.mean(axis=0), self.numbers.std(axis=0)
        # Two different one-hot rows are sqrt(2) apart.
        of_type = (types[:, None] == np.unique(self.types)) * self.TYPE_DISTANCE / math.sqrt(2)
        of_family = (families[:, None] == np.unique(self.families)) * self.FAMILY_DISTANCE / math.sqrt(2)
        return np.hstack([(numbers - means) / np.where(deviations < 1e-12, 1.0, deviations), of_type, of_family])

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


LAYER_PARAMETERS = ("batch", "last_size", "rows", "channels_in", "channels_out", "pixels", "window", "stride")
PRODUCT_PARAMETERS = ("n", "k", "products")
PHYSICAL = ("flops", "bytes_moved", "elements")
LEAST_FOR_POLYNOMIAL, MOST_TERMS = 10, 370


@dataclass(frozen=True)
class Polynomials:
    """NeuralPower (Cai et al., 2017): a polynomial of layer parameters for each operator type.

    A lasso selects the terms. Operations and bytes are additional parameters. Values are raw (us or W), as in the
    publication, and NaN for types without a polynomial.
    """

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
            found = _terms(parameters[rows], self.powers[terms]) @ self.coefficients[terms] + self.intercepts[place]
            values[rows] = np.maximum(found, self.least[place])
            spreads[rows] = self.spreads[place] * values[rows]
        return values, spreads


def fit_polynomials(inputs: Inputs, values: Floats, logarithms: bool = False) -> Polynomials:
    """Choose the degree (1 to 3) and the weight of the lasso by ten-fold cross-validation."""
    needs_scikit_learn()
    names, counts = np.unique(inputs.types, return_counts=True)
    names = names[counts >= LEAST_FOR_POLYNOMIAL]
    parameters, groups = _parameters(inputs, logarithms), [values[inputs.types == name] for name in names]
    found = [_polynomial(parameters[inputs.types == name], own) for name, own in zip(names, groups, strict=True)]
    return Polynomials(
        np.array(logarithms),
        names,
        intercepts=np.array([intercept for *_, intercept in found]),
        spreads=np.sqrt([error for error, *_ in found]) / [max(own.mean(), 1e-9) for own in groups],
        least=np.array([own.min() / 2 for own in groups]),
        term_types=np.repeat(np.arange(len(names)), [len(powers) for _, powers, *_ in found]),
        powers=np.concatenate([np.empty((0, parameters.shape[1]), np.int8), *(powers for _, powers, *_ in found)]),
        coefficients=np.concatenate([np.empty(0), *(coefficients for *_, coefficients, _ in found)]),
    )


def _polynomial(parameters: Floats, values: Floats) -> tuple[float, npt.NDArray[np.int8], Floats, float]:
    """Return the mean squared error of the folds, and powers, coefficients and intercept of the best degree."""
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
            powers[:, used] = PolynomialFeatures(degree, include_bias=False).fit(parameters[:, used]).powers_
        powers = np.concatenate([powers, physical])
        settings = {"alphas": 12, "eps": 1e-4, "max_iter": 1000, "tol": 1e-3, "precompute": True, "random_state": 0}
        pipeline = make_pipeline(MaxAbsScaler(), LassoCV(cv=min(10, len(values)), **settings))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some lassos do not converge; the fit uses the best one
            scaler, lasso = (step for _, step in pipeline.fit(_terms(parameters, powers), values).steps)
        error, kept = float(lasso.mse_path_.mean(axis=1).min()), lasso.coef_ != 0
        found.append((error, powers[kept], (lasso.coef_ / scaler.scale_)[kept], float(lasso.intercept_)))
    return min(found, key=lambda one: one[0])


def _parameters(inputs: Inputs, logarithms: bool) -> Floats:
    """Layer parameters, their logarithms on request, operations and bytes. Shape: calls x parameters."""
    own = np.nan_to_num(np.column_stack([inputs.column(name) for name in (*LAYER_PARAMETERS, *PRODUCT_PARAMETERS)]))
    physical = np.column_stack([inputs.column(name) for name in PHYSICAL])
    return np.hstack([own, *([np.log2(own + 1)] if logarithms else []), physical])


def _terms(parameters: Floats, powers: npt.NDArray[np.int8]) -> Floats:
    """Terms of the polynomial. Shape: calls x terms."""
    return np.prod(parameters[:, None, :] ** powers[None, :, :], axis=2)  # type: ignore[no-any-return]


SHRINK = 3.0  # weight of the family's mean, in readings of the type


@dataclass(frozen=True)
class Trees:
    """Trees of scikit-learn in joined arrays. The left child of a node is the next node; a leaf has the feature -1.

    The columns are the features, the mean of the operator's type (shrunk towards the mean of its family), and one
    column for each family. Thresholds are rounded down to float32, which splits float32 columns in the same way. The
    threshold of a leaf is its value.
    """

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int16]
    threshold: npt.NDArray[np.float32]
    right: npt.NDArray[np.int32]  # index of the right child - index of the node, which compresses well
    settings: Floats  # base value, 1 if the values of trees are added (boosting), residual, mean of the values
    types: Names
    type_means: Floats
    families: Names
    family_means: Floats

    def columns(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Shape: calls x (features + 1 + families)."""
        types = dict(zip(self.types, self.type_means, strict=True))
        families = dict(zip(self.families, self.family_means, strict=True))
        groups = zip(inputs.types, inputs.families, strict=True)
        means = [types.get(one, families.get(family, self.settings[3])) for one, family in groups]
        is_family = inputs.families[:, None] == self.families[None, :]
        return np.column_stack([inputs.numbers, np.array(means, dtype=float), is_family]).astype(np.float32)

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        base, summed, residual, _ = self.settings
        columns, rows = self.columns(inputs), np.arange(len(inputs))[:, None]
        nodes = np.broadcast_to(self.roots, (len(inputs), len(self.roots))).astype(np.int32)  # calls x trees
        while ((feature := self.feature[nodes]) >= 0).any():
            left = columns[rows, feature] <= self.threshold[nodes]
            nodes = nodes + np.where(feature < 0, 0, np.where(left, 1, self.right[nodes]))
        leaves = self.threshold[nodes].astype(np.float64)
        if summed:
            return base + leaves.sum(axis=1), np.full(len(inputs), residual)
        return base + leaves.mean(axis=1), np.sqrt(leaves.var(axis=1) + residual**2)


@dataclass(frozen=True)
class PortableTrees(Trees):
    """Braun et al. (2020): trees with portable features only, without the operator's type and the card.

    The paper counts features in a kernel's instructions. Here they must be known before a call runs: tiles (blocks),
    elements (threads), operations, bytes, bytes of parameters and arithmetic intensity.
    """

    PORTABLE = ("tiles", "elements", "flops", "bytes_moved", "parameter_bytes", "flops_per_byte")

    def columns(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        return np.column_stack([inputs.column(name) for name in self.PORTABLE]).astype(np.float32)


def fit_trees(
    inputs: Inputs, values: Floats, estimator: str = "ExtraTreesRegressor", kind: type[Trees] = Trees, **settings: Any
) -> Trees:
    """Fit trees. ``estimator``: name of a class in `sklearn.ensemble`; ``settings``: its arguments."""
    needs_scikit_learn()
    from sklearn import ensemble

    none = [np.empty(0)] * 4
    unfitted = kind(*none, np.full(4, values.mean()), *_group_means(inputs, values))  # type: ignore[arg-type,call-arg]
    columns = unfitted.columns(inputs)
    fitted = getattr(ensemble, estimator)(random_state=0, **settings).fit(columns, values)
    boosted = hasattr(fitted, "learning_rate")
    nodes = [_nodes(tree.tree_, fitted.learning_rate if boosted else 1.0) for tree in np.ravel(fitted.estimators_)]
    feature, threshold, right = (np.concatenate(part) for part in zip(*nodes, strict=True))
    roots = np.cumsum([0, *(len(one[0]) for one in nodes[:-1])]).astype(np.int32)
    base = float(fitted.init_.constant_.ravel()[0]) if boosted else 0.0
    residual = float(np.std(values - fitted.predict(columns))) if boosted else LEAST_SPREAD
    about = np.array([base, boosted, residual, values.mean()])
    return dataclasses.replace(unfitted, roots=roots, feature=feature, threshold=threshold, right=right, settings=about)


def _nodes(tree: Any, rate: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Features, thresholds and right children of one tree (see `Trees`)."""
    leaf, places = tree.children_left < 0, np.arange(len(tree.children_left))
    if not (tree.children_left[~leaf] == places[~leaf] + 1).all():
        raise ValueError("the nodes of a tree have a wrong order: a left child must follow its parent")
    threshold = tree.threshold.astype(np.float32)
    above = threshold.astype(np.float64) > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    threshold[leaf] = rate * tree.value[leaf].ravel()
    right = np.where(leaf, 0, tree.children_right - places).astype(np.int32)
    return np.where(leaf, -1, tree.feature).astype(np.int16), threshold, right


def _group_means(inputs: Inputs, values: Floats) -> tuple[Names, Floats, Names, Floats]:
    """Return types with their means (shrunk towards the family's mean), and families with their means."""

    def shrunk(chosen: npt.NDArray[np.bool_], towards: float) -> float:
        return float((values[chosen].sum() + SHRINK * towards) / (chosen.sum() + SHRINK))

    families, types = np.unique(inputs.families), np.unique(inputs.types)
    of_family = {str(one): shrunk(inputs.families == one, float(values.mean())) for one in families}
    family_of = dict(zip(inputs.types, inputs.families, strict=True))
    means = [shrunk(inputs.types == one, of_family[str(family_of[one])]) for one in types]
    return types, np.array(means), families, np.array(list(of_family.values()))


@dataclass(frozen=True)
class Mean:
    """The mean of several regressors; of logarithms, the geometric mean. The spread includes their disagreement."""

    parts: tuple[FittedRegressor, ...]

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        values, spreads = np.array([part.predict(inputs) for part in self.parts]).swapaxes(0, 1)
        return values.mean(axis=0), np.hypot(spreads.mean(axis=0), values.std(axis=0))


def fit_mean(inputs: Inputs, values: Floats, regressors: Sequence[Regressor]) -> Mean:
    return Mean(tuple(fit(inputs, values) for fit in regressors))
