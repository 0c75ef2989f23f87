"""What an operator costs is answered from readings, with provenance and age."""

from __future__ import annotations

import json

import pytest

from farm.errors import UnknownOperator, UsageError
from farm.exchange.export import export
from farm.exchange.packaged import database_of
from farm.report.lookup import lookup
from farm.settings import settings
from farm.store.database import Database, read_clock_s
from farm.store.query import parse
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled


def found(database, *words, **options):
    with database.read() as session:
        return lookup(session, parse(words), **options)[0]


def test_the_costliest_come_first_with_where_they_are_from(any_database):
    filled.fill(any_database)
    with any_database.read() as session:
        readings, total = lookup(session, parse(["Conv2d", "kernel_size=3"]), limit=3)
    assert total > 3
    assert len(readings) == 3
    times = [row.time_us for row in readings]
    assert times == sorted(times, reverse=True)
    row = readings[0]
    assert (row.operator, row.card_model, row.torch, row.launch, row.data_class) == (
        "Conv2d",
        "NVIDIA H200",
        "2.11.0+cu130",
        "graph",
        "normal",
    )
    assert " k3 " in row.label
    assert (row.age_s >= 0, row.origin) == (True, "")
    energies = [row.energy_mj for row in found(any_database, "Conv2d", sort="energy")]
    assert energies == sorted(energies, reverse=True)
    newest = [row.created_at_s for row in found(any_database, "BatchNorm2d", sort="age")]
    assert newest == sorted(newest, reverse=True)
    assert {row.operator for row in found(any_database, "batch=2")} == {""}  # whole models
    assert "" not in {row.operator for row in found(any_database, "time_us>0", limit=100)}


def test_the_age_of_a_reading_is_by_the_clock_of_the_database(database, monkeypatch):
    filled.fill(database, created_at_s=1.7e9)
    monkeypatch.setattr("time.time", lambda: 1.0)
    row = found(database, "Conv2d")[0]
    with database.read() as session:
        assert row.age_s == pytest.approx(read_clock_s(session) - row.created_at_s, abs=60)


def test_what_there_is_not_names_the_nearest(database):
    filled.fill(database)
    with pytest.raises(UnknownOperator) as error:
        found(database, "Conv3d")
    assert "Conv2d" in error.value.next_step
    with pytest.raises(UsageError, match="cannot be sorted by 'enegry'") as wrong:
        found(database, "Conv2d", sort="enegry")
    assert "energy" in wrong.value.next_step
    with pytest.raises(UsageError, match="'batch=2' selects readings of whole models"):
        found(database, "Conv2d", "batch=2")
    with pytest.raises(UsageError, match=r"dtype needs a data type .* not 'single'"):
        found(database, "Conv2d", "dtype=single")
    known = (
        found(database, "Conv2d", words, limit=1000)
        for words in ("dtype=fp32,bf16", "dtype=float32")
    )
    both, one = ({row.reading_id for row in rows} for rows in known)
    assert both == one
    assert one


def test_readings_of_a_file_answer_as_a_database_does(database, tmp_path, monkeypatch, farm):
    filled.fill(database)
    (tmp_path / "data").mkdir()
    with database.read() as session:
        export(session, tmp_path / "data" / "h200.parquet")
    packaged = database_of([tmp_path / "data" / "h200.parquet"], tmp_path / "cache")
    own, theirs = (found(one, "Conv2d", "in_channels=64") for one in (database, packaged))
    assert [row.reading_id for row in own] == [row.reading_id for row in theirs]
    assert {row.origin for row in theirs} == {"h200"}
    packaged.close()
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".db", ".json", ""}, (
        "no write-ahead log"
    )

    monkeypatch.setattr(
        "farm.exchange.packaged.packaged_files", lambda: [tmp_path / "data" / "h200.parquet"]
    )
    said = farm(
        "lookup", "Conv2d", "--card", "H200", "-n", "2", "--json"
    )  # no database of one's own
    assert said.code == 0, said.stderr
    assert len(json.loads(said.stdout)["readings"]) == 2
    assert "Using the packaged readings" in said.stderr
    compared = farm("compare", "operator=Conv2d", "operator=Conv2d", "--json")
    assert (compared.code, "Using the packaged readings" in compared.stderr) == (0, True)
    Database(settings().database).upgrade()
    assert "Conv2d" in farm("lookup", "Conv2d").stdout
    unknown = farm("lookup", "Conv2")
    assert unknown.code == 2
    assert "Did you mean" in unknown.stderr


def test_at_a_terminal(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    said = farm("lookup", "Conv2d", "in_channels=64", "--sort", "energy", "-n", "1")
    assert said.code == 0, said.stderr
    assert "Conv2d 64->" in said.stdout
    assert "H200" in said.stdout
    assert "more:" in said.stderr
    nothing = farm("lookup", "Conv2d", "in_channels=65")
    assert "No reading" in nothing.stderr
