"""``farm worker``: let the cards of this host join the farm."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from cli import opening
from cli.output import said_through

if TYPE_CHECKING:
    from farm.devices.device import Card

#: Words in ``--card`` that mean GPUs, even before their driver is loaded.
GPUS = ("gpu", "cuda")


def worker(
    card: list[str] | None = typer.Option(
        None, help="A card of this host: id, index, 'gpu', 'cpu', or part of its model name. Default: all its GPUs."
    ),
    as_json: bool = typer.Option(False, "--json", "--json-logs", help="Log one JSON object per line."),
) -> None:
    """Serve this host's cards: one worker process and one queue per card. Ends with Ctrl-C."""
    from farm.settings import settings
    from tasks import logs, supervisor
    from tasks.app import check_broker

    if as_json:
        logs.set_up(True)
    with said_through(logging.getLogger("farm.worker").warning) if as_json else contextlib.nullcontext():
        cards = _chosen(card)
    check_broker(settings())
    opening.open_database().close()
    raise typer.Exit(supervisor.run(cards, json_logs=as_json))


def _chosen(wanted: Sequence[str] | None) -> list[Card]:
    """The cards to serve.

    Raises:
        CardUnavailable: a requested GPU does not answer its driver, or the driver is not loaded, as on a host that has
            just started. A service tries again.
        NoSuchCard: no card matches.
    """
    from farm.errors import CardUnavailable, NoSuchCard
    from farm.jobs.card_choice import all_own_cards
    from farm.requests.card_selection import matching_cards

    if wanted:
        try:
            return opening.chosen_own_cards(wanted)
        except NoSuchCard as error:
            own = all_own_cards()
            if any(matching_cards(own, want) or want.strip().lower().startswith(GPUS) for want in wanted):
                raise CardUnavailable(error.message, error.next_step) from error
            raise
    usable = opening.own_cards()
    cards = [found for found in usable if found.kind != "cpu"]
    if not cards and any(found.refusal for found in all_own_cards()):
        raise CardUnavailable(
            "No GPU of this host can be measured on.",
            "Correct the problems above, or serve the CPU with `farm worker --card cpu`.",
        )
    return cards or usable
