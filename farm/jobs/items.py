"""The life of one item: claimed, then done, failed or handed back, each in one transaction.

From which state to which stands in `farm.jobs.item_state`; here is who goes that way, and when.

The rules that make "measured once, accepted once" hold whatever dies:

* A claim sets holder, token and lease. Its end only lets another worker take the item; **the token alone decides
  whether a result is accepted**, in the same transaction that writes the reading.
* ``claim_key`` is unique while claimed: a second job's item for the same subject is *deferred*. It closes with the first
  one's reading where that is good enough for it, and wakes up where it is not, or where the first one fails. An item
  that is cancelled in work keeps it until it ends.
* Attempts are counted here and nowhere else; the claim after the last attempt closes the item as failed.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, and_, col, or_, select

from farm.errors import Unreadable
from farm.jobs import item_state
from farm.store import tables
from farm.store.content import find_tokens, reading_row
from farm.store.database import Database, database_now
from farm.store.reuse import find_readings, satisfies, subject_key
from farm.store.rows import in_batches, lock_items
from farm.store.tables import OPEN, CardState, Item, ItemState
from farm.types.protocol import Protocol, Stopping, Subject
from farm.types.reading import Reading
from farm.types.request import Request


class DeclineReason(StrEnum):
    """Why a claim was not given."""

    GONE = "gone"  # closed, held by another, moved to another card, its job ended, or its card takes nothing new
    REUSED = "reused"  # closed just now with a reading that was there
    DEFERRED = "deferred"  # somebody is measuring the same subject
    REFUSED = "refused"  # closed just now: its rows cannot be read
    EXHAUSTED = "exhausted"  # closed just now: every attempt ended without an answer


@dataclass(frozen=True)
class Claim:
    """A worker's right to measure one item, with all it needs to do so."""

    item_id: int
    job_id: str
    round: int
    token: str
    role: str
    label: str
    short_name: str
    subject: Subject
    protocol: Protocol
    stopping: Stopping
    capture_id: int | None = None


@dataclass(frozen=True)
class Closed:
    """What follows from closing an item: aggregations to publish, and items to publish again."""

    accepted: bool
    rounds: tuple[tuple[str, int], ...] = ()
    woken: tuple[int, ...] = ()


@dataclass(frozen=True)
class Declined:
    """A claim that was not given, and what follows from the item that closed or woke instead."""

    why: DeclineReason
    closed: Closed = Closed(False)


def claim(
    database: Database, item_id: int, *, card_id: str, holder: str, software_id: str, lease_s: float, max_attempts: int
) -> Claim | Declined:
    """Take an item, or learn why not.

    An item may be taken when it waits, or when its lease has ended, or when this very holder had it (its
    earlier process died: a holder runs one item at a time).
    """
    while True:
        try:
            with database.write() as session:
                taken = _claim(session, item_id, card_id, holder, software_id, lease_s, max_attempts)
            break
        except IntegrityError:
            # The unique claim key is taken: another item of the same subject is being measured, or was until its
            # lease ended.
            if not _free_key(database, item_id, software_id):
                return _defer(database, item_id, software_id)
        except Unreadable as error:
            taken = _refuse(database, item_id, card_id, holder, error.message)
            break
    if isinstance(taken, Claim):
        return taken
    # Not before the commit: see `_finished`.
    return Declined(taken.why, dataclasses.replace(taken.closed, rounds=_finished(database, set(taken.closed.rounds))))


def _refuse(database: Database, item_id: int, card_id: str, holder: str, message: str) -> Declined:
    """Close an item of which nobody can say any more what it is."""
    with database.write() as session:
        its_own = (col(Item.id) == item_id, col(Item.card_id) == card_id, _claimable(holder))
        closing = item_state.REFUSE.update(*its_own, **item_state.why("rejected", message))
        rounds = session.exec(closing.returning(col(Item.job_id), col(Item.round))).all()
    return Declined(DeclineReason.REFUSED, Closed(True, tuple((job_id, number) for job_id, number in rounds)))


def _free_key(database: Database, item_id: int, software_id: str) -> bool:
    """Take the item's key from a claim whose lease has ended; that claim's token still stands for its own item."""
    with database.write() as session:
        item = session.get(Item, item_id)
        job = session.get(tables.Job, item.job_id) if item else None
        if item is None or job is None:
            return False
        freed = item_state.FREE_KEY.update(
            col(Item.claim_key) == subject_key(item, job.asked.get("reuse", "none"), software_id),
            col(Item.id) != item_id,
            col(Item.lease_until_s) < database_now(),
        )
        return bool(session.exec(freed).rowcount)


def _defer(database: Database, item_id: int, software_id: str) -> Declined:
    with database.write() as session:
        item = session.get(Item, item_id)
        job = session.get(tables.Job, item.job_id) if item else None
        if item is None or job is None:
            return Declined(DeclineReason.GONE)
        key = subject_key(item, job.asked.get("reuse", "none"), software_id)
        if not session.exec(item_state.DEFER.update(col(Item.id) == item_id, subject_key=key)).rowcount:
            return Declined(DeclineReason.GONE)
    # The other may have closed in between, without seeing this one: then it wakes at once.
    return Declined(DeclineReason.DEFERRED, Closed(False, woken=wake_orphans(database, item_id)))


def _claim(
    session: Session, item_id: int, card_id: str, holder: str, software_id: str, lease_s: float, max_attempts: int
) -> Claim | Declined:
    """The claim, or why there is none; the rounds of what was closed instead are those that may be at their end."""
    gone = Declined(DeclineReason.GONE)
    # One statement for all three: on a busy card the pause between two items is mostly these.
    found = session.exec(
        select(Item, tables.Job, tables.Card.state)
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .join(tables.Card, col(tables.Card.id) == col(Item.card_id))
        .where(Item.id == item_id, Item.card_id == card_id, tables.Job.state == tables.JobState.OPEN)
    ).first()
    if found is None or found[2] in (CardState.DRAINING, CardState.QUARANTINED):
        return gone
    item, job, _ = found
    request = Request.from_json(job.request)
    claimable = and_(col(Item.id) == item_id, col(Item.card_id) == card_id, _claimable(holder))
    its_round = ((item.job_id, item.round),)
    (reading,) = find_readings(session, [item], request, software_id, {card_id})
    if reading is not None:
        served = session.exec(item_state.SERVE.update(claimable, reading_id=reading.id)).rowcount
        return Declined(DeclineReason.REUSED, Closed(True, its_round)) if served else gone
    if item.attempts >= max_attempts:
        if not session.exec(item_state.EXHAUST.update(claimable, **_last_words(item))).rowcount:
            return gone
        return Declined(DeclineReason.EXHAUSTED, Closed(True, its_round, _wake(session, _of(item.subject_key))))
    key = subject_key(item, request.reuse, software_id)
    token = uuid.uuid4().hex
    taken = item_state.CLAIM.update(
        claimable,
        token=token,
        holder=holder,
        claim_key=key,
        lease_until_s=database_now() + lease_s,
        subject_key=key,
    )
    return _describe(session, item, job, request, token) if session.exec(taken).rowcount else gone


def _claimable(holder: str) -> ColumnElement[bool]:
    return or_(
        col(Item.state).in_([ItemState.WAITING, ItemState.DEFERRED]),
        and_(
            col(Item.state) == ItemState.CLAIMED,
            or_(col(Item.lease_until_s) < database_now(), col(Item.holder) == holder),
        ),
    )


def _describe(session: Session, item: Item, job: tables.Job, request: Request, token: str) -> Claim:
    capture_id = tokens = None
    if item.subject_kind == "operator":
        operator = session.get(tables.Operator, item.subject_id)
        assert operator is not None, "foreign data: an item's operator is stored before the item"
        spec, label, short_name = operator.spec, operator.label, operator.short_name
        if not isinstance(spec, dict):
            raise Unreadable(f"The description of {label} cannot be read.", "Capture the model again.")
    else:
        assert request.variant is not None
        spec, label, short_name = request.variant.to_json(), str(request.variant), "whole model"
        tokens = find_tokens(session, request.variant.text).to_json() if request.variant.text else None
        newest = session.get(tables.Round, (job.id, item.round))
        capture_id = newest.capture_id if newest else None
    # The item's own: under the data policy `seen` it differs from the job's.
    protocol = _protocol(session, item.protocol_id)
    assert item.id is not None
    return Claim(
        item.id,
        item.job_id,
        item.round,
        token,
        item.role,
        label,
        short_name,
        Subject("operator" if item.subject_kind == "operator" else "variant", item.subject_id, spec, tokens),
        protocol or request.protocol,
        request.stopping,
        capture_id,
    )


_protocols: dict[str, Protocol] = {}  # content-addressed and never changed, so a process reads each once


def _protocol(session: Session, protocol_id: str) -> Protocol | None:
    if protocol_id not in _protocols:
        row = session.get(tables.Protocol, protocol_id)
        if row is None or not row.spec:
            return None
        _protocols[protocol_id] = Protocol.from_json(row.spec)
    return _protocols[protocol_id]


def _last_words(item: Item) -> dict[str, str]:
    """Why an item failed whose attempts all ended without an answer: what the last of them said, if it said anything."""
    message = item.message or f"Begun {item.attempts} times; no attempt ended with an answer."
    return item_state.why(item.reason or "attempts_exhausted", message)


def complete(database: Database, claimed: Claim, reading: Reading, *, card_id: str, software_id: str) -> Closed:
    """Write the reading and close the item, and every deferred item that the same reading serves; the others wake up.

    A claim whose token is no longer the item's writes nothing but one more on the item's ``repeated``. Of an item
    that was cancelled while it was measured, the reading is kept and the item stays cancelled.
    """
    affected: set[tuple[str, int]] = set()
    packed = reading.trace.pack() if reading.trace is not None else None  # not while all other writers wait
    with database.write() as session:
        item = _held(session, claimed, states=(ItemState.CLAIMED, ItemState.CANCELLED))
        if item is None:
            return Closed(False)
        reading_id = uuid.uuid4().hex
        row = tables.Reading(
            id=reading_id,
            subject_kind=claimed.subject.kind,
            subject_id=claimed.subject.id,
            card_id=card_id,
            card_model=item.card_model,
            software_id=software_id,
            protocol_id=claimed.protocol.id,
            simulated=reading.power_source == "simulated" or "simulated" in reading.flags,
            created_at_s=database_now(),  # type: ignore[arg-type]
            **reading_row(reading),
        )
        session.add(row)
        session.flush()
        if packed is not None:
            session.add(tables.Trace(reading_id=reading_id, packed=packed))
        accept = item_state.KEEP if item.state == ItemState.CANCELLED else item_state.READ
        its_own = (col(Item.id) == item.id, col(Item.token) == claimed.token)
        if not session.exec(accept.update(*its_own, reading_id=reading_id)).rowcount:
            session.rollback()
            return Closed(False)
        affected.add((item.job_id, item.round))
        behind = (col(Item.id).in_(_served(session, item, row)), col(Item.state) == ItemState.DEFERRED)
        served = item_state.SERVE.update(*behind, reading_id=reading_id).returning(col(Item.job_id), col(Item.round))
        affected.update((job_id, number) for job_id, number in session.exec(served))
        woken = _wake(session, _of(item.subject_key))
    return Closed(True, _finished(database, affected), woken)


def _served(session: Session, item: Item, reading: tables.Reading) -> list[int]:
    """What is deferred behind an item whose reading is good enough for it, by its own job's stopping rule."""
    deferred = session.execute(
        select(Item.id, tables.Job.request)
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .where(Item.subject_key == item.subject_key, Item.state == ItemState.DEFERRED)
    )
    return [item_id for item_id, asked in deferred if _satisfies(reading, asked)]


def _satisfies(reading: tables.Reading, asked: Mapping[str, Any]) -> bool:
    try:
        return satisfies(reading, Request.from_json(asked).stopping)
    except Unreadable:
        return False  # it wakes, and its own claim says why it cannot be read


def fail(database: Database, claimed: Claim, reason: str, message: str) -> Closed:
    """Close the item without a reading; items deferred to it wake up and try for themselves."""
    with database.write() as session:
        item = _held(session, claimed, states=(ItemState.CLAIMED, ItemState.CANCELLED))
        if item is None:
            return Closed(False)
        its_own = col(Item.id) == item.id
        cancelled = item.state == ItemState.CANCELLED
        session.exec(
            item_state.LET_GO.update(its_own)
            if cancelled
            else item_state.FAIL.update(its_own, **item_state.why(reason, message))
        )
        woken = _wake(session, _of(item.subject_key))
    return Closed(True, _finished(database, {(claimed.job_id, claimed.round)}), woken)


def drop_not_run(database: Database, job_id: str, capture_id: int) -> int:
    """Measure no more tuples that were predicted and are not among the calls that a card showed; how many that is.

    Args:
        capture_id: of what the card showed.
    """
    run = select(tables.Call.operator_id).where(tables.Call.capture_id == capture_id)
    its = (col(Item.job_id) == job_id, col(Item.role) == "tuple", col(Item.subject_id).not_in(run))
    with database.write() as session:
        lock_items(session, *its)
        return session.exec(item_state.DROP.update(*its)).rowcount


def note_attempt(database: Database, claimed: Claim, reason: str, message: str) -> Closed:
    """Keep why an attempt ended, on an item that may be tried again; one that was cancelled is let go."""
    with database.write() as session:
        item = _held(session, claimed, states=(ItemState.CLAIMED, ItemState.CANCELLED))
        if item is None:
            return Closed(False)
        its_own = col(Item.id) == item.id
        if item.state != ItemState.CANCELLED:
            session.exec(item_state.NOTE.update(its_own, **item_state.why(reason, message)))
            return Closed(False)
        session.exec(item_state.LET_GO.update(its_own))  # nobody tries it again: what waits for it need not wait longer
        return Closed(True, (), _wake(session, _of(item.subject_key)))


def _held(session: Session, claimed: Claim, *, states: Iterable[str] = (ItemState.CLAIMED,)) -> Item | None:
    """The item if the claim still stands; otherwise the work is counted as repeated.

    Locked with what is deferred behind it, all in the order of ids. Both change together: a claim of one of them would
    otherwise hold it and wait for the key that this transaction frees, while this one waits for it.
    """
    key = select(col(Item.subject_key)).where(Item.id == claimed.item_id).scalar_subquery()
    behind = and_(col(Item.subject_key) == key, col(Item.state) == ItemState.DEFERRED)
    query = select(Item).where(or_(col(Item.id) == claimed.item_id, behind)).order_by(col(Item.id)).with_for_update()
    item = next((item for item in session.exec(query) if item.id == claimed.item_id), None)
    if item is not None and item.token == claimed.token and item.state in states:
        return item
    if item is not None:
        session.exec(item_state.REPEAT.update(col(Item.id) == item.id))
        session.commit()
    return None


def renew(database: Database, holder: str, lease_s: float, item_ids: Collection[int] | None = None) -> int:
    """Extend the leases of a holder that still runs; how many there were.

    Args:
        item_ids: what the holder is at work on; a claim on anything else ran out of its work (its process was killed
            and its message is gone) and must be allowed to end. None: all of them.
    """
    held = item_state.RENEW.update(
        col(Item.holder) == holder, item_state.in_work(), lease_until_s=database_now() + lease_s
    )
    if item_ids is not None:
        held = held.where(col(Item.id).in_(sorted(item_ids)))
    with database.write() as session:
        return session.exec(held).rowcount


def release_card(database: Database, card_id: str) -> int:
    """End all leases on a card. Only for who holds the card's lock: nobody else can be measuring on it."""
    with database.write() as session:
        return session.exec(item_state.END_LEASE.update(col(Item.card_id) == card_id, item_state.in_work())).rowcount


def hand_back(database: Database, worker: str, *, spooled: Collection[int] = ()) -> int:
    """Let what a worker had in work wait again, without counting the attempt; how many there were.

    Only for who told the worker to stop and knows that it is gone: what ended by itself was an attempt.

    Args:
        worker: the holder, or what it begins with (`farm.jobs.cards.holder_of_process`).
        spooled: items whose reading waits on this host's disk; their tokens must go on to stand.
    """
    with database.write() as session:
        its = (col(Item.holder).startswith(worker, autoescape=True), col(Item.id).not_in(sorted(spooled)))
        session.exec(item_state.LET_GO.update(*its))
        return session.exec(item_state.HAND_BACK.update(*its)).rowcount


def close_exhausted(
    database: Database, *, max_attempts: int, after_s: float, farm: str | None = None, job_id: str | None = None
) -> Closed:
    """Close as failed what nobody measures any more and nobody may begin again.

    A claim would do so as well, but none comes where the card is gone.

    Args:
        after_s: how long the last lease must have ended: a reading that waits in a spool has this time to arrive. Unit: s.
        farm: of this farm's jobs only; of all if None.
        job_id: of this job only.
    """
    ended = (
        col(Item.state) == ItemState.CLAIMED,
        col(Item.attempts) >= max_attempts,
        col(Item.lease_until_s) < database_now() - after_s,
    )
    with database.read() as session:  # most often there is none, and a write would keep others waiting
        query = select(Item).join(tables.Job, col(tables.Job.id) == col(Item.job_id)).where(*ended)
        query = query.where(tables.Job.state == tables.JobState.OPEN)
        if farm is not None:
            query = query.where(tables.Job.farm == farm)
        if job_id is not None:
            query = query.where(Item.job_id == job_id)
        found = list(session.exec(query.order_by(col(Item.id))))
    if not found:
        return Closed(False)
    rounds: set[tuple[str, int]] = set()
    woken: list[int] = []
    with database.write() as session:
        for item in found:
            its_own = (col(Item.id) == item.id, col(Item.token) == item.token)
            if session.exec(item_state.EXHAUST.update(*its_own, *ended, **_last_words(item))).rowcount:
                rounds.add((item.job_id, item.round))
                woken += _wake(session, _of(item.subject_key))
    return Closed(bool(rounds), _finished(database, rounds), tuple(woken))


def wake_orphans(
    database: Database, item_id: int | None = None, *, farm: str | None = None, job_id: str | None = None
) -> tuple[int, ...]:
    """Set deferred items waiting again when nobody is measuring their subject any more.

    Args:
        item_id: this one only.
        farm: of this farm's jobs only, whose messages go to its own broker; of all if None.
        job_id: of this job only.
    """
    measuring = select(col(Item.subject_key)).where(item_state.in_work(), col(Item.lease_until_s) >= database_now())
    orphans = (
        select(col(Item.id))
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .where(col(Item.state) == ItemState.DEFERRED, col(Item.subject_key).not_in(measuring))
        .order_by(col(Item.id))
    )
    if item_id is not None:
        orphans = orphans.where(col(Item.id) == item_id)
    if farm is not None:
        orphans = orphans.where(tables.Job.farm == farm)
    if job_id is not None:
        orphans = orphans.where(Item.job_id == job_id)
    with database.read() as session:  # most often there is none, and a write would keep others waiting
        found = session.scalars(orphans).all()
    if not found:
        return ()
    with database.write() as session:
        return tuple(woken for batch in in_batches(found) for woken in _wake(session, col(Item.id).in_(batch)))


def _wake(session: Session, which: ColumnElement[bool]) -> tuple[int, ...]:
    """Set those of the items waiting that are deferred at this moment: another may have closed or taken one just now."""
    return tuple(sorted(session.exec(item_state.WAKE.update(which).returning(col(Item.id))).scalars()))


def _of(key: str) -> ColumnElement[bool]:
    return col(Item.subject_key) == key


def _finished(database: Database, rounds: set[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Those of the rounds in which no item is open.

    Asked after the closing transaction's commit: two last items closing at once must not each see the other open.
    """
    if not rounds:
        return ()
    with database.read() as session:
        return tuple(sorted(key for key in rounds if not open_items(session, *key)))


def open_items(session: Session, job_id: str, number: int) -> bool:
    """Whether any item of the round is not closed. Asked after every item, so it must not count them all."""
    query = select(Item.id).where(Item.job_id == job_id, Item.round == number, col(Item.state).in_(OPEN)).limit(1)
    return session.exec(query).first() is not None
