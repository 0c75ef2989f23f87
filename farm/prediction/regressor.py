"""What learns one number of a call from the others, and what it has learnt: plain arrays that NumPy alone evaluates.

A regressor learns from `Inputs`: the features of calls with the types and families of their operators. What it has learnt is
kept as arrays, so that asking needs no scikit-learn, and nothing that is stored is ever executed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from farm.errors import UsageError
from farm.prediction.described import Described
from farm.prediction.features import numbers_of

Floats = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Inputs:
    """Calls as regressors see them: `numbers` is a row for each call, `types` and `families` are of their operators."""

    calls: tuple[Described, ...]
    numbers: Floats
    types: npt.NDArray[np.str_]
    families: npt.NDArray[np.str_]

    @classmethod
    def of(cls, calls: Sequence[Described]) -> Inputs:
        return cls(
            tuple(calls),
            numbers_of(calls),
            np.array([call.operator_type for call in calls], dtype=np.str_),
            np.array([call.operator_family for call in calls], dtype=np.str_),
        )

    def __len__(self) -> int:
        return len(self.calls)

    def where(self, chosen: npt.NDArray[Any]) -> Inputs:
        """Those of a mask, or of places."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        return Inputs(
            tuple(self.calls[place] for place in places),
            self.numbers[places],
            self.types[places],
            self.families[places],
        )


def with_times(inputs: Inputs, times_us: Floats) -> Inputs:
    """The same with four more features: the time that each call takes, and of it what arithmetic and traffic should take.

    For power: a kernel that is slower than its roofline draws less.
    """
    tiled, compute, traffic = (
        np.array([getattr(call, name) for call in inputs.calls])
        for name in ("tile_roofline_us", "compute_us", "traffic_us")
    )
    busy = [np.log2(times_us), np.log2(times_us / tiled), compute / times_us, traffic / times_us]
    return dataclasses.replace(inputs, numbers=np.column_stack([inputs.numbers, *busy]))


class Learnt(Protocol):
    """What a regressor has learnt."""

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """The value for each call, and how unsure it is of it (a standard deviation, before any calibration)."""

    def arrays(self) -> Arrays:
        """All of it."""

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        """What the answer for one call rests on, for people."""


class Regressor(Protocol):
    def fit(self, inputs: Inputs, values: Floats) -> Learnt:
        """
        Args:
            values: one for each call.
        """


def needs_scikit_learn() -> None:
    """Raises:
    UsageError: scikit-learn is not installed, which fitting takes and asking does not.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Fitting predictors needs scikit-learn, which is not installed.",
            "Install it with `pip install 'operator-farm[prediction]'`; those that come with the package need none.",
        ) from error


def part(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> Arrays:
    """Those whose name begins with `name` and a stroke, without that."""
    return {key.removeprefix(f"{name}/"): value for key, value in arrays.items() if key.startswith(f"{name}/")}


def named(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    return {f"{name}/{key}": value for key, value in arrays.items()}
