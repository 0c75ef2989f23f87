"""Regressors: each predicts one number of a call from its features and stores its state as arrays.

A regressor is a function `fit_...(inputs, values)` that returns a frozen dataclass with `predict`.
The fields of the dataclass are the stored arrays (`farm.addons.predict.predictors`), so stored
predictors are never unpickled. scikit-learn fits trees; NumPy alone evaluates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from farm.addons.predict.call_features import CallDescription, numbers_of
from farm.errors import needing

Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]
Booleans = npt.NDArray[np.bool_]


def squared_distances(points: Floats, others: Floats) -> Floats:
    """Squared distances of rows. Shape: ... x points x others."""
    lengths = (points**2).sum(axis=-1)[..., :, None]
    other_lengths = (others**2).sum(axis=-1)[..., None, :]
    products = points @ np.swapaxes(others, -1, -2)
    return lengths + other_lengths - 2 * products  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Inputs:
    """The input of regressors: for each call its features (`numbers`), operator type and operator
    family.
    """

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

    def column(self, field: Callable[[CallDescription], float | None]) -> Floats:
        """Return a field of each call, such as `lambda call: call.rows`."""
        return np.array([field(call) for call in self.calls], dtype=float)

    @property
    def roofline_us(self) -> Floats:
        return self.column(lambda call: call.roofline_us)

    @property
    def tile_roofline_us(self) -> Floats:
        return self.column(lambda call: call.tile_roofline_us)

    def at(self, positions: npt.NDArray[np.intp]) -> Inputs:
        calls = tuple(self.calls[position] for position in positions)
        return Inputs(
            calls, self.numbers[positions], self.types[positions], self.families[positions]
        )


def with_times(inputs: Inputs, times_us: Floats) -> Inputs:
    """Add four features for the prediction of power.

    They are the logarithm of each call's time, the logarithm of time / tile roofline, and the
    estimated times of arithmetic and of memory traffic as shares of the time. A kernel that is
    slower than its roofline draws less power."""
    features = [
        inputs.numbers,
        np.log2(times_us),
        np.log2(times_us / inputs.tile_roofline_us),
        inputs.column(lambda call: call.compute_us) / times_us,
        inputs.column(lambda call: call.traffic_us) / times_us,
    ]
    return dataclasses.replace(inputs, numbers=np.column_stack(features))


class FittedRegressor(Protocol):
    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """Return the value of each call and its spread: a standard deviation before calibration."""


#: Fits a regressor to one value for each call.
Regressor = Callable[[Inputs, Floats], FittedRegressor]


def needs_scikit_learn() -> None:
    """Raises `UsageError` if scikit-learn is not installed."""
    others = "; the predictors of the package do not need it"
    with needing("Fitting predictors needs scikit-learn", "prediction", others):
        import sklearn  # noqa: F401


LEAST_SPREAD = 0.02


@dataclass(frozen=True)
class PlainRoofline:
    """The card's peaks: log(roofline / tile roofline), with one spread for all calls."""

    spread: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        values = np.log(inputs.roofline_us / inputs.tile_roofline_us)
        return values, np.full(len(inputs), self.spread)


def fit_roofline(inputs: Inputs, values: Floats) -> PlainRoofline:
    """``values``: log(time / tile roofline). Only the spread is learned."""
    errors = values - PlainRoofline(np.zeros(())).predict(inputs)[0]
    return PlainRoofline(np.array(max(float(np.sqrt(np.mean(errors**2))), LEAST_SPREAD)))


@dataclass(frozen=True)
class Medians:
    """The median and spread of each operator type and family; the name "" means all readings.

    This regressor is the fallback for operator families without a reading.
    """

    names: Names  # type:relu, family:pointwise, or ""
    medians: Floats
    spreads: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        position_of = {str(name): position for position, name in enumerate(self.names)}
        positions = []
        for operator_type, family in zip(inputs.types, inputs.families, strict=True):
            of_family = position_of.get(f"family:{family}", position_of[""])
            positions.append(position_of.get(f"type:{operator_type}", of_family))
        return self.medians[positions], self.spreads[positions]


LEAST_FOR_MEDIAN = 3  # least number of readings of a type or family


def fit_median(inputs: Inputs, values: Floats) -> Medians:
    """Fit one median of all readings."""
    return _medians({"": values})


def fit_medians(inputs: Inputs, values: Floats) -> Medians:
    """Fit medians of all readings, and of each type and family with enough readings."""
    groups = {"": values}
    for kind, names in (("type", inputs.types), ("family", inputs.families)):
        for name in np.unique(names):
            group = values[names == name]
            if len(group) >= LEAST_FOR_MEDIAN:
                groups[f"{kind}:{name}"] = group
    return _medians(groups)


def _medians(groups: dict[str, Floats]) -> Medians:
    medians = []
    spreads = []
    for group in groups.values():
        median = float(np.median(group))
        medians.append(median)
        # 1.4826 x the median absolute deviation is the standard deviation of a normal distribution.
        spreads.append(1.4826 * float(np.median(np.abs(group - median))))

    least = max(0.25 * spreads[0], LEAST_SPREAD)
    names = np.array(list(groups), dtype=np.str_)
    return Medians(names, np.array(medians), np.maximum(spreads, least))


def fit_zero(inputs: Inputs, values: Floats) -> Medians:
    """Return a regressor that predicts 0 for every call."""
    spread = max(float(np.sqrt(np.mean(values**2))), LEAST_SPREAD)
    return Medians(np.array([""]), np.zeros(1), np.array([spread]))


SHRINK = 3.0  # weight of the family's mean, in readings of the type


@dataclass(frozen=True)
class Trees:
    """Trees of scikit-learn in joined arrays. The left child of a node is the next node; a leaf has
    the feature -1.

    The columns are the features, the mean of the operator's type (shrunk towards the mean of its
    family), and one column for each family. Thresholds are rounded down to float32, which splits
    float32 columns in the same way. The threshold of a leaf is its value."""

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int16]
    threshold: npt.NDArray[np.float32]
    #: Index of the right child - index of the node, which compresses well.
    right: npt.NDArray[np.int32]
    settings: Floats  # 0, 0 (of a former kind of trees), least spread, mean of the values
    types: Names
    type_means: Floats
    families: Names
    family_means: Floats

    def columns(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Shape: calls x (features + 1 + families)."""
        mean = self.settings[3]
        mean_of_family = dict(zip(self.families, self.family_means, strict=True))
        mean_of_type = dict(zip(self.types, self.type_means, strict=True))
        means = np.empty(len(inputs))
        for position, operator_type in enumerate(inputs.types):
            of_family = mean_of_family.get(inputs.families[position], mean)
            means[position] = mean_of_type.get(operator_type, of_family)

        is_family = inputs.families[:, None] == self.families[None, :]
        return np.column_stack([inputs.numbers, means, is_family]).astype(np.float32)

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        columns = self.columns(inputs)
        rows = np.arange(len(inputs))[:, None]
        shape = len(inputs), len(self.roots)
        nodes = np.broadcast_to(self.roots, shape).astype(np.int32)
        feature = self.feature[nodes]
        while (feature >= 0).any():
            is_left = columns[rows, feature] <= self.threshold[nodes]
            step = np.where(is_left, 1, self.right[nodes])
            nodes = nodes + np.where(feature < 0, 0, step)
            feature = self.feature[nodes]

        leaves = self.threshold[nodes].astype(np.float64)
        least_spread = self.settings[2]
        return leaves.mean(axis=1), np.sqrt(leaves.var(axis=1) + least_spread**2)


def fit_trees(inputs: Inputs, values: Floats, *, trees: int, least_leaf: int = 1) -> Trees:
    """Fit extra trees. ``least_leaf``: least number of readings in a leaf."""
    needs_scikit_learn()
    from sklearn.ensemble import ExtraTreesRegressor

    types, type_means, families, family_means = _group_means(inputs, values)
    no_nodes: Any = np.empty(0)
    unfitted = Trees(
        roots=no_nodes,
        feature=no_nodes,
        threshold=no_nodes,
        right=no_nodes,
        settings=np.array([0.0, 0.0, LEAST_SPREAD, values.mean()]),
        types=types,
        type_means=type_means,
        families=families,
        family_means=family_means,
    )
    estimator = ExtraTreesRegressor(trees, min_samples_leaf=least_leaf, random_state=0, n_jobs=-1)
    estimator.fit(unfitted.columns(inputs), values)

    nodes = [_nodes(tree.tree_) for tree in estimator.estimators_]
    feature, threshold, right = (np.concatenate(part) for part in zip(*nodes, strict=True))
    sizes = [len(features) for features, _, _ in nodes]
    roots = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    return dataclasses.replace(
        unfitted, roots=roots, feature=feature, threshold=threshold, right=right
    )


def _nodes(tree: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Features, thresholds and right children of one tree (see `Trees`)."""
    positions = np.arange(len(tree.children_left))
    is_leaf = tree.children_left < 0
    if not (tree.children_left[~is_leaf] == positions[~is_leaf] + 1).all():
        raise ValueError(
            "the nodes of a tree have a wrong order: a left child must follow its parent"
        )

    threshold = tree.threshold.astype(np.float32)
    above = threshold.astype(np.float64) > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    threshold[is_leaf] = tree.value[is_leaf].ravel()
    right = np.where(is_leaf, 0, tree.children_right - positions).astype(np.int32)
    return np.where(is_leaf, -1, tree.feature).astype(np.int16), threshold, right


def _group_means(inputs: Inputs, values: Floats) -> tuple[Names, Floats, Names, Floats]:
    """Return types with their means (shrunk towards the family's mean), and families with their
    means.
    """

    def shrunk(chosen: Booleans, towards: float) -> float:
        return float((values[chosen].sum() + SHRINK * towards) / (chosen.sum() + SHRINK))

    mean = float(values.mean())
    families = np.unique(inputs.families)
    family_means = {family: shrunk(inputs.families == family, mean) for family in families}

    types = np.unique(inputs.types)
    family_of = dict(zip(inputs.types, inputs.families, strict=True))
    type_means = []
    for operator_type in types:
        family_mean = family_means[family_of[operator_type]]
        type_means.append(shrunk(inputs.types == operator_type, family_mean))
    return types, np.array(type_means), families, np.array(list(family_means.values()))


@dataclass(frozen=True)
class Mean:
    """The mean of several regressors; of logarithms, the geometric mean. The spread includes their
    disagreement.
    """

    parts: tuple[FittedRegressor, ...]

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        values, spreads = np.array([part.predict(inputs) for part in self.parts]).swapaxes(0, 1)
        return values.mean(axis=0), np.hypot(spreads.mean(axis=0), values.std(axis=0))


def fit_mean(inputs: Inputs, values: Floats, regressors: Sequence[Regressor]) -> Mean:
    return Mean(tuple(fit(inputs, values) for fit in regressors))
