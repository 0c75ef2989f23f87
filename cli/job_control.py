"""``farm cancel``, ``farm resume`` and ``farm retry``: end a job, publish it again, measure again what failed."""

from __future__ import annotations

import typer

from cli import follow, opening
from cli.options import Follow, Job
from cli.output import say
from farm.types.format import plural


def cancel(
    job: list[str] = typer.Argument(..., metavar="JOB", help="The job's id, or its beginning."),
) -> None:
    """End jobs early: running measurements are finished and kept, the other items are not begun."""
    from farm.jobs import jobs

    database = opening.open_database()
    with database.read() as session:
        rows = [jobs.find(session, name) for name in job]
    for row in rows:
        if row.state != "open":
            say(f"Job {row.id} has ended already ({row.state}).")
            continue
        jobs.cancel(database, row.id)
        say(f"Job {row.id} is cancelled.")


def resume(
    job: Job,
    failed: bool = typer.Option(
        False, "--failed", help="Also measure again what failed or was cancelled, with all its attempts."
    ),
    wait: Follow = False,
) -> None:
    """Continue a job whose messages were lost, for instance with the broker's memory. Nothing is measured twice."""
    from farm.jobs import jobs
    from farm.settings import settings
    from tasks.app import check_broker
    from tasks.submit import resume as resume_job

    database = opening.open_database()
    with database.read() as session:
        row = jobs.find(session, job)
    if failed:
        check_broker(settings())  # before any item is set waiting that could not be published
        again = jobs.retry_failed(database, row.id)
        say(f"Tried again: {again} failed or cancelled {plural('item', again)} of job {row.id}.")
        with database.read() as session:
            row = jobs.find(session, row.id)
    if row.state != "open":
        say(f"Job {row.id} has ended ({row.state}). `farm report {row.id}` shows its result.")
        return
    check_broker(settings())
    with follow.working() as told:
        resume_job(database, row.id, progress=told)
    say(f"Job {row.id} goes on.")
    if wait:
        follow.follow(database, [row.id])


def retry(job: Job, wait: Follow = False) -> None:
    """Measure again what failed in a job or was cancelled with it, with all attempts, and make its verdict again."""
    resume(job, failed=True, wait=wait)
