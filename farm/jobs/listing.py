"""Lists of jobs and cards for people and programs, and item counts of cards for monitoring.

The rows of the lists are plain, with units in their keys, ready for JSON and for a table.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy
from sqlalchemy.orm import defer
from sqlmodel import Session, and_, case, col, func, or_, select

from farm.devices.fingerprint import sound_fingerprint
from farm.errors import UsageError
from farm.jobs import cards
from farm.jobs.cards import CardStatus
from farm.jobs.jobs import closed_items
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

#: Upper bounds of the histogram of item durations. Unit: s.
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
#: The busy share of a card is computed over this last span of time. Unit: s.
BUSY_SPAN_S = 300.0
#: Monitoring counts an item again until `LATE_S` after its end: late results change it, and its
#: transaction may last. A full count reads all items, so there is one in `RECOUNT_S`. Unit: s.
LATE_S, RECOUNT_S = 120.0, 3600.0


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
        for name, known in (("state", tuple(JobState)), ("verdict", ("pass", "fail", "none"))):
            value = getattr(self, name)
            if value and value not in known:
                raise UsageError(
                    f"There is no {name} '{value}'.", f"Choose one of {', '.join(known)}."
                )

    def conditions(self) -> list[Any]:
        found = [col(Job.title).icontains(text, autoescape=True) for text in self.texts]
        found += [col(Job.state) == self.state] if self.state else []
        judged = select(VerdictRow.id).where(
            VerdictRow.job_id == Job.id, VerdictRow.round == Job.round
        )
        if self.verdict:
            found.append(
                judged.where(
                    VerdictRow.outcome == self.verdict, Job.state != JobState.CANCELLED
                ).exists()
            )
        return found


def jobs(session: Session, limit: int, wanted: JobFilter = JobFilter()) -> list[dict[str, Any]]:
    """List the newest jobs and their newest verdicts. Accuracies and coverage are fractions, None
    without a verdict.

    ``limit``: for each of three groups: jobs of models, sweeps, and jobs of other farms.
    """
    is_imported = select(ImportedVerdict.job_id).where(ImportedVerdict.job_id == Job.id).exists()
    groups: list[tuple[bool, list[Any]]] = [(True, [is_imported])]
    groups += [(False, [~is_imported, Job.kind == kind]) for kind in ("model", "sweep")]
    newest = list[Job]()
    for imported, group in groups:
        if wanted.imported in (None, imported):
            query = (
                select(Job)
                .where(*group, *wanted.conditions())
                .order_by(col(Job.created_at_s).desc())
            )
            newest += session.exec(query.limit(limit))
    newest.sort(key=lambda job: -job.created_at_s)
    ids = [job.id for job in newest]
    items = defaultdict[str, dict[str, int]](dict)
    counted = select(Item.job_id, Item.state, func.count()).where(col(Item.job_id).in_(ids))
    for job_id, state, number in session.execute(
        counted.group_by(col(Item.job_id), col(Item.state))
    ):
        items[job_id][state] = number
    by_round = (
        select(VerdictRow).where(col(VerdictRow.job_id).in_(ids)).order_by(col(VerdictRow.round))
    )
    # The details contain every tuple of the job; this query does not load them.
    without_details = by_round.options(defer(VerdictRow.details))  # type: ignore[arg-type]
    verdicts = {verdict.job_id: verdict for verdict in session.exec(without_details)}
    theirs = select(ImportedVerdict.job_id, ImportedVerdict.origin)
    origins = dict(session.exec(theirs.where(col(ImportedVerdict.job_id).in_(ids))).all())
    return [
        {
            **{name: getattr(job, name) for name in ("id", "kind", "title")},
            "state": str(job.state),
            "round": job.round,
            "items": sum(items[job.id].values()),
            "closed": closed_items(job.state, items[job.id]),
            "created_at_s": job.created_at_s,
            "ended_at_s": job.ended_at_s,
            "origin": origins.get(job.id, ""),
            # A cancelled job has no verdict in its report either.
            **(
                _judged(verdicts.get(job.id))
                if job.state != JobState.CANCELLED
                else _judged(None, "none")
            ),
        }
        for job in newest
    ]


def _judged(verdict: VerdictRow | None, outcome: str | None = None) -> dict[str, Any]:
    figures = ("accuracy_time", "accuracy_energy", "coverage")
    return {
        "outcome": verdict.outcome if verdict else outcome,
        **{name: getattr(verdict, name) if verdict else None for name in figures},
    }


def registered_cards(session: Session, heartbeat_s: float) -> list[dict[str, Any]]:
    """List every card that ever joined the farm, with its present state."""
    described = ("id", "kind", "model", "host", "index", "memory_bytes", "driver")
    software = {row.id: row.model_dump() for row in session.exec(select(SoftwareRow))}
    return [
        {
            **{name: getattr(view.card, name) for name in described},
            "state": str(view.state),
            "state_reason": view.card.state_reason
            or (
                f"has taken no item for {view.silent_s:.0f} s, though items wait"
                if view.silent_s
                else ""
            ),
            **{
                name: getattr(view, name)
                for name in ("measuring", "waiting", "deferred", "done_last_hour")
            },
            "last_seen_ago_s": view.seen_ago_s,
            "software": software.get(view.card.software_id or ""),
            "queue": view.card.queue,
            "worker": view.card.worker,
            "capabilities": list(view.card.capabilities),
            "links": view.card.links or {},
            "fingerprint": sound_fingerprint(view.card.fingerprint),
        }
        for view in cards.views(session, heartbeat_s, hourly=True, silent=True)
    ]


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
        """Add items. ``sums``: their number, attempts after the first, late results, seconds,
        numbers within bounds.
        """
        number, again, repeated, duration_s, *within = (one or 0 for one in sums)
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
    now, ended = database_now(), ended or EndedCounts()

    def per_card(*columns: Any, where: Any, by: Sequence[Any] = ()) -> Sequence[Any]:
        query = sqlalchemy.select(col(Item.card_id), *by, *columns).where(
            col(Item.card_id).in_(views), *where
        )
        return session.execute(query.group_by(col(Item.card_id), *by)).all()

    again = case((col(Item.attempts) > 1, col(Item.attempts) - 1), else_=0)
    duration_s = col(Item.ended_at_s) - col(Item.started_at_s)
    in_bounds = [func.sum(case((duration_s <= bound, 1), else_=0)) for bound in DURATION_BOUNDS_S]
    sums = (
        func.count(),
        func.sum(again),
        func.sum(Item.repeated),
        func.sum(duration_s),
        *in_bounds,
    )

    def counted(*where: Any) -> Sequence[Any]:
        return per_card(
            *sums, where=where, by=(col(Item.state), col(Item.reused), col(Item.reason))
        )

    over = col(Item.state).in_((ItemState.DONE, ItemState.CANCELLED))
    now_s = read_clock_s(session)
    set_back = now_s < ended.before_s
    if (
        set_back
        or time.monotonic() - ended.read_at_s > RECOUNT_S
        or ended.of_cards.keys() != views.keys()
    ):
        ended.before_s, ended.read_at_s = 0.0, time.monotonic()
        ended.of_cards = {card_id: CardCounts(view) for card_id, view in views.items()}
    until_s = max(ended.before_s, now_s - LATE_S)
    for card_id, *of in counted(
        over, col(Item.ended_at_s) >= ended.before_s, col(Item.ended_at_s) < until_s
    ):
        ended.of_cards[card_id].add(*of)
    ended.before_s = until_s
    found = {
        card_id: replace(counts, view=views[card_id], failed=Counter(), open=Counter())
        for card_id, counts in ended.of_cards.items()
    }
    since = and_(over, col(Item.ended_at_s) >= ended.before_s)
    for card_id, *of in counted(or_(since, col(Item.state).in_((*OPEN, ItemState.FAILED)))):
        found[card_id].add(*of)
    # The waiting time of an item begins with its newest message.
    waited_s = now - func.min(func.coalesce(col(Item.published_at_s), col(Item.created_at_s)))
    for card_id, oldest_s in per_card(waited_s, where=(Item.state == ItemState.WAITING,)):
        found[card_id].oldest_waiting_s = max(0.0, float(oldest_s or 0.0))
    begin = now - BUSY_SPAN_S
    began = case((col(Item.started_at_s) < begin, begin), else_=col(Item.started_at_s))
    busy_s = func.sum(func.coalesce(col(Item.ended_at_s), now) - began)
    running = and_(col(Item.state) == ItemState.CLAIMED, col(Item.lease_until_s) >= now)
    # With the states in the query, the database uses an index instead of reading all closed items.
    lately = or_(and_(col(Item.state).in_(CLOSED), col(Item.ended_at_s) > begin), running)
    measured = (col(Item.started_at_s).is_not(None), col(Item.reused).is_(False))
    for card_id, seconds in per_card(busy_s, where=(*measured, lately)):
        found[card_id].busy_share = min(1.0, max(0.0, float(seconds or 0.0) / BUSY_SPAN_S))
    return list(found.values())


def open_jobs(session: Session) -> int:
    return session.exec(
        select(func.count()).select_from(Job).where(Job.state == JobState.OPEN)
    ).one()
