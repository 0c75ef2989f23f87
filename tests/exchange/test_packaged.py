"""The readings that come with the package: what they must be, and that what farms measure can be
added to them.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from farm.errors import FarmError, UnsupportedModel, UsageError
from farm.exchange.first_answer import first_answer
from farm.exchange.packaged import (
    FOLDER,
    compressed_database,
    database_of,
    packaged_files,
    packaged_named,
)
from farm.models import catalog
from farm.requests.measurement_file import load
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.types.reading import METHOD
from farm.types.variant import Variant
from tests import slow
from tests.report.measured import measured

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "card_model"), [("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")]
)
def test_packaged_readings_are_small_and_by_the_current_method(name, card_model):
    folder = packaged_named(name)
    assert folder == FOLDER / name
    assert {file.name for file in folder.iterdir()} == {
        *(
            "readings.parquet",
            "calls.parquet",
            "captures.parquet",
            "verdicts.parquet",
            "dictionary.md",
        )
    }
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= 6_000_000, "the limit of benchmarks/package_readings.py"
    columns = ["method", "simulated", "card_kind", "card_model", "origin"]
    rows = pq.read_table(folder / "readings.parquet", columns=columns).to_pylist()
    assert {tuple(row.values()) for row in rows} == {(METHOD, False, "cuda", card_model, name)}


def test_of_two_errors_the_one_about_the_model_is_shown(sqlite_url, monkeypatch):
    with contextlib.closing(Database(sqlite_url)) as database:
        database.upgrade()
    monkeypatch.setenv("FARM_DATABASE_URL", sqlite_url)
    settings.cache_clear()
    errors = iter(
        [
            UsageError("The database has no readings of a card 'H200'."),
            UnsupportedModel("It has 32 heads."),
        ]
    )

    def ask(session):
        raise next(errors)

    with pytest.raises(UnsupportedModel, match="32 heads"):
        first_answer(ask, bool, print)


def test_every_packaged_folder_is_found():
    assert packaged_files() == [FOLDER / "h100", FOLDER / "h200"]


def test_the_compressed_database_has_all_packaged_readings(tmp_path, monkeypatch):
    """If this fails, run ``python benchmarks/package_readings.py`` and commit the new file."""
    assert list(FOLDER.glob("*.zst")) == [compressed_database(packaged_files())]
    monkeypatch.setattr("farm.exchange.importer.import_export", None)  # it is not imported again
    with database_of(packaged_files(), tmp_path).read() as session:
        number = session.scalar(select(func.count()).select_from(tables.ReadingRow))
    assert number == sum(
        pq.read_metadata(path / "readings.parquet").num_rows for path in packaged_files()
    )


@slow.MEASURED
def test_what_a_farm_measured_is_added_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import package_readings

    database = Database(f"sqlite:///{tmp_path / 'farm.db'}")
    database.upgrade()

    def add_job(variant, job_id):
        measured(database, variant, job_id)
        with database.write() as session:
            session.execute(update(tables.ReadingRow).values(method=METHOD))

    add_job(Variant("resnet18", 32, 224), "job1")
    target = tmp_path / "data" / "h200"
    first = package_readings.add([tmp_path / "farm.db"], target)
    assert (first["verdicts"], first["captures"]) == (1, 1)
    assert set(package_readings.add([tmp_path / "farm.db"], target).values()) == {0}
    add_job(Variant("resnet18", 1, 224), "job2")
    database.close()
    assert package_readings.add([tmp_path / "farm.db"], target)["verdicts"] == 1
    assert set(pq.read_table(target / "verdicts.parquet").column("job_id").to_pylist()) == {
        "job1",
        "job2",
    }
    monkeypatch.setattr(package_readings, "MOST_BYTES", 1000)
    with pytest.raises(FarmError, match="more than"):
        package_readings.add([tmp_path / "farm.db"], tmp_path / "other" / "h200")
    assert not (tmp_path / "other").exists()


def test_the_file_that_fills_them_names_every_classification_model():
    partials = load([ROOT / "examples" / "h200.yml"])
    wanted = [(32, "float32"), (1, "float32"), (32, "bfloat16"), (1, "bfloat16")]
    assert list(dict.fromkeys((partial.batch, partial.dtype) for partial in partials)) == wanted
    models = catalog.names("classification", "torchvision")
    assert sorted(partial.model for partial in partials) == sorted(models * 4)
