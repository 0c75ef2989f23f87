"""Tuples by what of them lay in slow memory, in a report and out of it."""

import dataclasses
import io

import pytest
from rich.console import Console
from sqlmodel import select

from cli import report_tables
from farm.addons.pages.page import job_page, write_page
from farm.exchange.export import as_table
from farm.jobs.create import open_job
from farm.report import report
from farm.report.lookup import lookup
from farm.requests.resolved import ResolvedRequest
from farm.store.query import parse
from farm.store.reuse import sound
from farm.store.tables import CardRow, ProtocolRow, ReadingRow
from farm.types.details import MemoryUse
from farm.types.figure import value_of
from farm.types.protocol import Protocol
from farm.types.request import Request, Sweep
from tests.planned import READING, claim, complete, items_of, register

PLACED = Request(
    sweep=Sweep("ReLU", {"channels": (3,), "batch": (2,)}, "a test"),
    protocol=Protocol(launch="eager"),
    placements="all",
)
TIMES_US = {"": 10.0, "in0": 25.0, "out0": 20.0}


@pytest.fixture
def job(database):
    """Of one tuple: all fast, one of both slow, and both slow, which could not be measured yet."""
    return planned_job(database)


def planned_job(database):
    cards = register(database, 0)
    opened = open_job(database, ResolvedRequest.of(PLACED, cards))
    with database.read() as session:
        words = {row.id: row.spec.get("placement", "") for row in session.exec(select(ProtocolRow))}
    for item in items_of(database, opened.job_id, "tuple"):
        if (word := words[item.protocol_id]) in TIMES_US:
            slow_memory = "fake memory" if word else None
            memory = MemoryUse(slow_memory=slow_memory, workspaces="fast")
            time_us = dataclasses.replace(READING.time_us, value=TIMES_US[word])
            reading = dataclasses.replace(READING, time_us=time_us).noting(memory=memory)
            complete(database, claim(database, item), item.card_id, reading=reading)
    return opened.job_id


def test_a_report_has_each_configuration_beside_all_fast(database, job, tmp_path):
    with database.read() as session:
        found = report.build(session, job)
        page = job_page(session, report.build(session, job))
    assert [
        (row.placement, value_of(row.line.time_us), row.times_fast) for row in found.placements
    ] == [
        ("in0", 25.0, 2.5),
        ("out0", 20.0, 2.0),
        ("in0+out0", None, None),
    ]
    assert [line.time_us.value for line in found.tuples] == [
        10.0
    ]  # what is placed is no part of a sum
    assert found.to_json()["placements"][0]["slow_memory"] == "fake memory"
    assert [row.tensors for row in found.placements] == ["input", "output", "all"]
    console = Console(width=120, file=io.StringIO())
    console.print(report_tables.report(found))
    assert "in0+out0" in console.file.getvalue()
    write_page(tmp_path / "page.html", [page])
    assert "in0+out0" in (tmp_path / "page.html").read_text()


def test_a_time_with_python_of_an_earlier_version_is_marked_and_not_used_again(database):
    """On a CPU: the cards of these jobs are simulated."""
    job_id = planned_job(database)
    with database.write() as session:
        simulated = session.exec(select(CardRow)).first().model_dump()
        session.add(CardRow(**{**simulated, "id": "CPU-1"}))
        session.flush()
        for row in session.exec(select(ReadingRow)):
            row.card_id = "CPU-1"
            row.details = {**row.details, "method": 8}
            session.add(row)
    with database.read() as session:
        rows = report.build(session, job_id).placements
        assert [(row.placement, row.times_fast) for row in rows] == [
            ("in0", 2.5),
            ("out0", None),
            ("in0+out0", None),
        ]
        assert "Python code of the farm" in rows[1].message
        reusable = {row.time_us: sound(row) for row in session.exec(select(ReadingRow))}
    assert not any(reusable.values())


def test_who_looks_readings_up_gets_those_with_everything_fast_unless_placed_ones_are_meant(
    database, job
):
    with database.read() as session:
        assert [row.time_us for row in lookup(session, parse(["ReLU"]))[0]] == [10.0]
        assert [row.time_us for row in lookup(session, parse(["ReLU", "placement=in0"]))[0]] == [
            25.0
        ]


def test_an_export_says_what_was_slow(database, job):
    with database.read() as session:
        assert sorted(as_table(session, "readings")["placement"].to_pylist()) == ["", "in0", "out0"]
