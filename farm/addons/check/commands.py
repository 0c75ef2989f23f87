"""``farm cards check``: whether cards are as fast as their kind and as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group

from cli import follow, output
from cli.interruption import Ending, interruptible
from cli.options import AsJson, Cards
from cli.output import Interrupted, answer, say
from cli.run import hint_for, measure
from farm.errors import BelowTarget, CardNotMeasured, NoReadings, UsageError

if TYPE_CHECKING:
    from farm.addons.check.card_check import CardCheck
    from farm.requests.card_selection import CardLike
    from farm.requests.resolved import ResolvedRequest
    from farm.store.database import Database


def check(
    card: Cards = None,
    all_cards: bool = False,
    quarantine: bool = False,
    job: list[str] | None = None,
    html: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Check whether cards are as fast, and need as much power, as other cards of their model and as
    before.

    It takes about a minute per card; the cards of a host are checked at the same time. It ends with
    code 5 if a card is outside of what repetition and the differences between cards explain, and
    with code 1 if a card could not be measured."""
    output.check_page(html)
    answering = Answering(html, as_json=as_json, quarantine=quarantine)
    if job:
        with contextlib.closing(output.open_database()) as database:
            answering.conclude(database, job)
    elif all_cards:
        _check_farm(card or [], answering)
    else:
        interruptible(lambda ending: _check_host(card or [], ending, answering))


def _check_host(wanted: Sequence[str], ending: Ending, answering: Answering) -> None:
    from tasks.submissions import Submissions

    cards = output.chosen_own_cards(wanted)
    if any(card.is_cpu for card in cards):
        raise UsageError("Only GPUs are checked, and this card is a CPU.", "Choose a GPU.")
    submissions = Submissions(say)
    with output.writable_database(may_upgrade=True) as database:
        measure(database, _batches(database, cards), cards, submissions, ending)
        answering.conclude(database, submissions.job_ids)


def _check_farm(wanted: Sequence[str], answering: Answering) -> None:
    from farm.jobs.cards import serving_cards
    from farm.requests.card_selection import choose_cards
    from tasks.app import check_broker
    from tasks.submissions import Submissions

    check_broker()
    database = output.open_database()
    cards = serving_cards(database, wanted)
    if wanted:
        cards = choose_cards(cards, wanted)
    submissions = Submissions(say)
    try:
        for requests in _batches(database, cards):
            before = len(submissions.job_ids)
            submissions.submit_all(database, requests, progress=follow.working)
            follow.follow(database, submissions.job_ids[before:])
    except KeyboardInterrupt as interruption:
        raise Interrupted(hint_for(submissions.job_ids)) from interruption
    answering.conclude(database, submissions.job_ids)


def _batches(database: Database, cards: Sequence[CardLike]) -> Iterator[list[ResolvedRequest]]:
    """One job for each card, which measures every figure; then one for each pair of cards of a
    host, which must be free together.
    """
    from farm.addons.check.requested import check_request, link_requests

    yield [check_request(card) for card in cards]
    with database.read() as session:
        links = link_requests(session, [card.id for card in cards])
    if links:
        yield links


@dataclass(frozen=True)
class Answering:
    """How a check answers: on the terminal or as JSON, with a page, with quarantines."""

    html: Path | None
    as_json: bool
    quarantine: bool

    def conclude(self, database: Database, job_ids: Sequence[str]) -> None:
        """Show the results. Raises `BelowTarget` if a card is outside, and `CardNotMeasured` if one
        could not be measured."""
        from farm.addons.check import tables
        from farm.addons.check.card_check import results
        from farm.jobs import cards

        checks = results(database, job_ids)
        if self.html is not None:
            from farm.addons.check.page import write_checks

            write_checks(self.html, checks)
            say(f"Written to {self.html}")
        shown = {"checks": [result.to_json() for result in checks]}
        if self.html is None or self.as_json:
            answer(self.as_json, shown, lambda: Group(*map(tables.card_check, checks)))
        outside = [result for result in checks if result.outcome == "outside"]
        for result in outside if self.quarantine else ():
            if not result.is_of_link:  # of a link, it is unknown which card is slow
                cards.quarantine(database, result.card_ids[0], "A card check found it outside.")
        if outside:
            raise BelowTarget(
                f"{_of_checked(outside, checks)} are outside: {_names(outside)}.",
                "Look for other processes, heat and power limits on the host, then check it again.",
            )
        failed = [result for result in checks if result.outcome == "not measured"]
        if failed:
            raise CardNotMeasured(
                f"{_of_checked(failed, checks)} could not be measured: {_names(failed)}.",
                "`farm doctor` examines the host and its cards.",
            )


def _of_checked(some: Sequence[CardCheck], checks: Sequence[CardCheck]) -> str:
    """Some of the checked cards or links, as text: "1 of 2 cards"."""
    what = "cards and links" if any(result.is_of_link for result in checks) else "cards"
    return f"{len(some)} of {len(checks)} {what}"


def _names(checks: Sequence[CardCheck]) -> str:
    return ", ".join(result.subject for result in checks)


def card_history(card: str, html: Path | None, as_json: bool) -> None:
    """Show the checks of a card over time, or write them as a page. Raises `NoReadings` if it has
    none."""
    from farm.addons.check import tables
    from farm.addons.check.card_check import checks_of, results
    from farm.jobs import cards

    output.check_page(html)
    with contextlib.closing(output.open_database()) as database:
        with database.read() as session:
            card_id = cards.find(session, card).id
            job_ids = checks_of(session, card_id)
        if not job_ids:
            raise NoReadings(f"The card {card_id} has no check.", "Run `farm cards check`.")
        checks = results(database, job_ids)
    if html is not None:
        from farm.addons.check.page import write_history

        write_history(html, checks)
        say(f"Written to {html}")
    shown = {"card_id": card_id, "checks": [result.to_json() for result in checks]}
    if html is None or as_json:
        answer(as_json, shown, lambda: tables.card_history(checks))
