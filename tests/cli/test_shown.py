"""What a terminal shows: a golden report, and that nothing breaks with what may be missing."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import update
from sqlmodel import select

from cli import follow, lists, report_tables
from farm.errors import BelowTarget
from farm.jobs.jobs import Progress
from farm.report import report
from farm.settings import settings
from farm.store import tables
from farm.store.database import read_clock_s
from farm.verdict import job_results
from tests.report import rows

GOLDEN = Path(__file__).parent.parent / "report" / "golden"


def text(renderable, width=100, terminal=False):
    console = Console(
        file=io.StringIO(), width=width, highlight=False, force_terminal=terminal, color_system=None
    )
    console.print(renderable)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return "\n".join(lines) + "\n"


def shown(database, job_id, **options):
    with database.read() as session:
        return text(report_tables.report(report.build(session, job_id), **options))


def golden(request, name, found):
    path = GOLDEN / name
    if request.config.getoption("--regenerate-golden", default=False):
        path.write_text(found)
    assert found == path.read_text(), (
        f"{path} differs; look at it, then run pytest with --regenerate-golden"
    )


def test_the_report_of_a_model(request, database):
    golden(request, "model.txt", shown(database, rows.model_job(database), tuples=3))


def test_the_report_of_a_sweep_without_energy(request, database):
    golden(request, "sweep.txt", shown(database, rows.sweep_job(database, energy=False)))


def test_the_report_of_a_large_sweep_says_how_many_of_its_tuples_are_listed(database, monkeypatch):
    monkeypatch.setattr(job_results, "MOST_TUPLES", 2)
    monkeypatch.setattr(job_results, "IN_BATCH", 2)
    monkeypatch.setattr(report_tables, "_MOST_SWEEP_ROWS", 1)
    job_id = rows.sweep_job(database)
    with database.write() as session:
        third = rows.operator(session, "Conv2d", "256->64 k3")
        session.flush()
        rows.item(
            session, job_id, "tuple", third, reading_id=rows.reading(session, third, 64.0, 9.0)
        )
    found = shown(database, job_id)
    assert "1 more; --json lists the 2 heaviest" in found
    assert "3 of 3 tuples measured" in found


def test_what_the_neighbours_of_operators_add_is_said(database):
    job_id = rows.model_job(database)
    context = {"alone_us": 9.0, "effect_us": 2.0, "effect_half_width_us": 0.1, "passes": 138}
    of_tuple = {"context": context, "copies": 9}
    with database.write() as session:
        for reading in session.exec(select(tables.ReadingRow)).all():
            extra = of_tuple if reading.subject_kind == "operator" else {"found_again": 0.25}
            reading.details = {**reading.details, **extra}
            session.add(reading)
    flat = " ".join(shown(database, job_id).split())
    assert "alone changes the sum by -" in flat
    assert "25.0 % of its weights in the cache" in flat


def test_how_old_the_times_in_the_model_are_is_said(database):
    job_id = rows.model_job(database)
    with database.write() as session:
        capture = session.exec(select(tables.Capture)).one()
        timed = {
            "in_model": {"source": "clock", "passes": 3, "calls_us": {}},
            "read_at_s": time.time() - 7205.0,
        }
        capture.verification = {**capture.verification, **timed, "card": rows.CARD}
    found = " ".join(shown(database, job_id).split())
    found_text = (
        "in model time of each call in the running model by the host's clock, median of 3 passes, "
        "measured 2 h ago"
    )
    assert found_text in found


def test_an_open_job_says_that_it_is_preliminary(database):
    rows.model_job(database)
    with database.write() as session:
        for item in session.exec(select(tables.Item)).all():
            item.state, item.reading_id = "waiting", None
    found = shown(database, "job1")
    assert "PRELIMINARY NO VERDICT" in found
    assert "7 open" in found


def test_check_asks_no_verdict_of_a_few_operators_or_of_a_sweep(database):
    job_id = rows.model_job(database)
    with database.read() as session:
        whole = report.build(session, job_id)
    with pytest.raises(BelowTarget):
        follow.check_verdicts([whole])
    unmeasured = tuple(
        entry for entry in whole.verdict.unmeasured if entry.reason == "not in scope"
    )
    few = dataclasses.replace(
        whole.verdict, outcome="none", asked_for=("Conv2d",), unmeasured=unmeasured
    )
    follow.check_verdicts(
        [dataclasses.replace(whole, verdict=few), dataclasses.replace(whole, kind="sweep")]
    )


def test_rounds_are_shown_where_there_are_several(database):
    rows.model_job(database)
    with database.write() as session:
        job = session.get_one(tables.Job, "job1")
        job.round = 2
        first = session.get_one(tables.Round, ("job1", 1))
        session.add(
            tables.Round(
                job_id="job1",
                number=2,
                reason="below target",
                operators=["Conv2d", "Softmax"],
                capture_id=first.capture_id,
            )
        )
        first.operators = ["Conv2d"]
    (row,) = [line for line in shown(database, "job1").splitlines() if "below target" in line]
    assert "Softmax" in row
    assert "Conv2d" not in row  # the first round's


def test_labels_are_no_markup(database):
    found = shown(database, rows.model_job(database))
    assert "ReLU 32x64[0] fp32" in found
    assert "[memory]" in found


def progress(state="open", **more):
    values = {
        "job_id": "ab12",
        "title": "resnet50 32x224 float32",
        "state": state,
        "round": 2,
        "counts": {"done": 30, "failed": 1, "waiting": 30},
        "reused": 12,
        "total": 61,
        "expected_left_s": 200.0,
        "current": ((rows.CARD, "Conv2d 64->64 k3 | 32x64x56x56 fp32"),),
        "started_at_s": 0.0,
        "elapsed_s": 75.0,
    }
    return Progress(**values | more)


def test_progress_shows_items_cards_and_time_left():
    found = text(
        follow.progress_bars([progress(message="waits for a card"), progress("done", current=())])
    )
    for expected in (
        "31/61",
        "12 reused, 1 failed, round 2, 3 min 20 s left",
        "Conv2d 64->64",
        "waits for a card",
    ):
        assert expected in found
    assert "done in 1 min 15 s" in found
    assert follow.progress_line(progress()).startswith(
        "resnet50 32x224 float32 [ab12] 31/61 12 reused"
    )
    cancelled = progress("cancelled", counts={"done": 30, "failed": 1, "cancelled": 30}, round=1)
    assert follow.progress_line(cancelled).endswith(
        "31/61 12 reused, 1 failed, 30 cancelled after 1 min 15 s"
    )


def test_without_a_terminal_several_jobs_have_a_line_each_at_their_end_and_one_line_in_a_minute(
    capsys,
):
    jobs = [progress(job_id=name) for name in ("ab12", "cd34", "ef56")]
    lines = follow._PlainLines().show
    for done in range(len(jobs) + 1):
        for _ in range(3):
            lines([progress("done", job_id=job.job_id) for job in jobs[:done]] + jobs[done:])
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("0 of 3 jobs ended; resnet50 32x224 float32")
    assert ["[ab12]" in said[1], "[cd34]" in said[2], "[ef56]" in said[3], len(said)] == [
        True,
        True,
        True,
        4,
    ]


def test_lists_bear_what_is_missing_and_what_is_long():
    card = {
        "id": rows.CARD,
        "model": "A very long name of a card with 24 cores",
        "host": "h" * 40,
        "index": 3,
    }
    assert "GPU-aaaa0000…" in text(
        lists.cards([card, {"id": "CPU-1", "state": "lost", "measuring": "x" * 200}])
    )
    shown = text(
        lists.cards(
            [
                {
                    **card,
                    "state": "busy",
                    "waiting": 12,
                    "done_last_hour": 3456,
                    "last_seen_ago_s": 2.0,
                }
            ]
        )
    )
    assert "items/h" in shown
    assert "3456" in shown
    assert "PASS" in text(
        lists.jobs([{"id": "a", "outcome": "pass", "accuracy_time": 0.9996}, {"id": "b"}], NOW_S)
    )
    operators = [
        {
            "label": "getitem[0]",
            "count": 2,
            "flops_per_call": 0,
            "bytes_per_call": 10,
            "estimated_cost_share": 1.0,
        }
    ]
    assert "getitem[0]" in text(lists.operators(operators, "resnet18"))
    assert "224 px" in text(
        lists.models([{"name": "resnet18", "input_size": 224}, {"name": "mine"}])
    )


NARROW = pytest.mark.parametrize("width", [60, 72, 80, 100, 200])


def test_the_age_of_a_job_goes_by_the_clock_of_the_database(farm, database, monkeypatch):
    assert "5 min" in text(lists.jobs([{"id": "a", "created_at_s": NOW_S - 300}], NOW_S))
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    job_id = rows.model_job(database)
    with database.write() as session:
        session.get_one(tables.Job, job_id).created_at_s = read_clock_s(session) - 330
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert "5 min" in farm("jobs").stdout


@NARROW
def test_a_head_of_two_lines_has_two_lines_at_any_width(width):
    job = {
        "id": "a",
        "title": "resnet50 of a long name " * 3,
        "created_at_s": NOW_S,
        "accuracy_time": 0.99,
    }
    found = text(lists.jobs([job], NOW_S), width, terminal=True)
    assert "accuracy" in found
    assert "\\n" not in found


@NARROW
def test_a_narrow_terminal_cuts_no_name_and_no_number_of_a_report(database, width):
    job_id = rows.model_job(database)
    with database.read() as session:
        found = text(
            report_tables.report(report.build(session, job_id), tuples=3), width, terminal=True
        )
    lines = found.splitlines()
    for whole in (
        "Conv2d",
        "MaxPool2d",
        "630 µs",
        "332 mJ",
        "696.0 ± 7.0 µs",
        "515.8 ± 9.4 W",
        "-3.3 ± 1.0 %",
        "5.0 %",
    ):
        assert whole in found
    for name in ("time", "power", "energy"):
        assert any(line.startswith(f"{name} ") and "±" in line for line in lines)
    # What dropped out is named.
    assert (
        "estimate" in lines[next(n for n, line in enumerate(lines) if line.startswith("operator "))]
    ) == (width > 72)
    assert ("too narrow: estimate" in found) == (width <= 72)


def test_the_reasons_of_a_verdict_hang_under_their_beginning(database):
    job_id = rows.model_job(database)
    with database.read() as session:
        built = report.build(session, job_id)
    verdict = dataclasses.replace(built.verdict, reasons=("reason " * 30,))
    lines = text(report_tables.report(dataclasses.replace(built, verdict=verdict)), 60).splitlines()
    told = [line for line in lines if "reason " in line]
    assert len(told) == 4
    assert all(line.startswith("  reason") for line in told)


def test_a_pipe_gets_full_lines_unless_it_is_told_its_width(farm, database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    job_id = rows.model_job(database)
    title = "a title " * 40
    with database.write() as session:
        session.get_one(tables.Job, job_id).title = title
        session.exec(
            select(tables.CardRow)
        ).first().model = "A very long name of a card with 24 cores and more"
    monkeypatch.delenv("COLUMNS", raising=False)
    assert title.strip() in farm("report", job_id).stdout
    assert title.strip() in farm("jobs").stdout
    assert "A very long name of a card with 24 cores and more" in farm("cards").stdout
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, farm("report", job_id).stdout.splitlines())) <= 70


NOW_S = 1000.0
JOBS = [
    {
        "id": "bubtgyg3",
        "title": "resnet18 32x224 float32",
        "state": "cancelled",
        "items": 107,
        "closed": 2,
    },
    {
        "id": "kq7mzzp2",
        "title": "fasterrcnn_mobilenet_v3_large_320_fpn 4x320 bfloat16",
        "state": "done",
        "outcome": "none",
        "accuracy_time": 0.9432,
    },
]


@NARROW
def test_a_narrow_terminal_keeps_id_title_state_and_verdict_of_a_job(width):
    lines = text(lists.jobs(JOBS, NOW_S), width, terminal=True).splitlines()
    (first,) = [line for line in lines if line.startswith("bubtgyg3 ")]
    (second,) = [line for line in lines if line.startswith("kq7mzzp2 ")]
    assert "resnet18 32x224" in first
    assert "cancelled" in first
    assert "fasterrcnn_mobilenet" in second
    assert "NO VERDICT" in second


def test_where_no_column_has_room_each_row_is_a_list():
    found = text(lists.jobs(JOBS, NOW_S), 30, terminal=True)
    assert "bubtgyg3" in found
    assert "2/107" in found
    assert "94.3 %" in found


LONG = ["fasterrcnn_mobilenet_v3_large_320_fpn", "scaled_dot_product_attention", "convnext_base"]


@pytest.mark.parametrize("width", [72, 80, 100])
def test_no_title_and_no_name_of_an_operator_is_broken(database, width):
    jobs = [
        {**JOBS[1], "title": f"{name} 32x224 bfloat16", "items": 1234, "closed": 1234}
        for name in LONG
    ]
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(lists.jobs(jobs, NOW_S))
    found = console.file.getvalue()
    for name in LONG:
        assert f" {name}" in found
    job_id = rows.model_job(database)
    with database.write() as session:
        session.execute(
            update(tables.Operator).values(short_name=LONG[1], label=f"{LONG[1]} 32x12x197x64")
        )
    with database.read() as session:
        console.print(report_tables.report(report.build(session, job_id), tuples=3))
    # By type, by tuple, and what is not measured.
    assert sum(line.startswith(LONG[1]) for line in console.file.getvalue().splitlines()) >= 5


def test_a_pipe_gets_every_column_and_where_it_is_told_a_width_no_broken_word():
    head = text(lists.jobs(JOBS, NOW_S), 1000).splitlines()[1]
    assert head.split() == [
        "job",
        "title",
        "state",
        "items",
        "time",
        "energy",
        "coverage",
        "verdict",
        "age",
    ]
    narrow = text(lists.jobs(JOBS, NOW_S), 80)
    assert all(job["id"] in narrow for job in JOBS)


@NARROW
def test_why_a_card_takes_nothing_stands_with_its_state(width):
    card = {"id": rows.CARD, "model": "NVIDIA H200", "host": "gpu-host", "index": 3}
    drained = {**card, "state": "draining", "state_reason": "drained by a person"}
    found = text(
        lists.cards([drained, {**card, "state": "busy", "measuring": "Conv2d 64->64 k3"}]),
        width,
        terminal=True,
    )
    assert "GPU-aaaa0000…" in found
    lines = found.splitlines()
    head = next(line for line in lines if "state" in line)  # the headings may have two lines
    states = " ".join(line[head.index("state") :][:18].strip() for line in lines)
    assert "draining: drained" in states


@pytest.mark.parametrize("empty", [lambda rows: lists.jobs(rows, 0.0), lists.cards, lists.models])
def test_empty_lists_say_what_to_do(empty):
    assert len(text(empty([]))) > 10


def test_what_others_wrote_is_shown_without_control_characters(database, farm, monkeypatch):
    job_id = rows.model_job(database)
    url = database.url.render_as_string(hide_password=False)
    hostile = "\n\x1b]0;t\x07\x9b2J\u202e"
    with database.write() as session:
        for table, columns in (
            (tables.Job, ("title",)),
            (tables.Operator, ("label", "short_name")),
            (tables.CardRow, ("host", "model", "driver", "state_reason")),
            (tables.Item, ("reason", "message")),
        ):
            session.execute(update(table).values({name: hostile for name in columns}))
        session.execute(update(tables.CardRow).values(state="quarantined"))
    monkeypatch.setenv("FARM_DATABASE_URL", url)
    settings.cache_clear()
    for words in (
        ("jobs",),
        ("status", job_id),
        ("report", job_id),
        ("report", job_id, "--readings"),
        ("cards",),
        ("cards", "--json"),
        ("doctor",),
        ("cards", "resume", rows_card(database)),
        ("report", job_id, "--json"),
    ):
        said = farm(*words)
        told = said.stdout + said.stderr
        assert all(line.isprintable() for line in told.splitlines()), words
        assert "\\u" in told, words
        assert len(told.splitlines()) == len(told.split("\n")) - 1, words


def rows_card(database):
    with database.read() as session:
        return session.exec(select(tables.CardRow.id)).first()
