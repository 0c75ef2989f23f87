"""Which cards a command uses: those of this host, or those that the farm's workers serve."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from farm.devices.cpu import cpu_card
from farm.devices.device import Card
from farm.devices.host import discover
from farm.errors import FarmUnavailable, NoSuchCard, NoWorker
from farm.jobs import cards as registry
from farm.requests.card_selection import choose_cards, matching_cards
from farm.settings import settings
from farm.store.database import Database, open_database
from farm.store.tables import CardRow

Say = Callable[[str], None]


def all_own_cards() -> list[Card]:
    """Every card of this host with its CPU, including cards that cannot be measured on."""
    found = discover(settings())
    if not any(card.kind in ("cpu", "simulated") for card in found):
        found.append(cpu_card(settings()))
    return found


def own_cards(say: Say) -> list[Card]:
    """Every card of this host that can be measured on. The others are reported through `say`."""
    own = all_own_cards()
    usable = _usable(own, say)
    if len(usable) < len(own) and all(card.kind == "cpu" for card in usable):
        say("No GPU of this host can be measured on; its CPU is the card that is left.")
    return usable


def _usable(found: Sequence[Card], say: Say) -> list[Card]:
    for card in found:
        if card.refusal:
            say(f"Left out: {card}: {card.refusal}")
    return [card for card in found if not card.refusal]


def kind_of_cards() -> str:
    """The kind of card that a job would use: of this host or, if the host has only a CPU, of its farm."""
    there = [card for card in all_own_cards() if not card.refusal]
    if settings().broker_url and all(card.kind == "cpu" for card in there):
        with contextlib.suppress(FarmUnavailable), open_database().read() as session:
            there += [as_card(view.card) for view in registry.views(session, settings().heartbeat_s)]
    return choose_cards(there, [])[0].kind


def chosen_own_cards(wanted: Sequence[str], say: Say) -> list[Card]:
    """The cards of this host that ``--card`` options name; without any, all of the most frequent model.

    Raises:
        NoSuchCard: nothing matches, or the matching cards cannot be measured on; says why.
    """
    if not wanted:
        return choose_cards(own_cards(say), [])
    chosen = choose_cards(all_own_cards(), wanted)
    if chosen and all(card.refusal for card in chosen):
        raise NoSuchCard(f"{chosen[0]} cannot be measured on: {chosen[0].refusal}.", "`farm cards` lists the others.")
    return _usable(chosen, say)


def as_card(row: CardRow) -> Card:
    """The card of a row of the database."""
    names = ("id", "kind", "model", "memory_bytes", "driver", "index", "host")
    return Card(**{name: getattr(row, name) for name in names})


def serving_cards(database: Database, wanted: Sequence[str]) -> list[Card]:
    """The farm's cards that a worker serves now. ``wanted``: the ``--card`` options.

    Raises:
        NoWorker: there are none, or no worker serves a wanted card; names the cards that are served.
    """
    with database.read() as session:
        states = {as_card(view.card): str(view.state) for view in registry.views(session, settings().heartbeat_s)}
    serving = [card for card, state in states.items() if state in ("idle", "busy")]
    names = "; ".join(str(card) for card in serving[:8])
    for want in wanted:
        known = matching_cards(list(states), want)
        if known and not any(card in serving for card in known):
            state = states[known[0]]
            step = {
                "starting": "Its worker is starting: try again in a moment",
                "draining": f"End that with `farm cards resume {known[0].id}`",
                "quarantined": f"Examine it, then run `farm cards release {known[0].id}`",
            }.get(state, "Start one there with `farm worker`")
            raise NoWorker(
                f"No worker listens on the card '{want}': {known[0]} is {state}.",
                f"{step}{f', or choose: {names}' if names else ''}.",
            )
    if not serving and (drained := [card for card, state in states.items() if state == "draining"]):
        kept = sum(state == "quarantined" for state in states.values())
        raise NoWorker(
            f"Every card that a worker serves is drained and takes nothing new: {'; '.join(map(str, drained[:8]))}"
            + (f" and {len(drained) - 8} more" if len(drained) > 8 else "")
            + (f"; {kept} more in quarantine." if kept else "."),
            f"Put one back with `farm cards resume {drained[0].id}`.",
        )
    if not serving:
        raise NoWorker("No worker listens on any card of this farm.", "Start `farm worker` on each host with cards.")
    return serving
