"""Regressors: each predicts one number of a call from its features and stores its state as arrays.

A regressor is a function `fit_...(inputs, values)` that returns a frozen dataclass with `predict`.
The fields of the dataclass are the stored arrays (`farm.addons.predict.predictors`), so stored
predictors are never unpickled. scikit-learn fits lassos and trees; NumPy alone evaluates them."""

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


def squared_distances(points: Floats, others: Floats) -> Floats:
    """Squared distances of rows. Shape: ... x points x others."""
    own, their = (points**2).sum(axis=-1), (others**2).sum(axis=-1)
    return own[..., :, None] + their[..., None, :] - 2 * points @ np.swapaxes(others, -1, -2)  # type: ignore[no-any-return]


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

    def column(self, name: str) -> Floats:
        return np.array([getattr(call, name) for call in self.calls], dtype=float)

    def at(self, places: npt.NDArray[np.intp]) -> Inputs:
        calls = tuple(self.calls[place] for place in places)
        return Inputs(calls, self.numbers[places], self.types[places], self.families[places])


def with_times(inputs: Inputs, times_us: Floats) -> Inputs:
    """Add four features for the prediction of power.

    They are the logarithm of each call's time, the logarithm of time / tile roofline, and the
    estimated times of arithmetic and of memory traffic as shares of the time. A kernel that is
    slower than its roofline draws less power."""
    shares = [inputs.column(name) / times_us for name in ("compute_us", "traffic_us")]
    busy = [np.log2(times_us), np.log2(times_us / inputs.column("tile_roofline_us")), *shares]
    return dataclasses.replace(inputs, numbers=np.column_stack([inputs.numbers, *busy]))


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


@dataclass(frozen=True)
class Medians:
    """The median and spread of each operator type and family; the name "" means all readings.

    This regressor is the baseline, and the fallback for operator families without a reading.
    """

    names: Names  # type:relu, family:pointwise, or ""
    medians: Floats
    spreads: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        known = {str(name): place for place, name in enumerate(self.names)}
        groups = zip(inputs.types, inputs.families, strict=True)
        places = [
            known.get(f"type:{one}", known.get(f"family:{family}", known[""]))
            for one, family in groups
        ]
        return self.medians[places], self.spreads[places]


LEAST_FOR_MEDIAN = 3  # least number of readings of a type or family
LEAST_SPREAD = 0.02


def fit_medians(inputs: Inputs, values: Floats, grouped: bool = True) -> Medians:
    """Fit medians. ``grouped=False``: only one median of all readings."""
    groups = {"": values}
    for kind, names in (("type", inputs.types), ("family", inputs.families)) if grouped else ():
        groups |= {f"{kind}:{name}": values[names == name] for name in np.unique(names)}
    groups = {
        name: found for name, found in groups.items() if not name or len(found) >= LEAST_FOR_MEDIAN
    }
    medians = [float(np.median(found)) for found in groups.values()]
    # 1.4826 x the median absolute deviation is the standard deviation of a normal distribution.
    spreads = [
        1.4826 * float(np.median(np.abs(found - np.median(found)))) for found in groups.values()
    ]
    least = max(0.25 * spreads[0], LEAST_SPREAD)
    return Medians(
        np.array(list(groups), dtype=np.str_), np.array(medians), np.maximum(spreads, least)
    )


def fit_zero(inputs: Inputs, values: Floats) -> Medians:
    """Return a regressor that predicts 0 for every call.

    The predicted value is the logarithm of measured time / roofline, so the predicted time is the
    roofline."""
    return Medians(
        np.array([""]),
        np.zeros(1),
        np.array([max(float(np.sqrt(np.mean(values**2))), LEAST_SPREAD)]),
    )


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
    right: npt.NDArray[
        np.int32
    ]  # index of the right child - index of the node, which compresses well
    # base value, 1 if the values of trees are added (boosting), residual, mean of the values
    settings: Floats
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
        return np.column_stack([inputs.numbers, np.array(means, dtype=float), is_family]).astype(
            np.float32
        )

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        base, summed, residual, _ = self.settings
        columns, rows = self.columns(inputs), np.arange(len(inputs))[:, None]
        nodes = np.broadcast_to(self.roots, (len(inputs), len(self.roots))).astype(
            np.int32
        )  # calls x trees
        while ((feature := self.feature[nodes]) >= 0).any():
            left = columns[rows, feature] <= self.threshold[nodes]
            nodes = nodes + np.where(feature < 0, 0, np.where(left, 1, self.right[nodes]))
        leaves = self.threshold[nodes].astype(np.float64)
        if summed:
            return base + leaves.sum(axis=1), np.full(len(inputs), residual)
        return base + leaves.mean(axis=1), np.sqrt(leaves.var(axis=1) + residual**2)


def fit_trees(
    inputs: Inputs,
    values: Floats,
    estimator: str = "ExtraTreesRegressor",
    kind: type[Trees] = Trees,
    **settings: Any,
) -> Trees:
    """Fit trees. ``estimator``: name of a class in `sklearn.ensemble`; ``settings``: its
    arguments.
    """
    needs_scikit_learn()
    from sklearn import ensemble

    none = [np.empty(0)] * 4
    unfitted = kind(*none, np.full(4, values.mean()), *_group_means(inputs, values))  # type: ignore[arg-type,call-arg]
    columns = unfitted.columns(inputs)
    fitted = getattr(ensemble, estimator)(random_state=0, **settings).fit(columns, values)
    boosted = hasattr(fitted, "learning_rate")
    nodes = [
        _nodes(tree.tree_, fitted.learning_rate if boosted else 1.0)
        for tree in np.ravel(fitted.estimators_)
    ]
    feature, threshold, right = (np.concatenate(part) for part in zip(*nodes, strict=True))
    roots = np.cumsum([0, *(len(one[0]) for one in nodes[:-1])]).astype(np.int32)
    base = float(fitted.init_.constant_.ravel()[0]) if boosted else 0.0
    residual = float(np.std(values - fitted.predict(columns))) if boosted else LEAST_SPREAD
    about = np.array([base, boosted, residual, values.mean()])
    return dataclasses.replace(
        unfitted, roots=roots, feature=feature, threshold=threshold, right=right, settings=about
    )


def _nodes(tree: Any, rate: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Features, thresholds and right children of one tree (see `Trees`)."""
    leaf, places = tree.children_left < 0, np.arange(len(tree.children_left))
    if not (tree.children_left[~leaf] == places[~leaf] + 1).all():
        raise ValueError(
            "the nodes of a tree have a wrong order: a left child must follow its parent"
        )
    threshold = tree.threshold.astype(np.float32)
    above = threshold.astype(np.float64) > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    threshold[leaf] = rate * tree.value[leaf].ravel()
    right = np.where(leaf, 0, tree.children_right - places).astype(np.int32)
    return np.where(leaf, -1, tree.feature).astype(np.int16), threshold, right


def _group_means(inputs: Inputs, values: Floats) -> tuple[Names, Floats, Names, Floats]:
    """Return types with their means (shrunk towards the family's mean), and families with their
    means.
    """

    def shrunk(chosen: npt.NDArray[np.bool_], towards: float) -> float:
        return float((values[chosen].sum() + SHRINK * towards) / (chosen.sum() + SHRINK))

    families, types = np.unique(inputs.families), np.unique(inputs.types)
    of_family = {str(one): shrunk(inputs.families == one, float(values.mean())) for one in families}
    family_of = dict(zip(inputs.types, inputs.families, strict=True))
    means = [shrunk(inputs.types == one, of_family[str(family_of[one])]) for one in types]
    return types, np.array(means), families, np.array(list(of_family.values()))


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
