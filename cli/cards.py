"""``farm cards``: the cards of this host and of the farm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli import opening
from cli.options import AsJson
from cli.output import emit_json, say, show


def cards(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[drain|resume|release] [CARD]",
            help="A card, to show it with its fingerprint: its id, index or part of its model name. "
            "drain, resume or release before it: take it out of work, put it back, end its quarantine.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    local: Annotated[bool, typer.Option("--local", help="Only this host's cards; asks no database.")] = False,
) -> None:
    """List the cards of this host, and those that joined the farm; take one out of work or put it back."""
    from farm.errors import UsageError
    from farm.jobs import listing

    if words and words[0] in VERBS:
        if len(words) != 2:
            raise UsageError(f"`farm cards {words[0]}` takes one card.", "Give its id; `farm cards` lists them.")
        say(VERBS[words[0]](words[1]))
        return
    if words and len(words) > 1:
        raise UsageError(f"'{words[0]}' is none of {', '.join(VERBS)}.", "Name one card, or say what to do with it.")
    card = words[0] if words else None

    rows = {row["id"]: row for row in listing.local_cards(opening.all_own_cards())}
    if not local:
        rows.update({row["id"]: _with_refusal(row, rows.get(row["id"], {})) for row in _registered()})
    if card is not None:
        rows = _meant(rows, card)
    if as_json:
        emit_json({"cards": list(rows.values())})
    else:
        from cli import lists

        show(lists.cards(list(rows.values())))
        if card is not None:
            from cli import card_details

            for row in rows.values():
                show(card_details.render(row))


def _registered() -> list[dict[str, Any]]:
    from farm.errors import FarmUnavailable
    from farm.jobs import listing
    from farm.settings import settings

    try:
        with opening.open_database().read() as session:
            return listing.registered_cards(session, settings().heartbeat_s)
    except FarmUnavailable as error:
        # This host's cards can be listed without the farm; say what is missing and go on.
        say(f"Only this host's cards: {error.message}")
        return []


def _meant(rows: dict[str, dict[str, Any]], word: str) -> dict[str, dict[str, Any]]:
    """Raises:
    NoSuchCard: none of the cards is meant.
    """
    from farm.devices.device import Card
    from farm.errors import NoSuchCard
    from farm.requests.card_selection import matching_cards

    names = ("id", "kind", "model", "memory_bytes", "index", "host")
    found = matching_cards([Card(**{name: row[name] for name in names}) for row in rows.values()], word)
    if not found:
        raise NoSuchCard(f"There is no card '{word}'.", "List the cards with `farm cards`.")
    return {card.id: rows[card.id] for card in found}


def _with_refusal(registered: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """A registered card that nobody serves, with the reason where this host's driver tells one."""
    if here.get("state") == "refused" and registered["state"] in ("lost", "stopped"):
        return {**registered, "state": here["state"], "state_reason": here["state_reason"]}
    return registered


def _drain(name: str) -> str:
    from farm.jobs import cards

    database = opening.open_database()
    with database.read() as session:
        card = cards.find(session, name)
    if card.state == "quarantined":
        return f"{card.id} is quarantined and takes nothing already: {card.state_reason}"
    cards.drain(database, card.id, "drained by a person")
    return (
        f"{card.id} drains: it ends its item, the others move to cards of its model or wait. "
        f"`farm cards resume {card.id}` puts it back."
    )


def _resume(name: str) -> str:
    from farm.errors import UsageError
    from farm.jobs import cards

    database = opening.open_database()
    with database.read() as session:
        card = cards.find(session, name)
    if card.state == "quarantined":
        raise UsageError(
            f"{card.id} is quarantined: {card.state_reason}",
            f"Look at the card first; then `farm cards release {card.id}`.",
        )
    if cards.resume(database, card.id):
        return f"{card.id} takes items again."
    return f"{card.id} was not draining."


def _release(name: str) -> str:
    from farm.jobs import cards

    database = opening.open_database()
    with database.read() as session:
        card = cards.find(session, name)
    if cards.resume(database, card.id, quarantined=True):
        if cards.written_state(database, card.id) == "starting":
            return f"{card.id} is released: its worker checks it anew, and it takes items again if it is well."
        return f"{card.id} is released; it takes items again when its worker is started and finds it well."
    return f"{card.id} was not in quarantine."


VERBS = {"drain": _drain, "resume": _resume, "release": _release}
