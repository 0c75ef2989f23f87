"""Opening what a verb needs: the database with a matching schema, the cards of this host or of the farm."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.devices.device import Card
    from farm.store import tables
    from farm.store.database import Database


def open_database() -> Database:
    """The farm's database.

    Raises:
        DatabaseUnreachable, SchemaMismatch, SettingsError: with what to do.
    """
    from farm.settings import settings
    from farm.store.database import Database

    database = Database(settings().database)
    database.check_schema()
    return database


def own_cards() -> list[Card]:
    """Every card of this host that can be measured on, its CPU included."""
    from farm.devices.device import cpu_card, discover
    from farm.settings import settings

    cards = [card for card in discover(settings()) if not card.refusal]
    if not any(card.kind in ("cpu", "simulated") for card in cards):
        cards.append(cpu_card(settings()))
    return cards


def farm_cards(database: Database) -> list[tables.Card]:
    """Every card that ever registered in this farm, those of this host first."""
    from sqlmodel import select

    from farm.store import tables

    with database.read() as session:
        return list(session.exec(select(tables.Card).order_by(tables.Card.host, tables.Card.index)))


def as_card(row: tables.Card) -> Card:
    from farm.devices.device import Card

    return Card(
        id=row.id,
        kind=row.kind,  # type: ignore[arg-type]
        model=row.model,
        memory_bytes=row.memory_bytes,
        driver=row.driver,
        index=row.index,
        host=row.host,
    )
