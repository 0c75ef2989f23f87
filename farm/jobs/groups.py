"""Items that several cards of one host measure together: which cards, their reservation, and who is
next.

The worker of the *leading* card gets the message; its claim reserves all cards of the group or
none. A card's row names the item and token of its newest reservation. It is in force while that
item is in work under that token, so each event that ends a claim ends the reservation, too. If its
cards are not free together, an item is *put off*: its message is used up, and it is published again
when the cards are free (`due`). docs/design/item-states.md has the rules of fairness."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import update
from sqlmodel import Session, and_, col, or_, select

from farm.jobs.cards import farm_of, present_state
from farm.store import item_state
from farm.store.database import Database, database_now, lock_with_open_jobs, long_ago, read_clock_s
from farm.store.tables import CardRow, CardState, Item, ItemState, Job, JobState

#: The reason that is noted with an item that was put off because its host lacked something
#: (`HostBusy`).
HOST_BUSY_NOTED = "not_available"
#: Why an item was put off whose model is being compiled. Its worker publishes it at the end of the
#: compilation; if the worker has ended, others do after this time. Unit: s.
COMPILING, COMPILING_LOST_AFTER_S = (
    "the model is being compiled, and the card measures other items meanwhile",
    60.0,
)
#: A message of an item that was put off is in front of its queue. After this time it counts as
#: lost. Unit: s.
LOST_AFTER_S = 600.0


def block_of(cards: Sequence[CardRow], leading_id: str, number: int) -> tuple[str, ...]:
    """Return the ids of a group in the order of its ranks; () if there are too few cards.

    The cards of a host, by index, form blocks of ``number`` cards, and a group gets the block of
    its leading card. So groups of one size share all cards or none, and repeated measurements use
    the same links. The last block may overlap. On a CPU, all ranks share the card."""
    in_order = sorted(cards, key=lambda card: (card.index, card.id))
    ids = [card.id for card in in_order]
    if leading_id not in ids:
        return ()

    leading = in_order[ids.index(leading_id)]
    if leading.is_cpu:
        return (leading_id,) * number
    if len(ids) < number:
        return ()

    begin = ids.index(leading_id) // number * number
    begin = min(begin, len(ids) - number)
    return tuple(ids[begin : begin + number])


def leading_cards(cards: Sequence[CardRow], number: int) -> list[CardRow]:
    """Return the first card of each full block of ``number`` cards; [] if no host has so many of
    these cards.
    """
    leading = []
    for card in cards:
        of_host = [other for other in cards if other.host == card.host]
        block = block_of(of_host, card.id, number)
        if block and block[0] == card.id:
            leading.append(card)
    return leading


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
    alike = [
        other
        for other in cards
        if other.model == card.model and other.software_id == card.software_id
    ]
    if not job.asked.get("pinned"):
        return alike

    selected = job.asked.get("cards", ())
    return [other for other in alike if other.id in selected]


def _group(host: Sequence[CardRow], item: Any, job: Job, now_s: float) -> tuple[str, ...]:
    """Return the ids of the cards of an item's group that can measure now; () if there are too
    few.
    """
    leading = next(card for card in host if card.id == item.card_id)
    idle = [card for card in host if present_state(card, now_s) == CardState.IDLE]
    of_farm = [card for card in idle if farm_of(card.worker) == job.farm]
    return block_of(_alike(of_farm, leading, job), item.card_id, item.cards)


def in_force(session: Session, cards: Sequence[CardRow]) -> dict[str, int]:
    """Return card id -> item id for the reservations in force of these cards."""
    item_ids = {card.group_item_id for card in cards if card.group_item_id is not None}
    if not item_ids:
        return {}

    query = (
        select(Item.id, Item.token)
        .where(col(Item.id).in_(item_ids))
        .where(item_state.in_work())
        .where(col(Item.lease_until_s) >= database_now())
    )
    tokens = dict(session.exec(query).all())

    reservations = {}
    for card in cards:
        item_id = card.group_item_id
        if item_id is not None and tokens.get(item_id) == card.group_token:
            reservations[card.id] = item_id
    return reservations


def _free(session: Session, cards: Sequence[CardRow], item: Any, farm: str) -> bool:
    """True if an item may reserve these cards: no other group has them, and no item on one card has
    the turn.
    """
    reservations = in_force(session, cards)
    if any(item_id != item.id for item_id in reservations.values()):
        return False

    after_group = [
        card.id for card in cards if card.group_item_id is not None and card.id not in reservations
    ]
    if not after_group:
        return True

    waiting = (
        select(Item.id)
        .join(Job, col(Job.id) == col(Item.job_id))
        .where(col(Item.card_id).in_(after_group))
        .where(Item.state == ItemState.WAITING)
        .where(Item.cards == 1)
        .where(col(Item.published_at_s).is_not(None))
        .where(Job.state == JobState.OPEN)
        .where(Job.farm == farm)
    )
    return session.exec(waiting.limit(1)).first() is None


def _put_off(*conditions: Any) -> Any:
    """Return a query for (item, job) of items that wait after they were put off, the oldest
    first.
    """
    # `> 0`, `concat` and `+ 0` let SQLite use the index of such items. Otherwise it reads all
    # waiting items.
    return (
        select(Item, Job)
        .join(Job, col(Job.id) == col(Item.job_id).concat(""))
        .where(col(Item.state).concat("") == ItemState.WAITING)
        .where(col(Item.put_off_at_s) > 0)
        .where(Job.state == JobState.OPEN)
        .where(*conditions)
        .order_by(col(Item.id) + 0)
    )


def _is_next(
    session: Session,
    host: Sequence[CardRow],
    ids: Collection[str],
    item: Any,
    job: Job,
    now_s: float,
) -> bool:
    """True if no older item of several cards, which was put off, needs one of the cards ``ids``."""
    older = _put_off(
        col(Item.card_id).in_([card.id for card in host]),
        col(Item.id) < item.id,
        Job.farm == job.farm,
        Item.cards > 1,
    )
    for older_item, older_job in session.exec(older):
        needed = _group(host, older_item, older_job, now_s)
        if not set(ids).isdisjoint(needed):
            return False
    return True


def reserve(
    session: Session, host: Sequence[CardRow], item: Any, job: Job, token: str
) -> tuple[str, ...]:
    """Reserve the cards of an item for a claim with this token; return their ids in the order of
    the ranks.

    Returns () and changes nothing if the cards are not free together. ``host``: the locked cards of
    its host."""
    now_s = read_clock_s(session)
    ids = _group(host, item, job, now_s)
    if not ids:
        return ()

    cards = [card for card in host if card.id in ids]
    if not _free(session, cards, item, job.farm):
        return ()
    if not _is_next(session, host, ids, item, job, now_s):
        return ()

    # The ranks of a CPU share their card, so they need no reservation.
    if not cards[0].is_cpu:
        session.execute(
            update(CardRow)
            .where(col(CardRow.id).in_(ids))
            .values(group_item_id=item.id, group_token=token)
        )
    return ids


def is_reserved(database: Database, card_id: str) -> bool:
    """True if a group holds the card."""
    with database.read() as session:
        card = session.get_one(CardRow, card_id)
        return bool(in_force(session, [card]))


def end_reservation(session: Session, card_id: str) -> None:
    """Remove the reservation of a card. Groups may reserve the card again."""
    session.execute(
        update(CardRow).where(col(CardRow.id) == card_id).values(group_item_id=None, group_token="")
    )


def due(database: Database, farm: str, card_id: str | None = None) -> list[int]:
    """Return the ids of items of a farm's jobs that were put off and can now reserve their cards.
    They need a message. With ``card_id``, only items whose leading card is on the host of this
    card."""
    is_lost = long_ago(col(Item.published_at_s), LOST_AFTER_S)
    needs_message = and_(
        ~item_state.has_message(),
        or_(
            col(Item.message).not_like(f"%{COMPILING}%"),
            long_ago(col(Item.put_off_at_s), COMPILING_LOST_AFTER_S),
        ),
    )
    conditions = [or_(needs_message, is_lost), Job.farm == farm]
    hosts: dict[str, list[CardRow]] = {}  # card id -> all cards of its host
    due_ids: list[int] = []
    promised = set[str]()  # cards that an older item needs

    with database.read() as session:
        if card_id is not None:
            host = host_of(session, card_id)
            hosts = {card.id: host for card in host}
            conditions.append(col(Item.card_id).in_(hosts))

        now_s = read_clock_s(session)
        for item, job in session.exec(_put_off(*conditions)):
            if item.card_id not in hosts:
                host = host_of(session, item.card_id)
                hosts.update((card.id, host) for card in host)
            host = hosts[item.card_id]

            ids = _group(host, item, job, now_s)
            cards = [card for card in host if card.id in ids]
            if ids and promised.isdisjoint(ids) and _free(session, cards, item, farm):
                due_ids.append(item.id)
            promised.update(ids)
    return due_ids


def waits_for(session: Session, job_id: str) -> str:
    """Describe for what a job's oldest item that was put off waits; "" if none was put off."""
    oldest = session.exec(_put_off(Job.id == job_id).limit(1)).first()
    if oldest is None:
        return ""

    item, job = oldest
    if item.reason == HOST_BUSY_NOTED:
        return f"an item waits. {item.message}"

    host = host_of(session, item.card_id)
    if _group(host, item, job, read_clock_s(session)):
        condition = "have measured other items"
    else:
        condition = "work at the same time: start its workers"
    return f"an item waits until {item.cards} cards of {host[0].host} {condition}"


def move_stranded(
    database: Database, cards: Sequence[CardRow], away: Collection[str], farm: str
) -> list[int]:
    """Move items whose host has too few of the farm's cards, without those ``away`` (absent,
    draining or quarantined), to a host that has enough; return the ids to publish."""
    conditions = (
        Item.cards > 1,
        or_(col(Item.put_off_at_s).is_not(None), col(Item.card_id).in_(away)),
        col(Item.state).in_([ItemState.WAITING, ItemState.CLAIMED]),
        col(Item.lease_until_s) < database_now(),
    )
    with database.read() as session:  # a write would make others wait, and there are rarely any
        if session.exec(select(Item.id).where(*conditions).limit(1)).first() is None:
            return []

    moved: list[int] = []
    with database.write() as session:
        jobs, items = lock_with_open_jobs(session, *conditions, Job.farm == farm)
        for item in items:
            new_card_id = _other_host(session, cards, item, jobs[item.job_id])
            if new_card_id is not None and item.id is not None:
                item_state.MOVE.apply(item, card_id=new_card_id)
                moved.append(item.id)
    return moved


def _other_host(session: Session, cards: Sequence[CardRow], item: Item, job: Job) -> str | None:
    """Return the leading card of a group that can measure an item; None if its own host has enough
    of ``cards``, or no other host has a group that the job does not use for the same item."""
    leading = session.get_one(CardRow, item.card_id)
    alike = _alike(cards, leading, job)
    of_host = [card for card in alike if card.host == leading.host]
    if block_of(of_host, item.card_id, item.cards):
        return None

    same_item = select(Item.card_id).where(
        Item.job_id == item.job_id,
        Item.subject_id == item.subject_id,
        Item.role == item.role,
    )
    used = set(session.exec(same_item))
    for card in leading_cards(alike, item.cards):
        if card.id not in used:
            return card.id
    return None
