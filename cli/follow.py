"""Show jobs while they run, and their reports when they have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar

from cli import tables
from cli.output import REPEATED_S, answer, console, doing, emit, emit_json, end_note, noted, say
from cli.tables import Text
from farm.errors import BelowTarget, DatabaseUnreachable
from farm.types.format import plural, span

if TYPE_CHECKING:
    from farm.jobs.jobs import Progress
    from farm.jobs.plan import JobPlan
    from farm.report.report import Report
    from farm.store.database import Database
    from tasks.submissions import Submissions

POLL_S = 0.5
DATABASE_PATIENCE_S = 120.0
# `REPEATED_S` for several jobs, which also have one line each at their end
PLAIN_LINE_OF_SEVERAL_S = 60.0


@contextlib.contextmanager
def working() -> Iterator[Callable[[str, int, int], None]]:
    """Show work in the note of the command: yields a function of (what, done, of how many; 0 if
    unknown).
    """
    with noted("working"):
        yield lambda what, done, of: doing(f"{what}: {done} of {of}" if of else what)


def follow(
    database: Database,
    job_ids: Sequence[str],
    *,
    tend: Callable[[], None] = lambda: None,
    on_stdout: bool = False,
) -> None:
    """Show the progress of jobs on stderr until all have ended: live in a terminal, otherwise as
    lines. With `on_stdout`, show it on stdout in a terminal, and keep the last state. `tend` is
    called regularly: an embedded farm looks after its workers in it."""
    if not job_ids:
        return
    end_note()
    out = console(stderr=not on_stdout)
    with contextlib.ExitStack() as stack:
        if out.file.isatty():
            show_progress = stack.enter_context(_live_bars(out, transient=not on_stdout))
        else:
            show_progress = _PlainLines().show

        while True:
            progresses = progress_despite_outage(database, job_ids)
            show_progress(progresses)
            if all(progress.over for progress in progresses):
                return
            time.sleep(POLL_S)
            tend()


@contextlib.contextmanager
def _live_bars(out: Console, *, transient: bool) -> Iterator[Callable[[list[Progress]], None]]:
    """Yield a function that updates the bars of the jobs in a terminal. If `transient`, the bars
    are removed at the end.
    """
    from rich.live import Live

    with Live(console=out, refresh_per_second=4, transient=transient) as live:
        yield lambda progresses: live.update(progress_bars(progresses))


class _PlainLines:
    """Prints a line for each job that has ended and, from time to time, one for the jobs that
    run.
    """

    def __init__(self) -> None:
        self._ended: set[str] = set()  # the jobs whose end was printed
        self._printed_at_s, self._last_line = 0.0, ""

    def show(self, progresses: list[Progress]) -> None:
        for job in progresses:
            if job.over and job.job_id not in self._ended:
                self._ended.add(job.job_id)
                say(progress_line(job))

        running = [job for job in progresses if not job.over]
        pause_s = PLAIN_LINE_OF_SEVERAL_S if len(progresses) > 1 else REPEATED_S
        if not running or time.monotonic() - self._printed_at_s < pause_s:
            return
        line = progress_line(max(running, key=lambda job: job.closed / max(1, job.total)))
        if len(progresses) > 1:
            line = f"{len(self._ended)} of {len(progresses)} jobs ended; {line}"
        if line != self._last_line:
            say(line)
        self._printed_at_s, self._last_line = time.monotonic(), line


def progress_of(database: Database, job_ids: Sequence[str]) -> list[Progress]:
    """Return the progress of jobs."""
    from farm.jobs import jobs

    with database.read() as session:
        return [jobs.progress(session, job_id) for job_id in job_ids]


def progress_despite_outage(database: Database, job_ids: Sequence[str]) -> list[Progress]:
    """Return the progress of jobs. Retry for `DATABASE_PATIENCE_S` if the database is unreachable:
    the jobs go on meanwhile.
    """
    deadline_s = time.monotonic() + DATABASE_PATIENCE_S
    while True:
        try:
            return progress_of(database, job_ids)
        except DatabaseUnreachable as error:
            if time.monotonic() > deadline_s:
                raise
            say(f"{error.message} Trying again.")
            time.sleep(5.0)


def preview(plans: Sequence[JobPlan], submissions: Submissions, *, as_json: bool) -> None:
    """Print what jobs would measure. Raises `Refused` if something cannot be measured."""
    expected_s = sum(plan.expected_s for plan in plans)
    if as_json:
        jobs = [plan.to_json() for plan in plans]
        emit_json({"jobs": jobs, **without_job(submissions), "expected_s": expected_s})
    else:
        for plan in plans:
            emit(_preview_line(plan))
        new = sum(plan.new for plan in plans)
        time_left = f", at least {span(expected_s)}" if new else ""
        emit(f"Total: {new} to measure{time_left}. Nothing was started (--dry-run).")
    submissions.check_refused(len(plans) + len(submissions.skipped))


def _preview_line(plan: JobPlan) -> str:
    cards = f"{len(plan.card_ids)} {plural('card', len(plan.card_ids))} ({plan.card_model})"
    time_left = f"; at least {span(plan.expected_s)}" if plan.new else ""
    return (
        f"{plan.title} on {cards}: {plan.calls} calls of {plan.tuples} operator "
        f"{plural('tuple', plan.tuples)}; "
        f"{plan.new} to measure, {plan.reused} measured already{time_left}"
    )


def without_job(submissions: Submissions) -> dict[str, Any]:
    """The JSON of the requests without a new job: skipped because they are done, or refused."""
    return {"skipped": submissions.skipped, "refused": submissions.refused}


def conclude(database: Database, submissions: Submissions, *, as_json: bool, check: bool) -> None:
    """Print the reports of ended jobs, and of the jobs that did an entry of a file before. Raises
    `BelowTarget` with `check` if a verdict did not pass or something was left out, and `Refused` if
    something was left out."""
    from farm.report import report as reports

    with database.read() as session:
        built = [reports.build(session, job_id) for job_id in submissions.shown_ids]
    from cli import report_tables

    shown = {"reports": [report.to_json() for report in built], **without_job(submissions)}
    answer(as_json, shown, lambda: Group(*map(report_tables.report, built)))
    if check:
        check_verdicts(built, submissions.refusals(len(built)))
    submissions.check_refused(len(built))


def check_verdicts(reports: Sequence[Report], refused: str = "") -> None:
    """Raise `BelowTarget` if a verdict did not pass, or if something was refused and has none."""
    # Neither a sweep nor a few operators of a model can be compared with a whole model, so neither
    # can fail.
    failing = [report for report in reports if not report.is_sweep and report.verdict.missed]
    if failing:
        titles = ", ".join(report.title for report in failing)
        failed = f"{len(failing)} of {len(reports)} verdicts did not pass: {titles}."
        raise BelowTarget(
            "\n".join(filter(None, [failed, refused])),
            f"`farm report {failing[0].job_id}` shows the gap and the parts without a reading.",
        )
    if refused:
        raise BelowTarget(refused, "The verdicts of the others pass.")


def progress_bars(jobs: Sequence[Progress]) -> RenderableType:
    """The progress of jobs for a terminal: a bar of each job's items, and what each card measures
    now.
    """
    blocks: list[RenderableType] = []
    for job in jobs:
        line = tables.grid(4)
        line.columns[0].min_width = min(40, max(len(each.title) for each in jobs))
        bar = ProgressBar(
            total=max(1, job.total), completed=job.closed, width=16, finished_style="green"
        )
        title = Text(job.title, style="bold")
        tables.row(
            line, title, bar, f"{job.closed}/{job.total}", Text(_job_details(job), style="dim")
        )
        blocks.append(line)
        measuring = tables.grid(3)
        for card_id, label in job.current if job.state == "open" else ():
            card = Text(tables.short_id(card_id), style="cyan")
            tables.row(measuring, " ", card, Text(label, no_wrap=True, overflow="ellipsis"))
        if job.message and job.state == "open":
            tables.row(measuring, " ", "", Text(job.message, style="yellow"))
        blocks += [measuring] if measuring.row_count else []
    return Group(*blocks)


def progress_line(job: Progress) -> str:
    """The progress of a job for a log: one line per change, without bars or colours."""
    line = f"{job.title} [{job.job_id}] {job.closed}/{job.total} {_job_details(job)}".rstrip()
    return f"{line}: {job.message}" if job.message else line


def _job_details(job: Progress) -> str:
    failed, cancelled = job.counts.get("failed", 0), job.counts.get("cancelled", 0)
    ended = f"{job.state} in {span(job.elapsed_s)}"
    if cancelled and job.state == "cancelled":
        ended = f"{cancelled} cancelled after {span(job.elapsed_s)}"
    left = f"{span(job.expected_left_s)} left" if job.expected_left_s >= 1 else ""
    words = (
        f"{job.reused} reused" if job.reused else "",
        f"{failed} failed" if failed else "",
        f"round {job.round}" if job.round > 1 else "",
        left if job.state == "open" else ended,
    )
    return ", ".join(filter(None, words))
