"""The chord's body and errback: close a round, publish the next one. Idempotent, and it trusts the database only."""

from __future__ import annotations

import functools

from farm import items
from farm.rounds import Closing, close_round
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from tasks.app import app
from tasks.queues import follow_up, own_farm, publish_round


@functools.cache
def database() -> Database:
    """This process's database."""
    return Database(settings().database)


@app.task(name="aggregate")
def aggregate(round_id: str) -> dict[str, str]:
    """Close round "job/number" if all its items are closed, or can only be closed as exhausted.

    One argument only: Celery runs errbacks of more arguments inside the worker that saw the failure.
    """
    job_id, _, number = round_id.partition("/")
    current = settings()
    with database().read() as session:
        job = session.get(tables.Job, job_id)
    if job is not None and job.farm != own_farm():
        # Its next round would be published where nobody listens for it.
        return {"round": round_id, "closing": str(Closing.OPEN), "outcome": ""}
    follow_up(
        database(),
        items.close_exhausted(database(), max_attempts=current.max_attempts, after_s=current.lease_s, job_id=job_id),
    )
    closed = close_round(database(), job_id, int(number))
    if closed.closing is Closing.NEXT and closed.next_round is not None:
        publish_round(database(), job_id, closed.next_round)
    return {"round": round_id, "closing": str(closed.closing), "outcome": closed.outcome}
