"""Create a job from a request: find the capture of its model, choose the scope, plan a first round.
The tuples of a sweep are planned in batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

from sqlmodel import Session, col, func, select

from farm.errors import NoSuchJob
from farm.jobs import jobs
from farm.jobs.captures import checked_capture
from farm.jobs.plan import JobPlan, PlanState
from farm.jobs.rounds import (
    add_tuples,
    note_planning,
    roofline_on,
)
from farm.jobs.significant import significant
from farm.jobs.slow_memory import remember_outputs
from farm.requests.resolved import ResolvedRequest
from farm.store import captures, content, tables
from farm.store.database import Database, locked
from farm.store.tables import Job, JobState
from farm.types.format import plural
from farm.types.request import Request
from farm.types.variant import Variant
from farm.verdict.aggregate import next_operators
from farm.verdict.job_results import unscoped_parts

#: Called after each batch of a sweep: the job as planned so far, and the number of combinations
#: tried.
OnGrown = Callable[[JobPlan, int], None]


def open_job(
    database: Database,
    resolved: ResolvedRequest,
    *,
    farm: str = "",
    wait_for_workers: Callable[[], None] = lambda: None,
    grown: OnGrown = lambda plan, tried: None,
) -> JobPlan:
    """Create the job of a request with its first round, without publishing it.

    The tuples of a sweep are added in batches, each in its own transaction: workers can measure the
    first batches while later batches are built. KeyboardInterrupt cancels the job. If the process
    is interrupted in another way, `continue_planning` continues.

    Args:
        farm: see `farm.jobs.jobs.create`.
        wait_for_workers: called between the capture and the query of the cards, whose rows the
            workers write.
        grown: see `OnGrown`.

    Raises:
        UnknownOperator, CaptureError: see `checked_capture`.
        NoSuchCard, UsageError: see `jobs.create`.
    """
    request = resolved.request
    create = functools.partial(
        jobs.create,
        database,
        request,
        resolved.card_ids,
        farm=farm,
        pinned=resolved.pinned,
    )
    if request.sweep is not None:

        def begin(operator_ids: Sequence[str]) -> JobPlan:
            wait_for_workers()
            return create(operator_ids=operator_ids, fully_planned=False)

        return _plan_sweep(database, request, begin, grown)
    capture_id = resolved.capture_id
    if capture_id is None:
        capture_id = checked_capture(database, resolved)
    wait_for_workers()
    variant, title = resolved.variant, resolved.title
    assert variant is not None, "a request without a sweep has a variant"
    with database.read() as session:
        others = content.other_versions(session, variant)
        if others:
            title = variant.with_version(title)
        changed = _changed(session, variant, others, capture_id)
        scope = _first_scope(session, request, capture_id, resolved.card_ids)
        calls = captures.counts(session, capture_id)
        if request.measures_slow_memory:
            remember_outputs(content.tuples_with_ids(session, calls).values())
    plan = create(scope=scope, capture_id=capture_id, title=title)
    return dataclasses.replace(
        plan,
        state=PlanState.OPENED,
        title=title,
        tuples=len(calls),
        calls=sum(calls.values()),
        changed=changed,
    )


def _changed(session: Session, variant: Variant, others: Sequence[str], capture_id: int) -> str:
    """Describe how a user's own model differs from that of its newest earlier job; "" if it does
    not. ``others``: the variant ids of the model's other versions."""
    newest = _newest_job(session, [*others, variant.id])
    if newest is None:
        return _other_dtype(session, variant)
    if newest.variant_id not in others:
        return ""
    device_type = session.get_one(tables.Capture, capture_id).device_type
    added = _calls_by_type(session, variant.id, device_type)
    before = _calls_by_type(session, newest.variant_id, device_type)
    added.subtract(before or added)
    changed_types = [
        f"{number:+} {plural('call', abs(number))} of {name}"
        for name, number in sorted(added.items())
        if number
    ]
    if not changed_types and not session.get_one(tables.ModelVariant, newest.variant_id).version:
        return ""  # an older program stored that job without a version: its code is unknown
    changes = ", ".join(changed_types) or "the same number of calls, but other code or sizes"
    return f"{variant.model} changed since job {newest.id}: {changes}"


def _other_dtype(session: Session, variant: Variant) -> str:
    """Describe that earlier jobs measured a user's own model in another dtype; "" if none did."""
    newest = _newest_job(session, content.other_dtypes(session, variant))
    if newest is None:
        return ""
    before = session.get_one(tables.ModelVariant, newest.variant_id).dtype
    return (
        f"{variant.model} is measured in {variant.dtype}; job {newest.id} measured it in {before}, "
        "so its readings do not serve"
    )


def _newest_job(session: Session, variant_ids: Sequence[str]) -> Job | None:
    of_variants = select(Job).where(col(Job.variant_id).in_(variant_ids))
    return session.exec(of_variants.order_by(col(Job.created_at_s).desc()).limit(1)).first()


def _calls_by_type(session: Session, variant_id: str | None, device_type: str) -> Counter[str]:
    """Return operator type -> number of calls in the newest predicted capture of a variant."""
    capture = tables.Capture
    newest = select(func.max(capture.id)).where(
        capture.variant_id == variant_id,
        capture.device_type == device_type,
        capture.origin == "predicted",
    )
    names = select(tables.Operator.short_name).join(
        tables.Call, col(tables.Call.operator_id) == tables.Operator.id
    )
    return Counter(session.exec(names.where(tables.Call.capture_id == newest.scalar_subquery())))


def continue_planning(
    database: Database, job: Job, grown: OnGrown = lambda plan, tried: None
) -> JobPlan:
    """Continue the interrupted planning of a sweep's job. Safe even if another process plans the
    job at the same time. ``grown``: see `OnGrown`."""
    request = Request.from_json(job.request)
    return _plan_sweep(
        database, request, lambda operator_ids: _add(database, job.id, operator_ids), grown
    )


def _plan_sweep(
    database: Database,
    request: Request,
    begin: Callable[[Sequence[str]], JobPlan],
    grown: OnGrown,
) -> JobPlan:
    from farm.operators.sweep_builder import Expansion

    assert request.sweep is not None, "only a sweep is planned in parts"
    expansion = Expansion(request.sweep)
    plan: JobPlan | None = None
    try:
        for batch in expansion.batches():
            if request.measures_slow_memory:
                remember_outputs(batch)
            with database.write() as session:
                content.store_operators(session, batch)
            operator_ids = [spec.id for spec in batch]
            if plan is None:
                first = begin(operator_ids)
                plan = dataclasses.replace(first, title=str(request.sweep), calls=first.tuples)
            else:
                plan = plan.grown_by(_add(database, plan.job_id, operator_ids))
            plan = dataclasses.replace(plan, left_out=expansion.skipped)
            grown(plan, expansion.tried)
        assert plan is not None, "a sweep without any valid combination was refused before"
        with database.write() as session:
            job = locked(session, Job, plan.job_id)
            if job is not None and job.state == JobState.OPEN:
                note_planning(session, job, ended=True)
    except KeyboardInterrupt:
        if plan is not None:
            jobs.cancel(database, plan.job_id)
        raise
    return dataclasses.replace(plan, state=PlanState.OPENED, left_out=expansion.skipped)


def _add(database: Database, job_id: str, operator_ids: Sequence[str]) -> JobPlan:
    """Add tuples to a job. Raises `NoSuchJob` if the job has ended."""
    with database.write() as session:
        job = locked(session, Job, job_id)
        if job is None or job.state != JobState.OPEN:
            raise NoSuchJob(
                f"Job {job_id} ended before its planning was complete.",
                f"`farm resume --failed {job_id}` continues it.",
            )
        return add_tuples(session, job, operator_ids)


def _first_scope(
    session: Session, request: Request, capture_id: int, card_ids: Sequence[str]
) -> list[str]:
    """Return the operator types of the first round."""
    if request.operators != ("auto",):
        return list(request.operators)
    card = session.get_one(tables.CardRow, card_ids[0])  # cards register before a job is planned
    parts = unscoped_parts(session, capture_id, roofline_on(card, request))
    return next_operators(parts, significant(session), target=request.target)
