"""`farm compare --run` measures two models alternately, with real servers and workers on a
simulated card.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlmodel import select

from farm.settings import settings
from farm.store.tables import Item, Job, JobState, ReadingRow
from tests import slow
from tests.planned import know

ROOT = Path(__file__).parent.parent.parent
FEW = "--operators Linear,MaxPool2d"


@pytest.fixture(autouse=True)
def _simulated_cards(database, monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "2")
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string())
    settings.cache_clear()


@pytest.fixture
def known_resnet18(database):
    know(database, "resnet18")
    know(database, "resnet18", batch=8)
    return database


def jobs_of(database):
    """The jobs that are done, oldest first."""
    with database.read() as session:
        done = select(Job).where(Job.state == JobState.DONE).order_by(Job.created_at_s)
        return list(session.exec(done))


@slow.FAULT
def test_two_sizes_of_a_model_are_measured_alternately_anew_in_each_round(farm, known_resnet18):
    sides = (f"resnet18 {FEW}", f"resnet18 -b 8 {FEW}")
    said = farm(
        "compare",
        "--run",
        *sides,
        "--rounds",
        "3",
        "--scope",
        "time:type",
        "--fail-above",
        "3%",
        "--json",
    )
    found = json.loads(said.stdout)
    jobs = jobs_of(known_resnet18)
    assert [job.request["comparison"].split("/")[-2:] for job in jobs] == [
        *(["1", "A"], ["1", "B"], ["2", "B"], ["2", "A"], ["3", "A"], ["3", "B"])
    ]
    batches = {job.id: job.request["variant"].get("batch") for job in jobs}
    assert [[batches[job_id] for job_id in pair] for pair in found["rounds"]] == [[32, 8]] * 3
    with known_resnet18.read() as session:
        items = list(session.exec(select(Item)))
        readings = list(session.exec(select(ReadingRow)))
    assert not any(item.reused for item in items)
    assert len({item.reading_id for item in items}) == len(items)
    assert len({reading.card_id for reading in readings}) == 1
    # Readings of a simulated card depend on the subject alone, so a change has no spread.
    rows = {row["name"]: row for row in found["gate"]["rows"]}
    assert rows.keys() <= {"Linear", "MaxPool2d"}
    for row in rows.values():
        assert row["change"] == pytest.approx(row["b"] / row["a"] - 1)
        assert (row["low"], row["rounds"]) == (pytest.approx(row["change"]), 3)
        assert row["fails"] is (row["change"] > 0.03)
    slower = [row for row in rows.values() if row["fails"]]
    assert said.code == (5 if slower else 0)
    assert len(found["gate"]["findings"]) == len(slower)


@slow.FAULT
def test_an_interrupted_comparison_is_continued_and_a_finished_one_is_measured_again(
    farm, known_resnet18, monkeypatch
):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()
    side = f"resnet18 {FEW}"
    command = [
        sys.executable,
        "-m",
        "cli",
        "compare",
        "--run",
        side,
        side,
        "--rounds",
        "3",
        "--json",
    ]
    environment = {**os.environ, "FARM_SIMULATED_ITEM_S": "0.3"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        deadline = time.monotonic() + 180
        while "round 1 of 3" not in run.stderr.readline():
            assert run.poll() is None
            assert time.monotonic() < deadline
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=90)
    assert (run.returncode, stdout) == (130, "")
    assert "the same command continues" in stderr
    assert "Traceback" not in stderr
    before = {job.id for job in jobs_of(known_resnet18)}
    assert 2 <= len(before) < 6
    said = farm(*command[3:])
    assert said.code == 0, said.stderr
    rounds = json.loads(said.stdout)["rounds"]
    assert set(rounds[0]) <= before
    assert len({job_id for pair in rounds for job_id in pair}) == 6
    assert "round 1 of 3" not in said.stderr

    again = farm(*command[3:-1], "--fail-above", "0%")
    assert again.code == 0, again.stderr
    assert "3 rounds on simulated card" in again.stdout
    assert "round 3 of 3: whole model time " in again.stderr
    assert len(jobs_of(known_resnet18)) == 12


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (("resnet18 --card SIM", "resnet18"), "A has --card"),
        (("resnet18", "resnet18 -b 1,8"), "B names 2 models or sizes"),
        (("resnet18", "resnet18 --reuse card"), "B has --reuse card"),
        (("resnet18", "resnet18 --bach 8"), "There is no option '--bach'"),
        (("resnet18", "resnet81"), "There is no model named 'resnet81'"),
        (("resnet18 '", "resnet18"), "A quotation mark is missing"),
        (("", "resnet18"), "There is nothing to measure"),
    ],
)
def test_a_side_that_is_not_one_model_is_refused(farm, sides, message):
    said = farm("compare", "--run", *sides)
    assert (said.code, said.stdout) == (2, "")
    assert message in said.stderr
