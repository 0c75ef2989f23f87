"""What a host's cards have done and what waits for them, counted in the database: for monitoring.

The database is the truth, so the totals survive every restart of a worker, and nobody has to keep count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import Session, and_, case, col, func, or_, select

from farm.jobs import cards
from farm.jobs.cards import CardStatus
from farm.store.database import database_now
from farm.store.tables import OPEN, Item, ItemState, Job, JobState

#: Upper bounds of the classes of an item's duration. Unit: s.
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
#: The busy share is of this span, up to now. Unit: s.
BUSY_SPAN_S = 300.0
CLOSED = tuple(state for state in ItemState if state.closed)


@dataclass
class CardCensus:
    """One card. ``within`` goes with `DURATION_BOUNDS_S` and is cumulative.

    What is done stays done, on the card that did it: these counts and durations only grow. The others are of items that
    may be tried again, moved or handed back, and fall then.
    """

    view: CardStatus
    measured: int = 0  # grows, as does ``reused``
    reused: int = 0
    begun_again: int = 0
    repeated: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # reason -> items
    open: dict[str, int] = field(default_factory=dict)  # state -> items
    oldest_waiting_s: float = 0.0
    within: tuple[int, ...] = (0,) * len(DURATION_BOUNDS_S)
    duration_s: float = 0.0
    busy_share: float = 0.0


def count(session: Session, host: str, heartbeat_s: float) -> list[CardCensus]:
    """The cards that registered from ``host``."""
    found = {view.card.id: CardCensus(view) for view in cards.views(session, heartbeat_s) if view.card.host == host}
    ids = list(found)
    for card_id, state, reused, reason, number, attempts, repeated in session.execute(_by_state(ids)):
        entry = found[card_id]
        entry.begun_again += int(attempts or 0)
        entry.repeated += int(repeated or 0)
        if state == ItemState.DONE and reused:
            entry.reused += number
        elif state == ItemState.DONE:
            entry.measured += number
        elif state == ItemState.FAILED:
            entry.failed[reason or "unknown"] = entry.failed.get(reason or "unknown", 0) + number
        elif state in OPEN:
            entry.open[state] = entry.open.get(state, 0) + number
    for card_id, oldest_s in session.execute(_oldest(ids)):
        found[card_id].oldest_waiting_s = max(0.0, float(oldest_s or 0.0))
    for card_id, duration_s, *within in session.execute(_durations(ids)):
        found[card_id].duration_s = float(duration_s or 0.0)
        found[card_id].within = tuple(int(number or 0) for number in within)
    for card_id, busy_s in session.execute(_busy(ids)):
        found[card_id].busy_share = min(1.0, max(0.0, float(busy_s or 0.0) / BUSY_SPAN_S))
    return list(found.values())


def open_jobs(session: Session) -> int:
    return session.exec(select(func.count()).select_from(Job).where(Job.state == JobState.OPEN)).one()


def _by_state(ids: Sequence[str]) -> Any:
    again = case((col(Item.attempts) > 1, col(Item.attempts) - 1), else_=0)
    kind = (col(Item.card_id), col(Item.state), col(Item.reused), col(Item.reason))
    query = select(*kind, func.count(), func.sum(again), func.sum(Item.repeated))  # type: ignore[call-overload]
    return query.where(col(Item.card_id).in_(ids)).group_by(*kind)


def _oldest(ids: Sequence[str]) -> Any:
    # An item that is tried again days later waits since then.
    waiting_since_s = func.coalesce(col(Item.published_at_s), col(Item.created_at_s))
    return (
        select(Item.card_id, database_now() - func.min(waiting_since_s))
        .where(col(Item.card_id).in_(ids), Item.state == ItemState.WAITING)
        .group_by(col(Item.card_id))
    )


def _durations(ids: Sequence[str]) -> Any:
    duration_s = col(Item.ended_at_s) - col(Item.started_at_s)
    within = [func.sum(case((duration_s <= bound, 1), else_=0)) for bound in DURATION_BOUNDS_S]
    return (
        select(Item.card_id, func.sum(duration_s), *within)  # type: ignore[call-overload]
        .where(
            col(Item.card_id).in_(ids),
            Item.state == ItemState.DONE,
            col(Item.reused).is_(False),
            col(Item.started_at_s).is_not(None),
        )
        .group_by(col(Item.card_id))
    )


def _busy(ids: Sequence[str]) -> Any:
    now, begin = database_now(), database_now() - BUSY_SPAN_S
    began = case((col(Item.started_at_s) < begin, begin), else_=col(Item.started_at_s))
    ended = func.coalesce(col(Item.ended_at_s), now)
    running = and_(col(Item.state) == ItemState.CLAIMED, col(Item.lease_until_s) >= now)
    return (
        select(Item.card_id, func.sum(ended - began))
        .where(
            col(Item.card_id).in_(ids),
            col(Item.started_at_s).is_not(None),
            col(Item.reused).is_(False),
            # The states are named for the index: all that was ever done is too much to look at.
            or_(and_(col(Item.state).in_(CLOSED), col(Item.ended_at_s) > begin), running),
        )
        .group_by(col(Item.card_id))
    )
