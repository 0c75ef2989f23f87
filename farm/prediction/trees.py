"""Trees: extra trees, random forests and boosted trees, fitted by scikit-learn, stored as arrays and evaluated by
NumPy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.prediction.call_features import NAMES
from farm.prediction.regressors import LEAST_SPREAD, Floats, Inputs, Names, needs_scikit_learn

SHRINK = 3.0  # the family's mean counts as so many readings beside those of the type


@dataclass(frozen=True)
class Trees:
    """Trees of scikit-learn, one after the other. The left child of a node is the next one; a leaf has the feature -1.

    Their columns are the features, the mean of the operator's type (drawn towards the mean of its family), and a
    column for each family. A threshold is stored as the largest float32 that is not above it, which splits float32
    columns in the same way; that of a leaf is its value.
    """

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int16]
    threshold: npt.NDArray[np.float32]
    right: npt.NDArray[np.int32]  # how many nodes further the right child is, which packs better than its place
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
        leaves = self._leaves(self.columns(inputs))
        if summed:
            return base + leaves.sum(axis=1), np.full(len(inputs), residual)
        return base + leaves.mean(axis=1), np.sqrt(leaves.var(axis=1) + residual**2)

    def _leaves(self, columns: npt.NDArray[np.float32]) -> Floats:
        """The value of each tree's leaf. Shape: calls x trees."""
        rows = np.arange(len(columns))[:, None]
        nodes = np.broadcast_to(self.roots, (len(columns), len(self.roots))).astype(np.int32)
        while True:
            feature = self.feature[nodes]
            if (feature < 0).all():
                return self.threshold[nodes].astype(np.float64)
            left = columns[rows, feature] <= self.threshold[nodes]
            nodes = nodes + np.where(feature < 0, 0, np.where(left, 1, self.right[nodes]))

    def explain(self, inputs: Inputs) -> list[str]:
        """The features that most splits on the path of the call compare."""
        (columns, *_), counts = self.columns(inputs), dict[int, int]()
        for node in map(int, self.roots):
            while (feature := int(self.feature[node])) >= 0:
                counts[feature] = counts.get(feature, 0) + 1
                node += 1 if columns[feature] <= self.threshold[node] else int(self.right[node])
        names = [*NAMES, "operator type", *(f"is {family}" for family in self.families)]
        most = sorted(counts, key=lambda feature: -counts[feature])[:5]
        return [f"most splits compare {', '.join(names[one] for one in most)}"] if most else []


@dataclass(frozen=True)
class PortableTrees(Trees):
    """Braun et al. (2020): trees of portable features alone; neither the operator's type nor the card is known.

    Theirs are counted from a kernel's instructions. Known before a call runs are its tiles (blocks), elements
    (threads), operations, bytes, bytes of parameters and arithmetic intensity.
    """

    PORTABLE = ("tiles", "elements", "flops", "bytes_moved", "parameter_bytes", "flops_per_byte")

    def columns(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        return np.column_stack([inputs.column(name) for name in self.PORTABLE]).astype(np.float32)

    def explain(self, inputs: Inputs) -> list[str]:
        return [f"features: {', '.join(self.PORTABLE)}"]


def fit_trees(
    inputs: Inputs, values: Floats, estimator: str = "ExtraTreesRegressor", kind: type[Trees] = Trees, **settings: Any
) -> Trees:
    """
    Args:
        estimator: the class of `sklearn.ensemble`.
        settings: its arguments.
    """
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
        raise ValueError("a tree's left children do not follow their parents")
    threshold = tree.threshold.astype(np.float32)
    above = threshold.astype(np.float64) > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    threshold[leaf] = rate * tree.value[leaf].ravel()
    right = np.where(leaf, 0, tree.children_right - places).astype(np.int32)
    return np.where(leaf, -1, tree.feature).astype(np.int16), threshold, right


def _group_means(inputs: Inputs, values: Floats) -> tuple[Names, Floats, Names, Floats]:
    """Types with their means, each drawn towards that of its family, and families with theirs."""

    def shrunk(chosen: npt.NDArray[np.bool_], towards: float) -> float:
        return float((values[chosen].sum() + SHRINK * towards) / (chosen.sum() + SHRINK))

    families, types = np.unique(inputs.families), np.unique(inputs.types)
    of_family = {str(one): shrunk(inputs.families == one, float(values.mean())) for one in families}
    family_of = dict(zip(inputs.types, inputs.families, strict=True))
    means = [shrunk(inputs.types == one, of_family[str(family_of[one])]) for one in types]
    return types, np.array(means), families, np.array(list(of_family.values()))
