"""The verdict of one round of a job, from its rows: by whoever closes the round, and by whoever reports one that is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.store import tables
from farm.store.batches import fetch_values
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Canary, Part, Whole
from farm.verdict.one_software import of_one_software
from farm.verdict.parts import canaries_of, parts_of, seen_on_card, wholes_of
from farm.verdict.verdict import Verdict
from farm.words.protocol import Protocol
from farm.words.request import named
from farm.words.verification import Verification


@dataclass(frozen=True)
class Evidence:
    """What a job has up to one of its rounds: its rows, and what a verdict makes of them.

    `items` and `readings` (those of the items, by id) have the columns of their tables as attributes; `seen` is what
    verifying the whole on a card found.
    """

    items: Sequence[Any]
    readings: dict[str, Any]
    parts: Sequence[Part]
    wholes: Sequence[Whole]
    canaries: Sequence[Canary]
    seen: Verification


def evidence_of(session: Session, job: tables.Job, number: int) -> Evidence:
    """What there is of a job up to round `number`, that one included."""
    columns = tables.Item.__table__.columns, tables.Reading.__table__.columns  # type: ignore[attr-defined]
    its = columns[0].job_id == job.id, columns[0].round <= number
    items = session.execute(sqlalchemy.select(*columns[0]).where(*its).order_by(columns[0].id)).all()
    readings = fetch_values(session, columns[1], [item.reading_id for item in items if item.reading_id])
    return Evidence(
        items,
        readings,
        parts_of(session, job, number, items, readings),
        wholes_of(session, job, items, readings),
        canaries_of(items, readings),
        seen_on_card(session, job, number),
    )


def compose(session: Session, job: tables.Job, evidence: Evidence) -> Verdict:
    """The verdict on what there is: preliminary as long as items are open."""
    verdict = aggregate(
        evidence.parts,
        evidence.wholes,
        evidence.canaries,
        target=job.request.get("target", 0.95),
        launch=Protocol.from_json(job.request["protocol"]).launch,
        asked=named(job.request.get("operators", ())),
        seen=evidence.seen,
    )
    return of_one_software(session, verdict, evidence.parts, evidence.wholes)
