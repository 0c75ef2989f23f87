"""The verdict of one round of a job, from its rows: by whoever closes the round, and by whoever reports one that is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, col, select

from farm.store import tables
from farm.store.batches import fetch
from farm.store.tables import Item
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Canary, Part, Whole
from farm.verdict.one_software import of_one_software
from farm.verdict.parts import canaries_of, parts_of, seen_on_card, wholes_of
from farm.verdict.verdict import Verdict
from farm.words.protocol import Protocol
from farm.words.request import named


@dataclass(frozen=True)
class Evidence:
    """What a job has up to one of its rounds: its rows, and what a verdict makes of them.

    `readings` are those of the items, by id; `seen` is what verifying the whole on a card found.
    """

    items: Sequence[Item]
    readings: dict[str, tables.Reading]
    parts: Sequence[Part]
    wholes: Sequence[Whole]
    canaries: Sequence[Canary]
    seen: Mapping[str, Any]


def evidence_of(session: Session, job: tables.Job, number: int) -> Evidence:
    """What there is of a job up to round `number`, that one included."""
    query = select(Item).where(Item.job_id == job.id, col(Item.round) <= number).order_by(col(Item.id))
    items = session.exec(query).all()
    readings = fetch(session, tables.Reading, [item.reading_id for item in items if item.reading_id])
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
