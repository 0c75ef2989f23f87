"""How long a job still takes: what its cards have before them, by how they live up to expectations lately."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from sqlmodel import Session, col, func, select

from farm.store import tables
from farm.store.database import database_now
from farm.store.rows import in_batches
from farm.store.tables import OPEN, Item, ItemState, JobState

#: What a card did this long ago at most, and how many of its newest items, tells how it goes on; fewer tell nothing.
LATELY_S, NEWEST, FEWEST = 900.0, 200, 3
#: Between two items that follow each other. Unit: s.
LONGEST_PAUSE_S = 1.0


def time_left_s(session: Session, job: tables.Job, open_s: Mapping[str, float]) -> float:
    """Seconds until the job's open items are closed, if its cards go on as they did in the last quarter of an hour.

    Cards that run dry take from the others, so that all end about together. Jobs that were opened earlier come first.

    Args:
        open_s: card id -> expected seconds of the job's open items there.
    """
    if not open_s:
        return 0.0
    ahead_s = _of_earlier_jobs(session, job)
    return together_s(
        session, {card_id: expected_s + ahead_s.get(card_id, 0.0) for card_id, expected_s in open_s.items()}
    )


def together_s(session: Session, before_s: Mapping[str, float]) -> float:
    """Seconds until cards end that take work from each other, if they go on as they did lately.

    Args:
        before_s: card id -> expected seconds of what it has before it; not empty.
    """
    slowness = _slowness(session, list(before_s))
    usual = statistics.mean(slowness.values()) if slowness else 1.0
    return sum(before_s.values()) / sum(1 / slowness.get(card_id, usual) for card_id in before_s)


def _slowness(session: Session, card_ids: Sequence[str]) -> dict[str, float]:
    """Taken over expected seconds of each card's newest items, the pauses between them included."""
    query = (
        select(Item.card_id, Item.expected_s, Item.started_at_s, Item.ended_at_s)
        .where(
            col(Item.card_id).in_(card_ids),
            Item.state == ItemState.DONE,
            col(Item.reused).is_(False),
            Item.role == "tuple",
            col(Item.started_at_s).is_not(None),
            col(Item.ended_at_s) > database_now() - LATELY_S,
        )
        .order_by(col(Item.ended_at_s).desc())
        .limit(NEWEST * len(card_ids))
    )
    expected_s: dict[str, float] = defaultdict(float)
    taken_s: dict[str, float] = defaultdict(float)
    number: Counter[str] = Counter()
    free_s: dict[str, float] = {}  # since when the card had nothing to do
    for card_id, expected, started_s, ended_s in reversed(session.execute(query).all()):
        begun_s = free_s.get(card_id, 0.0)
        # Longer, the card waited for something to do.
        taken_s[card_id] += ended_s - (begun_s if 0 <= started_s - begun_s < LONGEST_PAUSE_S else started_s)
        expected_s[card_id] += expected
        number[card_id] += 1
        free_s[card_id] = ended_s
    return {card: max(0.001, taken_s[card] / expected_s[card]) for card in number if number[card] >= FEWEST}


def _of_earlier_jobs(session: Session, job: tables.Job) -> dict[str, float]:
    earlier = select(tables.Job.id).where(
        tables.Job.state == JobState.OPEN, tables.Job.farm == job.farm, col(tables.Job.created_at_s) < job.created_at_s
    )
    found: dict[str, float] = defaultdict(float)
    for batch in in_batches(session.exec(earlier)):
        query = select(Item.card_id, func.sum(Item.expected_s)).where(
            col(Item.job_id).in_(batch), col(Item.state).in_(OPEN)
        )
        for card_id, expected_s in session.execute(query.group_by(col(Item.card_id))):
            found[card_id] += expected_s or 0.0
    return found
