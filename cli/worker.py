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
    from farm.errors import NoSuchCard
    from farm.settings import settings
    from tasks import worker as workers
    from tasks.app import check_broker

    if card:
        cards = opening.chosen_own_cards(card)
    else:
        usable = opening.own_cards()
        cards = [found for found in usable if found.kind != "cpu"]
        if not cards and any(found.refusal for found in opening.all_own_cards()):
            raise NoSuchCard(
                "No GPU of this host can be measured on.",
                "Mend what stands above, or serve the CPU with `farm worker --card cpu`.",
            )
        cards = cards or usable
    check_broker(settings())
    opening.open_database().close()
    raise typer.Exit(workers.run(cards, json_logs=json_logs))
