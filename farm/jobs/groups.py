"""Items that several cards of one host measure together: which cards, their reservation, and who is
next.

The worker of the *leading* card gets the message; its claim reserves all cards of the group or
none. A card's row names the item and token of its newest reservation. It is in force while that
item is in work under that token, so each event that ends a claim ends the reservation, too. If its
cards are not free together, an item is *put off*: its message is used up, and it is published again
when the cards are free (`due`). docs/architecture.md has the rules of fairness."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import update
from sqlmodel import Session, col, or_, select

from farm.jobs.cards import farm_of, present_state
from farm.store import item_state
from farm.store.database import Database, database_now, lock_with_open_jobs, long_ago, read_clock_s
from farm.store.tables import CardRow, CardState, Item, ItemState, Job, JobState

#: The reason that is noted with an item that was put off because its host lacked something
#: (`HostBusy`).
HOST_BUSY_NOTED = "not_available"
#: A message of an item that was put off is in front of its queue. After this time it counts as
#: lost. Unit: s.
LOST_AFTER_S = 600.0


def block_of(cards: Sequence[CardRow], leading_id: str, number: int) -> tuple[str, ...]:
    """Return the ids of a group in the order of its ranks; () if there are too few cards.

    The cards of a host, by index, form blocks of ``number`` cards, and a group gets the block of
    its leading card. So groups of one size share all cards or none, and repeated measurements use
    the same links. The last block may overlap. On a CPU, all ranks share the card."""
    ids = [card.id for card in sorted(cards, key=lambda card: (card.index, card.id))]
    if leading_id not in ids:
        return ()
    if any(card.id == leading_id and card.kind == "cpu" for card in cards):
        return (leading_id,) * number
    begin = min(ids.index(leading_id) // number * number, len(ids) - number)
    return tuple(ids[begin : begin + number]) if begin >= 0 else ()


def leading_cards(cards: Sequence[CardRow], number: int) -> list[CardRow]:
    """Return the first card of each full block of ``number`` cards; [] if no host has so many of
    these cards.
    """
    hosts = {card.host: [other for other in cards if other.host == card.host] for card in cards}
    return [card for card in cards if block_of(hosts[card.host], card.id, number)[:1] == (card.id,)]


def host_of(session: Session, card_id: str, *, lock: bool = False) -> list[CardRow]:
    """Return all cards of a card's host. To lock their rows, call this first in a transaction."""
    host = select(CardRow.host).where(CardRow.id == card_id).scalar_subquery()
    query = select(CardRow).where(col(CardRow.host) == host).order_by(col(CardRow.id))
    if lock:
        query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return list(session.exec(query))


def _alike(cards: Sequence[CardRow], card: CardRow, job: Job) -> list[CardRow]:
    """Return the cards that may measure together with a card for a job: of its model and software,
    and not excluded.
    """
    named = job.asked.get("cards", ()) if job.asked.get("pinned") else [one.id for one in cards]
    kind = (card.model, card.software_id)
    return [one for one in cards if (one.model, one.software_id) == kind and one.id in named]


def _group(host: Sequence[CardRow], item: Any, job: Job, now_s: float) -> tuple[str, ...]:
    """Return the ids of the cards of an item's group that can measure now; () if there are too
    few.
    """
    leading = next(card for card in host if card.id == item.card_id)
    working = [
        one
        for one in host
        if present_state(one, now_s) == CardState.IDLE and farm_of(one.worker) == job.farm
    ]
    return block_of(_alike(working, leading, job), item.card_id, item.cards)


def in_force(session: Session, cards: Sequence[CardRow]) -> dict[str, int]:
    """Return card id -> item id for the reservations in force of these cards."""
    ids = {card.group_item_id for card in cards if card.group_item_id is not None}
    lasting = (
        col(Item.id).in_(ids),
        item_state.in_work(),
        col(Item.lease_until_s) >= database_now(),
    )
    tokens = dict(session.exec(select(Item.id, Item.token).where(*lasting)).all()) if ids else {}
    return {
        card.id: card.group_item_id
        for card in cards
        if card.group_item_id is not None and tokens.get(card.group_item_id) == card.group_token
    }


def _free(session: Session, cards: Sequence[CardRow], item: Any, farm: str) -> bool:
    """True if an item may reserve these cards: no other group has them, and no item on one card has
    the turn.
    """
    held = in_force(session, cards)
    after_group = [
        card.id for card in cards if card.group_item_id is not None and card.id not in held
    ]
    waiting = (
        select(Item.id)
        .join(Job, col(Job.id) == col(Item.job_id))
        .where(col(Item.card_id).in_(after_group), Item.state == ItemState.WAITING, Item.cards == 1)
        .where(col(Item.published_at_s).is_not(None), Job.state == JobState.OPEN, Job.farm == farm)
    )
    return not set(held.values()) - {item.id} and not (
        after_group and session.exec(waiting.limit(1)).first()
    )


def _put_off(*which: Any) -> Any:
    """Return a query for (item, job) of items that wait after they were put off, the oldest
    first.
    """
    # `> 0`, `concat` and `+ 0` let SQLite use the index of such items. Otherwise it reads all
    # waiting items.
    waiting = col(Item.state).concat("") == ItemState.WAITING
    is_put_off = (waiting, col(Item.put_off_at_s) > 0, Job.state == JobState.OPEN)
    joined = select(Item, Job).join(Job, col(Job.id) == col(Item.job_id).concat(""))
    return joined.where(*is_put_off, *which).order_by(col(Item.id) + 0)


def reserve(
    session: Session, host: Sequence[CardRow], item: Any, job: Job, token: str
) -> tuple[str, ...]:
    """Reserve the cards of an item for a claim with this token; return their ids in the order of
    the ranks.

    Returns () and changes nothing if the cards are not free together. ``host``: the locked cards of
    its host."""
    now_s = read_clock_s(session)
    ids = _group(host, item, job, now_s)
    cards = [card for card in host if card.id in ids]
    if not ids or not _free(session, cards, item, job.farm):
        return ()
    older = (
        col(Item.card_id).in_([card.id for card in host]),
        col(Item.id) < item.id,
        Job.farm == job.farm,
    )
    waiting = session.exec(_put_off(*older, Item.cards > 1))
    if any(
        set(ids).intersection(_group(host, other, its_job, now_s)) for other, its_job in waiting
    ):
        return ()
    if cards[0].kind != "cpu":
        reserved = {"group_item_id": item.id, "group_token": token}
        session.execute(update(CardRow).where(col(CardRow.id).in_(ids)).values(reserved))
    return ids


def is_reserved(database: Database, card_id: str) -> bool:
    """True if a group holds the card."""
    with database.read() as session:
        return bool(in_force(session, [session.get_one(CardRow, card_id)]))


def end_turn(session: Session, card_id: str) -> None:
    """Remove the reservation of a card. Groups may reserve the card again."""
    session.execute(
        update(CardRow).where(col(CardRow.id) == card_id).values(group_item_id=None, group_token="")
    )


def due(database: Database, farm: str, card_id: str | None = None) -> list[int]:
    """Return the ids of items of a farm's jobs that were put off and can now reserve their cards.
    They need a message. With ``card_id``, only items whose leading card is on the host of this
    card."""
    lost = long_ago(col(Item.published_at_s), LOST_AFTER_S)
    which = [or_(~item_state.has_message(), lost), Job.farm == farm]
    found: list[int] = []
    taken = set[str]()
    with database.read() as session:
        hosts = {} if card_id is None else {card.id: card for card in host_of(session, card_id)}
        which += [col(Item.card_id).in_(hosts)] if card_id is not None else []
        now_s = read_clock_s(session)
        for item, job in session.exec(_put_off(*which)):
            if item.card_id not in hosts:
                hosts |= {card.id: card for card in host_of(session, item.card_id)}
            host = [card for card in hosts.values() if card.host == hosts[item.card_id].host]
            ids = _group(host, item, job, now_s)
            cards = [card for card in host if card.id in ids]
            if ids and taken.isdisjoint(ids) and _free(session, cards, item, farm):
                found.append(item.id)
            taken.update(ids)
    return found


def waits_for(session: Session, job_id: str) -> str:
    """Describe for what a job's oldest item that was put off waits; "" if none was put off."""
    for item, job in session.exec(_put_off(Job.id == job_id).limit(1)):
        if item.reason == HOST_BUSY_NOTED:
            return f"an item waits. {item.message}"
        host = host_of(session, item.card_id)
        able = _group(host, item, job, read_clock_s(session))
        why = "have measured other items" if able else "work at the same time: start its workers"
        return f"an item waits until {item.cards} cards of {host[0].host} {why}"
    return ""


def move_stranded(
    database: Database, cards: Sequence[CardRow], away: Collection[str], farm: str
) -> list[int]:
    """Move items whose host has too few of the farm's cards, without those ``away`` (absent,
    draining or quarantined), to a host that has enough; return the ids to publish."""
    stranded = or_(col(Item.put_off_at_s).is_not(None), col(Item.card_id).in_(away))
    its: tuple[Any, ...] = (
        Item.cards > 1,
        stranded,
        col(Item.state).in_([ItemState.WAITING, ItemState.CLAIMED]),
    )
    its += (col(Item.lease_until_s) < database_now(),)
    with database.read() as session:  # a write would make others wait, and there are rarely any
        if session.exec(select(Item.id).where(*its).limit(1)).first() is None:
            return []
    moved: list[int] = []
    with database.write() as session:
        jobs, items = lock_with_open_jobs(session, *its, Job.farm == farm)
        for item in items:
            present = session.get_one(CardRow, item.card_id)
            alike = _alike(cards, present, jobs[item.job_id])
            same = (
                Item.job_id == item.job_id,
                Item.subject_id == item.subject_id,
                Item.role == item.role,
            )
            taken = set(session.exec(select(Item.card_id).where(*same)))
            free = [card.id for card in leading_cards(alike, item.cards) if card.id not in taken]
            stays = block_of(
                [card for card in alike if card.host == present.host], item.card_id, item.cards
            )
            if free and not stays and item.id is not None:
                item_state.MOVE.apply(item, card_id=free[0])
                moved.append(item.id)
    return moved
