"""``farm report``: what a job found."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import following, opening
from cli.options import AsJson, Job
from cli.output import emit_json, show


def report(
    job: Job,
    readings: Annotated[
        bool, typer.Option("--readings", help="List the readings with their ids, for `farm trace`.")
    ] = False,
    as_json: AsJson = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 5 unless the verdict passes.")] = False,
) -> None:
    """Show a job's figures: per operator type, sum against whole, coverage and verdict."""
    from farm.jobs import jobs
    from farm.report import report as reports

    database = opening.open_database()
    with database.read() as session:
        built = reports.build(session, jobs.find(session, job).id)
    if as_json:
        emit_json(built.to_json())
    else:
        from cli import report_tables

        show(report_tables.readings(built) if readings else report_tables.report(built))
    if check:
        following.check([built])
