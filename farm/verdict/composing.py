"""The verdict of one round of a job, from its rows: by whoever closes the round, and by whoever reports one that is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.store import tables
from farm.store.rows import values
from farm.types.protocol import Protocol
from farm.types.reading import Verification
from farm.types.request import named
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Part, Whole
from farm.verdict.one_software import of_one_software
from farm.verdict.parts import canaries_of, parts_of, seen_on_card, wholes_of
from farm.verdict.verdict import Verdict

#: The columns that verdicts and reports go by: the others of tens of thousands of rows take as long as these.
ITEM = "id role round subject_id protocol_id card_id state reading_id reused repeated reason message"
READING = """
id subject_id card_id software_id time_us time_half_width_us energy_mj energy_half_width_mj idle_power_w base_power_w
sm_clock_mhz throttle_reasons flags details cost_s
"""


@dataclass(frozen=True)
class Evidence:
    """What a job has up to one of its rounds: its rows, and what a verdict makes of them.

    `items` and `readings` (those of the items, by id) have the columns `ITEM` and `READING` of their tables as attributes;
    `seen` is what verifying the whole on a card found.
    """

    items: Sequence[Any]
    readings: dict[str, Any]
    parts: Sequence[Part]
    wholes: Sequence[Whole]
    seen: Verification


def evidence_of(session: Session, job: tables.Job, number: int) -> Evidence:
    """What there is of a job up to round `number`, that one included."""
    item, reading = tables.Item.__table__.columns, tables.Reading.__table__.columns  # type: ignore[attr-defined]
    its = item.job_id == job.id, item.round <= number
    items = values(session, [item[name] for name in ITEM.split()], *its, in_order_of=item.id)
    of_items = reading.id.in_(sqlalchemy.select(item.reading_id).where(*its))
    readings = {row.id: row for row in values(session, [reading[name] for name in READING.split()], of_items)}
    return Evidence(
        items,
        readings,
        parts_of(session, job, number, items, readings),
        wholes_of(session, job, items, readings),
        seen_on_card(session, job, number),
    )


def compose(session: Session, job: tables.Job, evidence: Evidence) -> Verdict:
    """The verdict on what there is: preliminary as long as items are open."""
    verdict = aggregate(
        evidence.parts,
        evidence.wholes,
        canaries_of(evidence.items, evidence.readings),
        target=job.request.get("target", 0.95),
        launch=Protocol.from_json(job.request["protocol"]).launch,
        asked=named(job.request.get("operators", ())),
        seen=evidence.seen,
    )
    return of_one_software(session, verdict, evidence.parts, evidence.wholes)
