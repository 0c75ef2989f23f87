"""Several regressors of one number, and the weighed mean of what they say: of logarithms, so the geometric mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farm.prediction.regressor import Arrays, Floats, Inputs, Learnt, Regressor, named


@dataclass(frozen=True)
class Blend:
    parts: tuple[Learnt, ...]
    weights: Floats  # of the parts, their sum 1

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """The spread is the parts' own, and what they disagree by."""
        said = [part.predict(inputs) for part in self.parts]
        values, spreads = np.array([one[0] for one in said]), np.array([one[1] for one in said])
        middle = self.weights @ values
        apart = np.sqrt(self.weights @ (values - middle) ** 2)
        return middle, np.hypot(self.weights @ spreads, apart)

    def arrays(self) -> Arrays:
        kept: Arrays = {"weights": self.weights}
        for number, one in enumerate(self.parts):
            kept |= named(str(number), one.arrays())
        return kept

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        return [line for one in self.parts for line in one.explain(inputs, place)]


@dataclass(frozen=True)
class BlendOf:
    """`weights`: how often each counts."""

    regressors: Sequence[Regressor]
    weights: Sequence[float]

    def fit(self, inputs: Inputs, values: Floats) -> Blend:
        weights = np.array(self.weights, dtype=float)
        return Blend(tuple(one.fit(inputs, values) for one in self.regressors), weights / weights.sum())
