"""Lists for people and programs: the jobs, the cards.

Each list is made of plain rows whose names carry their unit, ready for JSON and for a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.devices.device import Card
    from farm.store.tables import Verdict


def jobs(session: Session, limit: int) -> list[dict[str, Any]]:
    """The newest jobs, each with its newest verdict. Accuracies and coverage are fractions, None where there is none."""
    from sqlalchemy.orm import defer
    from sqlmodel import col, func, select

    from farm.store import tables

    newest = session.exec(select(tables.Job).order_by(col(tables.Job.created_at_s).desc()).limit(limit)).all()
    ids = [job.id for job in newest]
    items: dict[str, int] = defaultdict(int)
    closed: dict[str, int] = defaultdict(int)
    counted = (
        select(tables.Item.job_id, tables.Item.state, func.count())
        .where(col(tables.Item.job_id).in_(ids))
        .group_by(col(tables.Item.job_id), col(tables.Item.state))
    )
    for job_id, state, number in session.execute(counted):
        items[job_id] += number
        closed[job_id] += number if state in tables.CLOSED else 0
    by_round = select(tables.Verdict).where(col(tables.Verdict.job_id).in_(ids)).order_by(col(tables.Verdict.round))
    # The details hold every tuple of the job.
    without_details = by_round.options(defer(tables.Verdict.details))  # type: ignore[arg-type]
    verdicts = {verdict.job_id: verdict for verdict in session.exec(without_details)}
    theirs = select(tables.ImportedVerdict.job_id, tables.ImportedVerdict.origin)
    origins = dict(session.exec(theirs.where(col(tables.ImportedVerdict.job_id).in_(ids))).all())
    return [
        {
            "id": job.id,
            "kind": job.kind,
            "title": job.title,
            "state": str(job.state),
            "round": job.round,
            "items": items[job.id],
            "closed": closed[job.id],
            "created_at_s": job.created_at_s,
            "ended_at_s": job.ended_at_s,
            "origin": origins.get(job.id, ""),
            # As its report says it: what was read before its end is no basis for a verdict.
            **(_judged(verdicts.get(job.id)) if job.state != tables.JobState.CANCELLED else _judged(None, "none")),
        }
        for job in newest
    ]


def _judged(verdict: Verdict | None, outcome: str | None = None) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome if verdict else outcome,
        "accuracy_time": verdict.accuracy_time if verdict else None,
        "accuracy_energy": verdict.accuracy_energy if verdict else None,
        "coverage": verdict.coverage if verdict else None,
    }


def registered_cards(session: Session, heartbeat_s: float) -> list[dict[str, Any]]:
    """Every card that ever joined the farm, with what it does now."""
    from sqlmodel import select

    from farm.jobs import cards
    from farm.store import tables

    software = {row.id: row.model_dump() for row in session.exec(select(tables.Software))}
    return [
        {
            "id": view.card.id,
            "kind": view.card.kind,
            "model": view.card.model,
            "host": view.card.host,
            "index": view.card.index,
            "memory_bytes": view.card.memory_bytes,
            "driver": view.card.driver,
            "state": str(view.state),
            "state_reason": view.card.state_reason or _silence(view.silent_s),
            "measuring": view.measuring,
            "waiting": view.waiting,
            "deferred": view.deferred,
            "done_last_hour": view.done_last_hour,
            "last_seen_ago_s": view.seen_ago_s,
            "software": software.get(view.card.software_id or ""),
            "queue": view.card.queue,
            "worker": view.card.worker,
            "capabilities": list(view.card.capabilities),
            "fingerprint": dict(view.card.fingerprint),
        }
        for view in cards.views(session, heartbeat_s)
    ]


def _silence(silent_s: float) -> str:
    return f"has taken nothing for {silent_s:.0f} s, though items wait" if silent_s else ""


def local_cards(found: Sequence[Card]) -> list[dict[str, Any]]:
    """Cards of this host as rows; a card that cannot be measured on says why."""
    rows = []
    for card in found:
        row = card.to_json()
        refusal = row.pop("refusal")
        rows.append({**row, "state": "refused" if refusal else "here", "state_reason": refusal})
    return rows
