"""Moving work between cards: away from one that is lost, drained or quarantined, and towards one that runs dry.

A move is a reassignment in the database and a new message; the old message finds its claim gone. Everything here is a
transaction that returns what wants publishing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import update
from sqlmodel import Session, col, func, select

from farm.placement import Queue, Work, balance
from farm.planning import new_item, place_items
from farm.store import tables
from farm.store.batches import in_batches
from farm.store.database import Database, database_now
from farm.store.tables import OPEN, Item, ItemState, JobState


def move_items(
    database: Database, card_id: str, peers: Sequence[tables.Card], *, in_work: bool = True, farm: str = ""
) -> list[int]:
    """Reassign a card's open items to its peers, where there are any; the ids of those that want publishing.

    A tuple goes to the peer that is free first. A whole or a canary is about this very card and cannot move: it
    closes as failed, and the verdict goes by the cards that are left. Late writes of the old card are fenced out.

    Args:
        in_work: also what the card holds a lease on: right for a card that is gone, wrong for one that drains.
        farm: whose jobs; a message goes to one farm's broker.
    """
    if not peers:
        return []
    with database.write() as session:
        held = (
            select(Item)
            .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
            .where(Item.card_id == card_id, col(Item.state).in_(OPEN), tables.Job.farm == farm)
        )
        if not in_work:
            held = held.where(col(Item.lease_until_s) < database_now())
        if session.get_bind().dialect.name == "postgresql":
            held = held.with_for_update(of=Item)
        stranded = list(session.exec(held))
        movable = []
        for item in stranded:
            item.token, item.claim_key, item.lease_until_s = "", None, 0.0
            if item.role == "tuple":
                movable.append(item)
                item.state, item.holder = ItemState.WAITING, ""
            else:
                item.state, item.reason = ItemState.FAILED, "not_available"
                item.message = "The card left the farm before it could be measured on it."
                item.ended_at_s = database_now()  # type: ignore[assignment]
        place_items(session, movable, peers)
        session.add_all(stranded)
        session.flush()
        wholes = _whole_where_it_lacks(session, movable)
        return [item.id for item in [*wholes, *movable] if item.id is not None]


def rebalance(database: Database, cards: Sequence[tables.Card], *, dry_within_s: float, farm: str = "") -> list[int]:
    """Give cards that run dry waiting tuples of the fullest ones; the ids of those that want publishing.

    Args:
        cards: working cards of one model and one software.
        dry_within_s: a card with less to do than this is given more. Unit: s.
        farm: whose jobs.
    """
    ids = [card.id for card in cards]
    with database.read() as session:
        slowness = _slowness(session, ids)
        open_s = {
            card_id: (float(expected_s or 0.0), int(number))
            for card_id, expected_s, number in session.execute(
                select(Item.card_id, func.sum(Item.expected_s), func.count())
                .where(col(Item.card_id).in_(ids), col(Item.state).in_(OPEN))
                .group_by(col(Item.card_id))
            )
        }
        dry = [c for c in ids if slowness.get(c, 1.0) * open_s.get(c, (0.0, 0))[0] < dry_within_s]
        if not dry or all(number <= 1 for _, number in open_s.values()):
            return []
        waiting = session.execute(
            select(Item.id, Item.card_id, Item.expected_s)
            .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
            .where(
                col(Item.card_id).in_(ids),
                Item.state == ItemState.WAITING,
                Item.role == "tuple",
                tables.Job.state == JobState.OPEN,
                tables.Job.farm == farm,
                col(Item.job_id).not_in(_pinned_elsewhere(session, ids)),
            )
            .order_by(col(Item.id))
        ).all()
    queues = {c: Queue(c, [], open_s.get(c, (0.0, 0))[0], slowness.get(c, 1.0)) for c in ids}
    for item_id, card_id, expected_s in waiting:
        queues[card_id].waiting.append(Work(item_id, expected_s))
        queues[card_id].busy_s = max(0.0, queues[card_id].busy_s - expected_s)
    moves = balance(list(queues.values()), dry_within_s=dry_within_s)
    if not moves:
        return []
    moved = []
    with database.write() as session:
        for item_id, card_id in sorted(moves.items()):
            # Only what still waits: the card it is taken from goes on working meanwhile.
            taken = session.execute(
                update(Item)
                .where(col(Item.id) == item_id, col(Item.state) == ItemState.WAITING)
                .values(card_id=card_id, token="", holder="")
            )
            if taken.rowcount:  # type: ignore[attr-defined]
                moved.append(item_id)
        items: list[Item] = []
        for batch in in_batches(moved):
            items += session.exec(select(Item).where(col(Item.id).in_(batch)))
        wholes = _whole_where_it_lacks(session, items)
        return [item.id for item in wholes if item.id is not None] + moved


def _pinned_elsewhere(session: Session, card_ids: Sequence[str]) -> list[str]:
    """Open jobs for which a person named cards, and not all of these: what waits for them stays where it is."""
    query = select(tables.Job).where(tables.Job.state == JobState.OPEN)
    return [
        job.id
        for job in session.exec(query)
        if job.request.get("pinned") and not set(card_ids) <= set(job.request["cards"])
    ]


def _slowness(session: Session, card_ids: Sequence[str], of_last_s: float = 900.0) -> dict[str, float]:
    """Taken over expected seconds of what each card did lately; only what took several items to tell."""
    rows = session.execute(
        select(Item.card_id, func.sum(Item.expected_s), func.sum(Item.ended_at_s - Item.started_at_s), func.count())  # type: ignore[operator]
        .where(
            col(Item.card_id).in_(card_ids),
            Item.state == ItemState.DONE,
            col(Item.reused).is_(False),
            Item.role == "tuple",
            col(Item.started_at_s).is_not(None),
            col(Item.ended_at_s) > database_now() - of_last_s,
        )
        .group_by(col(Item.card_id))
    ).all()
    return {c: max(0.01, taken_s / expected_s) for c, expected_s, taken_s, n in rows if n >= 5 and expected_s > 0}


def _whole_where_it_lacks(session: Session, moved: Sequence[Item]) -> list[Item]:
    """A card that contributes tuples measures the whole as well: the verdict holds each card against itself."""
    added = []
    for job_id, card_id in sorted({(item.job_id, item.card_id) for item in moved}):
        job = session.get_one(tables.Job, job_id)
        if job.variant_id is None:
            continue
        there = session.exec(select(Item).where(Item.job_id == job_id, Item.role == "whole")).all()
        if not there or any(item.card_id == card_id for item in there):
            continue
        card = session.get_one(tables.Card, card_id)
        whole = new_item(job, card, "whole", "variant", job.variant_id, there[0].protocol_id, there[0].expected_s)
        session.add(whole)
        added.append(whole)
    session.flush()
    return added
