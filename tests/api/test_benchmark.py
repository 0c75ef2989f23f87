"""A reading of `farm_benchmark` is not lost if the database fails after the measurement."""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy import text
from sqlmodel import select

from farm.errors import FarmError
from farm.exchange.export import export
from farm.exchange.importer import import_export
from farm.jobs import named_benchmark
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.upgrades import writable_database
from tests.planned import READING


@pytest.fixture
def failing(monkeypatch):
    """The database of the settings loses a table while the measurement runs."""

    def measure_and_fail(*_):
        with contextlib.closing(writable_database()) as database, database.write() as session:
            session.execute(text("ALTER TABLE reading RENAME TO elsewhere"))
        return READING

    monkeypatch.setattr(named_benchmark, "measure_whole", measure_and_fail)


def measure():
    return named_benchmark.measure_benchmark(
        sorted, ([1],), name="a test", revision=None, card="cpu"
    )


def readings_of(url):
    with contextlib.closing(Database(url)) as database, database.read() as session:
        return [row.time_us for row in session.exec(select(tables.ReadingRow))]


def test_a_reading_that_cannot_be_stored_is_kept_and_the_error_says_where(failing, tmp_path):
    with pytest.raises(FarmError, match="reading of a test could not be stored") as caught:
        measure()
    (file,) = settings().state_dir.glob("kept-*.db")
    assert f"It is kept in the database {file}." in caught.value.message
    assert readings_of(f"sqlite:///{file}") == [READING.time_us.value]

    assert f"FARM_DATABASE_URL=sqlite:///{file} farm export" in caught.value.next_step
    with contextlib.closing(Database(f"sqlite:///{file}")) as kept, kept.read() as session:
        export(session, tmp_path / "kept", form=None, filters=None, traces=False)
    repaired = f"sqlite:///{tmp_path / 'repaired.db'}"
    with contextlib.closing(Database(repaired)) as database:
        database.create_or_check()
        import_export(database, tmp_path / "kept", origin="")
    assert readings_of(repaired) == [READING.time_us.value]


def test_a_reading_that_cannot_be_kept_either_is_in_the_error(failing, monkeypatch, tmp_path):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{tmp_path / 'farm.db'}")
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "a file" / "no folder"))
    settings.cache_clear()
    with pytest.raises(FarmError, match=r"could not be kept in .* <Benchmark a test: 10\.00"):
        measure()
