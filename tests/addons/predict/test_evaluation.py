"""Predictors are judged by what they have not learnt from, and their intervals hold for families
that nobody has read."""

from __future__ import annotations

import dataclasses
import functools
import json
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.operators_left_out import GROUPS, left_out
from farm.addons.predict import call_features, stored_predictor
from farm.addons.predict.calibration import Calibration, PredictionErrors, quantile
from farm.addons.predict.dataset import cached_share, measured_models
from farm.addons.predict.evaluation import (
    FOLDS,
    Score,
    cross_validated,
    evaluate,
    evaluate_fitted,
    fit,
    learning_curve,
    leave_families_out,
)
from farm.addons.predict.predictors import PREDICTORS
from farm.addons.predict.query import training_set
from farm.addons.predict.stored_predictor import StoredPredictor
from farm.addons.predict.tile_roofline import card_rates
from farm.errors import UsageError
from farm.store import tables
from farm.types.variant import Variant
from tests.addons.predict.made_up import MEDIANS, PROCESS, TREES, dataset, models
from tests.report import compiled, filled

# Looked for and not imported: every worker collects this file, and one runs it.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


@functools.cache
def evaluated():
    return evaluate(MEDIANS, dataset(), models(dataset()), curve=True)


def test_a_family_is_answered_by_who_has_not_learnt_from_it():
    data, seen = dataset(), []

    class Watched:
        name = "watched"

        def fit(self, learnt):
            seen.append({call.operator_id for call in learnt.calls})
            return MEDIANS.fit(learnt)

    held = leave_families_out(Watched(), data, models(data))
    for model, learnt in zip(sorted(models(data), key=lambda one: one.family), seen, strict=True):
        assert not model.operator_ids & learnt
    assert np.isfinite(held.costs.time_us).all()
    assert set(held.families) == {"resnet", "vgg", "llama", "vit", "bert"}


def test_all_readings_of_a_tuple_are_in_one_fold():
    data = dataset()
    twice = dataclasses.replace(data, rows=data.rows + data.rows)
    held = cross_validated(MEDIANS, twice)
    assert (held.families[: len(data)] == held.families[len(data) :]).all()
    assert set(held.families) == {str(fold) for fold in range(FOLDS)}
    assert np.isfinite(held.costs.time_us).all()


def test_an_evaluation_says_all_that_was_asked():
    found, held = evaluated()
    assert found.cross_validation["time_us"].median < 0.5
    assert found.families["power_w"].count == len(dataset())
    assert set(found.by_type) == {"linear", "relu", "add"}
    assert len(found.models) == 5 == found.sums["time_us"].count
    assert 0.8 <= found.intervals["time_us"].coverage <= 1
    assert found.intervals["time_us"].width > 1
    assert found.unseen is None
    assert found.narrowed[12].mean < found.sums["time_us"].mean
    sizes = [number for number, _ in found.curve]
    assert sizes == sorted(sizes)
    assert json.dumps(found.to_json())
    assert len(held.sums) == 5


def test_intervals_are_counted_by_distance_and_wider_far_from_the_readings():
    data = dataset()
    found, held = evaluate(PROCESS, data, models(data), folds=False)
    assert sum(one.count for one in found.by_distance) == len(data)
    assert found.by_distance[-1].distance == held.costs.distance.max()
    widths = [one.intervals["time_us"].width for one in found.by_distance]
    assert widths[-1] > widths[0]
    assert evaluated()[0].by_distance == ()
    products = left_out(
        PROCESS,
        data,
        GROUPS["products, float32"],
        Calibration.of(held.errors(data), held.sum_errors()),
    )
    assert products["distance"] > found.by_distance[-2].distance
    assert products["time_width"] > widths[-1]


def test_more_readings_teach_more():
    errors = dict(learning_curve(TREES, dataset()))
    assert errors[max(errors)] < errors[25]


def test_a_score_counts_what_is_within():
    score = Score.of(np.log([1.05, 0.85, 1.5, np.nan]))
    assert (score.count, score.within_10, score.within_20) == (
        3,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
    )
    assert score.median == pytest.approx(0.15)
    assert Score.of(np.array([np.nan])) is None


def test_each_family_counts_alike_for_an_interval():
    off = np.concatenate([np.full(99, 0.01), np.full(10, 0.5)])
    families = np.array(["large"] * 99 + ["small"] * 10)
    known = np.ones(109, dtype=bool)
    assert quantile(PredictionErrors(off, np.ones(109), families, known), 0.6) == 0.5
    assert (
        quantile(PredictionErrors(off, np.ones(109), np.array(["one"] * 109), known), 0.6) == 0.01
    )


def test_an_interval_that_was_calibrated_covers_what_comes_later():
    data = dataset()
    learnt = fit(PREDICTORS["best"], data, models(data))
    later = dataset(seed=11)
    found, _ = evaluate_fitted(learnt.fitted, later, models(later), learnt.calibration)
    assert found.intervals["time_us"].coverage > 0.75
    assert found.sum_intervals["time_us"].coverage >= 0.6
    assert found.families["time_us"].median < 0.2


def test_a_kept_predictor_is_what_was_saved(tmp_path):
    data = dataset()
    learnt = fit(PREDICTORS["best"], data, models(data))
    path = tmp_path / stored_predictor.file_name(data.conditions)
    assert path.name == "nvidia-h200-torch-2.11.0.npz"
    stored_predictor.save(learnt, path)
    again = stored_predictor.load(path)
    assert (again.key, again.calibration, again.conditions) == (
        data.key,
        learnt.calibration,
        data.conditions,
    )
    assert again.fitted.predict(data.calls).time_us == pytest.approx(
        learnt.fitted.predict(data.calls).time_us, rel=1e-4
    )
    assert again.has_learned([data.calls[0].operator_id, "another"]).tolist() == [True, False]
    assert (
        stored_predictor.find([tmp_path / "nowhere", tmp_path], "NVIDIA H200", "2.11").key
        == data.key
    )
    assert (
        stored_predictor.find([tmp_path], "NVIDIA H200", "9.9").key == data.key
    )  # of another software, and says of which
    assert stored_predictor.find([tmp_path], "NVIDIA A100") is None


def test_what_is_kept_is_never_unpickled_and_a_stale_one_says_so(tmp_path, monkeypatch):
    data = dataset()
    path = tmp_path / "h200.npz"
    stored_predictor.save(
        StoredPredictor.of(data, PREDICTORS["roofline"].fit(data), Calibration()), path
    )
    monkeypatch.setattr(call_features, "VERSION", call_features.VERSION + 1)
    with pytest.raises(UsageError, match=r"uses version .* of the features"):
        stored_predictor.load(path)
    monkeypatch.undo()
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
    np.savez(path, **{name.removesuffix(".npy"): np.array([print], dtype=object) for name in names})
    with pytest.raises(UsageError, match="is not a predictor"):
        stored_predictor.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(UsageError, match="is not a predictor"):
        stored_predictor.load(path)
    path.with_suffix(".json").write_text("[]")
    with pytest.raises(UsageError, match="is not a JSON object"):
        stored_predictor.load(path)
    with pytest.raises(UsageError, match="There is no predictor"):
        stored_predictor.load(tmp_path / "other.npz")


def test_files_of_two_predictors_are_not_one_predictor(tmp_path):
    data = dataset()
    for name in ("one", "other"):
        fitted = PREDICTORS["roofline"].fit(dataset(seed=len(name)))
        stored_predictor.save(
            StoredPredictor.of(data, fitted, Calibration()), tmp_path / f"{name}.npz"
        )
    (tmp_path / "one.npz").replace(tmp_path / "other.npz")
    with pytest.raises(UsageError, match="differs from its checksum") as caught:
        stored_predictor.load(tmp_path / "other.npz")
    assert "farm predict fit" in caught.value.next_step


def test_an_archive_with_damaged_data_is_named(tmp_path):
    data = dataset()
    path = tmp_path / "h200.npz"
    stored_predictor.save(
        StoredPredictor.of(data, PREDICTORS["roofline"].fit(data), Calibration()), path
    )
    about = json.loads(path.with_suffix(".json").read_text())
    del about["checksum"]  # as of an earlier version
    path.with_suffix(".json").write_text(json.dumps(about))
    assert stored_predictor.load(path).rows == len(data)
    packed = bytearray(path.read_bytes())
    packed[60:200] = bytes(140)
    path.write_bytes(packed)
    with pytest.raises(UsageError, match="is not a predictor"):
        stored_predictor.load(path)


def test_too_few_families_are_said():
    data = dataset()
    with pytest.raises(UsageError, match="2 model families; an evaluation needs at least 3"):
        leave_families_out(MEDIANS, data, models(data, ("resnet", "vgg")))


def test_what_one_card_taught_is_asked_of_another():
    data = dataset()
    found, _ = evaluate_fitted(TREES.fit(data), dataset(seed=2), models(dataset(seed=2)))
    assert found.families["time_us"].median < 0.3
    assert found.intervals == {}


def test_weights_of_a_small_model_stay_in_the_cache():
    small = [dataclasses.replace(dataset().calls[0], parameter_bytes=1 << 20, bytes_moved=2 << 20)]
    l2_bytes = card_rates("cuda", "NVIDIA H200").l2_bytes
    assert cached_share(small, (2,), l2_bytes) == 1
    assert cached_share(small, (200,), l2_bytes) == 0


def test_models_are_read_with_their_wholes(database):
    filled.fill(database)
    filled.fill(database, Variant("alexnet", 1, 64), whole=False, created_at_s=1.8e9)
    with database.read() as session:
        data, found = training_set(session)
        assert measured_models(session, data.card, data.conditions) == found
    titles = {model.title: model for model in found}
    assert {model.family for model in found} == {"resnet", "alexnet"}
    assert titles["resnet18 2x64 float32"].cost.time_us.value > 0
    assert titles["alexnet 1x64 float32"].cost is None
    assert not any(call.data_known for model in found for call in model.calls)


def test_compiled_models_change_neither_the_rows_nor_the_peaks(database):
    filled.fill(database, card="GPU-1")
    with database.read() as session:
        before, _ = training_set(session)
    compiled.job(database, "compiled", compiled.COMPILED, compiled.compiled_calls())
    with database.write() as session:
        slow = {"matmul_flops_per_s": {"float32": 1e13, "bfloat16": 2e14}, "copy_bytes_per_s": 1e12}
        session.get_one(tables.CardRow, compiled.CARD).fingerprint = slow
    with database.read() as session:
        after, found = training_set(session)
    assert (after.key, len(after)) == (before.key, len(before))
    assert not any(model.variant.compile for model in found)
