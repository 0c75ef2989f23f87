"""Create, find, cancel, retry and take over jobs, each in one transaction; report progress. `tasks`
sends messages.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlmodel import Session, col, func, select

from farm.jobs import groups
from farm.jobs.balance import time_left_s
from farm.jobs.cards import LOST_AFTER_HEARTBEATS, farm_of, is_gone, measured_now
from farm.jobs.cards import views as card_views
from farm.jobs.items import open_items
from farm.jobs.job_cards import chosen_cards
from farm.jobs.plan import JobPlan
from farm.jobs.rounds import add_round, note_planning
from farm.settings import settings
from farm.store import item_state, tables
from farm.store.content import store_protocol
from farm.store.database import Database, database_now, id_ranges, lock_items, locked, read_clock_s
from farm.store.tables import OPEN, Item, ItemState, Job, JobState
from farm.types.card_kind import is_cpu_id
from farm.types.request import Request

ABANDONED = "its `farm run` has ended unexpectedly; run the same command again to continue"


@dataclass(frozen=True)
class Progress:
    """The progress of a job."""

    job_id: str
    title: str
    state: str
    round: int
    counts: Mapping[str, int]  # item state -> items
    reused: int
    total: int
    expected_left_s: float
    current: tuple[tuple[str, str], ...]  # (card id, label of the item that it measures)
    started_at_s: float
    elapsed_s: float
    message: str = ""
    abandoned: bool = False  # the job is open, but the command of its embedded farm has died

    @property
    def over(self) -> bool:
        """True if the job has ended or is abandoned."""
        return self.state != JobState.OPEN or self.abandoned

    @property
    def closed(self) -> int:
        return closed_items(self.state, self.counts)

    def to_json(self) -> dict[str, object]:
        return {
            "job": self.job_id,
            "title": self.title,
            "state": self.state,
            "round": self.round,
            "items": dict(self.counts),
            "items_total": self.total,
            "items_reused": self.reused,
            "expected_left_s": self.expected_left_s,
            "measuring": [{"card": card, "operator": label} for card, label in self.current],
            "elapsed_s": self.elapsed_s,
            "message": self.message,
            "abandoned": self.abandoned,
        }


def closed_items(job_state: str, counts: Mapping[str, int]) -> int:
    """The number of items that have ended; of a cancelled job, without the items that were
    cancelled.
    """
    others = OPEN if job_state != JobState.CANCELLED else (*OPEN, ItemState.CANCELLED)
    return sum(number for state, number in counts.items() if state not in others)


def create(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    farm: str = "",
    pinned: bool = False,
    title: str = "",
    **of_round: Any,
) -> JobPlan:
    """Create a job with its first round.

    Args:
        farm: the embedded farm that owns the job; "": any control worker of the shared farm may
            continue it.
        pinned: a person named the cards, and no other card measures items of the job.
        title: the title for people. Default: the title of the request.
        of_round: the scope (default: all), capture and tuples, see `farm.jobs.rounds.add_round`.

    Raises:
        NoSuchCard, UsageError: see `farm.jobs.job_cards.chosen_cards`.
    """
    of_round.setdefault("scope", ("all",))
    of_round.setdefault("capture_id", None)
    variant = request.variant
    with database.write() as session:
        cards = chosen_cards(session, card_ids)
        job = Job(
            id=_new_id(session),
            kind="sweep" if variant is None else "model",
            title=title or request.title,
            variant_id=None if variant is None else variant.id,
            protocol_id=store_protocol(session, request.protocol),
            request={**request.to_json(), "cards": [card.id for card in cards], "pinned": pinned},
            request_id=request.id,
            farm=farm,
            created_at_s=database_now(),  # type: ignore[arg-type]
        )
        session.add(job)
        session.flush()
        return add_round(session, job, reason="first", **of_round)


def progress(session: Session, job_id: str) -> Progress:
    """Return the present progress of a job."""
    job = session.get_one(Job, job_id)
    now = read_clock_s(session)
    query = (
        sqlalchemy.select(
            Item.state, Item.reused, Item.card_id, func.count(), func.sum(Item.expected_s)
        )  # type: ignore[call-overload]
        .where(Item.job_id == job_id)
        .group_by(col(Item.state), col(Item.reused), col(Item.card_id))
    )
    counts, reused = Counter[str](), 0
    left_s, open_on = defaultdict[str, float](float), Counter[str]()
    for state, was_reused, card_id, number, expected_s in session.execute(query):
        counts[state] += number
        if was_reused:
            reused += number
        if state in OPEN:
            left_s[card_id] += expected_s or 0.0
            open_on[card_id] += number
    current = measured_now(session, Item.job_id == job_id)
    is_open = job.state == JobState.OPEN
    abandoned = is_open and is_gone(job.farm, settings().host)
    message = ABANDONED if abandoned else _message(session, job, counts, current, open_on)
    labels = {card_id: label or job.title for card_id, label in current.items()}
    return Progress(
        job_id=job.id,
        title=job.title,
        state=job.state,
        round=job.round,
        counts=counts,
        reused=reused,
        total=sum(counts.values()),
        expected_left_s=time_left_s(session, job, left_s) if is_open and not abandoned else 0.0,
        current=() if abandoned else tuple(sorted(labels.items())),
        started_at_s=job.created_at_s,
        elapsed_s=(job.ended_at_s or now) - job.created_at_s,
        message=message,
        abandoned=abandoned,
    )


def _message(
    session: Session,
    job: Job,
    counts: Mapping[str, int],
    current: Mapping[str, str | None],
    open_on: Mapping[str, int],
) -> str:
    """What people should know about a job that is not abandoned; "" if there is nothing.

    ``current``: card id -> label of the item that it measures."""
    newest = session.get(tables.Round, (job.id, job.round))
    if newest is not None and newest.planned_at_s is None:
        if job.state == JobState.OPEN:
            return "more items are being planned"
        return f"its planning was interrupted: `farm resume --failed {job.id}` continues it"
    if job.state == JobState.OPEN and not current:
        return waits_for(session, job, open_on) or groups.waits_for(session, job.id)
    if counts[ItemState.WAITING] and any(is_cpu_id(card_id) for card_id in current):
        return "a CPU times the waiting items in turn, so they end together"
    return ""


def cancel(database: Database, job_id: str) -> int:
    """Cancel a job, then its open items in several transactions; return the number of items.
    Workers ignore their messages. If the process ends too early, a repetition cancels the rest."""
    with database.write() as session:
        job = locked(session, Job, job_id)
        if job is None or job.state == JobState.DONE:
            return 0
        if job.state == JobState.OPEN:
            job.state, job.ended_at_s = JobState.CANCELLED, database_now()  # type: ignore[assignment]
        ranges = id_ranges(session, job_id)
    cancelled = 0
    for item_range in ranges:
        with database.write() as session:
            job = locked(session, Job, job_id)
            if job is not None and job.state == JobState.CANCELLED:
                lock_items(session, item_range, col(Item.state).in_(OPEN))
                cancelled += session.exec(item_state.CANCEL.update(item_range)).rowcount
    return cancelled


def retry_failed(database: Database, job_id: str) -> int:
    """Let the failed and cancelled items of a job wait again with all attempts; return the number
    of open items.

    Cancelled items whose measurement still runs become claimed again. Cancelled items with a
    reading become done. Several transactions do this; the last one opens the job."""
    with database.read() as session:
        ranges = id_ranges(session, job_id)
    kept = begun = 0
    for item_range in ranges:
        with database.write() as session:
            job = locked(session, Job, job_id)
            if job is None:
                return 0
            lock_items(
                session, item_range, col(Item.state).in_([ItemState.FAILED, ItemState.CANCELLED])
            )
            kept += session.exec(
                item_state.STAND.update(item_range, col(Item.reading_id).is_not(None))
            ).rowcount
            lasts = col(Item.lease_until_s) >= database_now()
            begun += session.exec(
                item_state.GO_ON.update(item_range, item_state.in_work(), lasts)
            ).rowcount
            # Put all items into the newest round, whose verdict is computed again.
            again = item_state.AGAIN.update(
                item_range, col(Item.reason) != item_state.NOT_RUN, round=job.round
            )
            begun += session.exec(again).rowcount
    with database.write() as session:
        job = locked(session, Job, job_id)
        if job is None:
            return begun
        newest = session.get(tables.Round, (job_id, job.round))
        unplanned = newest is not None and newest.planned_at_s is None
        goes_on = kept or unplanned or _has_listed(session, job)
        if goes_on or open_items(session, job_id, job.round):
            job.state, job.ended_at_s = JobState.OPEN, None
            note_planning(session, job)  # if planning was interrupted, the caller continues it now
            judged = (
                col(tables.VerdictRow.job_id) == job_id,
                col(tables.VerdictRow.round) == job.round,
            )
            session.execute(sqlalchemy.delete(tables.VerdictRow).where(*judged))
    return begun


def _has_listed(session: Session, job: Job) -> bool:
    """True if the newest round listed the kernels of a model: the round that measures them was not
    planned.
    """
    listed = select(Item.id).where(
        Item.job_id == job.id, Item.round == job.round, item_state.has_listed()
    )
    return session.exec(listed).first() is not None


def take_over(database: Database, job_id: str, farm: str, heartbeat_s: float) -> bool:
    """Transfer a job to ``farm``, which continues it; return False if the job's present farm is
    alive.

    An embedded farm is alive if one of its workers had a recent heartbeat and its process has not
    ended."""
    with database.write() as session:
        job = locked(session, Job, job_id)
        if job is None or job.farm == farm or not job.farm:
            return job is not None and job.farm == farm
        within_s = LOST_AFTER_HEARTBEATS * heartbeat_s
        if not is_gone(job.farm, settings().host) and any(
            farm_of(view.card.worker) == job.farm and view.seen_ago_s <= within_s
            for view in card_views(session, heartbeat_s)
        ):
            return False
        job.farm = farm
        return True


def waits_for(session: Session, job: Job, open_on: Mapping[str, int]) -> str:
    """Describe the first card that has open items of the job (``open_on``: card id -> their number)
    and does not work; "" if all cards work."""
    views = {view.card.id: view for view in card_views(session, settings().heartbeat_s)}
    working = (tables.CardState.IDLE, tables.CardState.BUSY)
    idle_ids = [
        card_id
        for card_id in sorted(open_on)
        if card_id in views and views[card_id].state not in working
    ]
    if not idle_ids:
        return ""
    card_id = idle_ids[0]
    view, number = views[card_id], open_on[card_id]
    host = view.card.host or "its host"
    start = f"start its worker on {host} with `farm worker`"
    if job.farm:
        start = "its command starts the worker again, or continues when you repeat it"
    mend = {
        tables.CardState.STARTING: "its worker is starting",
        tables.CardState.DRAINING: f"`farm cards resume {card_id}` gives the card work again",
        tables.CardState.QUARANTINED: f"`farm cards release {card_id}` ends its quarantine",
    }.get(tables.CardState(view.state), start)
    other = "" if job.asked.get("pinned") else f" or a card of the same model ({view.card.model})"
    return (
        f"{number} {'items wait' if number != 1 else 'item waits'} for {card_id} "
        f"({view.state}){other}: {mend}."
    )


def done_entries(session: Session, requests: Sequence[Request]) -> dict[str, str]:
    """Return `Request.id` -> job id for the requests that a job has completed without failed items
    and with at least the same precision. If several jobs have, it is the newest one."""
    by_id = {request.id: request for request in requests}
    same = select(Job.id).where(Job.state == JobState.DONE, col(Job.request_id).in_(by_id))
    with_failures = select(Item.job_id).where(
        col(Item.state).in_([ItemState.FAILED, ItemState.CANCELLED]),
        col(Item.reason) != item_state.NOT_RUN,
    )
    of_several_softwares = (
        select(Item.job_id)
        .join(tables.ReadingRow, col(tables.ReadingRow.id) == col(Item.reading_id))
        .where(col(Item.job_id).in_(same))
        .group_by(col(Item.job_id))
        .having(func.count(func.distinct(tables.ReadingRow.software_id)) > 1)
    )
    sound = select(Job).where(
        col(Job.id).in_(same),
        col(Job.id).not_in(with_failures),
        col(Job.id).not_in(of_several_softwares),
    )
    done = {}
    for job in session.exec(sound.order_by(col(Job.created_at_s))):
        if Request.from_json(job.request).as_precise_as(by_id[job.request_id]):
            done[job.request_id] = job.id
    return done


def _new_id(session: Session) -> str:
    # Easy to say and to type: lower case, without characters that look alike.
    alphabet = "abcdefghjkmnpqrstuvwxyz23456789"
    while True:
        job_id = "".join(secrets.choice(alphabet) for _ in range(8))
        if session.get(Job, job_id) is None:
            return job_id
