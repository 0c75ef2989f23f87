"""``farm report`` and ``farm history``: the results of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group

from cli import follow, output
from cli.options import AsJson
from cli.output import emit, emit_json, say, show
from cli.tables import sparkline
from farm.errors import UsageError

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.report.layers import Layers
    from farm.report.report import Report


def report(
    jobs: list[str] | None = None,
    by: str | None = None,
    depth: int | None = None,
    why: bool = False,
    readings: bool = False,
    trace: str | None = None,
    png: Path | None = None,
    html: Path | None = None,
    as_csv: bool = False,
    as_json: AsJson = False,
    check: bool = False,
) -> None:
    """Show the results of jobs: cost by operator type, sum against whole, coverage and verdict; or
    cost by layer.
    """
    from farm.extensions import result_pages
    from farm.report import layers

    if (trace is None) is not bool(jobs) or (png and trace is None):
        raise UsageError(
            "Give either the ids of jobs, or --trace READING.", "`farm jobs` lists the jobs."
        )
    if trace is not None:
        return _show_trace(trace, png, as_json=as_json)
    _check_options(by, depth, readings=readings, as_csv=as_csv, as_json=as_json)
    if why:
        _refuse_beside_why(by, readings=readings, as_csv=as_csv, html=html)
        return _show_why(jobs or (), as_json=as_json)
    output.check_page(html)

    grouping: Any = by or ("type" if as_csv else None)
    with output.open_database().read() as session:
        reports = _reports_of(session, jobs or ())
        if html is not None:
            result_pages("--html").write_jobs(session, html, reports)
            say(f"Written to {html}")
        groupings = []
        if grouping:
            outputs = as_csv or as_json or by != "module"  # the table of modules does not show them
            for report_of_job in reports:
                groupings.append(
                    layers.layers(session, report_of_job, grouping, depth, outputs=outputs)
                )

    if as_csv:
        for line in layers.csv_lines(groupings):
            emit(line)
    elif as_json:
        documents = [document.to_json() for document in (groupings or reports)]
        emit_json(documents[0] if len(documents) == 1 else {"reports": documents})
    elif html is None or readings or by:
        _show_tables(reports, groupings, readings=readings)
    if check:
        follow.check_verdicts(reports)


def _reports_of(session: Session, jobs: Sequence[str]) -> list[Report]:
    """Build the report of each job. `jobs`: ids, or their beginnings."""
    from farm.report.report import build
    from farm.store.job_ids import find_job

    ids = dict.fromkeys(find_job(session, job).id for job in jobs)
    return [build(session, job_id) for job_id in ids]


def _show_tables(reports: Sequence[Report], groupings: Sequence[Layers], *, readings: bool) -> None:
    """Show one table a job: its groups if it is grouped, else its readings or its report."""
    from cli import report_tables

    if groupings:
        tables = [report_tables.layer_table(rows) for rows in groupings]
    elif readings:
        tables = [report_tables.readings(report_of_job) for report_of_job in reports]
    else:
        tables = [report_tables.report(report_of_job) for report_of_job in reports]
    for number, table in enumerate(tables):
        show(Group("", table) if number else table)


def _check_options(
    by: str | None, depth: int | None, *, readings: bool, as_csv: bool, as_json: bool
) -> None:
    from farm.report.layers import BY

    if by is not None and by not in BY:
        raise UsageError(f"--by '{by}' is not known.", f"Choose from {', '.join(BY)}.")
    if depth is not None and by != "module":
        raise UsageError(
            "--depth, a number of module levels, needs --by module.",
            "Add `--by module`, or omit --depth.",
        )
    if as_csv and as_json:
        raise UsageError(
            "--csv and --json are two formats of the same output.", "Omit one of them."
        )
    if readings and (by or as_csv):
        raise UsageError(
            "--readings cannot be combined with --by or --csv.",
            "Omit --readings, or omit --by and --csv.",
        )


def _refuse_beside_why(by: str | None, *, readings: bool, as_csv: bool, html: Path | None) -> None:
    if by or readings or as_csv or html:
        raise UsageError(
            "--why is a report of its own.", "Omit --by, --readings, --csv and --html."
        )


def _show_why(jobs: Sequence[str], *, as_json: bool) -> None:
    from cli import report_tables
    from farm.report.why import why
    from farm.store.job_ids import find_job

    with output.open_database().read() as session:
        ids = dict.fromkeys(find_job(session, job).id for job in jobs)
        answers = [why(session, job_id) for job_id in ids]
    if as_json:
        documents = [answer.to_json() for answer in answers]
        emit_json(documents[0] if len(documents) == 1 else {"reports": documents})
        return
    for number, answer in enumerate(answers):
        show(Group("", report_tables.why(answer)) if number else report_tables.why(answer))


def _show_trace(reading: str, png: Path | None, *, as_json: bool) -> None:
    from farm.extensions import result_pages
    from farm.report.lookup import find_traced

    with output.open_database().read() as session:
        traced = find_traced(session, reading)
    sampled = traced.trace
    if png is not None:
        result_pages("--png").draw_trace(sampled, png, traced.title, traced.levels_w)
        say(f"Drawn to {png}")
    begin_s, end_s = sampled.window_s
    if as_json:
        series = {
            name: {"time_s": times, "values": values}
            for name, (times, values) in sampled.series.items()
        }
        emit_json({"reading_id": traced.reading.id, "window_s": [begin_s, end_s], "series": series})
        return
    emit(traced.title)
    emit(f"window from {begin_s:.3f} to {end_s:.3f} s")
    for name, (times, values) in sampled.series.items():
        limits = f"{min(values):.6g} to {max(values):.6g}" if values else "no samples"
        emit(f"{name:>22}  {sparkline(times, values, sampled.window_s)}  {limits}")
    emit(f"{'':>22}  (· marks the time before and after the window)")


def history(
    model: str | None = None,
    html: Path | None = None,
    card: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Show the time and energy of a whole model over git revisions and versions of PyTorch, oldest
    first. With --card, show the checks of a card.
    """
    from cli import lists
    from farm.extensions import card_history, result_pages
    from farm.report.history import history

    if (model is None) == (card is None):
        step = "Give `farm history MODEL`, or `farm history --card ID`."
        raise UsageError("`farm history` needs a model or a card.", step)
    if card is not None:
        card_history()(card, html, as_json)
        return
    assert model is not None
    output.check_page(html)
    rows = output.first_that_knows(lambda session: history(session, model))
    if html is not None:
        result_pages("--html").write_history(html, model, rows)
        say(f"Written to {html}")
    if html is None or as_json:
        output.answer(
            as_json, {"rows": [row.to_json() for row in rows]}, lambda: lists.history(rows)
        )
