"""Braun et al. (2020): a random forest on portable features of a kernel, raw time and raw power as targets.

Theirs are counted from a kernel's instructions: threads and blocks launched, operations by kind, bytes of global, shared and
parameter memory, arithmetic intensity. Of an operator that was never run these are known: the tiles (blocks) that it is cut into,
elements (threads), operations, bytes, bytes of its parameters and the intensity. Neither the type nor the card is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.prediction.regressor import Arrays, Floats, Inputs
from farm.prediction.trees import Forest, ForestOf

PORTABLE = ("blocks", "threads", "operations", "bytes", "parameter bytes", "intensity")


def _portable(inputs: Inputs) -> Inputs:
    numbers = np.array(
        [
            [call.tiles, call.elements, call.flops, call.bytes_moved, call.parameter_bytes, call.flops_per_byte]
            for call in inputs.calls
        ],
        dtype=np.float64,
    ).reshape(len(inputs), len(PORTABLE))
    nothing = np.full(len(inputs), "", dtype=np.str_)
    return Inputs(inputs.calls, numbers, nothing, nothing)


@dataclass(frozen=True)
class OnPortable:
    forest: Forest

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        return self.forest.predict(_portable(inputs))

    def arrays(self) -> Arrays:
        return self.forest.arrays()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> OnPortable:
        return cls(Forest.from_arrays(arrays))

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        return [f"of {', '.join(PORTABLE)}"]


@dataclass(frozen=True)
class OnPortableOf:
    trees: int = 100
    seed: int = 0

    def fit(self, inputs: Inputs, values: Floats) -> OnPortable:
        return OnPortable(ForestOf("random", self.trees, features=1.0, seed=self.seed).fit(_portable(inputs), values))
