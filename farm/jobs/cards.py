"""The cards as the database knows them: registered by the worker that serves them, seen by its heartbeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, update
from sqlmodel import Session, col, func, select

from farm.benchmark.fingerprinting import VERSION
from farm.devices.device import Card
from farm.errors import NoSuchCard
from farm.requests.card_selection import matching_cards
from farm.store import tables
from farm.store.content import storable_text, store_software
from farm.store.database import Database, database_now, read_clock_s
from farm.store.rows import locked
from farm.store.tables import CardState, ItemState
from farm.types.protocol import Software

#: A card is lost when its worker has not been seen for this many heartbeats.
LOST_AFTER_HEARTBEATS = 3

#: One that is idle has taken nothing for too long after this many, when items wait for it whose messages are out. Longer
#: than it takes to publish again what the broker lost.
SILENT_AFTER_HEARTBEATS = 6

#: States that a person or a failed check set, and only a person ends; a worker that comes or goes leaves them.
KEPT = (CardState.DRAINING, CardState.QUARANTINED)


def holder_name(card_id: str, host: str, pid: int, tag: str, farm: str = "") -> str:
    """What a worker signs its card and its claims with; an embedded farm's workers name their farm in it."""
    return holder_of_process(card_id, host, pid) + tag + (f"/{farm}" if farm else "")


def holder_of_process(card_id: str, host: str, pid: int) -> str:
    """What the names of all holders begin with that were a card's worker in this process."""
    return f"{card_id}@{host}:{pid}:"


def farm_of(holder: str) -> str:
    """The embedded farm of a worker, "" for one that serves everybody's jobs: each has a broker of its own."""
    return holder.partition("/")[2]


@dataclass(frozen=True)
class CardView:
    """One card with what it is doing, for people and for placement."""

    card: tables.Card
    state: str  # starting | idle | busy | draining | quarantined | lost | stopped
    measuring: str  # the label of the item in work, or ""
    waiting: int  # items that wait for it, the deferred among them
    done_last_hour: int
    seen_ago_s: float
    deferred: int = 0  # of those that wait: their subject is being measured for another item
    silent_s: float = 0.0  # for how long it has been idle while items wait, once that is too long


def announce(database: Database, card_id: str, card: Card | None, *, holder: str, queue: str) -> None:
    """Write down that ``holder`` is the card's worker before it can measure: it is seen, and takes nothing yet.

    Args:
        card: what the host tells of the card; None where it does not find it now. Only a card that is known already is
            then written.
    """
    with database.write() as session:
        row = locked(session, tables.Card, card_id)
        if row is None:
            if card is None:
                return
            row = tables.Card(id=card.id, kind=card.kind, model=card.model)
            row.registered_at_s = database_now()  # type: ignore[assignment]
        if card is not None:
            _describe(row, card)
        row.queue, row.worker = queue, holder
        if row.state not in KEPT:
            row.state, row.state_reason = CardState.STARTING, ""
        row.last_seen_at_s = database_now()  # type: ignore[assignment]
        session.add(row)


def register(
    database: Database, card: Card, software: Software, *, holder: str, queue: str, capabilities: Sequence[str] = ()
) -> str:
    """Write the card as served by ``holder``, ready to measure, and return its software id.

    A drain or a quarantine outlives its worker.
    """
    with database.write() as session:
        software_id = store_software(session, software)
        row = locked(session, tables.Card, card.id) or tables.Card(id=card.id, kind=card.kind, model=card.model)
        _describe(row, card)
        row.queue, row.software_id, row.worker = queue, software_id, holder
        row.capabilities = sorted(capabilities)
        if row.state not in KEPT:
            row.state, row.state_reason = CardState.IDLE, ""
        row.last_seen_at_s = database_now()  # type: ignore[assignment]
        if not row.registered_at_s:
            row.registered_at_s = database_now()  # type: ignore[assignment]
        session.add(row)
    return software_id


def write_down(session: Session, card: Card, software: Software) -> None:
    """The card's row, if no worker ever made one: readings point to it. It is not offered to jobs."""
    if session.get(tables.Card, card.id) is None:
        row = tables.Card(id=card.id, kind=card.kind, model=card.model)
        _describe(row, card)
        row.software_id = store_software(session, software)
        row.registered_at_s = database_now()  # type: ignore[assignment]
        session.add(row)
        session.flush()


def _describe(row: tables.Card, card: Card) -> None:
    row.kind, row.model, row.memory_bytes, row.driver = card.kind, card.model, card.memory_bytes, card.driver
    row.host, row.index = card.host, card.index
    row.origin = ""  # readings of it may have been imported before it joined


def written_state(database: Database, card_id: str) -> str:
    """The state as it was last written, whoever is seen or not; "" for a card that nobody announced."""
    with database.read() as session:
        row = session.get(tables.Card, card_id)
        return row.state if row is not None else ""


def seen(database: Database, holder: str) -> None:
    """The heartbeat of a worker."""
    with database.write() as session:
        session.execute(
            update(tables.Card).where(col(tables.Card.worker) == holder).values(last_seen_at_s=database_now())
        )


def stopped(database: Database, holder: str) -> None:
    """The worker, named in full or as `holder_of_process`, left in order."""
    own = col(tables.Card.worker).startswith(holder, autoescape=True)
    with database.write() as session:
        session.execute(
            update(tables.Card).where(own, col(tables.Card.state).not_in(KEPT)).values(state=CardState.STOPPED)
        )
        session.execute(update(tables.Card).where(own).values(worker=""))


def drain(database: Database, card_id: str, reason: str = "") -> None:
    """Have a card take nothing new: its item in work is finished, the waiting ones move to its peers or wait.

    Raises:
        NoSuchCard
    """
    with database.write() as session:
        row = _known(locked(session, tables.Card, card_id), card_id)
        if row.state != CardState.QUARANTINED:
            row.state, row.state_reason = CardState.DRAINING, reason
            session.add(row)


def quarantine(database: Database, card_id: str, reason: str, *, farm: str = "") -> None:
    """Keep a card from measuring until a person releases it.

    Args:
        farm: the embedded farm that found it unfit, for itself alone: the next one tries it again (`try_again`).

    Raises:
        NoSuchCard
    """
    with database.write() as session:
        row = _known(locked(session, tables.Card, card_id), card_id)
        if row.state != CardState.QUARANTINED:
            row.quarantined_by = farm
        elif not farm:
            row.quarantined_by = ""  # a quarantine for everybody outlasts one farm's own
        row.state, row.state_reason = CardState.QUARANTINED, storable_text(reason[:500])
        session.add(row)


def try_again(database: Database, card_ids: Sequence[str]) -> list[str]:
    """End the quarantines that an earlier embedded farm had made for itself; of which cards. They are checked anew."""
    with database.write() as session:
        own = col(tables.Card.id).in_(card_ids), col(tables.Card.state) == CardState.QUARANTINED
        rows = session.exec(select(tables.Card).where(*own, col(tables.Card.quarantined_by) != "")).all()
        for row in rows:
            row.state, row.state_reason, row.quarantined_by = CardState.STOPPED, "", ""
            session.add(row)
        return [row.id for row in rows]


def resume(database: Database, card_id: str, *, quarantined: bool = False) -> bool:
    """End a drain (or, with ``quarantined``, a quarantine); False where there was none to end.

    A card that comes out of quarantine takes items only when its worker has found it fit and registered it again.

    Raises:
        NoSuchCard
    """
    wanted = CardState.QUARANTINED if quarantined else CardState.DRAINING
    with database.write() as session:
        row = _known(locked(session, tables.Card, card_id), card_id)
        if row.state != wanted:
            return False
        served = CardState.STARTING if quarantined else CardState.IDLE
        row.state, row.state_reason = served if row.worker else CardState.STOPPED, ""
        session.add(row)
        return True


def find(session: Session, name: str) -> tables.Card:
    """The one registered card that a word means (`farm.requests.card_selection.matching_cards`).

    Raises:
        NoSuchCard: none, or several.
    """
    own = select(tables.Card).where(tables.Card.origin == "")
    found = matching_cards(session.exec(own.order_by(col(tables.Card.id))).all(), name)
    if len(found) > 1:
        several = f"{', '.join(card.id for card in found[:8])}{', ...' if len(found) > 8 else ''}"
        raise NoSuchCard(f"'{name}' means several cards: {several}.", "Give the id; `farm cards` lists them.")
    return _known(found[0] if found else None, name)


def _known(row: tables.Card | None, card_id: str) -> tables.Card:
    if row is None:
        raise NoSuchCard(f"No card '{card_id}' is registered.", "List the cards with `farm cards`.")
    return row


def views(session: Session, heartbeat_s: float) -> list[CardView]:
    """All cards that ever registered, with what they do now."""
    now = read_clock_s(session)
    waiting, deferred = _counts(session, ItemState.WAITING), _counts(session, ItemState.DEFERRED)
    hourly = _counts(session, ItemState.DONE, since_s=now - 3600)
    measuring = dict(
        session.execute(
            select(tables.Item.card_id, func.max(tables.Operator.label))
            .select_from(tables.Item)
            .join(tables.Operator, col(tables.Operator.id) == col(tables.Item.subject_id), isouter=True)
            .where(tables.Item.state == ItemState.CLAIMED, col(tables.Item.lease_until_s) >= now)
            .group_by(col(tables.Item.card_id))
        ).all()
    )
    own = select(tables.Card).where(tables.Card.origin == "")
    rows = session.exec(own.order_by(col(tables.Card.host), col(tables.Card.index))).all()
    states = {card.id: _state(card, card.id in measuring, now, heartbeat_s) for card in rows}
    silent_s = silences(session, [card for card in rows if states[card.id] == CardState.IDLE and waiting.get(card.id)])
    return [
        CardView(
            card,
            states[card.id],
            (measuring.get(card.id) or "whole model") if card.id in measuring else "",
            waiting.get(card.id, 0) + deferred.get(card.id, 0),
            hourly.get(card.id, 0),
            now - card.last_seen_at_s,
            deferred.get(card.id, 0),
            silent if (silent := silent_s.get(card.id, 0.0)) > SILENT_AFTER_HEARTBEATS * heartbeat_s else 0.0,
        )
        for card in rows
    ]


def silences(session: Session, found: Sequence[tables.Card]) -> dict[str, float]:
    """For how long each of these cards has begun nothing while items of its farm wait whose messages are out. Unit: s.

    Counted from the last item that it began, or that was published for it; a card for which nothing waits is left out.
    """
    item, farms = tables.Item, {card.id: farm_of(card.worker) for card in found}
    if not farms:
        return {}
    published_at_s = case((col(item.state).in_([ItemState.WAITING, ItemState.CLAIMED]), col(item.published_at_s)))
    asked = (
        select(item.card_id, tables.Job.farm, func.max(published_at_s), func.max(item.started_at_s))
        .join(tables.Job, col(tables.Job.id) == col(item.job_id))
        .where(col(item.card_id).in_(farms))
        .group_by(col(item.card_id), col(tables.Job.farm))
    )
    now_s = read_clock_s(session)
    return {
        card_id: now_s - max(published_s, begun_s or 0.0)
        for card_id, farm, published_s, begun_s in session.execute(asked)
        if farm == farms[card_id] and published_s is not None
    }


def lost(session: Session, heartbeat_s: float) -> list[tuple[tables.Card, float]]:
    """The cards of all hosts that should be seen and are not, with how long that is. Unit: s.

    An embedded farm's are not among them: when its command was killed, nobody waits for them.
    """
    now_s = read_clock_s(session)
    return [
        (card, now_s - card.last_seen_at_s)
        for card in session.exec(select(tables.Card).order_by(col(tables.Card.host), col(tables.Card.index)))
        if _state(card, False, now_s, heartbeat_s) == CardState.LOST and not farm_of(card.worker)
    ]


def alive(session: Session, heartbeat_s: float) -> list[tables.Card]:
    """Cards that take items now."""
    return [view.card for view in views(session, heartbeat_s) if view.state in (CardState.IDLE, CardState.BUSY)]


def _state(card: tables.Card, busy: bool, now_s: float, heartbeat_s: float) -> str:
    if card.state not in (CardState.STARTING, CardState.IDLE):
        return card.state
    if now_s - card.last_seen_at_s > LOST_AFTER_HEARTBEATS * heartbeat_s:
        return CardState.LOST
    if card.state == CardState.STARTING:
        return card.state
    return CardState.BUSY if busy else CardState.IDLE


def _counts(session: Session, state: ItemState, since_s: float | None = None) -> Mapping[str, int]:
    query = select(tables.Item.card_id, func.count()).where(tables.Item.state == state)
    if since_s is not None:
        query = query.where(col(tables.Item.ended_at_s) >= since_s, col(tables.Item.reused).is_(False))
    return dict(session.execute(query.group_by(col(tables.Item.card_id))).all())


def wants_fingerprint(database: Database, card_id: str, driver: str) -> bool:
    """Whether the card has no fingerprint that stands for this driver. Simulated cards have none."""
    with database.read() as session:
        card = session.get(tables.Card, card_id)
        if card is None or card.kind == "simulated":
            return False
        return (card.fingerprint.get("version"), card.fingerprint.get("driver")) != (VERSION, driver)


def keep_fingerprint(database: Database, card_id: str, fingerprint: Mapping[str, Any]) -> None:
    with database.write() as session:
        card = session.get(tables.Card, card_id)
        if card is not None:
            card.fingerprint = dict(fingerprint)
            session.add(card)
