"""From a request to a published job. `farm run` and `farm submit` both come through here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlmodel import Session, col, select

from farm import jobs
from farm.aggregate import next_operators
from farm.captures import capture_for, counts, store_sweep, unscoped_parts
from farm.errors import NoSuchJob, UnknownOperator, did_you_mean
from farm.installed import torch_version
from farm.request import Request, named
from farm.roofline import roofline_of
from farm.rounds import close_known_rounds, remember_significant, significant
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
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
        device_type, torch = _of_cards(database, card_ids)
        capture_id = capture_for(database, request, device_type=device_type, torch=torch)
        if not known:
            ready()
        with database.write() as session:
            scope = _scope(session, request, capture_id, card_ids)
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


def check_operators(database: Database, request: Request, card_ids: Sequence[str]) -> None:
    """Hold the operators that were named against the model; what takes it apart is kept. Before anything is started.

    Raises:
        UnknownOperator: none of them occurs in the model.
        CaptureError: the model cannot be taken apart.
    """
    asked = named(request.operators)
    if request.variant is None or not asked:
        return
    device_type, torch = _of_cards(database, card_ids)
    capture_id = capture_for(database, request, device_type=device_type, torch=torch)
    with database.read() as session:
        ids = list(counts(session, capture_id))
        there = set(session.exec(select(tables.Operator.short_name).where(col(tables.Operator.id).in_(ids))))
    if not there.intersection(asked):
        near = next(filter(None, (did_you_mean(name, there) for name in asked)), "")
        raise UnknownOperator(
            f"{request.title} has none of the operators {', '.join(asked)}.",
            f"{near} It has {', '.join(sorted(there))}.".strip(),
        )


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


def _of_cards(database: Database, card_ids: Sequence[str]) -> tuple[str, str]:
    """(device type, torch version) that the model is taken apart for: the cards', where they have registered."""
    local = torch_version()
    with database.read() as session:
        card = session.get(tables.Card, card_ids[0]) if card_ids else None
        software = session.get(tables.Software, card.software_id) if card and card.software_id else None
    device_type = "cuda" if card_ids and card_ids[0].startswith("GPU-") else "cpu"
    simulated = card is not None and card.kind == "simulated"
    return device_type, local if software is None or simulated else software.torch


def _scope(session: Session, request: Request, capture_id: int, card_ids: Sequence[str]) -> list[str]:
    """The operator types of the first round."""
    if request.operators != ("auto",):
        return list(request.operators)
    card = session.get(tables.Card, card_ids[0])
    assert card is not None, "cards register before a job is planned"
    assert request.variant is not None
    roofline = roofline_of(
        card.kind, card.model, card.fingerprint, dtype=request.variant.dtype, tf32=request.protocol.tf32
    )
    parts = unscoped_parts(session, capture_id, roofline)
    first = next_operators(parts, significant(session), target=request.target)
    remember_significant(session, first, "loop")
    return first
