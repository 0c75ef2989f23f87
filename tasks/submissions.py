"""Submit jobs for partial requests: skip requests that are done, check that models fit in memory,
submit the others.

`farm run` and `farm submit` use this module. It prints nothing: it passes lines for people to the
function `say`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farm import errors
from farm.devices.device import Card
from farm.jobs import create, jobs
from farm.jobs.create import OpenedJob
from farm.jobs.rounds import close_known_rounds
from farm.models.catalog import title_of
from farm.requests.card_selection import by_model
from farm.requests.memory import check_fits
from farm.requests.partial_request import (
    PartialRequest,
    check_kernel_names,
    check_operator_names,
    complete,
)
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
from farm.types.format import percent, span
from farm.types.request import Request, named

if TYPE_CHECKING:
    from tasks.embedded import EmbeddedFarm


@dataclass(frozen=True)
class PlannedJob:
    """One job to submit.

    Attributes:
        done_by: the id of a finished job of the same request; "" if there is none or the request
            reuses no readings.
        alone: True if the command has only this request. Then a problem is an error; otherwise the
            job is left out.
    """

    partial: PartialRequest
    request: Request
    cards: Sequence[Card]
    done_by: str = ""
    alone: bool = True

    @property
    def card_ids(self) -> list[str]:
        return [card.id for card in self.cards]

    @property
    def smallest_card(self) -> Card:
        return min(self.cards, key=lambda card: card.memory_bytes)


def plan(
    partials: Iterable[PartialRequest], cards: Sequence[Card], *, target: float
) -> list[PlannedJob]:
    """Plan one job per request and card model. Raises `UsageError` if a value is wrong (for a
    request from a file, the message begins with file and line); `UnknownOperator` if PyTorch has no
    operator of a given name."""
    partials, planned = list(partials), []
    alone = len({number if one.where else one.title for number, one in enumerate(partials)}) == 1
    for partial in partials:
        for group in by_model(cards).values():
            with _located(partial):
                planned.append(
                    PlannedJob(
                        partial, complete(partial, group[0].kind, target=target), group, alone=alone
                    )
                )
    requests = [job.request for job in planned]
    compiled = [request for request in requests if request.variant and request.variant.compile]
    eager = [request for request in requests if request not in compiled]
    check_kernel_names({name for request in compiled for name in named(request.operators)})
    names = {name for request in eager for name in named(request.operators)}
    check_operator_names(names, [request.variant for request in eager if request.variant])
    return planned


@contextlib.contextmanager
def _located(partial: PartialRequest) -> Iterator[None]:
    """Add file and line to the error of a request from a file."""
    try:
        yield
    except errors.UsageError as error:
        if not partial.where:
            raise
        raise errors.MeasurementFileError(
            f"{partial.where}: {error.message}", error.next_step
        ) from error


@dataclass
class Submissions:
    """The jobs of one command: submitted, skipped because they are done, or refused.

    Attributes:
        say: receives lines for people.
        submitted: the submitted jobs. Each is added at once, so that an interrupted command knows
            its jobs.
        skipped: requests from files that are done, each with its title and the id of the finished
            job.
        refused: requests that cannot be measured, each with its title and the reason.
    """

    say: Callable[[str], None]
    submitted: list[OpenedJob] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)

    @property
    def job_ids(self) -> list[str]:
        return [one.job_id for one in self.submitted]

    @property
    def shown_ids(self) -> list[str]:
        """The ids of the jobs to report: first the skipped requests' finished jobs, then the
        submitted jobs.
        """
        return list(dict.fromkeys([*(one["job"] for one in self.skipped), *self.job_ids]))

    def refusals(self, done: int) -> str:
        """Return a text with one line for each refused request, beside ``done`` other jobs; "" if
        no request was refused."""
        lines = [f"{one['title']}: {one['reason']}" for one in self.refused]
        return (
            "\n".join([f"{len(lines)} of {done + len(lines)} requests cannot be measured:", *lines])
            if lines
            else ""
        )

    def check_refused(self, done: int) -> None:
        """Raises `Refused` if a request was refused; the message lists all refused requests."""
        if lines := self.refusals(done):
            raise errors.Refused(
                lines, "`farm operators MODEL` shows which parts of a model cannot be extracted."
            )

    def still_to_do(self, database: Database, planned: Sequence[PlannedJob]) -> list[PlannedJob]:
        """Skip requests from files that are done already; return the other jobs with
        `PlannedJob.done_by` filled in.
        """
        with database.read() as session:
            done = jobs.done_entries(session, [job.request for job in planned])
        left = []
        for job in planned:
            title, done_by = (
                job.request.title,
                done.get(job.request.id, "") if job.request.reuse != "none" else "",
            )
            if job.partial.where and done_by:
                self.skipped.append({"title": title, "job": done_by})
                done_before = f"job {done_by} has measured {title} already"
                self.say(f"{job.partial.where}: {done_before}; --reuse none measures it again.")
            else:
                left.append(dataclasses.replace(job, done_by=done_by))
        return left

    def fitting(self, planned: Sequence[PlannedJob]) -> list[PlannedJob]:
        """Return the jobs whose model fits in the memory of their cards. Jobs with `done_by` are
        not checked. Raises `UsageError` if the only job does not fit."""
        left = []
        for job in planned:
            with self._or_refused(job), _located(job.partial):
                if job.request.variant is not None and not job.done_by:
                    check_fits(job.request.variant, job.smallest_card)
                left.append(job)
        return left

    def previews(
        self, database: Database | None, planned: Sequence[PlannedJob], *, own: Sequence[Card] = ()
    ) -> list[tuple[PlannedJob, create.JobPreview]]:
        """Return each job with the plan of its items, without writing to the database or starting
        workers. ``database`` is None if it does not exist yet; for ``own``, see
        `farm.jobs.create.dry_running`."""
        left = list(planned) if database is None else self.still_to_do(database, planned)
        found = []
        with create.dry_running(database, own) as rehearsal:
            for job in self.fitting(left):
                with self._or_refused(job):
                    found.append((job, rehearsal.preview(job.request, job.card_ids)))
        return found

    def submit_all(
        self,
        database: Database,
        planned: Sequence[PlannedJob],
        *,
        progress: Callable[[], contextlib.AbstractContextManager[OnProgress]],
        pinned: bool = False,
        farm: EmbeddedFarm | None = None,
    ) -> None:
        """Submit the jobs. If one of several cannot be measured, leave it out.

        Args:
            progress: returns a context manager that shows the progress of one job.
            pinned: a person named the cards with --card.
            farm: the embedded farm of `farm run`. Its workers start while the first model is
                captured; they do not start if the database has readings for all items.
        """
        # Check operator names and the memory of training steps before any worker starts.
        ready = []
        for job in self.fitting(planned):
            with self._or_refused(job):
                variant = job.request.variant
                # The kernels of a compiled model belong to a card model, and the card may not be
                # registered yet.
                first = named(job.request.operators) or (
                    variant is not None and (variant.step or variant.compile)
                )
                tuples = (
                    create.tuples_of(database, job.request, job.card_ids, job.smallest_card)
                    if first
                    else None
                )
                ready.append((job, tuples))
        for job, tuples in ready:
            known = farm is not None and bool(job.done_by) and farm.registered()
            if farm is not None and not known:
                farm.start()
            with self._or_refused(job):
                with progress() as report:
                    opened = submit(
                        database,
                        job.request,
                        job.card_ids,
                        tuples=tuples,
                        pinned=pinned,
                        ready=farm.wait_ready if farm else lambda: None,
                        known=known,
                        progress=report,
                    )
                self.submitted.append(opened)
                if opened.changed:
                    self.say(opened.changed)
                for reason, count in opened.left_out.items():
                    assert job.request.sweep is not None
                    self.say(
                        f"{opened.title}: {count} of {job.request.sweep.size} combinations are "
                        f"left out: {reason}"
                    )
                self.say(
                    f"job {opened.job_id}: {opened.title}, {opened.calls} calls of "
                    f"{opened.tuples} operator tuples; "
                    f"{opened.new} to measure, {opened.reused} measured "
                    f"already{_expected(job.request, opened)}"
                )

    @contextlib.contextmanager
    def _or_refused(self, job: PlannedJob) -> Iterator[None]:
        """If a model cannot be built or captured, or does not fit on a card, leave it out; raise
        for the only job.
        """
        try:
            yield
        except (errors.CaptureError, errors.UsageError) as error:
            if job.alone or isinstance(
                error, errors.NoSuchCard | errors.UnknownOperator
            ):  # these concern all jobs
                raise
            where, title = f"{job.partial.where}: " if job.partial.where else "", job.request.title
            if job.request.variant is not None:
                with contextlib.suppress(
                    errors.FarmError
                ):  # a user's own model computes its title from its inputs
                    title = title_of(job.request.variant)
            reason = error.message.removeprefix(where)
            self.refused.append({"title": title, "reason": reason})
            self.say(f"{where}{title} is left out: {reason}")


# ---- from a request to a published job


#: A function (activity, amount done, total amount) that shows progress; 0 of 0 if the amounts are
#: unknown.
OnProgress = Callable[[str, int, int], None]


def submit(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    tuples: create.Tuples | None = None,
    pinned: bool = False,
    ready: Callable[[], None] = lambda: None,
    known: bool = False,
    progress: OnProgress = lambda doing, done, of: None,
) -> OpenedJob:
    """Create a job for the request and publish its items. If readings exist for all items, close
    the job at once.

    Args:
        tuples: see `farm.jobs.create.open_job`.
        pinned: a person named the cards, and no other card measures items of the job.
        ready: starts the workers of an embedded farm and returns when they listen. It is called
            before the first message is published; unless ``known``, it is called before planning.
        known: the rows of the cards in the database are up to date.

    Raises:
        FarmError: an error of the request, the cards, the database or the broker. If the job is in
            the database but could not be published, `farm resume` continues it.
    """
    from tasks import queues  # Celery loads only when there is something to publish

    ready = functools.cache(
        ready
    )  # only the first call waits: if a worker dies later, its supervisor restarts it
    if request.variant is not None:
        progress(f"Capturing {request.variant.model}", 0, 0)
        create.capture_all_layers(database, request, card_ids)
    opened = create.open_job(
        database,
        request,
        card_ids,
        tuples=tuples,
        farm=queues.own_farm(),
        pinned=pinned,
        ready=(lambda: None) if known else ready,
        grown=_publishing_while_it_grows(database, request, ready, progress),
    )
    try:
        if (wanted := close_known_rounds(database, opened.job_id, opened.round)) is not None:
            ready()
            progress(f"Publishing {opened.title}", 0, 0)
            queues.publish_round(database, opened.job_id, wanted)
    except KeyboardInterrupt:
        jobs.cancel(database, opened.job_id)  # nothing is published yet
        raise
    return opened


def _publishing_while_it_grows(
    database: Database, request: Request, ready: Callable[[], None], progress: OnProgress
) -> Callable[[OpenedJob, int], None]:
    from tasks import queues

    away = False

    def grown(opened: OpenedJob, tried: int) -> None:
        nonlocal away
        assert request.sweep is not None
        progress(f"Planning {request.title}", tried, request.sweep.size)
        if opened.new and not away:
            ready()
            try:
                queues.publish_round(database, opened.job_id, opened.round)
            except errors.BrokerUnreachable:
                # planning continues; `submit` publishes at the end and raises if the broker is
                # still away
                away = True

    return grown


def resume(
    database: Database, job_id: str, *, progress: OnProgress = lambda doing, done, of: None
) -> int:
    """Repair a job like the reconciler and publish its open items again; return their number. If
    the planning of a sweep was interrupted, it continues. Safe for a job on which workers are
    active."""
    from tasks import queues
    from tasks.control import repair_job

    with database.read() as session:
        job = session.get(tables.Job, job_id)
    if job is None:
        raise errors.NoSuchJob(f"There is no job '{job_id}'.", "List the jobs with `farm jobs`.")
    if job.state != JobState.OPEN:
        return 0
    current = settings()
    if not jobs.take_over(database, job_id, queues.own_farm(), current.heartbeat_s):
        return 0  # the job's own farm is alive and continues it
    with database.read() as session:
        newest = session.get(tables.Round, (job_id, job.round))
    if newest is not None and newest.planned_at_s is None:
        create.continue_planning(
            database,
            job,
            _publishing_while_it_grows(
                database, Request.from_json(job.request), lambda: None, progress
            ),
        )
    repair_job(database, current, queues.own_farm(), job_id)
    if published := queues.publish_round(database, job_id, job.round, again=True):
        return published
    queues.publish_aggregate(job_id, job.round)
    return 0


def _expected(request: Request, opened: OpenedJob) -> str:
    """State the expected card time of a job that limits its precision or its time."""
    wanted = (
        f"within {percent(request.within)}"
        if request.within
        else f"a budget of {span(request.budget_s)}"
    )
    return (
        f", about {span(opened.expected_s)} of card time ({wanted})"
        if request.within or request.budget_s
        else ""
    )
