"""``farm jobs``: the jobs of this farm, newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.output import emit_json, say, show


def jobs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many to show at most.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """List jobs, newest first."""
    from sqlmodel import select

    from farm.store import tables

    database = opening.open_database()
    with database.read() as session:
        newest = select(tables.Job).order_by(tables.Job.created_at_s.desc()).limit(limit)  # type: ignore[attr-defined]
        rows = list(session.exec(newest).all())
        verdicts = {
            row.job_id: row
            for row in session.exec(
                select(tables.Verdict)
                .where(tables.Verdict.job_id.in_([job.id for job in rows]))  # type: ignore[attr-defined]
                .order_by(tables.Verdict.round)  # type: ignore[arg-type]
            )
        }
    if as_json:
        emit_json({"jobs": [_as_data(row, verdicts.get(row.id)) for row in rows]})
    elif not rows:
        say("There is no job yet. Start one with `farm run resnet18`.")
    else:
        from cli import render

        show(render.jobs(rows, verdicts))


def _as_data(row, verdict):  # type: ignore[no-untyped-def]
    return {
        "job_id": row.id,
        "kind": row.kind,
        "title": row.title,
        "state": str(row.state),
        "round": row.round,
        "created_at_s": row.created_at_s,
        "ended_at_s": row.ended_at_s,
        "outcome": verdict.outcome if verdict else None,
        "accuracy_time": verdict.accuracy_time if verdict else None,
        "accuracy_energy": verdict.accuracy_energy if verdict else None,
        "coverage": verdict.coverage if verdict else None,
    }
