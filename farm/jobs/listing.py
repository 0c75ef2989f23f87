"""Lists of jobs and cards for people and programs, and item counts of cards for monitoring.

The rows of the lists are plain, with units in their keys, ready for JSON and for a table.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy
from sqlalchemy.orm import defer
from sqlmodel import Session, and_, case, col, func, or_, select

from farm.errors import UsageError
from farm.jobs import cards
from farm.jobs.cards import CardStatus
from farm.jobs.jobs import closed_items
from farm.store.columns import HAVE_READINGS
from farm.store.database import database_now, read_clock_s
from farm.store.tables import (
    CLOSED,
    OPEN,
    ImportedVerdict,
    Item,
    ItemState,
    Job,
    JobState,
    SoftwareRow,
    VerdictRow,
)
from farm.types.fingerprint import sound_fingerprint

#: Upper bounds of the histogram of item durations. Unit: s.
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
#: The busy share of a card is computed over this last span of time. Unit: s.
BUSY_SPAN_S = 300.0
#: Monitoring counts an item again until `LATE_S` after its end: late results change it, and its
#: transaction may last. A full count reads all items, so there is one in `RECOUNT_S`. Unit: s.
LATE_S, RECOUNT_S = 120.0, 3600.0
MOST_CURRENT = 20  # open jobs of `farm status` without a name


@dataclass(frozen=True)
class JobFilter:
    """Which jobs to list. Raises `UsageError` if a word is unknown.

    Attributes:
        texts: parts of the title; upper and lower case are the same.
        state, verdict: "" for all.
        imported: True: only jobs of other farms; False: only those of this farm; None: all.
    """

    texts: tuple[str, ...] = ()
    state: str = ""
    verdict: str = ""
    imported: bool | None = None

    def __post_init__(self) -> None:
        _check_word("state", self.state, tuple(JobState))
        _check_word("verdict", self.verdict, ("pass", "fail", "none"))

    def conditions(self) -> list[Any]:
        """The conditions of a query of jobs."""
        conditions = [col(Job.title).icontains(text, autoescape=True) for text in self.texts]
        if self.state:
            conditions.append(col(Job.state) == self.state)
        if self.verdict:
            newest_verdict = select(VerdictRow.id).where(
                VerdictRow.job_id == Job.id,
                VerdictRow.round == Job.round,
                VerdictRow.outcome == self.verdict,
                Job.state != JobState.CANCELLED,
            )
            conditions.append(newest_verdict.exists())
        return conditions


def _check_word(name: str, word: str, words: Sequence[str]) -> None:
    if word and word not in words:
        raise UsageError(f"There is no {name} '{word}'.", f"Choose one of {', '.join(words)}.")


def jobs(session: Session, limit: int, wanted: JobFilter = JobFilter()) -> list[dict[str, Any]]:
    """List the newest jobs and their newest verdicts. Accuracies and coverage are fractions, None
    without a verdict.

    ``limit``: for each of three groups: jobs of models, sweeps, and jobs of other farms.
    """
    newest = _newest_jobs(session, limit, wanted)
    ids = [job.id for job in newest]
    items = _items_by_state(session, ids)
    verdicts = _newest_verdicts(session, ids)
    imported = select(ImportedVerdict.job_id, ImportedVerdict.origin)
    origins = dict(session.exec(imported.where(col(ImportedVerdict.job_id).in_(ids))).all())
    return [
        {
            "id": job.id,
            "kind": job.kind,
            "title": job.title,
            "state": str(job.state),
            "round": job.round,
            "items": sum(items[job.id].values()),
            "closed": closed_items(job.state, items[job.id]),
            "created_at_s": job.created_at_s,
            "ended_at_s": job.ended_at_s,
            "origin": origins.get(job.id, ""),
            **_judged(job, verdicts.get(job.id)),
        }
        for job in newest
    ]


def _newest_jobs(session: Session, limit: int, wanted: JobFilter) -> list[Job]:
    """The newest jobs of each group, newest first."""
    is_imported = select(ImportedVerdict.job_id).where(ImportedVerdict.job_id == Job.id).exists()
    groups: list[list[Any]] = []
    if wanted.imported in (None, True):
        groups.append([is_imported])
    if wanted.imported in (None, False):
        groups += [[~is_imported, Job.kind == kind] for kind in ("model", "sweep")]
    newest = list[Job]()
    for group in groups:
        query = select(Job).where(*group, *wanted.conditions())
        newest += session.exec(query.order_by(col(Job.created_at_s).desc()).limit(limit))
    newest.sort(key=lambda job: -job.created_at_s)
    return newest


def _items_by_state(session: Session, job_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Job id -> state -> number of items."""
    items = defaultdict[str, dict[str, int]](dict)
    counts = select(Item.job_id, Item.state, func.count()).where(col(Item.job_id).in_(job_ids))
    by_state = counts.group_by(col(Item.job_id), col(Item.state))
    for job_id, state, number in session.execute(by_state):
        items[job_id][state] = number
    return items


def _newest_verdicts(session: Session, job_ids: Sequence[str]) -> dict[str, VerdictRow]:
    """Job id -> verdict of its newest round."""
    of_jobs = select(VerdictRow).where(col(VerdictRow.job_id).in_(job_ids))
    # The details contain every tuple of the job; this query does not load them.
    query = of_jobs.order_by(col(VerdictRow.round)).options(
        defer(VerdictRow.details)  # type: ignore[arg-type]
    )
    return {verdict.job_id: verdict for verdict in session.exec(query)}


def _judged(job: Job, verdict: VerdictRow | None) -> dict[str, Any]:
    """The outcome and the figures of a verdict. A cancelled job has no verdict in its report
    either."""
    if verdict is None or job.state == JobState.CANCELLED:
        outcome = "none" if job.state == JobState.CANCELLED else None
        return {
            "outcome": outcome,
            "accuracy_time": None,
            "accuracy_energy": None,
            "coverage": None,
        }
    return {
        "outcome": verdict.outcome,
        "accuracy_time": verdict.accuracy_time,
        "accuracy_energy": verdict.accuracy_energy,
        "coverage": verdict.coverage,
    }


def registered_cards(session: Session, heartbeat_s: float) -> list[dict[str, Any]]:
    """List every card that ever joined the farm, with its present state."""
    software = {row.id: row.model_dump() for row in session.exec(select(SoftwareRow))}
    views = cards.views(session, heartbeat_s, hourly=True, silent=True)
    return [_card_row(view, software.get(view.card.software_id or "")) for view in views]


def _card_row(view: CardStatus, software: dict[str, Any] | None) -> dict[str, Any]:
    card, reason = view.card, view.card.state_reason
    if not reason and view.silent_s:
        reason = f"has taken no item for {view.silent_s:.0f} s, though items wait"
    return {
        "id": card.id,
        "kind": card.kind,
        "model": card.model,
        "host": card.host,
        "index": card.index,
        "memory_bytes": card.memory_bytes,
        "driver": card.driver,
        "state": str(view.state),
        "state_reason": reason,
        "measuring": view.measuring,
        "waiting": view.waiting,
        "deferred": view.deferred,
        "done_last_hour": view.done_last_hour,
        "last_seen_ago_s": view.seen_ago_s,
        "software": software,
        "queue": card.queue,
        "worker": card.worker,
        "capabilities": list(card.capabilities),
        "links": card.links or {},
        "fingerprint": sound_fingerprint(card.fingerprint),
    }


@dataclass
class CardCounts:
    """Item counts of one card. ``within[i]``: measured items that took at most
    ``DURATION_BOUNDS_S[i]`` seconds.

    `measured`, `reused` and the durations only grow. The other numbers decrease if items are tried
    again, moved or handed back."""

    view: CardStatus
    measured: int = 0
    reused: int = 0
    begun_again: int = 0
    repeated: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # reason -> items
    open: Counter[str] = field(default_factory=Counter)  # state -> items
    oldest_waiting_s: float = 0.0
    within: tuple[int, ...] = (0,) * len(DURATION_BOUNDS_S)
    duration_s: float = 0.0
    busy_share: float = 0.0

    def add(self, state: str, reused: bool, reason: str, *sums: float | None) -> None:
        """Add items. ``sums``: those of `_Counting.totals`."""
        number, again, repeated, duration_s, *within = (total or 0 for total in sums)
        self.begun_again += int(again)
        self.repeated += int(repeated)
        if state == ItemState.DONE and reused:
            self.reused += int(number)
        elif state == ItemState.DONE:
            self.measured += int(number)
            self.duration_s += duration_s
            self.within = tuple(
                before + int(more) for before, more in zip(self.within, within, strict=True)
            )
        elif state == ItemState.FAILED:
            self.failed[reason or "unknown"] += int(number)
        elif state in OPEN:
            self.open[state] += int(number)


@dataclass
class EndedCounts:
    """Counts of the done and cancelled items of each card that ended before a time.

    All are counted again after `RECOUNT_S`. Until then, a cancelled item that is tried again is
    still among them."""

    before_s: float = 0.0
    read_at_s: float = -math.inf
    of_cards: dict[str, CardCounts] = field(default_factory=dict)


def count_items(
    session: Session, host: str, heartbeat_s: float, ended: EndedCounts | None = None
) -> list[CardCounts]:
    """Count the items of each card of ``host``. The totals come from the database, so they survive
    restarts of workers. ``ended`` has the counts of an earlier call and is kept up to date: with
    it, the cost does not grow with the ended items."""
    views = {
        view.card.id: view for view in cards.views(session, heartbeat_s) if view.card.host == host
    }
    counting, ended = _Counting(session, views), ended or EndedCounts()
    now_s = read_clock_s(session)
    clock_was_set_back = now_s < ended.before_s
    is_old = time.monotonic() - ended.read_at_s > RECOUNT_S
    if clock_was_set_back or is_old or ended.of_cards.keys() != views.keys():
        ended.before_s, ended.read_at_s = 0.0, time.monotonic()
        ended.of_cards = {card_id: CardCounts(view) for card_id, view in views.items()}

    over = col(Item.state).in_((ItemState.DONE, ItemState.CANCELLED))
    until_s = max(ended.before_s, now_s - LATE_S)
    for card_id, *totals in counting.totals(
        over, col(Item.ended_at_s) >= ended.before_s, col(Item.ended_at_s) < until_s
    ):
        ended.of_cards[card_id].add(*totals)
    ended.before_s = until_s
    counts = {
        card_id: replace(of_card, view=views[card_id], failed=Counter(), open=Counter())
        for card_id, of_card in ended.of_cards.items()
    }
    since = and_(over, col(Item.ended_at_s) >= ended.before_s)
    for card_id, *totals in counting.totals(
        or_(since, col(Item.state).in_((*OPEN, ItemState.FAILED)))
    ):
        counts[card_id].add(*totals)
    for card_id, oldest_s in counting.oldest_waiting():
        counts[card_id].oldest_waiting_s = max(0.0, float(oldest_s or 0.0))
    for card_id, busy_s in counting.busy():
        counts[card_id].busy_share = min(1.0, max(0.0, float(busy_s or 0.0) / BUSY_SPAN_S))
    return list(counts.values())


class _Counting:
    """Queries with one row per card of a host, or several; each row begins with the card's id."""

    def __init__(self, session: Session, card_ids: Iterable[str]) -> None:
        self.session = session
        self.card_ids = list(card_ids)

    def _per_card(self, *columns: Any, where: Any, by: Sequence[Any] = ()) -> Sequence[Any]:
        query = sqlalchemy.select(col(Item.card_id), *by, *columns).where(
            col(Item.card_id).in_(self.card_ids), *where
        )
        return self.session.execute(query.group_by(col(Item.card_id), *by)).all()

    def totals(self, *where: Any) -> Sequence[Any]:
        """Rows of card, state, reused, reason, and the sums of these items: their number, attempts
        after the first, late results, seconds, numbers within `DURATION_BOUNDS_S`."""
        again = case((col(Item.attempts) > 1, col(Item.attempts) - 1), else_=0)
        duration_s = col(Item.ended_at_s) - col(Item.started_at_s)

        within = [func.sum(case((duration_s <= bound, 1), else_=0)) for bound in DURATION_BOUNDS_S]
        return self._per_card(
            func.count(),
            func.sum(again),
            func.sum(Item.repeated),
            func.sum(duration_s),
            *within,
            where=(*where, or_(col(Item.state) != ItemState.DONE, HAVE_READINGS)),
            by=(col(Item.state), col(Item.reused), col(Item.reason)),
        )

    def oldest_waiting(self) -> Sequence[Any]:
        """Rows of card and longest waiting time, which begins with an item's newest message. Unit:
        s."""
        begin = func.coalesce(col(Item.published_at_s), col(Item.created_at_s))
        waited_s = database_now() - func.min(begin)
        return self._per_card(waited_s, where=(Item.state == ItemState.WAITING,))

    def busy(self) -> Sequence[Any]:
        """Rows of card and its busy time in the last `BUSY_SPAN_S`. Unit: s."""
        now = database_now()
        begin = now - BUSY_SPAN_S
        began = case((col(Item.started_at_s) < begin, begin), else_=col(Item.started_at_s))
        busy_s = func.sum(func.coalesce(col(Item.ended_at_s), now) - began)
        running = and_(col(Item.state) == ItemState.CLAIMED, col(Item.lease_until_s) >= now)
        # With the states in the query, the database uses an index instead of reading all closed
        # items.
        lately = or_(and_(col(Item.state).in_(CLOSED), col(Item.ended_at_s) > begin), running)
        is_measured = (col(Item.started_at_s).is_not(None), col(Item.reused).is_(False))
        return self._per_card(busy_s, where=(*is_measured, lately))


def open_jobs(session: Session) -> int:
    return session.exec(
        select(func.count()).select_from(Job).where(Job.state == JobState.OPEN)
    ).one()


def current_job_ids(session: Session) -> list[str]:
    """Return the ids of the newest open jobs; if no job is open, of the newest job alone."""
    newest_first = select(Job.id).order_by(col(Job.created_at_s).desc())
    open_jobs = session.exec(newest_first.where(Job.state == JobState.OPEN).limit(MOST_CURRENT))
    return list(open_jobs.all() or session.exec(newest_first.limit(1)).all())
