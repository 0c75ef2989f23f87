"""`farm cards check` on simulated cards."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import uuid
from pathlib import Path

import plotly.graph_objects
import pytest
from sqlmodel import select

from farm.addons.check.card_check import LEAST_EARLIER, card_check
from farm.addons.check.figures import check_figures
from farm.addons.check.requested import check_request, link_requests
from farm.addons.pages import GREY
from farm.devices.device import Card
from farm.devices.simulated import ERRORS_VARIABLE, SHARED_VARIABLE, SLOWER_VARIABLE
from farm.errors import NoSuchJob
from farm.settings import settings
from farm.store.database import open_database
from farm.store.tables import CardRow, Item, Job, ReadingRow
from farm.subjects.sweep import packaged_tuples
from farm.types.protocol import Protocol
from farm.types.request import CHECKS
from farm.verdict.job_results import JobResults
from tests import browser, slow

#: The figures of a check that a process slows down if it takes bandwidth of the card's memory.
BANDWIDTH_FIGURES = {"copy", "stream", "batch_norm", "vector_bf16", "attention"}


@pytest.fixture
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()


def add_copies(times: int, *, on_other_cards: bool = False) -> None:
    """Store copies of all readings, of earlier checks or of other cards."""
    with open_database().write() as session:
        readings = session.exec(select(ReadingRow)).all()
        for number in range(times):
            for reading in readings:
                columns = reading.model_dump()
                card_id = reading.card_id
                if on_other_cards:
                    card_id = f"SIM-other-{number}"
                    if session.get(CardRow, card_id) is None:
                        card = session.get_one(CardRow, reading.card_id).model_dump()
                        session.add(CardRow(**{**card, "id": card_id}))
                        session.flush()
                columns |= {"id": uuid.uuid4().hex, "card_id": card_id}
                session.add(ReadingRow(**columns))


def shown_charts(page: Path):
    """The charts of a page, each of which plotly accepts."""
    pattern = r'<script type="application/json">(.*?)</script>'
    charts = [json.loads(text) for text in re.findall(pattern, page.read_text())]
    for chart in charts:
        plotly.graph_objects.Figure(chart)
    return charts


def checked(farm, *words: str):
    said = farm("cards", "check", "--json", *words)
    return said, json.loads(said.stdout)["checks"]


@pytest.fixture
def first(farm, _simulated, made_once):
    """The first check of a card; its job is in the test's database."""

    def check():
        said, (found,) = checked(farm)
        assert said.code == 0
        return found

    return made_once(settings().state_dir / "farm.db", check)


def test_a_card_that_became_3_percent_slower_is_outside(first, farm, monkeypatch, tmp_path):
    assert first["outcome"] == "not judged"
    assert {figure["figure"] for figure in first["figures"]} == {
        figure.name for figure in check_figures()
    }
    assert first["conditions"]["idle_power_w"] == 80.0
    assert first["conditions"]["counters"] == "not read"
    by_figure = {figure["figure"]: figure for figure in first["figures"]}
    from_host = by_figure["from_host"]
    assert from_host["bytes_per_s"] == pytest.approx(25_165_824 / from_host["time_us"] * 1e6)
    assert by_figure["copy"]["bytes_per_s"] is None

    add_copies(LEAST_EARLIER)
    add_copies(1, on_other_cards=True)
    card_id = first["card_id"]
    monkeypatch.setenv(SLOWER_VARIABLE, f"{card_id} 1.03")
    said, (slow,) = checked(farm, "--quarantine")
    assert (said.code, slow["outcome"]) == (5, "outside")
    assert f"1 of 1 cards are outside: {card_id}." in said.stderr
    with open_database().read() as session:
        card = session.get_one(CardRow, card_id)
        assert card.state == "quarantined"
        assert "card check" in card.state_reason
    outside = [figure for figure in slow["figures"] if figure["outside"]]
    assert {figure["quantity"] for figure in outside} == {"time"}
    earlier = next(
        comparison
        for comparison in outside[0]["comparisons"]
        if comparison["reference"] == "earlier"
    )
    assert earlier["difference"] == pytest.approx(0.03)
    assert earlier["above"] == 1.0

    # The first check again: nothing of it was earlier.
    said = farm("cards", "check", "--job", first["job"])
    assert said.code == 0
    assert "NOT JUDGED" in said.stdout
    assert "too few to judge" in said.stdout
    said = farm("history", "--card", card_id, "--json")
    history = json.loads(said.stdout)
    assert history["card_id"] == card_id
    assert [check["outcome"] for check in history["checks"]] == ["not judged", "outside"]
    assert "2 checks" in farm("history", "--card", card_id).stdout
    # Enough other cards: the card is compared with them, too.
    add_copies(5, on_other_cards=True)
    history_file, check_file = tmp_path / "history.html", tmp_path / "check.html"
    assert farm("history", "--card", card_id, "--html", history_file).code == 0
    course, power = shown_charts(history_file)
    assert any("x" in line["marker"]["symbol"] for line in course["data"]), "a mark at a change"
    assert all(line["line"]["color"] == GREY for line in power["data"])
    assert all(set(line["y"]) == {0.0} for line in power["data"]), "rounded"
    said = farm("cards", "check", "--job", slow["job"], "--html", check_file)
    assert said.code == 5
    assert not said.stdout
    against_cards, against_earlier = shown_charts(check_file)
    names = [points["name"] for points in against_cards["data"]]
    assert names == ["another card", "outside from here", "this card", "this card, outside"]
    of_cards, limits, inside, outside = against_cards["data"]
    assert len(of_cards["x"]) == 5 * len(limits["x"])
    assert len(inside["x"]) + len(outside["x"]) == len(limits["x"])
    assert max(inside["x"]) < min(limits["x"])
    lines = "<br>".join(limits["y"]).split("<br>")
    assert max(map(len, lines)) <= 20, "names leave room for the chart on a narrow page"
    assert against_earlier["data"]
    for file in (history_file, check_file):
        assert "OUTSIDE" in file.read_text()
    if browser.BROWSER:
        document, messages = browser.opened(check_file, tmp_path / "browser")
        assert messages == []
        assert document.count('class="main-svg"') >= 2
    with open_database().read() as session:
        again = card_check(session, slow["job"])
    judged = [figure for figure in again.figures if figure.name == "copy"]
    assert [comparison.reference for comparison in judged[0].comparisons] == ["cards", "earlier"]
    assert again.outcome == "outside"


def test_a_cpu_is_refused(farm):
    said = farm("cards", "check", "--card", "cpu")
    assert said.code == 2
    assert "Only GPUs are checked" in said.stderr


@pytest.mark.parametrize("words", [(), ("resnet18", "--card", "0")])
def test_a_history_is_of_a_model_or_of_a_card(farm, words):
    said = farm("history", *words)
    assert said.code == 2
    assert "needs a model or a card" in said.stderr


def test_a_disturbed_figure_is_named_and_a_missing_one_has_its_reason(first, farm):
    add_copies(LEAST_EARLIER, on_other_cards=True)
    with open_database().write() as session:
        of_card = select(ReadingRow).where(ReadingRow.card_id == first["card_id"])
        disturbed, missing, *_ = session.exec(of_card).all()
        disturbed.flags = ["shared", "simulated"]
        item = session.exec(select(Item).where(Item.reading_id == missing.id)).one()
        item.reading_id, item.message = None, "out of memory"
        disturbed_id = disturbed.subject_id, disturbed.protocol_id
        missing_id = missing.subject_id, missing.protocol_id
    with open_database().read() as session:
        result = card_check(session, first["job"])
    usual = Protocol()
    names = {figure.subject(usual): figure.name for figure in check_figures()}
    reasons = {figure.name: figure.reason for figure in result.figures}
    assert reasons[names[disturbed_id]] == "disturbed: shared"
    assert reasons[names[missing_id]] == "out of memory"
    assert result.outcome == "inside"
    said = farm("cards", "check", "--job", first["job"])
    assert "not judged: another process" in said.stdout

    with open_database().write() as session:
        for item in session.exec(select(Item).where(Item.job_id == first["job"])):
            item.reading_id = None
    said = farm("cards", "check", "--job", first["job"])
    assert said.code == 1
    assert "1 of 1 cards could not be measured" in said.stderr


def test_another_job_is_no_check(database):
    with database.read() as session, pytest.raises(NoSuchJob, match="no card check 'job1'"):
        card_check(session, "job1")


@pytest.mark.parametrize("checked", CHECKS)
def test_the_figures_are_the_packaged_tuples(checked):
    usual = Protocol()
    subjects = [figure.subject(usual) for figure in check_figures(checked)]
    packaged = packaged_tuples(checked)
    assert subjects == [(each.spec.id, each.protocol(usual).id) for each in packaged]
    assert len(set(subjects)) == len(subjects)


@slow.FAULT
@pytest.mark.usefixtures("_simulated")
def test_the_error_counters_of_a_check_are_compared_with_the_check_before(farm, monkeypatch):
    monkeypatch.setenv(ERRORS_VARIABLE, "pcie_replays 2")
    _, (first,) = checked(farm)
    counters = first["conditions"]["counters"]
    assert counters["counts"] == {"pcie_replays": 2}
    assert "xid_errors" in counters["not_read"]
    assert first["conditions"]["increases"] == {}
    monkeypatch.setenv(ERRORS_VARIABLE, "pcie_replays 5")
    said = farm("cards", "check")
    assert "pcie_replays 5 (+3)" in said.stdout
    assert "xid_errors not read" in said.stdout


def test_the_parts_of_the_job_are_those_with_its_protocol(first):
    """The report of a check has no missing tuple because of figures under other conditions."""
    with open_database().read() as session:
        job = session.get_one(Job, first["job"])
        parts = JobResults(session, job, 1).parts
    assert {part.origin for part in parts} == {"measured"}
    assert len(parts) == sum(not figure.conditions for figure in check_figures())


def card_row(index: int, **columns) -> CardRow:
    defaults = {"kind": "cuda", "model": "NVIDIA H200", "host": "node1", "index": index}
    return CardRow(id=f"GPU-{index}", **{**defaults, **columns})


def test_every_card_with_peers_is_in_a_pair(database):
    with database.write() as session:
        for index in range(3):
            session.add(card_row(index, links={"peers": ["GPU-0", "GPU-1", "GPU-2"]}))
        session.add(card_row(3, host="node2"))
        session.add(card_row(4, host="node3", links={"peers": []}))
        session.add(card_row(5, host="node3", links={"peers": []}))
    with database.read() as session:
        requests = link_requests(session, [f"GPU-{index}" for index in range(6)])
    pairs = [tuple(request.card_ids) for request in requests]
    assert pairs == [("GPU-0", "GPU-1"), ("GPU-1", "GPU-2")]


def test_a_check_measures_as_the_packaged_readings():
    """Otherwise no reading of the package is comparable."""
    card = Card(id="GPU-1", kind="cuda", model="NVIDIA H200", memory_bytes=1, index=0, host="host")
    request = check_request(card).request
    assert request.protocol.id == "e86ac19f77a85e249f75ca191947edf2"
    assert request.reuse == "none"


def test_a_card_without_a_name_below_cards_is_still_shown(farm, monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()
    said = farm("cards", "SIM", "--json")
    assert said.code == 0
    assert farm("cards", "check", "--help").stdout.count("farm cards check") >= 1


@pytest.fixture
def disturbance(monkeypatch):
    """A process that takes 5 % of the bandwidth of one of two simulated cards, while it is open."""

    @contextlib.contextmanager
    def disturbing(card_id: str):
        usual = Protocol()
        slower = []
        for figure in check_figures():
            if figure.name in BANDWIDTH_FIGURES:
                slower.append(figure.subject(usual)[0])
        process = subprocess.Popen(["sleep", "600"])
        monkeypatch.setenv(SHARED_VARIABLE, f"{card_id} {process.pid}")
        monkeypatch.setenv(SLOWER_VARIABLE, f"{card_id} {1 / 0.95} {' '.join(slower)}")
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()
            monkeypatch.delenv(SHARED_VARIABLE)
            monkeypatch.delenv(SLOWER_VARIABLE)

    return disturbing


@slow.FAULT
def test_a_process_that_takes_bandwidth_is_named_and_found_by_the_bandwidth(
    farm, monkeypatch, disturbance
):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "2")
    settings.cache_clear()
    _, (first, second, _) = checked(farm)
    add_copies(LEAST_EARLIER)
    with disturbance(first["card_id"]) as process_id:
        said, (disturbed, other, _) = checked(farm)
    assert said.code == 0
    assert {figure["reason"] for figure in disturbed["figures"]} == {"disturbed: shared"}
    assert (disturbed["card_id"], disturbed["outcome"]) == (first["card_id"], "not judged")
    assert (other["card_id"], other["outcome"]) == (second["card_id"], "inside")

    with open_database().write() as session:
        items = session.exec(select(Item).where(Item.job_id == disturbed["job"])).all()
        for item in items:
            reading = session.get_one(ReadingRow, item.reading_id)
            assert reading.details["foreign_processes"] == [process_id]
            reading.flags = ["simulated"]
    with open_database().read() as session:
        result = card_check(session, disturbed["job"])
    outside = {figure.name for figure in result.figures if figure.is_outside}
    assert outside == BANDWIDTH_FIGURES
    assert {figure.quantity for figure in result.figures if figure.is_outside} == {"time"}


def test_the_cards_of_a_farm_are_checked_each_in_its_own_queue(two_cards):
    farm, _ = two_cards.whole()
    said = farm.say("cards", "check", "--all", "--json")
    assert said.returncode == 0, said.stderr
    *checks, link = json.loads(said.stdout)["checks"]
    assert len(checks) == 2
    assert sorted(link["cards"]) == sorted(check["card_id"] for check in checks)
    assert [figure["figure"] for figure in link["figures"]] == ["send_recv", "all_reduce"]
    for check in checks:
        items = farm.items(check["job"])
        assert {item.card_id for item in items} == {check["card_id"]}
        assert len(items) == len(check_figures())
    one = farm.say("cards", "check", "--all", "--card", checks[1]["card_id"], "--json")
    assert [check["card_id"] for check in json.loads(one.stdout)["checks"]] == [
        checks[1]["card_id"]
    ]
