"""Moving items between cards: away from cards that are lost, drained or quarantined, and to cards
that will be idle.

A move changes the card of an item in the database. The caller then publishes a new message; a
worker that gets the old message declines it. Each public function is a transaction and returns the
ids of the items to publish.

Only tuples move. If the person who submitted the job named cards, tuples move only to these cards.
A whole or canary item waits for its own card. It fails without a measurement if the card is absent
and its job waits for nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlmodel import Session, col, func, or_, select

from farm.jobs.balance import MovableItem, balance_groups, slowness
from farm.jobs.job_cards import card_for_each
from farm.jobs.whole_items import wait_on_card, wholes_of
from farm.store import item_state
from farm.store.database import (
    Database,
    by_key,
    database_now,
    fetch,
    in_batches,
    lock_items,
    lock_open_jobs,
    lock_with_open_jobs,
    locked,
    long_ago,
    read_clock_s,
)
from farm.store.tables import OPEN, CardRow, Item, ItemState, Job, JobState, ReadingRow

MOST_MOVABLE = 250  # the most items of a card that one pass of the balancing considers


def move_items(
    database: Database,
    card_id: str,
    peers: Sequence[CardRow],
    *,
    in_work: bool = True,
    unseen_s: float | None = None,
    farm: str = "",
    job_id: str | None = None,
) -> list[int]:
    """Move a card's open tuples to ``peers``: cards of the same model and software; return the ids
    to publish.

    Each tuple moves to the allowed peer that will be idle first. Late results of the old card are
    rejected.

    Args:
        in_work: also move items with a running lease. True for an absent card, False for a card
            that is draining.
        unseen_s: move only if the card had no heartbeat for this time. Claimed items move only if
            their claim is older than that: if the card is back, it keeps its new items. Unit: s.
        farm: only jobs of this farm, since each farm has its own broker.
    """
    if not peers:
        return []
    with database.write() as session:
        conditions: list[Any] = [
            Item.card_id == card_id,
            col(Item.state).in_(OPEN),
            Item.role == "tuple",
            Job.farm == farm,
        ]
        conditions.append(Item.cards == 1)  # `farm.jobs.groups.move_stranded` moves the others
        if job_id is not None:
            conditions.append(col(Item.job_id) == job_id)
        if not in_work:
            conditions.append(col(Item.lease_until_s) < database_now())
        if unseen_s is not None:
            card = locked(session, CardRow, card_id)
            since_s = read_clock_s(session) - unseen_s
            if card is None or card.last_seen_at_s >= since_s:
                return []
            old = long_ago(func.coalesce(Item.started_at_s, 0.0), unseen_s)
            conditions.append(or_(col(Item.state) != ItemState.CLAIMED, old))

        jobs, open_items = lock_with_open_jobs(session, *conditions)
        may_take = {key: _takers(job, peers) for key, job in jobs.items()}
        movable = [item for item in open_items if may_take[item.job_id]]
        by_peers = by_key(lambda item: may_take[item.job_id], movable)
        for takers, items in sorted(by_peers.items(), key=lambda group: len(group[0])):
            allowed = [card for card in peers if card.id in takers]
            peer_ids = card_for_each(session, items, allowed)
            for item, peer_id in zip(items, peer_ids, strict=True):
                item_state.MOVE.apply(item, card_id=peer_id)
            session.flush()
        return _ids([*_missing_wholes(session, movable), *movable])


def give_up(
    database: Database,
    away: Collection[str],
    working: Sequence[CardRow],
    *,
    for_now: Collection[str] = (),
    farm: str = "",
    job_id: str | None = None,
) -> list[int]:
    """Close whole and canary items of absent cards if their job waits for nothing else; return the
    ids to publish.

    The verdict uses the wholes that were measured. If all wholes would be closed here, a working
    card measures one. If no card of the same model and software works, the job continues to wait.

    Args:
        away: ids of absent, draining and quarantined cards.
        working: cards that measure items.
        for_now: cards of `away` that may be back soon. A job waits for such a card if its sum has
            readings of it.
    """
    with database.write() as session:
        conditions: list[Any] = [
            col(Item.card_id).in_(away),
            Item.role != "tuple",
            Item.cards == 1,
            col(Item.state).in_([ItemState.WAITING, ItemState.CLAIMED]),
            col(Item.lease_until_s) < database_now(),
            Job.state == JobState.OPEN,
            Job.farm == farm,
        ]
        if job_id is not None:
            conditions.append(col(Item.job_id) == job_id)

        jobs, absent_items = lock_with_open_jobs(session, *conditions)
        to_publish: list[Item] = []
        for key, items in by_key(lambda item: item.job_id, absent_items).items():
            # Earlier rounds have no open items. `limit`: this needs no count of all open items.
            others = select(Item.id).where(
                Item.job_id == key, Item.round == jobs[key].round, col(Item.state).in_(OPEN)
            )
            if len(session.exec(others.limit(len(items) + 1)).all()) > len(items):
                continue

            may_return = {item.card_id for item in items}.intersection(for_now)
            if may_return and may_return & _contributors(session, key):
                continue
            to_publish += _close_absent(session, jobs[key], items, working)
        return _ids(to_publish)


def _close_absent(
    session: Session, job: Job, items: Sequence[Item], working: Sequence[CardRow]
) -> Sequence[Item]:
    """Close the last open items of a job, whose cards are absent; return new items of another card
    to publish.
    """
    kinds = set()
    for item in items:
        card = session.get(CardRow, item.card_id)
        if card is not None:
            kinds.add((card.model, card.software_id))

    takers = _takers(job, working)
    alike = [card for card in working if (card.model, card.software_id) in kinds]
    peers = [card for card in alike if card.id in takers]
    if not peers:
        return ()

    for item in items:
        item_state.GIVE_UP.apply(item)
    session.flush()
    wholes = wholes_of(session, job)
    # If a whole failed for another reason, it would fail on another card as well.
    if not wholes or any(item.reason != item_state.CARD_LEFT for item in wholes):
        return ()

    contributors = _contributors(session, job.id)
    stand_in = min(peers, key=lambda card: (card.id not in contributors, card.id))
    return wait_on_card(session, job, stand_in.id)


def _contributors(session: Session, job_id: str) -> set[str]:
    """Return the ids of the cards whose readings are in the sum of the job."""
    query = (
        select(ReadingRow.card_id)
        .join(Item, col(Item.reading_id) == col(ReadingRow.id))
        .where(Item.job_id == job_id, Item.role == "tuple")
        .distinct()
    )
    return set(session.exec(query))


def rebalance(
    database: Database, cards: Sequence[CardRow], *, idle_within_s: float, farm: str = ""
) -> list[int]:
    """Move waiting tuples of the fullest cards to cards that will be idle; return the ids to
    publish. ``cards``: working cards of one model and one software. A card that has less work than
    ``idle_within_s`` gets more work."""
    ids = [card.id for card in cards]
    loads = (
        select(Item.card_id, func.sum(Item.expected_s), func.count())
        .where(col(Item.card_id).in_(ids), col(Item.state).in_(OPEN))
        .group_by(col(Item.card_id))
    )
    with database.read() as session:
        rows = session.execute(loads).all()
        if all(number <= 1 for *_, number in rows):
            return []

        open_s = dict.fromkeys(ids, 0.0)
        for card_id, expected_s, _ in rows:
            open_s[card_id] = float(expected_s or 0.0)
        slowness_of = slowness(session, ids)
        ends_s = [slowness_of.get(card_id, 1.0) * load_s for card_id, load_s in open_s.items()]
        if min(ends_s) >= idle_within_s:
            return []
        waiting = _movable(session, cards, farm)

    moves = balance_groups(waiting, open_s, slowness_of, idle_within_s=idle_within_s)
    if not moves:
        return []
    return _carry_out(database, moves, waiting)


def _movable(session: Session, cards: Sequence[CardRow], farm: str) -> list[MovableItem]:
    """Return tuples that wait for these cards, with the cards to which they may move; first those
    without a message.
    """
    has_message = col(Item.published_at_s).is_not(None)
    order = func.row_number().over(
        partition_by=col(Item.card_id), order_by=(has_message, col(Item.id).desc())
    )
    ranked = (
        select(Item.id, Item.card_id, Item.expected_s, Item.job_id, order.label("place"))  # type: ignore[call-overload]
        .join(Job, col(Job.id) == col(Item.job_id))
        .where(
            col(Item.card_id).in_([card.id for card in cards]),
            Item.state == ItemState.WAITING,
            Item.role == "tuple",
            Item.cards == 1,
            Job.state == JobState.OPEN,
            Job.farm == farm,
        )
        .subquery()
    )
    rows = session.execute(
        select(ranked).where(ranked.c.place <= MOST_MOVABLE).order_by(ranked.c.id)
    ).all()
    jobs = fetch(session, Job, (row.job_id for row in rows))
    takers = {job_id: _takers(job, cards) for job_id, job in jobs.items()}
    return [
        MovableItem(row.id, row.card_id, row.expected_s, row.job_id, takers[row.job_id])
        for row in rows
    ]


def _carry_out(
    database: Database, moves: Mapping[int, str], waiting: Sequence[MovableItem]
) -> list[int]:
    """Move items (item id -> card id); return the ids of the moved items and of wholes that are
    needed in addition.
    """
    planned = [item for item in waiting if item.id in moves]
    with database.write() as session:
        still_open = lock_open_jobs(session, {item.job_id for item in planned})
        ways: dict[tuple[str, str], list[int]] = defaultdict(list)
        for item in planned:
            if item.job_id in still_open:
                ways[item.card_id, moves[item.id]].append(item.id)

        to_lock: list[int] = []
        for ids in ways.values():
            to_lock += ids
        for batch in in_batches(sorted(to_lock)):
            lock_items(session, col(Item.id).in_(batch))

        moved: list[int] = []
        for (giver, taker), ids in ways.items():
            for batch in in_batches(ids):
                # Only items that still wait for the giver: it may have claimed some, or another
                # host moved them.
                conditions = (
                    col(Item.id).in_(batch),
                    col(Item.card_id) == giver,
                    col(Item.state) == ItemState.WAITING,
                )
                moving = item_state.MOVE.update(*conditions, card_id=taker).returning(col(Item.id))
                moved += [
                    item_id for item_id in session.exec(moving).scalars() if item_id is not None
                ]
        moved_items = fetch(session, Item, moved).values()
        return _ids(_missing_wholes(session, moved_items)) + moved


def _ids(items: Iterable[Item]) -> list[int]:
    return [item.id for item in items if item.id is not None]


def _takers(job: Job, cards: Sequence[CardRow]) -> frozenset[str]:
    """Return the ids of the cards that may measure for a job: all, or only cards that the submitter
    named.
    """
    ids = frozenset(card.id for card in cards)
    if not job.asked.get("pinned"):
        return ids
    return ids & set(job.asked.get("cards", ()))


def _missing_wholes(session: Session, moved: Iterable[Item]) -> list[Item]:
    """Create wholes for cards that now measure tuples: the verdict compares tuples and whole of the
    same card.
    """
    pairs = sorted({(item.job_id, item.card_id) for item in moved})
    wholes: list[Item] = []
    for job_id, card_id in pairs:
        job = session.get_one(Job, job_id)
        wholes += wait_on_card(session, job, card_id)
    return wholes
