"""Why a model takes its time: rates, bounds, and causes with their upper bounds."""

from __future__ import annotations

import dataclasses
import json

import pytest
from sqlmodel import select

import farm as library
from farm.errors import NoSuchJob
from farm.report.why import why
from farm.store import tables
from farm.types.figure import Figure
from farm.types.roofline import Roofline
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import CallCost
from farm.verdict.rates import Rates, rule_of
from tests.cli.conftest import farm  # noqa: F401
from tests.report import compiled
from tests.report.compiled import COMPILED, EAGER, EAGER_CALLS, compiled_calls

PEAKS = Roofline(flops_per_s=1e14, bytes_per_s=1e12, launch_floor_us=2.0)


def rates(time_us: float, flops: int, bytes_moved: int, calls: int = 3) -> Rates:
    subject = TupleView("id", "Linear", "Linear", flops=flops, bytes_moved=bytes_moved)
    line = CostLine(subject, calls, "measured", CallCost(Figure(time_us)))
    return Rates(line, time_share=0.5, peaks=PEAKS)


@pytest.fixture
def jobs(database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    compiled.job(database, "eager", EAGER, EAGER_CALLS)
    compiled.job(database, "compiled", COMPILED, compiled_calls())
    return database


def explained(database, job):
    with database.read() as session:
        return why(session, job)


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "bound", "ideal_us"),
    [
        (10**10, 10**6, "compute", 100.0),
        (10**9, 10**8, "memory", 100.0),
        (0, 10**6, "launch", 1.0),
    ],
)
def test_a_call_is_bound_by_the_slowest_of_arithmetic_memory_and_launch(
    flops, bytes_moved, bound, ideal_us
):
    call = rates(200.0, flops, bytes_moved)
    assert call.bound == bound
    assert call.ideal_us == pytest.approx(ideal_us)
    assert call.roofline_share == pytest.approx(ideal_us / 200.0)
    assert call.excess_us == pytest.approx(3 * (200.0 - max(ideal_us, 2.0)))


def test_only_a_measured_call_exceeds_the_roofline():
    call = rates(80.0, 10**10, 10**6)
    assert call.roofline_share == pytest.approx(1.25)
    predicted = dataclasses.replace(call, line=dataclasses.replace(call.line, origin="estimated"))
    assert predicted.roofline_share == 1.0


def test_the_rule_names_what_makes_a_measured_call_faster_than_the_peak():
    assert "the data was in the cache" in rule_of(PEAKS)
    assert "multiplies less (Winograd)" in rule_of(PEAKS)


def test_a_call_that_is_not_measured_has_no_rates():
    call = rates(0.0, 10**9, 10**6)
    assert (call.bytes_per_s, call.flops_per_s, call.roofline_share) == (None, None, None)
    assert call.excess_us == 0
    assert not call.improvable


def test_fusion_saves_at_most_all_but_the_longest_call_of_each_run(jobs):
    """The eager model: layer norm 20 us | linear | ReLU 10 us, layer norm 20 us | linear | ReLU."""
    answer = explained(jobs, "eager")
    causes = {cause.topic: cause for cause in answer.causes}
    assert causes["fusion"].saves_us == pytest.approx(10.0)
    assert causes["fusion"].share == pytest.approx(10 / 210)
    assert "2 calls without matrix products" in causes["fusion"].text
    assert "fusion" not in {cause.topic for cause in explained(jobs, "compiled").causes}


def test_a_float32_model_is_told_what_bfloat16_would_save_at_most(jobs):
    answer = explained(jobs, "eager")
    products = next(row for row in answer.rows if row.line.subject.flops)
    assert products.bound == "compute"
    dtype = next(cause for cause in answer.causes if cause.topic == "dtype")
    ratio = answer.peaks.flops_per_s / 989e12
    assert dtype.saves_us == pytest.approx(150 * (1 - ratio), rel=0.01)
    assert "--dtype bfloat16" in dtype.text


def test_on_a_cpu_the_least_time_of_a_call_is_a_cause_and_no_rate_that_is_not_measured(jobs):
    with jobs.write() as session:
        for card in session.exec(select(tables.CardRow)):
            card.kind = "cpu"
    answer = explained(jobs, "eager")
    (launch,) = [cause for cause in answer.causes if cause.topic == "launch"]
    calls = sum(row.line.count for row in answer.rows)
    assert launch.saves_us == pytest.approx(
        min(answer.sum_us, calls * answer.peaks.launch_floor_us)
    )
    assert f"{calls} calls" in launch.text
    assert not [cause for cause in answer.causes if cause.topic == "dtype"]


def test_causes_are_the_largest_ones_and_rows_the_most_expensive_first(jobs):
    for job in ("eager", "compiled"):
        answer = explained(jobs, job)
        saved = [cause.saves_us for cause in answer.causes]
        assert saved == sorted(saved, reverse=True)
        assert min(saved) >= 0.01 * answer.sum_us
        times = [row.line.total_us for row in answer.rows]
        assert times == sorted(times, reverse=True)


def test_the_command_and_the_function_give_the_same_answer(jobs, farm):
    text = farm("report", "eager", "--why").stdout
    assert "bound" in text
    (line,) = [line for line in text.splitlines() if "sum of the operators:" in line]
    assert line.endswith(" on NVIDIA H200")
    assert [line[2:4] for line in text.splitlines() if line[2:4] in ("1.", "2.", "3.")] == [
        "1.",
        "2.",
        "3.",
    ]
    assert "do not add them" in text
    document = json.loads(farm("report", "eager", "--why", "--json").stdout)
    assert document == json.loads(json.dumps(library.why("eager", database=jobs).to_json()))
    assert {row["bound"] for row in document["rows"]} == {"compute", "launch"}


def test_refusals_have_a_next_step(jobs, farm):
    with pytest.raises(NoSuchJob):
        explained(jobs, "missing")
    refused = farm("report", "eager", "--why", "--by", "module")
    assert refused.code == 2
    assert "Omit --by" in refused.stderr
