"""Closing a round: its verdict, and the next round if one follows. Also the global set of significant operators.

(job, round) is a unique key of the verdict, so that a second caller changes nothing. The verdict and the items of the
next round are one transaction, so that a crash cannot lose a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, select

from farm.errors import NoSuchCard, UnknownOperator, Unreadable, UsageError, did_you_mean
from farm.jobs.items import open_items
from farm.jobs.planning import add_round
from farm.store.content import find_capture
from farm.store.database import Database, database_now, locked
from farm.store.tables import Capture, Job, JobState, Round, SignificantOperator, VerdictRow
from farm.types.request import Request
from farm.verdict.aggregate import aggregate, next_operators
from farm.verdict.evidence import Evidence
from farm.verdict.figures import Part
from farm.verdict.verdict import Verdict


class Closing(StrEnum):
    """The result of closing a round."""

    OPEN = "open"  # some of its items are open; it will be closed later
    ALREADY = "already"  # it has a verdict, or its job has ended
    DONE = "done"  # it was the last round of the job
    NEXT = "next"  # the next round is planned and must be published


@dataclass(frozen=True)
class ClosedRound:
    """The result of closing a round, with the number of the next round and the outcome of the verdict."""

    closing: Closing
    next_round: int | None = None
    outcome: str = ""


def close_round(database: Database, job_id: str, number: int) -> ClosedRound:
    """Aggregate a round once all its items are closed."""
    return _closing(database, job_id, number, _close)


def _closing(database: Database, job_id: str, number: int, close: Callable[[Session, Job], ClosedRound]) -> ClosedRound:
    """Close the newest round of an open job, in one transaction."""
    try:
        with database.write() as session:
            job = locked(session, Job, job_id)
            open_round = job is not None and job.state == JobState.OPEN and number == job.round
            return close(session, job) if job is not None and open_round else ClosedRound(Closing.ALREADY)
    except IntegrityError:
        return ClosedRound(Closing.ALREADY)


def close_known_rounds(database: Database, job_id: str, number: int) -> int | None:
    """Close rounds from this one on while readings serve all their items; returns the first that needs measuring."""
    wanted: int | None = number
    while wanted is not None:
        closed = close_round(database, job_id, wanted)
        if closed.closing is Closing.OPEN:
            return wanted
        wanted = closed.next_round
    return None


def _close(session: Session, job: Job) -> ClosedRound:
    this = session.get_one(Round, (job.id, job.round))
    if this.planned_at_s is None or open_items(session, job.id, job.round):
        return ClosedRound(Closing.OPEN)
    there = select(VerdictRow).where(VerdictRow.job_id == job.id, VerdictRow.round == job.round)
    if session.exec(there).first() is not None:
        return ClosedRound(Closing.ALREADY)
    request = Request.from_json(job.request)
    evidence = Evidence(session, job, job.round)
    verdict = evidence.verdict()
    row = _add_verdict(session, job, verdict)
    following, why = None, ""
    try:
        following = _next_round(session, job, request, evidence.parts, verdict)
    except (NoSuchCard, UsageError) as error:  # the cards have changed; raised before anything is planned
        why = f"No further round could be planned: {error.message}"
    if request.operators == ("auto",) and verdict.too_large and following is None:
        why = why or "No operator type was added: the sum is too large already."
    if why:
        row.details = {**row.details, "reasons": [*row.details["reasons"], why]}
        session.add(row)
    if following is not None:
        return ClosedRound(Closing.NEXT, following, verdict.outcome)
    return _end(session, job, verdict)


def _add_verdict(session: Session, job: Job, verdict: Verdict) -> VerdictRow:
    row = VerdictRow(job_id=job.id, round=job.round, created_at_s=database_now(), **verdict.columns())  # type: ignore[arg-type]
    session.add(row)
    session.flush()
    return row


def _end(session: Session, job: Job, verdict: Verdict) -> ClosedRound:
    job.state, job.ended_at_s = JobState.DONE, database_now()  # type: ignore[assignment]
    session.add(job)
    return ClosedRound(Closing.DONE, None, verdict.outcome)


def end_without_sum(database: Database, job_id: str, number: int, why: str) -> ClosedRound:
    """End a job whose round cannot be judged; its verdict holds the reason. Its readings are kept."""

    def end(session: Session, job: Job) -> ClosedRound:
        try:
            request = Request.from_json(job.request)
            target, launch = request.target, request.protocol.launch
        except Unreadable:
            target, launch = 0.0, "graph"
        verdict = aggregate((), target=target, launch=launch).withheld(why)
        _add_verdict(session, job, verdict)
        return _end(session, job, verdict)

    return _closing(database, job_id, number, end)


def _next_round(session: Session, job: Job, request: Request, parts: Sequence[Part], verdict: Verdict) -> int | None:
    """Plan another round if the card ran other operators than predicted, or if the accuracy loop adds operators."""
    this = session.get_one(Round, (job.id, job.round))
    if this.capture_id is None:
        return None
    predicted = session.get_one(Capture, this.capture_id)
    newest = find_capture(session, predicted)
    if newest is not None and newest.id != this.capture_id:
        reason = "the card ran other operators than predicted"
        return add_round(session, job, scope=this.operators, capture_id=newest.id, reason=reason).round
    # Without a whole, or without valid readings, more operators do not help. Nor if the sum is too large: each type
    # that is added makes it larger.
    if request.operators != ("auto",) or verdict.outcome == "none" or verdict.too_large:
        return None
    remember_significant(session, this.operators, "loop")
    if verdict.outcome == "fail":
        added = next_operators(parts, significant(session), target=request.target)
        if added:
            remember_significant(session, added, job.id)
            reason = f"below the target with {len(this.operators)} operator types"
            scope = [*this.operators, *added]
            return add_round(session, job, scope=scope, capture_id=this.capture_id, reason=reason).round
    return None


def significant(session: Session) -> set[str]:
    """The operator types that the accuracy loop starts with, for every model."""
    return set(session.exec(select(SignificantOperator.name)))


def remember_significant(session: Session, names: Sequence[str], added_by: str) -> None:
    """Add operator types to the global set. Types that it has already are not changed."""
    there, now = significant(session), database_now()
    new = [name for name in dict.fromkeys(names) if name not in there]
    session.add_all(SignificantOperator(name=name, added_by=added_by, created_at_s=now) for name in new)  # type: ignore[arg-type]


def forget_significant(session: Session, names: Sequence[str]) -> None:
    """Remove operator types from the global set.

    Raises:
        UnknownOperator: a type is not in the set.
    """
    known = sorted(significant(session))
    for name in dict.fromkeys(names):
        if (row := session.get(SignificantOperator, name)) is None:
            raise UnknownOperator(
                f"'{name}' is not among the significant operators.",
                did_you_mean(name, known) or f"The set has: {', '.join(known) or 'none'}.",
            )
        session.delete(row)
