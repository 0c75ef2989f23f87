"""A Gaussian process: a Matérn 3/2 kernel with length scales for each feature, the operator's type
and its family.

A different operator type adds a distance, as a different feature does. The fit learns this distance
and the length scales by maximum likelihood. scikit-learn's kernels have no such distance. With the
mean of each type as a feature instead, its process has similar errors (13 families of the packaged
readings left out: mean 13.5, median 7.0 %; this process 14.5, 6.9 %), but needs 37 s of CPU time
and 1.2 GB instead of 11 s, because its gradient has n x n x features numbers.

At most `HYPER` readings determine the length scales. With up to `INDUCING` readings the process is
exact. With more, a random subset of `INDUCING` readings are its inducing points, and all readings
determine coefficients (subset of regressors). Spreads use only the nearest points, so no n x n
matrix is stored."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farm.addons.predict.call_features import NAMES
from farm.addons.predict.regressors import (
    Floats,
    Inputs,
    Names,
    needs_scikit_learn,
    squared_distances,
)

ROOT3 = float(np.sqrt(3))
HYPER, INDUCING, NEAREST = 800, 4500, 24
BATCH = 500  # calls predicted at once, which bounds the size of the matrices
JITTER = 1e-6
#: Mean and standard deviation of the prior of logarithmic weights. Without it, features with few
#: readings dominate.
PRIOR_WEIGHT, PRIOR_OTHER = (-5.0, 1.0), (0.0, 2.0)
#: Least weight of a feature in `GaussianProcess.distances`. The training data do not show the
#: effect of a feature that hardly varies in them, so its fitted weight can be too small for a call
#: that is unlike them.
LEAST_WEIGHT = 0.1
#: Least squared distance of two operator types, and of matrix products of a different size of
#: numbers, which run on tensor cores or without them; and least squared distance of calls that run
#: other kernels: other calls of a different size of numbers, one or several matrix products, a
#: vector or a matrix.
UNLIKE_TYPE, UNLIKE = 4.0, 1.0
#: The feature of one product or of one column, and a limit between those of one and of two.
ONE, SEVERAL = 1.0, 1.3


@dataclass(frozen=True)
class MaternKernel:
    """A kernel of points whose columns are divided by their length scales."""

    variance: float
    noise: float

    def covariance(self, squared: Floats) -> Floats:
        scaled = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
        return self.variance * (1 + scaled) * np.exp(-scaled)  # type: ignore[no-any-return,return-value]


def _one_hot(names: Names, columns: Names) -> Floats:
    """A column for each of ``columns``, and one for all other names. The squared distance of two
    names is 1.
    """
    positions = np.minimum(np.searchsorted(columns, names), len(columns) - 1)
    positions = np.where(columns[positions] == names, positions, -1)
    return np.eye(len(columns) + 1)[positions] * np.sqrt(0.5)  # type: ignore[no-any-return]


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
        _, _, variance, noise, _ = map(float, self.kernel)
        return MaternKernel(variance, noise)

    def placed(self, inputs: Inputs) -> Floats:
        """Return the points of calls: features / length scales, and columns for types and
        families.
        """
        standard = (inputs.numbers - self.means) / self.deviations
        return self._joined(standard * np.sqrt(self.weights), inputs.types, inputs.families)

    @functools.cached_property
    def points(self) -> Floats:
        types = self.types[self.point_types]
        families = self.families[self.point_families]
        return self._joined(self.at.astype(np.float64), types, families)

    def _joined(self, features: Floats, types: Names, families: Names) -> Floats:
        type_weight, family_weight = np.sqrt(self.kernel[:2])
        type_columns = type_weight * _one_hot(types, self.types)
        family_columns = family_weight * _one_hot(families, self.families)
        return np.hstack([features, type_columns, family_columns])

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        points = self.placed(inputs)
        values = np.empty(len(inputs))
        variances = np.empty(len(inputs))
        for begin in range(0, len(inputs), BATCH):
            batch = slice(begin, begin + BATCH)
            squared = squared_distances(points[batch], self.points)
            values[batch] = self.kernel[4] + self.matern.covariance(squared) @ self.coefficients
            variances[batch] = self._variances(squared)
        return values, np.sqrt(variances)

    def _variances(self, squared: Floats) -> Floats:
        """Return the variances at some points from the nearest readings of each.

        ``squared``: squared distances of the points (rows) to all readings."""
        kernel = self.matern
        count = min(NEAREST, len(self.at))
        positions = np.argpartition(squared, count - 1, axis=1)[:, :count]
        nearest = self.points[positions]
        among = kernel.covariance(squared_distances(nearest, nearest))
        among += (kernel.noise + JITTER) * np.eye(count)
        towards = kernel.covariance(np.take_along_axis(squared, positions, axis=1))
        explained = (towards * np.linalg.solve(among, towards[..., None])[..., 0]).sum(axis=1)
        variances: Floats = kernel.variance + kernel.noise - explained
        return np.maximum(variances, kernel.noise)

    @functools.cached_property
    def _factors(self) -> Floats:
        """Factors of the columns of points that raise weights to `LEAST_WEIGHT`, and that of types
        to `UNLIKE_TYPE`.
        """
        type_weight, family_weight = self.kernel[:2]
        of_features = np.maximum(self.weights, LEAST_WEIGHT) / self.weights
        of_types = np.repeat(max(type_weight, UNLIKE_TYPE) / type_weight, len(self.types) + 1)
        of_families = np.repeat(max(family_weight, 0.0) / family_weight, len(self.families) + 1)
        factors: Floats = np.concatenate([of_features, of_types, of_families])
        return np.sqrt(factors)

    def _comparable(self, points: Floats) -> Floats:
        """Return points for distances between calls, with columns for what selects other
        kernels.
        """
        standard = points[:, : len(self.weights)] / np.sqrt(self.weights)
        numbers = standard * self.deviations + self.means
        itemsize = numbers[:, NAMES.index("itemsize")]
        products = numbers[:, NAMES.index("products")]
        n = numbers[:, NAMES.index("n")]
        multiplies = products > ONE - 0.1
        sizes = np.round(itemsize) * np.sqrt(np.where(multiplies, UNLIKE_TYPE, UNLIKE))
        several, vector = products > SEVERAL, np.abs(n - ONE) < 0.1
        kinds = np.sqrt(UNLIKE) * np.column_stack([several, vector])
        return np.hstack([points * self._factors, sizes[:, None], kinds])

    @functools.cached_property
    def _readings(self) -> Floats:
        return self._comparable(self.points)

    def distances(self, inputs: Inputs) -> Floats:
        """Return the distance of each call to the nearest reading. Unit: length scales."""
        points = self._comparable(self.placed(inputs))
        nearest = np.empty(len(points))
        for begin in range(0, len(points), BATCH):
            batch = slice(begin, begin + BATCH)
            nearest[batch] = squared_distances(points[batch], self._readings).min(axis=1)
        return np.sqrt(np.maximum(nearest, 0.0))


def fit_process(
    inputs: Inputs,
    values: Floats,
    steps: int = 25,
    inducing: int = INDUCING,
    like: GaussianProcess | None = None,
) -> GaussianProcess:
    """Fit a process.

    Args:
        steps: maximum number of optimizer steps for the length scales.
        like: a fitted process whose length scales, variance and noise are used. They take most of
            the time of a fit, and a tenth of the readings hardly changes them.
    """
    means = inputs.numbers.mean(axis=0)
    deviations = inputs.numbers.std(axis=0)
    deviations = np.where(deviations < 1e-9, 1.0, deviations)
    if like is not None:
        means, deviations = like.means, like.deviations
    standard = (inputs.numbers - means) / deviations
    types, point_types = np.unique(inputs.types, return_inverse=True)
    families, point_families = np.unique(inputs.families, return_inverse=True)

    type_columns = _one_hot(inputs.types, types)
    family_columns = _one_hot(inputs.families, families)
    columns = np.hstack([standard, type_columns, family_columns])
    features = standard.shape[1]
    columns_of_weight = [1] * features + [type_columns.shape[1], family_columns.shape[1]]
    weight_of = np.repeat(np.arange(features + 2), columns_of_weight)

    middle = float(np.median(values))
    order = np.random.default_rng(0).permutation(len(values))
    if like is None:
        few = order[:HYPER]
        weights, kernel = _likeliest(columns[few], weight_of, values[few] - middle, steps)
    else:
        weights, kernel = np.array([*like.weights, *like.kernel[:2]]), like.matern

    at = (standard * np.sqrt(weights[:-2])).astype(np.float16)
    points = columns * np.sqrt(weights[weight_of])
    points[:, :features] = at  # as it is stored
    chosen = np.sort(order[:inducing])
    return GaussianProcess(
        kernel=np.array([*weights[-2:], kernel.variance, kernel.noise, middle]),
        weights=weights[:-2],
        means=means,
        deviations=deviations,
        types=types,
        families=families,
        at=at[chosen],
        point_types=point_types[chosen].astype(np.int16),
        point_families=point_families[chosen].astype(np.int16),
        coefficients=_coefficients(kernel, points[chosen], points, values - middle),
    )


def _coefficients(kernel: MaternKernel, chosen: Floats, points: Floats, values: Floats) -> Floats:
    from scipy.linalg import solve

    among = kernel.covariance(squared_distances(chosen, chosen))
    if len(chosen) == len(points):  # exact, in the same order
        matrix = among + (kernel.noise + JITTER) * np.eye(len(values))
        return solve(matrix, values, assume_a="pos")  # type: ignore[no-any-return]

    matrix = kernel.noise * among
    target = np.zeros(len(chosen))
    for begin in range(0, len(values), len(chosen)):
        batch = slice(begin, begin + len(chosen))
        towards = kernel.covariance(squared_distances(chosen, points[batch]))
        matrix += towards @ towards.T
        target += towards @ values[batch]
    matrix += 1e-8 * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
    return solve(matrix, target, assume_a="pos")  # type: ignore[no-any-return]


def _likeliest(
    columns: Floats, weight_of: npt.NDArray[np.intp], values: Floats, steps: int
) -> tuple[Floats, MaternKernel]:
    """Return the weights and the kernel with the largest posterior probability.

    ``weight_of``: index of the weight of each column; the last two weights are those of types and
    families."""
    needs_scikit_learn()
    from scipy.optimize import minimize

    features = weight_of[-1] - 1
    start = [*[PRIOR_WEIGHT[0]] * features, 0.0, 0.0, np.log(values.var() + 1e-3), np.log(0.02)]
    bounds = [(-12.0, 6.0)] * (features + 2) + [(-8.0, 6.0), (-9.0, 2.0)]
    minimum = minimize(
        _loss,
        start,
        (columns, weight_of, values),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": steps},
    )
    *weights, variance, noise = np.exp(minimum.x)
    return np.array(weights), MaternKernel(float(variance), float(noise))


def _loss(
    logarithms: Floats, columns: Floats, weight_of: npt.NDArray[np.intp], values: Floats
) -> tuple[float, Floats]:
    """The negative logarithm of the posterior of all weights, the variance and the noise, and its
    gradient.

    ``logarithms``: of the weights, the variance and the noise.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    *weights, variance, noise = np.exp(logarithms)
    kernel = MaternKernel(float(variance), float(noise))
    points = columns * np.sqrt(np.array(weights)[weight_of])
    squared = squared_distances(points, points)
    signal = kernel.covariance(squared)
    identity = np.eye(len(points))
    try:
        factor = cho_factor(signal + (kernel.noise + JITTER) * identity, lower=True)
    except LinAlgError:
        return 1e10, np.zeros_like(logarithms)

    coefficients = cho_solve(factor, values)
    between = np.outer(coefficients, coefficients) - cho_solve(factor, identity)
    # The derivative of the kernel by the squared distance is -3/2 variance exp(-root).
    root = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
    slope = between * (-1.5 * kernel.variance * np.exp(-root))
    of_columns = (points**2 * slope.sum(axis=1)[:, None]).sum(axis=0)
    of_columns -= np.einsum("ij,ij->j", points, slope @ points)
    of_variance = 0.5 * (between * signal).sum()
    of_noise = 0.5 * kernel.noise * np.trace(between)
    gradient = -np.concatenate([np.bincount(weight_of, of_columns), [of_variance, of_noise]])

    prior = np.zeros_like(logarithms)
    for some, (mean, deviation) in ((slice(0, -4), PRIOR_WEIGHT), (slice(-4, -2), PRIOR_OTHER)):
        prior[some] = (logarithms[some] - mean) / deviation
        gradient[some] += prior[some] / deviation
    half_log_determinant = np.log(np.diag(factor[0])).sum()
    value = 0.5 * values @ coefficients + half_log_determinant + 0.5 * prior @ prior
    return float(value), gradient
