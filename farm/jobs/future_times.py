"""Correct stored times that lie in the future, because the database's clock was set back.

A lease, the last heartbeat of a card and the last progress of a planner are times from which others
wait. If the clock is set back by an hour, each of these waits would take an hour longer. The
reconciler sets such times to the present, so the wait begins again: no living worker loses a lease,
and a wait takes at most twice as long. A time that only triggers a harmless repetition is compared
with `farm.store.database.long_ago` instead."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, update
from sqlmodel import Session, and_, col, or_, select

from farm.store import item_state
from farm.store.database import Database, database_now, lock_items
from farm.store.tables import CardRow, Item, ItemState, Job, JobState, Round

#: A time that another session has stored may be later than the present time of this one, by less
#: than this. Unit: s.
TOLERANCE_S = 1.0


def correct_future_times(database: Database, lease_s: float) -> int:
    """Set times in the future to the present, and leases to ``lease_s`` from now; return the number
    of corrections.
    """
    with database.read() as session:  # a write would make others wait, and there are rarely any
        cards = session.exec(select(CardRow.id).where(_card_is_wrong()).limit(1)).first()
        items = session.exec(select(Item.id).where(_lease_is_wrong(lease_s)).limit(1)).first()
        rounds = session.exec(select(Round.job_id).where(_round_is_wrong()).limit(1)).first()
    corrected = 0
    if cards is not None:
        with database.write() as session:
            corrected += _correct_cards(session)
    if items is not None:
        with database.write() as session:
            corrected += _correct_leases(session, lease_s)
    if rounds is not None:
        with database.write() as session:
            corrected += _correct_rounds(session)
    return corrected


def _in_future(time_s: Any, more_s: float = 0.0) -> ColumnElement[bool]:
    condition: ColumnElement[bool] = col(time_s) > database_now() + TOLERANCE_S + more_s
    return condition


def _card_is_wrong() -> ColumnElement[bool]:
    return _in_future(CardRow.last_seen_at_s)


def _lease_is_wrong(lease_s: float) -> ColumnElement[bool]:
    # A cancelled item by its key alone: the database then reads no closed item.
    in_work = or_(col(Item.state) == ItemState.CLAIMED, col(Item.claim_key).is_not(None))
    # Twice a lease, because the setting may differ between hosts.
    return and_(in_work, _in_future(Item.lease_until_s, 2 * lease_s))


def _round_is_wrong() -> ColumnElement[bool]:
    open_jobs = select(Job.id).where(Job.state == JobState.OPEN)
    in_planning = and_(col(Round.planned_at_s).is_(None), col(Round.job_id).in_(open_jobs))
    return and_(in_planning, _in_future(Round.planning_at_s))


def _correct_cards(session: Session) -> int:
    wrong = _card_is_wrong()
    # In the order of ids, against deadlocks: an UPDATE locks rows in any order.
    session.exec(
        select(CardRow.id).where(wrong).order_by(col(CardRow.id)).with_for_update(key_share=True)
    ).all()
    seen_now = update(CardRow).where(wrong).values(last_seen_at_s=database_now())
    return session.exec(seen_now).rowcount


def _correct_leases(session: Session, lease_s: float) -> int:
    wrong = _lease_is_wrong(lease_s)
    lock_items(session, wrong)
    shortened = item_state.SHORTEN_LEASE.update(wrong, lease_until_s=database_now() + lease_s)
    return session.exec(shortened).rowcount


def _correct_rounds(session: Session) -> int:
    planned_now = update(Round).where(_round_is_wrong()).values(planning_at_s=database_now())
    return session.exec(planned_now).rowcount
