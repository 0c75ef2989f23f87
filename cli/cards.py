"""``farm cards``: the cards of this host and of the farm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli import opening
from cli.output import emit_json, say, show


def cards(
    card: Annotated[
        str | None, typer.Argument(help="Show one card with its fingerprint: its id, index or part of its model name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Only this host's cards; asks no database.")] = False,
) -> None:
    """List the cards of this host, and those that joined the farm."""
    from farm import listing

    rows = {row["id"]: row for row in listing.local_cards(opening.all_own_cards())}
    if not local:
        rows.update({row["id"]: row for row in _registered()})
    if card is not None:
        from farm.defaults import matching_rows
        from farm.errors import NoSuchCard

        found = matching_rows(rows.values(), card)
        if not found:
            raise NoSuchCard(f"There is no card '{card}'.", "List the cards with `farm cards`.")
        rows = {row["id"]: row for row in found}
    if as_json:
        emit_json({"cards": list(rows.values())})
    else:
        from cli import render

        show(render.cards(list(rows.values())))
        if card is not None:
            from cli import card_details

            for row in rows.values():
                show(card_details.render(row))


def _registered() -> list[dict[str, Any]]:
    from farm import listing
    from farm.errors import FarmUnavailable
    from farm.settings import settings

    try:
        with opening.open_database().read() as session:
            return listing.registered_cards(session, settings().heartbeat_s)
    except FarmUnavailable as error:
        # This host's cards can be listed without the farm; say what is missing and go on.
        say(f"Only this host's cards: {error.message}")
        return []
