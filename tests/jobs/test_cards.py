"""The row of a card: announced by its worker, registered when it can measure, drained, quarantined,
released.
"""

from __future__ import annotations

import pytest
from sqlalchemy import update

from farm.devices.device import Card
from farm.devices.simulated import SOFTWARE
from farm.errors import NoSuchCard
from farm.jobs import cards, leases, listing
from farm.jobs.items import DeclineReason
from farm.store import tables
from farm.store.database import database_now
from farm.types.software import Software
from tests import planned
from tests.farms import store_operators
from tests.statements import meanwhile

CARD = Card(
    id="GPU-1",
    kind="cuda",
    model="NVIDIA H200",
    memory_bytes=2**37,
    driver="580",
    index=3,
    host="gpu1",
)


def announce(database, holder="new", card=CARD):
    cards.announce(database, CARD.id, card, holder=holder, queue="card.GPU-1")


def register(database, holder="new"):
    cards.register(database, CARD, Software(torch="2.11.0"), holder=holder, queue="card.GPU-1")


def view(database):
    with database.read() as session:
        (found,) = cards.views(session, 10.0)
        return found


def unseen(database):
    """As if nobody had seen the card for an hour."""
    with database.write() as session:
        row = session.get_one(tables.CardRow, CARD.id)
        row.last_seen_at_s -= 3600
        session.add(row)


def test_what_a_card_does_and_runs_is_listed(any_database):
    ids = planned.register(any_database, 0)
    operators = store_operators(any_database, ["", "", ""])
    first, second = (planned.plan(any_database, ids, operators=operators) for _ in range(2))
    done, held, _ = planned.items_of(any_database, first)
    planned.complete(any_database, planned.claim(any_database, done), "SIM-0")
    planned.claim(any_database, held)
    same = next(
        item
        for item in planned.items_of(any_database, second)
        if item.subject_id == held.subject_id
    )
    assert planned.claim(any_database, same).why is DeclineReason.DEFERRED
    with any_database.read() as session:
        (row,) = listing.registered_cards(session, 10.0)
    assert (row["waiting"], row["deferred"], row["done_last_hour"]) == (4, 1, 1)
    assert (row["worker"], row["queue"]) == ("holder-0", "card.SIM-0")
    assert row["software"] == {"id": SOFTWARE.id, "communication": "", **SOFTWARE.to_json()}


def taking(database):
    with database.read() as session:
        return [
            view.card.id for view in cards.views(session, 10.0) if view.state in ("idle", "busy")
        ]


def test_a_card_is_listed_from_its_workers_start_and_takes_items_once_it_is_registered(
    any_database,
):
    announce(any_database)
    shown = view(any_database)
    assert shown.state == "starting"
    assert (shown.card.model, shown.card.host, shown.card.index, shown.card.worker) == (
        "NVIDIA H200",
        "gpu1",
        3,
        "new",
    )
    assert shown.card.registered_at_s
    assert taking(any_database) == []
    register(any_database)
    assert view(any_database).state == "idle"
    assert taking(any_database) == [CARD.id]


def test_a_worker_that_starts_again_makes_a_lost_card_seen_at_once(any_database):
    register(any_database, "old")
    unseen(any_database)
    assert view(any_database).state == "lost"
    announce(any_database)
    assert view(any_database).state == "starting"
    assert view(any_database).card.worker == "new"
    assert view(any_database).seen_ago_s < 60
    unseen(any_database)
    assert view(any_database).state == "lost", "its worker is gone before it got ready"
    leases.renew(any_database, "new", 0.0, ())
    assert view(any_database).state == "starting"


@pytest.mark.parametrize("take_out", [cards.drain, cards.quarantine])
def test_a_drain_and_a_quarantine_outlive_the_start_of_a_worker(any_database, take_out):
    register(any_database, "old")
    take_out(any_database, CARD.id, "a reason")
    state = view(any_database).state
    announce(any_database)
    register(any_database)
    assert (view(any_database).state, view(any_database).card.state_reason) == (state, "a reason")


@pytest.mark.parametrize("write", [register, announce])
@pytest.mark.parametrize("take_out", [cards.drain, cards.quarantine])
def test_a_card_that_is_taken_out_while_its_worker_writes_stays_out(any_database, write, take_out):
    register(any_database)
    if write is register:
        announce(any_database)
    with meanwhile(
        any_database, "UPDATE card SET", lambda: take_out(any_database, CARD.id, "a reason")
    ):
        write(any_database)
    assert (view(any_database).state, view(any_database).card.state_reason) == (
        "draining" if take_out is cards.drain else "quarantined",
        "a reason",
    )


def test_a_quarantine_outlives_a_drain_of_the_same_moment(any_database):
    register(any_database)
    with meanwhile(
        any_database,
        "UPDATE card SET",
        lambda: cards.quarantine(any_database, CARD.id, "a wrong sum"),
    ):
        cards.drain(any_database, CARD.id)
    assert view(any_database).state == "quarantined"


def test_a_card_that_is_released_waits_for_its_worker_to_find_it_well(any_database):
    announce(any_database)
    cards.quarantine(any_database, CARD.id, "a product came out wrong")
    assert cards.resume(any_database, CARD.id, quarantined=True)
    assert view(any_database).state == "starting"
    register(any_database)
    assert view(any_database).state == "idle"


def test_a_card_whose_worker_left_in_quarantine_is_stopped_when_it_is_released(any_database):
    register(any_database)
    cards.quarantine(any_database, CARD.id, "a product came out wrong")
    cards.stopped(any_database, "new")
    assert view(any_database).state == "quarantined"
    cards.resume(any_database, CARD.id, quarantined=True)
    assert view(any_database).state == "stopped"


def test_a_card_that_its_host_does_not_find_is_announced_only_where_it_is_known(any_database):
    announce(any_database, card=None)
    assert cards.stored_state(any_database, CARD.id) == ""
    with pytest.raises(NoSuchCard):
        cards.quarantine(any_database, CARD.id, "gone")
    register(any_database, "old")
    announce(any_database, card=None)
    assert view(any_database).state == "starting"
    assert (view(any_database).card.worker, view(any_database).card.model) == ("new", "NVIDIA H200")


def test_a_registered_card_is_found_by_any_name_that_means_it_alone(database):
    first, second = planned.register(database, 1, 12)
    with database.read() as session:
        assert [cards.find(session, word).id for word in ("sim-1", "SIM-12", "12", "here:1")] == [
            first,
            second,
            second,
            first,
        ]
        for word, said in (
            ("SIM", f"matches several cards: {first}, {second}."),
            ("7", "No card '7'"),
            ("", "No card ''"),
        ):
            with pytest.raises(NoSuchCard, match=said):
                cards.find(session, word)


def test_after_the_clock_was_set_back_a_card_is_silent_since_its_newest_item(any_database, clock):
    (card_id,) = planned.register(any_database, 0)
    planned.plan(any_database, [card_id])
    set_times(any_database, published_at_s=database_now())
    clock.back(3600)

    def silent_s():
        with any_database.read() as session:
            card = session.get_one(tables.CardRow, card_id)
            return cards.silent_times_s(session, [card])[card_id]

    assert silent_s() == pytest.approx(3600, abs=30)
    set_times(any_database, started_at_s=database_now() - 10)
    assert silent_s() == pytest.approx(10, abs=30), (
        "it has begun an item since the clock was set back"
    )


def set_times(database, **times):
    with database.write() as session:
        session.execute(update(tables.Item).values(times))
