"""A page holds what the report holds, needs nothing from outside, and runs nothing that others
wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from sqlalchemy import update

from farm.addons.pages import COLOURS, charts, page
from farm.errors import UsageError
from farm.models import catalog
from farm.report.layers import LayerRow
from farm.report.report import build, remarks
from farm.store import tables
from farm.store.database import Database
from farm.types.reading import METHOD
from farm.types.variant import Variant
from farm.verdict.cost_line import CostGroup
from tests import browser, disks, slow
from tests.report import rows
from tests.report.measured import measured

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J"


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory):
    """The pages of resnet18 at two batches."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('two') / 'farm.db'}")
    database.upgrade()
    measured(database)
    measured(database, Variant("resnet18", 1, 224), "job2")
    with database.read() as session:
        yield [page.job_page(session, build(session, job_id)) for job_id in ("job1", "job2")]
    database.close()


def figures(text):
    return [
        json.loads(found)
        for found in re.findall(r'<script type="application/json">(.*?)</script>', text)
    ]


def check(figure):
    """Hold a figure against plotly's schema, and its axes against ours: each has a title with a
    unit.
    """
    from plotly.graph_objects import Figure

    Figure(figure)  # raises where plotly does not know something
    for name in ("xaxis", "yaxis"):
        title = figure["layout"].get(name, {}).get("title", {}).get("text")
        if title:
            assert re.search(r", (µs|ms|s|mJ|J|kJ|W|MHz|%|FLOP/B|TFLOP/s)$", title), title
    kind = figure["data"][0]["type"]
    assert kind == "treemap" or figure["layout"]["xaxis"]["title"]["text"]


def test_a_page_holds_the_report_and_its_figures(two_jobs, tmp_path):
    page.write_page(tmp_path / "page.html", two_jobs[:1])
    text = (tmp_path / "page.html").read_text()
    found = figures(text)
    kinds = [figure["data"][0]["type"] for figure in found]
    assert kinds == ["bar", "bar", "treemap", "scatter", "histogram", "histogram"]
    for figure in found:
        check(figure)
    for words in (
        "resnet18 32x224 float32",
        "sum of the parts",
        "Roofline",
        "No tuple is missing",
        "NVIDIA H200",
    ):
        assert words in text
    assert (
        "farm run resnet18 --batch 32 --input-size 224 --launch graph --data normal --reuse none"
        in text
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_a_page_of_a_training_step_tells_whose_part_takes_what(database, tmp_path):
    job = measured(database, catalog.variant("squeezenet1_1", 2, input_size=32, step="training"))
    with database.read() as session:
        found = page.job_page(session, build(session, job))
    page.write_page(tmp_path / "page.html", [found])
    text = (tmp_path / "page.html").read_text()
    assert "Cost of the step by owner" in text
    assert sum(group.time_share for group in found.owner_groups) == pytest.approx(1)
    names = re.findall(r"<tr><td>(\w+)</td>", text.partition("Cost of the step by owner")[2])
    assert {"Conv2d", "ReLU", "optimizer", "accumulation", "loss"} <= set(names)
    assert "--step training --optimizer sgd" in text


def test_a_page_of_a_split_model_has_its_ranks_side_by_side(database, tmp_path):
    variant = catalog.variant(
        "qwen2.5-0.5b", 1, phase="prefill", length=16, layers=1, tensor_parallel=2
    )
    job = measured(database, variant)
    ranks = [
        {"card": card, "time_us": 2e3, "energy_mj": 1e3, "flags": ["shared"]}
        for card in ("GPU-0", "GPU-1")
    ]
    with database.write() as session:
        its = tables.ReadingRow.subject_id == variant.id
        session.execute(
            update(tables.ReadingRow).where(its).values(details={"method": METHOD, "ranks": ranks})
        )
    with database.read() as session:
        report = build(session, job)
        page.write_page(tmp_path / "page.html", [page.job_page(session, report)])
    table = (
        (tmp_path / "page.html")
        .read_text()
        .partition("Ranks of the whole model")[2]
        .partition("</table>")[0]
    )
    assert re.findall(r"<td>(GPU-\d)</td>", table) == ["GPU-0", "GPU-1"]
    assert table.count("2.00 ms") == table.count("1.00 J") == table.count("shared") == 2
    assert (
        dict(remarks(report))["ranks"] == "0: 2.00 ms, 1.00 J on GPU-0; 1: 2.00 ms, 1.00 J on GPU-1"
    )
    assert [rank["card"] for rank in report.to_json()["ranks"]] == ["GPU-0", "GPU-1"]


def test_figures_add_up(two_jobs):
    (first, _) = two_jobs
    time, energy = first.sums
    in_sum = sum(trace["x"][0] for trace in time["data"][:-1])
    assert in_sum == pytest.approx(first.report.verdict.time.total.value / 1e3)
    assert energy["data"][-1]["x"] == [pytest.approx(first.report.verdict.energy.whole.value / 1e3)]
    tree = first.tree["data"][0]
    under = [
        value
        for value, parent in zip(tree["values"], tree["parents"], strict=True)
        if parent == "model"
    ]
    assert sum(under) == pytest.approx(tree["values"][0])
    power, clock = first.distributions
    assert sum(power["data"][0]["y"]) == pytest.approx(100)
    assert set(clock["data"][0]["x"]) <= {1980.0, 1755.0}


def test_several_jobs_have_the_scatter_of_sum_against_whole(two_jobs, tmp_path):
    page.write_page(tmp_path / "page.html", two_jobs)
    time, energy, *_ = figures((tmp_path / "page.html").read_text())
    assert [len(trace["x"]) for trace in time["data"] if trace["mode"] == "markers"] == [2]
    assert time["layout"]["xaxis"]["title"]["text"] == "time of the whole model, ms"
    assert energy["layout"]["yaxis"]["title"]["text"] == "energy as the sum of the parts, J"


def test_what_others_wrote_is_text(database, tmp_path):
    job_id = rows.model_job(database)
    with database.write() as session:
        for table, columns in (
            (tables.Job, ("title",)),
            (tables.Operator, ("label", "short_name")),
            (tables.CardRow, ("host", "model", "driver")),
            (tables.Item, ("reason", "message")),
            (tables.Call, ("module_path",)),
            (tables.SoftwareRow, ("torch",)),
        ):
            session.execute(update(table).values({name: HOSTILE for name in columns}))
    with database.read() as session:
        page.write_page(tmp_path / "page.html", [page.job_page(session, build(session, job_id))])
    text = (tmp_path / "page.html").read_text()
    without_plotly = text.replace(page.plotly_js(), "")
    assert "<img" not in without_plotly
    assert "alert(1)</script>" not in without_plotly
    assert "\x1b" not in without_plotly
    assert "&lt;img src=x" in without_plotly
    for figure in figures(text):
        check(figure)
        assert "<img" not in json.dumps(figure)  # plotly reads HTML in its texts


@pytest.mark.parametrize("make", [rows.model_job, rows.sweep_job])
def test_a_page_bears_what_is_missing(database, tmp_path, make):
    job_id = make(database)
    with database.read() as session:
        page.write_page(tmp_path / "page.html", [page.job_page(session, build(session, job_id))])
    text = (tmp_path / "page.html").read_text()
    assert "tuples measured" in text or "raised: an illegal [memory] access" in text
    for figure in figures(text):
        check(figure)


def test_what_cannot_be_written_is_said_in_a_line(two_jobs, tmp_path):
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "page.html", "does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            page.check_page(path)
    with pytest.raises(UsageError, match="cannot be written"):
        page.write_page(Path("/proc/page.html"), two_jobs)


def test_on_a_full_disk_the_next_step_is_to_free_space(two_jobs, tmp_path):
    reason = disks.why_not()
    if reason:
        pytest.skip(reason)
    with disks.SmallDisk(tmp_path / "disk") as disk:
        disk.fill()
        with pytest.raises(UsageError, match="No space left on device") as caught:
            page.write_page(disk.path / "page.html", two_jobs)
    assert caught.value.next_step.startswith("Free disk space")


def test_without_plotly_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match="plotly") as raised:
        page.check_page(tmp_path / "page.html")
    assert "operator-farm[plot]" in raised.value.next_step


def test_flags_are_explained_as_in_the_documentation():
    method = (Path(__file__).parents[3] / "docs" / "method.md").read_text()
    section = method.partition("\n## Flags\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", section, re.MULTILINE))
    assert {name: text.replace("`", "") for name, text in told.items()} == page.flag_meanings()


@slow.PROCESS
def test_a_drawing_of_modules_begins_where_the_time_divides():
    def row(path, time_us):
        depth = len(path.split(".")) if path else 0
        cost = CostGroup(time_us=time_us, tuples=1, measured_tuples=1, calls=1)
        name = path.rpartition(".")[2]
        return LayerRow(name, path, depth, "", "", None, (), None, None, {}, 0, 0, cost, cost)

    paths = {"": 100.0, "model": 99.0, "model.h": 98.0, "model.h.0": 50.0, "model.h.1": 48.0}
    rows = [row(path, time_us) for path, time_us in {**paths, "head": 1.0}.items()]
    (data,) = charts.modules(rows, "gpt2 8x512 tokens")["data"]
    assert data["labels"][data["ids"].index(data["level"])] == "h"
    colours = dict(zip(data["labels"], data["marker"]["colors"], strict=True))
    assert len({colours["0"], colours["1"], colours["h"]}) == 3

    flat = [row(path, time_us) for path, time_us in {"": 100.0, "a": 50.0, "b": 50.0}.items()]
    (data,) = charts.modules(flat, "net")["data"]
    assert data["level"] == "model", "the time divides at the model itself"


@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
def test_a_browser_draws_every_figure_and_complains_of_nothing(two_jobs, tmp_path):
    """In its light colours; `test_site.py` has the dark ones."""
    path = tmp_path / "page.html"
    page.write_page(path, two_jobs)
    document, console = browser.opened(path, tmp_path / "profile")
    assert console == []
    assert document.count('class="main-svg"') >= len(figures(path.read_text()))
    assert '<nav class="contents" aria-label="Contents">' in document
    assert all(
        f'id="{link}"' in document for link in re.findall(r'href="#(section[^"]+)', document)
    )
    for title in (
        "time of the whole model, ms",
        "arithmetic intensity, FLOP/B",
        "share of the sum's time, %",
    ):
        assert title in document


def test_colours_stand_for_the_costliest_types(two_jobs):
    colours = charts.colours_of(two_jobs[0].report.types)
    assert list(colours.values())[: len(colours)] == list(COLOURS[: len(colours)])
