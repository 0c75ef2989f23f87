"""Reading many rows by their keys, and locking rows for a transaction that reads, decides and then writes.

PostgreSQL runs writers in parallel: without a lock, another writer may change a row between the decision and the write.
SQLite has one writer at a time and ignores row locks.

**Lock in this order: cards, jobs, items, rounds, and within each by id.** Two transactions that lock in different
orders would wait for each other. Rows that refer to a locked card or job can still be inserted.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy
from sqlmodel import Session, SQLModel, col, select

from farm.store.tables import Item, Job, JobState

# Older builds of SQLite accept at most 999 values in a statement.
AT_ONCE = 500

T = TypeVar("T")
Row = TypeVar("Row", bound=SQLModel)


def in_batches(values: Iterable[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield the values without repetitions, in order, in batches."""
    wanted = list(dict.fromkeys(values))
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def fetch(session: Session, table: type[Row], keys: Iterable[Any]) -> dict[Any, Row]:
    """Return rows by primary key ``id``."""
    identity = table.id  # type: ignore[attr-defined]
    return {
        row.id: row  # type: ignore[attr-defined]
        for batch in in_batches(keys)
        for row in session.exec(select(table).where(col(identity).in_(batch)))
    }


def fetch_values(session: Session, columns: Sequence[Any], keys: Iterable[Any]) -> dict[Any, Any]:
    """Columns of rows by primary key, the first column. For thousands of rows, objects would take seconds."""
    return {row[0]: row for batch in in_batches(keys) for row in values(session, columns, columns[0].in_(batch))}


def values(session: Session, columns: Sequence[Any], *where: Any, in_order_of: Any = None) -> list[Any]:
    """Columns of all matching rows as named tuples, whose fields are ten times as fast to read as those of a row."""
    query = sqlalchemy.select(*columns).where(*where)
    found = session.execute(query if in_order_of is None else query.order_by(in_order_of)).all()
    return list(map(_named(tuple(column.name for column in columns))._make, found))


@functools.cache
def _named(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Values", names)


def locked(session: Session, table: type[Row], key: str) -> Row | None:
    """Lock a row until the end of the transaction and return its current state; None if it does not exist."""
    return session.get(table, key, populate_existing=True, with_for_update={"key_share": True})


def lock_open_jobs(session: Session, job_ids: Iterable[str]) -> dict[str, Job]:
    """Lock jobs and return the open ones, which stay open until the end of the transaction."""
    found: dict[str, Job] = {}
    for batch in in_batches(sorted(job_ids)):
        query = select(Job).where(col(Job.id).in_(batch)).order_by(col(Job.id)).with_for_update(key_share=True)
        found.update((job.id, job) for job in session.exec(query.execution_options(populate_existing=True)))
    return {job_id: job for job_id, job in found.items() if job.state == JobState.OPEN}


def lock_with_open_jobs(session: Session, *which: Any) -> tuple[dict[str, Job], list[Item]]:
    """Lock items that match conditions on items and jobs, after their jobs; the open jobs and their items."""
    with_job = col(Job.id) == col(Item.job_id)
    jobs = lock_open_jobs(session, session.exec(select(Item.job_id).join(Job, with_job).where(*which).distinct()))
    query = select(Item).join(Job, with_job).where(*which).order_by(col(Item.id)).with_for_update(of=Item)
    return jobs, [item for item in session.exec(query) if item.job_id in jobs]


def lock_items(session: Session, *which: Any) -> None:
    """Lock the matching items in the order of their ids. A single UPDATE of them would lock in any order."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(Item.id).where(*which).order_by(col(Item.id)).with_for_update()).all()
