"""A command refuses a database with an older schema as `farm jobs` does; `farm run` may upgrade its
own.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from celery.exceptions import Reject
from sqlalchemy import make_url, text, update

from farm.benchmark_process.client import BenchmarkProcess
from farm.errors import SchemaMismatch
from farm.jobs import cards
from farm.jobs.item_driver import ItemDriver
from farm.settings import settings
from farm.store.database import Database, database_now, newest_schema
from farm.store.tables import CardRow
from tasks.measure import run_item
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


def test_an_upgrade_waits_for_the_workers_of_the_older_version(farm, monkeypatch, any_database_url):
    make_older(any_database_url)
    monkeypatch.setenv("FARM_DATABASE_URL", any_database_url)
    settings.cache_clear()
    database = Database(any_database_url)
    with database.write() as session:
        session.add(CardRow(id="SIM-1", kind="simulated", model="a card", host="gpu7"))
        session.flush()
        session.execute(update(CardRow).values(state="idle", last_seen_at_s=database_now()))
    said = farm("db", "upgrade")
    assert said.code == 3
    assert "SIM-1 on gpu7. Nothing was changed." in said.stderr
    assert "Stop all workers" in said.stderr
    assert database.schema_version() == OLDER
    with database.write() as session:
        session.execute(update(CardRow).values(last_seen_at_s=database_now() - 60.0))
    assert cards.served(database, 5.0) == [], "its worker was killed"
    database.close()


def test_the_oldest_schema_is_upgraded_when_its_workers_have_ended(farm, tmp_path, monkeypatch):
    file = tmp_path / "farm.db"
    write_golden(file)
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{file}")
    settings.cache_clear()
    database = Database(f"sqlite:///{file}")

    def seen(state):
        with database.engine.begin() as connection:
            card = text("UPDATE card SET state = :state, last_seen_at_s = :now")
            connection.execute(card, {"state": state, "now": time.time()})

    seen("idle")
    assert farm("db", "upgrade").code == 3
    seen("stopped")
    assert farm("db", "upgrade").code == 0
    assert database.schema_version() == newest_schema()
    database.close()


def test_a_worker_claims_nothing_while_the_schema_is_newer_than_its_own(database, caplog):
    newer = f"{int(newest_schema()) + 1:04}"

    def say_schema(version):
        with database.engine.begin() as connection:
            said = text("UPDATE alembic_version SET version_num = :version")
            connection.execute(said, {"version": version})

    class Stopping(ItemDriver):
        waits = 2

        def stop_requested(self):
            self.waits -= 1
            return self.waits < 0

    say_schema(newer)
    driver = Stopping("SIM-0", "holder", database, BenchmarkProcess("SIM-0"))
    with pytest.raises(SchemaMismatch):
        driver.run(1)
    assert f"has schema {newer}; this program knows schemas up to" in caplog.text
    assert "Update farm on this host" in caplog.text
    with pytest.raises(Reject):  # the message returns to the queue
        run_item(None, driver, 1)


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
