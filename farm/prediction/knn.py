"""Nearest neighbours: the readings of the same family that are nearest in size, weighed by how near they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farm.prediction.regressor import Arrays, Floats, Inputs

COUNT = 5
OTHER_TYPE = 1.0  # distance, in standard deviations of a feature, that another type of the same family is away
OTHER_FAMILY = 8.0


@dataclass(frozen=True)
class Neighbours:
    means: Floats
    deviations: Floats
    at: Floats
    types: npt.NDArray[np.str_]
    families: npt.NDArray[np.str_]
    values: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        found, spreads = np.empty(len(inputs)), np.empty(len(inputs))
        for row in range(len(inputs)):
            nearest, distance = self._nearest(inputs, row)
            weights = 1 / (distance + 0.05)
            weights /= weights.sum()
            values = self.values[nearest]
            found[row] = weights @ values
            spreads[row] = np.sqrt(weights @ (values - found[row]) ** 2 + (0.02 + 0.05 * distance[0]) ** 2)
        return found, spreads

    def _nearest(self, inputs: Inputs, row: int) -> tuple[npt.NDArray[np.intp], Floats]:
        apart = (((inputs.numbers[row] - self.means) / self.deviations - self.at) ** 2).sum(axis=1)
        apart = apart + OTHER_TYPE**2 * (self.types != inputs.types[row])
        apart = np.sqrt(apart + OTHER_FAMILY**2 * (self.families != inputs.families[row]))
        nearest = np.argsort(apart, kind="stable")[:COUNT]
        return nearest, apart[nearest]

    def arrays(self) -> Arrays:
        return {name: getattr(self, name) for name in ("means", "deviations", "at", "types", "families", "values")}

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        nearest, distance = self._nearest(inputs, place)
        names = ", ".join(
            f"{self.types[one]} at {away:.2g}" for one, away in zip(nearest[:3], distance[:3], strict=True)
        )
        return [f"the nearest readings are {names} standard deviations"]


@dataclass(frozen=True)
class NeighboursOf:
    def fit(self, inputs: Inputs, values: Floats) -> Neighbours:
        deviations = inputs.numbers.std(axis=0)
        deviations = np.where(deviations < 1e-9, 1.0, deviations)
        means = inputs.numbers.mean(axis=0)
        return Neighbours(
            means, deviations, (inputs.numbers - means) / deviations, inputs.types, inputs.families, values
        )
