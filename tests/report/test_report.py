"""A report is made of the rows of a real database and holds everything with its unit."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console
from sqlmodel import col, select

from cli import report_tables
from farm.api.notebook import JobReport
from farm.errors import NoSuchJob
from farm.exchange.packaged import packaged_database
from farm.jobs import closing, listing
from farm.models import catalog
from farm.report import report
from farm.report.layers import layers
from farm.report.report import remarks
from farm.requests.resolved import ResolvedRequest
from farm.store import tables
from farm.store.job_ids import find_job
from farm.training.extract import extract
from farm.types.figure import Figure, value_of
from farm.types.protocol import Protocol
from farm.types.reading import METHOD
from farm.types.request import Request, Sweep
from farm.verdict import job_results
from farm.verdict.job_results import JobResults
from tasks.submissions import submit
from tests.report import measured, rows


def built(database, job_id):
    with database.read() as session:
        return report.build(session, job_id)


def text_of(found):
    """The report of a job as the program prints it."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report_tables.report(found))
    return console.export_text()


def judged(database, job_id="job1"):
    with database.read() as session:
        job = session.get_one(tables.Job, job_id)
        return JobResults(session, job, 1).verdict()


def test_sums_count_every_call_and_reading(any_database):
    found = built(any_database, rows.model_job(any_database))
    assert found.verdict.time.total.value == pytest.approx(4 * 150 + 30 + 3 * 22)
    assert found.verdict.energy.total.value == pytest.approx(4 * 80 + 12 + 3 * 9)
    assert found.verdict.time.whole.value == 720
    by_type = {row.short_name: row.cost for row in found.types}
    assert list(by_type)[:2] == ["Conv2d", "add"]
    assert (by_type["Conv2d"].calls, by_type["Conv2d"].tuples, by_type["Conv2d"].measured_us) == (
        5,
        2,
        630,
    )
    assert found.types[0].energy_share == pytest.approx(332 / 359)
    assert by_type["ReLU"].measured_us is None
    assert sum(row.estimated_share for row in found.types) == pytest.approx(1)


def test_what_was_not_measured_is_listed_with_its_reason(database):
    found = built(database, rows.model_job(database))
    assert {entry.short_name: entry.reason for entry in found.verdict.unmeasured} == {
        "ReLU": "raised: an illegal [memory] access",
        "MaxPool2d": "not in scope",
    }
    assert 0 < found.verdict.coverage < 1
    assert found.verdict.coverage + sum(e.share for e in found.verdict.unmeasured) == pytest.approx(
        1
    )


def test_readings_are_counted_by_where_they_came_from(database):
    found = built(database, rows.model_job(database))
    counts = found.readings
    assert (counts.items, counts.measured, counts.reused, counts.failed, counts.open) == (
        7,
        4,
        2,
        1,
        0,
    )
    assert counts.card_time_s == pytest.approx(4 * 0.6)
    assert counts.window_time_s == pytest.approx(4 * 0.5)
    assert counts.card_time_median_s == pytest.approx(0.6)
    assert [(card.id, card.readings) for card in found.cards] == [
        (rows.CARD, 3),
        (rows.OTHER_CARD, 2),
    ]
    assert found.software[0]["torch"] == "2.11.0"
    assert found.verdict.flags == {"not_converged": 1}


def test_canaries_of_two_cards_widen_the_interval(database):
    rows.model_job(database)
    verdict = judged(database)
    assert verdict.systematic_time == pytest.approx(1.5 / 151.5)
    assert "2 cards" in verdict.systematic_note


def test_a_stored_verdict_is_shown_as_it_was_given(database):
    rows.model_job(database)
    verdict = judged(database)
    assert built(database, "job1").preliminary
    with database.write() as session:
        session.add(
            tables.VerdictRow(job_id="job1", round=1, **{**verdict.columns(), "outcome": "fail"})
        )
    found = built(database, "job1")
    assert not found.preliminary
    assert found.verdict.to_json() == verdict.to_json()
    assert found.rounds[0].coverage == verdict.coverage


def test_the_tuples_of_a_stored_verdict_are_shown_and_not_computed_again(database):
    rows.model_job(database)
    verdict = judged(database)
    with database.write() as session:
        session.add(tables.VerdictRow(job_id="job1", round=1, **verdict.columns()))
        for reading in session.exec(select(tables.ReadingRow)).all():
            reading.time_us *= 2
    found = built(database, "job1")
    assert found.tuples == verdict.tuples
    assert {row.short_name: row.cost.time_us for row in found.types}["Conv2d"] == 630
    assert "tuples" not in found.to_json()["verdict"]


def test_a_verdict_stored_without_its_tuples_gets_them_from_the_readings(database):
    rows.model_job(database)
    columns = judged(database).columns()
    with database.write() as session:
        session.add(tables.VerdictRow(job_id="job1", round=1, **columns))
    now = built(database, "job1")
    with database.write() as session:
        row = session.exec(select(tables.VerdictRow)).one()
        row.details = {name: value for name, value in row.details.items() if name != "tuples"}
    assert built(database, "job1").to_json() == now.to_json()


def test_a_verdict_of_another_version_is_worked_out_anew(database):
    rows.model_job(database)
    verdict = judged(database)
    with database.write() as session:
        session.add(
            tables.VerdictRow(
                job_id="job1", round=1, **verdict.columns() | {"details": {"schema": 99}}
            )
        )
    assert built(database, "job1").verdict.to_json() == verdict.to_json()


def test_an_open_job_is_reported_as_far_as_it_is(database):
    rows.model_job(database)
    with database.write() as session:
        for item in session.exec(select(tables.Item).where(tables.Item.role == "whole")).all():
            item.state, item.reading_id = "claimed", None
    found = built(database, "job1")
    assert found.preliminary
    assert found.readings.open == 1
    assert found.verdict.outcome == "none"
    assert "being measured" in found.verdict.reasons[0]


def test_a_cancelled_job_has_no_verdict_in_its_report_and_in_the_list(database):
    rows.model_job(database)
    with database.write() as session:
        session.get_one(tables.Job, "job1").state = "cancelled"
        for item in session.exec(select(tables.Item).where(tables.Item.role == "canary")).all():
            item.state, item.reading_id = "cancelled", None
    found = built(database, "job1")
    assert found.verdict.outcome == "none"
    assert found.verdict.missed
    (reason,) = found.verdict.reasons
    assert "Cancelled after 5 of 7 items" in reason
    assert "`farm resume --failed job1` continues" in reason
    with database.write() as session:
        session.get_one(tables.Job, "job1").farm = "embedded"
    (reason,) = built(database, "job1").verdict.reasons
    assert "Run the same command again" in reason
    with database.read() as session:
        (row,) = listing.jobs(session, 5)
    assert (row["outcome"], row["accuracy_time"], row["coverage"]) == ("none", None, None)


def test_the_gap_of_an_incomplete_sum_is_not_shown(database):
    measured.measured(database)
    complete = built(database, "job1")
    assert not complete.verdict.incomplete
    assert "incomplete" not in text_of(complete)
    rows.cancel_early(database, "job1")
    found = built(database, "job1")
    assert found.verdict.coverage < 0.5
    assert found.verdict.incomplete
    assert found.to_json()["verdict"]["gap_time"] == pytest.approx(found.verdict.time.gap.value)
    text, page = text_of(found), JobReport(found)._repr_html_()
    for shown in (text, page):
        assert f"{found.verdict.time.gap.value * 100:+.1f}" not in shown
        assert shown.count("incomplete") >= 2, "time and energy"


def test_an_incomplete_sum_has_no_gap_among_the_reasons_of_its_verdict(database):
    measured.measured(database)
    rows.cancel_early(database, "job1")
    with database.write() as session:
        session.get_one(tables.Job, "job1").state = "done"
    found = judged(database)
    assert (found.outcome, found.incomplete) == ("fail", True)
    assert found.reasons[0].startswith("The coverage is ")


@pytest.mark.parametrize(
    ("gap", "coverage", "incomplete"),
    [
        (-0.985, 0.01, True),
        (-0.12, 0.89, True),
        (-0.12, 0.91, False),  # little is missing
        (-0.35, 0.85, False),  # more than twice what is missing
        (0.58, 0.94, False),  # the missing tuples make it larger
    ],
)
def test_a_sum_is_incomplete_if_missing_tuples_explain_its_gap(database, gap, coverage, incomplete):
    rows.model_job(database)
    verdict = judged(database)
    total = dataclasses.replace(verdict.time.total, value=1 + gap)
    time = dataclasses.replace(verdict.time, total=total, whole=Figure(1.0, 0.0))
    found = dataclasses.replace(verdict, time=time, coverage=coverage)
    assert found.incomplete == incomplete


def test_what_was_read_just_before_the_canary_was_found_changed_is_flagged_too(database):
    rows.model_job(database)
    with database.write() as session:
        items = session.exec(
            select(tables.Item).where(tables.Item.role == "tuple", tables.Item.state == "done")
        ).all()
        readings = [session.get_one(tables.ReadingRow, item.reading_id) for item in items]
        *before, after = (row for row in readings if row.card_id == rows.CARD)
        # the last on its card comes after the canary that had changed, those of another card never
        for row in readings:
            number, time_us = (2, 109.0) if row is after else (1, 100.0)
            row.details = {
                **row.details,
                "canary": {"number": number, "process": 7, "time_us": time_us},
            }
            row.flags = ["canary_off"] if row is after else []
    assert (len(before), len(readings)) == (1, 3)
    assert judged(database).flags["canary_off"] == 2


def test_the_launch_gap_comes_from_the_other_launch_of_the_same_whole(database):
    rows.model_job(database)
    with database.write() as session:
        eager = Protocol(launch="eager").id
        rows.reading(
            session, rows.VARIANT.id, 900.0, 400.0, subject_kind="variant", protocol_id=eager
        )
    verdict = judged(database)
    assert verdict.launch_gap_us == 180
    assert verdict.time.whole.value == 720


def test_a_launch_gap_read_after_the_verdict_is_told_too(database):
    rows.model_job(database)
    with database.write() as session:
        session.add(tables.VerdictRow(job_id="job1", round=1, **judged(database).columns()))
    assert built(database, "job1").verdict.launch_gap_us is None
    with database.write() as session:
        eager = Protocol(launch="eager").id
        rows.reading(
            session,
            rows.VARIANT.id,
            900.0,
            400.0,
            subject_kind="variant",
            protocol_id=eager,
            flags=["study"],
        )
    assert built(database, "job1").verdict.launch_gap_us == 180


def test_json_holds_everything_with_units_in_the_key_names(database):
    data = built(database, rows.model_job(database)).to_json()
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again["schema"] == 1
    assert again["verdict"]["whole_energy_mj"] == 375
    assert again["types"][0]["energy_mj"] == 332
    assert again["tuples"][0]["power_w"] == pytest.approx(80 / 150 * 1000)
    bare = re.compile(r"(^|_)(time|energy|power|half_width|clock)$")
    # Relative figures have no unit.
    relative = {"accuracy_time", "accuracy_energy", "systematic_time", "systematic_energy"}
    relative |= {"between_jobs_time", "between_jobs_energy"}
    relative |= {f"gap_{name}" for name in ("time", "energy", "power")}
    relative |= {
        f"gap_{name}_half_width" for name in ("time", "energy", "energy_above_idle", "power")
    }
    relative |= {
        "accuracy_power",
        "time_half_width",
        "energy_half_width",
    }  # the last two: the request's stopping rule
    assert [key for key in _keys(again) if bare.search(key) and key not in relative] == []


def test_a_sweep_has_its_tuples_and_no_verdict(database):
    found = built(database, rows.sweep_job(database))
    assert found.kind == "sweep"
    assert found.verdict.outcome == "none"
    assert [
        (line.subject.label, line.count, value_of(line.time_us), value_of(line.energy_mj))
        for line in found.tuples
    ] == [
        ("Conv2d 128->64 k3", 1, 32, 16),
        ("Conv2d 64->64 k3", 1, 16, 8),
    ]


def large_sweep(database):
    """A sweep on two cards whose readings differ: one failed item, one without energy, a canary
    that changes.
    """
    with database.write() as session:
        rows.ground(session)
        request = Request(
            sweep=Sweep("Conv2d", {"in_channels": tuple(range(11))}, ""), protocol=Protocol()
        )
        rows.job(session, request, "large")
        session.add(tables.Round(job_id="large", number=1, operators=["all"], planned_at_s=1.0))
        for number in range(11):
            subject = rows.operator(
                session, "add" if number == 7 else "Conv2d", f"{number}", flops=10**8 * number
            )
            card = rows.OTHER_CARD if number % 3 else rows.CARD
            if number == 4:
                rows.item(
                    session,
                    "large",
                    "tuple",
                    subject,
                    "failed",
                    reason="raised",
                    message="no",
                    card_id=card,
                )
                continue
            changed = number in (3, 8)
            note = {"number": 1 + changed, "process": 7, "time_us": 100.0}
            more = {
                "details": {"method": METHOD, "canary": note},
                "flags": ["canary_off"] * changed,
            }
            read = rows.reading(session, subject, 10.0 + number, 3.0 + number, card, **more)
            rows.item(
                session,
                "large",
                "tuple",
                subject,
                reading_id=read,
                card_id=card,
                reused=number == 5,
            )
    return "large"


def test_a_large_sweep_without_failed_items_is_covered_completely(database, monkeypatch):
    job_id = large_sweep(database)
    with database.write() as session:
        session.delete(session.exec(select(tables.Item).where(tables.Item.state == "failed")).one())
    monkeypatch.setattr(job_results, "MOST_TUPLES", 4)
    monkeypatch.setattr(job_results, "IN_BATCH", 1)
    assert built(database, job_id).verdict.coverage == 1.0


@pytest.mark.parametrize("without_energy", [False, True])
def test_a_large_sweep_is_summed_in_parts_with_the_same_result(
    any_database, monkeypatch, without_energy
):
    job_id = large_sweep(any_database)
    if without_energy:
        with any_database.write() as session:
            session.exec(
                select(tables.ReadingRow).where(tables.ReadingRow.time_us == 12.0)
            ).one().energy_mj = None
    whole = built(any_database, job_id).to_json()
    monkeypatch.setattr(job_results, "MOST_TUPLES", 4)
    monkeypatch.setattr(job_results, "IN_BATCH", 3)
    large = built(any_database, job_id)
    parts = large.to_json()
    assert (len(parts.pop("tuples")), parts["verdict"]["parts"]) == (4, 11)
    assert [line.time_us.value for line in large.tuples] == [20.0, 19.0, 18.0, 17.0]
    with any_database.read() as session:
        assert layers(session, large, "type", outputs=False).title.endswith(
            ", the 4 heaviest of 11 tuples"
        )
    types = parts["verdict"].pop("types")
    assert (
        types["Conv2d"]["tuples"],
        types["Conv2d"]["measured_tuples"],
        types["add"]["tuples"],
    ) == (10, 9, 1)
    assert "do not include differences of the canary" in parts["verdict"].pop("systematic_note")
    assert whole["verdict"].pop("systematic_note")
    assert whole.pop("tuples")
    assert (
        whole["verdict"]["flags"]["canary_off"] > 2
    )  # readings before the change are doubtful too
    assert flat(parts) == pytest.approx(flat(whole))


def flat(data, name=""):
    """Return path -> value of each number and text."""
    if isinstance(data, dict | list | tuple):
        entries = data.items() if isinstance(data, dict) else enumerate(data)
        return {
            path: value
            for key, one in entries
            for path, value in flat(one, f"{name}/{key}").items()
        }
    return {name: data}


def test_a_large_sweep_is_judged_before_other_writers_have_to_wait(database, monkeypatch):
    job_id = large_sweep(database)
    with database.write() as session:
        session.get_one(tables.Job, job_id).state = "open"
    monkeypatch.setattr(job_results, "MOST_TUPLES", 4)
    monkeypatch.setattr(job_results, "IN_BATCH", 3)
    summed, writes = closing.JobResults.verdict, []

    def verdict(self):
        with database.write() as session:  # SQLite has one writer
            session.get_one(tables.Job, job_id).title = "written meanwhile"
        writes.append(1)
        return summed(self)

    monkeypatch.setattr(closing.JobResults, "verdict", verdict)
    assert closing.close_round(database, job_id, 1).closing is closing.Closing.DONE
    assert writes == [1]
    stored = built(database, job_id)
    assert (len(stored.tuples), stored.verdict.measured, stored.preliminary) == (4, 10, False)
    assert {row.short_name: row.cost.tuples for row in stored.types} == {"Conv2d": 10, "add": 1}


def test_no_such_job(database):
    rows.model_job(database)
    with pytest.raises(NoSuchJob, match="no job 'nope'"):
        built(database, "nope")
    with database.read() as session, pytest.raises(NoSuchJob) as caught:
        find_job(session, "layers.csv")  # farm report job1 --csv layers.csv
    assert "Write > before the file" in caught.value.next_step


def test_reports_and_their_rendering_need_no_torch():
    code = (
        "import sys, farm.report, farm.verdict.aggregate, cli.report_tables; print('torch' in "
        "sys.modules, "
        "'celery' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def _keys(data):
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from _keys(value)
    elif isinstance(data, list):
        for value in data:
            yield from _keys(value)


def _with_verification(database, **found):
    with database.write() as session:
        captured = session.exec(select(tables.Capture)).one()
        captured.verification = {"matches": True, "differences": [], "card": rows.CARD, **found}
        session.add(captured)
        return [
            call.operator_id
            for call in session.exec(select(tables.Call).order_by(tables.Call.call_index))
        ]


def test_what_calls_took_in_the_running_model_stands_beside_the_isolated_readings(database):
    job_id = rows.model_job(database)
    big, small = list(dict.fromkeys(_with_verification(database)))[:2]
    timed = {
        "calls_us": {big: [140.0, 150.0, 160.0, None], small: [31.0]},
        "source": "kernels",
        "passes": 3,
    }
    _with_verification(database, in_model=timed)
    shown = built(database, job_id)
    by_label = {line.subject.operator_id: line.in_model_us for line in shown.tuples}
    assert (by_label[big], by_label[small]) == (150.0, 31.0)
    assert {row.short_name: row.in_model_us for row in shown.types}[
        "Conv2d"
    ] is None  # one call is not known
    _with_verification(database, in_model=timed | {"calls_us": {big: [150.0] * 4, small: [31.0]}})
    shown = built(database, job_id)
    assert {row.short_name: row.in_model_us for row in shown.types}["Conv2d"] == 631.0
    assert "calls_us" not in shown.to_json()["verification"]["in_model"]


def test_kernels_are_held_against_the_whole_only_under_the_same_numeric_flags(database):
    job_id = rows.model_job(database)
    with database.read() as session:
        tuples = {one: {"gemm": 1} for one in session.exec(select(tables.Operator.id))}
    kernels = {"gemm": {"count": 8, "time_us": 700.0}, "other": {"count": 1, "time_us": 100.0}}
    _with_verification(database, kernels=kernels, tuple_kernels=tuples, numerics={"tf32": False})
    audit = built(database, job_id).verdict.kernels
    assert audit is not None
    assert audit.explained == 0.875
    _with_verification(database, kernels=kernels, tuple_kernels=tuples, numerics={"tf32": True})
    assert built(database, job_id).verdict.kernels is None


def test_a_report_of_some_layers_has_a_sum_for_all_without_a_whole(database):
    variant = catalog.variant("gpt2", 1, length=8, layers=1)
    job_id = measured.measured(database, variant)
    assert built(database, job_id).all_layers is None, "nobody has taken the whole model apart"
    assert submit(database, ResolvedRequest.of(Request(variant=variant), [rows.CARD])).new == 0, (
        "readings serve: nothing is published"
    )
    found = built(database, job_id)
    calls = extract(catalog.variant("gpt2", 1, length=8), device_type="cuda").capture.counts
    figures = {line.subject.operator_id: line for line in found.tuples}
    told = found.to_json()["all_layers"]
    assert (told["layers"], told["covered"], told["lacking"]) == (12, 1.0, [])
    assert told["time_us"] == pytest.approx(
        sum(calls[id_] * row.time_us.value for id_, row in figures.items())
    )
    assert told["energy_mj"] == pytest.approx(
        sum(calls[id_] * row.energy_mj.value for id_, row in figures.items())
    )
    assert told["time_half_width_us"] > found.verdict.time.total.half_width
    gap = found.verdict.time.gap
    assert told["time_half_width_us"] >= abs(gap.value) * told["time_us"], (
        "the sum of all may be wrong by as much"
    )
    assert told["tokens_per_s"] == pytest.approx(8e6 / told["time_us"])
    remark = remark_of(found)
    assert re.match(r"sum over all 12 layers: .* µs, .* mJ; not compared ", remark)
    assert re.search(r"8 tokens a pass: .* a token$", remark)

    # One that no reading covers is listed, and its share of the cost is told.
    left_out = max(found.tuples, key=lambda line: line.count * line.subject.estimated_us).subject
    with database.write() as session:
        of_it = (tables.Item.job_id == job_id, tables.Item.subject_id == left_out.operator_id)
        item = session.exec(select(tables.Item).where(*of_it)).one()
        item.state, item.reading_id, item.reason = "failed", None, "raised"
    found = built(database, job_id)
    told = found.to_json()["all_layers"]
    (lacking,) = told["lacking"]
    assert (lacking["operator_id"], lacking["calls"]) == (
        left_out.operator_id,
        calls[left_out.operator_id],
    )
    assert (told["covered"], told["tokens_per_s"]) == (pytest.approx(1 - lacking["share"]), None)
    assert f"the sum lacks 1 of {len(calls)} tuples (" in remark_of(found)
    assert built(database, measured.measured(database, job_id="job2")).all_layers is None


def remark_of(found):
    return dict(remarks(found))["all layers"]


def test_the_report_of_a_decode_shows_its_implementation_floor_and_copies():
    """llama-3.1-8b, batch 64 beside 1,024 tokens on an H100: 57.4 ms; weights and cache alone need
    7.8 ms.
    """
    with packaged_database().read() as session:
        jobs = session.exec(select(tables.Job).where(col(tables.Job.title).contains("decode 64")))
        job = next(job for job in jobs if job.title.startswith("llama-3.1-8b"))
        made = report.build(session, job.id)
    texts = dict(remarks(made))
    assert "static cache" in texts["implementation"]
    assert "GB of weights and 8.59 GB of cache" in texts["floor"]
    assert "copy or convert keys and values" in texts["copies"]
    printed = made.to_json()
    assert printed["implementation"] == texts["implementation"]
    assert 0.5 < printed["floor"]["copies_us"] / made.verdict.time.whole.value < 0.8
    with packaged_database().read() as session:
        jobs = session.exec(select(tables.Job).where(col(tables.Job.title).startswith("resnet34")))
        without_tokens = report.build(session, jobs.first().id).to_json()
    assert not {"floor", "implementation"} & without_tokens.keys()
