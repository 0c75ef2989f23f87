"""Submit jobs for requests: skip requests that are done, check that models fit in memory, submit
the others.

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
from farm.jobs import captures, create, jobs
from farm.jobs.closing import close_complete_rounds
from farm.jobs.dry_run import dry_running
from farm.jobs.plan import JobPlan
from farm.requests.card_selection import by_model
from farm.requests.memory import check_fits
from farm.requests.partial_request import (
    PartialRequest,
    check_names,
)
from farm.requests.resolved import ResolvedRequest, resolve
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
from farm.types.format import percent, span
from farm.types.request import Request

if TYPE_CHECKING:
    from tasks.embedded import EmbeddedFarm


def resolve_all(
    partials: Iterable[PartialRequest],
    cards: Sequence[Card],
    *,
    target: float,
    pinned: bool = False,
) -> list[ResolvedRequest]:
    """Return a resolved request for each partial request and card model. ``pinned``: see
    `ResolvedRequest`.

    Raises:
        UsageError: a value is wrong. For a request from a file, the message begins with file and
            line.
        UnknownOperator: PyTorch has no operator of a given name.
    """
    partials, resolved = list(partials), []
    alone = _number_of_requests(partials) == 1
    for partial in partials:
        for group in by_model(cards).values():
            with _located(partial.where):
                resolved.append(resolve(partial, group, target=target, alone=alone, pinned=pinned))
    check_names([entry.request for entry in resolved])
    return resolved


def _number_of_requests(partials: Sequence[PartialRequest]) -> int:
    """The number of requests; several sizes of one model on the command line are one."""
    typed = {partial.title for partial in partials if not partial.where}
    written = [partial for partial in partials if partial.where]
    return len(typed) + len(written)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Add file and line to the error of a request from a file."""
    try:
        yield
    except errors.UsageError as error:
        if not where:
            raise
        raise errors.MeasurementFileError(f"{where}: {error.message}", error.next_step) from error


@dataclass
class Submissions:
    """The requests of one command: submitted as jobs, skipped because they are done, or refused.

    A command calls `still_to_do`, then `submit_all`; a dry run calls `previews`.

    Attributes:
        say: receives lines for people.
        submitted: the submitted jobs. Each is added at once, so that an interrupted command knows
            its jobs.
        skipped: requests from files that are done, each with its title and the id of the finished
            job.
        refused: requests that cannot be measured, each with its title and the reason.
    """

    say: Callable[[str], None]
    submitted: list[JobPlan] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)

    @property
    def job_ids(self) -> list[str]:
        return [plan.job_id for plan in self.submitted]

    @property
    def shown_ids(self) -> list[str]:
        """The ids of the jobs to report: first the skipped requests' finished jobs, then the
        submitted jobs.
        """
        skipped_ids = [job["job"] for job in self.skipped]
        return list(dict.fromkeys([*skipped_ids, *self.job_ids]))

    def refusals(self, done: int) -> str:
        """Return a text with one line for each refused request, beside ``done`` other jobs; "" if
        no request was refused."""
        if not self.refused:
            return ""
        lines = [f"{job['title']}: {job['reason']}" for job in self.refused]
        first = f"{len(lines)} of {done + len(lines)} requests cannot be measured:"
        return "\n".join([first, *lines])

    def check_refused(self, done: int) -> None:
        """Raises `Refused` if a request was refused; the message lists all refused requests."""
        if lines := self.refusals(done):
            raise errors.Refused(
                lines, "`farm operators MODEL` shows which parts of a model cannot be extracted."
            )

    def still_to_do(
        self, database: Database, requests: Sequence[ResolvedRequest]
    ) -> list[ResolvedRequest]:
        """Skip requests from files that are done already; return the others with
        `ResolvedRequest.done_by` filled in.
        """
        with database.read() as session:
            done = jobs.done_entries(session, [resolved.request for resolved in requests])
        left = []
        for resolved in requests:
            done_by = ""
            if resolved.request.reuse != "none":
                done_by = done.get(resolved.request.id, "")
            if not (resolved.where and done_by):
                left.append(dataclasses.replace(resolved, done_by=done_by))
                continue
            title = resolved.request.title
            self.skipped.append({"title": title, "job": done_by})
            self.say(
                f"{resolved.where}: job {done_by} has measured {title} already; --reuse none "
                "measures it again."
            )
        return left

    def fitting(self, requests: Sequence[ResolvedRequest]) -> list[ResolvedRequest]:
        """Return the requests whose model fits in the memory of their cards. Requests with
        `done_by` are not checked. Raises `UsageError` if the only request does not fit."""
        left = []
        for resolved in requests:
            with self._or_refused(resolved), _located(resolved.where):
                variant, card = resolved.variant, resolved.smallest_card
                if variant is not None and card is not None and not resolved.done_by:
                    check_fits(variant, card, resolved.model)
                left.append(resolved)
        return left

    def previews(
        self,
        database: Database | None,
        requests: Sequence[ResolvedRequest],
        *,
        own_cards: Sequence[Card] = (),
    ) -> list[JobPlan]:
        """Return the plan of each job, without writing to the database or starting workers.
        ``database`` is None if it does not exist yet; for ``own_cards``,
        see `farm.jobs.dry_run.dry_running`."""
        left = list(requests)
        if database is not None:
            left = self.still_to_do(database, left)
        plans = []
        with dry_running(database, own_cards) as dry_run:
            for resolved in self.fitting(left):
                with self._or_refused(resolved):
                    plans.append(dry_run.preview(resolved))
        return plans

    def submit_all(
        self,
        database: Database,
        requests: Sequence[ResolvedRequest],
        *,
        progress: Callable[[], contextlib.AbstractContextManager[OnProgress]],
        farm: EmbeddedFarm | None = None,
    ) -> None:
        """Submit a job for each request. If one of several cannot be measured, leave it out.

        Args:
            progress: returns a context manager that shows the progress of one job.
            farm: the embedded farm of `farm run`. Its workers start while the first model is
                captured; they do not start if the database has readings for all items.
        """
        # Check operator names and the memory of training steps before any worker starts.
        checked: list[ResolvedRequest] = []
        for resolved in self.fitting(requests):
            with self._or_refused(resolved):
                if captures.is_captured_first(resolved):
                    capture_id = captures.checked_capture(database, resolved)
                    resolved = dataclasses.replace(resolved, capture_id=capture_id)
                checked.append(resolved)
        for resolved in checked:
            if farm is not None and _is_planned_with_workers(resolved, farm):
                farm.start()
            with self._or_refused(resolved):
                with progress() as report:
                    plan = submit(database, resolved, farm=farm, progress=report)
                self.submitted.append(plan)
                self._say_submitted(resolved.request, plan)

    def _say_submitted(self, request: Request, plan: JobPlan) -> None:
        if plan.changed:
            self.say(plan.changed)
        for reason, count in plan.left_out.items():
            assert request.sweep is not None, "only a sweep leaves combinations out"
            self.say(
                f"{plan.title}: {count} of {request.sweep.size} combinations are left out: {reason}"
            )
        self.say(
            f"job {plan.job_id}: {plan.title}, {plan.calls} calls of {plan.tuples} operator "
            f"tuples; {plan.new} to measure, {plan.reused} measured "
            f"already{_expected(request, plan)}"
        )

    @contextlib.contextmanager
    def _or_refused(self, resolved: ResolvedRequest) -> Iterator[None]:
        """If a model cannot be built or captured, or does not fit on a card, leave it out; raise
        for the only request.
        """
        try:
            yield
        except (errors.CaptureError, errors.UsageError) as error:
            of_all_requests = isinstance(error, errors.NoSuchCard | errors.UnknownOperator)
            if resolved.alone or of_all_requests:
                raise
            where = f"{resolved.where}: " if resolved.where else ""
            title = resolved.request.title
            with contextlib.suppress(errors.FarmError):  # a user's model may fail to build
                title = resolved.title
            reason = error.message.removeprefix(where)
            self.refused.append({"title": title, "reason": reason})
            self.say(f"{where}{title} is left out: {reason}")


# ---- from a request to a published job


#: A function (activity, amount done, total amount) that shows progress; 0 of 0 if the amounts are
#: unknown.
OnProgress = Callable[[str, int, int], None]


def submit(
    database: Database,
    resolved: ResolvedRequest,
    *,
    farm: EmbeddedFarm | None = None,
    progress: OnProgress = lambda doing, done, of: None,
) -> JobPlan:
    """Create a job for the request and publish its items. If readings exist for all items, close
    the job at once.

    Args:
        farm: the embedded farm of the command. Its workers are started, and listen before the first
            message is published.

    Raises:
        FarmError: an error of the request, the cards, the database or the broker. If the job is in
            the database but could not be published, `farm resume` continues it.
    """
    from tasks import queues  # Celery loads only when there is something to publish

    @functools.cache  # if a worker dies later, its supervisor restarts it
    def wait_for_workers() -> None:
        if farm is not None:
            farm.wait_ready()

    def wait_before_planning() -> None:
        if farm is not None and _is_planned_with_workers(resolved, farm):
            wait_for_workers()

    if resolved.variant is not None:
        progress(f"Capturing {resolved.variant.model}", 0, 0)
        captures.capture_all_layers(database, resolved)
    plan = create.open_job(
        database,
        resolved,
        farm=queues.own_farm(),
        wait_for_workers=wait_before_planning,
        grown=_publishing_while_it_grows(database, resolved.request, wait_for_workers, progress),
    )
    try:
        round_to_publish = close_complete_rounds(database, plan.job_id, plan.round)
        if round_to_publish is not None:
            wait_for_workers()
            progress(f"Publishing {plan.title}", 0, 0)
            queues.publish_round(database, plan.job_id, round_to_publish)
    except KeyboardInterrupt:
        # Of a sweep, items may be published: they end as cancelled, or with a reading that is kept.
        jobs.cancel(database, plan.job_id)
        raise
    return plan


def _is_planned_with_workers(resolved: ResolvedRequest, farm: EmbeddedFarm) -> bool:
    """True if the workers of a farm write the rows of its cards before a job is planned. A job
    whose readings exist needs no workers if the rows are up to date.
    """
    return not (resolved.done_by and farm.registered())


def _publishing_while_it_grows(
    database: Database, request: Request, wait_for_workers: Callable[[], None], progress: OnProgress
) -> create.OnGrown:
    """Return a function that publishes the items of a sweep after each batch."""
    from tasks import queues

    broker_is_away = False

    def grown(plan: JobPlan, tried: int) -> None:
        nonlocal broker_is_away
        assert request.sweep is not None, "only a sweep is planned in parts"
        progress(f"Planning {request.title}", tried, request.sweep.size)
        if not plan.new or broker_is_away:
            return
        wait_for_workers()
        try:
            queues.publish_round(database, plan.job_id, plan.round)
        except errors.BrokerUnreachable:
            # Planning continues; `submit` publishes at the end and raises if the broker is still
            # away.
            broker_is_away = True

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


def _expected(request: Request, plan: JobPlan) -> str:
    """State the expected card time of a job that limits its precision or its time."""
    if request.within:
        limit = f"within {percent(request.within)}"
    elif request.budget_s:
        limit = f"a budget of {span(request.budget_s)}"
    else:
        return ""
    return f", about {span(plan.expected_s)} of card time ({limit})"
