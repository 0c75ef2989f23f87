"""The job of another farm's verdict, made of what came with it: ended, to be reported and published like one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.errors import Unreadable
from farm.exchange.tidy import capture_key
from farm.store import content, tables
from farm.store.rows import in_batches
from farm.types.request import Request

_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_CAPTURE = tables.Capture.__table__.c  # type: ignore[attr-defined]
_ITEM = tables.Item.__table__.c  # type: ignore[attr-defined]
_OF_ITEM = [
    _READING[name]
    for name in ("id", "subject_kind", "subject_id", "card_id", "card_model", "protocol_id", "created_at_s")
]


def write_job(session: Session, row: Mapping[str, Any]) -> None:
    """Write the job of a verdict, whose row is as `farm.exchange.importer` checked it. No request is done by it.

    None is made where something of it is missing, as in the export of a part.
    """
    try:
        request = Request.from_json(json.loads(row["request"]))
    except Unreadable:
        return
    if (request.variant.id if request.variant else None) != row["variant_id"]:
        return
    if request.variant and session.get(tables.ModelVariant, request.variant.id) is None:
        return
    made_of, job_id, number = json.loads(row["made_of"]), row["job_id"], row["round"]
    wanted = {reading_id for reading_id, *_ in made_of}
    readings = {
        found.id: found
        for batch in in_batches(wanted)
        for found in session.execute(sqlalchemy.select(*_OF_ITEM).where(_READING.id.in_(batch)))
    }
    captured = _known_capture(session, row) if row["capture_id"] else None
    if len(readings) < len(wanted) or (row["capture_id"] and captured is None):
        return
    cards = sorted({found.card_id for found in readings.values()})
    if (job := session.get(tables.Job, job_id)) is None:
        job = tables.Job(
            id=job_id,
            kind=row["job_kind"],
            title=row["title"],
            variant_id=row["variant_id"],
            protocol_id=content.store_protocol(session, request.protocol),
            request={**request.to_json(), "cards": cards},
            state=tables.JobState.DONE,
            created_at_s=row["created_at_s"],
        )
        session.add(job)
        session.flush()
    job.round = max(job.round, number)
    job.ended_at_s = max(job.ended_at_s or 0.0, row["created_at_s"])
    at_s = row["created_at_s"]
    session.add(
        tables.Round(
            job_id=job_id,
            number=number,
            operators=row["operators"] or ["all"],
            capture_id=captured,
            created_at_s=at_s,
            planned_at_s=at_s,
            published_at_s=at_s,
        )
    )
    figures = {
        name: row[name]
        for name in tables.Verdict.model_fields
        if name in row and name not in ("details", "created_at_s")
    }
    session.add(tables.Verdict(**figures, details=json.loads(row["details"]), created_at_s=at_s))
    session.flush()
    before = sqlalchemy.select(_ITEM.reading_id, _ITEM.role).where(_ITEM.job_id == job_id)
    there, items = set(map(tuple, session.execute(before))), {}
    for reading_id, role, of_round, reused in made_of:
        found = readings[reading_id]
        key = found.subject_id, found.protocol_id, found.card_id, role
        if (reading_id, role) not in there:
            items[key] = {
                "job_id": job_id,
                "round": of_round,
                "role": role,
                **{name: value for name, value in found._mapping.items() if name not in ("id", "created_at_s")},
                "state": tables.ItemState.DONE,
                "reading_id": reading_id,
                "reused": reused,
                "created_at_s": found.created_at_s,
                "ended_at_s": found.created_at_s,
            }
    if items:
        session.execute(sqlalchemy.insert(tables.Item), list(items.values()))


def _known_capture(session: Session, row: Mapping[str, Any]) -> int | None:
    """Its capture here: as it was imported, or one's own of the same."""
    query = sqlalchemy.select(*_CAPTURE).where(_CAPTURE.variant_id == row["variant_id"])
    same = [found for found in session.execute(query) if capture_key(found) == row["capture_id"]]
    same.sort(key=lambda found: not found.origin.startswith(tables.IMPORTED))
    return same[0].id if same else None
