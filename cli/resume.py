"""``farm resume``: publish again what a job still lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening, submit_and_watch
from cli.options import Follow, Job
from cli.output import say
from farm.types.format import plural


def resume(
    job: Job,
    failed: Annotated[
        bool, typer.Option("--failed", help="Measure again also what failed or was cancelled, with all its attempts.")
    ] = False,
    wait: Follow = False,
) -> None:
    """Go on with a job whose messages were lost, for instance with the broker's memory. Nothing is measured twice."""
    from farm.jobs import jobs
    from farm.settings import settings
    from tasks.app import check_broker
    from tasks.submit import resume as resume_job

    database = opening.open_database()
    with database.read() as session:
        row = jobs.find(session, job)
    if failed:
        check_broker(settings())  # before anything is set waiting that nobody could be told of
        again = jobs.retry_failed(database, row.id)
        say(f"Tried again: {again} failed or cancelled {plural('item', again)} of job {row.id}.")
        with database.read() as session:
            row = jobs.find(session, row.id)
    if row.state != "open":
        say(f"Job {row.id} has ended ({row.state}). `farm report {row.id}` shows its result.")
        return
    check_broker(settings())
    with submit_and_watch.doing() as told:
        resume_job(database, row.id, told=told)
    say(f"Job {row.id} goes on.")
    if wait:
        submit_and_watch.follow(database, [row.id])
