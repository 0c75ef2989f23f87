"""``farm cancel``: end a job early."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.output import say


def cancel(
    job: Annotated[list[str], typer.Argument(metavar="JOB", help="The job's id, or its beginning.")],
) -> None:
    """End jobs early: what is being measured is finished and kept, the rest is not begun."""
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
