"""Cards that a person drains, that fail their check, or that vanish: their work goes on
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import psutil
import pytest

from farm.devices.simulated import UNHEALTHY_VARIABLE
from farm.settings import Settings
from farm.store import tables
from farm.store.database import read_clock_s
from tasks.control import lost_after_s
from tests import slow


def card_of(hurt, number):
    with hurt.farm.database.read() as session:
        return next(
            card
            for card in session.exec(tables.CardRow.__table__.select())
            if card.id.endswith(f"-{number}")
        )


def measured_on(hurt, job_id, since=0.0):
    return {
        item.card_id
        for item in hurt.farm.items(job_id)
        if item.started_at_s and item.started_at_s > since
    }


def suspended(hurt, processes):
    """Suspend processes of this host and return True; False if one would keep the database locked
    meanwhile.

    A host that is cut off from a database server holds no lock: the server ends its transactions.
    """
    for process in processes:
        process.suspend()
    try:
        with contextlib.closing(
            sqlite3.connect(hurt.farm.database.engine.url.database, timeout=0)
        ) as connection:
            connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        for process in processes:
            process.resume()
        return False
    return True


def test_a_lost_cards_items_are_on_its_peer_soon_and_its_late_reading_is_fenced_out(pair):
    job_id = pair.submit(["slow"] * 6, 2.0)
    pair.farm.wait_for(
        lambda: len({i.card_id for i in pair.farm.items(job_id) if i.state == "claimed"}) == 2
    )
    # Stopped, not killed: to the farm that looks like a host that is cut off, and then comes back.
    frozen = [pair.supervisor(), pair.worker(), pair.pool(), pair.benchmark()]
    lost = card_of(pair, 0).id
    pair.farm.wait_for(lambda: suspended(pair, frozen[1:]))
    pair.farm.wait_for(
        lambda: all(i.state == "done" for i in pair.farm.items(job_id) if i.card_id == lost)
    )
    for process in frozen[1:]:
        process.resume()
    assert pair.settled(job_id) == {"done": 6}
    pair.farm.wait_for(lambda: sum(item.repeated for item in pair.farm.items(job_id)) == 1)
    pair.check(job_id)


def test_the_defaults_move_a_lost_cards_items_within_30_s():
    assert lost_after_s(Settings()) + Settings().heartbeat_s + Settings().reconcile_s < 30


def test_a_worker_that_hangs_in_its_turn_stops_only_its_own_lease(pair):
    job_id = pair.submit(["slow"] * 2, 9.0)  # longer than two leases

    def first():
        """The worker that renewed the leases of both."""
        for path in Path(pair.farm.environment["FARM_STATE_DIR"]).glob("heartbeats-*"):
            with contextlib.suppress(ValueError):  # it is being written
                notes = json.loads(path.read_text())
                turn = [
                    holder
                    for holder, one in notes["workers"].items()
                    if one["at_s"] == notes["begun_at_s"]
                ]
                if turn and len(notes["workers"]) == 2:
                    return turn[0], notes["workers"][turn[0]]["pid"]
        return None

    def lasting():
        """The items whose lease lasts, of those that were claimed first."""
        with pair.farm.database.read() as session:
            now_s = read_clock_s(session)
        items = pair.farm.items(job_id)
        return {
            item.id
            for item in items
            if holders.get(item.id) == item.holder and item.lease_until_s > now_s
        }

    pair.farm.wait_for(
        lambda: sum(item.state == "claimed" for item in pair.farm.items(job_id)) == 2
    )
    holders = {item.id: item.holder for item in pair.farm.items(job_id)}
    holder, pid = pair.farm.wait_for(first)
    (other,) = [item_id for item_id in holders if holders[item_id] != holder]
    hung = psutil.Process(pid)
    hung.suspend()
    try:
        pair.farm.wait_for(lambda: lasting() == {other})
    finally:
        hung.resume()
    assert pair.settled(job_id) == {"done": 2}


@pytest.mark.parametrize("noticed", ["by the next process", "before the next item"])
def test_a_card_that_fails_its_check_is_quarantined_until_a_person_releases_it(pair, noticed):
    bad = Path(pair.farm.environment[UNHEALTHY_VARIABLE])
    sick = card_of(pair, 0).id
    job_id = pair.submit(["slow"] * 8, 0.4)
    pair.in_work(job_id)
    bad.write_text(sick)
    if noticed == "by the next process":
        pair.benchmark().kill()
    assert pair.settled(job_id) == {"done": 8}
    assert card_of(pair, 0).state == "quarantined"
    assert "came out wrong" in card_of(pair, 0).state_reason
    refused = pair.farm.say("cards", "resume", sick)
    assert refused.returncode == 2
    assert "release" in refused.stderr
    bad.write_text("")
    assert pair.farm.say("cards", "release", sick).returncode == 0
    pair.farm.wait_for(lambda: card_of(pair, 0).state == "idle")
    job_id = pair.submit(["slow"] * 4, 0.3)
    assert pair.settled(job_id) == {"done": 4}
    assert sick in measured_on(pair, job_id)


@slow.FAULT
def test_a_card_that_is_unfit_from_its_first_start_is_shown_and_tried_again_when_released(
    start, tmp_path
):
    bad = tmp_path / "bad"
    sick = f"SIM-{Settings().host}-0"
    bad.write_text(sick)
    hurt = start(fit=0, FARM_SIMULATED_UNHEALTHY=str(bad))
    hurt.farm.wait_for(lambda: _row(hurt, sick) and _row(hurt, sick).state == "quarantined")
    row = _row(hurt, sick)
    assert "came out wrong" in row.state_reason
    assert (row.model, row.host, row.software_id) == ("simulated card", Settings().host, None)
    assert row.worker.startswith(f"{sick}@")
    assert sick in hurt.farm.say("doctor").stdout
    job_id = hurt.submit(["", ""], to=[sick])

    hurt.farm.say("cards", "release", sick)
    hurt.farm.wait_for(lambda: _row(hurt, sick).state == "quarantined")  # it is as unfit as before
    assert all(item.attempts == 0 for item in hurt.farm.items(job_id))

    bad.write_text("")
    assert "if it is healthy" in hurt.farm.say("cards", "release", sick).stderr
    assert hurt.settled(job_id) == {"done": 2}
    assert _row(hurt, sick).software_id


def _row(hurt, card_id):
    with hurt.farm.database.read() as session:
        return session.get(tables.CardRow, card_id)
