"""Items on several cards: all cards or none, in turn with the items on one card, and each group in
its turn.
"""

from __future__ import annotations

import dataclasses

import pytest
from sqlalchemy import update
from sqlmodel import select

from farm.devices.simulated import SOFTWARE
from farm.errors import UsageError
from farm.jobs import cards, groups, items, jobs, leases
from farm.jobs.group_driver import GroupInterrupted, check_cards, peers_at_work
from farm.jobs.groups import block_of, leading_cards
from farm.jobs.items import Claim, DeclineReason
from farm.store import content, tables
from farm.store.database import database_now
from farm.store.tables import CardRow, ItemState
from tests.planned import claim, complete, items_of, plan, readings, register
from tests.statements import meanwhile


def interruption(database, claimed):
    """Why a group has to end, and whether the attempt counts."""
    try:
        check_cards(database, claimed)
    except GroupInterrupted as error:
        return error.args
    return "", False


def row(number, host="here", kind="simulated"):
    return CardRow(id=f"{host}-{number}", kind=kind, model="a card", host=host, index=number)


def only(database, job_id):
    (item,) = items_of(database, job_id)
    return item


def published(database, *job_ids):
    """As after their messages were sent."""
    with database.write() as session:
        its = tables.Item.job_id.in_(job_ids)
        session.execute(
            update(tables.Item).where(its).values(published_at_s=database_now(), message_used=False)
        )


def card_rows(database):
    with database.read() as session:
        return {card.id: card for card in session.exec(tables.CardRow.__table__.select())}


def held(database):
    with database.read() as session:
        return groups.in_force(session, session.exec(select(CardRow)).all())


@pytest.fixture
def four(any_database):
    return register(any_database, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("leading", "number", "block"),
    [
        (0, 2, (0, 1)),
        (1, 2, (0, 1)),
        (3, 2, (2, 3)),
        (4, 2, (3, 4)),
        (2, 5, (0, 1, 2, 3, 4)),
        (2, 6, ()),
    ],
)
def test_the_cards_of_a_host_form_blocks(leading, number, block):
    cards_of_host = [row(place) for place in (3, 1, 0, 2, 4)]
    assert block_of(cards_of_host, f"here-{leading}", number) == tuple(
        f"here-{place}" for place in block
    )


def test_a_group_leads_a_block_of_a_host_that_has_enough_cards():
    there = [row(0), row(1), row(2), row(0, "there"), row(1, "there")]
    assert [card.id for card in leading_cards(there, 2)] == ["here-0", "there-0"]
    assert [card.id for card in leading_cards(there, 3)] == ["here-0"]
    assert leading_cards(there, 4) == []
    assert block_of([row(0, kind="cpu")], "here-0", 3) == ("here-0",) * 3, "the ranks share a CPU"


def test_a_job_for_more_cards_than_a_host_has_is_refused(any_database, four):
    with pytest.raises(UsageError, match=r"5 cards of one host, .* more than 4") as refused:
        plan(any_database, four, cards=5)
    assert "farm cards" in refused.value.next_step


def test_a_claim_reserves_all_cards_and_its_reading_releases_them(any_database, four):
    group, alone = (plan(any_database, four, cards=number) for number in (4, 1))
    claimed = claim(any_database, only(any_database, group))
    assert claimed.cards == tuple(four)
    assert held(any_database) == dict.fromkeys(four, claimed.item_id)
    item = only(any_database, alone)
    assert claim(any_database, item).why is DeclineReason.RESERVED
    assert item.card_id in held(any_database)
    assert complete(any_database, claimed, claimed.cards[0]).accepted
    assert held(any_database) == {}
    assert claim(any_database, item).after_group
    assert readings(any_database) == 1


@pytest.mark.parametrize("library", ["simulated", "nccl 2.28.9 NCCL_ALGO=Ring over NVLink x18", ""])
def test_a_reading_of_a_group_serves_other_jobs_with_the_same_communication(
    any_database, four, library
):
    with any_database.write() as session:
        together = content.store_software(
            session, dataclasses.replace(SOFTWARE, communication="simulated")
        )
    first = only(any_database, plan(any_database, four, cards=4))
    waits = only(any_database, plan(any_database, four, operators=[first.subject_id], cards=4))
    claimed = claim(any_database, first)
    complete(any_database, claimed, claimed.cards[0], software_id=together)
    with any_database.write() as session:  # the workers start again with these settings
        session.execute(update(CardRow).values(links={"communication": library}))
    again = only(any_database, plan(any_database, four, operators=[first.subject_id], cards=4))
    alone = only(any_database, plan(any_database, four, operators=[first.subject_id]))
    assert (again.state == ItemState.DONE) == (library == "simulated")
    assert alone.state == ItemState.WAITING
    found = claim(any_database, waits)
    assert (
        (found.why is DeclineReason.REUSED)
        if library == "simulated"
        else (found.cards == tuple(four))
    )


@pytest.mark.parametrize(
    "end", ["lease", "cancel", "fail", "hand back", "worker", "worker of a peer"]
)
def test_a_reservation_ends_with_its_claim(any_database, four, end):
    item = only(any_database, plan(any_database, four, cards=4))
    claimed = claim(any_database, item, "holder-0", lease_s=-1 if end == "lease" else 60)
    if end == "cancel":
        jobs.cancel(any_database, item.job_id)
        assert held(any_database), "the ranks have not ended yet"
        assert interruption(any_database, claimed) == ("its job was cancelled", False)
        items.put_off(any_database, claimed, "its job was cancelled", counted=False)
    elif end == "fail":
        items.fail(any_database, claimed, "raised", "an error")
    elif end == "hand back":
        leases.hand_back(any_database, "holder-0")
    elif end != "lease":
        leases.release_card(any_database, four[0 if end == "worker" else 2])
        assert interruption(any_database, claimed)[1]
        if end == "worker of a peer":
            items.put_off(any_database, claimed, "why", counted=True)
    assert held(any_database) == {}


def test_a_peer_ends_the_item_that_it_has_begun(any_database, four):
    alone = [
        claim(any_database, item, item.card_id)
        for item in items_of(any_database, plan(any_database, four))
    ]
    group = claim(any_database, only(any_database, plan(any_database, four, cards=4)))
    assert peers_at_work(any_database, group)
    assert complete(any_database, alone[0], four[0]).accepted
    assert not peers_at_work(any_database, group)


def test_a_group_whose_cards_are_in_use_waits_without_a_message_until_they_are_free(
    any_database, four
):
    first, second = (only(any_database, plan(any_database, four, cards=4)) for _ in range(2))
    published(any_database, first.job_id, second.job_id)
    claimed = claim(any_database, first)
    assert claim(any_database, second).why is DeclineReason.PUT_OFF
    assert groups.due(any_database, "") == []
    again = only(any_database, second.job_id)
    assert (again.state, again.attempts, again.token) == (ItemState.WAITING, 0, "")
    assert complete(any_database, claimed, four[0]).accepted
    assert groups.due(any_database, "", four[3]) == [second.id]
    published(any_database, second.job_id)
    assert groups.due(any_database, "") == [], "it has a message"
    assert isinstance(claim(any_database, second), Claim)


def test_between_two_groups_each_card_begins_an_item_that_waits(any_database, four):
    first, second = (only(any_database, plan(any_database, four, cards=4)) for _ in range(2))
    alone = items_of(any_database, plan(any_database, four, number=8))
    published(any_database, first.job_id, second.job_id, alone[0].job_id)
    complete(any_database, claim(any_database, first), four[0])
    assert claim(any_database, second).why is DeclineReason.PUT_OFF
    for number, card_id in enumerate(four):
        assert groups.due(any_database, "") == []
        begun = claim(
            any_database, next(item for item in alone if item.card_id == card_id), card_id
        )
        assert begun.after_group
        assert number < 3 or groups.due(any_database, "") == [second.id]
    assert claim(any_database, second).cards == tuple(four), "the others of the eight wait now"


def test_a_group_never_takes_a_card_that_an_older_one_waits_for(any_database, four):
    lower = only(any_database, plan(any_database, four[:2], cards=2))
    whole = only(any_database, plan(any_database, four, cards=4))
    upper = only(any_database, plan(any_database, four[2:], cards=2))
    published(any_database, lower.job_id, whole.job_id, upper.job_id)
    claimed = claim(any_database, lower)
    assert claim(any_database, whole).why is DeclineReason.PUT_OFF
    assert claim(any_database, upper).why is DeclineReason.PUT_OFF, (
        "its cards are free, but the older needs them"
    )
    complete(any_database, claimed, four[0])
    assert groups.due(any_database, "") == [whole.id]
    complete(any_database, claim(any_database, whole), four[0])
    assert groups.due(any_database, "") == [upper.id]
    cards.drain(any_database, four[0])
    later = only(any_database, plan(any_database, four, cards=4))
    assert claim(any_database, later).why is DeclineReason.GONE, "its leading card is draining"


def test_groups_on_other_cards_of_a_host_measure_at_the_same_time(any_database, four):
    lower, upper = (
        only(any_database, plan(any_database, ids, cards=2)) for ids in (four[:2], four[2:])
    )
    assert claim(any_database, lower).cards == tuple(four[:2])
    assert claim(any_database, upper, "another").cards == tuple(four[2:])


@pytest.mark.parametrize("state", ["draining", "quarantined", "stopped", "lost"])
def test_a_group_needs_all_its_cards_at_work_and_ends_when_one_is_not(
    any_database, four, clock, state
):
    item = only(any_database, plan(any_database, four, cards=4))
    claimed = claim(any_database, item, lease_s=600)
    assert interruption(any_database, claimed) == ("", False)
    if state == "lost":
        clock.forward(60)
        for number in (0, 1, 3):
            leases.renew(any_database, f"holder-{number}", 60.0)
    else:
        with any_database.write() as session:
            session.get_one(CardRow, four[2]).state = state
    reason, counted = interruption(any_database, claimed)
    assert four[2] in reason
    assert counted == (state == "lost")
    items.put_off(any_database, claimed, "why", counted=counted)
    assert only(any_database, item.job_id).attempts == int(counted)
    assert claim(any_database, item).why is DeclineReason.PUT_OFF
    assert groups.due(any_database, "") == []


def test_a_group_moves_to_a_host_that_has_enough_cards(any_database, four):
    item = only(any_database, plan(any_database, four, cards=4))
    published(any_database, item.job_id)
    others = [
        CardRow(
            id=f"there-{number}",
            kind="simulated",
            model="a card",
            host="there",
            index=number,
            software_id=card_rows(any_database)[four[0]].software_id,
        )
        for number in range(4)
    ]
    with any_database.write() as session:
        session.add_all(others)
    cards.drain(any_database, four[1])
    assert claim(any_database, item).why is DeclineReason.PUT_OFF
    with any_database.read() as session:
        rows = {
            card_id: session.get_one(CardRow, card_id)
            for card_id in (*four, *(card.id for card in others))
        }
    present = [card for card_id, card in rows.items() if card_id != four[1]]
    assert groups.move_stranded(any_database, present[:3], {four[1]}, "") == [], (
        "no other host has four"
    )
    assert groups.move_stranded(any_database, present, {four[1]}, "") == [item.id]
    assert only(any_database, item.job_id).card_id == "there-0"


def test_a_group_sees_an_item_that_a_card_begins_at_the_same_time(any_database):
    """The claim of the item has read the card's row without a reservation, and has not ended
    yet.
    """
    ids = register(any_database, 0, 1)
    alone = only(any_database, plan(any_database, ids[1:]))
    group = only(any_database, plan(any_database, ids, cards=2))

    def reserve():
        claimed = claim(any_database, group)
        return peers_at_work(any_database, claimed)

    with meanwhile(any_database, "UPDATE item SET", reserve) as at_work:
        assert isinstance(claim(any_database, alone, "another"), Claim)
    assert at_work == [True]
