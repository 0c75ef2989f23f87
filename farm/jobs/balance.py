"""Choose the card of each item, from expected seconds and the slowness of each card; estimate when
a job ends.

Expected seconds are estimates, cards differ, and cards come and go. So the first choice of a card
need not be optimal. While cards work, waiting items move from the card that would end last to cards
that will soon be idle. `assign`, `balance` and `balance_groups` use no database: the simulation of
a hundred cards calls the same functions."""

from __future__ import annotations

import bisect
import heapq
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy
from sqlmodel import Session, and_, case, col, func, select

from farm.store.database import among, database_now
from farm.store.tables import OPEN, CardRow, Item, ItemState, Job, JobState

#: Items that `slowness` uses: begun within RECENT_S seconds, the NEWEST of each card, MOST in all,
#: and at least FEWEST.
RECENT_S = 900.0
NEWEST = 100
MOST = 10_000
FEWEST = 3
#: A pause between two items counts as work up to this length. After a longer pause the card was
#: idle. Unit: s.
LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True)
class QueuedItem:
    """One waiting item and its expected seconds on a card of slowness 1."""

    key: int
    expected_s: float


@dataclass
class CardQueue:
    """One card with its items. ``slowness`` is measured seconds / expected seconds: 4.0 is four
    times slower.
    """

    card_id: str
    waiting: list[QueuedItem] = field(default_factory=list)
    busy_s: float = 0.0  # expected seconds of the claimed item
    slowness: float = 1.0

    @property
    def ends_s(self) -> float:
        """When the card will be idle. Unit: seconds from now."""
        return self.slowness * (self.busy_s + sum(work.expected_s for work in self.waiting))


@dataclass(frozen=True)
class MovableItem:
    """A waiting item, its present card, and the cards to which it may move (``takers``)."""

    id: int
    card_id: str
    expected_s: float
    job_id: str
    takers: frozenset[str]


def assign(work: Iterable[QueuedItem], free_at_s: Mapping[str, float]) -> dict[int, str]:
    """Place each item, longest first, on the card that would finish it first (LPT); return key ->
    card id.

    The cards count as equally fast. ``free_at_s``: card id -> seconds until the card is idle.
    """
    placed = {}
    queues = [(end_s, card_id) for card_id, end_s in free_at_s.items()]
    heapq.heapify(queues)  # the first card to be idle also finishes the item first
    for item in sorted(work, key=lambda item: (-item.expected_s, item.key)):
        end_s, card_id = queues[0]
        heapq.heapreplace(queues, (end_s + item.expected_s, card_id))
        placed[item.key] = card_id
    return placed


def balance(queues: Sequence[CardQueue], *, idle_within_s: float) -> dict[int, str]:
    """Move items from the fullest cards to cards that will be idle within ``idle_within_s``; return
    key -> new card id.

    Other cards get no items, since every move costs a message. A move must gain more than it costs;
    otherwise cards that end at about the same time would pass the last items back and forth."""
    ends_s = {queue.card_id: queue.ends_s for queue in queues}
    by_id = {queue.card_id: queue for queue in queues}
    # In ascending order of expected seconds: `_worth_moving` bisects.
    left = {
        queue.card_id: sorted(queue.waiting, key=lambda work: (work.expected_s, work.key))
        for queue in queues
    }
    idle = {card_id for card_id, end_s in ends_s.items() if end_s < idle_within_s}
    moves: dict[int, str] = {}
    while idle:
        taker = min(idle, key=lambda card_id: (ends_s[card_id], card_id))
        taker_slowness = by_id[taker].slowness
        giver = _giver(left, ends_s, idle, taker)
        position = None
        if giver is not None:
            position = _worth_moving(left[giver], ends_s[giver], ends_s[taker], taker_slowness)
        if giver is None or position is None:
            idle.discard(taker)
            continue

        work = left[giver].pop(position)
        moves[work.key] = taker
        ends_s[giver] -= by_id[giver].slowness * work.expected_s
        ends_s[taker] += taker_slowness * work.expected_s
    return moves


def _giver(
    left: Mapping[str, Sequence[QueuedItem]],
    ends_s: Mapping[str, float],
    idle: Collection[str],
    taker: str,
) -> str | None:
    """Return the card that gives an item to ``taker``; None if no card has one to spare."""
    full = [card_id for card_id in left if left[card_id] and card_id not in idle]
    giver = max(full, key=ends_s.__getitem__, default=None)
    if giver is not None and ends_s[giver] > ends_s[taker]:
        return giver

    # No card is full: take from an idle card that still has several items.
    several = [card_id for card_id in idle if len(left[card_id]) > 1]
    return max(several, key=ends_s.__getitem__, default=None)


def _worth_moving(
    waiting: Sequence[QueuedItem], giver_ends_s: float, taker_ends_s: float, slowness: float
) -> int | None:
    """Return the position in ``waiting`` of the item that should move; None if no move gains
    enough.

    ``waiting``: the giver's items in ascending order of expected seconds. ``slowness``: that of the
    taker."""
    room_s = (giver_ends_s - taker_ends_s) / 2
    position = bisect.bisect_right(waiting, room_s, key=lambda work: work.expected_s) - 1
    latest_end_s = giver_ends_s
    if position < 0:
        # No item is that short: move the shortest if the taker finishes it before the giver would
        # be idle.
        position = 0
        latest_end_s = 0.9 * giver_ends_s

    end_s = taker_ends_s + slowness * waiting[position].expected_s
    if end_s < latest_end_s:
        return position
    return None


def balance_groups(
    waiting: Sequence[MovableItem],
    open_s: Mapping[str, float],
    slowness: Mapping[str, float],
    *,
    idle_within_s: float,
) -> dict[int, str]:
    """`balance` for items that may move to some of the cards only; return item id -> new card id.

    ``open_s``: card id -> expected seconds of all its open items, including items that cannot move.
    """
    open_s = dict(open_s)
    moves: dict[int, str] = {}
    # Groups with the fewest takers first. Each move changes `open_s` for the next group.
    groups = {item.takers for item in waiting}
    for group in sorted(groups, key=lambda group: (len(group), sorted(group))):
        queues = {
            card_id: CardQueue(card_id, [], open_s[card_id], slowness.get(card_id, 1.0))
            for card_id in group
        }
        movable = {
            item.id: item for item in waiting if item.takers == group and item.card_id in group
        }
        for item in movable.values():
            queue = queues[item.card_id]
            queue.waiting.append(QueuedItem(item.id, item.expected_s))
            queue.busy_s = max(0.0, queue.busy_s - item.expected_s)

        moves_of_group = balance(list(queues.values()), idle_within_s=idle_within_s)
        for item_id, taker in moves_of_group.items():
            item = movable[item_id]
            open_s[item.card_id] -= item.expected_s
            open_s[taker] += item.expected_s
        moves.update(moves_of_group)
    return moves


def time_left_s(session: Session, job: Job, open_s: Mapping[str, float]) -> float:
    """Estimate the seconds until all items of the job are closed, at the cards' recent speed. Older
    jobs come first.

    ``open_s``: card id -> expected seconds of the job's open items on that card.
    """
    if not open_s:
        return 0.0
    earlier = select(Job.id).where(
        Job.state == JobState.OPEN, Job.farm == job.farm, col(Job.created_at_s) < job.created_at_s
    )
    before_s = dict(open_s)
    query = select(Item.card_id, func.sum(Item.expected_s)).group_by(col(Item.card_id))
    query = query.where(col(Item.state).in_(OPEN), col(Item.card_id).in_(open_s))
    for card_id, expected_s in among(session, query, Item.job_id, session.exec(earlier)):
        before_s[card_id] += expected_s or 0.0
    return together_s(session, before_s)


def together_s(session: Session, before_s: Mapping[str, float]) -> float:
    """Estimate the seconds until cards that share their work (card id -> expected seconds) end, at
    recent speed.
    """
    slowness_of = slowness(session, list(before_s))
    usual = statistics.mean(slowness_of.values()) if slowness_of else 1.0
    speed = sum(1 / slowness_of.get(card_id, usual) for card_id in before_s)
    return sum(before_s.values()) / speed


def slowness(session: Session, card_ids: Sequence[str]) -> dict[str, float]:
    """Return card id -> slowness: measured seconds / expected seconds of the newest tuples, with
    short pauses.

    Balancing and `time_left_s` both use this definition. Cards with too few items are left out.
    """
    # A subquery for each card: the database reads its newest items by the index of what it began,
    # and no others.
    newest_of_each = max(1, min(NEWEST, MOST // max(1, len(card_ids))))
    begun: Any = sqlalchemy.select(
        col(Item.expected_s),
        col(Item.started_at_s),
        col(Item.ended_at_s),
        col(Item.state),
        col(Item.reused),
        col(Item.role),
        col(Item.cards),
    )
    newest = (
        begun.where(Item.card_id == CardRow.id)
        .where(col(Item.started_at_s) > database_now() - RECENT_S)
        .order_by(col(Item.started_at_s).desc())
        .limit(newest_of_each)
        .correlate(CardRow)
        .subquery()
        .c
    )

    previous_end_s = func.lag(newest.ended_at_s).over(order_by=newest.ended_at_s)
    pause_s = newest.started_at_s - previous_end_s
    is_short = and_(pause_s >= 0, pause_s < LONGEST_PAUSE_S)
    begin_s = case((is_short, previous_end_s), else_=newest.started_at_s)
    work_s = newest.ended_at_s - begin_s
    measured = (
        select(newest.expected_s, work_s.label("work_s"))
        .where(newest.state == ItemState.DONE)
        .where(newest.reused.is_(False))
        .where(newest.role == "tuple")
        .where(newest.cards == 1)
        # Otherwise the clock was set back meanwhile.
        .where(newest.ended_at_s >= newest.started_at_s)
        .correlate(CardRow)
        .subquery()
        .c
    )

    ratio = func.sum(measured.work_s) / func.nullif(func.sum(measured.expected_s), 0.0)
    of_card = (
        select(case((func.count() >= FEWEST, ratio)))
        .select_from(measured.work_s.table)
        .scalar_subquery()
    )
    rows = session.execute(select(CardRow.id, of_card).where(col(CardRow.id).in_(card_ids)))
    return {
        card_id: max(0.001, measured_ratio)
        for card_id, measured_ratio in rows
        if measured_ratio is not None
    }
