"""Predictors learn from readings, are kept as arrays, and answer from these as scikit-learn
would.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from importlib.util import find_spec

import numpy as np
import pytest

from farm.addons.predict.call_features import CallDescription
from farm.addons.predict.gaussian_process import fit_process
from farm.addons.predict.predictors import (
    FAR,
    LEAST_TIME_SPREAD,
    LEAST_TIME_SPREAD_US,
    NEAR,
    PREDICTORS,
    FittedPredictor,
    predictor_spec,
)
from farm.addons.predict.regressors import Inputs, fit_medians, fit_trees
from farm.errors import UsageError
from farm.types.figure import PassCost
from tests.addons.predict.made_up import MEDIANS, PROCESS, TREES, dataset

SPECS = {**PREDICTORS, "medians": MEDIANS, "process": PROCESS, "trees": TREES}
# Looked for and not imported: every worker collects this file, and one runs it.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


@functools.cache
def fitted(name):
    return SPECS[name].fit(dataset())


@pytest.mark.parametrize("name", SPECS)
def test_each_predicts_what_it_has_not_seen_and_keeps_it_as_arrays(name):
    learnt = fitted(name)
    file = io.BytesIO()
    np.savez_compressed(file, **learnt.arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        again = FittedPredictor.from_arrays(
            json.loads(json.dumps(learnt.about() | {"predictor": "best"})), dict(arrays)
        )
    asked = dataset(seed=7)
    said, said_again = learnt.predict(asked.calls), again.predict(asked.calls)
    assert said_again.time_us == pytest.approx(said.time_us, rel=1e-4)
    assert said_again.power_w == pytest.approx(said.power_w, rel=1e-4)
    assert said_again.time_spread == pytest.approx(said.time_spread, rel=1e-2)
    off = np.abs(np.log(said.time_us / [row.cost.time_us.value for row in asked.rows]))
    most = {"roofline": 1.0, "medians": 0.6}.get(name, 0.25)
    assert np.median(off) < most
    assert (said.time_spread > 0).all()
    assert (said.in_model(0.5)[0] > 0).all()
    assert said.known.all()


def test_trees_of_arrays_predict_what_scikit_learn_predicts():
    from sklearn.ensemble import ExtraTreesRegressor

    data = dataset()
    inputs, values = Inputs.of(data.calls), np.log([row.cost.time_us.value for row in data.rows])
    trees = fit_trees(inputs, values, trees=20, least_leaf=2)
    asked = Inputs.of(dataset(seed=3).calls)
    theirs = ExtraTreesRegressor(20, min_samples_leaf=2, random_state=0)
    theirs.fit(trees.columns(inputs), values)
    assert trees.predict(asked)[0] == pytest.approx(theirs.predict(trees.columns(asked)), abs=1e-5)


def test_a_stored_predictor_of_a_removed_kind_is_refused():
    learnt = fitted("best")
    for other in ({"predictor": "boosting"}, {"over": "roofline_us"}, {"raw_power": True}):
        with pytest.raises(ValueError, match="this version has no predictor"):
            FittedPredictor.from_arrays(learnt.about() | other, learnt.arrays())


def test_a_process_says_what_scikit_learn_says_of_the_same_kernel():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    data = dataset()
    alone = data.where([call.operator_type == "relu" for call in data.calls])
    inputs, values = Inputs.of(alone.calls), np.log([row.cost.time_us.value for row in alone.rows])
    process = fit_process(inputs, values, steps=10)
    kernel, scales = process.matern, np.sqrt(process.weights) / process.deviations
    assert process.at == pytest.approx(
        (inputs.numbers - process.means) * scales, rel=1e-3, abs=1e-6
    )
    theirs = GaussianProcessRegressor(
        ConstantKernel(kernel.variance) * Matern(1.0, nu=1.5) + WhiteKernel(kernel.noise),
        alpha=1e-6,
        optimizer=None,
    ).fit(process.at, values - process.kernel[4])
    other = dataset(seed=5)
    asked = Inputs.of(other.where([call.operator_type == "relu" for call in other.calls]).calls)
    mean, deviation = theirs.predict((asked.numbers - process.means) * scales, return_std=True)
    own, spread = process.predict(asked)
    assert own == pytest.approx(mean + process.kernel[4], abs=1e-6)
    assert spread == pytest.approx(deviation, rel=0.1)  # from the nearest points alone


def test_inducing_points_stand_for_many_readings():
    data = dataset()
    inputs, values = Inputs.of(data.calls), np.log([row.cost.time_us.value for row in data.rows])
    exact = fit_process(inputs, values, steps=10)
    some = fit_process(inputs, values, steps=10, inducing=len(data) // 2)
    assert len(some.at) == len(data) // 2
    assert np.median(np.abs(some.predict(inputs)[0] - exact.predict(inputs)[0])) < 0.05


def test_length_scales_are_kept_for_other_readings():
    data = dataset()
    fitted_to_all = fitted("best")
    half = data.where([number % 2 == 0 for number in range(len(data))])
    again = PREDICTORS["best"].like(fitted_to_all).fit(half)
    process, kept = again.time.parts[0], fitted_to_all.time.parts[0]
    assert len(process.at) == len(half)
    assert process.weights == pytest.approx(kept.weights)
    assert process.matern == kept.matern
    learned = fitted_to_all.predict(half.calls).time_us
    assert again.predict(half.calls).time_us == pytest.approx(learned, rel=0.2)
    assert PREDICTORS["roofline"].like(fitted_to_all) is PREDICTORS["roofline"]


def test_an_unseen_type_is_marked_and_wider_and_an_unseen_family_goes_by_the_roofline():
    learnt = fitted("best")
    relu = next(call for call in dataset().calls if call.operator_type == "relu")
    unseen = dataclasses.replace(relu, operator_type="celu")
    stranger = dataclasses.replace(relu, operator_type="sparse", operator_family="sparse product")
    said = learnt.predict([relu, unseen, stranger])
    assert list(said.known) == [True, False, False]
    assert said.time_spread[1] > said.time_spread[0]
    assert said.time_us[2] == pytest.approx(
        stranger.roofline_us * np.exp(learnt.fallback_time.medians[0])
    )


def test_where_the_data_are_not_known_they_are_taken_as_typical():
    call = dataset().calls[0]
    blind = dataclasses.replace(call, data_known=False, zeros=0.0, data_class="")
    assert fitted("best").predict([blind]).power_w == pytest.approx(
        fitted("best").predict([call]).power_w, rel=0.5
    )


def test_what_has_no_power_is_not_given_one():
    data = dataset()
    rows = tuple(dataclasses.replace(row, cost=PassCost(row.cost.time_us)) for row in data.rows)
    said = MEDIANS.fit(dataclasses.replace(data, rows=rows)).predict(data.calls)
    assert np.isnan(said.power_w).all()
    assert np.isfinite(said.time_us).all()


def test_too_few_readings_and_unknown_names_are_said():
    few = dataset().where([place < 5 for place in range(len(dataset()))])
    with pytest.raises(UsageError, match="5 operator readings; fitting a predictor needs 20"):
        PREDICTORS["best"].fit(few)
    with pytest.raises(UsageError, match="no predictor 'bets'") as refused:
        predictor_spec("bets")
    assert "best" in refused.value.next_step


def test_a_factor_of_its_own_takes_three_readings():
    inputs = Inputs.of(dataset().calls)
    medians = fit_medians(inputs, np.zeros(len(inputs)))
    assert isinstance(inputs.calls[0], CallDescription)
    assert {"", "type:relu", "family:pointwise"} <= set(medians.names)


def test_the_farther_a_call_is_from_the_readings_the_wider_its_spread():
    data = dataset()
    small = data.where([call.operator_type != "linear" or call.k <= 512 for call in data.calls])
    large = dataset(seed=7).where(
        [call.operator_type == "linear" and call.k == 2048 for call in dataset(seed=7).calls]
    )
    learnt = PREDICTORS["best"].fit(small)
    own, other = learnt.predict(small.calls), learnt.predict(large.calls)
    assert own.distance == pytest.approx(0, abs=0.02)
    assert other.distance.min() > 0.1
    regressors = learnt.time.predict(Inputs.of(large.calls))[1]
    spreads = np.hypot(
        regressors, np.hypot(LEAST_TIME_SPREAD, LEAST_TIME_SPREAD_US / other.time_us)
    )
    assert (other.time_spread > spreads)[other.distance > NEAR].all()
    farthest = np.argsort(other.distance)
    assert (np.diff((other.time_spread / spreads)[farthest]) > -1e-9).all()
    assert np.isnan(fitted("trees").predict(data.calls).distance).all()


@pytest.mark.parametrize(
    "unlike", [{"itemsize_bytes": 2}, {"products": 8}, {"n": 1}, {"operator_type": "convolution"}]
)
def test_a_call_that_runs_other_kernels_than_all_readings_is_far(unlike):
    call = next(call for call in dataset().calls if call.operator_type == "linear" and call.n > 1)
    near, far = fitted("process").predict([call, dataclasses.replace(call, **unlike)]).distance
    assert near < 0.05
    assert far > max(FAR, near + 0.9)


def test_short_times_have_a_wide_interval():
    costs = fitted("best").predict(dataset().calls)
    assert (costs.time_spread * costs.time_us >= LEAST_TIME_SPREAD_US).all()
