"""Reports and comparisons of compiled models: kernels, their sources in the model, and what
compiling saves.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from farm.addons.predict.dataset import datasets, measured_models
from farm.addons.predict.query import EstimateQuery
from farm.errors import NoReadings, UsageError
from farm.exchange.export import export
from farm.exchange.importer import import_export
from farm.report.compare import compare
from farm.report.compared_kernels import grouped_by_launch
from farm.report.kernels import listed_kernels, patterns_of
from farm.report.report import build, remarks
from farm.store.captures import PlacedCall
from farm.subjects.label import fused_names
from tests.cli.conftest import farm  # noqa: F401
from tests.report import compiled
from tests.report.compiled import COMPILED, EAGER, EAGER_CALLS, MODEL, compiled_calls


@pytest.fixture
def jobs(database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    compiled.job(database, "eager", EAGER, EAGER_CALLS)
    compiled.job(database, "compiled", COMPILED, compiled_calls())
    return database


def compared(database, first, second):
    with database.read() as session:
        return compare(session, first, second).kernels


def test_a_report_shows_what_each_kernel_was_fused_from_and_its_rates(jobs):
    with jobs.read() as session:
        report = build(session, "compiled")
    rows = {(row.line.subject.short_name, row.fused): row for row in report.compiled.kernels}
    assert [row.line.subject.short_name for row in report.compiled.kernels][:2] == [
        "mm",
        "pointwise",
    ]
    fused = rows["pointwise", ("native_layer_norm", "relu")]
    assert fused.modules == ("h.0.act", "h.0.fc", "h.1.ln")
    assert rows["mm", ()].modules == ("h.*.fc",)
    assert fused.rates.bytes_per_s == pytest.approx(2 * 2**20 / 12e-6)
    assert fused.rates.roofline_share == pytest.approx(2 * 2**20 / 4.8e12 / 12e-6)
    assert fused.rates.improvable
    assert not rows["pointwise", ("copy",)].rates.improvable, "it has less than 1 % of the sum"
    assert dict(remarks(report))["graph breaks"] == "3; Unsupported call (×2); print (×1)"
    assert report.rounds[0].outcome == "listed"
    json.dumps(report.to_json())
    with jobs.read() as session:
        assert build(session, "eager").compiled is None


def test_the_terminal_and_the_page_show_the_kernels(jobs, farm, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = farm("report", "compiled").stdout
    assert "native_layer_norm, relu" in text
    assert "h.0.act, h.0.fc + 1 more" in text
    assert "below 50 % of the roofline" in text
    assert "lists the kernels" in text
    pytest.importorskip("plotly")
    assert farm("report", "compiled", "--html", tmp_path / "page.html").code == 0
    assert "native_layer_norm, relu" in (tmp_path / "page.html").read_text()


def test_an_eager_job_is_compared_by_modules_and_nothing_counts_twice(jobs):
    rows = compared(jobs, "eager", "compiled")
    shown = {
        row.modules: (dict(row.a_operators), dict(row.b_operators), row.saved(row.row.time))
        for row in rows
    }
    assert shown["model.h.*.fc",] == ({"linear": 2}, {"mm": 2}, 10.0)
    assert shown["model.h.0.ln",] == ({"layer_norm": 1}, {"pointwise": 1}, 5.0)
    assert shown["model.h.0.act", "model.h.1.ln"] == (
        {"relu": 1, "layer_norm": 1},
        {"pointwise": 1},
        18.0,
    )
    assert shown["model.h.1.act",] == ({"relu": 1}, {"pointwise": 1}, 2.0)
    alone = [row for row in rows if not row.modules]
    assert [(dict(row.a_operators), dict(row.b_operators)) for row in alone] == [
        ({"linear": 1}, {}),
        ({}, {"pointwise": 1}),
    ]
    for side, calls in (("a", EAGER_CALLS), ("b", compiled_calls())):
        found = [figure.value for row in rows if (figure := getattr(row.row.time, side))]
        assert sum(found) == pytest.approx(sum(us for *_, us in calls))
    assert rows[0].modules == ("model.h.*.fc",), "the heaviest first"
    assert rows[0].saved(rows[0].row.energy) == 5.0
    back = {row.modules: row.saved(row.row.time) for row in compared(jobs, "compiled", "eager")}
    assert back["h.*.fc",] == -10.0


def test_a_group_with_an_unmeasured_tuple_has_no_saved_time(database):
    compiled.job(database, "eager", EAGER, EAGER_CALLS, leave_out=compiled.RELU)
    compiled.job(database, "compiled", COMPILED, compiled_calls())
    found = {
        row.modules: row.saved(row.row.time) for row in compared(database, "eager", "compiled")
    }
    assert found["model.h.1.act",] is None
    assert found["model.h.0.ln",] == 5.0


def test_two_compiled_jobs_are_matched_by_source_and_the_slower_kernel_comes_first(jobs, farm):
    tuned = dataclasses.replace(COMPILED, compile="max-autotune")
    compiled.job(jobs, "tuned", tuned, compiled_calls(block=256, slower=1.5))
    rows = compared(jobs, "compiled", "tuned")
    assert (rows[0].modules, rows[0].saved(rows[0].row.time)) == (
        ("h.0.act", "h.0.fc", "h.1.ln"),
        -6.0,
    )
    assert all(row.saved(row.row.time) == 0 for row in rows[1:])
    shown = farm("compare", "compiled", "tuned").stdout
    assert "Kernels match by source" in shown
    assert len(json.loads(farm("compare", "compiled", "tuned", "--json").stdout)["kernels"]) == len(
        rows
    )
    assert not compared(jobs, "eager", "eager")


def test_paths_without_their_beginning_match_if_only_one_module_ends_so():
    def calls(*paths):
        return [PlacedCall(number, path, path, "") for number, path in enumerate(paths)]

    eager = calls("model.h.0.fc", "model.h.0.act", "a.norm", "b.norm")
    launches = calls("h.0.fc", "h.0.act, h.0.fc", "norm")
    grouped_eager, grouped_launches = grouped_by_launch(eager, launches)
    parts = [("model.h.*.fc",), ("model.h.*.act",), None]
    assert [grouped.group for grouped in grouped_eager] == [*parts, None]
    assert [grouped.group for grouped in grouped_launches] == parts
    assert patterns_of(["h.0.fc", "h.1.fc", "h.0.act"]) == ("h.*.fc", "h.0.act")


def test_names_of_fused_operators_are_split():
    assert fused_names("_to_copy_add_native_layer_norm_view") == [
        "_to_copy",
        "add",
        "native_layer_norm",
        "view",
    ]
    assert fused_names("") == []


def test_a_compiled_estimate_sums_readings_and_predicts_no_kernel(jobs):
    with jobs.read() as session:
        found = EstimateQuery(fill="roofline").estimate(session, COMPILED)
        assert (found.coverage, found.other_data_calls) == (1.0, 0)
        assert found.readings.time_us.value == pytest.approx(sum(us for *_, us in compiled_calls()))
        listed = listed_kernels(session, COMPILED, "cuda")
        assert (listed.card_model, sum(row.count for row in listed.rows)) == (MODEL, 6)
        with pytest.raises(UsageError):
            found.to_measure(1)


def test_a_kernel_without_a_reading_is_predicted_from_its_bytes_and_never_shown_as_measured(
    database,
):
    missing = compiled.kernel("last", "relu", 512)
    calls = [
        (path, missing if spec == missing else spec, us) for path, spec, us in compiled_calls()
    ]
    compiled.job(database, "compiled", COMPILED, calls, leave_out=missing)
    with database.read() as session:
        found = EstimateQuery(fill="roofline").estimate(session, COMPILED)
    (one,) = found.missing
    assert one.needed.label == "pointwise relu | 512x512 fp32"
    read_and_written_bytes = 2 * 4 * 512 * 512
    fastest_card_bytes_per_s = 10e12
    assert one.predicted_us > read_and_written_bytes / fastest_card_bytes_per_s * 1e6


def test_predictors_learn_nothing_from_a_compiled_model(jobs):
    with jobs.read() as session:
        found = datasets(session, MODEL)
        models = measured_models(session, found[0].card, found[0].conditions)
    assert {call.operator_id for one in found for call in one.calls} == {
        spec.id for _, spec, _ in EAGER_CALLS
    }
    assert [one.variant for one in models] == [EAGER]


def test_without_a_list_of_kernels_the_command_says_what_to_do(jobs, farm):
    other = dataclasses.replace(COMPILED, batch=3)
    with jobs.read() as session, pytest.raises(NoReadings) as error:
        listed_kernels(session, other, "cuda")
    assert "farm run resnet18 --batch 3" in error.value.next_step
    assert "--compile default" in error.value.next_step
    said = farm("operators", "resnet18", "--compile", "-b", 3)
    assert said.code
    assert "no card has compiled it" in said.stderr


def test_a_compiled_job_survives_an_export(jobs, other_database, tmp_path, farm):
    with jobs.read() as session:
        export(session, tmp_path)
    import_export(other_database, tmp_path)
    with jobs.read() as here, other_database.read() as there:
        reports = [build(session, "compiled") for session in (here, there)]
    assert reports[0].compiled == reports[1].compiled
    assert reports[1].rounds[0].outcome == "listed"
    found = compared(other_database, "eager", "compiled")
    assert [row.modules for row in found] == [
        row.modules for row in compared(jobs, "eager", "compiled")
    ]
    assert "pointwise relu" in farm("lookup", "pointwise").stdout
