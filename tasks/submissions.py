"""From partial requests to jobs: choose what is left to measure, check that it fits, and submit it.

`farm run` and `farm submit` both use this module. It prints nothing itself: `say` receives the lines for people.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farm.devices.device import Card
from farm.errors import (
    BrokerUnreachable,
    CaptureError,
    FarmError,
    MeasurementFileError,
    NoSuchCard,
    NoSuchJob,
    Refused,
    UnknownOperator,
    UsageError,
)
from farm.jobs import jobs
from farm.jobs.create import (
    JobPreview,
    OpenedJob,
    Tuples,
    capture_all_layers,
    continue_planning,
    dry_running,
    open_job,
    tuples_of,
)
from farm.jobs.rounds import close_known_rounds
from farm.models.catalog import title_of
from farm.requests.card_selection import by_model
from farm.requests.memory import check_fits
from farm.requests.partial_request import PartialRequest, check_operator_names, complete
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
from farm.types.request import Request, named
from tasks.control import repair_job
from tasks.queues import own_farm, publish_aggregate, publish_round

if TYPE_CHECKING:
    from tasks.embedded import EmbeddedFarm


@dataclass(frozen=True)
class PlannedJob:
    """One job to submit.

    Attributes:
        done_by: a finished job of the same request; "" if there is none or nothing may be reused.
        alone: the only thing to measure. Then a problem is an error; otherwise the job is left out.
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
        """The card with the least memory."""
        return min(self.cards, key=lambda card: card.memory_bytes)


def plan(partials: Iterable[PartialRequest], cards: Sequence[Card], *, target: float) -> list[PlannedJob]:
    """Plan one job per request and card model.

    Raises:
        UsageError: a value is wrong; for a request from a file, the message begins with file and line.
        UnknownOperator: PyTorch has no operator of a given name.
    """
    partials, planned = list(partials), []
    alone = len({number if one.where else one.title for number, one in enumerate(partials)}) == 1
    for partial in partials:
        for group in by_model(cards).values():
            with _located(partial):
                planned.append(PlannedJob(partial, complete(partial, group[0].kind, target=target), group, alone=alone))
    requests = [job.request for job in planned]
    names = {name for request in requests for name in named(request.operators)}
    check_operator_names(names, [request.variant for request in requests if request.variant])
    return planned


@contextlib.contextmanager
def _located(partial: PartialRequest) -> Iterator[None]:
    """Add file and line to the error of a request from a file."""
    try:
        yield
    except UsageError as error:
        if not partial.where:
            raise
        raise MeasurementFileError(f"{partial.where}: {error.message}", error.next_step) from error


@dataclass
class Submissions:
    """The jobs of one command: submitted, skipped because they are done, or refused.

    Attributes:
        say: receives lines for people.
        submitted: the jobs, filled one by one, so that an interrupted command knows what is under way.
        skipped: entries of files that are done, with the job that did them.
        refused: what cannot be measured, with the reason.
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
        """The jobs to report: first those that were done before."""
        return list(dict.fromkeys([*(one["job"] for one in self.skipped), *self.job_ids]))

    def refusals(self, done: int) -> str:
        """What was left out, one line each; "" if nothing was.

        Args:
            done: the number of jobs that were not left out.
        """
        lines = [f"{one['title']}: {one['reason']}" for one in self.refused]
        return "\n".join([f"{len(lines)} of {done + len(lines)} cannot be measured:", *lines]) if lines else ""

    def check_refused(self, done: int) -> None:
        """
        Raises:
            Refused: something was left out.
        """
        if lines := self.refusals(done):
            raise Refused(lines, "`farm operators MODEL` shows which parts of a model cannot be extracted.")

    def still_to_do(self, database: Database, planned: Sequence[PlannedJob]) -> list[PlannedJob]:
        """The jobs without the entries of files that are done already. The others know the job that did the same."""
        with database.read() as session:
            done = jobs.done_entries(session, [job.request for job in planned])
        left = []
        for job in planned:
            title, done_by = job.request.title, done.get(job.request.id, "") if job.request.reuse != "none" else ""
            if job.partial.where and done_by:
                self.skipped.append({"title": title, "job": done_by})
                done_before = f"{title} is done already, as job {done_by}"
                self.say(f"{job.partial.where}: {done_before}; --reuse none measures it again.")
            else:
                left.append(dataclasses.replace(job, done_by=done_by))
        return left

    def fitting(self, planned: Sequence[PlannedJob]) -> list[PlannedJob]:
        """The jobs whose model fits in the memory of their cards. Jobs that were done before are not checked.

        Raises:
            UsageError: the only job does not fit.
        """
        left = []
        for job in planned:
            with self._or_refused(job), _located(job.partial):
                if job.request.variant is not None and not job.done_by:
                    check_fits(job.request.variant, job.smallest_card)
                left.append(job)
        return left

    def previews(
        self, database: Database | None, planned: Sequence[PlannedJob], *, own: Sequence[Card] = ()
    ) -> list[tuple[PlannedJob, JobPreview]]:
        """What the jobs would measure; nothing is written or started.

        Args:
            database: None if there is none yet.
            own: see `farm.jobs.create.dry_running`.
        """
        left = list(planned) if database is None else self.still_to_do(database, planned)
        found = []
        with dry_running(database, own) as rehearsal:
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
            progress: shows what is being done while its context lasts.
            pinned: the cards were named with --card.
            farm: of `farm run`. Its workers start while the first model is captured; if the database knows everything,
                they do not start.
        """
        # Names that a model does not have, and steps that do not fit, are reported before anything starts.
        ready = []
        for job in self.fitting(planned):
            with self._or_refused(job):
                variant = job.request.variant
                first = named(job.request.operators) or (variant is not None and variant.step)
                tuples = tuples_of(database, job.request, job.card_ids, job.smallest_card) if first else None
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
                    self.say(f"{opened.title}: {count} of {job.request.sweep.size} combinations left out: {reason}")
                self.say(
                    f"job {opened.job_id}: {opened.title}, {opened.calls} calls of {opened.tuples} operator tuples; "
                    f"{opened.new} to measure, {opened.reused} known already"
                )

    @contextlib.contextmanager
    def _or_refused(self, job: PlannedJob) -> Iterator[None]:
        """Leave out a model that cannot be built, captured or held by a card. For the only job it is an error."""
        try:
            yield
        except (CaptureError, UsageError) as error:
            if job.alone or isinstance(error, NoSuchCard | UnknownOperator):  # these concern all jobs
                raise
            where, title = f"{job.partial.where}: " if job.partial.where else "", job.request.title
            if job.request.variant is not None:
                with contextlib.suppress(FarmError):  # a user's own model computes its title from its inputs
                    title = title_of(job.request.variant)
            reason = error.message.removeprefix(where)
            self.refused.append({"title": title, "reason": reason})
            self.say(f"{where}{title} is left out: {reason}")


# ---- from a request to a published job


#: Called with what is being done, how much is done, and of how much (0 of 0 if unknown).
OnProgress = Callable[[str, int, int], None]


def submit(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    tuples: Tuples | None = None,
    pinned: bool = False,
    ready: Callable[[], None] = lambda: None,
    known: bool = False,
    progress: OnProgress = lambda doing, done, of: None,
) -> OpenedJob:
    """Create a job for the request and publish its items. A job that readings serve completely is closed at once.

    Args:
        tuples: see `farm.jobs.create.open_job`.
        pinned: a person named the cards; no other card takes items of the job.
        ready: starts the workers of an embedded farm and returns when they listen; called before anything is published,
            and before planning unless the cards are known.
        known: the database has the cards as they are now.

    Raises:
        FarmError: about the request, the cards, the database or the broker. `farm resume` continues a job that is in
            the database but could not be published.
    """
    ready = functools.cache(ready)  # called once: a worker that dies later is restarted without waiting for it
    if request.variant is not None:
        progress(f"Capturing {request.variant.model}", 0, 0)
        capture_all_layers(database, request, card_ids)
    opened = open_job(
        database,
        request,
        card_ids,
        tuples=tuples,
        farm=own_farm(),
        pinned=pinned,
        ready=(lambda: None) if known else ready,
        grown=_publishing_while_it_grows(database, request, ready, progress),
    )
    try:
        if (wanted := close_known_rounds(database, opened.job_id, opened.round)) is not None:
            ready()
            progress(f"Publishing {opened.title}", 0, 0)
            publish_round(database, opened.job_id, wanted)
    except KeyboardInterrupt:
        jobs.cancel(database, opened.job_id)  # nothing is published yet
        raise
    return opened


def _publishing_while_it_grows(
    database: Database, request: Request, ready: Callable[[], None], progress: OnProgress
) -> Callable[[OpenedJob, int], None]:
    away = False

    def grown(opened: OpenedJob, tried: int) -> None:
        nonlocal away
        assert request.sweep is not None
        progress(f"Planning {request.title}", tried, request.sweep.size)
        if opened.new and not away:
            ready()
            try:
                publish_round(database, opened.job_id, opened.round)
            except BrokerUnreachable:
                away = True  # planning continues; publishing is tried once more at the end, and then raises

    return grown


def resume(database: Database, job_id: str, *, progress: OnProgress = lambda doing, done, of: None) -> int:
    """Repair a job as the reconciler would and publish its open items again; returns their number.

    An interrupted planning of a sweep is continued. Harmless for a job that is under way.
    """
    with database.read() as session:
        job = session.get(tables.Job, job_id)
    if job is None:
        raise NoSuchJob(f"There is no job '{job_id}'.", "List the jobs with `farm jobs`.")
    if job.state != JobState.OPEN:
        return 0
    current = settings()
    if not jobs.take_over(database, job_id, own_farm(), current.heartbeat_s):
        return 0  # its own farm is alive and continues it
    with database.read() as session:
        newest = session.get(tables.Round, (job_id, job.round))
    if newest is not None and newest.planned_at_s is None:
        continue_planning(
            database, job, _publishing_while_it_grows(database, Request.from_json(job.request), lambda: None, progress)
        )
    repair_job(database, current, own_farm(), job_id)
    if published := publish_round(database, job_id, job.round, again=True):
        return published
    publish_aggregate(job_id, job.round)
    return 0
