"""A model's cost is estimated from readings of one method and one software, and says what they do
not cover.
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from sqlmodel import select

from farm.addons.predict import queries
from farm.addons.predict.estimating import estimate
from farm.addons.predict.query import EstimateQuery
from farm.addons.predict.reading_sum import sum_of_readings
from farm.addons.predict.stored_predictor import RooflinePredictor
from farm.errors import NoReadings, UsageError
from farm.models import catalog
from farm.settings import settings
from farm.store import tables
from farm.store.captures import stored_tuples
from farm.store.card_models import card_model_named
from farm.store.database import newest_schema, read_clock_s
from farm.types.details import Burst, Details
from farm.types.figure import Figure
from farm.types.protocol import Protocol
from farm.types.roofline import roofline_of
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import ReadingView
from farm.verdict.gap_errors import BETWEEN_JOBS
from farm.verdict.model_readings import SelectedReadings
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled


def asked(database, variant=filled.VARIANT, card="H200", **options):
    with database.read() as session:
        return estimate(session, variant, card_model_named(session, card), Protocol(), **options)


def test_the_sum_is_of_all_calls(any_database):
    taken = filled.fill(any_database)
    with any_database.read() as session:
        times = dict(
            session.exec(select(tables.ReadingRow.subject_id, tables.ReadingRow.time_us)).all()
        )
    found = asked(any_database)
    looped_us = sum(number * times[id_] for id_, number in taken.capture.counts.items())
    assert found.readings.time_us.value == pytest.approx(
        looped_us, rel=0.06
    )  # power-limited tuples are taken in bursts
    assert found.readings.time_us.half_width > 0
    assert (found.coverage, found.missing, found.covered_tuples) == (
        1.0,
        (),
        len(taken.capture.tuples),
    )
    assert found.whole.time_us.value == pytest.approx(looped_us)
    assert found.energy.value > 0
    assert (found.software.torch, found.card_model) == ("2.11.0+cu130", "NVIDIA H200")


def test_a_model_of_tokens_is_told_by_the_token(database):
    variant = catalog.variant("bert-base", 2, length=16, layers=1)
    filled.fill(database, variant)
    found = asked(database, variant)
    assert found.per_token.tokens == 32
    assert found.to_json()["tokens_per_s"] == pytest.approx(32e6 / found.whole.time_us.value)
    assert found.to_json()["energy_per_token_mj"] == pytest.approx(found.whole.energy_mj.value / 32)
    filled.fill(database)
    assert asked(database).to_json()["tokens_per_s"] is None


def test_a_text_costs_its_prompt_and_a_decode_for_each_token(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    about = {"layers": 1, "dtype": "bfloat16"}
    prompt = catalog.variant("falcon-7b", 2, length=64, **about)
    filled.fill(database, prompt)
    readings = EstimateQuery("H200", fill="none")
    with (
        database.read() as session,
        pytest.raises(UsageError, match="covers a decode of falcon-7b") as refused,
    ):
        readings.generation(session, prompt, 64)
    assert "--phase decode -b 2 --cache 65,128" in refused.value.next_step
    for cache in (64, 128):
        filled.fill(database, catalog.variant("falcon-7b", 2, phase="decode", cache=cache, **about))
    with database.read() as session:
        found = readings.generation(session, prompt, 64)
    short, long = (one.whole.time_us.value for one in found.decodes)
    assert short < long
    # From 65 to 128 tokens: the mean of an arithmetic series.
    mean = short + (long - short) * (96.5 - 64) / 64
    assert found.time.value == pytest.approx(found.prefill.whole.time_us.value + 64 * mean)
    assert found.tokens_per_s == pytest.approx(2 * 64 / found.time.value * 1e6)
    assert (len(found.notes), found.level) == (1, 0.95)
    assert found.to_json()["complete"]
    said = farm(
        "estimate",
        "falcon-7b",
        "-b",
        "2",
        "--length",
        "64",
        "--layers",
        "1",
        "--generate",
        "200",
        "--fill",
        "none",
    )
    assert said.code == 0, said.stderr
    assert "tokens bfloat16 of 1 layers, then 200 generated tokens" in said.stdout
    text = " ".join(said.stdout.split())
    assert "from 65 to 264 tokens, but figures exist for 64, 128" in text


@pytest.mark.parametrize(("cache", "is_lower_bound"), [(1024, False), (32, True)])
def test_a_text_whose_tokens_all_count_with_a_longer_cache_is_no_lower_bound(
    database, cache, is_lower_bound
):
    about = {"layers": 1, "dtype": "bfloat16"}
    prompt = catalog.variant("falcon-7b", 2, length=64, **about)
    filled.fill(database, prompt, leave_out=lambda spec: spec.short_name == "Linear", whole=False)
    filled.fill(database, catalog.variant("falcon-7b", 2, phase="decode", cache=cache, **about))
    with database.read() as session:
        found = EstimateQuery("H200", fill="none").generation(session, prompt, 64)
    assert [one.variant.cache for one in found.decodes] == [cache]
    assert (bool(found.incomplete_reason), found.is_lower_bound) == (True, is_lower_bound)
    assert f"the cost at {cache} tokens" in found.notes[0]


def test_what_is_missing_is_listed_and_left_out_unless_a_predictor_is_named(database):
    filled.fill(database, whole=False)
    everything = asked(database)
    with database.write() as session:
        for row in session.exec(select(tables.ReadingRow)).all():
            if session.get_one(tables.Operator, row.subject_id).short_name == "Linear":
                session.exec(select(tables.TraceRow)).all()
                for trace in session.exec(
                    select(tables.TraceRow).where(tables.TraceRow.reading_id == row.id)
                ):
                    session.delete(trace)
                session.flush()
                session.delete(row)
    found = asked(database)
    (missing,) = found.missing
    assert (missing.needed.short_name, missing.needed.all_calls) == ("Linear", 1)
    assert missing.predicted is None
    assert found.predicted is None
    assert found.coverage == pytest.approx(1 - missing.share)
    assert found.time.value == found.readings.time_us.value < everything.time.value
    told = found.to_json()
    assert (told["time_us"], told["complete"], told["time_low_us"]) == (
        found.time.value,
        False,
        None,
    )
    assert "1 of" in told["incomplete_reason"]
    assert "no predictor is given" in told["incomplete_reason"]
    assert everything.to_json()["complete"]
    run_us = BETWEEN_JOBS["time"] * everything.readings.time_us.value
    half_width_us = math.hypot(everything.readings.time_us.half_width, run_us)
    assert everything.to_json()["time_half_width_us"] == pytest.approx(half_width_us), (
        "of readings and of a run"
    )
    assert found.measuring_rest_s == pytest.approx(1.25)
    predicted = asked(database, predictor=RooflinePredictor(roofline_of("cuda", "NVIDIA H200")))
    assert predicted.readings.time_us.value == found.time.value
    assert predicted.predicted.time_us.value > 0
    assert predicted.time.value == found.time.value + predicted.predicted.time_us.value
    assert "count with a lower bound (the roofline)" in predicted.incomplete_reason
    assert predicted.predictor == "roofline"
    assert (predicted.total.time_us.low, predicted.total.energy_mj) == (None, None)


def test_the_default_batch_is_that_of_a_run_on_such_a_card(database, farm, monkeypatch):
    filled.fill(
        database,
        catalog.variant("resnet18", 4, input_size=64),
        card="CPU-0",
        protocol=Protocol("eager"),
    )
    with database.write() as session:
        session.exec(select(tables.CardRow)).one().kind = "cpu"
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    assert "resnet18 4x64 float32\n" in farm("estimate", "resnet18", "--input-size", "64").stdout
    assert queries.estimate("resnet18", input_size=64).variant.batch == 4
    assert (
        "resnet18 32x64 float32\n"
        in farm("estimate", "resnet18", "--input-size", "64", "--card", "H100").stdout
    )


def test_doubtful_readings_are_left_out_and_counted(database, farm, monkeypatch):
    filled.fill(database)
    with database.write() as session:
        whole, *others = session.exec(
            select(tables.ReadingRow).order_by(tables.ReadingRow.subject_kind.desc())
        ).all()
        whole.flags = ["canary_off", "throttled_power"]
        for row in others[:2]:
            row.flags = ["canary_off", "shared"]
    found = asked(database)
    assert (found.whole, len(found.missing)) == (None, 2)
    told = (
        "3 doubtful readings of the model or its tuples (canary_off and shared ×2, canary_off ×1)"
    )
    assert found.to_json()["left_out"] == told
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    about = (
        "estimate",
        filled.VARIANT.model,
        "--input-size",
        "64",
        "--card",
        "H200",
        "--fill",
        "none",
        "-b",
    )
    for batch in (str(filled.VARIANT.batch), f"1,{filled.VARIANT.batch}"):
        assert told in farm(*about, batch).stdout
    with database.write() as session:
        for row in session.exec(select(tables.ReadingRow)).all():
            row.flags = ["canary_off"]
    with pytest.raises(NoReadings) as refused:
        asked(database)
    assert f". Left out: {len(others) + 1} doubtful readings" in refused.value.message


def test_two_software_are_never_mixed(database):
    older = dataclasses.replace(filled.SOFTWARE, torch="2.10.0")
    filled.fill(
        database,
        software=older,
        leave_out=lambda spec: spec.short_name != "Conv2d",
        whole=False,
        created_at_s=1.8e9,
    )
    filled.fill(database, slower=2.0, whole=False)
    found = asked(database)
    assert (found.software.torch, found.coverage) == ("2.11.0+cu130", 1.0)
    assert "They were not mixed in" in found.notes[-1]
    old = asked(database, torch="2.10")
    assert old.software.torch == "2.10.0"
    assert {entry.needed.short_name for entry in old.missing} >= {"BatchNorm2d", "Linear"}
    assert "Conv2d" not in {entry.needed.short_name for entry in old.missing}


def test_a_model_that_was_never_extracted_is_extracted_without_running(database):
    filled.fill(database)
    found = asked(database, dataclasses.replace(filled.VARIANT, model="resnet34"))
    assert 0 < found.coverage < 1 or found.missing == ()
    assert found.whole is None


def test_what_cannot_be_estimated_is_told(database):
    filled.fill(database)
    filled.fill(database, card="GPU-1", model="NVIDIA H100")
    with pytest.raises(UsageError, match="no readings of a card 'A100'"):
        asked(database, card="A100")
    with pytest.raises(UsageError, match="several card models"):
        asked(database, card="NVIDIA")
    with pytest.raises(UsageError, match=r"No tuple of resnet18 .* has a reading"):
        asked(database, dataclasses.replace(filled.VARIANT, dtype="float16"))


def test_the_age_of_the_oldest_reading_is_by_the_clock_of_the_database(database, farm, monkeypatch):
    with database.read() as session:
        made_at_s = read_clock_s(session) - 3 * 86400 - 1800
    filled.fill(database, created_at_s=made_at_s)
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    monkeypatch.setattr("time.time", lambda: 1.0)
    arguments = (
        "estimate",
        "resnet18",
        "-b",
        "2",
        "--input-size",
        "64",
        "--card",
        "H200",
        "--fill",
        "none",
    )
    assert "the oldest reading is 3 d old" in farm(*arguments).stdout
    told = json.loads(farm(*arguments, "--json").stdout)
    assert told["oldest_at_s"] == pytest.approx(made_at_s, abs=60)
    assert "oldest_age_s" not in told


def test_at_a_terminal(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database, leave_out=lambda spec: spec.short_name == "Linear")
    arguments = ("estimate", "resnet18", "-b", "2", "--input-size", "64", "--card", "H200")
    without = farm(*arguments, "--fill", "none").stdout
    assert "predicted" not in without
    assert "the whole model measured" in without
    said = farm(*arguments, "--fill", "roofline")
    assert said.code == 0, said.stderr
    for words in (
        "resnet18 2x64 float32",
        "of the estimated cost",
        "without a reading",
        "Linear",
        "at least",
        "(predictor `roofline`)",
    ):
        assert words in said.stdout
    assert json.loads(farm(*arguments, "--json").stdout)["missing"][0]["operator"] == "Linear"
    assert farm(*arguments, "--fill", "guess").code == 2


def test_what_one_s_own_database_says_is_not_put_aside_for_the_package(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database, card="GPU-1", model="NVIDIA H100")
    with database.write() as session:
        session.add(tables.CardRow(id="SIM-0", kind="simulated", model="simulated card"))
    packaged = farm("estimate", "resnet18", "-b", "32", "--card", "H200")
    assert (packaged.code, "Using the packaged readings" in packaged.stderr) == (0, True)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    older = farm("estimate", "resnet18", "-b", "32", "--card", "H200")
    assert (older.code, older.stdout) == (3, "")
    assert "farm export" in older.stderr
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{newest_schema()}'")
    unread = farm(
        "estimate", "vgg11", "-b", "4", "--dtype", "float16", "--card", "H100", "--fill", "none"
    )
    assert "has a reading on NVIDIA H100" in unread.stderr
    assert (
        "farm run vgg11 --batch 4 --input-size 224 --dtype float16 --launch graph --data seen;"
        in unread.stderr
    )
    unknown = farm("estimate", "resnet18", "--card", "X1").stderr
    assert "Choose a card that has readings: NVIDIA H100." in unknown
    packaged_cards = "choose a card that has readings: NVIDIA H100 80GB HBM3, NVIDIA H200."
    assert f"In the packaged readings, {packaged_cards}" in unknown
    filled.fill(database, card="GPU-2", model="NVIDIA A100")
    several = farm("estimate", "resnet18", "-b", "32")
    assert (several.code, several.stdout) == (2, "")
    assert "NVIDIA A100, NVIDIA H100" in several.stderr


def test_a_training_step_is_estimated_from_readings_of_its_parts(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    step = catalog.variant("squeezenet1_1", 2, input_size=32, step="training", optimizer="adamw")
    taken = filled.fill(
        database, step, leave_out=lambda spec: spec.short_name == "_log_softmax_backward_data"
    )
    said = ("-b", "2", "--input-size", "32", "--step", "training", "--fill", "none", "--json")
    asked = ("estimate", "squeezenet1_1", *said)
    found = json.loads(farm(*asked, "--optimizer", "adamw").stdout)
    assert found["variant"]["optimizer"] == "adamw"
    assert found["tuples"] == found["covered_tuples"] + 1 == len(taken.capture.tuples)
    assert [entry["operator"] for entry in found["missing"]] == ["_log_softmax_backward_data"]
    assert 0.9 < found["coverage"] < 1
    assert found["time_us"] == pytest.approx(found["whole_time_us"], rel=0.1)
    other = json.loads(
        farm(*asked, "--optimizer", "adamw", "--accumulate", "2").stdout
    )  # of the same parts
    assert other["coverage"] > 0.7  # the second pass adds to the gradients
    assert other["time_us"] > 1.5 * found["time_us"]
    unread = farm(*asked, "--optimizer", "adamw", "--launch", "eager")
    assert "--step training --optimizer adamw --launch eager --data normal;" in unread.stderr
    assert "A training step generates no text" in farm(*asked, "--generate", "10").stderr


def test_readings_of_every_data_class_count_for_flags_origins_and_age(database, monkeypatch):
    older = filled.PROTOCOL.with_data("zeros")
    filled.fill(database, protocol=older, whole=False, created_at_s=1.7e9, prefix="zeros")
    filled.fill(database, whole=False)
    with database.write() as session:
        for reading in session.exec(
            select(tables.ReadingRow).where(tables.ReadingRow.protocol_id == older.id)
        ).all():
            reading.flags, reading.origin = ["unstable_clock"], "elsewhere"
            session.add(reading)

    def needed(*arguments):
        classes = {"zeros": 1, "normal": 1}
        return [dataclasses.replace(one, calls=classes) for one in stored_tuples(*arguments)]

    monkeypatch.setattr("farm.addons.predict.estimating.stored_tuples", needed)
    found = asked(database)
    assert found.origins == {"elsewhere": found.tuples, "": found.tuples}
    assert found.flags["unstable_clock"] == found.tuples
    assert found.oldest_at_s < 1.71e9
    assert found.other_data_calls == 0


@pytest.mark.parametrize(("others_us", "share"), [(1000.0, 1.0), (400.0, 0.46), (0.1, 0.0)])
def test_tuples_at_the_power_limit_count_as_in_bursts_as_far_as_the_mean_power_allows(
    others_us, share
):
    """A product at the limit of 700 W takes 1,000 us in a loop and 800 us in bursts of 1,000 W;
    others draw 400 W.
    """
    burst = Burst(Figure(800.0), Figure(800.0))
    product = ReadingView(Figure(1000.0), Figure(700.0), details=Details(burst=burst))
    other = ReadingView(Figure(others_us), Figure(0.4 * others_us))
    parts = [
        CostLine.of_reading(TupleView("a", "mm", "mm"), 1, product),
        CostLine.of_reading(TupleView("b", "add", "add"), 1, other),
    ]
    found = sum_of_readings(SelectedReadings(5, "", parts, {}, [], 0, 0), "graph")
    assert found.cost.time_us.value == pytest.approx(others_us + 1000.0 - 200.0 * share, rel=0.01)
    assert found.cost.energy_mj.value == pytest.approx(
        0.4 * others_us + 700.0 + 100.0 * share, rel=0.01
    )
    assert found.verdict.power.total.value < 701.0
    assert found.cost.time_us.half_width >= 200.0 * max(share, 1 - share) * 0.99
    assert "of the way from loops to bursts" in found.notes[0]
    # no power limit can be so low
    product = ReadingView(Figure(2000.0), Figure(2000.0))
    hungry = CostLine.of_reading(TupleView("c", "mm", "mm"), 1, product)
    selected = SelectedReadings(5, "", [*parts, hungry], {}, [], 0, 0)
    assert sum_of_readings(selected, "graph").cost.time_us.value == pytest.approx(
        others_us + 3000.0, rel=0.01
    )
