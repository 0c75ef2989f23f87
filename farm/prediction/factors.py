"""Roofline x family: the median of what an operator type, or else its family, takes over what it should.

The baseline, and the answer for operator types that no reading is of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farm.prediction.regressor import Arrays, Floats, Inputs

LEAST = 3  # readings that a factor of its own takes


@dataclass(frozen=True)
class Factors:
    """Medians and the spread around them (1.4826 x the median deviation), by type and by family; "" stands for all."""

    names: npt.NDArray[np.str_]  # type:relu, family:pointwise, or ""
    medians: Floats
    spreads: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        place = {str(name): index for index, name in enumerate(self.names)}
        at = np.array(
            [
                place.get(f"type:{one}", place.get(f"family:{family}", place[""]))
                for one, family in zip(inputs.types, inputs.families, strict=True)
            ],
            dtype=np.intp,
        )
        return self.medians[at], self.spreads[at]

    def arrays(self) -> Arrays:
        return {"names": self.names, "medians": self.medians, "spreads": self.spreads}

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        known = {str(name) for name in self.names}
        one, family = inputs.types[place], inputs.families[place]
        of = f"type {one}" if f"type:{one}" in known else f"family {family}" if f"family:{family}" in known else "all"
        return [f"the median of {of}: x {np.exp(self.predict(inputs)[0][place]):.3g}"]


@dataclass(frozen=True)
class FactorsOf:
    """Fits factors.

    `by_type` and `by_family` False leave types and families aside: one factor of all. `at_all` False is none: the roofline.
    """

    by_type: bool = True
    by_family: bool = True
    at_all: bool = True

    def fit(self, inputs: Inputs, values: Floats) -> Factors:
        groups: dict[str, list[float]] = {"": list(values)}
        if not self.at_all:
            wide = max(float(np.sqrt(np.mean(values**2))), 0.02)
            return Factors(np.array([""]), np.zeros(1), np.array([wide]))
        for one, family, value in zip(inputs.types, inputs.families, values, strict=True):
            if self.by_type:
                groups.setdefault(f"type:{one}", []).append(value)
            if self.by_family:
                groups.setdefault(f"family:{family}", []).append(value)
        kept = {name: found for name, found in groups.items() if not name or len(found) >= LEAST}
        medians = np.array([np.median(found) for found in kept.values()])
        everywhere = 1.4826 * float(np.median(np.abs(values - np.median(values))))
        spreads = [
            max(1.4826 * float(np.median(np.abs(np.array(found) - middle))), 0.25 * everywhere, 0.02)
            for found, middle in zip(kept.values(), medians, strict=True)
        ]
        return Factors(np.array(list(kept), dtype=np.str_), medians, np.array(spreads))
