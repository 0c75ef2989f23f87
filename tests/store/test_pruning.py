"""What is pruned, and what never is."""

from __future__ import annotations

import pytest
from sqlmodel import func, select

from farm.jobs import jobs
from farm.store import tables
from farm.store.pruning import prunable, prune
from farm.types.reading import Trace
from tests.planned import claim, complete, items_of, plan, register

TRACE = Trace((0.0, 1.0), {"power_w": ([0.0, 1.0], [100.0, 101.0])}).pack()
DAY_S = 86400.0


@pytest.fixture
def grown(any_database):
    """A database with a job of two tuples, one of them read, one cancelled before anything was, and
    an open one.
    """
    (card,) = register(any_database, 0)
    read, cancelled, waiting = (plan(any_database, [card], number=2) for _ in range(3))
    first, _ = items_of(any_database, read)
    complete(any_database, claim(any_database, first), card)
    jobs.cancel(any_database, read)
    jobs.cancel(any_database, cancelled)
    with any_database.write() as session:
        session.add(
            tables.TraceRow(
                reading_id=session.exec(select(tables.ReadingRow.id)).one(), packed=TRACE
            )
        )
    return any_database, (read, cancelled, waiting)


def counted(database):
    with database.read() as session:
        return {
            table.__tablename__: session.exec(select(func.count()).select_from(table)).one()
            for table in (tables.Job, tables.Item, tables.Round, tables.TraceRow, tables.ReadingRow)
        }


def test_time_series_and_jobs_without_a_reading_go_and_readings_stay(grown):
    database, (read, cancelled, waiting) = grown
    before = counted(database)
    assert prunable(database, DAY_S) == prune(database, DAY_S)
    assert counted(database) == before, "nothing is a day old"
    found = prunable(database, 0.0)
    assert (found.traces, found.traces_bytes, found.jobs) == (1, len(TRACE), (cancelled,))
    assert prune(database, 0.0) == found
    assert counted(database) == {"job": 2, "item": 4, "job_round": 2, "trace": 0, "reading": 1}
    with database.read() as session:
        assert set(session.exec(select(tables.Job.id))) == {read, waiting}
    assert (prunable(database, 0.0).traces, prunable(database, 0.0).jobs) == (0, ())
