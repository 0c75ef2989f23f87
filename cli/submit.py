"""``farm submit``: jobs for a running farm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cli import opening, submit_and_watch
from cli.options import CliOptions, request_options
from cli.output import Interrupted, emit_json, say

if TYPE_CHECKING:
    from farm.devices.device import Card
    from farm.store.database import Database


@request_options
def submit(
    options: CliOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the jobs and show their reports.")] = False,
) -> None:
    """Hand models to a running farm; its workers measure what the database does not know yet."""
    from farm.errors import UsageError
    from farm.requests.card_selection import choose_cards
    from farm.settings import settings
    from tasks.app import check_broker

    if options.check and not wait and not options.dry_run:
        raise UsageError("--check needs the verdicts, which are not there yet.", "Add --wait.")
    wishes = options.requests()
    check_broker(settings())
    database = opening.open_database()
    cards = choose_cards(listening_cards(database, options.card or []), options.card or [])
    planned = submit_and_watch.plan(wishes, cards, target=settings().target)
    if options.dry_run:
        submit_and_watch.rehearse(database, planned, options)
        return
    outcome = submit_and_watch.Outcome()
    try:
        left = submit_and_watch.still_to_do(database, planned, outcome)
        submit_and_watch.submit_all(database, left, outcome, pinned=bool(options.card))
        if wait:
            submit_and_watch.follow(database, outcome.job_ids)
    except KeyboardInterrupt as interruption:
        jobs = " ".join(outcome.job_ids)
        hint = f"The farm goes on measuring. `farm status {jobs} --watch` follows, `farm cancel {jobs}` ends it."
        raise Interrupted(hint if jobs else "No job was made.") from interruption
    if wait:
        submit_and_watch.conclude(database, outcome, options)
    elif options.as_json:
        jobs_json = [one.to_json() for one in outcome.submitted]
        emit_json({"jobs": jobs_json, "skipped": outcome.skipped, "refused": outcome.refused})
    elif outcome.job_ids:
        say(f"→ Follow with `farm status {' '.join(outcome.job_ids)} --watch`.")
    if not wait:
        outcome.check_refused(len(outcome.submitted) + len(outcome.skipped))


def listening_cards(database: Database, wanted: Sequence[str]) -> list[Card]:
    """The farm's cards that a worker serves now: those it may be asked to measure on.

    Raises:
        NoWorker: there are none, or a card that was asked for is known and nobody serves it; names those that are.
    """
    from farm.errors import NoWorker
    from farm.jobs import cards as registry
    from farm.requests.card_selection import matching_cards
    from farm.settings import settings

    with database.read() as session:
        states = {
            opening.as_card(view.card): str(view.state) for view in registry.views(session, settings().heartbeat_s)
        }
    serving = [card for card, state in states.items() if state in ("idle", "busy")]
    names = "; ".join(str(card) for card in serving[:8])
    for want in wanted:
        known = matching_cards(list(states), want)
        if known and not any(card in serving for card in known):
            state = states[known[0]]
            mend = {
                "starting": "Its worker gets ready: try again in a moment",
                "draining": f"End that with `farm cards resume {known[0].id}`",
                "quarantined": f"Look at it, then `farm cards release {known[0].id}`",
            }.get(state, "Start it there with `farm worker`")
            raise NoWorker(
                f"No worker listens on the card '{want}': {known[0]} is {state}.",
                f"{mend}{f', or choose: {names}' if names else ''}.",
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
