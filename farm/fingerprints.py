"""A card's fingerprint in the database: taken when the card is first seen with a driver, kept until that changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.store import tables
from farm.store.database import Database

#: Of `farm.benchmark.fingerprint`; an older one is taken anew.
VERSION = 2


def wanted(database: Database, card_id: str, driver: str) -> bool:
    """Whether the card has no fingerprint that stands for this driver. Simulated cards have none."""
    with database.read() as session:
        card = session.get(tables.Card, card_id)
        if card is None or card.kind == "simulated":
            return False
        return (card.fingerprint.get("version"), card.fingerprint.get("driver")) != (VERSION, driver)


def keep(database: Database, card_id: str, fingerprint: Mapping[str, Any]) -> None:
    with database.write() as session:
        card = session.get(tables.Card, card_id)
        if card is not None:
            card.fingerprint = dict(fingerprint)
            session.add(card)
