"""A Gaussian process: Matérn 3/2 with a length scale for each feature, one for the operator's type and one for its family.

Two operators of different types are so far apart as if one more feature differed, by a distance that is learnt like the length
scales, by the likelihood of the readings (scikit-learn's kernel has no such distance, and its gradient takes n x n x features).
The length scales are learnt from at most `HYPER` readings. Up to `INDUCING` readings the process is exact; of more, so many
chosen ones are its inducing points and all readings count (subset of regressors). The spread of an answer is that of the
process given its nearest points alone, so that no n x n matrix has to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.prediction.features import NAMES
from farm.prediction.regressor import Arrays, Floats, Inputs, needs_scikit_learn

ROOT3 = float(np.sqrt(3))
HYPER, INDUCING, NEAREST = 800, 4500, 24
AT_ONCE = 1000  # calls that are asked for, so that no matrix grows with their number
JITTER = 1e-6
KEPT_AS = np.float16  # where a point is, in three digits of its length scales


@dataclass(frozen=True)
class Kernel:
    """`weights` are 1 / length scale squared, of features in units of their standard deviation."""

    weights: Floats
    other_type: float  # squared distance of two types
    other_family: float
    variance: float
    noise: float

    def of(self, squared: Floats) -> Floats:
        scaled = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
        return self.variance * (1 + scaled) * np.exp(-scaled)  # type: ignore[no-any-return,return-value]


@dataclass(frozen=True)
class Points:
    """Where something is known: features over their length scales, and types and families as numbers."""

    at: Floats
    types: npt.NDArray[np.int32]
    families: npt.NDArray[np.int32]

    def squared(self, others: Points, kernel: Kernel) -> Floats:
        """Squared distances. Shape: these x others."""
        own, their = (self.at**2).sum(axis=1), (others.at**2).sum(axis=1)
        apart = own[:, None] + their[None, :] - 2 * self.at @ others.at.T
        apart = apart + kernel.other_type * (self.types[:, None] != others.types[None, :])
        return apart + kernel.other_family * (self.families[:, None] != others.families[None, :])  # type: ignore[no-any-return,return-value]

    def where(self, places: npt.NDArray[Any] | slice) -> Points:
        return Points(self.at[places], self.types[places], self.families[places])


@dataclass(frozen=True)
class Process:
    kernel: Kernel
    means: Floats
    deviations: Floats
    middle: float
    types: npt.NDArray[np.str_]
    families: npt.NDArray[np.str_]
    points: Points
    coefficients: Floats

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        asked = _points(inputs, self.means, self.deviations, self.kernel, self.types, self.families)
        values, variances = np.empty(len(inputs)), np.empty(len(inputs))
        for begin in range(0, len(inputs), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            squared = asked.where(some).squared(self.points, self.kernel)
            values[some] = self.middle + self.kernel.of(squared) @ self.coefficients
            variances[some] = self._variances(squared)
        return values, np.sqrt(variances)

    def _variances(self, squared: Floats) -> Floats:
        """Given the nearest points alone."""
        kernel, count = self.kernel, min(NEAREST, squared.shape[1])
        found = np.empty(len(squared))
        nearest = np.argpartition(squared, count - 1, axis=1)[:, :count]
        for row, places in enumerate(nearest):
            near = self.points.where(places)
            among = kernel.of(near.squared(near, kernel)) + (kernel.noise + JITTER) * np.eye(count)
            towards = kernel.of(squared[row, places])
            found[row] = kernel.variance + kernel.noise - towards @ np.linalg.solve(among, towards)
        return np.maximum(found, kernel.noise)

    def arrays(self) -> Arrays:
        kernel = self.kernel
        return {
            "kernel": np.array([kernel.other_type, kernel.other_family, kernel.variance, kernel.noise, self.middle]),
            "weights": kernel.weights,
            "means": self.means,
            "deviations": self.deviations,
            "types": self.types,
            "families": self.families,
            "at": self.points.at.astype(KEPT_AS),  # which the coefficients were learnt for
            "point_types": self.points.types.astype(np.int16),
            "point_families": self.points.families.astype(np.int16),
            "coefficients": self.coefficients,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Process:
        other_type, other_family, variance, noise, middle = map(float, arrays["kernel"])
        points = Points(
            arrays["at"].astype(np.float64),
            arrays["point_types"].astype(np.int32),
            arrays["point_families"].astype(np.int32),
        )
        return cls(
            Kernel(arrays["weights"], other_type, other_family, variance, noise),
            arrays["means"],
            arrays["deviations"],
            middle,
            arrays["types"],
            arrays["families"],
            points,
            arrays["coefficients"],
        )

    def explain(self, inputs: Inputs, place: int) -> list[str]:
        """How near the nearest readings are, and which features part it from them."""
        asked = _points(inputs, self.means, self.deviations, self.kernel, self.types, self.families)
        squared = asked.squared(self.points, self.kernel)[place]
        nearest = int(np.argmin(squared))
        apart = (asked.at[place] - self.points.at[nearest]) ** 2
        parting = [NAMES[one] for one in np.argsort(-apart)[:3] if apart[one] > 0.01 * max(squared[nearest], 1e-9)]
        close = int((np.sqrt(np.maximum(squared, 0)) < 0.5).sum())
        said = [
            f"the nearest reading is {np.sqrt(max(squared[nearest], 0.0)):.2g} length scales away, {close} are within 0.5"
        ]
        return said + ([f"it differs in {', '.join(parting)}"] if parting else [])


@dataclass(frozen=True)
class ProcessOf:
    """Fits a process. `steps` bounds the search for length scales."""

    steps: int = 25
    hyper: int = HYPER
    inducing: int = INDUCING
    seed: int = 0

    def fit(self, inputs: Inputs, values: Floats) -> Process:
        means, deviations = inputs.numbers.mean(axis=0), inputs.numbers.std(axis=0)
        deviations = np.where(deviations < 1e-9, 1.0, deviations)
        types, families = np.unique(inputs.types), np.unique(inputs.families)
        middle = float(np.median(values))
        flat = Kernel(np.ones(len(means)), 1.0, 1.0, 1.0, 1.0)
        plain = _points(inputs, means, deviations, flat, types, families)
        order = np.random.default_rng(self.seed).permutation(len(values))
        some = order[: self.hyper]
        kernel = self._learnt(plain.where(some), values[some] - middle)
        at = (plain.at * np.sqrt(kernel.weights)).astype(KEPT_AS).astype(np.float64)
        points = Points(at, plain.types, plain.families)
        chosen = points.where(np.sort(order[: self.inducing]))
        coefficients = _coefficients(kernel, chosen, points, values - middle)
        return Process(kernel, means, deviations, middle, types, families, chosen, coefficients)

    def _learnt(self, points: Points, values: Floats) -> Kernel:
        """The kernel that makes the values likeliest."""
        needs_scikit_learn()
        from scipy.optimize import minimize

        features = points.at.shape[1]
        start = np.concatenate(
            [np.full(features, PRIOR_WEIGHT[0]), [0.0, 0.0, np.log(values.var() + 1e-3), np.log(0.02)]]
        )
        bounds = [(-12.0, 6.0)] * (features + 2) + [(-8.0, 6.0), (-9.0, 2.0)]
        about = _Likelihood(points, values)
        found = minimize(about, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": self.steps})
        return _kernel(found.x)


#: Of the logarithms of weights: mean and deviation. Without it some features of few readings would count for everything.
PRIOR_WEIGHT = (-5.0, 1.0)
PRIOR_OTHER = (0.0, 2.0)


def _kernel(logarithms: Floats) -> Kernel:
    weights, rest = np.exp(logarithms[:-4]), np.exp(logarithms[-4:])
    return Kernel(weights, *map(float, rest))


class _Likelihood:
    """The negative logarithm of the likelihood (with the prior) of a kernel's logarithms, and its gradient."""

    def __init__(self, points: Points, values: Floats) -> None:
        self.points, self.values = points, values
        self.other_type = (points.types[:, None] != points.types[None, :]).astype(float)
        self.other_family = (points.families[:, None] != points.families[None, :]).astype(float)

    def __call__(self, logarithms: Floats) -> tuple[float, Floats]:
        from scipy.linalg import LinAlgError, cho_factor, cho_solve

        kernel, at = _kernel(logarithms), self.points.at
        scaled = at * np.sqrt(kernel.weights)
        norm = (scaled**2).sum(axis=1)
        squared = norm[:, None] + norm[None, :] - 2 * scaled @ scaled.T
        squared += kernel.other_type * self.other_type + kernel.other_family * self.other_family
        root = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
        decay = np.exp(-root)
        signal = kernel.variance * (1 + root) * decay
        among = signal + (kernel.noise + JITTER) * np.eye(len(at))
        try:
            factor = cho_factor(among, lower=True)
        except LinAlgError:
            return 1e10, np.zeros_like(logarithms)
        coefficients = cho_solve(factor, self.values)
        between = np.outer(coefficients, coefficients) - cho_solve(factor, np.eye(len(at)))
        # The derivative of the kernel by the squared distance is -3/2 variance exp(-root).
        slope = between * (-1.5 * kernel.variance * decay)
        of_weights = (at**2 * slope.sum(axis=1)[:, None]).sum(axis=0) - np.einsum("ij,ij->j", at, slope @ at)
        gradient = -np.concatenate(
            [
                kernel.weights * of_weights,
                [
                    0.5 * kernel.other_type * (slope * self.other_type).sum(),
                    0.5 * kernel.other_family * (slope * self.other_family).sum(),
                    0.5 * (between * signal).sum(),
                    0.5 * kernel.noise * np.trace(between),
                ],
            ]
        )
        off = np.zeros_like(logarithms)
        off[:-4] = (logarithms[:-4] - PRIOR_WEIGHT[0]) / PRIOR_WEIGHT[1] ** 2
        off[-4:-2] = (logarithms[-4:-2] - PRIOR_OTHER[0]) / PRIOR_OTHER[1] ** 2
        prior = 0.5 * (
            (off[:-4] * PRIOR_WEIGHT[1]) @ (off[:-4] * PRIOR_WEIGHT[1])
            + (off[-4:-2] * PRIOR_OTHER[1]) @ (off[-4:-2] * PRIOR_OTHER[1])
        )
        value = 0.5 * self.values @ coefficients + np.log(np.diag(factor[0])).sum() + prior
        return float(value), gradient + off


def _points(
    inputs: Inputs,
    means: Floats,
    deviations: Floats,
    kernel: Kernel,
    types: npt.NDArray[np.str_],
    families: npt.NDArray[np.str_],
) -> Points:
    """Types and families that are not known get the number -1, which is that of no other."""
    return Points(
        (inputs.numbers - means) / deviations * np.sqrt(kernel.weights),
        _placed(inputs.types, types),
        _placed(inputs.families, families),
    )


def _placed(asked: npt.NDArray[np.str_], known: npt.NDArray[np.str_]) -> npt.NDArray[np.int32]:
    place = {str(name): index for index, name in enumerate(known)}
    return np.array([place.get(str(name), -1) for name in asked], dtype=np.int32)


def _coefficients(kernel: Kernel, chosen: Points, points: Points, values: Floats) -> Floats:
    from scipy.linalg import solve

    among = kernel.of(chosen.squared(chosen, kernel))
    if len(chosen.at) == len(points.at):  # in their order
        noise = (kernel.noise + JITTER) * np.eye(len(values))
        return solve(among + noise, values, assume_a="pos")  # type: ignore[no-any-return]
    matrix, told = kernel.noise * among, np.zeros(len(chosen.at))
    for begin in range(0, len(values), len(chosen.at)):
        some = slice(begin, begin + len(chosen.at))
        towards = kernel.of(chosen.squared(points.where(some), kernel))
        matrix += towards @ towards.T
        told += towards @ values[some]
    matrix += 1e-8 * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
    return solve(matrix, told, assume_a="pos")  # type: ignore[no-any-return]
