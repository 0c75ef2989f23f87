"""``farm jobs``, ``status``, ``cancel`` and ``resume``: the jobs of this farm and their
progress.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cli import follow, lists, output
from cli.options import AsJson
from cli.output import Left, answer, emit_json, say
from farm.types.format import plural

if TYPE_CHECKING:
    from farm.store.database import Database

WATCH_S = 1.0


def jobs(
    words: list[str] | None = None,
    state: str = "",
    verdict: str = "",
    imported: bool | None = None,
    limit: int = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first: models, sweeps, and jobs that were imported."""
    from farm.jobs import listing
    from farm.store.database import read_clock_s

    selected = listing.JobFilter(tuple(words or ()), state, verdict, imported)
    with output.open_database().read() as session:
        rows, now_s = listing.jobs(session, limit, selected), read_clock_s(session)
    answer(
        as_json,
        {"jobs": rows},
        lambda: lists.jobs(rows, now_s, filtered=selected != listing.JobFilter()),
    )


def status(job: list[str] | None = None, watch: bool = False, as_json: AsJson = False) -> None:
    """Show the progress of jobs."""
    database = output.open_database()
    job_ids = _jobs(database, job or [])
    if not job_ids:
        emit_json({"jobs": []}) if as_json else say(
            "There is no job yet. Start one with `farm run resnet18`."
        )
        return
    try:
        if watch and not as_json:
            follow.follow(database, job_ids, on_stdout=True)
            _say_reports(database, job_ids)
        else:
            _show(database, job_ids, watch, as_json)
    except KeyboardInterrupt as interruption:
        if not watch:
            raise
        raise Left from interruption


def _say_reports(database: Database, job_ids: list[str]) -> None:
    """Name the commands that show the results of the jobs that have ended."""
    ended = [job for job in follow.progress_of(database, job_ids) if not job.abandoned]
    if ended:
        commands = ", ".join(f"`farm report {job.job_id}`" for job in ended)
        verb = "shows the result" if len(ended) == 1 else "show the results"
        say(f"→ {commands} {verb}.")


def _show(database: Database, job_ids: list[str], watch: bool, as_json: bool) -> None:
    while True:
        progresses = follow.progress_of(database, job_ids)
        shown = {"jobs": [each.to_json() for each in progresses]}
        answer(as_json, shown, lambda: follow.progress_bars(progresses))  # noqa: B023 - called here
        if not watch or all(progress.over for progress in progresses):
            return
        time.sleep(WATCH_S)


def _jobs(database: Database, names: list[str]) -> list[str]:
    """The ids of the named jobs; without names, the ids of the open jobs or of the newest job."""
    from farm.jobs.listing import current_job_ids
    from farm.store.job_ids import find_job

    with database.read() as session:
        if names:
            return [find_job(session, name).id for name in names]
        return current_job_ids(session)


def cancel(job: list[str]) -> None:
    """End jobs early: running measurements are finished and kept, the other items are not begun."""
    from farm.jobs import jobs as rows_of
    from farm.store.job_ids import find_job

    database = output.open_database()
    with database.read() as session:
        rows = [find_job(session, name) for name in job]
    for row in rows:
        if row.state != "open":
            say(f"Job {row.id} has ended already ({row.state}).")
            continue
        rows_of.cancel(database, row.id)
        say(f"Job {row.id} is cancelled.")


def resume(job: str, failed: bool = False, wait: bool = False) -> None:
    """Continue a job that waits for nothing: send its open items to the workers again. Nothing is
    measured twice.
    """
    from farm.jobs import jobs as rows_of
    from farm.settings import settings
    from farm.store.job_ids import find_job
    from tasks.app import check_broker
    from tasks.submissions import resume as resume_job

    database = output.open_database()
    with database.read() as session:
        row = find_job(session, job)
    if failed:
        check_broker(settings())  # before any item is set waiting that could not be published
        again = rows_of.retry_failed(database, row.id)
        say(f"Job {row.id} repeats {again} failed or cancelled {plural('item', again)}.")
        with database.read() as session:
            row = find_job(session, row.id)
    if row.state != "open":
        step = f"`farm report {row.id}` shows its result."
        if row.state == "cancelled":
            step = f"`farm resume --failed {row.id}` measures its cancelled items."
        say(f"Job {row.id} has ended ({row.state}). {step}")
        return
    check_broker(settings())
    with follow.working() as told:
        resume_job(database, row.id, progress=told)
    say(f"Job {row.id} continues.")
    if wait:
        follow.follow(database, [row.id])
