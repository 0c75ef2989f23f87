"""From a request to a job: capture the model, check the requested operators, choose the scope, plan the first round.

Torch is imported only if a model has to be captured; a variant with a capture in the database costs one query.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlmodel import Session, col, select

from farm.devices.host import torch_version
from farm.errors import CaptureError, NoSuchJob, UnknownOperator, UsageError, did_you_mean
from farm.jobs import jobs
from farm.jobs.closing import significant
from farm.jobs.planning import PlannedRound, add_tuples, note_planning, roofline_on, tuples_with_ids
from farm.models.catalog import title_of
from farm.requests.memory import WithMemory, check_step_fits
from farm.store.content import (
    counts,
    find_capture,
    share_tokens,
    store_extraction,
    store_operators,
    store_values,
)
from farm.store.database import Database
from farm.store.rows import fetch, locked
from farm.store.tables import Call, Capture, CardRow, Job, JobState, ModelVariant, Operator, SoftwareRow
from farm.types.protocol import Variant
from farm.types.request import Request, named
from farm.types.tuple import OperatorTuple
from farm.verdict.aggregate import next_operators
from farm.verdict.evidence import unscoped_parts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuples:
    """The operator tuples of a model, all of them stored."""

    calls: Mapping[str, int]  # tuple id -> calls of it in one pass
    capture_id: int


@dataclass(frozen=True)
class OpenedJob:
    """A new job with its first round."""

    job_id: str
    round: int
    title: str
    tuples: int
    calls: int
    new: int  # items to measure now
    reused: int  # items that a reading served
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> impossible combinations of a sweep

    def to_json(self) -> dict[str, object]:
        return {
            "job": self.job_id,
            "title": self.title,
            "tuples": self.tuples,
            "calls": self.calls,
            "items_new": self.new,
            "items_reused": self.reused,
        }


def open_job(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    tuples: Tuples | None = None,
    title: str = "",
    farm: str = "",
    pinned: bool = False,
    ready: Callable[[], None] = lambda: None,
    grown: Callable[[OpenedJob, int], None] = lambda opened, tried: None,
) -> OpenedJob:
    """Create the job of a request with its first round; nothing is published.

    The tuples of a sweep are added in batches, each in its own transaction, so that the first are measured while the
    others are built. KeyboardInterrupt cancels the job; `continue_planning` continues a planning that was interrupted
    otherwise.

    Args:
        tuples: the tuples of a model, if `tuples_of` was called before.
        title: the title of a model that is not in the catalog.
        farm, pinned: see `jobs.create`.
        grown: called after each batch of a sweep with the job as planned so far and the number of combinations tried.
        ready: called after the capture and before the cards are looked up: workers may start meanwhile.

    Raises:
        UnknownOperator, CaptureError: see `tuples_of`.
        NoSuchCard, UsageError: see `jobs.create`.
    """
    create = functools.partial(jobs.create, database, request, card_ids, farm=farm, pinned=pinned)
    if request.sweep is not None:

        def begin(operator_ids: Sequence[str]) -> PlannedRound:
            ready()
            return create(operator_ids=operator_ids, whole=False)

        return _plan_sweep(database, request, begin, grown)
    if tuples is None:
        tuples = tuples_of(database, request, card_ids)
    ready()
    with database.read() as session:
        scope = _first_scope(session, request, tuples.capture_id, card_ids)
        if request.placements != "none":
            _look_at_outputs(tuples_with_ids(session, tuples.calls).values())
    assert request.variant is not None
    title = title or title_of(request.variant)
    planned = create(scope=scope, capture_id=tuples.capture_id, title=title)
    number, calls = len(tuples.calls), sum(tuples.calls.values())
    return OpenedJob(planned.job_id, planned.round, title, number, calls, planned.new, planned.reused)


def continue_planning(
    database: Database, job: Job, grown: Callable[[OpenedJob, int], None] = lambda opened, tried: None
) -> OpenedJob:
    """Continue the interrupted planning of a sweep's job. Harmless while another process plans it.

    Args:
        grown: see `open_job`.
    """
    request = Request.from_json(job.request)
    return _plan_sweep(database, request, lambda operator_ids: _add(database, job.id, operator_ids), grown)


def _plan_sweep(
    database: Database,
    request: Request,
    begin: Callable[[Sequence[str]], PlannedRound],
    grown: Callable[[OpenedJob, int], None],
) -> OpenedJob:
    from farm.operators.sweep import Expansion

    assert request.sweep is not None, "only a sweep is planned in parts"
    expansion = Expansion(request.sweep)
    opened: OpenedJob | None = None
    try:
        for batch in expansion.batches():
            if request.placements != "none":
                _look_at_outputs(batch)
            with database.write() as session:
                store_operators(session, batch)
            ids = [spec.id for spec in batch]
            planned = begin(ids) if opened is None else _add(database, opened.job_id, ids)
            before = opened or OpenedJob(planned.job_id, planned.round, str(request.sweep), 0, 0, 0, 0)
            tuples = before.tuples + len(ids)
            new, reused = before.new + planned.new, before.reused + planned.reused
            opened = dataclasses.replace(
                before, tuples=tuples, calls=tuples, new=new, reused=reused, left_out=expansion.skipped
            )
            grown(opened, expansion.tried)
        assert opened is not None, "a sweep of nothing possible has been refused"
        with database.write() as session:
            job = locked(session, Job, opened.job_id)
            if job is not None and job.state == JobState.OPEN:
                note_planning(session, job, ended=True)
    except KeyboardInterrupt:
        if opened is not None:
            jobs.cancel(database, opened.job_id)
        raise
    return dataclasses.replace(opened, left_out=expansion.skipped)


def _look_at_outputs(specs: Iterable[OperatorTuple]) -> None:
    """Compute the outputs of tuples before a transaction needs them: that imports torch and runs the operators."""
    from farm.operators.replay import offloadable

    for spec in specs:
        offloadable(spec)


def _add(database: Database, job_id: str, operator_ids: Sequence[str]) -> PlannedRound:
    """Raises:
    NoSuchJob: the job has ended meanwhile.
    """
    with database.write() as session:
        job = locked(session, Job, job_id)
        if job is None or job.state != JobState.OPEN:
            raise NoSuchJob(
                f"Job {job_id} ended before its planning was complete.", f"`farm retry {job_id}` continues it."
            )
        return add_tuples(session, job, operator_ids)


def tuples_of(database: Database, request: Request, card_ids: Sequence[str], card: WithMemory | None = None) -> Tuples:
    """The tuples of a model, captured now unless the database has them; checks the operators of the request.

    Args:
        card: the card with the least memory, if the cards are not registered yet.

    Raises:
        UnknownOperator: none of the named operators is in the model.
        CaptureError: the model cannot be captured without gaps.
        UsageError: a training step needs more memory than a card has.
    """
    if card is None:
        with database.read() as session:
            cards = fetch(session, CardRow, card_ids).values()
        card = min(cards, key=lambda one: one.memory_bytes, default=None)
    device_type, torch = _device_and_torch(database, card_ids)
    capture_id = capture_for(database, request, device_type=device_type, torch=torch, card=card)
    with database.read() as session:
        calls = counts(session, capture_id)
        if wanted := named(request.operators):
            there = {operator.short_name for operator in fetch(session, Operator, calls).values()}
            if not there.intersection(wanted):
                near = next(filter(None, (did_you_mean(name, there) for name in wanted)), "")
                raise UnknownOperator(
                    f"{request.title} has none of the operators {', '.join(wanted)}.",
                    f"{near} It has {', '.join(sorted(there))}.".strip(),
                )
    return Tuples(calls, capture_id)


def capture_all_layers(database: Database, request: Request, card_ids: Sequence[str]) -> None:
    """Capture all layers of a model of which only some are measured: its report has a sum for all layers."""
    if request.variant is None or not request.variant.layers:
        return
    # Without running it for its values: all layers may not fit on any machine.
    protocol = request.protocol.with_data("normal")
    whole = request.replace(variant=dataclasses.replace(request.variant, layers=0), protocol=protocol)
    device_type, torch = _device_and_torch(database, card_ids)
    try:
        capture_for(database, whole, device_type=device_type, torch=torch)
    except (CaptureError, UsageError) as error:
        _log.warning("%s has no sum for all layers in its report: %s", request.variant, error.message)


def _device_and_torch(database: Database, card_ids: Sequence[str]) -> tuple[str, str]:
    """(device type, torch version) to capture for: those of the cards, if they are registered."""
    local = torch_version()
    with database.read() as session:
        card = session.get(CardRow, card_ids[0]) if card_ids else None
        software = session.get(SoftwareRow, card.software_id) if card and card.software_id else None
    device_type = "cuda" if card_ids and card_ids[0].startswith("GPU-") else "cpu"
    simulated = card is not None and card.kind == "simulated"
    return device_type, local if software is None or simulated else software.torch


def _first_scope(session: Session, request: Request, capture_id: int, card_ids: Sequence[str]) -> list[str]:
    """The operator types of the first round."""
    if request.operators != ("auto",):
        return list(request.operators)
    roofline = roofline_on(session.get_one(CardRow, card_ids[0]), request)  # cards register before a job is planned
    parts = unscoped_parts(session, capture_id, roofline)
    return next_operators(parts, significant(session), target=request.target)


def capture_for(
    database: Database, request: Request, *, device_type: str, torch: str, card: WithMemory | None = None
) -> int:
    """The id of the capture of the request's model, captured now unless the database has one.

    Args:
        card: the card whose memory a training step must fit.

    Raises:
        CaptureError: the model cannot be captured without gaps.
        UsageError: a training step needs more memory than the card has.
        Unreadable: the ids of the model's own text are not on this host.
    """
    assert request.variant is not None
    if request.variant.text:
        with database.write() as session:
            share_tokens(session, request.variant.text)
    how = request.protocol
    like = Capture(
        variant_id=request.variant.id, device_type=device_type, grad=how.grad, torch=torch, launch=how.launch
    )
    with database.read() as session:
        known = find_capture(session, like)
    capture_id = known.id if known is not None else None
    if capture_id is None:
        from farm.training.extract import extract

        extraction = extract(request.variant, device_type=device_type, grad=how.grad)
        if (refusal := extraction.refusal(request.variant.model)) is not None:
            raise refusal
        if card is not None:
            check_step_fits(request.variant, card, extraction.least_peak_bytes)
        with database.write() as session:
            capture_id = store_extraction(session, request.variant, extraction, like)
    if request.protocol.data == "seen":
        _look_at_values(database, capture_id, request.variant)
    return capture_id


def _look_at_values(database: Database, capture_id: int, variant: Variant) -> None:
    """Store the values of the activations of each call, from a run of the model, unless they are stored."""
    unseen = select(Call.call_index).where(Call.capture_id == capture_id, col(Call.data).is_(None))
    with database.read() as session:
        if session.exec(unseen).first() is None:
            return
        row = session.get(ModelVariant, variant.id)
    from farm.operators.observed_values import observe_values

    seen = observe_values(variant, row.flops if row else 0)
    if seen is None:
        _log.warning("Using random normal inputs: %s is too large to run once for real values.", variant)
    with database.write() as session:
        store_values(session, capture_id, seen or {})
