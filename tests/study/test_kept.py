"""What studies found, had again: the same table, the same JSON, the drawing, and no reading
more.
"""

import dataclasses
import json

import pytest
from sqlmodel import func, select
from typer.testing import CliRunner

from benchmarks.studies import results
from benchmarks.studies.__main__ import app
from farm.devices.simulated import simulated_cards
from farm.errors import FarmError, UsageError
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from tests import slow


@pytest.fixture(autouse=True)
def cards(monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "2")
    settings.cache_clear()
    return simulated_cards(settings())


def farm(*arguments):
    return CliRunner().invoke(app, arguments)


def made(name="windows", *options):
    done = farm(name, "squeezenet1_1", "-b", "1", "--quick", "--tuples", "1", *options)
    assert done.exit_code == 0, done.output
    return done


def readings():
    with Database(settings().database).read() as session:
        return session.exec(select(func.count()).select_from(tables.ReadingRow)).one()


def test_a_study_is_shown_again_as_it_was_printed(tmp_path):
    table = made().stdout
    before = readings()
    (found,) = results.kept()
    assert farm("show", found.id).stdout == table
    path = tmp_path / "again.svg"
    done = farm("show", found.id[:6], "--png", str(path), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["id"] == found.id
    assert path.stat().st_size > 5_000
    assert "deviation from the longest window" in path.read_text()
    assert readings() == before


@pytest.mark.parametrize(
    "name",
    [
        "averaging",
        *(
            pytest.param(name, marks=slow.ALIKE)
            for name in ("residency", "launch", "data", "simultaneous")
        ),
    ],
)
def test_every_study_comes_back_whole(name):
    printed = json.loads(made(name, "--json").stdout)
    (again,) = results.kept()
    assert again.to_json() == printed == json.loads(farm("show", again.id, "--json").stdout)
    assert again.drawable


def test_findings_with_nothing_to_draw_draw_nothing(tmp_path):
    made()
    (found,) = results.kept()
    results.keep(dataclasses.replace(found, charts=()))
    path = tmp_path / "nothing.png"
    done = farm("show", found.id, "--png", str(path))
    assert done.exit_code == 0
    assert "has no chart" in done.stderr
    assert not path.exists()


def test_studies_are_listed_newest_first():
    assert "No studies yet" in farm("show").stdout
    assert json.loads(farm("show", "--json").stdout) == {"studies": []}
    for name in ("windows", "data"):
        made(name)
    rows = json.loads(farm("show", "--json").stdout)["studies"]
    assert [row["study"] for row in rows] == ["data", "windows"]
    assert set(rows[0]) == {"id", "study", "variant", "card", "quick", "created_at_s"}
    listed = farm("show").stdout
    assert all(row["id"] in listed for row in rows)
    assert "squeezenet1_1 1x224 float32" in listed


def test_what_cannot_be_read_is_left_out_of_the_list_and_said_when_asked_for():
    made()
    (found,) = results.kept()
    for name, text in (
        ("half", '{"study": "win'),
        ("other", "[]"),
        ("newer", '{"study": "new", "question": "?"}'),
    ):
        (results.folder() / f"{name}.json").write_text(text)
    done = farm("show")
    assert done.exit_code == 0
    assert found.id in done.stdout
    assert done.stderr.count("Left out") == 3
    with pytest.raises(FarmError, match="cannot be read"):
        results.find_kept("half")


def test_an_id_must_name_one_study():
    results.folder().mkdir(parents=True)
    for name in ("twin-1", "twin-2"):
        (results.folder() / f"{name}.json").write_text("{}")
    for given, told in (("no such id", "No study"), ("twin", "Several studies"), ("", "is empty")):
        with pytest.raises(UsageError, match=told):
            results.find_kept(given)
    assert farm("show", "--png", "found.png").exit_code == 2


def test_findings_that_cannot_be_kept_are_printed_all_the_same():
    settings().state_dir.mkdir(parents=True)
    (settings().state_dir / "studies").write_text("in the way")
    done = made()
    assert "are not stored" in done.stderr
    assert "7 readings stored" in done.stdout
    assert results.kept() == []
