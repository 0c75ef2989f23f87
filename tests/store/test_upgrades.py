"""Only `farm db upgrade` upgrades a database; `farm run` may upgrade its own file, with a
backup.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import make_url

import farm
from farm.errors import DatabaseUnreachable, SchemaMismatch
from farm.settings import settings
from farm.store.database import Database, newest_schema
from farm.store.upgrades import backup_of, writable_database
from tests.disks import SmallDisk, why_not
from tests.store.older import OLDER, make_older, write_golden

ROOT = Path(__file__).parents[2]
#: The only files with calls of `Database.upgrade` or of Alembic. The last one upgrades copies.
UPGRADING = {
    "cli/db.py",
    "farm/store/database.py",
    "farm/store/upgrades.py",
    "benchmarks/package_readings.py",
    "benchmarks/ablation.py",  # a copy of a given database
}
HOLDER = (
    "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM "
    "job').fetchone()"
)


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def older_url(any_database_url, monkeypatch):
    """The URL of a shared database with an older schema, in the settings."""
    make_older(any_database_url)
    monkeypatch.setenv("FARM_DATABASE_URL", any_database_url)
    settings.cache_clear()
    return any_database_url


@pytest.fixture
def embedded():
    """The file of `farm run` in the state folder, with an older schema."""
    file = Path(make_url(settings().database).database)
    write_golden(file)
    return file


def refused_as_by_the_readers(url, action):
    database = Database(url)
    with pytest.raises(SchemaMismatch) as expected:
        database.check_schema()
    with pytest.raises(SchemaMismatch) as caught:
        action()
    assert (caught.value.message, caught.value.next_step) == (
        expected.value.message,
        expected.value.next_step,
    )
    assert "farm db upgrade" in caught.value.next_step
    assert database.schema_version() == OLDER
    database.close()


def test_an_older_schema_is_refused_by_every_function_that_stores(older_url, tmp_path):
    refused_as_by_the_readers(older_url, writable_database)
    refused_as_by_the_readers(older_url, lambda: writable_database(print))
    refused_as_by_the_readers(older_url, farm.open_database)
    database = Database(older_url)
    refused_as_by_the_readers(
        older_url, lambda: farm.measure_model("resnet18", database=database, card="cpu")
    )
    refused_as_by_the_readers(
        older_url, lambda: farm.measure_tuples([], database=database, card="cpu")
    )
    refused_as_by_the_readers(older_url, lambda: farm.import_readings("h100", database=database))
    database.close()


def test_the_fixture_of_pytest_refuses_before_it_measures(older_url, monkeypatch):
    from farm.jobs import named_benchmark

    monkeypatch.setattr(
        named_benchmark, "measure_whole", lambda *_: pytest.fail("it measured first")
    )
    measure = named_benchmark.measure_benchmark
    refused_as_by_the_readers(
        older_url, lambda: measure(sorted, ([1],), name="a", revision=None, card="cpu")
    )


def test_an_empty_database_gets_its_tables(any_database_url, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", any_database_url)
    settings.cache_clear()
    for opened in (writable_database, farm.open_database):
        database = opened()
        assert database.schema_version() == newest_schema()
        database.close()


def test_no_other_file_upgrades_a_database():
    files = [
        path
        for room in ("farm", "cli", "tasks", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
    ]
    calling = {str(path.relative_to(ROOT)) for path in files if ".upgrade(" in path.read_text()}
    assert calling == UPGRADING


def test_an_embedded_database_is_upgraded_with_a_note_and_one_checked_backup(embedded):
    before, said = digest(embedded), []
    earlier = embedded.with_name("farm.db.backup-0009")
    earlier.touch()
    unrelated = embedded.with_name("farm.db.backup-of-mine")
    unrelated.touch()
    database = writable_database(said.append)
    backup = backup_of(embedded, "0010")
    assert database.schema_version() == newest_schema()
    database.close()
    assert said == [
        f"Upgrading the database {database} from schema 0010 to {newest_schema()}. Backup: {backup}"
    ]
    assert names(embedded.parent) == ["farm.db", backup.name, unrelated.name]
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    with sqlite3.connect(backup) as copy:
        assert copy.execute("SELECT version_num FROM alembic_version").fetchall() == [("0010",)]
        assert copy.execute("SELECT count(*) FROM reading").fetchall() == [(58,)]
    copy.close()
    assert digest(embedded) != before
    writable_database(said.append).close()
    assert len(said) == 1, "the second time there is nothing to upgrade"


def test_a_database_that_another_process_has_open_is_not_upgraded(embedded):
    before = digest(embedded)
    code = f"{HOLDER}; print('open', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(embedded)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(SchemaMismatch, match="Another process uses the database") as caught:
            writable_database(pytest.fail)
        other.stdin.close()
    assert "then repeat this command" in caught.value.next_step
    assert digest(embedded) == before
    database = writable_database(lambda _: None)
    assert database.schema_version() == newest_schema()
    database.close()


def test_a_failed_upgrade_leaves_the_old_file_as_it_was(embedded, monkeypatch):
    before, upgrade = digest(embedded), command.upgrade

    def fail_at_the_end(*arguments):
        upgrade(*arguments)
        raise ZeroDivisionError

    monkeypatch.setattr(command, "upgrade", fail_at_the_end)
    with pytest.raises(ZeroDivisionError):
        writable_database(lambda _: None)
    assert digest(embedded) == before
    assert names(embedded.parent) == ["farm.db", "farm.db.backup-0010"]
    monkeypatch.undo()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_an_upgrade_without_space_changes_nothing(tmp_path, monkeypatch):
    with SmallDisk(tmp_path / "disk") as disk:
        monkeypatch.setenv("FARM_STATE_DIR", str(disk.path / "state"))
        settings.cache_clear()
        embedded = disk.path / "state" / "farm.db"
        write_golden(embedded)
        before = digest(embedded)
        (disk.path / "filler").write_bytes(bytes(shutil.disk_usage(disk.path).free - 200_000))
        with pytest.raises(DatabaseUnreachable, match="of disk space") as caught:
            writable_database(pytest.fail)
        assert "Free disk space" in caught.value.next_step
        assert digest(embedded) == before
        assert "backup" not in " ".join(names(embedded.parent))


def test_a_damaged_database_is_not_upgraded(embedded):
    with embedded.open("r+b") as file:
        file.seek(20 * 4096)
        file.write(os.urandom(3 * 4096))
    before = digest(embedded)
    with pytest.raises(DatabaseUnreachable, match=r"is damaged|malformed") as caught:
        writable_database(lambda _: None)
    assert "Restore the file from a backup" in caught.value.next_step
    assert digest(embedded) == before
    assert names(embedded.parent) == ["farm.db"]


def test_a_file_that_others_may_use_is_not_embedded(embedded, monkeypatch, tmp_path):
    def refused():
        settings.cache_clear()
        with pytest.raises(SchemaMismatch, match="has schema 0010") as caught:
            writable_database(pytest.fail)
        assert "farm db upgrade" in caught.value.next_step

    monkeypatch.setenv("FARM_DATABASE_URL", settings().database)
    refused()
    monkeypatch.delenv("FARM_DATABASE_URL")
    monkeypatch.setenv("FARM_BROKER_URL", "redis://127.0.0.1:1/0")
    refused()
    monkeypatch.delenv("FARM_BROKER_URL")
    elsewhere = embedded.rename(tmp_path / "shared.db")
    embedded.symlink_to(elsewhere)
    refused()
    if os.geteuid() == 0:
        embedded.unlink()
        elsewhere.rename(embedded)
        os.chown(embedded, 65534, 65534)
        refused()
