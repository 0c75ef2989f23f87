"""The chord's body and errback: close a round, publish the next one. Idempotent, and it trusts the database only."""

from __future__ import annotations

import functools
import logging
from collections import Counter

from farm.errors import FarmUnavailable, Unreadable
from farm.jobs import items
from farm.jobs.closing import Closing, close_round, end_without_sum
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from tasks.app import app
from tasks.queues import follow_up, own_farm, publish_round

log = logging.getLogger("farm.control")

#: A round whose aggregation raises so often ends its job: the reason is then read in the report, and nothing waits for it.
TRIES = 6
_raised: Counter[str] = Counter()  # of this process


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
    try:
        exhausted = items.close_exhausted(
            database(), max_attempts=current.max_attempts, after_s=current.lease_s, job_id=job_id
        )
        follow_up(database(), exhausted)
        closed = close_round(database(), job_id, int(number))
    except FarmUnavailable:
        raise
    except Unreadable as error:  # no later try would read it
        log.error("Job %s ends without a verdict: %s", job_id, error.message)
        closed = end_without_sum(database(), job_id, int(number), error.message)
    except Exception as error:
        _raised[round_id] += 1
        if _raised[round_id] < TRIES:
            raise
        log.exception("Job %s ends without a verdict: its round %s could not be judged", job_id, number)
        why = f"The sum could not be made: {type(error).__name__}: {error}"
        closed = end_without_sum(database(), job_id, int(number), why[:1000])
    _raised.pop(round_id, None)
    if closed.closing is Closing.NEXT and closed.next_round is not None:
        publish_round(database(), job_id, closed.next_round)
    return {"round": round_id, "closing": str(closed.closing), "outcome": closed.outcome}
