"""The reconciler: what the broker lost, or a crash cut short, is published again from the database.

It runs in every host's control worker, at its own pace; several at once do no harm, since a message too many finds
its claim declined and a round closes once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy
from sqlmodel import Session, and_, col, func, or_, select

from farm.errors import FarmUnavailable
from farm.jobs import cards, items, jobs
from farm.jobs.moving import give_up, move_items, rebalance
from farm.settings import Settings
from farm.store import tables
from farm.store.database import Database, database_now
from farm.store.tables import OPEN, CardState, Item, ItemState, JobState
from tasks.queues import follow_up, publish_aggregate, publish_items, publish_round, queue_depths, stale_after_s

log = logging.getLogger("farm.control")

#: A card that was lost may be back in a moment (a host that starts again, a network that was away). For this many times
#: as long as it takes to call it lost, a job whose sum it gave to goes on waiting for its whole.
PATIENCE = 4

#: A job whose planning does not get on for so long is taken back. Unit: s.
PLANNING_PATIENCE_S = 60.0

#: Messages that a worker may have taken from its queue: the one in work, and the next.
HELD_MESSAGES = 2

#: An aggregation that is asked for in vain is asked for ever more seldom, up to this. Unit: s.
LONGEST_PAUSE_S = 300.0
_asked: dict[tuple[str, int], tuple[int, float]] = {}  # how often by this process, and not before when again


def lost_after_s(current: Settings) -> float:
    """How long a card may be unseen before its items move. Unit: s."""
    return cards.LOST_AFTER_HEARTBEATS * current.heartbeat_s


def reconcile_now(store: Database, current: Settings, farm: str, *, may_move: bool = True) -> None:
    """Put right what is out of step for the jobs of one farm.

    Args:
        farm: the embedded farm whose jobs are looked after, "" for those of no such farm.
        may_move: False while the database has not been there long enough for live workers to have been seen again:
            after an outage every card looks lost.
    """
    views = _views(store, current, farm)
    with _going_on("waking what was deferred"):
        publish_items(store, items.wake_orphans(store, farm=farm))
    if may_move:
        with _going_on("closing what was begun too often"):
            _close_exhausted(store, current, farm)
        with _going_on("moving what waits for cards that are away"):
            publish_items(store, _move_stranded(store, current, views, farm))
        with _going_on("taking back what was not planned to its end"):
            _take_back(store, farm)
        with _going_on("balancing"):
            _balance(store, current, views, farm)
    with _going_on("finding what the broker lost"):
        _publish_lost(store, current, views, farm)
    with store.read() as session:
        unpublished = _unpublished(session, farm, stale_after_s(current))
        unfinished = _unfinished(session, farm)
    for job_id, number in unpublished:
        log.warning("Round %s of job %s was not published to its end; going on with it", number, job_id)
        with _going_on(f"publishing job {job_id}"):
            publish_round(store, job_id, number)
    for job_id, number in _due(unfinished, current.reconcile_s):
        publish_aggregate(job_id, number)


@contextlib.contextmanager
def _going_on(doing: str) -> Iterator[None]:
    """What goes wrong with one step or job is logged, and the rest is done; without database or broker nothing is."""
    try:
        yield
    except FarmUnavailable:
        raise
    except Exception:
        log.exception("Reconciling went wrong at %s", doing)


def _due(unfinished: Sequence[tuple[str, int]], pause_s: float) -> list[tuple[str, int]]:
    """Those of the rounds whose aggregation is to be asked for now: each time after twice the pause."""
    for key in _asked.keys() - set(unfinished):
        del _asked[key]
    due = []
    now_s = time.monotonic()
    for key in unfinished:
        times, not_before_s = _asked.get(key, (0, 0.0))
        if now_s >= not_before_s:
            _asked[key] = times + 1, now_s + min(pause_s * 2**times, LONGEST_PAUSE_S)
            due.append(key)
    return due


def _publish_lost(store: Database, current: Settings, views: Sequence[cards.CardStatus], farm: str) -> None:
    """Publish again what has no message left: where a card rests, and where far fewer messages than items wait for it.

    Which items of a busy card have lost theirs cannot be told, so all are published; messages too many are declined.
    """
    idle_for_s = max(2 * current.heartbeat_s, 5.0)
    working = [view for view in views if view.state in (CardState.IDLE, CardState.BUSY)]
    depths = queue_depths([view.card.id for view in working])
    for view in working:
        messages = depths[view.card.id]
        with store.read() as session:
            if view.state != CardState.IDLE or messages:
                wait = session.execute(_without_holder(func.count(), view.card.id, farm, idle_for_s, published=True))
                if wait.scalar_one() <= messages + HELD_MESSAGES:
                    continue
            lost = _lost(session, view.card.id, farm, idle_for_s)
        if lost:
            log.warning("Items of card %s have no message left; publishing %s again", view.card.id, len(lost))
            publish_items(store, lost, unless_within_s=idle_for_s)


def _take_back(store: Database, farm: str) -> None:
    with store.read() as session:
        cut_short = _cut_short(session, farm)
    for job_id in cut_short:
        log.warning(
            "Job %s was not planned to its end and is cancelled: `farm retry %s` goes on with it", job_id, job_id
        )
        jobs.cancel(store, job_id)


def put_right(store: Database, current: Settings, farm: str, job_id: str) -> None:
    """What `reconcile_now` does for a job's items before they are published again; its open items then wait.

    Asked for by a person, at once and for one job only.
    """
    _close_exhausted(store, current, farm, job_id)
    items.wake_orphans(store, farm=farm, job_id=job_id)
    _move_stranded(store, current, _views(store, current, farm), farm, job_id)


def _views(store: Database, current: Settings, farm: str) -> list[cards.CardStatus]:
    """This farm's cards. Another embedded farm's listen to another broker: nothing of ours can be given to them."""
    with store.read() as session:
        return [view for view in cards.views(session, current.heartbeat_s) if cards.farm_of(view.card.worker) == farm]


def _close_exhausted(store: Database, current: Settings, farm: str, job_id: str | None = None) -> None:
    closed = items.close_exhausted(
        store, max_attempts=current.max_attempts, after_s=current.lease_s, farm=farm, job_id=job_id
    )
    follow_up(store, closed)


def _move_stranded(
    store: Database, current: Settings, views: Sequence[cards.CardStatus], farm: str, job_id: str | None = None
) -> list[int]:
    """Tuples of cards that are gone or take nothing new go to their peers; wholes wait for the end of their jobs.

    The ids of those that want publishing.
    """
    away, for_now = set(), set()
    wanted: list[int] = []
    for view in views:
        # A worker that stopped in order may come back at once, as in an upgrade: it is given the time of a lost one.
        gone = view.state in (CardState.LOST, CardState.STOPPED) and view.seen_ago_s > lost_after_s(current)
        if not gone and view.state not in (CardState.DRAINING, CardState.QUARANTINED):
            continue
        away.add(view.card.id)
        if gone and view.seen_ago_s <= PATIENCE * lost_after_s(current):
            for_now.add(view.card.id)
        peers = [other.card for other in views if _peer(view, other)]
        # Who is not seen has not renewed its lease either, however long that was: only its token could still stand,
        # and the move takes it away.
        absent = view.seen_ago_s > lost_after_s(current)
        unseen_s = lost_after_s(current) if absent else None  # it may be back since it was looked at
        moved = move_items(store, view.card.id, peers, in_work=absent, unseen_s=unseen_s, farm=farm, job_id=job_id)
        if moved:
            log.warning("%s items of card %s (%s) move to its peers", len(moved), view.card.id, view.state)
            wanted += moved
    working = [view.card for view in views if view.state in (CardState.IDLE, CardState.BUSY)]
    return wanted + give_up(store, away, working, for_now=for_now, farm=farm, job_id=job_id)


def _balance(store: Database, current: Settings, views: Sequence[cards.CardStatus], farm: str) -> None:
    """Cards that run dry before the next pass take waiting items from the fullest of their kind."""
    kinds: dict[tuple[str, str | None], list[tables.Card]] = defaultdict(list)
    for view in views:
        if view.state in (CardState.IDLE, CardState.BUSY):
            kinds[view.card.model, view.card.software_id].append(view.card)
    for alike in kinds.values():
        if len(alike) > 1:
            moved = rebalance(store, alike, dry_within_s=2 * current.reconcile_s, farm=farm)
            if moved:
                log.info("%s items move to cards that ran dry", len(moved))
                publish_items(store, moved)


def _peer(view: cards.CardStatus, other: cards.CardView) -> bool:
    return (
        other.card.id != view.card.id
        and other.card.model == view.card.model
        and other.card.software_id == view.card.software_id
        and other.state in (CardState.IDLE, CardState.BUSY)
    )


def _lost(session: Session, card_id: str, farm: str, idle_for_s: float) -> list[int]:
    """Open items of a card that nobody holds and that were not published just now."""
    query = _without_holder(col(Item.id), card_id, farm, idle_for_s).order_by(col(Item.id))
    return list(session.scalars(query))


def _without_holder(what: Any, card_id: str, farm: str, idle_for_s: float, *, published: bool = False) -> Any:
    """What of a round that is being published has no message yet is its publisher's, and not lost.

    Args:
        published: only what had a message.
    """
    query = (
        sqlalchemy.select(what)
        .select_from(Item)
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .join(
            tables.Round,
            and_(col(tables.Round.job_id) == col(Item.job_id), col(tables.Round.number) == col(Item.round)),
        )
        .where(
            col(Item.card_id) == card_id,
            col(Item.state).in_([ItemState.WAITING, ItemState.CLAIMED]),
            col(Item.lease_until_s) < database_now(),
            func.coalesce(Item.published_at_s, Item.created_at_s) < database_now() - idle_for_s,
            col(tables.Job.state) == JobState.OPEN,
            col(tables.Job.farm) == farm,
        )
    )
    had_one = col(Item.published_at_s).is_not(None)
    return query.where(had_one if published else or_(had_one, col(tables.Round.published_at_s).is_not(None)))


def _unpublished(session: Session, farm: str, after_s: float) -> list[tuple[str, int]]:
    """Rounds whose publisher got on no more before the end. One that is followed by another was closed without need of it."""
    query = (
        select(tables.Round.job_id, tables.Round.number)
        .join(tables.Job, col(tables.Job.id) == col(tables.Round.job_id))
        .where(
            tables.Round.number == tables.Job.round,
            col(tables.Round.published_at_s).is_(None),
            col(tables.Round.progress_at_s) < database_now() - after_s,
            tables.Job.state == JobState.OPEN,
            tables.Job.farm == farm,
        )
    )
    return [(job_id, number) for job_id, number in session.execute(query)]


def _newest_round() -> Any:
    return and_(col(tables.Round.job_id) == col(tables.Job.id), col(tables.Round.number) == col(tables.Job.round))


def _cut_short(session: Session, farm: str) -> list[str]:
    """Jobs whose planner has got on no more for long: it was killed. (Or it is held, and finds its job ended.)"""
    query = (
        select(tables.Job.id)
        .join(tables.Round, _newest_round())
        .where(
            tables.Job.state == JobState.OPEN,
            tables.Job.farm == farm,
            col(tables.Round.planned_at_s).is_(None),
            col(tables.Round.progress_at_s) < database_now() - PLANNING_PATIENCE_S,
        )
    )
    return list(session.exec(query))


def _unfinished(session: Session, farm: str) -> list[tuple[str, int]]:
    """The newest rounds of open jobs, with no item open and no verdict."""
    still_open = select(Item.job_id).where(col(Item.state).in_(OPEN))
    judged = select(tables.Verdict.id).where(
        tables.Verdict.job_id == tables.Job.id, tables.Verdict.round == tables.Job.round
    )
    query = (
        select(tables.Job.id, tables.Job.round)
        .join(tables.Round, _newest_round())
        .where(
            tables.Job.state == JobState.OPEN,
            tables.Job.farm == farm,
            col(tables.Round.planned_at_s).is_not(None),
            col(tables.Job.id).not_in(still_open),
            ~judged.exists(),
        )
    )
    return [(job_id, number) for job_id, number in session.execute(query)]
