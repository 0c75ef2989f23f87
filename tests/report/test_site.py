"""The database as a folder of pages: everything is there, linked, and works without a server."""

from __future__ import annotations

import dataclasses
import re

import pytest

from farm.errors import UsageError
from farm.pages import charts
from farm.pages import page as site
from farm.report.report import build
from farm.store import tables
from farm.store.database import Database
from farm.types.protocol import Variant
from tests import browser
from tests.report import rows
from tests.report.measured import measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A site of resnet18 at two batches, one of them asked for twice."""
    home = tmp_path_factory.mktemp("site")
    database = Database(f"sqlite:///{home / 'farm.db'}")
    database.upgrade()
    measured(database)
    measured(database, Variant("resnet18", 1, 224), "job2")
    with database.read() as session:
        assert site.publish(session, home / "site") == 4
        assert site.publish(session, home / "site") == 4  # over itself
    database.close()
    return home / "site"


def test_every_page_is_there_and_every_link_leads_somewhere(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "operators.html", "cards.html", "model-resnet18.html", "plotly.min.js"}
    for page in folder.glob("*.html"):
        text = page.read_text()
        for file, _, place in (link.partition("#") for link in re.findall(r'(?:href|src)="([^"]+)"', text)):
            aim = folder / file if file else page
            assert aim.is_file()
            assert not place or f'id="{place}"' in aim.read_text()
        assert not re.search(r'(?:href|src)="(?:\w+:)?//', text)


def test_models_operators_and_cards_are_told(folder):
    assert (folder / "index.html").read_text().count("<tr><td><a href=") == 2
    operators = (folder / "operators.html").read_text()
    assert "Conv2d 64-&gt;64 k3 p1 | 32x64x56x56 fp32" in operators
    cards = (folder / "cards.html").read_text()
    assert "NVIDIA H200" in cards
    assert "resnet18 1x224 float32" in cards


def test_a_model_has_a_file_of_its_own_whatever_its_name():
    assert site.file_of("resnet50") == "model-resnet50.html"
    hostile = [site.file_of(name) for name in ("../../etc/passwd", ".._.._etc_passwd", "a/b", "a b", "ä" * 300)]
    assert len(set(hostile)) == len(hostile)
    assert all(re.fullmatch(r"model-[\w-]{1,100}\.html", name, re.ASCII) for name in hostile)


def test_an_empty_database_is_a_site_too(database, tmp_path):
    with database.read() as session:
        assert site.publish(session, tmp_path / "new" / "folder") == 3
    assert "No model has a verdict yet" in (tmp_path / "new" / "folder" / "index.html").read_text()


def test_every_kind_of_database_is_published(any_database, tmp_path):
    rows.model_job(any_database)
    with any_database.read() as session:
        assert site.publish(session, tmp_path) == 3
    assert "Conv2d 64-&gt;64 k3" in (tmp_path / "operators.html").read_text()


def test_the_pages_of_others_stay(database, tmp_path):
    (tmp_path / "index.html").write_text("<html>mine</html>")
    with database.read() as session:
        with pytest.raises(UsageError, match="did not write"):
            site.publish(session, tmp_path)
        with pytest.raises(UsageError, match="cannot be written"):
            site.publish(session, tmp_path / "index.html" / "below")
    assert (tmp_path / "index.html").read_text() == "<html>mine</html>"


TRIED = """<script>
const search = document.querySelector("input[type=search]");
search.value = "conv2d k7"; search.dispatchEvent(new Event("input"));
const rows = [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
const shown = rows.map((row) => row.cells[0].textContent);
search.value = ""; search.dispatchEvent(new Event("input"));
document.querySelectorAll("th button")[1].click();
const times = [...document.querySelectorAll("tbody tr")].map((row) => Number(row.cells[1].dataset.value));
const sorted = times.every((time, index) => !index || time <= times[index - 1]);
const matching = shown.length > 0 && shown.every((text) => text.includes("k7"));
document.title = JSON.stringify([matching, sorted, times.length > 20]);
</script>"""


@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
def test_a_browser_searches_and_sorts_the_operators_and_complains_of_nothing(folder, tmp_path):
    tried = folder / "tried.html"
    tried.write_text((folder / "operators.html").read_text().replace("</body>", f"{TRIED}</body>"))
    document, console = browser.opened(tried, tmp_path / "profile")
    tried.unlink()
    assert console == []
    assert "<title>[true,true,true]</title>" in document


@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
@pytest.mark.parametrize("name", ["index.html", "model-resnet18.html"])
def test_a_browser_draws_with_the_one_script_beside_the_pages(folder, tmp_path, name):
    document, console = browser.opened(folder / name, tmp_path / "profile", dark=True)
    assert console == []
    assert "time of the whole model, ms" in document
    assert 'class="main-svg"' in document


def test_a_card_has_one_colour_in_both_figures_and_a_simulated_one_no_row(database, tmp_path):
    job_id = measured(database)
    with database.write() as session:
        report = build(session, job_id)
        session.get_one(tables.CardRow, rows.CARD).kind = "simulated"
    cpu = dataclasses.replace(
        report,
        cards=(dataclasses.replace(report.cards[0], model="AMD EPYC"),),
        verdict=dataclasses.replace(report.verdict, energy=None),
    )
    in_time, in_energy = (dict(chart["legend"]) for chart in charts.scatters([(cpu, ""), (report, "")]))
    assert "AMD EPYC, float32" in in_time.keys() - in_energy.keys()
    assert in_time["NVIDIA H200, float32"] == in_energy["NVIDIA H200, float32"]
    with database.read() as session:
        site.publish(session, tmp_path)
    assert report.title in (tmp_path / "index.html").read_text()
    assert report.title not in (tmp_path / "cards.html").read_text()
