"""What an embedded farm starts, and when it need not start anything."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from sqlmodel import select

from farm.devices.device import Card
from farm.devices.host import discover
from farm.devices.software import installed_torch
from farm.errors import NoWorker
from farm.jobs import cards, closing
from farm.jobs.create import open_job
from farm.jobs.items import Claim
from farm.requests.resolved import ResolvedRequest
from farm.settings import settings
from farm.store.job_ids import find_job
from farm.store.tables import CardRow, VerdictRow
from farm.types.protocol import Protocol
from farm.types.request import Request, Sweep
from farm.types.software import Software
from tasks.embedded import EmbeddedFarm
from tasks.submissions import submit
from tests import slow
from tests.planned import claim, complete, items_of, register

HERE = Card(id="CPU-1", kind="cpu", model="a CPU", memory_bytes=0, host="here")
REQUEST = Request(
    sweep=Sweep("Linear", {"in_features": (16,), "out_features": (16,)}, "a test"),
    protocol=Protocol(launch="eager"),
)


def measured(database, software):
    """The request, asked once before and measured on the host's CPU."""
    software_id = cards.register(database, HERE, software, holder="earlier", queue="card.CPU-1")
    planned = open_job(database, ResolvedRequest.of(REQUEST, [HERE.id]))
    for item in items_of(database, planned.job_id):
        held = claim(database, item, software_id=software_id)
        assert isinstance(held, Claim)
        complete(database, held, HERE.id, software_id=software_id)
    assert closing.close_complete_rounds(database, planned.job_id, 1) is None


def installed() -> Software:
    torch = installed_torch()
    assert torch is not None
    return Software(torch=torch.version)


@pytest.fixture
def embedded(any_database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", any_database.url.render_as_string(hide_password=False))
    settings.cache_clear()
    with EmbeddedFarm(
        settings(), any_database, [HERE], starting=lambda: pytest.fail("a worker was started")
    ) as farm:
        yield farm


def test_what_the_database_knows_is_answered_without_a_worker(embedded, any_database):
    assert not embedded.registered()
    measured(any_database, installed())
    assert embedded.registered()
    known = replace(ResolvedRequest.of(REQUEST, [HERE.id]), done_by="an earlier job")
    made = submit(any_database, known, farm=embedded)
    assert (made.new, made.reused) == (0, 1)
    with any_database.read() as session:
        assert find_job(session, made.job_id).state == "done"
        assert session.exec(select(VerdictRow).where(VerdictRow.job_id == made.job_id)).one()


def test_after_an_upgrade_of_torch_no_card_is_as_it_was(embedded, any_database):
    measured(any_database, Software(torch="1.0"))
    assert not embedded.registered()


@slow.FAULT
def test_where_no_card_is_fit_the_reason_is_told_at_once(
    database, sqlite_url, monkeypatch, tmp_path
):
    bad = tmp_path / "bad"
    monkeypatch.setenv("FARM_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    monkeypatch.setenv("FARM_SIMULATED_UNHEALTHY", str(bad))
    settings.cache_clear()
    (card,) = discover(settings())
    bad.write_text(card.id)
    with (
        EmbeddedFarm(settings(), database, [card]) as farm,
        pytest.raises(NoWorker, match="quarantined: Simulated: a product came out wrong") as told,
    ):
        farm.wait_ready()
    assert "run the same command again" in told.value.next_step
    bad.unlink()
    with EmbeddedFarm(settings(), database, [card]) as farm:
        farm.wait_ready()  # what it found for itself alone, no person need release


@slow.FAULT
def test_a_worker_without_a_heartbeat_is_said_once_with_its_log(database, sqlite_url, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()
    (card,) = discover(settings())
    lines: list[str] = []
    with EmbeddedFarm(settings(), database, [card], say=lines.append) as farm:
        farm.wait_ready()
        farm.tend()
        assert lines == []
        assert farm.supervisor is not None
        workers = [child.process for child in farm.supervisor.children if child.process]
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        with database.write() as session:
            session.get_one(CardRow, card.id).last_seen_at_s -= 1000.0
        for _ in range(2):
            farm._looked_s = 0.0
            farm.tend()
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
    (line,) = lines
    assert line.startswith(f"The worker of {card.id} has no heartbeat. Its log ends: ")


def test_a_card_that_another_farm_gave_up_is_for_a_person_to_release(any_database):
    register(any_database, 0, 1)
    cards.quarantine(any_database, "SIM-0", "a wrong sum")
    cards.quarantine(any_database, "SIM-1", "a wrong sum", farm="embedded:here:7:ab")
    assert cards.end_embedded_quarantines(any_database, ["SIM-0", "SIM-1"]) == ["SIM-1"]
    assert [cards.stored_state(any_database, card_id) for card_id in ("SIM-0", "SIM-1")] == [
        "quarantined",
        "stopped",
    ]
