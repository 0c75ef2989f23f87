"""Claims on items and their results, each in one transaction. The transitions are in
`farm.store.item_state`.

These rules make sure that each item gets one accepted reading, even if processes die:

* A claim sets holder, token and lease. After the lease, another worker may claim the item. **Only
  the token decides whether a result is accepted**, in the transaction that writes the reading.
* A claimed item has a unique ``claim_key``. If a second job has an item with the same subject, that
  item is *deferred*. It closes with the reading of the first item if the reading is precise enough;
  otherwise, or if the first item fails, the second item waits again. If an item is cancelled during
  its measurement, it keeps the key until the end of it.
* Only a claim counts attempts. The claim after the last attempt closes the item as failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy
from sqlalchemy import ColumnElement, Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased
from sqlmodel import Session, and_, col, or_, select

from farm.benchmark_process.requests import MeasureRequest
from farm.errors import Unmeasurable, Unreadable
from farm.jobs import groups
from farm.store import item_state, tables
from farm.store.captures import counts, kernel_source
from farm.store.columns import GENERATE_KERNELS, RUN_WHOLES
from farm.store.content import add_reading, find_tokens
from farm.store.database import (
    Database,
    database_now,
    fetch,
    in_batches,
    lock_items,
    remembered,
)
from farm.store.reuse import find_readings, satisfies, software_of_groups
from farm.store.tables import Item, ItemRole, ItemState, Job, JobState
from farm.types.protocol import Protocol
from farm.types.reading import Reading
from farm.types.request import CARD_CHECK, Request
from farm.types.subject import Subject
from farm.types.variant import Variant


class DeclineReason(StrEnum):
    """Why a claim was declined. In the last three cases the claim also closed the item."""

    RESERVED = "reserved"  # a group holds the card (`farm.jobs.groups`)
    PUT_OFF = "put_off"  # the cards of the item's group are not free together
    # the item is closed, claimed by another worker or moved; its job has ended; or its card is
    # draining
    GONE = "gone"
    DEFERRED = "deferred"  # a worker measures another item with the same subject
    REUSED = "reused"  # an existing reading can be used
    REFUSED = "refused"  # the rows of the item cannot be read
    EXHAUSTED = "exhausted"  # every attempt ended without a result


@dataclass(frozen=True)
class Claim:
    """A worker's right to measure one item, with everything that the measurement needs.

    ``work`` is what the benchmark process is asked."""

    item_id: int
    job_id: str
    round: int
    token: str
    role: str
    label: str
    work: MeasureRequest
    capture_id: int | None = None
    card_state: str = ""  # the state in the row of its card
    cards: tuple[str, ...] = ()  # of an item on several cards: their ids, in the order of the ranks
    # the last item on the card was of a group: other groups may reserve the card again
    after_group: bool = False
    # of a check of a card: the reading gets the card's error counters
    records_errors: bool = False

    @property
    def variant_id(self) -> str:
        """The id of the variant whose kernels the item needs; "" if it needs no kernels."""
        variant = self.work.subject.built_variant
        return variant.id if variant is not None and variant.generates_kernels else ""

    @property
    def lists_kernels(self) -> bool:
        """True if the item lists the kernels of a model, which are unknown on this card model."""
        return not ItemRole(self.role).has_reading


@dataclass(frozen=True)
class FollowUp:
    """What a change of items requires of others: ``rounds`` (job id, number) to aggregate, and
    items to publish.
    """

    rounds: tuple[tuple[str, int], ...] = ()
    woken: tuple[int, ...] = ()  # deferred items to publish again
    due: tuple[int, ...] = ()  # items on several cards to publish (`farm.jobs.groups.due`)
    accepted: bool = False  # True if the change closed an item


@dataclass(frozen=True)
class Declined:
    """A claim that was declined.

    A declined claim may close the item. Then ``closed`` has the rounds to aggregate and the items
    to publish."""

    why: DeclineReason
    closed: FollowUp = FollowUp()


_GONE = Declined(DeclineReason.GONE)


# ------------------------------------------------------------------------------------------
# claiming


def claim(
    database: Database,
    item_id: int,
    *,
    card_id: str,
    holder: str,
    software_id: str,
    lease_s: float,
    max_attempts: int,
) -> Claim | Declined:
    """Claim an item for a holder.

    An item can be claimed if it waits or is deferred, or if its lease has ended. Its present holder
    can claim it again: a holder measures one item at a time, so its earlier pool process has died.
    """
    claimable = and_(
        col(Item.id) == item_id,
        col(Item.card_id) == card_id,
        or_(
            col(Item.state).in_([ItemState.WAITING, ItemState.DEFERRED]),
            and_(
                col(Item.state) == ItemState.CLAIMED,
                or_(col(Item.lease_until_s) < database_now(), col(Item.holder) == holder),
            ),
        ),
    )
    lease = {"holder": holder, "lease_until_s": database_now() + lease_s}
    needs_group = False  # known after the first try
    answer: Claim | Declined | None = None
    while answer is None:
        try:
            with database.write() as session:
                host: Sequence[tables.CardRow] = ()
                if needs_group:
                    # The rows of a group's cards must be locked before all others.
                    host = groups.host_of(session, card_id, lock=True)
                    leading = [card for card in host if card.id == card_id]
                    software_id = software_of_groups(session, leading) or software_id
                answer = _claim(
                    session, item_id, card_id, software_id, max_attempts, claimable, lease, host
                )
            needs_group = answer is None
        except IntegrityError:
            # Another item has the key. If its lease has ended, try again without its key.
            if not _remove_claim_key(database, item_id, software_id):
                return _defer(database, item_id, software_id)
        except Unreadable as error:
            answer = _refuse(database, claimable, error)
    if isinstance(answer, Claim):
        return answer
    with database.read() as session:
        finished = _finished(session, set(answer.closed.rounds))
    return Declined(answer.why, dataclasses.replace(answer.closed, rounds=finished))


def _refuse(database: Database, claimable: ColumnElement[bool], error: Unreadable) -> Declined:
    """Close an item whose stored description cannot be read."""
    with database.write() as session:
        closing = item_state.REFUSE.update(claimable, **item_state.why("rejected", error.message))
        rounds = session.exec(closing.returning(col(Item.job_id), col(Item.round))).all()
    closed = FollowUp(tuple((job_id, number) for job_id, number in rounds), accepted=True)
    return Declined(DeclineReason.REFUSED, closed)


def _claim(
    session: Session,
    item_id: int,
    card_id: str,
    software_id: str,
    max_attempts: int,
    claimable: ColumnElement[bool],
    held: Mapping[str, Any],
    host: Sequence[tables.CardRow],
) -> Claim | Declined | None:
    """Claim the item, or return why it was declined; None if it needs several cards and ``host`` is
    empty.

    ``FollowUp.rounds`` may contain rounds with open items. ``host``: the locked cards of the card's
    host."""
    of_card = (Item.id == item_id, Item.card_id == card_id, Job.state == JobState.OPEN)
    locking = _described(*of_card, software_id=software_id).with_for_update(
        read=True, of=tables.CardRow
    )
    item = session.execute(
        locking
    ).first()  # it locks the card's row against a reservation at the same time
    if item is None or item.card_state in (tables.CardState.DRAINING, tables.CardState.QUARANTINED):
        return _GONE
    if item.cards > 1 and not host:
        return None
    reserved = item.group_item_id is not None and groups.in_force(
        session, [session.get_one(tables.CardRow, card_id)]
    )
    if reserved and item.cards == 1:
        return Declined(DeclineReason.RESERVED)
    request = Request.from_json(item.request)
    closed = _close_unmeasured(session, item, request, software_id, max_attempts, claimable)
    if closed is not None:
        return closed
    key = _subject_key(item, request.reuse, software_id)
    token = uuid.uuid4().hex
    group = (
        groups.reserve(session, host, item, session.get_one(Job, item.job_id), token)
        if item.cards > 1
        else ()
    )
    if item.cards > 1 and not group:
        waits = session.exec(item_state.PUT_OFF.update(claimable, attempts=item.attempts)).rowcount
        return Declined(DeclineReason.PUT_OFF) if waits else _GONE
    claim = item_state.CLAIM.update(claimable, token=token, claim_key=key, subject_key=key, **held)
    if not session.exec(claim).rowcount:
        return _GONE
    after_group = item.cards == 1 and item.group_item_id is not None
    if after_group:
        groups.end_reservation(session, card_id)
    work, label, capture_id = _work(session, item, request), item.label, None
    if work.subject.whole:
        label = str(request.variant)
        this_round = session.get(tables.Round, (item.job_id, item.round))
        capture_id = this_round.capture_id if this_round else None
    return Claim(
        item_id=item.id,
        job_id=item.job_id,
        round=item.round,
        token=token,
        role=item.role,
        label=label,
        work=work,
        capture_id=capture_id,
        card_state=item.card_state,
        cards=group,
        after_group=after_group,
        records_errors=request.sweep is not None and request.sweep.operator == CARD_CHECK,
    )


def _close_unmeasured(
    session: Session,
    item: Any,
    request: Request,
    software_id: str,
    max_attempts: int,
    claimable: ColumnElement[bool],
) -> Declined | None:
    """Close an item with a stored reading, or because it has no attempts left; None if it must be
    measured.
    """
    rounds = ((item.job_id, item.round),)
    reading = None
    if item.known:
        (reading,) = find_readings(session, [item], request, software_id, {item.card_id})
    if reading is not None:
        served = session.exec(item_state.SERVE.update(claimable, reading_id=reading.id)).rowcount
        return Declined(DeclineReason.REUSED, FollowUp(rounds, accepted=True)) if served else _GONE
    if item.attempts < max_attempts:
        return None
    if not session.exec(item_state.EXHAUST.update(claimable, **_last_reason(item))).rowcount:
        return _GONE
    return Declined(
        DeclineReason.EXHAUSTED, FollowUp(rounds, _wake_behind(session, item), accepted=True)
    )


#: The columns of an item that claims and results use. A whole row costs the database and this
#: process twice as much.
_USED: tuple[Any, ...] = (
    Item.id,
    Item.job_id,
    Item.round,
    Item.role,
    Item.subject_kind,
    Item.subject_id,
    Item.protocol_id,
    Item.card_id,
    Item.card_model,
    Item.state,
    Item.half_width,
    Item.token,
    Item.subject_key,
    Item.attempts,
    Item.reason,
    Item.message,
    Item.cards,
)


def _described(*which: Any, software_id: str = "") -> Any:
    """Return a query for items with their job's request, card state and operator, and whether
    readings exist.
    """
    operator, reading = tables.Operator, tables.ReadingRow
    same = (
        reading.subject_id == col(Item.subject_id),
        reading.protocol_id == col(Item.protocol_id),
    )
    is_known = select(reading.id).where(*same, reading.software_id == software_id).exists()
    card = tables.CardRow
    facts: tuple[Any, ...] = (
        Job.request,
        col(card.state).label("card_state"),
        col(card.group_item_id),
        is_known.label("known"),
        operator.spec,
        operator.label,
    )
    return (
        sqlalchemy.select(*_USED, *facts)
        .join(Job, col(Job.id) == col(Item.job_id))
        .join(tables.CardRow, col(tables.CardRow.id) == col(Item.card_id))
        .join(operator, col(operator.id) == col(Item.subject_id), isouter=True)
        .where(*which)
    )


def _subject_key(item: Any, reuse: str, software_id: str) -> str:
    """Return the subject key of an item. One reading can close all items with the same key."""
    scope = (
        item.card_model if item.role == "tuple" and reuse in ("model", "imported") else item.card_id
    )
    key = f"{item.subject_id}:{scope}:{software_id}:{item.protocol_id}"
    if not ItemRole(item.role).has_reading:  # no reading closes it
        key = f"{key}:{item.role}"
    return key if reuse != "none" else f"{key}:{item.job_id}:{item.role}"


def _work(session: Session, item: Any, request: Request) -> MeasureRequest:
    """Return what measures an item. ``item``: a row of `_described`. Raises `Unreadable`."""
    variant, tokens = request.variant, None
    is_whole = item.subject_kind == "variant"
    kernels = kernel_source(session, variant, item.job_id, item.round)
    if is_whole:
        assert variant is not None
        spec = variant.to_json()
    else:
        assert item.label is not None, "foreign data: an item's operator is stored before the item"
        spec = item.spec
    if not isinstance(spec, dict):
        raise Unreadable(
            f"The stored description of {item.label} cannot be read.", "Capture the model again."
        )
    if variant is not None and variant.text and (kernels or is_whole):
        tokens = find_tokens(session, variant.text).to_json()
    return MeasureRequest(
        Subject("variant" if is_whole else "operator", item.subject_id, spec, tokens, kernels),
        # with data policy `seen`, items differ in protocol
        _protocol(session, item.protocol_id) or request.protocol,
        request.stopping.allowing(item.half_width),
    )


def _protocol(session: Session, protocol_id: str) -> Protocol | None:
    protocols = remembered(session, "protocols")  # stored protocols never change
    if protocol_id not in protocols:
        row = session.get(tables.ProtocolRow, protocol_id)
        if row is None or not row.spec:
            return None
        protocols[protocol_id] = Protocol.from_json(row.spec)
    protocol: Protocol = protocols[protocol_id]
    return protocol


def _key_of(session: Session, item_id: int, software_id: str) -> str | None:
    """Return the subject key of an item; None if the item or its job was deleted."""
    item = session.get(Item, item_id)
    job = session.get(Job, item.job_id) if item else None
    return _subject_key(item, job.asked.get("reuse", "none"), software_id) if item and job else None


def _remove_claim_key(database: Database, item_id: int, software_id: str) -> bool:
    """If a claim with the item's key has a lease that ended, remove its key; return whether. Its
    token stays valid.
    """
    with database.write() as session:
        key = _key_of(session, item_id, software_id)
        lapsed = (col(Item.id) != item_id, col(Item.lease_until_s) < database_now())
        return bool(
            key
            and session.exec(
                item_state.REMOVE_CLAIM_KEY.update(col(Item.claim_key) == key, *lapsed)
            ).rowcount
        )


def _defer(database: Database, item_id: int, software_id: str) -> Declined:
    with database.write() as session:
        key = _key_of(session, item_id, software_id)
        if (
            not key
            or not session.exec(
                item_state.DEFER.update(col(Item.id) == item_id, subject_key=key)
            ).rowcount
        ):
            return _GONE
    # The other item may have closed before this one was deferred. Then this one must wake at once.
    return Declined(DeclineReason.DEFERRED, FollowUp(woken=wake_orphans(database, item_id)))


def waiting_beside(
    database: Database, claimed: Claim, card_id: str, most: int
) -> tuple[list[tuple[Subject, Protocol]], dict[str, int]]:
    """Return up to ``most`` subjects of the claimed item's round that wait for the same card, first
    the whole model; and tuple id -> number of calls in the model."""
    of_round = (
        Item.job_id == claimed.job_id,
        Item.round == claimed.round,
        Item.card_id == card_id,
        Item.cards == 1,
    )
    waiting = _described(*of_round, Item.state == ItemState.WAITING, Item.id != claimed.item_id)
    subjects: list[tuple[Subject, Protocol]] = []
    with database.read() as session:
        its_round = session.get(tables.Round, (claimed.job_id, claimed.round))
        if its_round is None:
            return [], {}
        calls = counts(session, its_round.capture_id) if its_round.capture_id is not None else {}
        for item in session.execute(
            waiting.order_by(col(Item.role) != "whole", col(Item.id)).limit(most)
        ):
            with contextlib.suppress(Unreadable):
                work = _work(session, item, Request.from_json(item.request))
                subjects.append((work.subject, work.protocol))
    return subjects, calls


#: At most so many items of one card are read to see whose kernels are needed next.
MOST_COMING = 64


@dataclass(frozen=True)
class ComingModel:
    """A variant whose generated kernels open items of a card need."""

    variant: Variant
    subject: Subject
    protocol: Protocol
    waits: bool  # True if no worker measures the item now


def coming_models(database: Database, card_id: str) -> list[ComingModel]:
    """The variants whose generated kernels open items on a card need, the oldest item first."""
    variant = tables.ModelVariant
    with database.read() as session:
        # First the few jobs: a card may have a million waiting items.
        generating = (
            select(Job.variant_id)
            .join(variant, col(variant.id) == col(Job.variant_id))
            .where(Job.state == JobState.OPEN, GENERATE_KERNELS)
        )
        variant_ids = session.exec(generating.distinct()).all()
        if not variant_ids:
            return []
        of_card = (
            col(Item.subject_id).in_(variant_ids),
            RUN_WHOLES,
            Item.card_id == card_id,
            Item.cards == 1,
            col(Item.state).in_(tables.OPEN),
        )
        models: list[ComingModel] = []
        for item in session.execute(_described(*of_card).order_by(col(Item.id)).limit(MOST_COMING)):
            with contextlib.suppress(Unreadable):
                work = _work(session, item, Request.from_json(item.request))
                built = work.subject.built_variant
                if built is not None:
                    waits = item.state == ItemState.WAITING
                    models.append(ComingModel(built, work.subject, work.protocol, waits))
        return models


def others_wait(database: Database, card_id: str) -> bool:
    """True if an item waits for the card and has a message: neither claimed nor put off."""
    others = select(Item.id).where(
        Item.card_id == card_id,
        Item.state == ItemState.WAITING,
        item_state.has_message(),
        col(Item.published_at_s).is_not(None),
    )
    with database.read() as session:
        return session.exec(others.limit(1)).first() is not None


# ------------------------------------------------------------------------------------------ results


def complete(
    database: Database, claimed: Claim, reading: Reading, *, card_id: str, software_id: str
) -> FollowUp:
    """Write the reading and close the item.

    Deferred items with the same key close too if the reading is precise enough for them; otherwise
    they wait again. If the claim's token is no longer valid, only the item's count `repeated`
    grows. If the item was cancelled during the measurement, the reading is stored and the item
    stays cancelled. If the time of the reading is not positive, the item closes with this reason.
    """
    try:
        return _complete(database, claimed, reading, card_id, software_id)
    except Unmeasurable as error:
        return fail(database, claimed, error.reason, error.message)


def _complete(
    database: Database, claimed: Claim, reading: Reading, card_id: str, software_id: str
) -> FollowUp:
    # before the transaction, which blocks others
    packed = reading.trace.pack() if reading.trace is not None else None
    with database.write() as session:
        item, deferred = _held(session, claimed)
        if item is None:
            return FollowUp()
        ids = {"card_id": card_id, "card_model": item.card_model, "software_id": software_id}
        row = add_reading(
            session,
            reading,
            packed,
            claimed.work.subject,
            **ids,
            protocol_id=claimed.work.protocol.id,
        )
        reading_id = row.id
        accept = item_state.KEEP if item.state == ItemState.CANCELLED else item_state.READ
        its_own = (col(Item.id) == item.id, col(Item.token) == claimed.token)
        if not session.exec(accept.update(*its_own, reading_id=reading_id)).rowcount:
            session.rollback()
            return FollowUp()
        # If another item of the round waits, the process that closes that one looks whether the
        # round has ended.
        affected, woken = (
            {(item.job_id, item.round)} if item.other is None else set(),
            tuple[int, ...](),
        )
        if deferred:
            jobs = fetch(session, Job, (waiter.job_id for waiter in deferred))
            served = [
                waiter.id
                for waiter in deferred
                if _satisfies(row, jobs[waiter.job_id].request, waiter.half_width)
            ]
            serving = item_state.SERVE.update(col(Item.id).in_(served), reading_id=reading_id)
            also = session.exec(serving.returning(col(Item.job_id), col(Item.round)))
            affected.update((job_id, number) for job_id, number in also)
            woken = _wake_behind(session, item)
        return FollowUp(_finished(session, affected), woken, accepted=True)


def _satisfies(reading: tables.ReadingRow, asked: Mapping[str, Any], half_width: float) -> bool:
    """True if a reading is precise enough for another job's request and the half-width of its
    item.
    """
    try:
        return satisfies(reading, Request.from_json(asked).stopping.allowing(half_width))
    except Unreadable:
        return False  # the item wakes, and its own claim reports the error


def fail(
    database: Database, claimed: Claim, reason: str, message: str, *, again: bool = False
) -> FollowUp:
    """Close the item without a reading. Items that are deferred to it wait again for their own
    measurement.

    ``again``: if the item is not cancelled, keep it open for another attempt and write only the
    reason."""
    with database.write() as session:
        item, deferred = _held(session, claimed)
        if item is None:
            return FollowUp()
        its_own, cancelled = col(Item.id) == item.id, item.state == ItemState.CANCELLED
        closing = item_state.NOTE if again else item_state.FAIL
        why = {} if cancelled else item_state.why(reason, message)
        session.exec((item_state.LET_GO if cancelled else closing).update(its_own, **why))
        if again and not cancelled:
            return FollowUp()
        return _without_reading(session, item, deferred)


def listed(database: Database, claimed: Claim) -> FollowUp:
    """Close an item that listed the kernels of its model: they are stored. It has no reading."""
    with database.write() as session:
        item, deferred = _held(session, claimed)
        if item is None:
            return FollowUp()
        cancelled = item.state == ItemState.CANCELLED
        closing = item_state.LET_GO if cancelled else item_state.LIST
        session.exec(closing.update(col(Item.id) == item.id))
        return _without_reading(session, item, deferred)


def _without_reading(session: Session, item: Any, deferred: Sequence[Any]) -> FollowUp:
    """The result of closing an item without a reading: what waits for it wakes."""
    woken = _wake_behind(session, item) if deferred else ()
    ended = {(item.job_id, item.round)} if item.other is None else set()
    return FollowUp(_finished(session, ended), woken, accepted=True)


def put_off(
    database: Database, claimed: Claim, why: str, *, counted: bool, reason: str = "crashed"
) -> None:
    """Let a claimed item wait again after an interruption. ``counted``: the attempt counts."""
    its_own = (col(Item.id) == claimed.item_id, col(Item.token) == claimed.token)
    with database.write() as session:
        session.exec(item_state.LET_GO.update(*its_own))
        session.exec(
            item_state.NOTE.update(*its_own, **item_state.why(reason, f"Interrupted: {why}."))
        )
        attempts = col(Item.attempts) if counted else col(Item.attempts) - 1
        session.exec(item_state.PUT_OFF.update(*its_own, attempts=attempts))


def drop_not_run(database: Database, job_id: str, capture_id: int) -> int:
    """Cancel waiting tuples of a job without a call in the observed capture ``capture_id``; return
    their number.
    """
    run = select(tables.Call.operator_id).where(tables.Call.capture_id == capture_id)
    not_run = (
        col(Item.job_id) == job_id,
        col(Item.role) == "tuple",
        col(Item.subject_id).not_in(run),
    )
    with database.write() as session:
        lock_items(session, *not_run)
        return session.exec(item_state.DROP.update(*not_run)).rowcount


def _held(session: Session, claimed: Claim) -> tuple[Any, Sequence[Any]]:
    """If the claim is valid, lock the item and return it with the items deferred to it; otherwise
    count repeated work.
    Columns: `_USED`, and ``other``: an item of the round that still waits, if this process knows
        one.

    The query locks the items in the order of ids. Otherwise a deadlock is possible: the claim of a
    deferred item locks that item and waits for the key, and this transaction has the key and waits
    for the deferred item."""
    key = select(col(Item.subject_key)).where(Item.id == claimed.item_id).scalar_subquery()
    behind = and_(col(Item.subject_key) == key, col(Item.state) == ItemState.DEFERRED)
    waiting = aliased(Item)
    waiting_id = known_waiting_item(session, claimed.job_id, claimed.round)
    other = (
        select(waiting.id)
        .where(waiting.id == waiting_id, waiting.state == ItemState.WAITING)
        .scalar_subquery()
    )
    claimed_or_behind = or_(col(Item.id) == claimed.item_id, behind)
    query = sqlalchemy.select(*_USED, other.label("other")).where(claimed_or_behind)
    items = session.execute(query.order_by(col(Item.id)).with_for_update(of=Item)).all()
    item = next((item for item in items if item.id == claimed.item_id), None)
    if (
        item is not None
        and item.token == claimed.token
        and item.state in (ItemState.CLAIMED, ItemState.CANCELLED)
    ):
        return item, [item_behind for item_behind in items if item_behind.id != claimed.item_id]
    if item is not None:
        session.exec(item_state.REPEAT.update(col(Item.id) == item.id))
        session.commit()
    return None, ()


# ------------------------------------------------------------------------------------------
# recovery


def close_exhausted(
    database: Database,
    *,
    max_attempts: int,
    after_s: float,
    farm: str | None = None,
    job_id: str | None = None,
) -> FollowUp:
    """Close claimed items as failed if no attempt is left and their lease ended at least
    ``after_s`` ago: a spooled reading can arrive during this time. A claim closes such an item too,
    but an absent card makes no claims. Default: the jobs of all farms."""
    ended = (
        col(Item.state) == ItemState.CLAIMED,
        col(Item.attempts) >= max_attempts,
        col(Item.lease_until_s) < database_now() - after_s,
    )
    with database.read() as session:  # a write would make others wait, and there are rarely any
        query = _in_jobs(select(Item), farm, job_id).where(*ended, Job.state == JobState.OPEN)
        exhausted = list(session.exec(query))
    if not exhausted:
        return FollowUp()
    rounds: set[tuple[str, int]] = set()
    woken: list[int] = []
    with database.write() as session:
        for item in exhausted:
            its_own = (col(Item.id) == item.id, col(Item.token) == item.token)
            if session.exec(
                item_state.EXHAUST.update(*its_own, *ended, **_last_reason(item))
            ).rowcount:
                rounds.add((item.job_id, item.round))
                woken += _wake_behind(session, item)
        return FollowUp(_finished(session, rounds), tuple(woken), accepted=bool(rounds))


def wake_orphans(
    database: Database,
    item_id: int | None = None,
    *,
    farm: str | None = None,
    job_id: str | None = None,
) -> tuple[int, ...]:
    """Wake deferred items whose subject no worker measures any more; return their ids. Default: all
    items of all farms, but each farm publishes to its own broker."""
    # By its key and not by its state: the database then reads no closed item.
    measuring = select(col(Item.claim_key)).where(
        col(Item.claim_key).is_not(None), col(Item.lease_until_s) >= database_now()
    )
    orphans = _in_jobs(select(col(Item.id)), farm, job_id).where(
        col(Item.state) == ItemState.DEFERRED, col(Item.subject_key).not_in(measuring)
    )
    if item_id is not None:
        orphans = orphans.where(col(Item.id) == item_id)
    with database.read() as session:  # a write would make others wait, and there are rarely any
        orphan_ids = session.scalars(orphans).all()
    if not orphan_ids:
        return ()
    with database.write() as session:
        woken: list[int] = []
        for batch in in_batches(orphan_ids):
            woken += _wake(session, col(Item.id).in_(batch))
        return tuple(woken)


def _in_jobs(query: Any, farm: str | None, job_id: str | None) -> Any:
    """Join a query for items with their jobs, restrict it to one farm or job, and sort it by item
    id.
    """
    query = query.join(Job, col(Job.id) == col(Item.job_id)).order_by(col(Item.id))
    if farm is not None:
        query = query.where(Job.farm == farm)
    return query if job_id is None else query.where(Item.job_id == job_id)


def _last_reason(item: Any) -> dict[str, str]:
    """Return the columns with the reason of an exhausted item: the stored reason of an attempt, if
    there is one.
    """
    message = item.message or f"All {item.attempts} attempts ended without a result."
    return item_state.why(item.reason or "attempts_exhausted", message)


def _wake(session: Session, which: ColumnElement[bool]) -> tuple[int, ...]:
    """Let matching deferred items wait again; return their ids."""
    return tuple(
        sorted(session.exec(item_state.WAKE.update(which).returning(col(Item.id))).scalars())
    )


def _wake_behind(session: Session, item: Any) -> tuple[int, ...]:
    """Wake the items that are deferred to this item; return their ids."""
    return _wake(session, col(Item.subject_key) == item.subject_key)


#: What `remembered` has: round -> one of its items that waited when this process last looked, so
#: that most closed items need no search.
_WAITING_ITEMS = "waiting items"


def known_waiting_item(session: Session, job_id: str, number: int) -> int:
    """Return the id of an item of a round that waited when this process last looked; 0 if this
    process knows none. Which item of several, the database chooses."""
    waiting_id: int = remembered(session, _WAITING_ITEMS).get((job_id, number), 0)
    return waiting_id


def _finished(session: Session, rounds: set[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Commit; return the rounds that have no open items.

    The query is a transaction of its own. Otherwise two items that close at once each see the other
    open."""
    session.commit()
    # before the transaction begins: it must not lock
    if isinstance(bind := session.get_bind(), Connection):
        bind.execution_options(sqlite_begin="DEFERRED")
    return tuple(sorted(key for key in rounds if not open_items(session, *key)))


def queries_of_open(job_id: Any, number: Any) -> tuple[Any, Any]:
    """Return a query for an item of a round that waits, and one for an item of it that is open in
    another state.
    """
    of_round = (col(Item.job_id) == job_id, col(Item.round) == number)
    # WAITING is the last state in the index. From its end, few entries of items that no longer wait
    # precede one.
    waiting = (
        select(Item.id)
        .where(*of_round, col(Item.state) >= ItemState.WAITING)
        .order_by(col(Item.state).desc())
    )
    others = select(Item.id).where(
        *of_round, col(Item.state).in_((ItemState.CLAIMED, ItemState.DEFERRED))
    )
    return waiting.limit(1), others.limit(1)


def open_items(session: Session, job_id: str, number: int) -> bool:
    """True if any item of the round is open. It does not count all items, and remembers an item
    that waits.
    """
    waiting, others = queries_of_open(job_id, number)
    waiting_item_id = session.exec(waiting).first()
    if waiting_item_id is not None:
        remembered(session, _WAITING_ITEMS)[job_id, number] = waiting_item_id
        return True
    remembered(session, _WAITING_ITEMS).pop((job_id, number), None)
    return session.exec(others).first() is not None
