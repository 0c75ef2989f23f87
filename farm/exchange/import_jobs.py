"""Writes the job of an imported verdict: an ended job with its rounds and items. Reports and pages
show it like a job of this farm."""

from __future__ import annotations

import json
from collections.abc import Iterable

import sqlalchemy
from sqlmodel import Session

from farm.errors import Unreadable
from farm.exchange.import_file import Row
from farm.store import content, item_state, tables
from farm.store.captures import VERIFYING_FARM, exported_id
from farm.store.columns import CAPTURE, ITEM, READING
from farm.store.database import fetch_values
from farm.types.request import Request


def write_job(session: Session, verdict: Row) -> None:
    """Write the job of an imported verdict, as an ended job.

    Its `request_id` stays empty, so no request of this farm counts as done. If rows of the job are
    missing from the export (an export of a selection), no job is written."""
    row: Row = verdict["row"]
    try:
        request = Request.from_json(json.loads(row["request"]))
    except Unreadable:
        return
    variant = request.variant
    missing = variant is not None and session.get(tables.ModelVariant, variant.id) is None
    if missing or (variant.id if variant else None) != row["variant_id"]:
        return
    made_of = json.loads(row["made_of"])
    of_item = (
        "id",
        "subject_kind",
        "subject_id",
        "card_id",
        "card_model",
        "protocol_id",
        "created_at_s",
    )
    columns = [READING[name] for name in of_item]
    readings = fetch_values(session, columns, [reading_id for reading_id, *_ in made_of])
    captured = known_capture(session, row, verdict["origin"])
    lacks_readings = any(entry[0] not in readings for entry in made_of)
    if lacks_readings or (row["capture_id"] and captured is None):
        return

    job = session.get(tables.Job, row["job_id"])
    if job is None:
        cards = sorted({reading.card_id for reading in readings.values()})
        job = _add_job(session, row, request, cards)
    job.round = max(job.round, row["round"])
    job.ended_at_s = max(job.ended_at_s or 0.0, row["created_at_s"])
    _add_round(session, row, captured)
    _write_items(session, job.id, made_of, readings)


def _add_job(session: Session, row: Row, request: Request, cards: list[str]) -> tables.Job:
    job = tables.Job(
        id=row["job_id"],
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
    return job


def _add_round(session: Session, row: Row, captured: int | None) -> None:
    """Write the round of an imported verdict, and the verdict."""
    at_s = row["created_at_s"]
    imported_round = tables.Round(
        job_id=row["job_id"],
        number=row["round"],
        operators=row["operators"] or ["all"],
        capture_id=captured,
        created_at_s=at_s,
        planned_at_s=at_s,
        published_at_s=at_s,
    )
    session.add(imported_round)
    figures = {
        name: row[name]
        for name in tables.VerdictRow.model_fields
        if name in row and name != "details"
    }
    session.add(tables.VerdictRow(**figures, details=json.loads(row["details"])))
    session.flush()


def _write_items(
    session: Session, job_id: str, made_of: Iterable[tuple[str, str, int, bool]], readings: Row
) -> None:
    """Write the items of an imported job, except those that an earlier round has written."""
    before = sqlalchemy.select(ITEM.reading_id, ITEM.role).where(ITEM.job_id == job_id)
    stored = set(map(tuple, session.execute(before)))
    items = {}
    for reading_id, role, of_round, reused in made_of:
        if (reading_id, role) in stored:
            continue
        reading = readings[reading_id]
        item = reading._asdict()
        del item["id"]
        item["job_id"] = job_id
        item["round"] = of_round
        item["role"] = role
        item |= item_state.IMPORT.values(
            reading_id=reading_id, reused=reused, ended_at_s=reading.created_at_s
        )
        items[reading.subject_id, reading.protocol_id, reading.card_id, role] = item
    if items:
        session.execute(sqlalchemy.insert(tables.Item.__table__), list(items.values()))  # type: ignore[attr-defined]


def known_capture(session: Session, row: Row, farm: str) -> int | None:
    """Return the id of a verdict's capture in this database: preferably that of the verdict's farm,
    then one of this farm. The order of imports has no influence."""
    query = sqlalchemy.select(tables.Capture).where(CAPTURE.variant_id == row["variant_id"])
    same = [
        capture for capture in session.scalars(query) if exported_id(capture) == row["capture_id"]
    ]
    best = min(same, key=lambda capture: (farm_of(capture) != farm, farm_of(capture)), default=None)
    return None if best is None else best.id


def farm_of(capture: tables.Capture) -> str:
    """Return the farm from which a capture was imported; "" for a capture of this farm."""
    verification = capture.verification or {}
    return tables.farm_of_origin(capture.origin) or verification.get(VERIFYING_FARM, "")
