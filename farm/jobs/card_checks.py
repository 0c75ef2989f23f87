"""The regular checks of the cards of a host: which cards are due, and which checks have ended.

An add-on makes the requests of a check and judges it (`CardChecks`). A check is a job like others:
its items wait in the queue of the card, so it runs between other items and never beside one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from sqlmodel import Session, col, select

from farm.jobs.cards import present_state
from farm.requests.resolved import ResolvedRequest
from farm.store.database import Database, read_clock_s
from farm.store.tables import CardRow, CardState, Job, JobState
from farm.types.request import CARD_CHECK, CHECKS

Outcome = Literal["inside", "outside", "not judged", "not measured"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class JudgedCheck:
    """The outcome of a check that has ended.

    Attributes:
        card_ids: one card, or the two cards of a link.
        ended_at_s: when its last item ended, by the clock of the database.
        outside: what is outside, for people: "copy of 67 MB, bf16 +3.0 %".
    """

    job_id: str
    card_ids: tuple[str, ...]
    ended_at_s: float
    outcome: Outcome
    outside: tuple[str, ...] = ()

    @property
    def checked(self) -> Literal["card", "link"]:
        return "card" if len(self.card_ids) == 1 else "link"


class CardChecks(Protocol):
    """What an add-on that checks cards offers (`farm.types.add_on.AddOn.card_checks`)."""

    def requests(self, session: Session, cards: Sequence[CardRow]) -> list[ResolvedRequest]:
        """Return the requests of a check of these cards, and of the links between them."""
        ...

    def judged(self, database: Database, job_id: str) -> JudgedCheck:
        """Judge a check that has ended. Raises `NoSuchJob` if it is none."""
        ...


def due_cards(session: Session, card_ids: Sequence[str], every_s: float) -> list[CardRow]:
    """Return the GPUs among these cards that a worker serves, and of which no check began in the
    last ``every_s``.
    """
    now_s = read_clock_s(session)
    begun = {tuple(job.asked["cards"]) for job in _checks_since(session, now_s - every_s)}
    due = []
    for card in session.exec(select(CardRow).where(col(CardRow.id).in_(card_ids))):
        if card.is_cpu or (card.id,) in begun:
            continue
        if present_state(card, now_s) == CardState.IDLE:
            due.append(card)
    return due


def newest_ended(session: Session, card_ids: Sequence[str], within_s: float) -> list[str]:
    """Return the ids of the newest checks of these cards and of links from them that have ended,
    among those that began in the last ``within_s``.
    """
    newest: dict[tuple[str, ...], str] = {}
    for job in _checks_since(session, read_clock_s(session) - within_s):
        cards = tuple(job.asked["cards"])
        if job.state == JobState.DONE and cards[0] in card_ids:
            newest[cards] = job.id
    return list(newest.values())


def _checks_since(session: Session, since_s: float) -> Iterator[Job]:
    """Yield the jobs of checks that began since a time, the oldest first."""
    sweeps = select(Job).where(Job.kind == "sweep", col(Job.created_at_s) > since_s)
    for job in session.exec(sweeps.order_by(col(Job.created_at_s))):
        sweep = job.asked.get("sweep") or {}
        is_check = sweep.get("operator") in CHECKS and job.asked.get("cards")
        if is_check:
            yield job


def is_of_card(job: Job, card_id: str) -> bool:
    """True if a job is a check of this card, not of a link."""
    sweep = job.asked.get("sweep") or {}
    return sweep.get("operator") == CARD_CHECK and job.asked.get("cards") == [card_id]
