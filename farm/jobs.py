"""Jobs: planned into items, followed, continued in further rounds, ended.

Planning asks the database first: what has a reading that serves is closed at once, only the rest is placed on
cards. Everything here is a transaction on the database; publishing messages is the queues' business (`tasks`).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy
from sqlalchemy import update
from sqlmodel import Session, col, func, select

from farm.benchmark.protocol import Protocol
from farm.captures import classes
from farm.cards import views as card_views
from farm.errors import NoSuchCard, NoSuchJob, UsageError, did_you_mean
from farm.items import best_reading
from farm.placement import Work, place
from farm.request import Request
from farm.roofline import Roofline, roofline_of
from farm.settings import settings
from farm.store import tables
from farm.store.content import store_protocol
from farm.store.database import Database, database_now
from farm.store.tables import OPEN, CardState, Item, ItemState, JobState

#: What an item takes on a card beside its window and warm-up: rebuild, write, hand-over.
ITEM_OVERHEAD_S = 0.3


@dataclass(frozen=True)
class Planned:
    """What planning one round came to."""

    job_id: str
    round: int
    new: int
    reused: int


@dataclass(frozen=True)
class Progress:
    """Where a job stands."""

    job_id: str
    title: str
    state: str
    round: int
    counts: Mapping[str, int]  # item state -> items
    reused: int
    total: int
    expected_left_s: float
    current: tuple[tuple[str, str], ...]  # (card id, label of what it measures)
    started_at_s: float
    elapsed_s: float
    message: str = ""

    @property
    def closed(self) -> int:
        return sum(self.counts.get(state, 0) for state in tables.CLOSED)

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
        }


def create(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    scope: Sequence[str] = ("all",),
    capture_id: int | None = None,
    operator_ids: Sequence[str] = (),
    farm: str = "",
    pinned: bool = False,
) -> Planned:
    """Write a job with its first round.

    Args:
        scope: short names of the operator types to measure, or ("all",).
        capture_id: for a model, the calls it is made of.
        operator_ids: for a sweep, the tuples themselves.
        farm: the embedded farm that owns the job, "" for one that any control worker may continue.
        pinned: the cards were named by a person: a card that was not, and is idle, takes nothing of it.

    Raises:
        NoSuchCard: a chosen card is not registered.
        UsageError: the chosen cards are of several models or run different software.
    """
    with database.write() as session:
        cards = _cards(session, card_ids)
        job = tables.Job(
            id=_new_id(session),
            kind="model" if request.variant else "sweep",
            title=request.title,
            variant_id=request.variant.id if request.variant else None,
            protocol_id=store_protocol(session, request.protocol),
            request={**request.to_json(), "cards": [card.id for card in cards], "pinned": pinned},
            request_id=request.id,
            farm=farm,
            created_at_s=database_now(),  # type: ignore[arg-type]
        )
        session.add(job)
        session.flush()
        return _add_round(session, job, request, cards, scope, capture_id, operator_ids, "first")


def add_round(
    session: Session, job: tables.Job, *, scope: Sequence[str], capture_id: int | None, reason: str
) -> Planned:
    """Continue a job with a further round, in the caller's transaction."""
    cards = _cards(session, job.request["cards"])
    return _add_round(session, job, Request.from_json(job.request), cards, scope, capture_id, (), reason)


def _add_round(
    session: Session,
    job: tables.Job,
    request: Request,
    cards: Sequence[tables.Card],
    scope: Sequence[str],
    capture_id: int | None,
    operator_ids: Sequence[str],
    reason: str,
) -> Planned:
    job.round += 1
    session.add(job)
    session.add(
        tables.Round(
            job_id=job.id,
            number=job.round,
            reason=reason,
            operators=list(scope),
            capture_id=capture_id,
            created_at_s=database_now(),  # type: ignore[arg-type]
        )
    )
    session.flush()
    there = set(
        session.exec(select(Item.subject_id, Item.protocol_id).where(Item.job_id == job.id, Item.role == "tuple")).all()
    )
    roofline = _roofline(request, cards[0])
    tuples = [
        new_item(job, cards[0], "tuple", "operator", operator.id, protocol.id, _expected_s(request, roofline, operator))
        for operator, protocol in _operators(session, request, capture_id, operator_ids)
        if (operator.id, protocol.id) not in there and ("all" in scope or operator.short_name in scope)
    ]
    reused = _reuse(session, tuples, request, cards)
    new = [item for item in tuples if item.state == ItemState.WAITING]
    place_items(session, new, cards)
    extra: list[Item] = []
    if request.variant is not None and job.round == 1:
        extra += _wholes(session, job, request, cards, tuples, _mean_s(tuples))
        if len(busy := {item.card_id for item in new}) > 1:
            heaviest = max(new, key=lambda item: item.expected_s)
            extra += [_canary(job, card, heaviest) for card in cards if card.id in busy]
    items = tuples + extra
    session.add_all(items)
    session.flush()
    closed = sum(item.state == ItemState.DONE for item in items)
    assert reused <= closed
    return Planned(job.id, job.round, len(items) - closed, closed)


def _wholes(
    session: Session,
    job: tables.Job,
    request: Request,
    cards: Sequence[tables.Card],
    tuples: Sequence[Item],
    expected_s: float,
) -> list[Item]:
    """The whole model on every card that contributes: those that measure now, those whose readings are reused."""
    assert request.variant is not None
    protocol = request.protocol.of_whole
    store_protocol(session, protocol)
    by_id = {card.id: card for card in cards}
    measuring = {item.card_id for item in tuples if item.state == ItemState.WAITING}
    lenders = {item.card_id for item in tuples if item.state == ItemState.DONE}
    wholes = []
    for card_id in sorted(measuring | lenders) or [cards[0].id]:
        card = by_id.get(card_id) or session.get(tables.Card, card_id)
        assert card is not None
        whole = new_item(job, card, "whole", "variant", request.variant.id, protocol.id, expected_s + 2.0)
        _reuse(session, [whole], request, [card])
        if whole.state == ItemState.DONE or card_id in by_id:
            wholes.append(whole)  # a lender that was not chosen gives what it has, and is asked for nothing
    if not wholes:
        wholes.append(new_item(job, cards[0], "whole", "variant", request.variant.id, protocol.id, expected_s + 2.0))
    return wholes


def _canary(job: tables.Job, card: tables.Card, heaviest: Item) -> Item:
    return new_item(
        job,
        card,
        "canary",
        heaviest.subject_kind,
        heaviest.subject_id,
        heaviest.protocol_id,
        heaviest.expected_s,
    )


def new_item(
    job: tables.Job,
    card: tables.Card,
    role: str,
    subject_kind: str,
    subject_id: str,
    protocol_id: str,
    expected_s: float,
) -> Item:
    return Item(
        job_id=job.id,
        round=job.round,
        role=role,
        subject_kind=subject_kind,
        subject_id=subject_id,
        protocol_id=protocol_id,
        card_id=card.id,
        card_model=card.model,
        expected_s=expected_s,
        created_at_s=database_now(),  # type: ignore[arg-type]
    )


def _operators(
    session: Session, request: Request, capture_id: int | None, operator_ids: Sequence[str]
) -> list[tuple[tables.Operator, Protocol]]:
    """What is to be read, and under which protocol: a tuple that meets two classes of data is two things."""
    if capture_id is not None:
        pairs = list(classes(session, capture_id, request.protocol.data))
    else:
        pairs = [(operator_id, request.protocol.of_whole.data) for operator_id in dict.fromkeys(operator_ids)]
    found: dict[str, tables.Operator] = {}
    for chunk in _chunks(sorted({operator_id for operator_id, _ in pairs})):
        for operator in session.exec(select(tables.Operator).where(col(tables.Operator.id).in_(chunk))):
            found[operator.id] = operator
    protocols = {data: request.protocol.with_data(data) for _, data in pairs}
    for protocol in protocols.values():
        store_protocol(session, protocol)
    return [(found[operator_id], protocols[data]) for operator_id, data in pairs]


def _mean_s(items: Sequence[Item]) -> float:
    return sum(item.expected_s for item in items) / max(1, len(items))


def _reuse(session: Session, items: Sequence[Item], request: Request, cards: Sequence[tables.Card]) -> int:
    """Close the items for which a reading is there; how many."""
    software_id = cards[0].software_id
    if request.reuse == "none" or software_id is None:
        return 0
    candidates: dict[tuple[str, str], list[tables.Reading]] = defaultdict(list)
    for chunk in _chunks([item.subject_id for item in items]):
        query = select(tables.Reading).where(
            col(tables.Reading.subject_id).in_(chunk),
            col(tables.Reading.protocol_id).in_({item.protocol_id for item in items}),
            tables.Reading.software_id == software_id,
            col(tables.Reading.simulated).is_(False),
        )
        for reading in session.exec(query):
            candidates[reading.subject_id, reading.protocol_id].append(reading)
    chosen = {card.id for card in cards}
    closed = 0
    for item in items:
        served = candidates[item.subject_id, item.protocol_id]
        if (best := best_reading(served, item, request, chosen)) is not None:
            item.state, item.reading_id, item.reused = ItemState.DONE, best.id, True
            item.card_id, item.ended_at_s = best.card_id, database_now()  # type: ignore[assignment]
            closed += 1
    return closed


def place_items(session: Session, items: Sequence[Item], cards: Sequence[tables.Card]) -> None:
    """Longest first onto the card that is free first, counting what waits there already (LPT)."""
    ahead = dict(
        session.execute(
            select(Item.card_id, func.sum(Item.expected_s))
            .where(col(Item.state).in_(OPEN), col(Item.card_id).in_([card.id for card in cards]))
            .group_by(col(Item.card_id))
        ).all()
    )
    free_at_s = {card.id: float(ahead.get(card.id) or 0.0) for card in cards}
    ordered = sorted(items, key=lambda item: item.subject_id)
    placed = place((Work(number, item.expected_s) for number, item in enumerate(ordered)), free_at_s)
    for number, item in enumerate(ordered):
        item.card_id = placed[number]


def _expected_s(request: Request, roofline: Roofline, operator: tables.Operator) -> float:
    """A guess at an item's time on the card: the window holds at least a dozen passes."""
    one_pass_s = roofline.estimate_us(operator.flops, operator.bytes_moved) * 1e-6
    return ITEM_OVERHEAD_S + request.stopping.warm_up_s + max(request.stopping.minimum_s, 12 * one_pass_s)


def _roofline(request: Request, card: tables.Card) -> Roofline:
    dtype = request.variant.dtype if request.variant else "float32"
    return roofline_of(card.kind, card.model, card.fingerprint, dtype=dtype, tf32=request.protocol.tf32)


def _cards(session: Session, card_ids: Sequence[str]) -> list[tables.Card]:
    found = {card.id: card for card in session.exec(select(tables.Card).where(col(tables.Card.id).in_(card_ids)))}
    if missing := [card_id for card_id in card_ids if card_id not in found]:
        raise NoSuchCard(f"No card '{missing[0]}' is registered.", "Start its worker with `farm worker`.")
    cards = [found[card_id] for card_id in card_ids]
    if not cards:
        raise NoSuchCard("No card was chosen.", "Start a worker with `farm worker`, or choose one with --card.")
    if len(models := {card.model for card in cards}) > 1:
        raise UsageError(
            f"The chosen cards are of several models: {', '.join(sorted(models))}.",
            "A job measures one card model; choose with --card.",
        )
    if len({card.software_id for card in cards}) > 1:
        raise UsageError(
            "The chosen cards run different software, and readings of different software are not summed.",
            "Compare `farm cards --json`; give all hosts the same torch, CUDA and driver, or choose with --card.",
        )
    return cards


def find(session: Session, job_or_prefix: str) -> tables.Job:
    """The job of that id, or the only one whose id begins so.

    Raises:
        NoSuchJob: none, or several.
    """
    jobs = list(session.exec(select(tables.Job).where(col(tables.Job.id).startswith(job_or_prefix, autoescape=True))))
    if len(jobs) == 1:
        return jobs[0]
    if exact := [job for job in jobs if job.id == job_or_prefix]:
        return exact[0]
    if jobs and job_or_prefix:
        raise NoSuchJob(f"Several jobs begin with '{job_or_prefix}'.", "Give more of the id; `farm jobs` lists them.")
    near = did_you_mean(job_or_prefix, session.exec(select(tables.Job.id)))
    raise NoSuchJob(f"There is no job '{job_or_prefix}'.", near or "List the jobs with `farm jobs`.")


def progress(session: Session, job_id: str, heartbeat_s: float | None = None) -> Progress:
    """Where the job stands now.

    Args:
        heartbeat_s: how often workers are seen, for telling a lost card; the setting's if None.
    """
    job = session.get_one(tables.Job, job_id)
    now = _now(session)
    counts: dict[str, int] = {}
    reused = 0
    left_s: dict[str, float] = defaultdict(float)
    query = (
        sqlalchemy.select(Item.state, Item.reused, Item.card_id, func.count(), func.sum(Item.expected_s))  # type: ignore[call-overload]
        .where(Item.job_id == job_id)
        .group_by(col(Item.state), col(Item.reused), col(Item.card_id))
    )
    for state, was_reused, card_id, number, expected_s in session.execute(query):
        counts[state] = counts.get(state, 0) + number
        reused += number if was_reused else 0
        if state in OPEN:
            left_s[card_id] += expected_s or 0.0
    if heartbeat_s is None:
        heartbeat_s = settings().heartbeat_s
    current = session.execute(
        select(Item.card_id, Item.role, tables.Operator.label)
        .select_from(Item)
        .join(tables.Operator, col(tables.Operator.id) == col(Item.subject_id), isouter=True)
        .where(Item.job_id == job_id, Item.state == ItemState.CLAIMED)
        .order_by(col(Item.card_id))
    ).all()
    return Progress(
        job.id,
        job.title,
        job.state,
        job.round,
        counts,
        reused,
        sum(counts.values()),
        max(left_s.values(), default=0.0),
        tuple((card_id, label or job.title) for card_id, _role, label in current),
        job.created_at_s,
        (job.ended_at_s or now) - job.created_at_s,
        waits_for(session, job_id, heartbeat_s) if job.state == JobState.OPEN and not current else "",
    )


def cancel(database: Database, job_id: str) -> int:
    """End a job: its open items are cancelled, their messages find nothing to do. How many items there were."""
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        if job.state != JobState.OPEN:
            return 0
        job.state, job.ended_at_s = JobState.CANCELLED, database_now()  # type: ignore[assignment]
        session.add(job)
        ended = session.execute(
            update(Item)
            .where(col(Item.job_id) == job_id, col(Item.state).in_(OPEN))
            # The token stays: what is in work is finished, and its reading kept.
            .values(state=ItemState.CANCELLED, claim_key=None, ended_at_s=database_now())
        )
        return int(ended.rowcount)  # type: ignore[attr-defined]


def retry_failed(database: Database, job_id: str) -> int:
    """Set a job's failed items waiting again, with all their attempts; how many."""
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        again = session.execute(
            update(Item)
            .where(col(Item.job_id) == job_id, col(Item.state) == ItemState.FAILED)
            # All in the newest round: that is the one whose verdict is made anew.
            .values(
                state=ItemState.WAITING,
                round=job.round,
                attempts=0,
                reason="",
                message="",
                token="",
                holder="",
                published_at_s=None,
                ended_at_s=None,
            )
        )
        if again.rowcount:  # type: ignore[attr-defined]
            job.state, job.ended_at_s = JobState.OPEN, None
            session.add(job)
            verdicts = select(tables.Verdict).where(tables.Verdict.job_id == job_id, tables.Verdict.round == job.round)
            for verdict in session.exec(verdicts):
                session.delete(verdict)
        return int(again.rowcount)  # type: ignore[attr-defined]


def waits_for(session: Session, job_id: str, heartbeat_s: float) -> str:
    """What a job waits for when no card works on what it still lacks; empty while one does."""
    views = {view.card.id: view for view in card_views(session, heartbeat_s)}
    rows = session.execute(
        select(Item.card_id, func.count())
        .where(Item.job_id == job_id, col(Item.state).in_(OPEN))
        .group_by(col(Item.card_id))
        .order_by(col(Item.card_id))
    ).all()
    idle = [
        (card_id, number, views[card_id])
        for card_id, number in rows
        if card_id in views and views[card_id].state not in (CardState.IDLE, CardState.BUSY)
    ]
    if not idle:
        return ""
    card_id, number, view = idle[0]
    mend = {
        CardState.DRAINING: f"`farm cards resume {card_id}`",
        CardState.QUARANTINED: f"`farm cards release {card_id}`",
    }.get(CardState(view.state), f"start its worker on {view.card.host or 'its host'} with `farm worker`")
    plural = "items wait" if number != 1 else "item waits"
    return f"{number} {plural} for {card_id} ({view.state}) or a card of the same model ({view.card.model}): {mend}."


def done_entries(session: Session, requests: Sequence[Request]) -> set[str]:
    """Which of the requests are done already, by `Request.id`: a finished job asked the same, and nothing failed."""
    wanted = [request.id for request in requests]
    failed = select(Item.job_id).where(Item.state == ItemState.FAILED)
    query = select(tables.Job.request_id).where(
        tables.Job.state == JobState.DONE,
        col(tables.Job.request_id).in_(wanted),
        col(tables.Job.id).not_in(failed),
    )
    return set(session.exec(query))


def _now(session: Session) -> float:
    return float(session.exec(select(database_now())).one())


def _new_id(session: Session) -> str:
    # Easy to read aloud and to type; lower case without look-alikes.
    alphabet = "abcdefghjkmnpqrstuvwxyz23456789"
    while True:
        job_id = "".join(secrets.choice(alphabet) for _ in range(8))
        if session.get(tables.Job, job_id) is None:
            return job_id


def _chunks(values: Sequence[str], size: int = 500) -> Iterable[Sequence[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
