"""`farm history`: whole models over git revisions and versions of PyTorch."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

import farm as api
from farm.addons.pages import page
from farm.report.history import history, mean_of
from farm.settings import settings
from farm.store import content, tables
from farm.types.figure import Figure
from farm.types.protocol import Stopping
from farm.types.variant import Variant
from tests import slow
from tests.report import rows

FIRST, SECOND = "a" * 40, "b" * 40
SHORT = Stopping(
    warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1, time_half_width=1.0, energy_half_width=1.0
)
NET = """
import torch

def net():
    return torch.nn.Linear(8, 8).eval(), torch.ones(2, 8)
"""


@pytest.fixture
def known(database, monkeypatch):
    """resnet18 with two versions of PyTorch, and a test of which the second revision was measured
    first.
    """
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string())
    settings.cache_clear()
    with database.write() as session:
        rows.ground(session)
        session.add(tables.SoftwareRow(id="newer", torch="2.12.0"))
        session.flush()
        whole = {"subject_kind": "variant"}
        rows.reading(
            session, rows.VARIANT.id, 1000.0, 500.0, created_at_s=2e9, software_id="newer", **whole
        )
        rows.reading(session, rows.VARIANT.id, 1100.0, 560.0, created_at_s=1e9, **whole)
        rows.reading(
            session, rows.VARIANT.id, 900.0, 450.0, created_at_s=1e9, card=rows.OTHER_CARD, **whole
        )
        for commit, time_us, at_s, flags in (
            (SECOND, 20.0, 1e9, []),
            (FIRST, 10.0, 2e9, []),
            (FIRST, 10.2, 3e9, []),
            (FIRST, 50.0, 4e9, ["busy_host"]),
            (SECOND, 19.0, 5e9, []),
        ):
            variant = Variant("tests/test_net.py::test_net", 1, 1, version=commit[:12])
            content.store_variant(session, variant)
            committed_at_s = {FIRST: 100, SECOND: 200}[commit]
            details = {
                "method": 5,
                "revision": f"{commit} {committed_at_s} {'dirty' if at_s == 1e9 else 'clean'}",
            }
            more = {"created_at_s": at_s, "flags": flags, "details": details, **whole}
            rows.reading(session, variant.id, time_us, None, **more)
    return database


def test_revisions_are_in_the_order_of_their_commits_with_the_change_and_its_interval(farm, known):
    said = farm("history", "tests/test_net.py::test_net", "--json")
    assert said.code == 0, said.stderr
    first, clean, second = json.loads(said.stdout)["rows"]
    assert first["title"] == "tests/test_net.py::test_net"
    assert (first["revision"], first["committed_at_s"], first["dirty"]) == (FIRST, 100, False)
    assert (clean["revision"], clean["dirty"], clean["measured_at_s"]) == (SECOND, False, 5e9)
    assert (second["revision"], second["dirty"], second["measured_at_s"]) == (SECOND, True, 1e9)
    # Two sound readings: the busy one does not count.
    assert (first["readings"], first["flags"], first["time_us"]) == (2, [], pytest.approx(10.1))
    assert (first["time_change"], first["energy_mj"], second["energy_change"]) == (None, None, None)
    assert clean["time_change"] == pytest.approx(19 / 10.1 - 1)
    assert clean["time_change_half_width"] > 0.1  # from the spread of the two readings
    assert second["time_change"] == pytest.approx(20 / 19 - 1)


def test_a_model_of_the_catalog_has_a_row_for_each_version_of_pytorch_and_a_series_for_each_card(
    farm, known
):
    found = json.loads(farm("history", "resnet18", "--json").stdout)["rows"]
    assert [(row["card_id"], row["torch"], row["revision"]) for row in found] == [
        *((rows.CARD, "2.11.0", ""), (rows.CARD, "2.12.0", "")),
        (rows.OTHER_CARD, "2.11.0", ""),
    ]
    changes = [row["time_change"] for row in found]
    assert changes == [None, pytest.approx(1000 / 1100 - 1), None]
    shown = farm("history", "resnet18").stdout
    figures = r"1\.0000 ± 0\.0020 ms +-9\.1 ± 0\.3 % +500\.0 ± 5\.0 mJ +-10\.7 ± 1\.3 %"
    assert re.search(rf"resnet18 32x224 float32 +H200 +– +2\.12\.0 .* {figures}", shown), shown


def test_a_pattern_names_several_and_an_unknown_name_is_refused(farm, known):
    both = json.loads(farm("history", "*net*", "--json").stdout)["rows"]
    assert {row["title"] for row in both} == {
        "resnet18 32x224 float32",
        "tests/test_net.py::test_net",
    }
    said = farm("history", "tests/test_net.py::test_nut")
    assert (said.code, said.stdout) == (2, "")
    assert "Did you mean tests/test_net.py::test_net" in said.stderr


def test_the_page_has_a_chart_and_a_table_for_each_series_and_needs_nothing_from_outside(
    farm, known, tmp_path
):
    said = farm("history", "*net*", "--html", tmp_path / "page.html")
    assert said.code == 0, said.stderr
    text = (tmp_path / "page.html").read_text()
    charts = [
        json.loads(one)
        for one in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    ]
    assert len(charts) == 3
    (points,) = charts[-1]["data"]
    assert points["x"] == [f"1: {FIRST[:12]}", f"2: {SECOND[:12]}", f"3: {SECOND[:12]}"]
    assert points["y"] == [pytest.approx(10.1), 19.0, 20.0]
    assert points["error_y"]["array"][0] > 0
    assert f"{SECOND[:12]}-dirty" in text
    assert not re.search(r'(src|href)="(?!#)', text.replace(page.plotly_js(), ""))


def test_the_mean_of_repeated_readings_has_the_larger_half_width():
    assert mean_of([]) is None
    assert mean_of([Figure(3.0, 0.5)]) == Figure(3.0, 0.5)
    assert mean_of([Figure(3.0, 0.6), Figure(3.0, 0.8)]) == Figure(3.0, 0.5)
    assert mean_of([Figure(2.0, 0.1), Figure(4.0, 0.1)]).half_width == pytest.approx(
        12.706, abs=0.01
    )


@slow.PROCESS
def test_the_whole_of_an_own_model_has_the_revision_of_its_source(farm, tmp_path, monkeypatch):
    (tmp_path / "my_revised_net.py").write_text(NET)
    for command in (
        "init -q",
        "add -A",
        "-c user.name=A -c user.email=a@example.org commit -qm first",
    ):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True
    ).stdout.strip()
    monkeypatch.setenv("FARM_MODELS", '{"my_net": "my_revised_net:net"}')
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{tmp_path / 'farm.db'}")
    settings.cache_clear()
    database = api.open_database()
    api.measure_model("my_net", database=database, card="cpu", stopping=SHORT)
    with database.read() as session:
        (row,) = history(session, "my_net")
    assert (row.revision, row.dirty) == (commit, False)
    assert row.series.title == "my_net 2x8 float32", "the sizes of its example inputs"
