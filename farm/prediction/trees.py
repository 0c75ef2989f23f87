"""Forests: extra trees, random forests and boosted trees, fitted by scikit-learn and kept as arrays that NumPy walks.

Trees ask for features and, beside them, for the operator's family and the mean of its type. A threshold is kept as the
largest float32 that is not above it, which parts float32 features as the threshold itself does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from farm.prediction.features import NAMES
from farm.prediction.regressor import Arrays, Floats, Inputs, needs_scikit_learn

SHRINK = 3.0  # readings that the family's mean counts as, beside those of the type


@dataclass(frozen=True)
class Coding:
    """Types and families as numbers: the mean of a type's values, drawn towards its family's, and a column for each family."""

    types: npt.NDArray[np.str_]
    type_means: Floats
    families: npt.NDArray[np.str_]
    family_means: Floats
    mean: float

    @classmethod
    def of(cls, inputs: Inputs, values: Floats) -> Coding:
        mean = float(values.mean())
        families = np.unique(inputs.families)
        of_family = {str(family): _shrunk(values[inputs.families == family], mean) for family in families}
        types = np.unique(inputs.types)
        family_of = dict(zip(inputs.types, inputs.families, strict=True))
        means = [_shrunk(values[inputs.types == one], of_family[str(family_of[one])]) for one in types]
        return cls(types, np.array(means), families, np.array(list(of_family.values())), mean)

    def columns(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """The features, the mean of the type, then the families. Shape: calls x (features + 1 + families)."""
        types, families = (
            dict(zip(self.types, self.type_means, strict=True)),
            dict(zip(self.families, self.family_means, strict=True)),
        )
        means = [
            types.get(one, families.get(family, self.mean))
            for one, family in zip(inputs.types, inputs.families, strict=True)
        ]
        of_family = inputs.families[:, None] == self.families[None, :]
        return np.column_stack([inputs.numbers, np.array(means, dtype=float), of_family]).astype(np.float32)

    def names(self) -> list[str]:
        return [*NAMES, "operator type", *(f"is {family}" for family in self.families)]


def _shrunk(values: Floats, towards: float) -> float:
    return float((values.sum() + SHRINK * towards) / (len(values) + SHRINK))


@dataclass(frozen=True)
class Forest:
    """Trees one behind the other. A node's left child is the next one; a leaf has no feature (-1) and holds a value.

    The answer is `base` and the mean of the trees; of boosted trees their sum, whose spread is `residual`.
    """

    coding: Coding
    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int16]
    threshold: npt.NDArray[np.float32]  # of a leaf: its value
    right: npt.NDArray[np.int32]
    base: float
    summed: bool
    residual: float

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        leaves = self._leaves(self.coding.columns(inputs))
        if self.summed:
            return self.base + leaves.sum(axis=1), np.full(len(inputs), self.residual)
        spread = np.sqrt(leaves.var(axis=1) + self.residual**2)
        return self.base + leaves.mean(axis=1), spread

    def _leaves(self, columns: npt.NDArray[np.float32]) -> Floats:
        """The value of each tree's leaf. Shape: calls x trees."""
        rows = np.arange(len(columns))[:, None]
        nodes = np.broadcast_to(self.roots, (len(columns), len(self.roots))).copy()
        while True:
            feature = self.feature[nodes]
            if (feature < 0).all():
                return self.threshold[nodes].astype(np.float64)
            left = columns[rows, feature] <= self.threshold[nodes]
            nodes = np.where(feature < 0, nodes, np.where(left, nodes + 1, self.right[nodes])).astype(np.int32)

    def arrays(self) -> Arrays:
        leaf, places = self.feature < 0, np.arange(len(self.feature), dtype=np.int32)
        return {
            "roots": self.roots,
            "feature": self.feature,
            "threshold": self.threshold,
            "right": np.where(leaf, 0, self.right - places),  # by how much further it is, which packs better
            "settings": np.array([self.base, self.summed, self.residual, self.coding.mean]),
            "types": self.coding.types,
            "type_means": self.coding.type_means,
            "families": self.coding.families,
            "family_means": self.coding.family_means,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Forest:
        base, summed, residual, mean = map(float, arrays["settings"])
        coding = Coding(arrays["types"], arrays["type_means"], arrays["families"], arrays["family_means"], mean)
        right = (arrays["right"] + np.arange(len(arrays["right"]))).astype(np.int32)
        nodes = (arrays["roots"], arrays["feature"], arrays["threshold"], right)
        return cls(coding, *nodes, base, bool(summed), residual)

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        """The features that most splits on the way of this call ask for."""
        columns = self.coding.columns(inputs)[place : place + 1]
        asked: dict[str, int] = {}
        names = self.coding.names()
        for root in self.roots:
            node = int(root)
            while self.feature[node] >= 0:
                name = names[self.feature[node]]
                asked[name] = asked.get(name, 0) + 1
                goes_left = columns[0, self.feature[node]] <= self.threshold[node]
                node = node + 1 if goes_left else int(self.right[node])
        most = sorted(asked, key=lambda name: -asked[name])[:5]
        return [f"asked most of {', '.join(most)}"] if most else []


@dataclass(frozen=True)
class ForestOf:
    """Fits a forest. `kind`: extra trees, a random forest, or boosted trees."""

    kind: Literal["extra", "random", "boosted"] = "extra"
    trees: int = 100
    least_in_leaf: int = 1
    features: float = 1.0  # share of them that a split chooses from
    depth: int | None = None
    rate: float = 0.05  # of boosting
    seed: int = 0

    def fit(self, inputs: Inputs, values: Floats) -> Forest:
        coding = Coding.of(inputs, values)
        columns = coding.columns(inputs)
        fitted = self.fitted(columns, values)
        boosted = self.kind == "boosted"
        trees = [one[0] for one in fitted.estimators_] if boosted else fitted.estimators_
        base = float(fitted.init_.constant_.ravel()[0]) if boosted else 0.0
        nodes = [_nodes(tree.tree_, self.rate if boosted else 1.0) for tree in trees]
        begins = np.cumsum([0, *(len(one[0]) for one in nodes[:-1])])
        residual = float(np.std(values - fitted.predict(columns))) if boosted else 0.02
        return Forest(
            coding,
            begins.astype(np.int32),
            np.concatenate([one[0] for one in nodes]),
            np.concatenate([one[1] for one in nodes]),
            np.concatenate([one[2] + begin for one, begin in zip(nodes, begins, strict=True)]).astype(np.int32),
            base,
            boosted,
            residual,
        )

    def fitted(self, columns: npt.NDArray[np.float32], values: Floats) -> Any:
        """scikit-learn's own."""
        needs_scikit_learn()
        from sklearn import ensemble

        common: dict[str, Any] = {
            "n_estimators": self.trees,
            "min_samples_leaf": self.least_in_leaf,
            "random_state": self.seed,
        }
        common |= {"max_features": self.features, "max_depth": self.depth}
        if self.kind == "extra":
            return ensemble.ExtraTreesRegressor(n_jobs=-1, **common).fit(columns, values)
        if self.kind == "random":
            return ensemble.RandomForestRegressor(n_jobs=-1, **common).fit(columns, values)
        boosting = ensemble.GradientBoostingRegressor(learning_rate=self.rate, subsample=0.7, **common)
        return boosting.fit(columns, values)


def _nodes(tree: Any, rate: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Features, thresholds (of leaves values) and right children of one tree, whose left children follow their parents."""
    leaf = tree.children_left < 0
    threshold = tree.threshold.astype(np.float32)
    above = threshold.astype(np.float64) > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    threshold[leaf] = rate * tree.value[leaf].ravel()
    if not (tree.children_left[~leaf] == np.flatnonzero(~leaf) + 1).all():
        raise ValueError("a tree's left children do not follow their parents")
    feature = np.where(leaf, -1, tree.feature).astype(np.int16)
    return feature, threshold, np.where(leaf, 0, tree.children_right).astype(np.int32)
