"""Asking for many rows by their keys, in as many statements as the database takes values."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy
from sqlmodel import Session, SQLModel, col, select

from farm.store.tables import Item, Job, JobState

# SQLite takes 999 values in one statement in its older builds.
AT_ONCE = 500

T = TypeVar("T")
Row = TypeVar("Row", bound=SQLModel)


def in_batches(values: Iterable[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """The values without repetitions, in order, so many at a time."""
    wanted = list(dict.fromkeys(values))
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def fetch(session: Session, table: type[Row], keys: Iterable[Any]) -> dict[Any, Row]:
    """Rows by primary key (named ``id``)."""
    identity = table.id  # type: ignore[attr-defined]
    return {
        row.id: row  # type: ignore[attr-defined]
        for batch in in_batches(keys)
        for row in session.exec(select(table).where(col(identity).in_(batch)))
    }


def fetch_values(session: Session, columns: Sequence[Any], keys: Iterable[Any]) -> dict[Any, Any]:
    """Single columns of rows by primary key, which is the first of them: an object for each of thousands takes seconds."""
    return {row[0]: row for batch in in_batches(keys) for row in values(session, columns, columns[0].in_(batch))}


def values(session: Session, columns: Sequence[Any], *where: Any, in_order_of: Any = None) -> list[Any]:
    """Single columns of all rows for which that holds, as named tuples: their fields are read ten times as fast as a row's."""
    query = sqlalchemy.select(*columns).where(*where)
    found = session.execute(query if in_order_of is None else query.order_by(in_order_of)).all()
    return list(map(_named(tuple(column.name for column in columns))._make, found))


@functools.cache
def _named(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Values", names)


# ----- merged from farm.store.rows
# Locks on rows, for transactions that read, decide and then write.
#
# PostgreSQL lets writers run beside each other: without a lock, what the second one decided by is no longer so when it
# writes. SQLite has one writer at a time and ignores these.
#
# **The order is cards, jobs, items, rounds, and of each kind that of the ids.** Two that took them in different orders would wait for
# each other. Rows that refer to a locked card or job may still be inserted.
#

Row = TypeVar("Row", bound=SQLModel)


def locked(session: Session, table: type[Row], key: str) -> Row | None:
    """The row as it is now, nobody else's to change until this transaction ends; None if there is none."""
    return session.get(table, key, populate_existing=True, with_for_update={"key_share": True})


def lock_open_jobs(session: Session, job_ids: Iterable[str]) -> dict[str, Job]:
    """Those of the jobs that are open, so that they stay so until this transaction ends."""
    found: dict[str, Job] = {}
    for batch in in_batches(sorted(job_ids)):
        query = select(Job).where(col(Job.id).in_(batch)).order_by(col(Job.id)).with_for_update(key_share=True)
        found.update((job.id, job) for job in session.exec(query.execution_options(populate_existing=True)))
    return {job_id: job for job_id, job in found.items() if job.state == JobState.OPEN}


def lock_with_open_jobs(session: Session, *which: Any) -> tuple[dict[str, Job], list[Item]]:
    """The items of these conditions, on them and on their jobs, whose jobs are open: first these are locked, then they."""
    with_job = col(Job.id) == col(Item.job_id)
    jobs = lock_open_jobs(session, session.exec(select(Item.job_id).join(Job, with_job).where(*which).distinct()))
    query = select(Item).join(Job, with_job).where(*which).order_by(col(Item.id)).with_for_update(of=Item)
    return jobs, [item for item in session.exec(query) if item.job_id in jobs]


def lock_items(session: Session, *which: Any) -> None:
    """Take the items of these conditions in the order of their ids, which one UPDATE of them all would not."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(Item.id).where(*which).order_by(col(Item.id)).with_for_update()).all()
