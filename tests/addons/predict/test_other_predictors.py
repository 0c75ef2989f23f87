"""Predictors of publications learn from readings, too; a benchmark evaluates them like the farm's
own.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks import other_predictors
from benchmarks.other_predictors import OTHERS, fit_polynomials
from farm.addons.predict.predictors import PREDICTORS
from farm.addons.predict.regressors import Inputs
from tests.addons.predict.made_up import dataset

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


@pytest.mark.parametrize("name", OTHERS)
def test_each_predicts_what_it_has_not_seen(name):
    learnt, asked = OTHERS[name].fit(dataset()), dataset(seed=7)
    said = learnt.predict(asked.calls)
    off = np.abs(np.log(said.time_us / [row.cost.time_us.value for row in asked.rows]))
    assert np.median(off) < 0.6
    assert (said.time_spread > 0).all()


def test_a_polynomial_is_found_by_lasso():
    data = dataset()
    inputs = Inputs.of(data.calls)
    values = 3.0 + 2e-3 * np.array([call.batch * call.last_size for call in data.calls])
    found = fit_polynomials(inputs, values)
    assert np.median(np.abs(found.predict(inputs)[0] / values - 1)) < 0.05


def test_the_command_evaluates_them_beside_the_farms_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["other_predictors", "neural"])
    monkeypatch.setitem(PREDICTORS, "best", PREDICTORS["best"])
    known = dict(PREDICTORS)
    with pytest.raises(SystemExit):
        other_predictors.main()
    for name in PREDICTORS.keys() - known:
        del PREDICTORS[name]
    assert "Did you mean neural-power?" in capsys.readouterr().err
