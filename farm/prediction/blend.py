"""Several regressors of one number, and the mean of what they say: of logarithms, so the geometric mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farm.prediction.regressor import Arrays, Floats, Inputs, Learnt, Regressor, named


@dataclass(frozen=True)
class Blend:
    parts: tuple[Learnt, ...]

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """The spread is the parts' own, and what they disagree by."""
        said = [part.predict(inputs) for part in self.parts]
        values, spreads = np.array([one[0] for one in said]), np.array([one[1] for one in said])
        middle = values.mean(axis=0)
        apart = values.std(axis=0)
        return middle, np.hypot(spreads.mean(axis=0), apart)

    def arrays(self) -> Arrays:
        kept: Arrays = {}
        for number, one in enumerate(self.parts):
            kept |= named(str(number), one.arrays())
        return kept

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        return [line for one in self.parts for line in one.explain(inputs, place)]


@dataclass(frozen=True)
class BlendOf:
    regressors: Sequence[Regressor]

    def fit(self, inputs: Inputs, values: Floats) -> Blend:
        return Blend(tuple(one.fit(inputs, values) for one in self.regressors))
