"""A command refuses a database with an older schema as `farm jobs` does; `farm run` may upgrade its
own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from farm.settings import settings
from farm.store.database import Database, newest_schema
from tests.store.older import OLDER, make_older, write_golden

STORING = [
    "run resnet18 --card cpu",
    "compare resnet18 resnet18 --run --card cpu",
    "estimate resnet18 --card cpu --measure 1",
    "import h100",
]


def test_every_command_refuses_an_older_schema_as_the_list_of_jobs_does(
    farm, any_database_url, monkeypatch
):
    make_older(any_database_url)
    monkeypatch.setenv("FARM_DATABASE_URL", any_database_url)
    settings.cache_clear()
    expected = farm("jobs")
    assert expected.code == 3
    assert "farm db upgrade" in expected.stderr
    for command in STORING:
        said = farm(*command.split())
        assert (said.code, said.stdout) == (3, ""), command
        assert said.stderr.endswith(expected.stderr), command
    database = Database(any_database_url)
    assert database.schema_version() == OLDER
    database.close()


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_a_run_says_that_it_upgrades_its_own_database(farm, monkeypatch, quiet):
    file = Path(make_url(settings().database).database)
    write_golden(file)

    def plan_nothing(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.submissions.Submissions.still_to_do", plan_nothing)
    said = farm(*quiet, "run", "resnet18", "--card", "cpu")
    assert f"from schema 0010 to {newest_schema()}. Backup: {file}.backup-0010\n" in said.stderr
    assert farm("jobs").code == 0
