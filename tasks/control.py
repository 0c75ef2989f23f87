"""The work of a control worker: closing rounds, and the reconciler.

The task `aggregate` is the body and the errback of a round's chord. The reconciler finds items in
the database whose messages were lost by the broker or never sent because of a crash, and publishes
them again. Both use only the state in the database, and several hosts may run them at once: a
worker declines extra messages, and a round closes once."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy
from celery import Task
from celery.exceptions import Ignore
from sqlmodel import Session, and_, col, func, or_, select

from farm.errors import FarmUnavailable, Unreadable
from farm.jobs import cards, future_times, groups, items, jobs
from farm.jobs.cards import CardStatus
from farm.jobs.closing import Closing, close_round
from farm.jobs.moving import give_up, move_items, rebalance
from farm.jobs.outage import Outage, SteadyAnswers
from farm.settings import Settings, settings
from farm.store import item_state, tables
from farm.store.database import Database, by_key, database_now, long_ago, read_clock_s
from farm.store.tables import CardState, Item, ItemState, JobState
from tasks import queues
from tasks.app import app

log = logging.getLogger("farm.control")

#: If the aggregation of a round fails this often, the job ends, with the reason in its report.
TRIES = 6

#: A lost card may be back soon, for example after its host restarts. If a job's sum has readings of
#: a lost card, the job waits for the card's whole for this many times `lost_after_s`.
PATIENCE = 4

#: A job whose planning makes no progress for this long is cancelled. Unit: s.
PLANNING_PATIENCE_S = 300.0

#: The number of messages that a worker may have fetched from its queue: the running message and the
#: next.
HELD_MESSAGES = 2

#: The longest pause before an aggregation is requested again. Unit: s.
LONGEST_PAUSE_S = 300.0

WORKING = (CardState.IDLE, CardState.BUSY)


class AggregationTask(Task):  # type: ignore[misc]
    """Knows which aggregations failed in this process. Celery creates one task per process."""

    def __init__(self) -> None:
        self.outage = Outage(log, "A round is not closed")
        self.failures: Counter[str] = Counter()  # by round


class AggregationRequests:
    """The rounds whose aggregation a reconciler has requested."""

    def __init__(self) -> None:
        #: round -> (number of requests, time of the next one)
        self._requested: dict[tuple[str, int], tuple[int, float]] = {}

    def due(self, unfinished: Sequence[tuple[str, int]], pause_s: float) -> list[tuple[str, int]]:
        """Return the rounds whose aggregation is requested now. The pause doubles after each
        request of a round.
        """
        for key in self._requested.keys() - set(unfinished):
            del self._requested[key]
        due, now_s = [], time.monotonic()
        for key in unfinished:
            times, not_before_s = self._requested.get(key, (0, 0.0))
            if now_s >= not_before_s:
                next_s = now_s + min(pause_s * 2**times, LONGEST_PAUSE_S)
                self._requested[key] = times + 1, next_s
                due.append(key)
        return due


@functools.cache
def database() -> Database:
    """Return the database of this process."""
    return Database(settings().database)


@app.task(name="aggregate", base=AggregationTask, bind=True)
def aggregate(self: AggregationTask, round_id: str) -> dict[str, str]:
    """Close the job's items that have no attempts left, then aggregate the round "JOB/NUMBER".
    Return its id, the result of closing it (`Closing`) and the job's outcome.

    The task has one argument: Celery runs an errback with more arguments inside the worker that saw
    the failure.

    If the database or the broker does not work, the outage is logged once and the message is
    dropped: the reconciler publishes another one. Celery would log a traceback for each message.
    """
    try:
        result = _aggregate(round_id, self.failures)
    except FarmUnavailable as error:
        self.outage.note(error)
        raise Ignore from error
    self.outage.over()
    return result


def _aggregate(round_id: str, failures: Counter[str]) -> dict[str, str]:
    job_id, _, number = round_id.partition("/")
    current = settings()
    with database().read() as session:
        job = session.get(tables.Job, job_id)
    # This process would publish the next round of another farm's job on the wrong broker.
    if job is not None and job.farm != queues.own_farm():
        return {"round": round_id, "closing": str(Closing.OPEN), "outcome": ""}
    try:
        _close_exhausted(database(), current, job_id=job_id)
        closed = close_round(database(), job_id, int(number))
    except FarmUnavailable:
        raise
    except Exception as error:
        unreadable = isinstance(error, Unreadable)  # another try would fail too
        failures[round_id] += 1
        if failures[round_id] < TRIES and not unreadable:
            raise
        log.error(
            "Job %s ends without a verdict: round %s could not be summed",
            job_id,
            number,
            exc_info=True,
        )
        raised = f"The sum of the parts could not be computed: {type(error).__name__}: {error}"
        why = str(error) if unreadable else raised
        closed = close_round(database(), job_id, int(number), failed=why[:1000])
    failures.pop(round_id, None)
    if closed.closing is Closing.NEXT and closed.next_round is not None:
        queues.publish_round(database(), job_id, closed.next_round)
    return {"round": round_id, "closing": str(closed.closing), "outcome": closed.outcome}


def lost_after_s(current: Settings) -> float:
    """Return how long a card may be without a heartbeat before its items move. Unit: s."""
    return cards.LOST_AFTER_HEARTBEATS * current.heartbeat_s


def reconcile_now(
    store: Database,
    current: Settings,
    farm: str,
    *,
    answers: SteadyAnswers | None = None,
    requests: AggregationRequests | None = None,
) -> None:
    """Repair the jobs of one embedded farm ("": the shared farm) after crashes, lost messages and
    lost cards.

    Args:
        answers: those of the database. For some time after an outage no item moves: all cards look
            lost until their workers have written a heartbeat again. None: there was no outage.
        requests: those of earlier passes. None: there was no earlier pass.
    """
    requests = requests or AggregationRequests()
    awaited = contextlib.nullcontext() if answers is None else answers.awaited()
    with awaited:
        with _continuing("correcting times after the clock was set back"):
            _correct_times(store, current)
        with store.read() as session:
            now_s = read_clock_s(session)
        views = _views(store, current, farm)
    if answers is not None:
        answers.clock_was_read(now_s)
    may_move = answers is None or answers.steady_for_s > lost_after_s(current)
    with _continuing("returning deferred items to waiting"):
        queues.publish_items(store, items.wake_orphans(store, farm=farm))
    if may_move:
        with _continuing("closing items without attempts left"):
            _close_exhausted(store, current, farm=farm)
        with _continuing("moving items of absent cards"):
            queues.publish_items(store, _move_stranded(store, current, views, farm))
        with _continuing("cancelling jobs with interrupted planning"):
            _cancel_interrupted_planning(store, farm)
        with _continuing("moving items to idle cards"):
            _balance(store, current, views, farm)
    with _continuing("publishing items on several cards"):
        queues.publish_groups(store, groups.due(store, farm))
    with _continuing("publishing lost items"):
        _publish_lost(store, current, views, farm)
    with store.read() as session:
        unpublished = _unpublished(
            session, farm, queues.stale_after_s(current), current.reconcile_s / 2
        )
        unfinished = _unfinished(session, farm)
    for job_id, number in unpublished:
        with _continuing(f"publishing job {job_id}"):
            queues.publish_round(store, job_id, number)
    for job_id, number in requests.due(unfinished, current.reconcile_s):
        queues.publish_aggregate(job_id, number)


def _correct_times(store: Database, current: Settings) -> None:
    corrected = future_times.correct_future_times(store, current.lease_s)
    if corrected:
        log.warning(
            "The database's clock was set back: %s times in the future are set to the present",
            corrected,
        )


def repair_job(store: Database, current: Settings, farm: str, job_id: str) -> None:
    """Repair one job before its items are published again; see `reconcile_now`."""
    _close_exhausted(store, current, farm=farm, job_id=job_id)
    items.wake_orphans(store, farm=farm, job_id=job_id)
    _move_stranded(store, current, _views(store, current, farm), farm, job_id)


@contextlib.contextmanager
def _continuing(doing: str) -> Iterator[None]:
    """Log an error of one step and continue with the next. Raise `FarmUnavailable`, since all steps
    would fail.
    """
    try:
        yield
    except FarmUnavailable:
        raise
    except Exception:
        log.exception("The reconciler failed at %s; it continues with its next step", doing)


def _views(store: Database, current: Settings, farm: str) -> list[CardStatus]:
    """Return the cards of one farm. Cards of other farms use other brokers."""
    with store.read() as session:
        return [
            view
            for view in cards.views(session, current.heartbeat_s)
            if cards.farm_of(view.card.worker) == farm
        ]


def _close_exhausted(store: Database, current: Settings, **which: str | None) -> None:
    closed = items.close_exhausted(
        store, max_attempts=current.max_attempts, after_s=current.lease_s, **which
    )
    queues.follow_up(store, closed)


def _cancel_interrupted_planning(store: Database, farm: str) -> None:
    """Cancel the jobs whose planner was killed."""
    stale = col(tables.Round.planning_at_s) < database_now() - PLANNING_PATIENCE_S
    # if a planner was only suspended, it then finds that its job has ended
    with store.read() as session:
        interrupted = _newest_rounds(session, farm, col(tables.Round.planned_at_s).is_(None), stale)
    for job_id, _ in interrupted:
        log.warning(
            "The planning of job %s was interrupted; the job is cancelled. `farm resume --failed "
            "%s` continues it.",
            job_id,
            job_id,
        )
        jobs.cancel(store, job_id)


def _publish_lost(
    store: Database, current: Settings, views: Sequence[CardStatus], farm: str
) -> None:
    """Publish the items of cards that lost messages: idle cards, and busy cards with far fewer
    messages than items. It is unknown which items of a busy card have no message, so all are
    published. Workers decline extra messages."""
    idle_for_s = max(2 * current.heartbeat_s, 5.0)
    working = {view.card.id: view.state for view in views if view.state in WORKING}
    depths = queues.queue_depths(list(working))
    lost = _without_holder(farm, idle_for_s)
    with store.read() as session:
        waiting = lost.with_only_columns(
            col(Item.card_id), func.count(), func.count(col(Item.published_at_s))
        )
        numbers = session.execute(waiting.group_by(col(Item.card_id))).all()
    for card_id, number, published in numbers:
        messages = depths.get(card_id, number)
        idle = working.get(card_id) == CardState.IDLE and not messages
        if number if idle else published > messages + HELD_MESSAGES:
            with store.read() as session:
                ids = list(
                    session.scalars(lost.where(col(Item.card_id) == card_id).order_by(col(Item.id)))
                )
            queues.publish_items(store, ids, unless_within_s=idle_for_s)
            log.warning(
                "Items of card %s had no message left; %s are published again", card_id, len(ids)
            )


def _move_stranded(
    store: Database,
    current: Settings,
    views: Sequence[CardStatus],
    farm: str,
    job_id: str | None = None,
) -> list[int]:
    """Move tuples of absent cards to equal cards, and give up wholes at the end of jobs; return ids
    to publish.
    """
    away, for_now = set(), set()
    to_publish: list[int] = []
    working = [view.card for view in views if view.state in WORKING]
    limit_s = lost_after_s(current)
    for view in views:
        card, absent = view.card, view.seen_ago_s > limit_s
        # A worker that was stopped may be back soon, for example after an upgrade: wait as long as
        # for a lost card.
        gone = view.state in (CardState.LOST, CardState.STOPPED) and absent
        if not gone and view.state not in (CardState.DRAINING, CardState.QUARANTINED):
            continue
        away.add(card.id)
        if gone and view.seen_ago_s <= PATIENCE * limit_s:
            for_now.add(card.id)
        peers = [other for other in working if _kind(other) == _kind(card) and other.id != card.id]
        # An absent card has not renewed its leases either. Its tokens may still be valid; the move
        # invalidates them.
        # `move_items` checks again, since the card may be back by then
        unseen_s = limit_s if absent else None
        if moved := move_items(
            store, card.id, peers, in_work=absent, unseen_s=unseen_s, farm=farm, job_id=job_id
        ):
            log.warning(
                "%s items of card %s (%s) move to cards of the same model",
                len(moved),
                card.id,
                view.state,
            )
            to_publish += moved
    to_publish += groups.move_stranded(
        store, [view.card for view in views if view.card.id not in away], away, farm
    )
    if away and working:
        to_publish += give_up(store, away, working, for_now=for_now, farm=farm, job_id=job_id)
    return to_publish


def _kind(card: tables.CardRow) -> tuple[str, str | None]:
    """Return (model, software id) of a card. Readings of cards with equal values are
    interchangeable.
    """
    return card.model, card.software_id


def _balance(store: Database, current: Settings, views: Sequence[CardStatus], farm: str) -> None:
    """Move waiting items to cards that will be idle before the next pass."""
    kinds = by_key(_kind, (view.card for view in views if view.state in WORKING))
    for alike in kinds.values():
        if len(alike) > 1 and (
            moved := rebalance(store, alike, idle_within_s=2 * current.reconcile_s, farm=farm)
        ):
            log.info("%s items move to cards that would soon be idle", len(moved))
            queues.publish_items(store, moved)


def _without_holder(farm: str, idle_for_s: float) -> Any:
    """Return a query for ids of open items that are not under a lease and were not published just
    now. It omits items that the publisher of their round has not published yet."""
    this_round = and_(
        col(tables.Round.job_id) == col(Item.job_id), col(tables.Round.number) == col(Item.round)
    )
    newest_message_s = func.coalesce(Item.published_at_s, Item.created_at_s)
    return (
        sqlalchemy.select(col(Item.id))
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .join(tables.Round, this_round)
        .where(
            col(Item.state).in_([ItemState.WAITING, ItemState.CLAIMED]),
            col(Item.lease_until_s) < database_now(),
            item_state.has_message(),
            long_ago(newest_message_s, idle_for_s),
            col(tables.Job.state) == JobState.OPEN,
            col(tables.Job.farm) == farm,
            or_(
                col(Item.published_at_s).is_not(None), col(tables.Round.published_at_s).is_not(None)
            ),
        )
    )


def _newest_rounds(session: Session, farm: str, *which: Any) -> list[tuple[str, int]]:
    """Return (job id, number) of the newest round of each open job of a farm. Earlier rounds are
    closed.
    """
    newest = and_(
        col(tables.Round.job_id) == col(tables.Job.id),
        col(tables.Round.number) == col(tables.Job.round),
    )
    query = select(tables.Job.id, tables.Job.round).join(tables.Round, newest)
    query = query.where(tables.Job.state == JobState.OPEN, tables.Job.farm == farm, *which)
    return list(session.exec(query.order_by(col(tables.Job.created_at_s))))


def _unpublished(
    session: Session, farm: str, after_s: float, again_s: float
) -> list[tuple[str, int]]:
    """Return (job id, number) of rounds with items to publish, the oldest first, of which a process
    published a part at least ``again_s`` ago, or is publishing without progress for ``after_s``.

    A round that is still being planned counts too: its planner publishes more often, unless it was
    killed."""
    this_round = tables.Round
    progress_at_s = col(this_round.progress_at_s)
    nobody_publishes = and_(col(this_round.publisher).is_(None), long_ago(progress_at_s, again_s))
    due = or_(long_ago(progress_at_s, after_s), nobody_publishes)
    return _newest_rounds(session, farm, col(this_round.published_at_s).is_(None), due)


def _unfinished(session: Session, farm: str) -> list[tuple[str, int]]:
    """Return (job id, number) of rounds without open items and without a verdict."""
    still_open = [
        query.scalar_subquery() for query in items.queries_of_open(tables.Job.id, tables.Job.round)
    ]
    verdict = tables.VerdictRow
    judged = select(verdict.id).where(
        verdict.job_id == tables.Job.id, verdict.round == tables.Job.round
    )
    planned = col(tables.Round.planned_at_s).is_not(None)
    return _newest_rounds(
        session, farm, planned, *(open_id.is_(None) for open_id in still_open), ~judged.exists()
    )
