"""The cards as the database knows them: registered by the worker that serves them, seen by its heartbeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import update
from sqlmodel import Session, col, func, select

from farm.benchmark.protocol import Software
from farm.devices.device import Card
from farm.errors import NoSuchCard
from farm.store import tables
from farm.store.content import store_software
from farm.store.database import Database, database_now
from farm.store.tables import CardState, ItemState

#: A card is lost when its worker has not been seen for this many heartbeats.
LOST_AFTER_HEARTBEATS = 3


@dataclass(frozen=True)
class CardView:
    """One card with what it is doing, for people and for placement."""

    card: tables.Card
    state: str  # idle | busy | draining | quarantined | lost | stopped
    measuring: str  # the label of the item in work, or ""
    waiting: int  # items in its queue
    done_last_hour: int
    seen_ago_s: float


def register(
    database: Database, card: Card, software: Software, *, holder: str, queue: str, capabilities: Sequence[str] = ()
) -> str:
    """Write the card as served by ``holder`` and return its software id. A quarantine outlives its worker."""
    with database.write() as session:
        software_id = store_software(session, software)
        row = session.get(tables.Card, card.id) or tables.Card(id=card.id, kind=card.kind, model=card.model)
        row.kind, row.model, row.memory_bytes, row.driver = card.kind, card.model, card.memory_bytes, card.driver
        row.host, row.index, row.queue = card.host, card.index, queue
        row.software_id, row.worker = software_id, holder
        row.capabilities = sorted(capabilities)
        if row.state != CardState.QUARANTINED:
            row.state, row.state_reason = CardState.IDLE, ""
        row.last_seen_at_s = database_now()  # type: ignore[assignment]
        if not row.registered_at_s:
            row.registered_at_s = database_now()  # type: ignore[assignment]
        session.add(row)
    return software_id


def seen(database: Database, holder: str) -> None:
    """The heartbeat of a worker."""
    with database.write() as session:
        session.execute(
            update(tables.Card).where(col(tables.Card.worker) == holder).values(last_seen_at_s=database_now())
        )


def stopped(database: Database, holder: str) -> None:
    """The worker left in order."""
    with database.write() as session:
        session.execute(
            update(tables.Card)
            .where(col(tables.Card.worker) == holder, col(tables.Card.state) != CardState.QUARANTINED)
            .values(state=CardState.STOPPED, worker="")
        )


def set_state(database: Database, card_id: str, state: CardState, reason: str = "") -> None:
    """Drain, quarantine or release a card."""
    with database.write() as session:
        changed = session.execute(
            update(tables.Card).where(col(tables.Card.id) == card_id).values(state=state, state_reason=reason)
        )
        if not changed.rowcount:  # type: ignore[attr-defined]
            raise NoSuchCard(f"No card '{card_id}' is registered.", "List the cards with `farm cards`.")


def views(session: Session, heartbeat_s: float) -> list[CardView]:
    """All cards that ever registered, with what they do now."""
    now = session.exec(select(database_now())).one()
    waiting = _counts(session, ItemState.WAITING)
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
    return [
        CardView(
            card,
            _state(card, card.id in measuring, now, heartbeat_s),
            (measuring.get(card.id) or "whole model") if card.id in measuring else "",
            waiting.get(card.id, 0),
            hourly.get(card.id, 0),
            now - card.last_seen_at_s,
        )
        for card in session.exec(select(tables.Card).order_by(col(tables.Card.host), col(tables.Card.index)))
    ]


def alive(session: Session, heartbeat_s: float) -> list[tables.Card]:
    """Cards that take items now."""
    return [view.card for view in views(session, heartbeat_s) if view.state in (CardState.IDLE, CardState.BUSY)]


def _state(card: tables.Card, busy: bool, now_s: float, heartbeat_s: float) -> str:
    if card.state != CardState.IDLE:
        return card.state
    if now_s - card.last_seen_at_s > LOST_AFTER_HEARTBEATS * heartbeat_s:
        return CardState.LOST
    return CardState.BUSY if busy else CardState.IDLE


def _counts(session: Session, state: ItemState, since_s: float | None = None) -> Mapping[str, int]:
    query = select(tables.Item.card_id, func.count()).where(tables.Item.state == state)
    if since_s is not None:
        query = query.where(col(tables.Item.ended_at_s) >= since_s, col(tables.Item.reused).is_(False))
    return dict(session.execute(query.group_by(col(tables.Item.card_id))).all())
