"""``farm worker``: this host's cards join the farm."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening


def worker(
    card: Annotated[
        list[str] | None,
        typer.Option(help="A card of this host: id, index, 'cpu', or part of its model name. Default: all its GPUs."),
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log one JSON object per line.")] = False,
) -> None:
    """Serve this host's cards: one worker process and one queue per card. Ends with Ctrl-C."""
    from farm.defaults import choose_cards
    from farm.devices.device import discover
    from farm.settings import settings
    from tasks import worker as workers
    from tasks.app import check_broker

    if card:
        cards = choose_cards(opening.own_cards(), card)
    else:
        cards = [found for found in discover(settings()) if not found.refusal]
    check_broker(settings())
    opening.open_database().close()
    raise typer.Exit(workers.run(cards, json_logs=json_logs))
