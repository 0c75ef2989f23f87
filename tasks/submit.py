"""From a request to a published job, for `farm run` and `farm submit`; and `farm resume`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from farm.errors import BrokerUnreachable, NoSuchJob
from farm.jobs import jobs
from farm.jobs.closing import close_known_rounds
from farm.jobs.create import OpenedJob, Tuples, capture_all_layers, continue_planning, open_job
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
from farm.types.request import Request
from tasks.control import repair_job
from tasks.queues import own_farm, publish_aggregate, publish_round

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
