"""NeuralPower (Cai et al., 2017): for each operator type a polynomial of its layer's parameters, chosen by lasso.

The parameters are those that a person sets of a layer - batch, sizes, channels, kernel, stride - and beside the polynomial
stand the physical terms: operations and bytes. Degrees 1 to 3 and the lasso's weight are chosen by ten-fold cross-validation. For
power the parameters' logarithms stand beside them, as it saturates. Targets are raw, microseconds and watts, as it was published.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.prediction.described import Described
from farm.prediction.regressor import Arrays, Floats, Inputs, needs_scikit_learn

LEAST = 10  # readings that a polynomial takes
MOST_TERMS = 370


def parameters(call: Described) -> list[float]:
    """What a person sets of the layer. Sizes, not logarithms."""
    return [
        float(value or 0)
        for value in (call.batch, call.last_size, call.rows, call.channels_in, call.channels_out, call.pixels)
    ] + [float(value or 0) for value in (call.window, call.stride, call.n, call.k, call.products)]


def _physical(call: Described) -> list[float]:
    return [float(call.flops), float(call.bytes_moved), float(call.elements)]


@dataclass(frozen=True)
class Polynomial:
    """Of one operator type: powers (terms x parameters) of scaled parameters, and the coefficient of each."""

    used: npt.NDArray[np.intp]  # parameters that vary
    powers: npt.NDArray[np.int8]
    scales: Floats
    coefficients: Floats
    intercept: float
    spread: float  # a share of the value
    least: float


@dataclass(frozen=True)
class Polynomials:
    of_type: Mapping[str, Polynomial]
    logarithms: bool

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """Raw values; NaN for types without a polynomial."""
        found, spreads = np.full(len(inputs), np.nan), np.full(len(inputs), np.nan)
        for name, polynomial in self.of_type.items():
            rows = np.flatnonzero(inputs.types == name)
            if len(rows):
                own = _parameters([inputs.calls[row] for row in rows], self.logarithms)
                terms = _terms(own[:, polynomial.used], polynomial.powers)
                terms = np.column_stack([terms, _physicals([inputs.calls[row] for row in rows])]) / polynomial.scales
                values = terms @ polynomial.coefficients + polynomial.intercept
                found[rows] = np.maximum(values, polynomial.least)
                spreads[rows] = polynomial.spread * found[rows]
        return found, spreads

    def arrays(self) -> Arrays:
        kept: Arrays = {"logarithms": np.array(self.logarithms), "types": np.array(list(self.of_type), dtype=np.str_)}
        for number, polynomial in enumerate(self.of_type.values()):
            kept[f"{number}/used"], kept[f"{number}/powers"] = polynomial.used, polynomial.powers
            kept[f"{number}/scales"], kept[f"{number}/coefficients"] = polynomial.scales, polynomial.coefficients
            kept[f"{number}/rest"] = np.array([polynomial.intercept, polynomial.spread, polynomial.least])
        return kept

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Polynomials:
        names = ("used", "powers", "scales", "coefficients")
        return cls(
            {
                str(name): Polynomial(
                    *(arrays[f"{number}/{one}"] for one in names),  # type: ignore[arg-type]
                    *map(float, arrays[f"{number}/rest"]),
                )
                for number, name in enumerate(arrays["types"])
            },
            bool(arrays["logarithms"]),
        )

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        polynomial = self.of_type.get(str(inputs.types[place]))
        if polynomial is None:
            return [f"no polynomial: one takes {LEAST} readings of the type"]
        terms = int((polynomial.coefficients != 0).sum())
        return [
            f"a polynomial of degree {int(polynomial.powers.sum(axis=1).max(initial=0))}, of which lasso left {terms} terms"
        ]


@dataclass(frozen=True)
class PolynomialsOf:
    """Fits them. `relative`: errors count as shares of the value, which the publication does not do."""

    logarithms: bool = False
    degrees: tuple[int, ...] = (1, 2, 3)
    relative: bool = False
    seed: int = 0

    def fit(self, inputs: Inputs, values: Floats) -> Polynomials:
        found = {}
        for name in np.unique(inputs.types):
            rows = np.flatnonzero(inputs.types == name)
            if len(rows) >= LEAST:
                found[str(name)] = self._fitted([inputs.calls[row] for row in rows], values[rows])
        return Polynomials(found, self.logarithms)

    def _fitted(self, calls: Sequence[Described], values: Floats) -> Polynomial:
        needs_scikit_learn()
        from sklearn.linear_model import LassoCV

        own = _parameters(calls, self.logarithms)
        used = np.flatnonzero(np.ptp(own, axis=0) > 0)
        best: tuple[float, Polynomial] | None = None
        weights = 1 / values if self.relative else np.ones(len(values))
        weights = weights / weights.mean()
        for degree in self.degrees:
            powers = _powers(len(used), degree)
            if len(powers) > MOST_TERMS:
                break
            terms = np.column_stack([_terms(own[:, used], powers), _physicals(calls)])
            scales = np.maximum(np.abs(terms).max(axis=0), 1e-12)
            folds = min(10, len(values))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of lassos that did not converge: the best of the others is taken
                lasso = LassoCV(
                    cv=folds, alphas=12, eps=1e-4, max_iter=1000, tol=1e-3, precompute=True, random_state=self.seed
                ).fit(terms / scales, values, sample_weight=weights if self.relative else None)
            error = float(lasso.mse_path_.mean(axis=1).min())
            if best is None or error < best[0]:
                kept = lasso.coef_[: len(powers)] != 0
                all_kept = np.append(kept, [True] * (len(scales) - len(powers)))
                polynomial = Polynomial(
                    used,
                    powers[kept],
                    scales[all_kept],
                    lasso.coef_[all_kept],
                    float(lasso.intercept_),
                    float(np.sqrt(error) / max(values.mean(), 1e-9)),
                    float(values.min()) / 2,
                )
                best = (error, polynomial)
        assert best is not None
        return best[1]


def _parameters(calls: Sequence[Described], logarithms: bool) -> Floats:
    own = np.array([parameters(call) for call in calls])
    return np.column_stack([own, np.log2(own + 1)]) if logarithms else own


def _physicals(calls: Sequence[Described]) -> Floats:
    return np.array([_physical(call) for call in calls])


def _powers(number: int, degree: int) -> npt.NDArray[np.int8]:
    """All products of so many parameters up to a degree. Shape: terms x parameters."""
    found = [
        np.bincount(chosen, minlength=number)
        for total in range(1, degree + 1)
        for chosen in itertools.combinations_with_replacement(range(number), total)
    ]
    return np.array(found, dtype=np.int8).reshape(len(found), number)


def _terms(own: Floats, powers: npt.NDArray[np.int8]) -> Floats:
    if not len(powers):
        return np.empty((len(own), 0))
    return np.prod(own[:, None, :] ** powers[None, :, :], axis=2)  # type: ignore[no-any-return]
