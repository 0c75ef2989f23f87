"""The one code path of `run` and `submit`: wishes become jobs, jobs are followed, reports are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cli.output import console, emit, emit_json, say, show

if TYPE_CHECKING:
    from rich.console import Console

    from cli.options import CliOptions
    from farm.devices.device import Card
    from farm.jobs.create import OpenedJob
    from farm.jobs.jobs import Progress
    from farm.report.report import Report
    from farm.requests.partial_request import PartialRequest
    from farm.store.database import Database
    from farm.types.request import Request
    from tasks.embedded import EmbeddedFarm

POLL_S = 0.5
DATABASE_PATIENCE_S = 120.0
PLAIN_LINE_S = 5.0  # without a terminal, a line at most this often


@dataclass(frozen=True)
class Planned:
    """One job to make. `done_by` is a finished job that asked the same, unless all is to be read afresh; `alone` says that
    nothing else was asked for: what stands in its way is an error then, and else leaves it out."""

    wish: PartialRequest
    request: Request
    cards: Sequence[Card]
    done_by: str = ""
    alone: bool = True

    @property
    def card_ids(self) -> list[str]:
        return [card.id for card in self.cards]


@dataclass
class Outcome:
    """What came of the wishes of one command."""

    submitted: list[OpenedJob] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # entries of files, with the jobs that have done them
    refused: list[dict[str, str]] = field(default_factory=list)  # what cannot be measured, with the reason

    @property
    def job_ids(self) -> list[str]:
        return [one.job_id for one in self.submitted]

    @property
    def shown_ids(self) -> list[str]:
        """The jobs to report: what was known first."""
        return list(dict.fromkeys([*(one["job"] for one in self.skipped), *self.job_ids]))

    def told_refused(self, done: int) -> str:
        """What was left out, a line each; "" where nothing was.

        Args:
            done: how many were not.
        """
        if not self.refused:
            return ""
        lines = [f"{one['title']}: {one['reason']}" for one in self.refused]
        return "\n".join([f"{len(lines)} of {done + len(lines)} cannot be measured:", *lines])

    def check_refused(self, done: int) -> None:
        """Raises:
        Refused: something was left out.
        """
        from farm.errors import Refused

        if told := self.told_refused(done):
            raise Refused(told, "`farm operators MODEL` shows which parts of a model cannot be extracted.")


def plan(wishes: Iterable[PartialRequest], cards: Sequence[Card], *, target: float) -> list[Planned]:
    """One job per wish and model of card.

    Raises:
        UsageError: a value is wrong; the message begins with the file and line of a wish from a file.
        UnknownOperator: a name in ``--operators`` is of no operator that PyTorch has.
    """
    from farm.requests.card_selection import by_model
    from farm.requests.partial_request import check_requested_operators, complete

    wishes, planned = list(wishes), []
    alone = len({number if wish.where else wish.title for number, wish in enumerate(wishes)}) == 1
    for wish in wishes:
        for group in by_model(cards).values():
            with _placed(wish):
                request = complete(wish, group[0].kind, target=target)
            planned.append(Planned(wish, request, group, alone=alone))
    check_requested_operators([job.request for job in planned])
    return planned


@contextlib.contextmanager
def _placed(wish: PartialRequest) -> Iterator[None]:
    """What is wrong with a wish from a file names its file and line."""
    from farm.errors import MeasurementFileError, UsageError

    try:
        yield
    except UsageError as error:
        if not wish.where:
            raise
        raise MeasurementFileError(f"{wish.where}: {error.message}", error.next_step) from error


@contextlib.contextmanager
def _or_refused(job: Planned, outcome: Outcome) -> Iterator[None]:
    """One model of several that cannot be made, extracted or held by a card is left out and said; alone it is an error."""
    from farm.errors import CaptureError, FarmError, NoSuchCard, UnknownOperator, UsageError
    from farm.models.catalog import title_of

    try:
        yield
    except (CaptureError, UsageError) as error:
        if job.alone or isinstance(error, NoSuchCard | UnknownOperator):  # these are wrong of all of them
            raise
        where, title = f"{job.wish.where}: " if job.wish.where else "", job.request.title
        if job.request.variant is not None:
            with contextlib.suppress(FarmError):  # a person's own model is asked for the sizes of its inputs
                title = title_of(job.request.variant)
        reason = error.message.removeprefix(where)
        outcome.refused.append({"title": title, "reason": reason})
        say(f"{where}{title} is left out: {reason}")


def still_to_do(database: Database, planned: Sequence[Planned], outcome: Outcome) -> list[Planned]:
    """The plans with the jobs that have done the same, without the entries of files among these; says which those are."""
    from farm.jobs import jobs

    with database.read() as session:
        done = jobs.done_entries(session, [job.request for job in planned])
    left = []
    for job in planned:
        title, done_by = job.request.title, done.get(job.request.id, "") if job.request.reuse != "none" else ""
        if job.wish.where and done_by:
            outcome.skipped.append({"title": title, "job": done_by})
            say(f"{job.wish.where}: {title} is done already, as job {done_by}; --reuse none measures it again.")
        else:
            left.append(dataclasses.replace(job, done_by=done_by))
    return left


def rehearse(
    database: Database | None, planned: Sequence[Planned], options: CliOptions, *, own: Sequence[Card] = ()
) -> None:
    """Say on stdout what the jobs would come to; writes and starts nothing.

    Args:
        database: None where there is none yet.
        own: see `farm.jobs.dry_run.dry_running`.

    Raises:
        Refused: one of several cannot be measured; what the others come to has been said.
    """
    from farm.jobs.dry_run import dry_running
    from farm.types.format import plural, span

    outcome = Outcome()
    left = list(planned) if database is None else still_to_do(database, planned, outcome)
    foreseen = []
    with dry_running(database, own) as rehearsal:
        for job in fitting(left, outcome):
            with _or_refused(job, outcome):
                foreseen.append((job, rehearsal.preview(job.request, job.card_ids)))
    expected_s = sum(one.expected_s for _, one in foreseen)
    done = len(foreseen) + len(outcome.skipped)
    if options.as_json:
        jobs = [one.to_json() for _, one in foreseen]
        emit_json({"jobs": jobs, "skipped": outcome.skipped, "refused": outcome.refused, "expected_s": expected_s})
        outcome.check_refused(done)
        return
    for job, one in foreseen:
        cards = f"{len(job.cards)} {plural('card', len(job.cards))} ({job.cards[0].model})"
        emit(
            f"{one.title} on {cards}: {one.calls} calls of {one.tuples} operator {plural('tuple', one.tuples)}; {one.new} "
            f"to measure, {one.reused} known already" + (f"; {span(one.expected_s)} or more" if one.new else "")
        )
    new = sum(one.new for _, one in foreseen)
    emit(
        f"In all {new} to measure"
        + (f", {span(expected_s)} or more." if new else ".")
        + " Nothing was begun (--dry-run)."
    )
    outcome.check_refused(done)


def submit_all(
    database: Database,
    planned: Sequence[Planned],
    outcome: Outcome,
    *,
    pinned: bool = False,
    farm: EmbeddedFarm | None = None,
) -> None:
    """Make the jobs; what of several cannot be measured is left out.

    Args:
        outcome: filled job by job, so that whoever interrupts this knows what is under way.
        pinned: the cards were named with --card.
        farm: the command's own; its workers start while the first model is extracted, or not at all where the
            database knows everything.
    """
    from farm.jobs.create import tuples_of
    from farm.types.request import named
    from tasks.submit import submit

    # A name that a model does not have is told before anything is started or submitted, and a step that does not fit.
    planned_jobs = []
    for job in fitting(planned, outcome):
        with _or_refused(job, outcome):
            first = named(job.request.operators) or (job.request.variant is not None and job.request.variant.step)
            smallest = min(job.cards, key=lambda card: card.memory_bytes)
            tuples = tuples_of(database, job.request, job.card_ids, smallest) if first else None
            planned_jobs.append((job, tuples))
    for job, tuples in planned_jobs:
        if farm is not None and not (known := bool(job.done_by) and farm.registered()):
            farm.start()
        with _or_refused(job, outcome):
            with doing() as told:
                if farm is None:
                    one = submit(database, job.request, job.card_ids, tuples=tuples, pinned=pinned, progress=told)
                else:
                    one = submit(
                        database,
                        job.request,
                        job.card_ids,
                        tuples=tuples,
                        pinned=pinned,
                        ready=farm.wait_ready,
                        known=known,
                        progress=told,
                    )
            outcome.submitted.append(one)
            _say_opened(job, one)


def _say_opened(job: Planned, one: OpenedJob) -> None:
    for reason, count in one.left_out.items():  # nothing is left out in silence
        assert job.request.sweep is not None
        say(f"{one.title}: {count} of {job.request.sweep.size} combinations left out: {reason}")
    say(
        f"job {one.job_id}: {one.title}, {one.calls} calls of {one.tuples} operator tuples; "
        f"{one.new} to measure, {one.reused} known already"
    )


def fitting(planned: Sequence[Planned], outcome: Outcome) -> list[Planned]:
    """Those that can lie in the memory of the cards that are to measure them, as far as no job has measured them yet.

    Raises:
        UsageError: the only one cannot.
    """
    from farm.requests.memory import check_fits

    left = []
    for job in planned:
        with _or_refused(job, outcome), _placed(job.wish):
            if job.request.variant is not None and not job.done_by:
                smallest = min(job.cards, key=lambda card: card.memory_bytes)
                check_fits(job.request.variant, smallest, smallest.memory_bytes)
            left.append(job)
    return left


@contextlib.contextmanager
def doing() -> Iterator[Callable[[str, int, int], None]]:
    """What a command is at, on stderr while it lasts: a bar in a terminal, else a line now and then.

    Yields:
        Tell it what is being done, and how much of how much (0 of 0 where that is not known).
    """
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
    database: Database,
    job_ids: Sequence[str],
    *,
    tend: Callable[[], None] = lambda: None,
    on_stdout: bool = False,
) -> None:
    """Show the jobs' progress on stderr until each has ended: live in a terminal, else a line now and then.

    Args:
        tend: called between two looks; an embedded farm minds its workers in it.
        on_stdout: in a terminal, show it on stdout and leave the end standing.
    """
    if not job_ids:
        return
    out = console(stderr=not on_stdout)
    if out.file.isatty():
        _follow_live(database, job_ids, tend, out, transient=not on_stdout)
    else:
        _follow_plainly(database, job_ids, tend)


def progress_of(database: Database, job_ids: Sequence[str]) -> list[Progress]:
    """Where the jobs stand now."""
    from farm.jobs import jobs

    with database.read() as session:
        return [jobs.progress(session, job_id) for job_id in job_ids]


def ended(progresses: Iterable[Progress]) -> bool:
    """Whether none of the jobs goes on."""
    return all(progress.over for progress in progresses)


def next_progress(database: Database, job_ids: Sequence[str]) -> list[Progress]:
    """Where the jobs stand now. A database that is away for a while is waited for: the jobs go on without us."""
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


def _follow_live(
    database: Database, job_ids: Sequence[str], tend: Callable[[], None], out: Console, *, transient: bool
) -> None:
    from rich.live import Live

    from cli import lists

    progresses = progress_of(database, job_ids)
    with Live(lists.progress_bars(progresses), console=out, refresh_per_second=4, transient=transient) as live:
        while not ended(progresses):
            time.sleep(POLL_S)
            tend()
            progresses = next_progress(database, job_ids)
            live.update(lists.progress_bars(progresses))


def _follow_plainly(database: Database, job_ids: Sequence[str], tend: Callable[[], None]) -> None:
    from cli import lists

    last: dict[str, str] = {}
    said_at_s = 0.0
    while True:
        progresses = next_progress(database, job_ids)
        over = ended(progresses)
        if over or time.monotonic() - said_at_s >= PLAIN_LINE_S:
            for job in progresses:
                if (line := lists.progress_line(job)) != last.get(job.job_id):
                    say(line)
                    last[job.job_id] = line
            said_at_s = time.monotonic()
        if over:
            return
        time.sleep(POLL_S)
        tend()


def conclude(database: Database, outcome: Outcome, options: CliOptions) -> None:
    """Print the reports of ended jobs, and of those that had done what a file asks; then what was left out.

    Raises:
        BelowTarget: ``--check`` was given, and a verdict did not pass or something was left out.
        Refused: something was left out.
    """
    from farm.report import report as reports

    with database.read() as session:
        built = [reports.build(session, job_id) for job_id in outcome.shown_ids]
    if options.as_json:
        reports_json = [one.to_json() for one in built]
        emit_json({"reports": reports_json, "skipped": outcome.skipped, "refused": outcome.refused})
    else:
        from cli import report_tables

        for one in built:
            show(report_tables.report(one))
    if options.check:
        check(built, outcome.told_refused(len(built)))
    outcome.check_refused(len(built))


def check(reports: Sequence[Report], refused: str = "") -> None:
    """
    Args:
        refused: what has no report because it cannot be measured, as `Outcome.told_refused` tells it.

    Raises:
        BelowTarget: a verdict did not pass, or something has none.
    """
    from farm.errors import BelowTarget

    # A sweep has no whole to be held against, and a few operators of a model are not all of it: neither can fail.
    failing = [one for one in reports if one.kind == "model" and one.verdict.missed]
    if failing:
        told = f"{len(failing)} of {len(reports)} verdicts did not pass: {', '.join(one.title for one in failing)}."
        raise BelowTarget(
            "\n".join(filter(None, [told, refused])),
            f"`farm report {failing[0].job_id}` shows the gap and what is not measured.",
        )
    if refused:
        raise BelowTarget(refused, "The verdicts of the others pass.")
