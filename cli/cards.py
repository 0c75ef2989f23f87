"""``farm cards``: the cards of this host and of the farm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli import opening
from cli.output import emit_json, say, show


def cards(
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Only this host's cards; asks no database.")] = False,
) -> None:
    """List the cards of this host, and those that joined the farm."""
    from farm.devices.device import cpu_card, discover
    from farm.settings import settings

    here = discover(settings())
    if not any(card.kind in ("cpu", "simulated") for card in here):
        here.append(cpu_card(settings()))
    rows: dict[str, dict[str, Any]] = {card.id: {**card.to_json(), "state": "not in the farm"} for card in here}
    if not local:
        for row in _registered():
            rows[row.id] = {**opening.as_card(row).to_json(), "refusal": "", "state": str(row.state)}
            rows[row.id]["state_reason"] = row.state_reason
            rows[row.id]["last_seen_at_s"] = row.last_seen_at_s
    if as_json:
        emit_json({"cards": list(rows.values())})
    else:
        from cli import render

        show(render.cards(list(rows.values())))


def _registered() -> list[Any]:
    from farm.errors import FarmUnavailable

    try:
        return list(opening.farm_cards(opening.open_database()))
    except FarmUnavailable as error:
        # This host's cards can be listed without the farm; say what is missing and go on.
        say(f"Only this host's cards: {error.message}")
        return []
