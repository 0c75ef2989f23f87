"""Show jobs while they run, and their reports when they have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group

from cli import lists
from cli.output import answer, console, emit, emit_json, say
from farm.types.format import plural, span

if TYPE_CHECKING:
    from farm.jobs.create import JobPreview
    from farm.jobs.jobs import Progress
    from farm.report.report import Report
    from farm.store.database import Database
    from tasks.submissions import PlannedJob, Submissions

POLL_S = 0.5
DATABASE_PATIENCE_S = 120.0
PLAIN_LINE_S = 5.0  # least time between two lines of progress, without a terminal


@contextlib.contextmanager
def working() -> Iterator[Callable[[str, int, int], None]]:
    """Show work on stderr, as a bar or as lines: yields a function of (what, done, of how many; 0 if unknown)."""
    out = console(stderr=True)
    if not out.file.isatty():
        said_at_s = time.monotonic()

        def line(what: str, done: int, of: int) -> None:
            nonlocal said_at_s
            if time.monotonic() - said_at_s >= PLAIN_LINE_S:
                said_at_s = time.monotonic()
                say(f"{what}: {done} of {of}" if of else what)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=out, transient=True) as bars:
        bar = bars.add_task("", total=None)
        yield lambda what, done, of: bars.update(bar, description=what, completed=done, total=of or None)


def follow(
    database: Database, job_ids: Sequence[str], *, tend: Callable[[], None] = lambda: None, on_stdout: bool = False
) -> None:
    """Show the progress of jobs on stderr until all have ended: live in a terminal, otherwise as lines.

    Args:
        tend: called regularly; an embedded farm looks after its workers in it.
        on_stdout: in a terminal, show it on stdout and keep the last state on the screen.
    """
    if not job_ids:
        return
    out = console(stderr=not on_stdout)
    with contextlib.ExitStack() as stack:
        show_progress = _plain_lines()
        if out.file.isatty():
            from rich.live import Live

            live = stack.enter_context(Live(console=out, refresh_per_second=4, transient=not on_stdout))

            def show_progress(progresses: list[Progress]) -> None:
                live.update(lists.progress_bars(progresses))

        while True:
            progresses = next_progress(database, job_ids)
            show_progress(progresses)
            if ended(progresses):
                return
            time.sleep(POLL_S)
            tend()


def _plain_lines() -> Callable[[list[Progress]], None]:
    """A function that prints a line for each job that has changed, every few seconds and at the end."""
    last: dict[str, str] = {}
    said_at_s = 0.0

    def lines(progresses: list[Progress]) -> None:
        nonlocal said_at_s
        if ended(progresses) or time.monotonic() - said_at_s >= PLAIN_LINE_S:
            for job in progresses:
                if (text := lists.progress_line(job)) != last.get(job.job_id):
                    say(text)
                    last[job.job_id] = text
            said_at_s = time.monotonic()

    return lines


def progress_of(database: Database, job_ids: Sequence[str]) -> list[Progress]:
    """Return the progress of jobs."""
    from farm.jobs import jobs

    with database.read() as session:
        return [jobs.progress(session, job_id) for job_id in job_ids]


def ended(progresses: Iterable[Progress]) -> bool:
    """True if no job is running any more."""
    return all(progress.over for progress in progresses)


def next_progress(database: Database, job_ids: Sequence[str]) -> list[Progress]:
    """Return the progress of jobs. Retry for a while if the database is unreachable: the jobs go on meanwhile."""
    from farm.errors import DatabaseUnreachable

    deadline_s = time.monotonic() + DATABASE_PATIENCE_S
    while True:
        try:
            return progress_of(database, job_ids)
        except DatabaseUnreachable as error:
            if time.monotonic() > deadline_s:
                raise
            say(f"{error.message} Trying again.")
            time.sleep(5.0)


def preview(found: Sequence[tuple[PlannedJob, JobPreview]], submissions: Submissions, *, as_json: bool) -> None:
    """Print what jobs would measure. Raises `Refused` if something cannot be measured."""
    expected_s = sum(one.expected_s for _, one in found)
    new = sum(one.new for _, one in found)
    if as_json:
        jobs = [one.to_json() for _, one in found]
        emit_json({"jobs": jobs, **left_out(submissions), "expected_s": expected_s})
    else:
        for job, one in found:
            cards = f"{len(job.cards)} {plural('card', len(job.cards))} ({job.cards[0].model})"
            emit(
                f"{one.title} on {cards}: {one.calls} calls of {one.tuples} operator {plural('tuple', one.tuples)}; "
                f"{one.new} to measure, {one.reused} known already"
                + (f"; {span(one.expected_s)} or more" if one.new else "")
            )
        time_left = f", {span(expected_s)} or more" if new else ""
        emit(f"In all {new} to measure{time_left}. Nothing was started (--dry-run).")
    submissions.check_refused(len(found) + len(submissions.skipped))


def left_out(submissions: Submissions) -> dict[str, Any]:
    """The JSON of what has no job."""
    return {"skipped": submissions.skipped, "refused": submissions.refused}


def conclude(database: Database, submissions: Submissions, *, as_json: bool, check: bool) -> None:
    """Print the reports of ended jobs, and of the jobs that did an entry of a file before.

    Raises:
        BelowTarget: `check` is set, and a verdict did not pass or something was left out.
        Refused: something was left out.
    """
    from farm.report import report as reports

    with database.read() as session:
        built = [reports.build(session, job_id) for job_id in submissions.shown_ids]
    from cli import report_tables

    shown = {"reports": [one.to_json() for one in built], **left_out(submissions)}
    answer(as_json, shown, lambda: Group(*map(report_tables.report, built)))
    if check:
        check_verdicts(built, submissions.refusals(len(built)))
    submissions.check_refused(len(built))


def check_verdicts(reports: Sequence[Report], refused: str = "") -> None:
    """Raise `BelowTarget` if a verdict did not pass, or if something was refused and has none."""
    from farm.errors import BelowTarget

    # Neither a sweep nor a few operators of a model can be compared with a whole model, so neither can fail.
    failing = [one for one in reports if one.kind == "model" and one.verdict.missed]
    if failing:
        titles = ", ".join(one.title for one in failing)
        failed = f"{len(failing)} of {len(reports)} verdicts did not pass: {titles}."
        raise BelowTarget(
            "\n".join(filter(None, [failed, refused])),
            f"`farm report {failing[0].job_id}` shows the gap and what is not measured.",
        )
    if refused:
        raise BelowTarget(refused, "The verdicts of the others pass.")
