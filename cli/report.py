"""``farm report``: what jobs found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import opening, submit_and_watch
from cli.options import AsJson
from cli.output import emit, emit_json, say, show
from farm.errors import UsageError

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.report.layers import By, Layers
    from farm.report.report import Report


def report(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs, or their beginnings.")],
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="NAME", help="Show the cost by type, tuple, call or module, with sizes and parameters."
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", min=0, max=100, metavar="N", help="With --by module: levels to show.")
    ] = None,
    readings: Annotated[
        bool, typer.Option("--readings", help="List the readings with their ids, for `farm trace`.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one page with figures, which needs no network."),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print only CSV on stdout: the rows of --by, else by type.")
    ] = False,
    as_json: AsJson = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 5 unless the verdicts pass.")] = False,
) -> None:
    """Show jobs' figures: per operator type, sum against whole, coverage and verdict; or layer by layer."""
    from farm.jobs import jobs as rows_of
    from farm.pages import page
    from farm.report import report as reports

    _check_together(by, depth, readings=readings, as_csv=as_csv, as_json=as_json)
    if html is not None:
        page.check_page(html)
    with opening.open_database().read() as session:
        ids = list(dict.fromkeys(rows_of.find(session, job).id for job in jobs))
        built = [reports.build(session, job_id) for job_id in ids]
        if html is not None:
            page.write_page(html, [page.job_page(session, job_id) for job_id in ids])
            say(f"Written to {html}")
        outputs = as_csv or as_json or by != "module"  # that table does not show them
        grouped = _layers(session, built, by or "type", depth, outputs) if by or as_csv else []
    if as_csv:
        from farm.report.layers import csv_lines

        for line in csv_lines(grouped):
            emit(line)
    elif as_json:
        documents = [one.to_json() for one in (grouped or built)]
        emit_json(documents[0] if len(documents) == 1 else {"reports": documents})
    elif html is None or readings or by:
        _show(built, grouped, readings)
    if check:
        submit_and_watch.check(built)


def _check_together(by: str | None, depth: int | None, *, readings: bool, as_csv: bool, as_json: bool) -> None:
    from farm.report.layers import BY

    if by is not None and by not in BY:
        raise UsageError(f"--by '{by}' is not known.", f"Choose from {', '.join(BY)}.")
    if depth is not None and by != "module":
        raise UsageError("--depth counts levels of modules.", "Add `--by module`, or leave --depth out.")
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of one output.", "Leave one of them out.")
    if readings and (by or as_csv):
        raise UsageError("--readings is a list of its own.", "Leave it out, or --by and --csv.")


def _layers(session: Session, built: list[Report], by: str, depth: int | None, outputs: bool) -> list[Layers]:
    from farm.report.layers import layers

    kind: By = by  # type: ignore[assignment]
    return [layers(session, one, kind, depth, outputs=outputs) for one in built]


def _show(built: list[Report], grouped: list[Layers], readings: bool) -> None:
    from rich.console import Group

    if grouped:
        from cli.layer_table import layer_table

        told = [layer_table(one) for one in grouped]
    else:
        from cli import report_tables

        told = [report_tables.readings(one) if readings else report_tables.report(one) for one in built]
    for number, one in enumerate(told):
        show(Group("", one) if number else one)
