"""The database on SQLite and PostgreSQL: one schema, and errors that say what to do."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
import time

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError
from sqlmodel import SQLModel, select

from farm.benchmark_process.client import BenchmarkProcess
from farm.errors import DatabaseUnreachable, SchemaMismatch, SettingsError
from farm.jobs.item_driver import ItemDriver
from farm.store.database import MIGRATIONS, Database, database_now, known_schemas, newest_schema
from farm.store.tables import Call, Capture, ModelVariant, Operator, SignificantOperator


def test_the_migrations_build_exactly_the_tables(any_database):
    with any_database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, SQLModel.metadata)
    assert differences == [], "tables.py has changed: write a revision (CONTRIBUTING.md)"
    any_database.check_schema()


def test_an_upgrade_of_the_newest_schema_changes_nothing(any_database):
    any_database.upgrade()
    assert any_database.schema_version() == newest_schema()


def test_a_migration_is_named_as_its_file():
    scripts = ScriptDirectory(str(MIGRATIONS))
    assert {script.revision for script in scripts.walk_revisions()} == known_schemas()
    assert scripts.get_current_head() == newest_schema()


@pytest.mark.parametrize("action", ["check_schema", "upgrade"])
def test_a_schema_that_is_too_old_is_refused_with_the_way_to_keep_its_readings(
    any_database, action
):
    set_version(any_database, "0009")
    with pytest.raises(
        SchemaMismatch, match="schema 0009; this program reads 0010 and newer"
    ) as caught:
        getattr(any_database, action)()
    assert "farm export" in caught.value.next_step


def test_upgrades_at_the_same_time_wait_for_each_other(any_database_url):
    databases = [Database(any_database_url) for _ in range(4)]
    failures = []

    def upgrade(database):
        try:
            database.upgrade()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=upgrade, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    databases[0].check_schema()
    for database in databases:
        database.close()


def test_a_failed_upgrade_leaves_the_database_empty(any_database_url, monkeypatch):
    monkeypatch.setattr(command, "stamp", lambda *_: 1 / 0)  # the last step
    database = Database(any_database_url)
    with pytest.raises(ZeroDivisionError):
        database.upgrade()
    assert database.schema_version() is None
    monkeypatch.undo()
    database.upgrade()
    database.check_schema()
    database.close()


def test_to_look_for_a_database_does_not_make_one(sqlite_url):
    database = Database(sqlite_url)
    with pytest.raises(SchemaMismatch, match="does not exist yet") as caught:
        database.check_schema()
    assert "farm run" in caught.value.next_step
    assert database.missing
    database.close()


@pytest.mark.parametrize(
    ("limit", "helps"),
    [("max_page_count = 10", "Free disk space"), ("query_only = 1", "this user write")],
)
def test_a_file_that_takes_nothing_is_no_server_that_does_not_run(database, limit, helps):
    def write():
        with database.write() as session:
            session.execute(text(f"PRAGMA {limit}"))
            for number in range(100):
                session.execute(text(f"CREATE TABLE another{number} (a)"))

    with pytest.raises(DatabaseUnreachable, match=r"full|readonly") as caught:
        write()
    assert helps in caught.value.next_step
    assert "FARM_STATE_DIR" in caught.value.next_step
    assert "server" not in caught.value.next_step


def test_a_database_with_tables_of_somebody_else_is_left_as_it_is(any_database_url):
    database = Database(any_database_url)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE invoice (id INTEGER PRIMARY KEY)")
    for ask in (database.upgrade, database.check_schema):
        with pytest.raises(SchemaMismatch, match="tables of another program"):
            ask()
    assert inspect(database.engine).get_table_names() == ["invoice"]
    database.close()


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true&mode=memory"]
)
def test_a_database_in_memory_is_refused_with_the_reason(url):
    with pytest.raises(SettingsError, match="cannot share an SQLite database in memory"):
        Database(url)


def test_an_empty_database_is_told_to_upgrade(any_database_url):
    database = Database(any_database_url)
    assert database.schema_version() is None
    with pytest.raises(SchemaMismatch, match="has no tables yet") as caught:
        database.check_schema()
    assert "farm db upgrade" in caught.value.next_step
    database.close()


@pytest.mark.parametrize("action", ["check_schema", "upgrade"])
def test_a_newer_schema_asks_for_a_newer_program(any_database, action):
    set_version(any_database, "9999")
    with pytest.raises(SchemaMismatch, match="9999; this program knows schemas up to") as caught:
        getattr(any_database, action)()
    assert "Update farm on this host" in caught.value.next_step


def test_an_older_schema_asks_for_an_upgrade(any_database, monkeypatch):
    there = newest_schema()
    monkeypatch.setattr("farm.store.database.newest_schema", lambda: "9999")
    with pytest.raises(
        SchemaMismatch, match=f"has schema {there}, but this program needs schema 9999"
    ) as caught:
        any_database.check_schema()
    assert "Stop the workers" in caught.value.next_step


def test_the_clock_is_the_databases(any_database):
    with any_database.read() as session:
        before = time.time()
        first = session.exec(select(database_now())).one()
        assert before - 0.1 < first < time.time() + 0.1
        time.sleep(0.01)
        # It moves within a transaction: a lease renewed at the end of a long one must not start at
        # its beginning.
        assert session.exec(select(database_now())).one() > first


def test_occurrences_count_the_calls(any_database):
    with any_database.write() as session:
        session.add(
            Operator(id="op", schema_version=1, name="n", short_name="n", kind="module", label="n")
        )
        session.add(
            ModelVariant(
                id="v",
                model="m",
                weights="",
                batch=1,
                input_size=8,
                dtype="float32",
                memory_format="",
                mode="eval",
            )
        )
        session.flush()
        session.add(capture := Capture(variant_id="v", device_type="cpu"))
        session.flush()
        session.add_all(
            Call(capture_id=capture.id, call_index=index, operator_id="op") for index in range(3)
        )
    with any_database.read() as session:
        rows = session.exec(text("SELECT operator_id, calls FROM occurrence")).all()
    assert [tuple(row) for row in rows] == [("op", 3)]


def test_foreign_keys_hold_after_an_upgrade(any_database):
    with pytest.raises(IntegrityError), any_database.write() as session:
        session.add(Capture(variant_id="of no variant", device_type="cpu"))


def test_a_failed_write_leaves_nothing(any_database):
    with pytest.raises(ZeroDivisionError), any_database.write() as session:
        fail_after_adding(session)
    with any_database.read() as session:
        assert session.get(SignificantOperator, "Conv2d") is None


def test_writers_in_several_processes_wait_for_each_other(any_database):
    code = f"""
from farm.store.database import Database
from farm.store.tables import SignificantOperator
database = Database({any_database.url.render_as_string(hide_password=False)!r})
for _ in range(25):
    with database.write() as session:
        row = session.get(SignificantOperator, "count", with_for_update=True)
        row.created_at_s += 1
"""
    with any_database.write() as session:
        session.add(SignificantOperator(name="count"))
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    with any_database.read() as session:
        assert session.get(SignificantOperator, "count").created_at_s == 50


def test_parameters_are_queryable_as_json(any_database):
    with any_database.write() as session:
        for channels in (64, 128):
            session.add(
                Operator(
                    id=f"conv{channels}",
                    schema_version=1,
                    name="torch.nn.Conv2d",
                    short_name="Conv2d",
                    kind="module",
                    label="",
                    parameters={"in_channels": channels},
                )
            )
    with any_database.read() as session:
        found = session.exec(
            select(Operator.id).where(Operator.parameters["in_channels"].as_integer() > 64)
        ).all()
    assert found == ["conv128"]


def test_a_password_is_never_shown():
    database = Database("postgresql://farm:secret@localhost:1/farm")
    assert "secret" not in str(database)
    assert "***" in str(database)
    with pytest.raises(DatabaseUnreachable) as caught:
        database.check_schema()
    assert "secret" not in caught.value.message
    assert "No data was lost" in caught.value.next_step


@pytest.mark.parametrize(
    "query", ["user=farm&password=secret", "sslpassword=secret", "passfile=/secret"]
)
def test_a_password_in_the_query_is_not_shown_either(query):
    database = Database(f"postgresql://127.0.0.1:1/farm?{query}")
    with pytest.raises(DatabaseUnreachable) as caught:
        database.check_schema()
    assert "secret" not in str(database) + caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:/farm:secret@host",
        "postgresql://farm:with@secret@host/farm",
        "postgresql://farm:with@secret:@host/farm",
        "postgresql://farm:secret@host:port/farm",
    ],
)
def test_an_unreadable_url_does_not_show_the_password_either(url):
    with pytest.raises(SettingsError) as caught:
        Database(url)
    assert "secret" not in caught.value.message + caught.value.next_step


def test_other_databases_are_refused():
    with pytest.raises(SettingsError, match="'mysql' is not supported"):
        Database("mysql://farm@host/farm")


def test_a_server_that_restarts_is_met_with_a_clear_message_and_then_with_success(
    postgres_server_of_own,
):
    database = Database(postgres_server_of_own.url())
    database.upgrade()
    postgres_server_of_own.stop()
    with pytest.raises(DatabaseUnreachable), database.read() as session:
        session.get(SignificantOperator, "Conv2d")
    postgres_server_of_own.start()
    with database.read() as session:
        assert session.get(SignificantOperator, "Conv2d") is None
    database.close()


def test_a_server_that_ends_a_waiting_transaction_is_away_and_is_asked_again(postgres_url, caplog):
    unlimited = Database(postgres_url)
    unlimited.upgrade()
    unlimited.close()
    database = Database(f"{postgres_url}&options=-c idle_in_transaction_session_timeout=200")
    waits_s = iter([0.6, 0.0])

    def write():
        with database.write() as session:
            session.add(SignificantOperator(name="Conv2d"))
            session.flush()
            time.sleep(next(waits_s))
            session.add(SignificantOperator(name="Linear"))

    ItemDriver("SIM-0", "holder", database, BenchmarkProcess("SIM-0")).retried(write)
    assert "Waiting for the database" in caplog.text
    assert "idle-in-transaction timeout" in caplog.text
    with database.read() as session:
        assert len(session.exec(select(SignificantOperator)).all()) == 2
    database.close()


def test_a_new_file_and_its_folder_are_for_their_user_alone(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'home' / 'farm' / 'farm.db'}")
    database.upgrade()
    with database.write() as session:
        session.add(SignificantOperator(name="Conv2d"))
        session.flush()
        found = {
            path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "home").rglob("*")
        }
    assert found == {"farm": 0o700, "farm.db": 0o600, "farm.db-wal": 0o600, "farm.db-shm": 0o600}
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
    database.close()


def test_a_file_and_a_folder_that_exist_stay_as_they_are(tmp_path):
    folder = tmp_path / "farm"
    folder.mkdir(mode=0o755)
    (folder / "farm.db").touch(0o640)
    database = Database(f"sqlite:///{folder / 'farm.db'}")
    database.upgrade()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "farm.db")] == [
        0o755,
        0o640,
    ]
    database.close()


@pytest.fixture
def postgres_server_of_own():
    from tests.servers import PostgresServer

    with PostgresServer() as server:
        yield server


def fail_after_adding(session):
    session.add(SignificantOperator(name="Conv2d"))
    session.flush()
    raise ZeroDivisionError


def set_version(database, version):
    with database.engine.begin() as connection:
        connection.execute(
            text("UPDATE alembic_version SET version_num = :version"), {"version": version}
        )
