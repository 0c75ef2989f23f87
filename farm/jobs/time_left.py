"""How long a job still takes: what its cards have before them, by how they live up to expectations lately."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from sqlmodel import Session, col, func, select

from farm.jobs.moving import slowness
from farm.store import tables
from farm.store.batches import in_batches
from farm.store.tables import OPEN, Item, JobState


def time_left_s(session: Session, job: tables.Job, open_s: Mapping[str, float]) -> float:
    """Seconds until the job's open items are closed, if its cards go on as they did in the last quarter of an hour.

    Cards that run dry take from the others, so that all end about together. Jobs that were opened earlier come first.

    Args:
        open_s: card id -> expected seconds of the job's open items there.
    """
    if not open_s:
        return 0.0
    ahead_s = _of_earlier_jobs(session, job)
    before_s = sum(expected_s + ahead_s.get(card_id, 0.0) for card_id, expected_s in open_s.items())
    known = slowness(session, list(open_s))
    usual = statistics.mean(known.values()) if known else 1.0
    return before_s / sum(1 / known.get(card_id, usual) for card_id in open_s)


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
