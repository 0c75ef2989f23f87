"""Close a round of a job: write its verdict, then plan the next round or end the job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import defer
from sqlmodel import Session, func, select

from farm.errors import (
    NoSuchCard,
    Unreadable,
    UsageError,
)
from farm.jobs.items import open_items
from farm.jobs.rounds import add_round
from farm.jobs.significant import remember_significant, significant
from farm.store import tables
from farm.store.captures import find_capture, lacking_values
from farm.store.database import (
    Database,
    database_now,
    locked,
)
from farm.store.tables import (
    Job,
    JobState,
    Round,
    VerdictRow,
)
from farm.types.format import plural
from farm.types.request import Request
from farm.types.verification import Verification
from farm.verdict.aggregate import aggregate, next_operators
from farm.verdict.job_results import JobResults
from farm.verdict.verdict import Verdict


class Closing(StrEnum):
    """The result of closing a round."""

    OPEN = "open"  # not closed: some items of the round are open
    ALREADY = "already"  # the round already has a verdict, or its job has ended
    DONE = "done"  # closed; it was the last round of the job
    NEXT = "next"  # closed; the next round is planned, and the caller must publish it


@dataclass(frozen=True)
class ClosedRound:
    """The result of closing a round, with the number of the next round and the outcome of the
    verdict.
    """

    closing: Closing
    next_round: int | None = None
    outcome: str = ""


def close_round(database: Database, job_id: str, number: int, *, failed: str = "") -> ClosedRound:
    """Write the verdict of a round if all its items are closed; plan the next round or end the job.

    Args:
        failed: why the round cannot be aggregated. Then the verdict has only this reason, and the
            job ends; the readings are kept.
    """
    try:
        verdict = None if failed else _of_large_sweep(database, job_id, number)
        with database.write() as session:
            job = locked(session, Job, job_id)
            if not _is_open(job, number):
                return ClosedRound(Closing.ALREADY)
            if failed:
                return _end_without_sum(session, job, failed)
            return _close(session, job, verdict)
    except IntegrityError:
        return ClosedRound(Closing.ALREADY)


def _of_large_sweep(database: Database, job_id: str, number: int) -> Verdict | None:
    """Return the verdict of a large sweep without open items; None for other jobs. It takes
    minutes, too long for a transaction that writes."""
    with database.read() as session:
        job = session.get(Job, job_id)
        if not _is_open(job, number) or not _is_complete(session, job):
            return None
        results = JobResults(session, job, number)
        return results.verdict() if results.is_large else None


def _is_open(job: Job | None, number: int) -> TypeGuard[Job]:
    """True if the job is open, and this is its newest round."""
    return job is not None and job.state == JobState.OPEN and number == job.round


def close_complete_rounds(database: Database, job_id: str, number: int) -> int | None:
    """Close rounds from ``number`` on as long as all items are closed; return the first round with
    open items.
    """
    following: int | None = number
    while following is not None:
        closed = close_round(database, job_id, following)
        if closed.closing is Closing.OPEN:
            return following
        following = closed.next_round
    return None


def _is_complete(session: Session, job: Job) -> bool:
    key = job.id, job.round
    return session.get_one(Round, key).planned_at_s is not None and not open_items(session, *key)


def _close(session: Session, job: Job, verdict: Verdict | None) -> ClosedRound:
    if not _is_complete(session, job):
        return ClosedRound(Closing.OPEN)
    stored = select(VerdictRow).where(VerdictRow.job_id == job.id, VerdictRow.round == job.round)
    if session.exec(stored).first() is not None:
        return ClosedRound(Closing.ALREADY)
    request = Request.from_json(job.request)
    results = JobResults(session, job, job.round)
    if verdict is None:
        if results.is_large:
            # Its last item has just ended, and another aggregation is on its way.
            return ClosedRound(Closing.OPEN)
        verdict = results.verdict()
    row = _add_verdict(session, job, verdict)
    following, why = None, ""
    try:
        following = _next_round(session, job, request, results, verdict)
    except (NoSuchCard, UsageError) as error:
        # The cards have changed. The error was raised before anything was planned.
        why = f"No further round could be planned: {error.message}"
    if following is not None:
        return ClosedRound(Closing.NEXT, following, verdict.outcome)
    if request.operators == ("auto",) and verdict.too_large and not why:
        why = "No operator type was added, because the sum is already larger than the whole model."
    if why:
        row.details = {**row.details, "reasons": [*row.details["reasons"], why]}
    return _end(job, verdict)


def _add_verdict(session: Session, job: Job, verdict: Verdict) -> VerdictRow:
    now: Any = database_now()
    row = VerdictRow(job_id=job.id, round=job.round, created_at_s=now, **verdict.columns())
    session.add(row)
    session.flush()
    return row


def _end(job: Job, verdict: Verdict) -> ClosedRound:
    job.state, job.ended_at_s = JobState.DONE, database_now()  # type: ignore[assignment]
    return ClosedRound(Closing.DONE, None, verdict.outcome)


def _end_without_sum(session: Session, job: Job, why: str) -> ClosedRound:
    try:
        request = Request.from_json(job.request)
        target, launch = request.target, request.protocol.launch
    except Unreadable:
        target, launch = 0.0, "graph"
    verdict = aggregate((), target=target, launch=launch).withheld(why)
    _add_verdict(session, job, verdict)
    return _end(job, verdict)


def _next_round(
    session: Session, job: Job, request: Request, results: JobResults, verdict: Verdict
) -> int | None:
    """Plan another round if the card ran other operators than predicted, if it showed values that
    decide the work of operators, or if the accuracy loop adds operators."""
    this = session.get_one(Round, (job.id, job.round))
    if this.capture_id is None:
        return None
    without = [defer(tables.Capture.verification)]  # type: ignore[arg-type]
    newest = find_capture(
        session, session.get_one(tables.Capture, this.capture_id, options=without)
    )
    if newest not in (None, this.capture_id):
        reason = _why_next(session, this.capture_id)
        return add_round(session, job, scope=this.operators, capture_id=newest, reason=reason).round
    # Without a whole or without valid readings, more operators do not help. If the sum is too
    # large, each added type makes it larger.
    if request.operators != ("auto",) or verdict.outcome == "none" or verdict.too_large:
        return None
    remember_significant(session, this.operators, "loop")
    if verdict.outcome == "fail":
        added = next_operators(results.parts, significant(session), target=request.target)
        if added:
            remember_significant(session, added, job.id)
            reason = (
                f"accuracy or coverage below the target with {len(this.operators)} operator types"
            )
            scope = [*this.operators, *added]
            return add_round(
                session, job, scope=scope, capture_id=this.capture_id, reason=reason
            ).round
    return None


def _why_next(session: Session, capture_id: int) -> str:
    """Say what a card has shown about a predicted capture. One without calls only asked for the
    kernels.
    """
    if not session.scalar(select(func.count()).where(tables.Call.capture_id == capture_id)):
        return "the card listed its kernels"
    verification = Verification.from_json(session.get_one(tables.Capture, capture_id).verification)
    lacking = len(lacking_values(session, capture_id))
    values = (
        f"the card showed the values that decide the work of {lacking} {plural('tuple', lacking)}"
    )
    other = "the card ran other operators than predicted"
    if not lacking:
        return other
    return (
        f"{other}, and {values.removeprefix('the card ')}"
        if verification.missing or verification.unexpected
        else values
    )
