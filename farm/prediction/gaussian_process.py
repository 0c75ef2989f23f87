"""A Gaussian process: a Matérn 3/2 kernel with length scales for each feature, the operator's type and its family.

A different operator type adds a distance, as a different feature does. The fit learns this distance and the length
scales by maximum likelihood. scikit-learn's kernels have no such distance, and their gradient needs n x n x features
numbers. At most `HYPER` readings determine the length scales. With up to `INDUCING` readings the process is exact. With
more, a random subset of `INDUCING` readings are its inducing points, and all readings determine coefficients (subset
of regressors). Spreads use only the nearest points, so no n x n matrix is stored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.prediction.call_features import NAMES
from farm.prediction.regressors import Floats, Inputs, Names, needs_scikit_learn

ROOT3 = float(np.sqrt(3))
HYPER, INDUCING, NEAREST = 800, 4500, 24
BATCH = 500  # calls predicted at once, which bounds the size of the matrices
JITTER = 1e-6
#: Mean and standard deviation of the prior of logarithmic weights. Without a prior, some features with few readings
#: dominate.
PRIOR_WEIGHT, PRIOR_OTHER = (-5.0, 1.0), (0.0, 2.0)
#: Least weight of a feature in `GaussianProcess.distances`. The training data do not show the effect of a feature that
#: hardly varies in them, so its fitted weight can be too small for a call that is unlike them.
LEAST_WEIGHT = 0.1


@dataclass(frozen=True)
class MaternKernel:
    """`weights`: 1 / length scale squared, for features in units of their standard deviation."""

    weights: Floats
    other_type: float  # squared distance of two types
    other_family: float
    variance: float
    noise: float

    @classmethod
    def of_logarithms(cls, logarithms: Floats) -> MaternKernel:
        return cls(np.exp(logarithms[:-4]), *map(float, np.exp(logarithms[-4:])))

    def covariance(self, squared: Floats) -> Floats:
        scaled = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
        return self.variance * (1 + scaled) * np.exp(-scaled)  # type: ignore[no-any-return,return-value]


@dataclass(frozen=True)
class KernelPoints:
    """Features / length scales, and types and families as numbers (-1 if unknown)."""

    at: Floats  # ... x points x features
    types: npt.NDArray[np.int32]  # ... x points
    families: npt.NDArray[np.int32]

    def squared(self, others: KernelPoints, kernel: MaternKernel) -> Floats:
        """Squared distances. Shape: ... x points of self x points of others."""
        own, their = (self.at**2).sum(axis=-1), (others.at**2).sum(axis=-1)
        apart = own[..., :, None] + their[..., None, :] - 2 * self.at @ np.swapaxes(others.at, -1, -2)
        apart += kernel.other_type * (self.types[..., :, None] != others.types[..., None, :])
        apart += kernel.other_family * (self.families[..., :, None] != others.families[..., None, :])
        return apart  # type: ignore[no-any-return]

    def where(self, places: npt.NDArray[Any] | slice) -> KernelPoints:
        return KernelPoints(self.at[places], self.types[places], self.families[places])


@dataclass(frozen=True)
class GaussianProcess:
    """A fitted process. Its fields are the stored arrays."""

    kernel: Floats  # other type, other family, variance, noise, mean value
    weights: Floats
    means: Floats  # of features
    deviations: Floats
    types: Names
    families: Names
    #: Points x features: three digits of length scales, for which the coefficients were solved.
    at: npt.NDArray[np.float16]
    point_types: npt.NDArray[np.int16]
    point_families: npt.NDArray[np.int16]
    coefficients: Floats

    @functools.cached_property
    def matern(self) -> MaternKernel:
        return MaternKernel(self.weights, *map(float, self.kernel[:4]))

    @functools.cached_property
    def points(self) -> KernelPoints:
        types, families = self.point_types.astype(np.int32), self.point_families.astype(np.int32)
        return KernelPoints(self.at.astype(np.float64), types, families)

    def placed(self, inputs: Inputs) -> KernelPoints:
        at = (inputs.numbers - self.means) / self.deviations * np.sqrt(self.weights)
        return KernelPoints(at, _numbers(inputs.types, self.types), _numbers(inputs.families, self.families))

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        points = self.placed(inputs)
        kernel, count = self.matern, min(NEAREST, len(self.at))
        values, variances = np.empty(len(inputs)), np.empty(len(inputs))
        for begin in range(0, len(inputs), BATCH):
            batch = slice(begin, begin + BATCH)
            squared = points.where(batch).squared(self.points, kernel)
            values[batch] = self.kernel[4] + kernel.covariance(squared) @ self.coefficients
            places = np.argpartition(squared, count - 1, axis=1)[:, :count]
            nearest = self.points.where(places)
            among = kernel.covariance(nearest.squared(nearest, kernel)) + (kernel.noise + JITTER) * np.eye(count)
            towards = kernel.covariance(np.take_along_axis(squared, places, axis=1))
            explained = (towards * np.linalg.solve(among, towards[..., None])[..., 0]).sum(axis=1)
            variances[batch] = np.maximum(kernel.variance + kernel.noise - explained, kernel.noise)
        return values, np.sqrt(variances)

    @functools.cached_property
    def _comparable(self) -> tuple[Floats, KernelPoints]:
        """Factors that raise each weight to `LEAST_WEIGHT`, and the readings scaled by them."""
        factors = np.sqrt(np.maximum(self.weights, LEAST_WEIGHT) / self.weights)
        return factors, replace(self.points, at=self.points.at * factors)

    def distances(self, inputs: Inputs) -> Floats:
        """Return the distance of each call to the nearest reading. Unit: length scales."""
        placed, (factors, readings) = self.placed(inputs), self._comparable
        points = replace(placed, at=placed.at * factors)
        batches = (points.where(slice(begin, begin + BATCH)) for begin in range(0, len(inputs), BATCH))
        nearest = [one.squared(readings, self.matern).min(axis=1) for one in batches]
        return np.sqrt(np.maximum(np.concatenate([np.empty(0), *nearest]), 0.0))

    def explain(self, inputs: Inputs) -> list[str]:
        """Describe the distance to the nearest reading, and the features that differ."""
        placed, (factors, readings) = self.placed(inputs), self._comparable
        point = replace(placed, at=placed.at * factors)
        squared = np.maximum(point.squared(readings, self.matern)[0], 0.0)
        nearest, close = int(np.argmin(squared)), int((squared < 0.25).sum())
        apart = (point.at[0] - readings.at[nearest]) ** 2
        differing = [NAMES[one] for one in np.argsort(-apart)[:3] if apart[one] > 0.01 * max(squared[nearest], 1e-9)]
        lines = [
            f"the nearest reading is {squared[nearest] ** 0.5:.2g} length scales away; {close} readings are within 0.5"
        ]
        return [*lines, f"the nearest reading differs in {', '.join(differing)}"] if differing else lines


def fit_process(
    inputs: Inputs, values: Floats, steps: int = 25, hyper: int = HYPER, inducing: int = INDUCING
) -> GaussianProcess:
    """Fit a process. ``steps``: maximum number of optimizer steps for the length scales."""
    means, deviations = inputs.numbers.mean(axis=0), inputs.numbers.std(axis=0)
    deviations = np.where(deviations < 1e-9, 1.0, deviations)
    types, families = np.unique(inputs.types), np.unique(inputs.families)
    middle = float(np.median(values))
    standard = (inputs.numbers - means) / deviations
    plain = KernelPoints(standard, _numbers(inputs.types, types), _numbers(inputs.families, families))
    order = np.random.default_rng(0).permutation(len(values))
    kernel = _likeliest(plain.where(order[:hyper]), values[order[:hyper]] - middle, steps)
    at = (plain.at * np.sqrt(kernel.weights)).astype(np.float16)
    points = KernelPoints(at.astype(np.float64), plain.types, plain.families)
    chosen = np.sort(order[:inducing])
    return GaussianProcess(
        np.array([kernel.other_type, kernel.other_family, kernel.variance, kernel.noise, middle]),
        kernel.weights,
        means,
        deviations,
        types,
        families,
        at[chosen],
        plain.types[chosen].astype(np.int16),
        plain.families[chosen].astype(np.int16),
        _coefficients(kernel, points.where(chosen), points, values - middle),
    )


def _numbers(names: Names, known: Names) -> npt.NDArray[np.int32]:
    """Indices of names in a sorted array; -1 for unknown names."""
    places = np.minimum(np.searchsorted(known, names), len(known) - 1)
    return np.where(known[places] == names, places, -1).astype(np.int32)


def _coefficients(kernel: MaternKernel, chosen: KernelPoints, points: KernelPoints, values: Floats) -> Floats:
    from scipy.linalg import solve

    among = kernel.covariance(chosen.squared(chosen, kernel))
    if len(chosen.at) == len(points.at):  # exact, in the same order
        matrix, target = among + (kernel.noise + JITTER) * np.eye(len(values)), values
    else:
        matrix, target = kernel.noise * among, np.zeros(len(chosen.at))
        for begin in range(0, len(values), len(chosen.at)):
            batch = slice(begin, begin + len(chosen.at))
            towards = kernel.covariance(chosen.squared(points.where(batch), kernel))
            matrix += towards @ towards.T
            target += towards @ values[batch]
        matrix += 1e-8 * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
    return solve(matrix, target, assume_a="pos")  # type: ignore[no-any-return]


def _likeliest(points: KernelPoints, values: Floats, steps: int) -> MaternKernel:
    """Return the kernel with the largest posterior probability."""
    needs_scikit_learn()
    from scipy.optimize import minimize

    features = points.at.shape[1]
    start = [*[PRIOR_WEIGHT[0]] * features, 0.0, 0.0, np.log(values.var() + 1e-3), np.log(0.02)]
    bounds = [(-12.0, 6.0)] * (features + 2) + [(-8.0, 6.0), (-9.0, 2.0)]
    others = [(names[:, None] != names[None, :]).astype(float) for names in (points.types, points.families)]
    settings = {"method": "L-BFGS-B", "bounds": bounds, "options": {"maxiter": steps}}
    found = minimize(_loss, start, (points.at, others, values), jac=True, **settings)
    return MaternKernel.of_logarithms(found.x)


def _loss(logarithms: Floats, at: Floats, others: list[Floats], values: Floats) -> tuple[float, Floats]:
    """The negative logarithm of the posterior of a kernel's logarithms, and its gradient."""
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    kernel, (other_type, other_family) = MaternKernel.of_logarithms(logarithms), others
    scaled = at * np.sqrt(kernel.weights)
    norm = (scaled**2).sum(axis=1)
    squared = norm[:, None] + norm[None, :] - 2 * scaled @ scaled.T
    squared += kernel.other_type * other_type + kernel.other_family * other_family
    root = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
    decay = np.exp(-root)
    signal = kernel.variance * (1 + root) * decay
    try:
        factor = cho_factor(signal + (kernel.noise + JITTER) * np.eye(len(at)), lower=True)
    except LinAlgError:
        return 1e10, np.zeros_like(logarithms)
    coefficients = cho_solve(factor, values)
    between = np.outer(coefficients, coefficients) - cho_solve(factor, np.eye(len(at)))
    # The derivative of the kernel by the squared distance is -3/2 variance exp(-root).
    slope = between * (-1.5 * kernel.variance * decay)
    of_weights = (at**2 * slope.sum(axis=1)[:, None]).sum(axis=0) - np.einsum("ij,ij->j", at, slope @ at)
    of_others = [
        0.5 * kernel.other_type * (slope * other_type).sum(),
        0.5 * kernel.other_family * (slope * other_family).sum(),
        0.5 * (between * signal).sum(),
        0.5 * kernel.noise * np.trace(between),
    ]
    gradient = -np.concatenate([kernel.weights * of_weights, of_others])
    prior = np.zeros_like(logarithms)
    for some, (mean, deviation) in ((slice(0, -4), PRIOR_WEIGHT), (slice(-4, -2), PRIOR_OTHER)):
        prior[some] = (logarithms[some] - mean) / deviation
        gradient[some] += prior[some] / deviation
    value = 0.5 * values @ coefficients + np.log(np.diag(factor[0])).sum() + 0.5 * prior @ prior
    return float(value), gradient
