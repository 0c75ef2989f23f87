"""The cards of this host and those in the database in one list, as `farm cards` shows it.

A card is a plain row, with units in its keys: those of `farm.jobs.listing.registered_cards` for a
registered card. A card of this host that never joined the farm has fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.devices.device import Card
from farm.devices.host import links_of, note_about
from farm.errors import FarmUnavailable, NoSuchCard
from farm.jobs.cards import Say, all_own_cards
from farm.jobs.listing import registered_cards
from farm.requests.card_selection import matching_cards
from farm.settings import settings
from farm.store.database import open_database

CardRows = dict[str, dict[str, Any]]  # by id of the card


def own_rows() -> CardRows:
    """Return the cards of this host, those that the farm cannot use included."""
    rows = {}
    for card in all_own_cards():
        row = dict(vars(card))
        refusal = row.pop("refusal")
        row["state"] = "refused" if refusal else "here"
        row["state_reason"] = refusal
        row["links"] = links_of(card)
        rows[card.id] = row
    return rows


def all_rows(say: Say) -> CardRows:
    """Return the cards of this host and of the farm. If the farm does not answer, `say` gets the
    reason, and the list has the cards of this host alone.
    """
    rows = own_rows()
    try:
        with open_database().read() as session:
            registered = registered_cards(session, settings().heartbeat_s)
    except FarmUnavailable as error:
        say(f"The list has only the cards of this host. {error.message}")
        return rows

    for row in registered:
        local = rows.get(row["id"], {})
        # A card without a worker shows why this host's driver refuses it.
        if local.get("state") == "refused" and row["state"] in ("lost", "stopped"):
            row["state"] = local["state"]
            row["state_reason"] = local["state_reason"]
        rows[row["id"]] = row
    return rows


def matching_rows(rows: CardRows, word: str) -> CardRows:
    """Return the rows of the cards that a word selects. Raises `NoSuchCard` if none matches."""
    cards = [
        Card(
            id=row["id"],
            kind=row["kind"],
            model=row["model"],
            memory_bytes=row["memory_bytes"],
            index=row["index"],
            host=row["host"],
        )
        for row in rows.values()
    ]
    matches = matching_cards(cards, word)
    if not matches:
        raise NoSuchCard(f"There is no card '{word}'.", "List the cards with `farm cards`.")
    return {card.id: rows[card.id] for card in matches}


def note_on(row: Mapping[str, Any]) -> str:
    """Return what a user has to know about cards of this model; "" if there is nothing."""
    return note_about(str(row.get("kind")), str(row.get("model", "")))
