"""Items that several cards of one host measure together: which cards, their reservation, and who is next.

The worker of the *leading* card gets the item's message. Its claim reserves all cards of the group or none.

* The row of a card names the item and the token of its newest reservation. A reservation is in force while that item is
  in work under that token and its lease lasts. So each event that ends a claim (a reading, a failure, a cancelled or
  moved item, an ended lease) ends the reservation too, in the same transaction.
* The claim locks the rows of all cards of the host, in the order of their ids. The claim of an item on one card locks
  its card's row shared. So it either commits before the reservation, and the group waits for its end, or it sees the
  reservation.
* A card begins a waiting item on one card between two groups: only the claim of such an item removes an ended
  reservation, and a group does not reserve a card that has an ended reservation while such items wait for it.
* If its cards are not free together, a group item is *put off*: its message is used up, and it is published again, in
  front of the queue, when its cards are free (`due`). Older items come first: a group does not reserve a card that an
  older item which was put off needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import update
from sqlmodel import Session, col, or_, select

from farm.jobs import item_state
from farm.jobs.cards import farm_of, present_state
from farm.store.database import Database, database_now, lock_with_open_jobs, read_clock_s
from farm.store.tables import CardRow, CardState, Item, ItemState, Job, JobState

#: A message of an item that was put off is in front of its queue. After this time it counts as lost. Unit: s.
LOST_AFTER_S = 600.0


def lock_host(session: Session, card_id: str) -> list[CardRow]:
    """Lock the rows of all cards of a card's host and return them. Call this first in a transaction."""
    host = select(CardRow.host).where(CardRow.id == card_id).scalar_subquery()
    query = select(CardRow).where(col(CardRow.host) == host).order_by(col(CardRow.id))
    return list(session.exec(query.with_for_update(key_share=True).execution_options(populate_existing=True)))


def block_of(cards: Sequence[CardRow], leading_id: str, number: int) -> tuple[str, ...]:
    """Return the ids of a group in the order of its ranks; () if there are too few cards.

    The cards of a host, by index, form blocks of ``number`` cards, and a group gets the block of its leading card. So
    groups of one size share all cards or none, and repeated measurements use the same links. The last block may
    overlap. On a CPU, all ranks share the card.
    """
    in_order = sorted(cards, key=lambda card: (card.index, card.id))
    ids = [card.id for card in in_order]
    if leading_id not in ids:
        return ()
    if in_order[ids.index(leading_id)].kind == "cpu":
        return (leading_id,) * number
    begin = min(ids.index(leading_id) // number * number, len(ids) - number)
    return tuple(ids[begin : begin + number]) if begin >= 0 else ()


def leading_cards(cards: Sequence[CardRow], number: int) -> list[CardRow]:
    """Return the first card of each block of ``number`` cards; [] if no host has so many of these cards."""
    hosts: dict[str, list[CardRow]] = defaultdict(list)
    for card in cards:
        hosts[card.host].append(card)
    firsts = {block[0] for alike in hosts.values() for card in alike if (block := block_of(alike, card.id, number))}
    return [card for card in cards if card.id in firsts]


def _group(session: Session, host: Sequence[CardRow], item: Item, job: Job) -> tuple[str, ...]:
    """Return the ids of the cards of an item's group that can measure now; () if there are too few."""
    leading = next(card for card in host if card.id == item.card_id)
    now_s = read_clock_s(session)
    pinned = set(job.asked.get("cards", ())) if job.asked.get("pinned") else None
    usable = [
        card
        for card in host
        if (card.model, card.software_id) == (leading.model, leading.software_id)
        and present_state(card, now_s) == CardState.IDLE
        and farm_of(card.worker) == job.farm
        and (pinned is None or card.id in pinned)
    ]
    return block_of(usable, item.card_id, item.cards)


def in_force(session: Session, cards: Sequence[Any]) -> dict[str, int]:
    """Return card id -> item id for the reservations in force of these rows (id, group_item_id, group_token)."""
    ids = {card.group_item_id for card in cards if card.group_item_id is not None}
    if not ids:
        return {}
    lasting = sqlalchemy.select(col(Item.id), col(Item.token)).where(
        col(Item.id).in_(ids), item_state.in_work(), col(Item.lease_until_s) >= database_now()
    )
    tokens: Mapping[int | None, str] = dict(session.execute(lasting).all())  # type: ignore[arg-type]
    return {card.id: card.group_item_id for card in cards if tokens.get(card.group_item_id) == card.group_token}


def _free(session: Session, cards: Sequence[CardRow], item: Item, farm: str) -> bool:
    """True if an item may reserve these cards: no other group has them, and no item on one card has the turn."""
    held = in_force(session, cards)
    if any(held.get(card.id, item.id) != item.id for card in cards):
        return False
    after_group = [card.id for card in cards if card.group_item_id is not None and card.id not in held]
    waiting = (
        select(Item.id)
        .join(Job, col(Job.id) == col(Item.job_id))
        .where(col(Item.card_id).in_(after_group), Item.state == ItemState.WAITING, Item.cards == 1)
        .where(col(Item.published_at_s).is_not(None), Job.state == JobState.OPEN, Job.farm == farm)
    )
    return not after_group or session.exec(waiting.limit(1)).first() is None


def _put_off(*which: Any) -> Any:
    """Return a query for (item, job) of items that wait after they were put off, the oldest first."""
    is_put_off = (Item.state == ItemState.WAITING, col(Item.put_off_at_s).is_not(None), Job.state == JobState.OPEN)
    joined = select(Item, Job).join(Job, col(Job.id) == col(Item.job_id))
    return joined.where(*is_put_off, *which).order_by(col(Item.id))


def reserve(session: Session, host: Sequence[CardRow], item: Item, job: Job, token: str) -> tuple[str, ...]:
    """Reserve the cards of an item for a claim with this token; return their ids in the order of the ranks.

    Returns () and changes nothing if the cards are not free together.

    Args:
        host: the cards of its host, from `lock_host`.
    """
    ids = _group(session, host, item, job)
    cards = [card for card in host if card.id in ids]
    if not ids or not _free(session, cards, item, job.farm):
        return ()
    older = (col(Item.card_id).in_([card.id for card in host]), col(Item.id) < item.id, Job.farm == job.farm)
    if any(set(_group(session, host, *other)).intersection(ids) for other in session.exec(_put_off(*older))):
        return ()
    if cards[0].kind != "cpu":
        session.execute(
            update(CardRow).where(col(CardRow.id).in_(ids)).values(group_item_id=item.id, group_token=token)
        )
    return ids


def is_reserved(session: Session, card_id: str) -> bool:
    """True if a group holds the card."""
    return bool(in_force(session, _reservations(session, CardRow.id == card_id)))


def end_turn(session: Session, card_id: str) -> None:
    """Remove the ended reservation of a card that begins an item on one card. Groups may reserve the card again."""
    session.execute(update(CardRow).where(col(CardRow.id) == card_id).values(group_item_id=None, group_token=""))


def _reservations(session: Session, *which: Any) -> Sequence[Any]:
    columns = (CardRow.id, CardRow.group_item_id, CardRow.group_token)
    return session.execute(sqlalchemy.select(*columns).where(*which)).all()  # type: ignore[call-overload, no-any-return]


def held_cards(session: Session) -> dict[str, int]:
    """Return card id -> item id for all cards that groups hold."""
    return in_force(session, _reservations(session, col(CardRow.group_item_id).is_not(None)))


def due(database: Database, farm: str, card_id: str | None = None) -> list[int]:
    """Return the ids of items that were put off and can now reserve their cards. They need a message.

    Args:
        farm: only jobs of this farm.
        card_id: only items whose leading card is on the host of this card.
    """
    lost = col(Item.published_at_s) < database_now() - LOST_AFTER_S
    which = [or_(~item_state.has_message(), lost), Job.farm == farm]
    if card_id is not None:
        host_of = select(CardRow.host).where(CardRow.id == card_id).scalar_subquery()
        which.append(col(Item.card_id).in_(select(CardRow.id).where(col(CardRow.host) == host_of)))
    with database.read() as session:
        found: list[int] = []
        taken: set[str] = set()
        hosts: dict[str, list[CardRow]] = {}
        for item, job in session.exec(_put_off(*which)):
            host = session.get_one(CardRow, item.card_id).host
            if host not in hosts:
                hosts[host] = list(session.exec(select(CardRow).where(CardRow.host == host)))
            ids = _group(session, hosts[host], item, job)
            cards = [card for card in hosts[host] if card.id in ids]
            if ids and taken.isdisjoint(ids) and _free(session, cards, item, farm):
                found.append(item.id)
            taken.update(ids)
        return found


def waits_for(session: Session, job_id: str) -> str:
    """Describe for which cards a job's oldest item that was put off waits; "" if none was put off."""
    found = session.exec(_put_off(Item.job_id == job_id).limit(1)).first()
    if found is None:
        return ""
    leading = session.get_one(CardRow, found[0].card_id)
    host = session.exec(select(CardRow).where(CardRow.host == leading.host)).all()
    needed = f"an item waits for {found[0].cards} cards of {leading.host} ({leading.model})"
    if _group(session, host, *found):
        return f"{needed}, which measure other items"
    return f"{needed} that work at the same time: start its workers, or give its cards work again"


def move_stranded(database: Database, cards: Sequence[CardRow], away: Collection[str], farm: str) -> list[int]:
    """Move items whose host has too few cards to a host that has enough; return the ids to publish.

    Args:
        cards: the cards of the farm that are not ``away`` (absent, draining or quarantined).
    """
    has_ended = col(Item.lease_until_s) < database_now()
    stranded = or_(col(Item.put_off_at_s).is_not(None), col(Item.card_id).in_(away))
    its = (Item.cards > 1, stranded, col(Item.state).in_([ItemState.WAITING, ItemState.CLAIMED]), has_ended)
    with database.read() as session:
        if session.exec(select(Item.id).where(*its).limit(1)).first() is None:
            return []
    with database.write() as session:
        jobs, items = lock_with_open_jobs(session, *its, Job.farm == farm)
        moved: list[int] = []
        for item in items:
            asked = jobs[item.job_id].asked
            kind = session.get_one(CardRow, item.card_id)
            alike = [
                card
                for card in cards
                if (card.model, card.software_id) == (kind.model, kind.software_id)
                and (not asked.get("pinned") or card.id in asked.get("cards", ()))
            ]
            on_host = [card for card in alike if card.host == kind.host]
            taken = select(Item.card_id).where(
                Item.job_id == item.job_id, Item.subject_id == item.subject_id, Item.protocol_id == item.protocol_id
            )
            free = [one for one in leading_cards(alike, item.cards) if one.id not in set(session.exec(taken))]
            if not block_of(on_host, item.card_id, item.cards) and free and item.id is not None:
                item_state.MOVE.apply(item, card_id=free[0].id)
                moved.append(item.id)
        return moved
