"""The database as a folder of pages: everything is there, linked, and works without a server."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest

from farm.addons.pages import charts
from farm.addons.pages import page as site
from farm.errors import UsageError
from farm.report.report import build
from farm.store import tables
from farm.store.database import Database
from farm.types.variant import Variant
from farm.verdict.job_results import JobResults
from tests import browser, slow
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
        assert site.publish(session, home / "site") == 5
        assert site.publish(session, home / "site") == 5  # over itself
    database.close()
    return home / "site"


def test_every_page_is_there_and_every_link_leads_somewhere(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "index.html",
        "operators.html",
        "compare.html",
        "cards.html",
        "model-resnet18.html",
        "plotly.min.js",
    }
    for page in folder.glob("*.html"):
        text = page.read_text()
        for file, _, place in (
            link.partition("#") for link in re.findall(r'(?:href|src)="([^"]+)"', text)
        ):
            aim = folder / file if file else page
            assert aim.is_file()
            assert not place or f'id="{place}"' in aim.read_text()
        assert not re.search(r'(?:href|src)="(?:\w+:)?//', text)


def test_models_operators_and_cards_are_told(folder):
    assert len(re.findall("<tr[^>]*><td><a href=", (folder / "index.html").read_text())) == 2
    operators = (folder / "operators.html").read_text()
    assert "Conv2d 64-&gt;64 k3 p1 | 32x64x56x56 fp32" in operators
    cards = (folder / "cards.html").read_text()
    assert "NVIDIA H200" in cards
    compared = (folder / "compare.html").read_text()
    assert 'colspan="4">NVIDIA H200</th>' in compared
    assert compared.count("resnet18 1x224 float32</a>") == 1


def test_a_model_has_a_file_of_its_own_whatever_its_name():
    assert site.file_of("resnet50") == "model-resnet50.html"
    hostile = [
        site.file_of(name)
        for name in ("../../etc/passwd", ".._.._etc_passwd", "a/b", "a b", "ä" * 300)
    ]
    assert len(set(hostile)) == len(hostile)
    assert all(re.fullmatch(r"model-[\w-]{1,100}\.html", name, re.ASCII) for name in hostile)


def test_an_empty_database_is_a_site_too(database, tmp_path):
    with database.read() as session:
        assert site.publish(session, tmp_path / "new" / "folder") == 4
    assert "No model has a verdict yet" in (tmp_path / "new" / "folder" / "index.html").read_text()


def test_no_page_has_the_gap_of_an_incomplete_sum(database, tmp_path):
    measured(database)
    rows.cancel_early(database, "job1")
    with database.write() as session:
        job = session.get_one(tables.Job, "job1")
        job.state = "done"
        verdict = JobResults(session, job, 1).verdict()
        session.add(tables.VerdictRow(job_id="job1", round=1, **verdict.columns()))
    with database.read() as session:
        gap = build(session, "job1").verdict.time.gap
        site.publish(session, tmp_path / "site")
        page = site.job_page(session, build(session, "job1"))
    site.write_page(tmp_path / "two.html", [page, page])
    pages = [*(tmp_path / "site").glob("*.html"), tmp_path / "two.html"]
    assert not [path for path in pages if f"{gap.value * 100:+.1f}" in path.read_text()]
    incomplete = {path.name for path in pages if "incomplete" in path.read_text()}
    assert incomplete == {"index.html", "model-resnet18.html", "two.html"}


def test_every_kind_of_database_is_published(any_database, tmp_path):
    rows.model_job(any_database)
    with any_database.read() as session:
        assert site.publish(session, tmp_path) == 4
    assert "Conv2d 64-&gt;64 k3" in (tmp_path / "operators.html").read_text()


def test_the_pages_of_others_stay(database, tmp_path):
    (tmp_path / "index.html").write_text("<html>mine</html>")
    with database.read() as session:
        with pytest.raises(UsageError, match="did not write"):
            site.publish(session, tmp_path)
        with pytest.raises(UsageError, match="cannot be written"):
            site.publish(session, tmp_path / "index.html" / "below")
    assert (tmp_path / "index.html").read_text() == "<html>mine</html>"
    (tmp_path / "index.html").unlink()
    os.mkfifo(tmp_path / "index.html")  # opening it would wait for a writer
    with database.read() as session, pytest.raises(UsageError, match="did not write"):
        site.publish(session, tmp_path)


TRIED = """<script>
const part = document.querySelector(".rows");
const rows = () => [...part.querySelectorAll("tbody tr")];
const set = (control, value) => { control.value = value; control.dispatchEvent(new Event("input")); };
const search = part.querySelector("input"), [operator, card, dtype, memory] = part.querySelectorAll("select");
const paged = rows().length === Number(part.dataset.size);
const first = rows()[0];
part.querySelector(".next").click();
const turned = rows().length > 0 && rows()[0] !== first;
part.querySelectorAll("th button")[1].click();
part.querySelectorAll("th button")[1].click();
const times = rows().map((row) => Number(row.cells[1].dataset.value));
const sorted = times.every((time, index) => !index || time >= times[index - 1]);
set(search, "conv2d k7");
const matching = rows().length > 0 && rows().every((row) => row.cells[0].textContent.includes("k7"));
set(search, "");
set(operator, "Conv2d"); set(card, "NVIDIA H200"); set(dtype, "float32"); set(memory, "resident data");
const filtered = rows().length > 1 && rows().every((row) => row.cells[0].textContent.startsWith("Conv2d"));
document.title = JSON.stringify([paged, turned, sorted, matching, filtered]);
</script>"""


@slow.PROCESS
@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
@pytest.mark.parametrize("name", ["operators.html", "model-resnet18.html"])
def test_a_browser_pages_sorts_searches_and_filters_the_tuples(folder, tmp_path, name):
    """And it draws the figures of a model with the one script beside the pages."""
    script = TRIED
    if (
        name != "operators.html"
    ):  # the table of a job has no filters, and the share of the time in the second column
        script = re.sub(r"set\(operator, .*\n.*\n", "const filtered = true;\n", TRIED)
    tried = folder / "tried.html"
    tried.write_text((folder / name).read_text().replace("</body>", f"{script}</body>"))
    document, console = browser.opened(tried, tmp_path / "profile", dark=True)
    tried.unlink()
    assert console == []
    assert "<title>[true,true,true,true,true]</title>" in document
    assert name == "operators.html" or draws(document)


def draws(document):
    return "time of the whole model, ms" in document and 'class="main-svg"' in document


FRAMES = """<body><script>
const told = {};
addEventListener("message", (event) => { document.title = JSON.stringify(Object.assign(told, event.data)); });
</script>%s</body>"""
WIDTH = """<script>addEventListener("load", () => parent.postMessage(
  { [document.title]: document.documentElement.scrollWidth - innerWidth }, "*"));</script></body>"""


@slow.PROCESS
@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
def test_no_page_is_wider_than_a_phone(folder, tmp_path):
    pages = list(folder.glob("*.html"))
    for page in pages:
        (folder / f"framed-{page.name}").write_text(page.read_text().replace("</body>", WIDTH))
    frames = "".join(
        f'<iframe src="framed-{page.name}" width="390" height="844"></iframe>' for page in pages
    )
    (folder / "frames.html").write_text(FRAMES % frames)
    document, _ = browser.opened(folder / "frames.html", tmp_path / "profile")
    for path in [*folder.glob("framed-*"), folder / "frames.html"]:
        path.unlink()
    (told,) = re.findall("<title>(.*?)</title>", document)
    assert len(json.loads(told)) == len(pages)
    assert max(json.loads(told).values()) <= 0


@slow.PROCESS
@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
def test_a_browser_draws_the_first_page_with_the_one_script_beside_it(folder, tmp_path):
    document, console = browser.opened(folder / "index.html", tmp_path / "profile", dark=True)
    assert console == []
    assert draws(document)


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
    in_time, in_energy = (
        dict(chart["legend"]) for chart in charts.scatters([(cpu, ""), (report, "")])
    )
    assert "AMD EPYC, float32" in in_time.keys() - in_energy.keys()
    assert in_time["NVIDIA H200, float32"] == in_energy["NVIDIA H200, float32"]
    with database.read() as session:
        site.publish(session, tmp_path)
    assert report.title in (tmp_path / "index.html").read_text()
    assert report.title not in (tmp_path / "compare.html").read_text()


def test_jobs_that_are_open_or_partial_are_not_compared(database):
    with database.read() as session:
        report = build(session, measured(database))
    open_job = dataclasses.replace(report, state="open")
    partial = dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, coverage=0.4))
    assert charts.scatters([(open_job, ""), (partial, "")]) == []
    time, _ = charts.scatters([(report, ""), (open_job, ""), (partial, "")])
    assert [len(trace["x"]) for trace in time["data"] if trace["mode"] == "markers"] == [1]


def test_labels_of_logarithmic_axes_are_plain_numbers(database):
    with database.read() as session:
        report = build(session, measured(database))
    wide = [
        dataclasses.replace(
            report,
            verdict=dataclasses.replace(
                report.verdict,
                time=dataclasses.replace(
                    report.verdict.time,
                    whole=dataclasses.replace(report.verdict.time.whole, value=value),
                ),
            ),
        )
        for value in (1e2, 1e6)
    ]
    axis = charts.scatters([(one, "") for one in wide])[0]["layout"]["xaxis"]
    assert {"0.1", "1", "10", "100", "1,000"} <= set(axis["ticktext"])
    assert not {"0.2", "5"} & set(axis["ticktext"])
