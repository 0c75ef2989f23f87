"""Lists of jobs and cards for people and programs, and item counts of cards for monitoring.

The rows of the lists are plain, with units in their keys, ready for JSON and for a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import defer
from sqlmodel import Session, and_, case, col, func, or_, select

from farm.jobs import cards
from farm.jobs.cards import CardStatus
from farm.store.database import database_now
from farm.store.tables import CLOSED, OPEN, ImportedVerdict, Item, ItemState, Job, JobState, SoftwareRow, VerdictRow

#: Upper bounds of the histogram of item durations. Unit: s.
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
#: The busy share is that of this time up to now. Unit: s.
BUSY_SPAN_S = 300.0


def jobs(session: Session, limit: int) -> list[dict[str, Any]]:
    """The newest jobs with their newest verdicts. Accuracies and coverage are fractions, None without a verdict."""
    newest = session.exec(select(Job).order_by(col(Job.created_at_s).desc()).limit(limit)).all()
    ids = [job.id for job in newest]
    items: dict[str, int] = defaultdict(int)
    closed: dict[str, int] = defaultdict(int)
    counted = (
        select(Item.job_id, Item.state, func.count())
        .where(col(Item.job_id).in_(ids))
        .group_by(col(Item.job_id), col(Item.state))
    )
    for job_id, state, number in session.execute(counted):
        items[job_id] += number
        closed[job_id] += number if state in CLOSED else 0
    by_round = select(VerdictRow).where(col(VerdictRow.job_id).in_(ids)).order_by(col(VerdictRow.round))
    # The details hold every tuple of the job.
    without_details = by_round.options(defer(VerdictRow.details))  # type: ignore[arg-type]
    verdicts = {verdict.job_id: verdict for verdict in session.exec(without_details)}
    theirs = select(ImportedVerdict.job_id, ImportedVerdict.origin)
    origins = dict(session.exec(theirs.where(col(ImportedVerdict.job_id).in_(ids))).all())
    return [
        {
            "id": job.id,
            "kind": job.kind,
            "title": job.title,
            "state": str(job.state),
            "round": job.round,
            "items": items[job.id],
            "closed": closed[job.id],
            "created_at_s": job.created_at_s,
            "ended_at_s": job.ended_at_s,
            "origin": origins.get(job.id, ""),
            # As in its report: a cancelled job has no verdict.
            **(_judged(verdicts.get(job.id)) if job.state != JobState.CANCELLED else _judged(None, "none")),
        }
        for job in newest
    ]


def _judged(verdict: VerdictRow | None, outcome: str | None = None) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome if verdict else outcome,
        "accuracy_time": verdict.accuracy_time if verdict else None,
        "accuracy_energy": verdict.accuracy_energy if verdict else None,
        "coverage": verdict.coverage if verdict else None,
    }


def registered_cards(session: Session, heartbeat_s: float) -> list[dict[str, Any]]:
    """Every card that ever joined the farm, with what it does now."""
    software = {row.id: row.model_dump() for row in session.exec(select(SoftwareRow))}
    return [
        {
            "id": view.card.id,
            "kind": view.card.kind,
            "model": view.card.model,
            "host": view.card.host,
            "index": view.card.index,
            "memory_bytes": view.card.memory_bytes,
            "driver": view.card.driver,
            "state": str(view.state),
            "state_reason": view.card.state_reason or _silence(view.silent_s),
            "measuring": view.measuring,
            "waiting": view.waiting,
            "deferred": view.deferred,
            "done_last_hour": view.done_last_hour,
            "last_seen_ago_s": view.seen_ago_s,
            "software": software.get(view.card.software_id or ""),
            "queue": view.card.queue,
            "worker": view.card.worker,
            "capabilities": list(view.card.capabilities),
            "fingerprint": dict(view.card.fingerprint),
        }
        for view in cards.views(session, heartbeat_s)
    ]


def _silence(silent_s: float) -> str:
    return f"has taken nothing for {silent_s:.0f} s, though items wait" if silent_s else ""


@dataclass
class CardCounts:
    """The items of one card in numbers. ``within`` is cumulative and belongs to `DURATION_BOUNDS_S`.

    `measured`, `reused` and the durations only grow. The other numbers fall when items are tried again, moved or handed
    back.
    """

    view: CardStatus
    measured: int = 0
    reused: int = 0
    begun_again: int = 0
    repeated: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # reason -> items
    open: dict[str, int] = field(default_factory=dict)  # state -> items
    oldest_waiting_s: float = 0.0
    within: tuple[int, ...] = (0,) * len(DURATION_BOUNDS_S)
    duration_s: float = 0.0
    busy_share: float = 0.0


def count_items(session: Session, host: str, heartbeat_s: float) -> list[CardCounts]:
    """Count the items of the cards that registered from ``host``.

    The totals come from the database, so they survive restarts.
    """
    found = {view.card.id: CardCounts(view) for view in cards.views(session, heartbeat_s) if view.card.host == host}
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
    """The number of open jobs."""
    return session.exec(select(func.count()).select_from(Job).where(Job.state == JobState.OPEN)).one()


def _by_state(ids: Sequence[str]) -> Any:
    again = case((col(Item.attempts) > 1, col(Item.attempts) - 1), else_=0)
    kind = (col(Item.card_id), col(Item.state), col(Item.reused), col(Item.reason))
    query = select(*kind, func.count(), func.sum(again), func.sum(Item.repeated))  # type: ignore[call-overload]
    return query.where(col(Item.card_id).in_(ids)).group_by(*kind)


def _oldest(ids: Sequence[str]) -> Any:
    # An item that is tried again waits from its newest message on.
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
            # The states are named so that the index is used instead of reading all items ever closed.
            or_(and_(col(Item.state).in_(CLOSED), col(Item.ended_at_s) > begin), running),
        )
        .group_by(col(Item.card_id))
    )
