"""Schemes of one model beside each other, and the sizes between which a scheme begins to gain."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.schemes import comparison
from farm.errors import NoReadings, UsageError
from farm.report.crossover import Trend
from farm.report.schemes import Cell, axis_of, compare_schemes
from farm.store import tables
from farm.types.figure import Figure
from farm.types.request import Request
from farm.types.variant import Variant
from farm.verdict.cost_line import Change
from tests.report import rows

DECODE = Variant("llama", 1, 0, dtype="bfloat16", phase="decode", length=1, cache=1024)
#: Batch -> times of the whole model in us: a product of packed weights is the better the smaller
#: the batch.
TIMES_US = {1: (100.0, 50.0), 8: (110.0, 80.0), 64: (150.0, 225.0)}


def changes(times_us, relative=0.01):
    return {
        size: Change(Figure(a, relative * a), Figure(b, relative * b))
        for size, (a, b) in times_us.items()
    }


def test_a_crossover_is_interpolated_between_the_sizes_that_are_certain():
    trend = Trend.of(changes(TIMES_US))
    assert (trend.sizes("faster"), trend.sizes("slower")) == ([1, 8], [64])
    (crossover,) = trend.crossovers
    assert (crossover.below, crossover.above, crossover.gains) == (8, 64, False)
    before, after = math.log(80 / 110), math.log(225 / 150)
    share = before / (before - after)
    assert crossover.size == pytest.approx(8 * 8**share)
    assert 8 < crossover.low < crossover.size < crossover.high < 64
    parts = trend.words("batch").split("; ")
    assert parts[0] == "gains up to batch 20 (19.2 to 20.8"
    assert parts[2:] == ["gains at batch 1, 8", "loses at batch 64"]


def test_a_size_without_a_certain_change_lies_inside_the_crossover():
    trend = Trend.of(changes({1: (100.0, 150.0), 8: (100.0, 100.5), 64: (100.0, 60.0)}))
    assert trend.sizes("same") == [8]
    (crossover,) = trend.crossovers
    assert (crossover.below, crossover.above, crossover.gains) == (1, 64, True)
    assert crossover.low < 8 < crossover.high


def test_a_change_of_one_sign_has_no_crossover():
    trend = Trend.of(changes({1: (100.0, 150.0), 8: (100.0, 100.5)}))
    assert not trend.crossovers
    assert trend.words("batch") == "loses at batch 1; is equal at batch 8"
    assert not Trend.of({}).changes


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=2, max_size=6),
    st.floats(0, 0.3),
)
def test_every_crossover_lies_between_its_sizes(times_us, relative):
    by_size = {2 ** (3 * number): times for number, times in enumerate(times_us)}
    for crossover in Trend.of(changes(by_size, relative)).crossovers:
        inside = [crossover.below, crossover.low, crossover.high, crossover.above]
        assert inside == pytest.approx(sorted(inside))
        assert crossover.low <= crossover.size * (1 + 1e-9)
        assert crossover.size <= crossover.high * (1 + 1e-9)


def request_of(scheme: str, batch: int) -> Request:
    quantize = "" if scheme == "none" else scheme
    return Request(variant=dataclasses.replace(DECODE, quantize=quantize, batch=batch))


def cell(scheme: str, batch: int) -> Cell:
    memory_bytes = 2000 if scheme == "none" else 1000
    return Cell(scheme, batch, {"cuda": request_of(scheme, batch)}, {}, memory_bytes)


def store_job(session, scheme, batch, whole_us, of_operators_us):
    """A finished job with one call of each operator; its product has the rest of the time."""
    asked = request_of(scheme, batch)
    variant, job_id = asked.variant, f"{scheme}-{batch}"[:16]
    session.add(tables.ModelVariant(id=variant.id, **variant.to_json()))
    session.flush()
    row = rows.job(session, asked, job_id, request_id=asked.id)
    row.request = {**row.request, "cards": [rows.CARD]}
    subjects = {
        rows.operator(session, name, f"{scheme} {batch}"): time_us
        for name, time_us in of_operators_us.items()
    }
    session.flush()
    captured = rows.capture(session, list(subjects), variant.id)
    session.add(
        tables.Round(
            job_id=job_id, number=1, operators=["all"], capture_id=captured, reason="first"
        )
    )
    session.flush()
    for subject, time_us in subjects.items():
        read = rows.reading(session, subject, time_us, time_us / 2)
        rows.item(session, job_id, "tuple", subject, reading_id=read)
    read = rows.reading(session, variant.id, whole_us, whole_us / 2, subject_kind="variant")
    rows.item(session, job_id, "whole", variant.id, reading_id=read)


@pytest.fixture
def stored(database):
    """The dense model at three batches, and int8-weights at two of them."""
    with database.write() as session:
        rows.ground(session)
        for batch, (dense_us, packed_us) in TIMES_US.items():
            store_job(session, "none", batch, dense_us, {"Linear": dense_us - 10, "ReLU": 10.0})
            if batch != 8:
                parts_us = {"mm": packed_us - 30, "_to_copy": 20.0, "ReLU": 10.0}
                store_job(session, "int8-weights", batch, packed_us, parts_us)
    return database


ALL = [cell(scheme, batch) for scheme in ("none", "int8-weights") for batch in TIMES_US]


def test_stored_jobs_are_a_table_by_size_and_scheme(stored):
    with stored.read() as session:
        found = compare_schemes(session, ALL, "llama", "batch")
    assert [(row.size, row.scheme) for row in found.rows] == [
        (batch, scheme) for batch in TIMES_US for scheme in ("none", "int8-weights")
    ]
    assert found.card_model == "NVIDIA H200"
    dense, packed = found.rows[:2]
    assert (dense.row.time.b.value, packed.row.time.b.value) == (100.0, 50.0)
    assert packed.row.time.change.value == pytest.approx(-0.5)
    assert packed.per_token.tokens_per_s == pytest.approx(1 / 50e-6)
    assert packed.per_token.energy_per_token_mj == pytest.approx(25.0)
    assert (dense.memory_bytes, packed.memory_bytes) == (2000, 1000)
    last = found.rows[-1]
    assert last.per_token.tokens_per_s == pytest.approx(64 / 225e-6)
    # All that one side does not call costs nothing there.
    assert [(gain.row.operator, gain.saved_us) for gain in last.operators] == [
        ("Linear", 140.0),
        ("ReLU", 0.0),
        ("_to_copy", -20.0),
        ("mm", -195.0),
    ]
    assert not dense.operators


def test_what_no_job_has_measured_is_named_with_its_command(stored):
    with stored.read() as session:
        found = compare_schemes(session, ALL, "llama", "batch")
    (missing,) = (row for row in found.rows if not row.job_id)
    assert (missing.scheme, missing.size, missing.lacks) == ("int8-weights", 8, "not measured")
    assert missing.command.startswith("farm run llama --batch 8")
    assert "--quantize int8-weights" in missing.command
    assert "--reuse" not in missing.command
    assert found.missing == [request_of("int8-weights", 8)]
    assert found.trends["int8-weights", "time"].crossovers[0].below == 1
    shown = found.to_json()
    assert shown["trends"]["int8-weights"]["energy"]["crossovers"][0]["above"] == 64
    assert [row["job"] for row in shown["rows"]].count("") == 1
    assert shown["rows"][1]["time_ratio"] == 0.5


def test_a_scheme_that_the_card_refuses_has_the_reason(stored):
    refused = Cell("fp8", 1, {}, {"cuda": "fp8 needs a newer GPU."})
    with stored.read() as session:
        found = compare_schemes(session, [cell("none", 1), refused], "llama", "batch")
    assert found.rows[1].lacks == "fp8 needs a newer GPU."
    assert found.rows[1].command == ""
    assert not found.missing


def test_without_the_base_there_is_a_cost_and_no_ratio(stored):
    with stored.write() as session:
        job = session.get_one(tables.Job, "none-1")
        job.state = "cancelled"
    with stored.read() as session:
        found = compare_schemes(session, ALL, "llama", "batch")
    packed = next(row for row in found.rows if row.job_id == "int8-weights-1")
    assert packed.row.time.b.value == 50.0
    assert packed.row.time.change is None
    assert not packed.operators


def test_without_any_job_the_step_is_to_measure(stored):
    with stored.read() as session, pytest.raises(NoReadings) as raised:
        compare_schemes(session, [cell("fp8", 1)], "llama", "batch")
    assert "--run" in raised.value.next_step
    with stored.read() as session:
        found = compare_schemes(session, [cell("fp8", 1)], "llama", "batch", card_kind="cuda")
    assert found.missing == [request_of("fp8", 1)]


def test_the_newest_job_counts_and_other_cards_do_not(stored):
    with stored.read() as session, pytest.raises(NoReadings):
        compare_schemes(session, ALL, "llama", "batch", lambda card: card.model == "H100")


def test_the_table_says_where_a_scheme_gains(stored):
    from cli.output import console

    with stored.read() as session:
        found = compare_schemes(session, ALL, "llama", "batch")
    out = console()
    with out.capture() as captured:
        out.print(comparison(found, 2))
    text = captured.get()
    assert "int8-weights, time: gains up to batch" in text
    assert "int8-weights at batch 8: not measured" in text
    assert "farm run llama --batch 8" in text
    assert "_to_copy" not in text.partition("at batch 64, by operator")[2]  # -n 2: the two largest


def test_a_page_has_a_curve_for_each_scheme(stored, tmp_path):
    from farm.addons.pages import charts, results

    with stored.read() as session:
        compared = compare_schemes(session, ALL, "llama", "batch")
    figure = charts.schemes(compared, "time")
    curves = {curve["name"]: (curve["x"], curve["y"]) for curve in figure["data"]}
    assert curves == {
        "none": ([1, 8, 64], [100.0, 110.0, 150.0]),
        "int8-weights": ([1, 64], [50.0, 225.0]),
    }
    path = tmp_path / "schemes.html"
    results.write_schemes(path, compared)
    text = path.read_text()
    assert "int8-weights, energy: gains up to batch" in text
    assert "not measured" in text
    assert ">+0.0 ±" not in text  # the base has no change


def test_schemes_are_compared_over_one_size():
    assert axis_of([{"batch": 1}, {"batch": 8}]) == "batch"
    assert axis_of([{"batch": 1, "cache": 64}, {"batch": 1, "cache": 128}]) == "cache"
    assert axis_of([{}, {"quantize": "fp8"}]) == "batch"
    with pytest.raises(UsageError, match="batch and cache"):
        axis_of([{"batch": 1, "cache": 64}, {"batch": 8, "cache": 128}])
