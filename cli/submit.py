"""``farm submit``: jobs for a running farm."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import following, opening
from cli.asking import Asked, asks
from cli.output import Interrupted, emit_json, say


@asks
def submit(
    asked: Asked,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the jobs and show their reports.")] = False,
) -> None:
    """Hand models to a running farm; its workers measure what the database does not know yet."""
    from farm.defaults import choose_cards
    from farm.errors import UsageError
    from farm.settings import settings
    from tasks.app import check_broker

    if asked.check and not wait:
        raise UsageError("--check needs the verdicts, which are not there yet.", "Add --wait.")
    wishes = asked.wishes()
    check_broker(settings())
    database = opening.open_database()
    cards = choose_cards(listening_cards(database, asked.card or []), asked.card or [])
    planned = following.plan(wishes, cards, target=settings().target)
    outcome = following.submit_all(database, planned)
    if not wait:
        if asked.as_json:
            emit_json({"jobs": [one.to_json() for one in outcome.submitted], "skipped": outcome.skipped})
        elif outcome.job_ids:
            say(f"→ Follow with `farm status {outcome.job_ids[0]} --watch`.")
        return
    try:
        following.follow(database, outcome.job_ids)
    except KeyboardInterrupt as interruption:
        jobs = " ".join(outcome.job_ids)
        raise Interrupted(
            f"The farm goes on measuring. `farm status {jobs} --watch` follows, `farm cancel {jobs}` ends it."
        ) from interruption
    following.conclude(database, outcome, asked)


def listening_cards(database, wanted):  # type: ignore[no-untyped-def]
    """The farm's cards on whose queue a worker listens now.

    Raises:
        NoWorker: there are none, or a card that was asked for is known but nobody listens on it.
    """
    from farm.defaults import choose_cards
    from farm.errors import NoSuchCard, NoWorker
    from tasks.app import app
    from tasks.queues import listening

    known = [opening.as_card(row) for row in opening.farm_cards(database)]
    there = listening(app)
    cards = [card for card in known if card.id in there]
    names = "; ".join(f"{card.model} ({card.id})" for card in cards[:8])
    if not cards:
        raise NoWorker(
            "No worker listens on any card of this farm.", "Start one on each host with cards: `farm worker`."
        )
    for want in wanted:
        try:
            choose_cards(cards, [want])
        except NoSuchCard:
            if choose_cards_or_none(known, want):
                raise NoWorker(
                    f"No worker listens on the card '{want}'.", f"Start it with `farm worker`, or choose: {names}."
                ) from None
            raise
    return cards


def choose_cards_or_none(cards, want):  # type: ignore[no-untyped-def]
    from farm.defaults import choose_cards
    from farm.errors import NoSuchCard

    try:
        return choose_cards(cards, [want])
    except NoSuchCard:
        return []
