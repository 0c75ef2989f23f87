"""``farm worker`` lets the cards of this host join the farm; ``farm flower`` is Celery's web
monitor on its broker.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from cli import output
from cli.output import said_through, say
from farm.errors import CardUnavailable, NoSuchCard, UsageError

if TYPE_CHECKING:
    from farm.devices.device import Card

#: Words in ``--card`` that mean GPUs, even before their driver is loaded.
GPUS = ("gpu", "cuda")
#: The least time between two checks of a card. Unit: s.
SHORTEST_PERIOD_S = 600.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def worker(
    card: list[str] | None = None, check_every: str | None = None, as_json: bool = False
) -> None:
    """Serve this host's cards: one worker process and one queue per card. Ends with Ctrl-C."""
    from farm.settings import settings
    from tasks import logs, supervisor
    from tasks.broker_probe import check_broker_works

    if as_json:
        logs.set_up(True)
    with (
        said_through(logging.getLogger("farm.worker").warning)
        if as_json
        else contextlib.nullcontext()
    ):
        cards = _chosen(card)
    check_every_s = _check_every_s(check_every, cards)
    check_broker_works(settings())
    output.open_database().close()
    raise typer.Exit(supervisor.run(cards, json_logs=as_json, check_every_s=check_every_s))


def _check_every_s(text: str | None, cards: Sequence[Card]) -> float | None:
    """The period of the option --check-every; None without it. Raises `UsageError`."""
    from farm import extensions
    from farm.types.fields import number_of

    if text is None:
        return None
    step = "Give --check-every 24h, for example, or 0 for no checks."
    try:
        every_s = number_of(text)
    except ValueError as error:
        raise UsageError(f"--check-every is '{text}'; it must be a time.", step) from error
    if every_s and not SHORTEST_PERIOD_S <= every_s < math.inf:
        raise UsageError(f"--check-every is '{text}'; it must be at least 10min.", step)
    if every_s and all(card.is_cpu for card in cards):
        raise UsageError("Only GPUs are checked, and this card is a CPU.", "Omit --check-every.")
    if every_s:
        extensions.card_checks("--check-every")
    return every_s


def _chosen(wanted: Sequence[str] | None) -> list[Card]:
    """The cards to serve. `CardUnavailable` if a GPU's driver does not answer yet: a service tries
    again.
    """
    from farm.jobs.cards import all_own_cards, own_cards
    from farm.requests.card_selection import matching_cards

    if wanted:
        try:
            return output.chosen_own_cards(wanted)
        except NoSuchCard as error:
            all_cards = all_own_cards()
            for name in wanted:
                if matching_cards(all_cards, name) or name.strip().lower().startswith(GPUS):
                    raise CardUnavailable(error.message, error.next_step) from error
            raise
    usable = own_cards(say)
    gpus = [card for card in usable if not card.is_cpu]
    if not gpus and any(card.refusal for card in all_own_cards()):
        raise CardUnavailable(
            "The farm cannot measure on any GPU of this host.",
            "Correct the problems above, or serve the CPU with `farm worker --card cpu`.",
        )
    return gpus or usable


def flower(port: int | None = None, address: str = "127.0.0.1", writable: bool = False) -> None:
    """Show queues, workers and tasks in the browser."""
    from farm.settings import settings
    from tasks.app import check_broker

    in_force = settings()
    check_broker(in_force)
    if address not in LOOPBACK and not in_force.flower_basic_auth:
        # Flower's /metrics stays open even so; a reverse proxy has to close it.
        raise UsageError(
            f"Without a password, Flower would be open to everyone who reaches {address}.",
            "Set FARM_FLOWER_BASIC_AUTH=user:password, or omit --address.",
        )
    from tasks.flower import serve

    def listening(bound_port: int) -> None:
        say(
            f"Flower on http://{address}:{bound_port} ({'writable' if writable else 'read-only'}); "
            "Ctrl-C ends it."
        )

    serve(
        in_force,
        address,
        in_force.flower_port if port is None else port,
        writable=writable,
        listening=listening,
    )
