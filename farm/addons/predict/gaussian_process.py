"""A Gaussian process: a Matérn 3/2 kernel with length scales for each feature, the operator's type
and its family.

A different operator type adds a distance, as a different feature does. The fit learns this distance
and the length scales by maximum likelihood. scikit-learn's kernels have no such distance, and their
gradient needs n x n x features numbers. At most `HYPER` readings determine the length scales. With
up to `INDUCING` readings the process is exact. With more, a random subset of `INDUCING` readings
are its inducing points, and all readings determine coefficients (subset of regressors). Spreads use
only the nearest points, so no n x n matrix is stored."""

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
#: Least squared distance of two operator types, and of calls that run other kernels: with a
#: different size of numbers, with one or several matrix products, of a vector or a matrix.
UNLIKE_TYPE, UNLIKE = 4.0, 1.0
ONE, SEVERAL = (
    1.0,
    1.3,
)  # the feature of one product or of one column; a limit between those of one and two


@dataclass(frozen=True)
class MaternKernel:
    """A kernel of points whose columns are divided by their length scales."""

    variance: float
    noise: float

    def covariance(self, squared: Floats) -> Floats:
        scaled = ROOT3 * np.sqrt(np.maximum(squared, 0.0))
        return self.variance * (1 + scaled) * np.exp(-scaled)  # type: ignore[no-any-return,return-value]


def _one_hot(names: Names, known: Names) -> Floats:
    """A column for each known name, and one for all others. The squared distance of two names is
    1.
    """
    places = np.minimum(np.searchsorted(known, names), len(known) - 1)
    return np.eye(len(known) + 1)[np.where(known[places] == names, places, -1)] * np.sqrt(0.5)  # type: ignore[no-any-return]


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
        return MaternKernel(*map(float, self.kernel[2:4]))

    def placed(self, inputs: Inputs) -> Floats:
        """Return the points of calls: features / length scales, and columns for types and
        families.
        """
        at = (inputs.numbers - self.means) / self.deviations * np.sqrt(self.weights)
        return self._joined(at, inputs.types, inputs.families)

    @functools.cached_property
    def points(self) -> Floats:
        types, families = self.types[self.point_types], self.families[self.point_families]
        return self._joined(self.at.astype(np.float64), types, families)

    def _joined(self, at: Floats, types: Names, families: Names) -> Floats:
        of_type, of_family = np.sqrt(self.kernel[:2])
        return np.hstack(
            [
                at,
                of_type * _one_hot(types, self.types),
                of_family * _one_hot(families, self.families),
            ]
        )

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        points = self.placed(inputs)
        kernel, count = self.matern, min(NEAREST, len(self.at))
        values, variances = np.empty(len(inputs)), np.empty(len(inputs))
        for begin in range(0, len(inputs), BATCH):
            batch = slice(begin, begin + BATCH)
            squared = squared_distances(points[batch], self.points)
            values[batch] = self.kernel[4] + kernel.covariance(squared) @ self.coefficients
            places = np.argpartition(squared, count - 1, axis=1)[:, :count]
            nearest = self.points[places]
            among = kernel.covariance(squared_distances(nearest, nearest)) + (
                kernel.noise + JITTER
            ) * np.eye(count)
            towards = kernel.covariance(np.take_along_axis(squared, places, axis=1))
            explained = (towards * np.linalg.solve(among, towards[..., None])[..., 0]).sum(axis=1)
            variances[batch] = np.maximum(kernel.variance + kernel.noise - explained, kernel.noise)
        return values, np.sqrt(variances)

    @functools.cached_property
    def _factors(self) -> Floats:
        """Factors of the columns of points that raise weights to `LEAST_WEIGHT`, and that of types
        to `UNLIKE_TYPE`.
        """
        columns = [len(self.weights), len(self.types) + 1, len(self.families) + 1]
        weights = np.concatenate([self.weights, np.repeat(self.kernel[:2], columns[1:])])
        return np.sqrt(
            np.maximum(weights, np.repeat([LEAST_WEIGHT, UNLIKE_TYPE, 0.0], columns)) / weights
        )  # type: ignore[no-any-return]

    def _comparable(self, points: Floats) -> Floats:
        """Return points for distances between calls, with columns for what selects other
        kernels.
        """
        numbers = (
            points[:, : len(self.weights)] / np.sqrt(self.weights) * self.deviations + self.means
        )
        itemsize, products, n = (
            numbers[:, NAMES.index(name)] for name in ("itemsize", "products", "n")
        )
        kinds = np.column_stack([np.round(itemsize), products > SEVERAL, np.abs(n - ONE) < 0.1])
        return np.hstack([points * self._factors, np.sqrt(UNLIKE) * kinds])

    @functools.cached_property
    def _readings(self) -> Floats:
        return self._comparable(self.points)

    def distances(self, inputs: Inputs) -> Floats:
        """Return the distance of each call to the nearest reading. Unit: length scales."""
        points = self._comparable(self.placed(inputs))
        batches = (points[begin : begin + BATCH] for begin in range(0, len(points), BATCH))
        nearest = [squared_distances(batch, self._readings).min(axis=1) for batch in batches]
        return np.sqrt(np.maximum(np.concatenate([np.empty(0), *nearest]), 0.0))


def fit_process(
    inputs: Inputs, values: Floats, steps: int = 25, inducing: int = INDUCING
) -> GaussianProcess:
    """Fit a process. ``steps``: maximum number of optimizer steps for the length scales."""
    means, deviations = inputs.numbers.mean(axis=0), inputs.numbers.std(axis=0)
    deviations = np.where(deviations < 1e-9, 1.0, deviations)
    types, point_types = np.unique(inputs.types, return_inverse=True)
    families, point_families = np.unique(inputs.families, return_inverse=True)
    middle, standard = float(np.median(values)), (inputs.numbers - means) / deviations
    parts = [standard, _one_hot(inputs.types, types), _one_hot(inputs.families, families)]
    columns, features = np.hstack(parts), standard.shape[1]
    weight_of = np.repeat(
        np.arange(features + 2), [1] * features + [part.shape[1] for part in parts[1:]]
    )
    order = np.random.default_rng(0).permutation(len(values))
    few = order[:HYPER]
    weights, kernel = _likeliest(columns[few], weight_of, values[few] - middle, steps)
    at = (standard * np.sqrt(weights[:-2])).astype(np.float16)
    points = columns * np.sqrt(weights[weight_of])
    points[:, : at.shape[1]] = at  # as it is stored
    chosen = np.sort(order[:inducing])
    return GaussianProcess(
        np.array([*weights[-2:], kernel.variance, kernel.noise, middle]),
        weights[:-2],
        means,
        deviations,
        types,
        families,
        at[chosen],
        point_types[chosen].astype(np.int16),
        point_families[chosen].astype(np.int16),
        _coefficients(kernel, points[chosen], points, values - middle),
    )


def _coefficients(kernel: MaternKernel, chosen: Floats, points: Floats, values: Floats) -> Floats:
    from scipy.linalg import solve

    among = kernel.covariance(squared_distances(chosen, chosen))
    if len(chosen) == len(points):  # exact, in the same order
        matrix, target = among + (kernel.noise + JITTER) * np.eye(len(values)), values
    else:
        matrix, target = kernel.noise * among, np.zeros(len(chosen))
        for begin in range(0, len(values), len(chosen)):
            batch = slice(begin, begin + len(chosen))
            towards = kernel.covariance(squared_distances(chosen, points[batch]))
            matrix += towards @ towards.T
            target += towards @ values[batch]
        matrix += 1e-8 * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
    return solve(matrix, target, assume_a="pos")  # type: ignore[no-any-return]


def _likeliest(
    at: Floats, weight_of: npt.NDArray[np.intp], values: Floats, steps: int
) -> tuple[Floats, MaternKernel]:
    """Return the weights and the kernel with the largest posterior probability.

    ``weight_of``: index of the weight of each column of `at`; the last two weights are those of
    types and families."""
    needs_scikit_learn()
    from scipy.optimize import minimize

    features = weight_of[-1] - 1
    start = [*[PRIOR_WEIGHT[0]] * features, 0.0, 0.0, np.log(values.var() + 1e-3), np.log(0.02)]
    bounds = [(-12.0, 6.0)] * (features + 2) + [(-8.0, 6.0), (-9.0, 2.0)]
    settings = {"method": "L-BFGS-B", "bounds": bounds, "options": {"maxiter": steps}}
    found = np.exp(minimize(_loss, start, (at, weight_of, values), jac=True, **settings).x)
    return found[:-2], MaternKernel(*map(float, found[-2:]))


def _loss(
    logarithms: Floats, at: Floats, weight_of: npt.NDArray[np.intp], values: Floats
) -> tuple[float, Floats]:
    """The negative logarithm of the posterior of all weights, the variance and the noise, and its
    gradient.

    The arguments are logarithms.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    weights, kernel = np.exp(logarithms[:-2]), MaternKernel(*map(float, np.exp(logarithms[-2:])))
    scaled = at * np.sqrt(weights[weight_of])
    squared = squared_distances(scaled, scaled)
    signal = kernel.covariance(squared)
    try:
        factor = cho_factor(signal + (kernel.noise + JITTER) * np.eye(len(at)), lower=True)
    except LinAlgError:
        return 1e10, np.zeros_like(logarithms)
    coefficients = cho_solve(factor, values)
    between = np.outer(coefficients, coefficients) - cho_solve(factor, np.eye(len(at)))
    # The derivative of the kernel by the squared distance is -3/2 variance exp(-root).
    slope = between * (-1.5 * kernel.variance * np.exp(-ROOT3 * np.sqrt(np.maximum(squared, 0.0))))
    of_columns = (scaled**2 * slope.sum(axis=1)[:, None]).sum(axis=0) - np.einsum(
        "ij,ij->j", scaled, slope @ scaled
    )
    of_others = [0.5 * (between * signal).sum(), 0.5 * kernel.noise * np.trace(between)]
    gradient = -np.concatenate([np.bincount(weight_of, of_columns), of_others])
    prior = np.zeros_like(logarithms)
    for some, (mean, deviation) in ((slice(0, -4), PRIOR_WEIGHT), (slice(-4, -2), PRIOR_OTHER)):
        prior[some] = (logarithms[some] - mean) / deviation
        gradient[some] += prior[some] / deviation
    value = 0.5 * values @ coefficients + np.log(np.diag(factor[0])).sum() + 0.5 * prior @ prior
    return float(value), gradient
