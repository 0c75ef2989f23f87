"""``farm jobs``: filters, and jobs of models, sweeps and other farms apart."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import update

from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.types.variant import Variant
from tests.report.measured import measured


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    file = tmp_path_factory.mktemp("jobs") / "farm.db"
    database = Database(f"sqlite:///{file}")
    database.upgrade()
    for name, batch in (("resnet18", 1), ("resnet50", 32), ("alexnet", 1)):
        measured(database, Variant(name, batch, 224), f"{name}-{batch}")
    with database.write() as session:
        session.execute(
            update(tables.Job)
            .where(tables.Job.id == "alexnet-1")
            .values(kind="sweep", state="cancelled")
        )
    database.close()
    return file


@pytest.fixture
def listed(farm, jobs, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{jobs}")
    settings.cache_clear()
    return farm


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        ("", {"resnet18-1", "resnet50-32", "alexnet-1"}),
        ("RESNET", {"resnet18-1", "resnet50-32"}),
        ("resnet 32x", {"resnet50-32"}),
        ("--state cancelled", {"alexnet-1"}),
        ("--imported", set()),
        ("50%", set()),
    ],
)
def test_jobs_are_filtered(listed, line, ids):
    found = json.loads(listed("jobs", *line.split(), "--json").stdout)["jobs"]
    assert {row["id"] for row in found} == ids


def test_the_limit_counts_each_kind(listed):
    found = json.loads(listed("jobs", "-n", "1", "--own", "--json").stdout)["jobs"]
    assert sorted(row["kind"] for row in found) == ["model", "sweep"]


def test_sweeps_have_a_table_of_their_own(listed):
    heads = [line.split()[0] for line in listed("jobs").stdout.splitlines() if "title" in line]
    assert heads == ["job", "sweep"]


def test_an_unknown_state_is_refused(listed):
    done = listed("jobs", "--state", "ready")
    assert done.code == 2
    assert "There is no state 'ready'" in done.stderr
    assert "open, done, cancelled" in done.stderr


def test_a_filter_without_a_match_is_named(listed):
    assert "No job matches" in listed("jobs", "vgg").stdout


def test_resume_of_an_ended_job_says_what_continues_it(listed):
    assert "`farm resume --failed alexnet-1` measures" in listed("resume", "alexnet-1").stderr
    assert "`farm report resnet18-1` shows" in listed("resume", "resnet18-1").stderr
