"""The checks that workers make regularly: this module is a `farm.jobs.card_checks.CardChecks`."""

from __future__ import annotations

from collections.abc import Sequence

from sqlmodel import Session

from farm.addons.check.card_check import results
from farm.addons.check.requested import check_request, link_requests
from farm.jobs.card_checks import JudgedCheck
from farm.requests.resolved import ResolvedRequest
from farm.store.database import Database
from farm.store.tables import CardRow


def requests(session: Session, cards: Sequence[CardRow]) -> list[ResolvedRequest]:
    """See `CardChecks`."""
    of_cards = [check_request(card) for card in cards]
    return of_cards + link_requests(session, [card.id for card in cards])


def judged(database: Database, job_id: str) -> JudgedCheck:
    """See `CardChecks`."""
    (result,) = results(database, [job_id])
    return JudgedCheck(
        job_id, result.card_ids, result.ended_at_s, result.outcome, tuple(result.outside())
    )
