"""``farm status``: the progress of jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from cli import follow, opening
from cli.options import AsJson
from cli.output import Left, emit_json, say, show

if TYPE_CHECKING:
    from farm.store.database import Database

WATCH_S = 1.0


def status(
    job: list[str] | None = typer.Argument(
        None, metavar="JOB", help="A job's id or its beginning. Default: open jobs, or the newest."
    ),
    watch: bool = typer.Option(False, "--watch", "-w", help="Keep showing until the jobs have ended."),
    as_json: AsJson = False,
) -> None:
    """Show the progress of jobs."""
    database = opening.open_database()
    job_ids = _jobs(database, job or [])
    if not job_ids:
        emit_json({"jobs": []}) if as_json else say("There is no job yet. Start one with `farm run resnet18`.")
        return
    try:
        if watch and not as_json:
            follow.follow(database, job_ids, on_stdout=True)
            ended = [one.job_id for one in follow.progress_of(database, job_ids) if not one.abandoned]
            if shown := [f"`farm report {job_id}`" for job_id in ended]:
                say(f"→ {', '.join(shown)} {'shows the result' if len(shown) == 1 else 'show the results'}.")
        else:
            _show(database, job_ids, watch, as_json)
    except KeyboardInterrupt as interruption:
        if not watch:
            raise
        raise Left from interruption


def _show(database: Database, job_ids: list[str], watch: bool, as_json: bool) -> None:
    while True:
        progresses = follow.progress_of(database, job_ids)
        if as_json:
            emit_json({"jobs": [each.to_json() for each in progresses]})
        else:
            from cli import lists

            show(lists.progress_bars(progresses))
        if not watch or follow.ended(progresses):
            return
        time.sleep(WATCH_S)


def _jobs(database: Database, wanted: list[str]) -> list[str]:
    from sqlmodel import select

    from farm.jobs import jobs
    from farm.store import tables

    with database.read() as session:
        if wanted:
            return [jobs.find(session, name).id for name in wanted]
        newest_first = select(tables.Job.id).order_by(tables.Job.created_at_s.desc())  # type: ignore[attr-defined]
        open_jobs = session.exec(newest_first.where(tables.Job.state == tables.JobState.OPEN).limit(20)).all()
        return list(open_jobs or session.exec(newest_first.limit(1)).all())
