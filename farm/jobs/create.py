"""Create a job from a request: capture the model, check the requested operators, choose the scope,
plan a first round.

A dry run of a job uses the same code: it copies cards, captures and readings into a temporary
database and plans there. It never writes to the farm's database.

Torch is imported only if a model must be captured. If the database has a capture of the variant,
one query is enough."""

from __future__ import annotations

import dataclasses
import functools
import logging
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

from sqlalchemy import insert
from sqlmodel import Session, SQLModel, col, func, select

from farm.devices.device import Card
from farm.devices.host import links_of
from farm.devices.software import torch_version
from farm.errors import CaptureError, NoSuchJob, UnknownOperator, UsageError, did_you_mean
from farm.jobs import jobs
from farm.jobs.balance import together_s
from farm.jobs.cards import ensure_card, has_installed_software
from farm.jobs.rounds import (
    PlannedRound,
    add_tuples,
    note_planning,
    roofline_on,
    significant,
    tuples_with_ids,
)
from farm.models.catalog import title_of
from farm.requests.card_selection import CardLike
from farm.requests.memory import check_step_fits
from farm.store import content, tables
from farm.store.database import Database, fetch, in_batches, locked
from farm.store.tables import Item, ItemState, Job, JobState
from farm.types.format import plural
from farm.types.protocol import Variant
from farm.types.request import Request, named
from farm.types.tuple import OperatorTuple
from farm.verdict.aggregate import next_operators
from farm.verdict.evidence import unscoped_parts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuples:
    """The operator tuples of a model, which the database contains."""

    calls: Mapping[str, int]  # tuple id -> number of calls in one pass
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
    reused: int  # items closed with an existing reading
    left_out: Mapping[str, int] = field(
        default_factory=dict
    )  # reason -> number of impossible combinations of a sweep
    expected_s: float = 0.0  # of card time for the new items
    # text for people: how a user's own model differs from that of its newest earlier job
    changed: str = ""

    def to_json(self) -> dict[str, object]:
        about = {name: getattr(self, name) for name in ("title", "tuples", "calls")}
        return {"job": self.job_id, **about, "items_new": self.new, "items_reused": self.reused}


class OfJob(TypedDict, total=False):
    """Keywords of `jobs.create`; the title is that of a model that is not in the catalog."""

    title: str
    farm: str
    pinned: bool


def open_job(
    database: Database,
    request: Request,
    card_ids: Sequence[str],
    *,
    tuples: Tuples | None = None,
    ready: Callable[[], None] = lambda: None,
    grown: Callable[[OpenedJob, int], None] = lambda opened, tried: None,
    **of_job: Unpack[OfJob],
) -> OpenedJob:
    """Create the job of a request with its first round, without publishing it.

    The tuples of a sweep are added in batches, each in its own transaction: workers can measure the
    first batches while later batches are built. KeyboardInterrupt cancels the job. If the process
    is interrupted in another way, `continue_planning` continues.

    Args:
        tuples: the tuples of a model, if the caller has called `tuples_of`.
        ready: called between the capture and the query of the cards. It may wait for workers to
            start.
        grown: called after each batch of a sweep with the job as planned so far and the number of
            combinations tried.
        of_job: see `OfJob`.

    Raises:
        UnknownOperator, CaptureError: see `tuples_of`.
        NoSuchCard, UsageError: see `jobs.create`.
    """
    create = functools.partial(jobs.create, database, request, card_ids, **of_job)
    if request.sweep is not None:

        def begin(operator_ids: Sequence[str]) -> PlannedRound:
            ready()
            return create(operator_ids=operator_ids, whole=False)

        return _plan_sweep(database, request, begin, grown)
    if tuples is None:
        tuples = tuples_of(database, request, card_ids)
    ready()
    assert request.variant is not None
    title = of_job.get("title") or title_of(request.variant)
    with database.read() as session:
        if others := content.other_versions(session, request.variant):
            title = request.variant.with_version(title)
        changed = _changed(session, request.variant, others, tuples.capture_id)
        scope = _first_scope(session, request, tuples.capture_id, card_ids)
        if request.placements != "none":
            _look_at_outputs(tuples_with_ids(session, tuples.calls).values())
    planned = create(scope=scope, capture_id=tuples.capture_id, title=title)
    return OpenedJob(
        planned.job_id,
        planned.round,
        title,
        len(tuples.calls),
        sum(tuples.calls.values()),
        planned.new,
        planned.reused,
        expected_s=planned.expected_s,
        changed=changed,
    )


def _changed(session: Session, variant: Variant, others: Sequence[str], capture_id: int) -> str:
    """Describe how a user's own model differs from that of its newest earlier job; "" if it does
    not. ``others``: the variant ids of the model's other versions."""
    its = (
        select(Job)
        .where(col(Job.variant_id).in_([*others, variant.id]))
        .order_by(col(Job.created_at_s).desc())
    )
    newest = session.exec(its.limit(1)).first()
    if newest is None:
        return _other_dtype(session, variant)
    if newest.variant_id not in others:
        return ""
    device_type = session.get_one(tables.Capture, capture_id).device_type
    now, before = (
        _calls_by_type(session, str(one), device_type) for one in (variant.id, newest.variant_id)
    )
    now.subtract(before or now)
    told = [
        f"{number:+} {plural('call', abs(number))} of {name}"
        for name, number in sorted(now.items())
        if number
    ]
    if not told and not session.get_one(tables.ModelVariant, newest.variant_id).version:
        return ""  # an older program stored that job without a version: its code is unknown
    changes = ", ".join(told) or "the same number of calls, but other code or sizes"
    return f"{variant.model} changed since job {newest.id}: {changes}"


def _other_dtype(session: Session, variant: Variant) -> str:
    """Describe that earlier jobs measured a user's own model in another dtype; "" if none did."""
    ids = content.other_dtypes(session, variant)
    newest = session.exec(
        select(Job)
        .where(col(Job.variant_id).in_(ids))
        .order_by(col(Job.created_at_s).desc())
        .limit(1)
    ).first()
    if newest is None:
        return ""
    before = session.get_one(tables.ModelVariant, newest.variant_id).dtype
    return (
        f"{variant.model} is measured in {variant.dtype}; job {newest.id} measured it in {before}, "
        "so its readings do not serve"
    )


def _calls_by_type(session: Session, variant_id: str, device_type: str) -> Counter[str]:
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
    database: Database,
    job: Job,
    grown: Callable[[OpenedJob, int], None] = lambda opened, tried: None,
) -> OpenedJob:
    """Continue the interrupted planning of a sweep's job. Safe even if another process plans the
    job at the same time. ``grown``: see `open_job`."""
    request = Request.from_json(job.request)
    return _plan_sweep(
        database, request, lambda operator_ids: _add(database, job.id, operator_ids), grown
    )


def _plan_sweep(
    database: Database,
    request: Request,
    begin: Callable[[Sequence[str]], PlannedRound],
    grown: Callable[[OpenedJob, int], None],
) -> OpenedJob:
    from farm.operators.sweep_builder import Expansion

    assert request.sweep is not None, "only a sweep is planned in parts"
    expansion = Expansion(request.sweep)
    opened: OpenedJob | None = None
    try:
        for batch in expansion.batches():
            if request.placements != "none":
                _look_at_outputs(batch)
            with database.write() as session:
                content.store_operators(session, batch)
            ids = [spec.id for spec in batch]
            planned = begin(ids) if opened is None else _add(database, opened.job_id, ids)
            before = opened or OpenedJob(
                planned.job_id, planned.round, str(request.sweep), 0, 0, 0, 0
            )
            tuples = before.tuples + planned.subjects  # without those of earlier batches
            new, reused = before.new + planned.new, before.reused + planned.reused
            opened = dataclasses.replace(
                before,
                tuples=tuples,
                calls=tuples,
                new=new,
                reused=reused,
                left_out=expansion.skipped,
            )
            grown(opened, expansion.tried)
        assert opened is not None, "a sweep without any valid combination was refused before"
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
    """Compute the outputs of tuples before the transaction that needs them, since this imports
    torch and takes long.
    """
    from farm.operators.rebuild import offloadable

    for spec in specs:
        offloadable(spec)


def _add(database: Database, job_id: str, operator_ids: Sequence[str]) -> PlannedRound:
    """Add tuples to a job. Raises `NoSuchJob` if the job has ended."""
    with database.write() as session:
        job = locked(session, Job, job_id)
        if job is None or job.state != JobState.OPEN:
            raise NoSuchJob(
                f"Job {job_id} ended before its planning was complete.",
                f"`farm resume --failed {job_id}` continues it.",
            )
        return add_tuples(session, job, operator_ids)


def tuples_of(
    database: Database, request: Request, card_ids: Sequence[str], card: CardLike | None = None
) -> Tuples:
    """Return the tuples of a model and check the operators of the request. Capture the model if the
    database has none. ``card``: the card with the least memory; None: query the registered cards
    for it. Raises `UnknownOperator` if none of the named operators is in the model; `CaptureError`
    if the model cannot be captured without gaps; `UsageError` if a training step needs more memory
    than a card has."""
    if card is None:
        with database.read() as session:
            cards = fetch(session, tables.CardRow, card_ids).values()
        card = min(cards, key=lambda one: one.memory_bytes, default=None)
    device_type, torch = _device_and_torch(database, card_ids)
    capture_id = capture_for(database, request, device_type=device_type, torch=torch, card=card)
    with database.read() as session:
        calls = content.counts(session, capture_id)
        if wanted := named(request.operators):
            of_pass = (
                select(tables.Operator.short_name)
                .join(tables.Call)
                .where(tables.Call.capture_id == capture_id)
            )
            there = set(session.exec(of_pass))
            if there and not there.intersection(wanted):
                near = next(filter(None, (did_you_mean(name, there) for name in wanted)), "")
                raise UnknownOperator(
                    f"{request.title} has none of the operators {', '.join(wanted)}.",
                    f"{near} Its operators are {', '.join(sorted(there))}.".strip(),
                )
    return Tuples(calls, capture_id)


def capture_all_layers(database: Database, request: Request, card_ids: Sequence[str]) -> None:
    """If a request measures only some layers of a model, capture all layers: the report has a sum
    for all layers.
    """
    if request.variant is None or not request.variant.layers or request.variant.compile:
        return
    # Do not run the model for its activation values: all layers together may not fit on any
    # machine.
    protocol = request.protocol.with_data("normal")
    whole = request.replace(
        variant=dataclasses.replace(request.variant, layers=0), protocol=protocol
    )
    device_type, torch = _device_and_torch(database, card_ids)
    try:
        capture_for(database, whole, device_type=device_type, torch=torch)
    except (CaptureError, UsageError) as error:
        _log.warning(
            "The report of %s will have no sum over all layers: %s", request.variant, error.message
        )


def _device_and_torch(database: Database, card_ids: Sequence[str]) -> tuple[str, str]:
    """Return (device type, torch version) for the capture. Cards that are not registered get this
    host's version.
    """
    local = torch_version()
    with database.read() as session:
        card = session.get(tables.CardRow, card_ids[0]) if card_ids else None
        software = (
            session.get(tables.SoftwareRow, card.software_id) if card and card.software_id else None
        )
    device_type = "cuda" if card_ids and card_ids[0].startswith("GPU-") else "cpu"
    simulated = card is not None and card.kind == "simulated"
    return device_type, local if software is None or simulated else software.torch


def _first_scope(
    session: Session, request: Request, capture_id: int, card_ids: Sequence[str]
) -> list[str]:
    """Return the operator types of the first round."""
    if request.operators != ("auto",):
        return list(request.operators)
    card = session.get_one(tables.CardRow, card_ids[0])  # cards register before a job is planned
    parts = unscoped_parts(session, capture_id, roofline_on(card, request))
    return next_operators(parts, significant(session), target=request.target)


def capture_for(
    database: Database,
    request: Request,
    *,
    device_type: str,
    torch: str,
    card: CardLike | None = None,
) -> int:
    """Return the id of the capture of the request's model. Capture the model if the database has no
    capture; a training step must fit in the memory of ``card``.

    Raises:
        CaptureError: the model cannot be captured without gaps.
        UsageError: a training step needs more memory than the card has.
        Unreadable: the request has a text whose token ids are neither in this process nor in the
            database.
    """
    assert request.variant is not None
    if request.variant.text:
        with database.write() as session:
            content.share_tokens(session, request.variant.text)
    how = request.protocol
    compiled = bool(request.variant.compile)
    like = tables.Capture(
        variant_id=request.variant.id,
        device_type=device_type,
        grad=how.grad,
        torch=torch,
        launch=how.launch,
        card_model=card.model if compiled and card is not None else "",
    )
    with database.read() as session:
        capture_id = content.find_capture(session, like)
    if capture_id is None and compiled:
        # Only a card can list the kernels. The first item compiles the model; its list of kernels
        # is the next round.
        with database.write() as session:
            content.store_variant(session, request.variant)
            return content.store_capture(session, (), like)
    if capture_id is None:
        from farm.training.extract import extract

        extraction = extract(request.variant, device_type=device_type, grad=how.grad)
        if (refusal := extraction.refusal(request.variant.model)) is not None:
            raise refusal
        if card is not None:
            check_step_fits(request.variant, card, extraction.least_peak_bytes)
        with database.write() as session:
            capture_id = content.store_extraction(session, request.variant, extraction, like)
    if request.protocol.data == "seen":
        _look_at_values(database, capture_id, request.variant)
    return capture_id


def _look_at_values(database: Database, capture_id: int, variant: Variant) -> None:
    """Run the model once and store the activation values of each call, unless the database has
    them.
    """
    unseen = select(tables.Call.call_index).where(
        tables.Call.capture_id == capture_id, col(tables.Call.data).is_(None)
    )
    with database.read() as session:
        if session.exec(unseen).first() is None:
            return
        row = session.get(tables.ModelVariant, variant.id)
    from farm.operators.observed_values import observe_values

    seen = observe_values(variant, row.flops if row else 0)
    if seen is None:
        _log.warning(
            "Using random normal inputs: %s is too large to run once for real values.", variant
        )
    with database.write() as session:
        content.store_values(session, capture_id, seen or {})


# ------------------------------------------------------------------------------------------ dry
# runs


@dataclass(frozen=True)
class JobPreview:
    """The plan of a job. If two jobs of a command would measure the same item, it is new in the
    first job only.
    """

    title: str
    cards: tuple[str, ...]  # ids
    tuples: int
    calls: int
    new: int  # items to measure
    reused: int  # items with an existing reading, or measured by an earlier job of the command
    expected_s: float  # if the cards have no other work and keep their recent speed

    def to_json(self) -> dict[str, Any]:
        keys = {"new": "items_new", "reused": "items_reused"}
        return {keys.get(name, name): value for name, value in dataclasses.asdict(self).items()}


#: The time from a command until the first measurement, if the command starts the workers: servers,
#: worker processes, the import of torch, and the capture of a model. Runs with nothing to measure
#: but one item took 13 s on two cores.
START_S = 10.0


@contextmanager
def dry_running(database: Database | None, own: Collection[Card] = ()) -> Iterator[DryRun]:
    """Provide a dry run of the jobs of one command. ``database`` is None if it does not exist yet.
    ``own``: cards of this host whose workers would start with the jobs; only readings of the
    software that is installed here are reused for them."""
    temporary = tempfile.TemporaryDirectory(prefix="farm-dry-run-")
    with temporary as folder, closing(Database(f"sqlite:///{Path(folder, 'farm.db')}")) as scratch:
        scratch.create_or_check()
        yield DryRun(database, scratch, own)


class DryRun:
    """Plans jobs in a temporary database; see `dry_running`."""

    def __init__(self, database: Database | None, scratch: Database, own: Collection[Card]) -> None:
        self.database = database
        self.scratch = scratch
        self.met: set[tuple[str, str, str]] = (
            set()
        )  # items that earlier jobs of this command measure, see `preview`
        self.to_start = {
            card.id for card in own
        }  # cards whose workers no earlier job of this command starts
        for table in (
            tables.SoftwareRow,
            tables.CardRow,
            tables.ProtocolRow,
            tables.SignificantOperator,
        ):
            self._copy(table)
        with self.scratch.write() as session:
            for card in own:  # each is planned as if its worker had registered it
                ensure_card(session, card)
                session.get_one(tables.CardRow, card.id).links = links_of(card)
                if not has_installed_software(session, card):
                    session.get_one(tables.CardRow, card.id).software_id = None

    def preview(self, request: Request, card_ids: Sequence[str]) -> JobPreview:
        """Plan a job and return the plan. Raises the errors of `open_job`."""
        tuples = None
        if request.variant is not None:
            captures = select(tables.Capture.id).where(
                tables.Capture.variant_id == request.variant.id
            )
            called = select(tables.Call.operator_id).where(
                col(tables.Call.capture_id).in_(captures)
            )
            self._copy(tables.ModelVariant, tables.ModelVariant.id == request.variant.id)
            self._copy(tables.Operator, col(tables.Operator.id).in_(called))
            self._copy(tables.Capture, tables.Capture.variant_id == request.variant.id)
            self._copy(tables.Call, col(tables.Call.capture_id).in_(captures))
            tuples = tuples_of(self.scratch, request, card_ids)
            for subject_ids in in_batches([*tuples.calls, request.variant.id]):
                self._copy(tables.ReadingRow, col(tables.ReadingRow.subject_id).in_(subject_ids))
        elif request.sweep is not None:
            of_its_kind = select(tables.Operator.id).where(
                tables.Operator.short_name == request.sweep.operator
            )
            self._copy(tables.ReadingRow, col(tables.ReadingRow.subject_id).in_(of_its_kind))
        opened = open_job(self.scratch, request, card_ids, tuples=tuples)
        new, left_s = 0, defaultdict[str, float](float)
        with self.scratch.read() as session:
            waiting = select(Item).where(
                Item.job_id == opened.job_id, Item.state == ItemState.WAITING
            )
            for item in session.exec(waiting):
                scope = item.card_model if item.role == "tuple" else item.card_id
                subject = (item.subject_id, item.protocol_id, scope)
                if request.reuse == "none" or subject not in self.met:
                    new += 1
                    left_s[item.card_id] += item.expected_s
                    self.met.add(subject)
        expected_s = 0.0
        if left_s:
            with (self.database or self.scratch).read() as session:
                expected_s = together_s(session, left_s)
        if self.to_start.intersection(left_s):  # the workers of all cards start at the same time
            self.to_start.clear()
            expected_s += START_S
        known = opened.new + opened.reused - new
        return JobPreview(
            opened.title, tuple(card_ids), opened.tuples, opened.calls, new, known, expected_s
        )

    def _copy(self, table: type[SQLModel], *where: Any) -> None:
        if self.database is None:
            return
        of = table.__table__  # type: ignore[attr-defined]
        with self.database.read() as session:
            rows = [dict(row) for row in session.execute(select(of).where(*where)).mappings()]
        if rows:
            with self.scratch.write() as session:
                session.execute(insert(of).prefix_with("OR IGNORE", dialect="sqlite"), rows)
