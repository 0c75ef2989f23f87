"""An estimate is filled with predictions that are told apart, with intervals, and says which
readings would narrow it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
from sqlmodel import select

from farm.addons.predict import call_features, compiled_models, stored_predictor
from farm.addons.predict.calibration import Calibration
from farm.addons.predict.estimating import estimate
from farm.addons.predict.next_measurements import plan
from farm.addons.predict.query import EstimateQuery, import_packaged, training_set
from farm.addons.predict.stored_predictor import StoredPredictor
from farm.devices.device import Card
from farm.errors import UsageError
from farm.exchange.export import export
from farm.models import catalog
from farm.operators.sweep_builder import Expansion
from farm.requests import measurement_file
from farm.requests.memory import memory_need
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.types.protocol import Protocol
from farm.types.variant import Variant
from tests.addons.predict.made_up import MEDIANS
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled

WIDE = Calibration(1.5, 1.5, 1.5, 3.0, 3.0, 3.0, 1.0, 1.0, families=5)


def learnt(database):
    """A predictor of what the database holds; its medians need no scikit-learn."""
    with database.read() as session:
        data, _ = training_set(session, "H200")
    return StoredPredictor.of(data, dataclasses.replace(MEDIANS, name="best").fit(data), WIDE)


def without_linear(database):
    filled.fill(
        database, leave_out=lambda spec: spec.short_name in ("Linear", "MaxPool2d"), whole=False
    )
    return learnt(database)


def asked(database, predictor, variant=filled.VARIANT):
    with database.read() as session:
        return estimate(
            session, variant, "NVIDIA H200", Protocol(), predictor=predictor, notes=["a note"]
        )


def test_what_is_predicted_stands_beside_what_was_read(database):
    found = asked(database, without_linear(database))
    assert {one.needed.short_name for one in found.missing} == {"Linear", "MaxPool2d"}
    assert all(one.predicted.known is False for one in found.missing)
    assert all(
        one.predicted.time_us.low < one.predicted_us < one.predicted.time_us.high
        for one in found.missing
    )
    assert found.total.time_us.value == pytest.approx(
        found.readings.time_us.value + found.predicted.time_us.value
    )
    assert (
        found.total.time_us.low
        < found.readings.time_us.value + found.predicted.time_us.value
        < found.total.time_us.high
    )
    assert found.total.energy_mj.value == pytest.approx(
        found.readings.energy_mj.value + found.predicted.energy_mj.value
    )
    assert (found.time.value, found.energy.value) == (
        found.total.time_us.value,
        found.total.energy_mj.value,
    )
    assert found.level == 0.9
    assert found.time.low < found.total.time_us.low < found.total.time_us.high < found.time.high, (
        "a run of the model differs"
    )
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["predicted"] == pytest.approx(0)
    assert found.shares["unseen_types"] > 0
    assert set(found.narrowing) == set(found.missing_by_id)
    assert "a note" in found.notes
    told = json.loads(json.dumps(found.to_json()))
    assert told["total_time_low_us"] < told["total_time_us"]
    assert next(iter(told)) == "time_us"
    assert (
        told["time_us"]
        == told["total_time_us"]
        == pytest.approx(told["measured_time_us"] + told["predicted_us"])
    )
    assert (told["complete"], told["interval_level"], told["basis"]) == (True, 0.9, "sum")
    assert told["time_half_width_us"] is None
    assert told["measured_time_half_width_us"] > 0


def test_a_model_that_no_reading_covers_is_answered_from_predictions_alone(database):
    predictor = without_linear(database)
    half = dataclasses.replace(filled.VARIANT, dtype="float16")
    with (
        database.read() as session,
        pytest.raises(UsageError, match=r"No tuple of resnet18 .* has a reading"),
    ):
        estimate(session, half, "NVIDIA H200", Protocol())
    found = asked(database, predictor, half)
    assert (found.covered_tuples, found.coverage, found.readings.time_us.value) == (0, 0, 0)
    assert found.time.value == found.total.time_us.value == found.predicted.time_us.value > 0
    assert found.software == predictor.conditions.software
    assert found.readings.energy_mj is None
    assert found.energy.value == found.total.energy_mj.value > 0


def test_nothing_is_predicted_where_all_was_read(database):
    predictor = without_linear(database)
    filled.fill(database, whole=False, created_at_s=1.8e9)
    found = asked(database, predictor)
    assert (found.missing, found.predicted.time_us.value, found.narrowing) == ((), 0, ())
    assert "a note" not in found.notes
    assert found.total.time_us.value == found.time.value


@pytest.fixture
def own(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    predictor = without_linear(database)
    stored_predictor.save(
        predictor,
        settings().state_dir / "predictors" / stored_predictor.file_name(predictor.conditions),
    )
    return farm


MODEL = ("estimate", "resnet18", "-b", "2", "--input-size", "64", "--card", "H200")


def test_at_a_terminal(own, database):
    said = own(*MODEL)
    assert said.code == 0, said.stderr
    words = (
        "(predictor `best`)",
        "for operator types without any reading",
        "narrow the interval most",
        "no reading of this",
    )
    for some in (*words, "90 % interval)"):
        assert some in said.stdout
    assert "95 %" not in said.stdout
    assert "    (90 % interval)\n" in said.stdout, "the head of the table of predicted tuples"
    first, *_ = (line.split() for line in said.stdout.splitlines()[1:])
    assert first[0] == "time"
    assert float(first[1]) == pytest.approx(
        json.loads(own(*MODEL, "--json").stdout)["time_us"], rel=0.01
    )
    assert "more: `farm predict fit`" not in said.stdout
    filled.fill(
        database,
        whole=False,
        created_at_s=1.8e9,
        leave_out=lambda spec: spec.short_name == "Linear",
    )
    assert "has readings of 1 more" in " ".join(own(*MODEL).stdout.split())


def test_a_predictor_that_cannot_be_read_costs_no_answer(own):
    (path,) = (settings().state_dir / "predictors").glob("*.json")
    path.write_text(path.read_text().replace('"features_version": ', '"features_version": 9'))
    said = own(*MODEL)
    assert said.code == 0, said.stderr
    told = " ".join(said.stdout.split())
    assert f"uses version 9{call_features.VERSION} of the features" in told
    assert "Fit the predictor again: farm predict fit." in told


def test_what_is_measured_joins_the_package_s_readings_in_one_database(
    database, tmp_path, monkeypatch
):
    theirs = Database(f"sqlite:///{tmp_path / 'theirs.db'}")
    theirs.upgrade()
    filled.fill(theirs, leave_out=lambda spec: spec.short_name == "Linear", whole=False)
    with theirs.read() as session:
        before = estimate(session, filled.VARIANT, "NVIDIA H200", Protocol())
        export(session, tmp_path / "h200")
    theirs.close()
    monkeypatch.setattr("farm.addons.predict.query.packaged_files", lambda: [tmp_path / "h200"])
    filled.fill(
        database, leave_out=lambda spec: spec.short_name != "Linear", whole=False, prefix="own"
    )
    query = EstimateQuery("H200")
    assert import_packaged(database, before, query)
    assert not import_packaged(database, before, query)  # covered now
    with database.read() as session:
        after = estimate(session, filled.VARIANT, "NVIDIA H200", Protocol())
    assert after.covered_tuples == before.covered_tuples + 1 == after.tuples
    assert after.time.value > before.time.value


def test_a_curve_over_sizes(own, database, tmp_path):
    one = dataclasses.replace(
        filled.VARIANT, batch=1
    )  # else the package is asked first, which takes a while
    filled.fill(
        database, one, leave_out=lambda spec: spec.short_name != "Conv2d", whole=False, prefix="one"
    )
    arguments = ("estimate", "resnet18", "--input-size", "64", "--card", "H200", "-b", "1..2")
    said = own(*arguments, "--png", str(tmp_path / "curve.png"))
    assert said.code == 0, said.stderr
    assert [
        line.split()[1] for line in said.stdout.splitlines() if line.startswith("resnet18")
    ] == ["1x64", "2x64"]
    assert (tmp_path / "curve.png").stat().st_size > 1000
    curve = json.loads(own(*arguments, "--json").stdout)["curve"]
    assert [one["variant"]["batch"] for one in curve] == [1, 2]
    assert curve[0]["covered_tuples"] < curve[1]["covered_tuples"]


def test_a_curve_lists_the_sizes_without_an_estimate(own, database):
    filled.fill(database, dataclasses.replace(filled.VARIANT, batch=2), whole=False, prefix="two")
    arguments = (
        "estimate",
        "resnet18",
        "--input-size",
        "64",
        "--card",
        "H200",
        "-b",
        "2,61",
        "--fill",
        "none",
    )
    found = own(*arguments)
    assert found.code == 0, found.stderr
    assert [
        line.split()[1] for line in found.stdout.splitlines() if line.startswith("resnet18")
    ] == ["2x64"]
    assert "No tuple of resnet18 61x64" in found.stderr
    shown = json.loads(own(*arguments, "--json").stdout)
    assert [one["variant"]["batch"] for one in shown["curve"]] == [2]
    assert [one["variant"]["batch"] for one in shown["without_estimate"]] == [61]
    assert own(*arguments[:-3], "61", "--fill", "none").code == 2


def test_what_is_asked_wrongly_is_told(own):
    for words, told in {
        ("-b", "many"): "is not a size",
        ("-b", "4..1"): "is not a size",
        ("-b", "1,2", "--measure", "3"): "--measure and --budget need one size",
        ("--png", "curve.png"): "--png draws a curve, but only one size is given",
        ("--measure", "3"): "This host has no NVIDIA H200 to measure on",
        ("--fill", "guess"): "There is no predictor 'guess'",
    }.items():
        said = own(*MODEL[:2], *MODEL[4:], *(() if "-b" in words else ("-b", "2")), *words)
        assert (said.code, told in said.stderr) == (2, True), said.stderr


def test_a_plan_is_a_measurement_file_of_what_is_most_unsure(own, tmp_path):
    file = tmp_path / "next.yml"
    arguments = ("predict", "plan", "resnet18", "-b", "2", "--input-size", "64", "--card", "H200")
    said = own(*arguments, "--out", str(file))
    assert said.code == 0, said.stderr
    assert "2 tuples, 100.0 % of the uncertainty" in said.stdout
    assert "(90 % interval)" in said.stdout
    found = json.loads(own(*arguments, "-n", "1", "--json").stdout)
    assert len(found["tuples"]) == 1 <= found["unsure"] + 1
    partials = measurement_file.load([file])
    assert {partial.sweep.operator for partial in partials} == {"Linear", "MaxPool2d"}
    made = {
        spec.id
        for partial in partials
        for batch in Expansion(partial.sweep).batches()
        for spec in batch
    }
    assert made == {
        tuple_["operator_id"] for tuple_ in json.loads(own(*arguments, "--json").stdout)["tuples"]
    }


def test_what_no_sweep_makes_is_asked_of_its_model(database):
    predictor = without_linear(database)
    variant = Variant("bert-base", 1, 0, length=16, layers=1, phase="encode")
    found = plan([asked(database, predictor, variant)], 50)
    measurements = measurement_file.parse(found.file, "plan")
    assert {partial.model for partial in measurements if not partial.sweep} == {"bert-base"}
    assert any(partial.sweep and partial.sweep.operator == "Linear" for partial in measurements)
    gains = [partial.gain for partial in found.proposals]
    assert gains == sorted(gains, reverse=True)


GROUPED = """
import torch
from torch import nn

def net():
    # Convolutions of three channels per group are unlike all packaged readings.
    blocks = [(nn.Conv2d(192, 192, 5, padding=2, groups=64), nn.BatchNorm2d(192), nn.ReLU()) for _ in range(2)]
    layers = [nn.Conv2d(3, 192, 3, padding=1), *(layer for block in blocks for layer in block)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10)), torch.randn(16, 3, 48, 48)
"""


def test_parts_unlike_the_readings_are_marked_and_planned_first(
    own, database, monkeypatch, tmp_path
):
    (tmp_path / "grouped_convolutions.py").write_text(GROUPED)
    monkeypatch.setenv("FARM_MODELS", json.dumps({"grouped": "grouped_convolutions:net"}))
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    settings.cache_clear()
    packaged = stored_predictor.find([stored_predictor.PACKAGED], "NVIDIA H200", "2.11")
    shutil.rmtree(settings().state_dir / "predictors")
    found = asked(database, packaged, catalog.variant("grouped", 16))
    entries = found.missing_by_id
    far = [one for one in found.missing if one.predicted.far]
    assert any(
        "g64" in one.needed.label and one.predicted.time_us.high / one.predicted_us > 1.8
        for one in far
    )
    assert {one.needed.short_name: one.predicted.far for one in found.missing}["ReLU"] is False
    assert plan([found], 1).proposals[0].entry.predicted.far

    def marked_far(missing, far):
        return dataclasses.replace(
            missing, predicted=dataclasses.replace(missing.predicted, far=far)
        )

    near = [marked_far(missing, False) for missing in found.missing]
    first, second = plan([dataclasses.replace(found, missing=tuple(near))], 2).proposals
    second_id = second.entry.needed.operator_id
    marked = [marked_far(one, one.needed.operator_id == second_id) for one in near]
    proposals = plan([dataclasses.replace(found, missing=tuple(marked))], 2).proposals
    assert first.entry.needed.operator_id != second_id
    assert proposals[0].entry.needed.operator_id == second_id
    said = " ".join(own("estimate", "grouped", "-b", "16", "--card", "H200").stdout.split())
    assert "; far)" in said
    assert f"the interval is wide ({len(far)} tuple" in said
    assert (
        f"A reading of {entries[found.narrowing[0]].needed.label} narrows the total most (`--measure 1`)."
        in said
    )


def test_neighbours_of_what_is_chosen_count_half(database):
    predictor = without_linear(database)
    found = plan(
        [asked(database, predictor, dataclasses.replace(filled.VARIANT, dtype="float16"))], 1000
    )
    assert len(found.proposals) > 20
    assert sum(partial.gain for partial in found.proposals) < found.uncertain


def test_a_kept_predictor_is_held_against_another_database(own, database, tmp_path):
    other = Database(f"sqlite:///{tmp_path / 'other.db'}")
    other.upgrade()
    filled.fill(other)
    other.close()
    said = own("predict", "evaluate", "--on", str(tmp_path / "other.db"), "--card", "H200")
    assert said.code == 0, said.stderr
    assert "2 tuples of NVIDIA H200" in said.stdout  # the others were learnt from
    assert "whole models, predictor best" in said.stdout
    found = json.loads(
        own("predict", "evaluate", "--on", str(tmp_path / "other.db"), "--json").stdout
    )
    (evaluation,) = found["evaluations"]
    assert evaluation["families"]["time_us"]["count"] == 2
    assert evaluation["models"][0]["model"] == "resnet18 2x64 float32"
    assert own("predict", "evaluate", "--on", "nowhere.db").code == 2
    picture = tmp_path / "errors.svg"
    said = own("predict", "evaluate", "--on", str(tmp_path / "other.db"), "--png", str(picture))
    assert f"Drawn to {picture}" in " ".join(said.stderr.split())
    assert "tuples outside the training data" in picture.read_text()


def test_an_evaluation_without_a_new_tuple_draws_nothing_and_says_so(own, database, tmp_path):
    picture = tmp_path / "errors.svg"
    said = own("predict", "evaluate", "--on", database.url, "--png", str(picture))
    assert said.code == 0, said.stderr
    assert "has learned from every tuple" in " ".join(said.stderr.split())
    assert not picture.exists()


def test_a_data_set_is_written(own, tmp_path):
    said = own("predict", "dataset", str(tmp_path / "tuples.csv"), "--card", "H200")
    assert (said.code, "tuples of NVIDIA H200" in said.stdout) == (0, True)
    assert own("predict", "fit", "--out", "h200.bin").code == 2


def test_without_intervals_the_tuples_of_the_largest_share_are_measured_first(database):
    filled.fill(
        database, leave_out=lambda spec: spec.short_name in ("Linear", "Conv2d"), whole=False
    )
    with database.read() as session:
        found = estimate(session, filled.VARIANT, "NVIDIA H200", Protocol())
    shares = {id_: one.share for id_, one in found.missing_by_id.items()}
    assert (found.narrowing, len(shares) > 5) == ((), True)
    chosen = found.to_measure(3)
    assert [shares[id_] for id_ in chosen] == sorted(shares.values(), reverse=True)[:3]
    assert set(chosen) <= set(found.missing_by_id)
    assert len(found.to_measure(seconds=2 * 1.25)) == 2
    assert len(found.to_measure(5, seconds=0.1)) == 1
    assert set(found.to_measure()) == set(shares)


def test_a_measurement_without_a_predictor_measures_what_is_missing(own, database, monkeypatch):
    card = Card(id="GPU-0", kind="cuda", model="NVIDIA H200", memory_bytes=10**11)
    measured = []
    monkeypatch.setattr("farm.jobs.cards.own_cards", lambda say: [card])
    monkeypatch.setattr(
        "farm.jobs.in_process.measure_tuples", lambda specs, **options: measured.extend(specs)
    )
    monkeypatch.setattr("farm.addons.predict.query.packaged_files", list)
    said = own(*MODEL, "--fill", "none", "--measure", "2")
    assert said.code == 0, said.stderr
    assert "Measuring 2 tuples" in said.stderr
    assert sorted(spec["operator"].rpartition(".")[2] for spec in measured) == [
        "Linear",
        "MaxPool2d",
    ]


def test_there_is_nothing_to_measure_if_readings_cover_every_tuple(database):
    filled.fill(database, whole=False)
    with database.read() as session:
        found = estimate(session, filled.VARIANT, "NVIDIA H200", Protocol())
    with pytest.raises(UsageError, match="All tuples of the model have readings"):
        found.to_measure(3)


def test_tokens_of_a_model_include_predictions(own, database):
    prompt = catalog.variant("falcon-7b", 2, length=64, layers=1, dtype="bfloat16")
    filled.fill(
        database,
        prompt,
        leave_out=lambda spec: spec.short_name == "Linear",
        whole=False,
        prefix="prompt",
    )
    with database.read() as session:
        stored_predictor.save(learnt(database), settings().state_dir / "predictors" / "prompt.npz")
        found = EstimateQuery("H200").estimate(session, prompt)
    assert found.shares["measured"] < 1
    assert found.per_token.tokens_per_s == pytest.approx(128e6 / found.total.time_us.value)
    assert found.per_token.energy_per_token_mj == pytest.approx(found.total.energy_mj.value / 128)
    said = own(
        "estimate",
        "falcon-7b",
        "-b",
        "2",
        "--length",
        "64",
        "--layers",
        "1",
        "--generate",
        "3",
        "--json",
    )
    assert said.code == 0, said.stderr
    told = json.loads(said.stdout)
    assert [one["variant"]["cache"] for one in told["decodes"]] == [65, 67]
    assert (told["complete"], told["interval_level"]) == (True, 0.9)
    decodes_us = [one["time_us"] for one in told["decodes"]]
    assert told["time_us"] == pytest.approx(
        told["prefill"]["time_us"] + 1.5 * sum(decodes_us), rel=1e-3
    )
    assert told["time_low_us"] < told["time_us"] < told["time_high_us"]
    assert told["tokens_per_s"] == pytest.approx(6e6 / told["time_us"])
    text = own(
        "estimate", "falcon-7b", "-b", "2", "--length", "64", "--layers", "1", "--generate", "3"
    ).stdout
    assert text.splitlines()[3].startswith("prompt and 3 generated tokens")
    none = own(
        "estimate", "falcon-7b", "-b", "2", "--length", "64", "--layers", "1", "--fill", "none"
    )
    assert "tokens/s" not in none.stdout
    why = "of the estimated cost) have no reading, and `--fill none` excludes predictions."
    assert why in " ".join(none.stdout.split())


def test_a_card_without_a_predictor_has_an_incomplete_sum(own, database):
    about = {
        "card": "GPU-1",
        "model": "NVIDIA A100",
        "protocol": Protocol(launch="eager"),
        "whole": False,
    }
    filled.fill(database, leave_out=lambda spec: spec.short_name == "Linear", **about)
    arguments = (*MODEL[:-1], "A100", "--launch", "eager")
    said = own(*arguments)
    assert "at least" in said.stdout.splitlines()[1]
    assert "(95 % interval): sum of" in " ".join(said.stdout.split())
    assert "no predictor for NVIDIA A100 under eager launch" in " ".join(said.stdout.split())
    told = json.loads(own(*arguments, "--json").stdout)
    assert (told["complete"], told["time_us"]) == (False, told["measured_time_us"])
    assert "no predictor for NVIDIA A100" in told["incomplete_reason"]


def test_a_model_that_does_not_fit_names_the_cards_by_memory(own, database):
    for batch in (16, 64):  # else the package answers
        variant, name = dataclasses.replace(filled.VARIANT, batch=batch), f"of {batch}"
        filled.fill(
            database,
            variant,
            leave_out=lambda spec: spec.short_name != "Conv2d",
            whole=False,
            prefix=name,
        )
    with database.write() as session:
        for card in session.exec(select(tables.CardRow)).all():
            card.memory_bytes = 60_000_000
            session.add(card)
    arguments = ("estimate", "resnet18", "--input-size", "64", "--card", "H200")
    told = json.loads(own(*arguments, "-b", "2,16,64", "--json").stdout)
    assert told["too_large_from"]["batch"] == 64
    small, medium, large = (one["memory"] for one in told["curve"])
    weights_bytes = sum(one.nbytes for one in catalog.build("resnet18").state_dict().values())
    assert (small["weights_bytes"], small["cache_bytes"]) == (weights_bytes, 0)
    assert (small["fits"], medium["fits"], large["fits"]) == (True, True, False)
    assert large["needed_bytes"] == large["weights_bytes"] + large["activations_bytes"]
    assert large["cards_by_memory"] == -(-large["needed_bytes"] // 60_000_000) == 2
    said = " ".join(own(*arguments, "-b", "2,16,64").stdout.split())
    assert "cards needed" in said
    assert "From resnet18 64x64 float32 on" in said
    assert "The memory alone needs 2 cards" in " ".join(own(*arguments, "-b", "64").stdout.split())
    step = memory_need(
        catalog.variant("resnet18", 2, input_size=64, step="training"), 60_000_000, 10**10, 0
    )
    assert (step.fits, step.weights_bytes) == (False, None)
    assert step.needed_bytes > 2 * weights_bytes  # weights and gradients


def test_a_prompt_fills_a_cache_of_its_length():
    prompt = catalog.variant("llama-3.2-1b", 4, length=512, dtype="bfloat16")
    need = memory_need(prompt, 2 * 10**9, 10**10, 10**6)
    assert (
        need.cache_bytes == 4 * 512 * 2 * 16 * 8 * 64 * 2
    )  # keys and values, layers, heads, features, bytes
    decode = catalog.variant("llama-3.2-1b", 4, phase="decode", cache=512, dtype="bfloat16")
    assert memory_need(decode, 2 * 10**9, 10**10, 10**6).cache_bytes == need.cache_bytes
    assert need.cards == 2
    assert (
        memory_need(prompt, 10**11, 10**10, 10**6).needed_bytes is None
    )  # surely fits: nothing is built


@pytest.fixture
def transferred(own, database, monkeypatch):
    """A database with readings and a predictor of an H200. The package is empty."""
    for module in ("addons.predict.query", "exchange.packaged"):
        monkeypatch.setattr(f"farm.{module}.packaged_files", list)
    return own


def calibrate(database, model, card="GPU-1", **more):
    """Add readings of few tuples of another model."""
    leave_out = lambda spec: spec.short_name not in ("ReLU", "BatchNorm2d")  # noqa: E731
    filled.fill(
        database, model=model, card=card, leave_out=leave_out, whole=False, prefix=card, **more
    )


def test_readings_of_another_card_calibrate_its_predictions(transferred, database):
    model = "NVIDIA H100 80GB HBM3"
    other = dataclasses.replace(filled.VARIANT, batch=3)
    calibrate(database, model, variant=other, slower=1.1)
    arguments = (*MODEL[:-1], "H100")
    found = json.loads(transferred(*arguments, "--json").stdout)
    assert (found["card_model"], found["covered_tuples"], found["basis"]) == (model, 0, "sum")
    about = found["transfer"]
    assert (about["source_card"], about["card"]) == ("NVIDIA H200", "GPU-1")
    assert 5 < about["readings"] < 40
    assert "convolution" in " ".join(about["families_without"])
    assert found["time_low_us"] < found["time_us"] < found["time_high_us"]
    assert found["predicted_mj"] > 0
    said = " ".join(transferred(*arguments).stdout.split())
    assert "transferred from NVIDIA H200" in said
    assert f"calibrated with {about['readings']} readings of {model}" in said
    assert "for the card GPU-1." in said
    assert f"{model} has no reading of these families:" in said
    calibrate(database, model, "GPU-2", variant=dataclasses.replace(other, batch=4))
    assert (
        json.loads(transferred(*arguments, "--json").stdout)["transfer"]["card"] == ""
    )  # any of the two


def test_a_card_without_readings_is_predicted_from_its_data_sheet(transferred):
    h200 = json.loads(transferred(*MODEL, "--json").stdout)
    found = json.loads(transferred(*MODEL[:-1], "b200", "--json").stdout)
    assert (found["card_model"], found["covered_tuples"], h200["transfer"]) == ("B200", 0, None)
    assert found["transfer"]["readings"] == 0
    assert found["time_us"] < h200["time_us"]
    assert found["time_high_us"] / found["time_low_us"] > h200["time_high_us"] / h200["time_low_us"]
    assert "`farm calibrate` on the card" in " ".join(
        transferred(*MODEL[:-1], "B200").stdout.split()
    )


def test_a_card_that_cannot_be_predicted_is_refused_with_a_next_step(transferred, database):
    for words, message, step in (
        (
            ("Radeon",),
            "no readings of a card 'Radeon'",
            "Choose a card that has readings: NVIDIA H200.",
        ),
        (
            ("B200", "--torch", "2.5"),
            "the predictor is for torch 2.11.0+cu130 (omit --torch",
            "Measure the model",
        ),
        (
            ("B200", "--tf32"),
            "there is no predictor for B200 under graph launch with TF32 (`farm predict fit` makes "
            "one from readings with TF32)",
            "Estimate it without --tf32, which needs no card. Measure the model",
        ),
    ):
        said = transferred(*MODEL[:-1], *words)
        assert (said.code, said.stdout) == (2, "")
        assert message in said.stderr
        assert step in said.stderr


def test_readings_with_another_torch_calibrate_nothing_and_are_named(transferred, database):
    calibrate(
        database, "NVIDIA H100", software=dataclasses.replace(filled.SOFTWARE, torch="2.12.0")
    )
    found = json.loads(transferred(*MODEL[:-1], "H100", "--json").stdout)
    assert found["transfer"]["readings"] == 0
    assert any("readings of NVIDIA H100 are for torch 2.12.0" in note for note in found["notes"])


def test_a_card_without_a_data_sheet_needs_measured_rates(transferred, database):
    calibrate(database, "NVIDIA RTX 4090 D")
    arguments = (*MODEL[:-1], "4090 D")
    assert json.loads(transferred(*arguments, "--json").stdout)["transfer"]["readings"] > 5
    with database.write() as session:
        session.get_one(tables.CardRow, "GPU-1").fingerprint = None
    found = json.loads(transferred(*arguments, "--json").stdout)
    assert (found["transfer"], found["complete"]) == (None, False)
    assert "no data sheet" in found["incomplete_reason"]


def test_readings_of_a_database_that_is_not_that_of_the_settings_calibrate_too(
    transferred, database, monkeypatch
):
    calibrate(database, "NVIDIA H100", variant=dataclasses.replace(filled.VARIANT, batch=3))
    monkeypatch.delenv("FARM_DATABASE_URL")
    settings.cache_clear()
    with database.read() as session:
        query = EstimateQuery("H100")
        found = query.estimate(session, filled.VARIANT)
        (fitted,) = query.fitted.values()
        again = query.estimate(session, dataclasses.replace(filled.VARIANT, batch=4))
        assert list(query.fitted.values()) == [fitted], "fitted once for all models"
    assert found.transfer["readings"] == again.transfer["readings"] > 5


def test_compiled_models_beside_each_other_have_columns_of_their_gain(own):
    """Cards with as many multiprocessors share the list of kernels of a batch."""
    compiled_models.kernels_without_card.cache_clear()
    model = ("estimate", "resnet18", "--input-size", "64", "--compile", "-b")
    for number, words in (
        (2, ("2,3", "--card", "H200")),
        (3, ("2", "--card", "H200,H100,H100 NVL")),
    ):
        said = " ".join(own(*model, *words).stdout.split())
        assert "gain" in said
        assert "time without" in said
        assert "roofline" in said
        assert len(re.findall(r"[\d.]+ times \([\d.]+ to [\d.]+\)", said)) == number
    assert compiled_models.kernels_without_card.cache_info().misses == 2


def test_a_compiled_training_step_is_refused_before_any_work(own, monkeypatch):
    monkeypatch.setattr(EstimateQuery, "predictor", None)
    said = own(*MODEL, "--compile", "--step", "training")
    assert (said.code, said.stdout) == (2, "")
    assert "no NVIDIA H200 has compiled it" in said.stderr
    eager = "farm estimate resnet18 --batch 2 --input-size 64 --step training --optimizer sgd"
    assert f"`{eager} --why`" in said.stderr


def test_a_compiled_model_that_no_card_has_compiled_is_predicted_with_its_gain(own):
    found = json.loads(own(*MODEL, "--compile", "--json").stdout)
    assert (found["complete"], found["whole_time_us"], found["basis"]) == (True, None, "sum")
    assert found["time_low_us"] < found["time_us"] < found["time_high_us"]
    assert found["energy_mj"] > 0
    operators = {entry["operator"] for entry in found["missing"]}
    assert operators >= {"pointwise", "convolution"}
    eager = json.loads(own(*MODEL, "--json").stdout)
    gain = found["gain"]
    assert gain["eager_time_us"] == pytest.approx(eager["time_us"])
    assert gain["faster_times"] == pytest.approx(eager["time_us"] / found["time_us"])
    assert gain["faster_low_times"] < gain["faster_times"] < gain["faster_high_times"]
    assert (gain["eager_is_measured"], gain["roofline_us"] > 0) == (False, True)
    assert eager["gain"] is None

    said = own(*MODEL, "--compile", "max-autotune").stdout
    words = " ".join(said.split())
    for text in (
        "times as fast as without --compile",
        "at the roofline of its kernels",
        "Predicted: no card has compiled this model.",
        "Those of `--compile default` are predicted instead.",
    ):
        assert text in words
    assert "whole model measured" not in said

    refused = own(*MODEL, "--compile", "--fill", "none")
    assert "no NVIDIA H200 has compiled it" in refused.stderr
    eager = "farm estimate resnet18 --batch 2 --input-size 64"
    assert f"of the eager model: `{eager} --why`." in refused.stderr
    explained = json.loads(own(*MODEL, "--compile", "--why", "--json").stdout)
    assert "fusion" not in {cause["topic"] for cause in explained["causes"]}
