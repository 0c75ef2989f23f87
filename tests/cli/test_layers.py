"""`farm report` of several jobs and layer by layer, as a person and as a program get it."""

from __future__ import annotations

import csv
import io
import json

import pytest

from farm.settings import settings
from tests.cli.test_shown import text
from tests.report import rows


@pytest.fixture
def job(database, monkeypatch, tmp_path):
    """The id of a finished job in the database that the verbs open."""
    job_id = rows.model_job(database)
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path))
    settings.cache_clear()
    yield job_id
    settings.cache_clear()


def test_several_jobs_are_several_reports(farm, job):
    alone = json.loads(farm("report", job, "--json").stdout)
    assert alone["job_id"] == job
    assert (
        farm("report", job, job, "--json").stdout == farm("report", job, "--json").stdout
    )  # one job is one
    assert farm("report", job, "no-such-job").code != 0


def test_rows_come_as_table_csv_and_json(farm, job):
    assert "MaxPool2d" in farm("report", job, "--by", "call").stdout
    read = list(csv.DictReader(io.StringIO(farm("report", job, "--csv").stdout)))
    assert [row["name"] for row in read][:2] == ["Conv2d", "add"]
    assert float(read[0]["time_us"]) == 630
    told = json.loads(farm("report", job, "--by", "module", "--json").stdout)
    assert (told["by"], told["rows"][0]["calls"]) == ("module", 11)


@pytest.mark.parametrize("by", ["type", "tuple", "call", "module"])
def test_a_terminal_of_80_columns_has_name_time_and_share(database, job, by):
    from cli.report_tables import layer_table
    from farm.report.layers import layers
    from farm.report.report import build

    with database.read() as session:
        found = text(layer_table(layers(session, build(session, job), by)), 80, terminal=True)
    for whole in ("Conv2d", "time", "share"):
        assert whole in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--by", "layer"), "Choose from type, tuple, call, module."),
        (("--by", "call", "--depth", "2"), "Add `--by module`"),
        (("--csv", "--json"), "Omit one of them."),
        (("--readings", "--csv"), "--readings cannot be combined with --by or --csv."),
    ],
)
def test_what_does_not_go_together_is_said(farm, job, options, message):
    said = farm("report", job, *options)
    assert said.code == 2
    assert message in said.stderr


def test_a_page_is_written_beside_what_is_printed(farm, job, tmp_path):
    path = tmp_path / "page.html"
    said = farm("report", job, "--html", path, "--json")
    assert json.loads(said.stdout)["job_id"] == job
    assert said.stderr == f"Written to {path}\n"
    assert path.read_text().startswith("<!doctype html>")
    assert farm("report", job, "--html", path).stdout == ""
    lost = farm("report", job, "--html", tmp_path / "none" / "page.html")
    assert (lost.code, lost.stderr.count("\n")) == (2, 2)


def test_the_database_is_published_as_a_folder(farm, job, tmp_path):
    said = farm("publish", tmp_path / "site")
    assert (said.code, said.stdout) == (0, "")
    assert said.stderr == f"4 pages written; open {tmp_path / 'site' / 'index.html'}\n"
    lost = farm("publish", "/proc/site")
    assert (lost.code, lost.stderr.count("\n")) == (2, 2)
