"""From a request to a published job. `farm run` and `farm submit` both come through here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farm.errors import NoSuchJob
from farm.jobs import jobs
from farm.jobs.closing import close_known_rounds
from farm.jobs.opening import capture_for, check_operators, device_and_torch, first_scope, store_sweep
from farm.settings import settings
from farm.store import tables
from farm.store.calls import counts
from farm.store.database import Database
from farm.store.tables import JobState
from farm.words.request import Request
from tasks.queues import own_farm, publish_aggregate, publish_round
from tasks.recovery import put_right


@dataclass(frozen=True)
class Submitted:
    """What became of a request."""

    job_id: str
    title: str
    tuples: int
    calls: int
    new: int  # items to measure now
    reused: int  # items that a reading served

    def to_json(self) -> dict[str, object]:
        return {
            "job": self.job_id,
            "title": self.title,
            "tuples": self.tuples,
            "calls": self.calls,
            "items_new": self.new,
            "items_reused": self.reused,
        }


def submit(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    pinned: bool = False,
    ready: Callable[[], None] = lambda: None,
    known: bool = False,
) -> Submitted:
    """Take the model apart, plan what is not yet measured, publish it. What is known already is concluded at once.

    Args:
        pinned: the cards were named by a person: no other takes a part of the job over.
        ready: has an embedded farm's workers registered and listening when it returns; called before anything is
            published, and before planning unless the cards are known.
        known: the database has the cards as they are now.

    Raises:
        FarmError: of the request, the cards, the database or the broker; a job that is in the database but could
            not be published is continued by `farm resume`.
    """
    if request.variant is None:
        operator_ids = store_sweep(database, request)
        if not known:
            ready()
        planned = jobs.create(database, request, card_ids, operator_ids=operator_ids, farm=own_farm(), pinned=pinned)
        tuples, calls = len(operator_ids), len(operator_ids)
    else:
        check_operators(database, request, card_ids)
        device_type, torch = device_and_torch(database, card_ids)
        capture_id = capture_for(database, request, device_type=device_type, torch=torch)
        if not known:
            ready()
        with database.write() as session:
            scope = first_scope(session, request, capture_id, card_ids)
            number = counts(session, capture_id)
        planned = jobs.create(
            database, request, card_ids, scope=scope, capture_id=capture_id, farm=own_farm(), pinned=pinned
        )
        tuples, calls = len(number), sum(number.values())
    try:
        if (wanted := close_known_rounds(database, planned.job_id, planned.round)) is not None:
            ready()
            publish_round(database, planned.job_id, wanted)
    except KeyboardInterrupt:
        jobs.cancel(database, planned.job_id)  # nobody has been told of it yet
        raise
    return Submitted(planned.job_id, request.title, tuples, calls, planned.new, planned.reused)


def resume(database: Database, job_id: str) -> int:
    """Publish a new chord of the job's open items, and first what the reconciler would do for them; how many.

    Harmless for a job that is under way.
    """
    with database.read() as session:
        job = session.get(tables.Job, job_id)
    if job is None:
        raise NoSuchJob(f"There is no job '{job_id}'.", "List the jobs with `farm jobs`.")
    if job.state != JobState.OPEN:
        return 0
    current = settings()
    if not jobs.take_over(database, job_id, own_farm(), current.heartbeat_s):
        return 0  # its own farm is there, and goes on with it
    put_right(database, current, own_farm(), job_id)
    if published := publish_round(database, job_id, job.round):
        return published
    publish_aggregate(job_id, job.round)
    return 0
