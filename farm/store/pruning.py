"""Delete old time series and old jobs without readings. Readings and the jobs that have them are
never deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete
from sqlmodel import col, func, select

from farm.store.database import Database, database_now, in_batches, locked
from farm.store.tables import Item, Job, JobState, ReadingRow, TraceRow


@dataclass(frozen=True)
class Prunable:
    """What to delete: old time series (number, bytes), and ended jobs whose items have no reading
    (ids).
    """

    traces: int
    traces_bytes: int
    jobs: tuple[str, ...]  # ids


def prunable(database: Database, older_than_s: float) -> Prunable:
    """Return what `prune` would delete. ``older_than_s``: least age of a reading, or least time
    since a job ended.
    """
    with database.read() as session:
        size_bytes = func.coalesce(func.sum(func.length(TraceRow.packed)), 0)
        series = select(func.count(), size_bytes).where(_of_old_readings(older_than_s))
        traces, traces_bytes = session.exec(series).one()
        jobs = session.exec(
            select(Job.id).where(*_without_reading(older_than_s)).order_by(col(Job.id))
        )
        return Prunable(traces, int(traces_bytes), tuple(jobs))


def prune(database: Database, older_than_s: float) -> Prunable:
    """Delete old rows in small transactions, so that other writers do not wait long; return what
    was deleted.
    """
    unused = prunable(database, older_than_s)
    with database.read() as session:
        ids = session.exec(select(TraceRow.reading_id).where(_of_old_readings(older_than_s))).all()
    for reading_ids in in_batches(ids):
        with database.write() as session:
            session.execute(delete(TraceRow).where(col(TraceRow.reading_id).in_(reading_ids)))
    gone = []
    for job_id in unused.jobs:
        still = select(Job.id).where(Job.id == job_id, *_without_reading(older_than_s))
        with database.write() as session:
            if locked(session, Job, job_id) is None:
                continue
            # A retry may have opened the job again meanwhile.
            if session.exec(still).first() is None:
                continue
            # The database deletes its rounds, items and verdicts, too.
            session.execute(delete(Job).where(col(Job.id) == job_id))
            gone.append(job_id)
    return Prunable(len(ids), unused.traces_bytes, tuple(gone))


def _of_old_readings(older_than_s: float) -> Any:
    old = select(ReadingRow.id).where(col(ReadingRow.created_at_s) <= database_now() - older_than_s)
    return col(TraceRow.reading_id).in_(old)


def _without_reading(older_than_s: float) -> tuple[Any, ...]:
    read = select(Item.job_id).where(
        col(Item.job_id) == col(Job.id), col(Item.reading_id).is_not(None)
    )
    return (
        Job.state != JobState.OPEN,
        col(Job.ended_at_s) <= database_now() - older_than_s,
        ~read.exists(),
    )
