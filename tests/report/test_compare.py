"""Two sides are held against each other: what moved comes first, and nothing is called faster whose intervals
overlap.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from sqlalchemy import update

from farm.errors import UsageError
from farm.report.compare import Difference, compare
from farm.settings import settings
from farm.store import tables
from farm.types.protocol import Protocol
from farm.verdict.figures import Figure
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled, rows


def compared(database, first, second):
    with database.read() as session:
        return compare(session, first, second)


def test_what_moved_comes_first_and_what_one_side_alone_has_is_listed(any_database):
    taken = filled.fill(any_database, leave_out=lambda spec: spec.short_name == "Linear")
    newer = dataclasses.replace(filled.SOFTWARE, torch="2.12.0")
    filled.fill(any_database, software=newer, slower=1.1, leave_out=lambda spec: spec.short_name == "MaxPool2d")
    found = compared(any_database, "torch=2.11", "torch=2.12")
    assert (found.a.software, found.b.software) == (("2.11.0+cu130",), ("2.12.0",))
    assert len(found.tuples) == len(taken.capture.tuples) - 2
    assert all(row.time.change.value == pytest.approx(0.1) and row.time.verdict == "slower" for row in found.tuples)
    moved = [abs(row.time.b.value - row.time.a.value) for row in found.types]
    assert moved == sorted(moved, reverse=True)
    assert found.total.energy.change.value == pytest.approx(0.1)
    assert [label.split()[0] for label in found.only_a] == ["MaxPool2d"]
    assert [label.split()[0] for label in found.only_b] == ["Linear"]
    assert found.worse_by(0.05)
    assert not found.worse_by(0.15)
    assert compared(any_database, "torch=2.12", "torch=2.11").types[0].time.verdict == "faster"


def test_nothing_is_faster_whose_intervals_overlap():
    difference = Difference(Figure(100.0, 3.0), Figure(105.0, 3.0))
    assert (difference.apart, difference.verdict) == (False, "same")
    assert Difference(Figure(100.0, 2.0), Figure(105.0, 2.0)).verdict == "slower"


def test_two_dtypes_are_matched_by_all_else(database):
    filled.fill(database)
    filled.fill(database, dataclasses.replace(filled.VARIANT, dtype="bfloat16"), slower=0.5)
    found = compared(database, "dtype=float32", "dtype=bfloat16")
    assert found.only_a == found.only_b == ()
    assert {row.time.verdict for row in found.types} == {"faster"}


def test_jobs_are_compared_as_their_reports_have_them(database):
    rows.model_job(database)
    found = compared(database, "job1", "job1")
    assert found.a.job_id == "job1"
    assert {row.operator: row.calls for row in found.types} == {"Conv2d": 5, "add": 3}
    assert found.total.time.change.value == 0
    assert found.total.time.verdict == "same"


def test_what_cannot_be_compared_says_why(database):
    filled.fill(database)
    filled.fill(database, model="NVIDIA H100", card="GPU-1")
    filled.fill(database, protocol=Protocol(launch="eager"), card="GPU-2", model="NVIDIA A100")
    filled.fill(database, card="GPU-2", model="NVIDIA A100")
    for text, message in (
        ("Conv2d launch=graph", "several card models"),
        ("card=A100", "several kinds of launch"),
        ("card=H100 in_channels=65", "No reading"),
        ("nojob", "no job"),
        (" ", "empty"),
    ):
        with pytest.raises(UsageError, match=message):
            compared(database, text, "card=H200")


def test_readings_that_differ_in_any_software_are_never_dropped(database):
    filled.fill(database)
    filled.fill(database, software=dataclasses.replace(filled.SOFTWARE, cudnn="92000"), slower=1.5)
    with pytest.raises(UsageError, match="several versions of cudnn") as caught:
        compared(database, "torch=2.11", "card=H200")
    assert caught.value.next_step == "Choose one, for instance with cudnn=92000."
    found = compared(database, "cudnn=91900", "cudnn=92000")
    assert found.total.time.change.value == pytest.approx(0.5)


def test_dtypes_come_from_the_description_of_a_tuple_not_from_its_label(database):
    filled.fill(database)
    filled.fill(database, dataclasses.replace(filled.VARIANT, dtype="bfloat16"), slower=0.5)
    with database.write() as session:
        session.execute(update(tables.Operator).values(label="a label"))
    found = compared(database, "dtype=float32", "dtype=bfloat16")
    assert (found.a.dtypes, found.b.dtypes) == (("float32",), ("bfloat16",))
    assert found.only_a == found.only_b == ()


def test_at_a_terminal(database, farm, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    filled.fill(database, model="NVIDIA H100", card="GPU-1", slower=1.3)
    said = farm("compare", "card=H200", "card=H100", "--fail-above", "5%")
    assert said.code == 5
    assert "+30.0" in said.stdout
    assert "B is slower than A by more than 5 %" in said.stderr
    assert farm("compare", "card=H200", "card=H100", "--fail-above", "0.5").code == 0
    assert farm("compare", "card=H100", "card=H200", "--fail-above", "5%", "--json").code == 0
    assert json.loads(farm("compare", "card=H200", "card=H100", "--json").stdout)["total"][
        "time_change"
    ] == pytest.approx(0.3)
    for text in ("much", "5"):  # five would be 500 %
        assert farm("compare", "card=H200", "card=H100", "--fail-above", text).code == 2


def test_what_has_nothing_in_common_is_listed_and_passes_no_bound(database, farm, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    said = farm("compare", "Conv2d", "Linear", "--fail-above", "5%")
    assert said.code == 5
    assert [line for line in said.stdout.splitlines() if line and line[0] not in "AB "] == [
        "They have no tuple in common.",
        "only in A: 11 tuples",
        "only in B: 1 tuple",
    ]
