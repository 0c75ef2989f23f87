"""The rows of the database that an export does not contain, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlmodel import Session, func

from farm.exchange.export_rows import imported_without_job
from farm.store import tables
from farm.store.columns import IMPORTED_VERDICT, JOB, VERDICT
from farm.store.query import Filters
from farm.types.format import plural

_COUNTED: Mapping[str, Any] = {
    "readings": tables.ReadingRow,
    "captures": tables.Capture,
    "calls": tables.Call,
}


@dataclass(frozen=True)
class LeftOut:
    """Rows of one table that an export does not contain."""

    table: str
    rows: int
    why: str

    def __str__(self) -> str:
        return f"{self.rows} {plural(self.table[:-1], self.rows)}: {self.why}"


def left_out(
    session: Session, filters: Filters | None, written: Mapping[str, int]
) -> tuple[LeftOut, ...]:
    """Compare an export with the database. ``written``: table -> rows in the export."""
    parts = [*_unselected(session, filters, written)]
    if "verdicts" in written:
        parts += _verdicts(session, written["verdicts"])
    return tuple(part for part in parts if part.rows > 0)


def _unselected(
    session: Session, filters: Filters | None, written: Mapping[str, int]
) -> Iterator[LeftOut]:
    whys = {
        "readings": f"{filters} does not select them",
        "captures": "no selected reading is of such a model or of one of its operators",
        "calls": "they belong to these captures",
    }
    if not filters:
        return
    for table, why in whys.items():
        if table in written:
            count = sqlalchemy.select(func.count()).select_from(_COUNTED[table])
            total = session.execute(count).scalar_one()
            yield LeftOut(table, total - written[table], why)


def _verdicts(session: Session, written: int) -> Iterator[LeftOut]:
    imported_ids = sqlalchemy.select(IMPORTED_VERDICT.job_id)
    imported = session.scalars(imported_ids).all()
    jobs = sqlalchemy.select(JOB.state).join(tables.VerdictRow, VERDICT.job_id == JOB.id)
    states = session.scalars(jobs.where(JOB.id.not_in(imported_ids))).all()
    cancelled = states.count(tables.JobState.CANCELLED)
    yield LeftOut("verdicts", cancelled, "their jobs were cancelled before they had all readings")
    unselected = len(states) + len(imported) - cancelled - written
    unread = 0
    if unselected > 0:
        jobs_without = imported_without_job(session, without_readings=True)
        unread = sum(job_id in jobs_without for job_id in imported)
    why = "other farms measured them, and the database has none of their readings"
    yield LeftOut("verdicts", unread, why)
    yield LeftOut("verdicts", unselected - unread, "their jobs have no selected reading")
