"""The regular checks of a worker's cards: when they are due, their outcomes as metrics, quarantine."""

from __future__ import annotations

import uuid

import pytest
from sqlmodel import select

from farm.devices.device import Card
from farm.errors import NoSuchJob
from farm.jobs import card_checks, cards
from farm.jobs.card_checks import JudgedCheck
from farm.jobs.jobs import create
from farm.settings import Settings
from farm.store.database import Database
from farm.store.tables import CardRow, Job, ReadingRow
from farm.types.request import CARD_CHECK, LINK_CHECK, Request, Sweep
from farm.types.software import Software
from tasks import card_checks as regular
from tasks.card_checks import RegularChecks
from tests import slow
from tests.farms import running
from tests.tasks.test_metrics import free_port, scrape

EVERY_S = 3600.0
OTHER_CARDS = 5


def registered(database: Database, *card_ids: str) -> None:
    """Register cards with a worker that is alive now."""
    for index, card_id in enumerate(card_ids):
        card = Card(card_id, "simulated", "simulated card", 2**30, index=index, host="here")
        cards.register(database, card, Software(torch="simulated"), holder=card_id, queue=card_id)


def check_job(database: Database, *card_ids: str) -> str:
    checked = CARD_CHECK if len(card_ids) == 1 else LINK_CHECK
    request = Request(sweep=Sweep(checked, {}, "check"), reuse="none")
    return create(database, request, card_ids, pinned=True).job_id


def end(database: Database, job_id: str) -> None:
    with database.write() as session:
        job = session.get_one(Job, job_id)
        job.state, job.ended_at_s = "done", job.created_at_s


def due(database: Database) -> set[str]:
    with database.read() as session:
        return {row.id for row in card_checks.due_cards(session, ["SIM-0", "SIM-1"], EVERY_S)}


def test_a_card_is_due_if_no_check_of_it_began_in_the_last_period(any_database, clock):
    registered(any_database, "SIM-0", "SIM-1", "SIM-2")
    assert due(any_database) == {"SIM-0", "SIM-1"}
    check_job(any_database, "SIM-0")
    check_job(any_database, "SIM-0", "SIM-1")
    assert due(any_database) == {"SIM-1"}
    cards.drain(any_database, "SIM-1")
    assert due(any_database) == set()
    clock.forward(EVERY_S + 60)
    registered(any_database, "SIM-0")
    assert due(any_database) == {"SIM-0"}


def test_the_newest_check_that_has_ended_counts(any_database):
    registered(any_database, "SIM-0", "SIM-1")
    older, newer, still_open = (check_job(any_database, "SIM-0") for _ in range(3))
    link = check_job(any_database, "SIM-0", "SIM-1")
    for job_id in (older, newer, link):
        end(any_database, job_id)
    with any_database.read() as session:
        newest = card_checks.newest_ended(session, ["SIM-0"], EVERY_S)
        assert set(newest) == {newer, link}
        assert card_checks.newest_ended(session, ["SIM-1"], EVERY_S) == []
    assert still_open not in newest


@pytest.mark.parametrize("quarantine", [True, False])
def test_only_a_card_that_was_found_outside_since_the_start_is_put_in_quarantine(
    any_database, monkeypatch, quarantine
):
    registered(any_database, "SIM-0", "SIM-1")
    ended_at_s = {}

    def judge(due, ended):
        checks = []
        for job_id in ended:
            with any_database.read() as session:
                card_ids = tuple(session.get_one(Job, job_id).asked["cards"])
            checks.append(
                JudgedCheck(job_id, card_ids, ended_at_s[job_id], "outside", ("copy +3.0%",))
            )
        return checks

    monkeypatch.setattr(regular, "_plan_and_judge", judge)
    current = Settings(check_every_s=EVERY_S, check_quarantine=quarantine)
    checks = RegularChecks(current, ["SIM-0", "SIM-1"], any_database)
    before = check_job(any_database, "SIM-1")
    ended_at_s[before] = 1.0
    end(any_database, before)
    checks.make_pass()
    assert [check.job_id for check in checks.outcomes()] == [before]
    for card_ids in (("SIM-0",), ("SIM-1", "SIM-0")):
        job_id = check_job(any_database, *card_ids)
        with any_database.read() as session:
            ended_at_s[job_id] = session.get_one(Job, job_id).created_at_s + 1
        end(any_database, job_id)
    checks.make_pass()
    assert len(checks.outcomes()) == 3
    states = {}
    with any_database.read() as session:
        for row in session.exec(select(CardRow)):
            states[row.id] = row.state, row.state_reason
    assert states["SIM-1"] == ("idle", "")
    if quarantine:
        state, reason = states["SIM-0"]
        assert state == "quarantined"
        assert "outside: copy +3.0% (`farm cards check" in reason
        cards.resume(any_database, "SIM-0", quarantined=True)
        checks.make_pass()
        assert cards.stored_state(any_database, "SIM-0") != "quarantined", "it is judged once"
    else:
        assert states["SIM-0"] == ("idle", "")


def add_faster_cards(database: Database) -> None:
    """Store the readings of the check for other cards, which are 5 % faster."""
    with database.write() as session:
        readings = session.exec(select(ReadingRow)).all()
        row = session.exec(select(CardRow)).first()
        for number in range(OTHER_CARDS):
            card_id = f"SIM-other-{number}"
            session.add(CardRow(**{**row.model_dump(), "id": card_id, "worker": "", "queue": ""}))
            session.flush()
            for reading in readings:
                columns = reading.model_dump()
                columns |= {"id": uuid.uuid4().hex, "card_id": card_id}
                columns["time_us"] = reading.time_us / 1.05
                session.add(ReadingRow(**columns))


@slow.MEASURED
def test_a_worker_checks_its_cards_and_its_metrics_have_the_outcome(tmp_path, broker, postgres_url):
    port = free_port()
    settings = {
        "FARM_METRICS_PORT": str(port),
        "FARM_CHECK_EVERY_S": "20",
        "FARM_CHECK_QUARANTINE": "true",
    }
    with running(tmp_path, broker.url, postgres_url, cards=1, **settings) as farm:
        farm.wait_for(lambda: scrape(port)["farm_card_check", "not judged"] == 1)
        after = scrape(port)
        assert after["farm_card_check", "outside"] == 0
        assert 0 <= after["farm_card_check_age_seconds",] < 600
        add_faster_cards(farm.database)
        farm.wait_for(lambda: scrape(port)["farm_card_state", "quarantined"] == 1)
        assert scrape(port)["farm_card_check", "outside"] == 1
        said = farm.say("history", "--card", f"SIM-{Settings().host}-0")
        assert "OUTSIDE" in said.stdout
        assert "INSIDE" not in said.stdout


def test_a_check_that_is_gone_ends_the_process_with_its_reason(database, monkeypatch, caplog):
    monkeypatch.setattr(regular, "die_with_parent", lambda: None)
    monkeypatch.setattr("sys.argv", ["card_checks", "--ended", "nowhere"])
    monkeypatch.setattr(regular, "settings", lambda: Settings(database_url=str(database)))
    assert regular.main() == NoSuchJob.exit_code
    assert "There is no card check 'nowhere'." in caplog.text
