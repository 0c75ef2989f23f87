"""The memory of a training step over time, from a capture. Times of its calls are readings or
estimates.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlmodel import Session, col, select

from farm.addons.memory.memory_options import Amount
from farm.addons.memory.offload_plan import OffloadPlans, plan_offload
from farm.addons.memory.plans import offload_json
from farm.addons.memory.slow_costs import MeasuredSlow, read_slow, slow_costs
from farm.addons.memory.transfers import Offload, Wire
from farm.errors import CaptureError, TupleRejected, UsageError, did_you_mean
from farm.operators.captured import CapturedCall, CapturedPass, CapturedTensor
from farm.report import report as reports
from farm.store import tables
from farm.store.card_models import peaks_of
from farm.store.job_ids import find_job
from farm.subjects.needed import needed_tuple
from farm.training.tensor_lifetime import Life, PeriodInterval, allocated_peak_bytes
from farm.types.card_kind import OfCardKind
from farm.types.data_sheets import data_sheets, sheet_name_of
from farm.types.details import Details
from farm.types.fields import LARGEST_NUMBER
from farm.types.fingerprint import median_fingerprint
from farm.types.format import count_of, percent
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.roofline import roofline_of
from farm.types.tuple import OperatorTuple
from farm.types.variant import Variant
from farm.verdict.corrections import cost_in_model
from farm.verdict.model_readings import select_for_model

if TYPE_CHECKING:
    from farm.models.resolved import ResolvedModel
    from farm.operators.cost import Cost

LENGTHS_US = (10.0, 100.0, 1e3, 1e4, 1e5)
SIZES_BYTES = (1e5, 1e6, 1e7, 1e8, 1e9)
_MOST_CAPTURES = 16
LONGEST = 10  # number of tensors in the table of the most inactive tensors


@dataclass(frozen=True)
class CallTimes(OfCardKind):
    """The time of one call of each tuple on a card: from a reading, or estimated by the
    roofline.
    """

    card: str  # the card's model, or part of it
    kind: str = "cuda"  # cuda or cpu
    # time of one call from a reading, by tuple id
    read_us: Mapping[str, float] = field(default_factory=dict)
    readings: str = ""  # origin of `read_us`, as text; "" without readings
    job_id: str = ""  # of the job that measured the readings; "" if the user named no job
    # the measured peaks of the card; None if they are unknown
    fingerprint: Mapping[str, Any] | None = None

    def estimate_us(self, spec: OperatorTuple, cost: Cost) -> float:
        floating = (
            tensor.dtype for tensor in spec.tensors if tensor.dtype.startswith(("float", "bfloat"))
        )
        dtype = next(floating, "float32")
        return roofline_of(self.kind, self.card, self.fingerprint, dtype=dtype).estimate_us(
            cost.flops, cost.bytes, spec.short_name
        )


@dataclass(frozen=True)
class MeasuredPeak:
    """The peak of PyTorch's allocator, measured on a card during the whole step."""

    card: str
    allocated_bytes: int
    reserved_bytes: int | None
    workspace_bytes: int | None  # part of the allocated bytes: cuBLAS's workspaces


@dataclass(frozen=True)
class Fit:
    """The largest batch whose peak is at most ``limit_bytes``."""

    limit_bytes: int
    batch: int
    allocated_peak_bytes: int
    exact: bool  # the next batch was captured and does not fit
    peaks_bytes: dict[int, int]  # by captured batch


@dataclass(frozen=True)
class Recomputed:
    """The effect of recomputing modules (comma-separated paths) in the backward pass instead of
    keeping activations.
    """

    modules: str
    peak_bytes: int
    freed_bytes: int
    calls: int
    time_us: float


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step of a variant."""

    model: ResolvedModel
    variant: Variant
    times: CallTimes
    life: Life
    costs: Mapping[str, Cost]  # FLOPs and bytes by tuple id
    read_peak: MeasuredPeak | None = None  # None if the whole step has no reading on that card
    fit: Fit | None = None
    offload: Offload | None = None
    recomputed: tuple[Recomputed, ...] = ()
    offload_plans: OffloadPlans | None = None

    @property
    def capture(self) -> CapturedPass:
        return self.life.capture

    @property
    def title(self) -> str:
        return self.model.title_of(self.variant)

    @property
    def peak_bytes(self) -> int:
        return self.life.held_bytes[self.life.peak]

    @property
    def read_calls(self) -> int:
        """Number of calls whose time comes from a reading."""
        return sum(call.tuple_id in self.times.read_us for call in self.capture.calls)

    @property
    def read_share(self) -> float:
        """Share of the step's time that comes from readings, 0 to 1; the rest is estimated."""
        calls = zip(self.capture.calls, self.life.times_us, strict=True)
        read_us = sum(time_us for call, time_us in calls if call.tuple_id in self.times.read_us)
        return read_us / self.life.step_us if read_us else 0.0

    @property
    def sheet(self) -> str:
        """Name of the data sheet for the card; the card's model if there is no data sheet."""
        return sheet_name_of(self.times.card) or self.times.card

    @property
    def clock(self) -> str:
        """Where the times come from, as text."""
        by = (
            "typical peak rates of a CPU"
            if self.times.is_cpu
            else f"the peak rates of the {self.sheet}"
        )
        estimates = f"estimated from {by} and the time of a launch"
        if not self.read_calls:
            return f"a lower bound, {estimates}"
        calls = len(self.capture.calls)
        origin = f"{self.read_calls} of {calls} calls: {self.times.readings}"
        if self.read_calls == calls:
            return f"{percent(self.read_share)} of the step measured ({origin})"
        return (
            f"{percent(self.read_share)} of this sum measured ({origin}); the rest is a lower "
            f"bound, {estimates}"
        )

    @property
    def clock_name(self) -> str:
        """Short form of `clock` for charts."""
        return (
            f"{percent(self.read_share)} measured, rest estimated"
            if self.read_calls
            else "estimated"
        )

    @property
    def predicted(self) -> str:
        """A note if the operators were captured without this kind of card; otherwise ""."""
        note = "The step was captured on the CPU. A card may run other operators."
        return note if self.capture.device_type != self.times.kind else ""

    @functools.cached_property
    def allocated_peak_bytes(self) -> int:
        return allocated_peak_bytes(self.capture)

    @property
    def unseen_bytes(self) -> int | None:
        """Allocated bytes at the peak that do not belong to a captured tensor: workspaces of
        libraries, and tensors of operators that only the card runs. None without a measured
        peak."""
        return (
            None
            if self.read_peak is None
            else self.read_peak.allocated_bytes - self.allocated_peak_bytes
        )

    @property
    def unseen_why(self) -> str:
        """Where `unseen_bytes` come from, or why they are unknown, as text."""
        peak = self.read_peak
        if self.times.is_cpu:
            return "unknown: on a CPU, allocations of libraries are not counted"
        if peak is None:
            return f"unknown: no whole step was measured on an {self.sheet}"
        return (
            f"{count_of(self.unseen_bytes or 0, 'B')}. The measured peak on {peak.card} was "
            f"{count_of(peak.allocated_bytes, 'B')} allocated, including "
            f"{count_of(peak.workspace_bytes or 0, 'B')} of "
            f"cuBLAS workspaces, and {count_of(peak.reserved_bytes or 0, 'B')} reserved by PyTorch"
        )

    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by role, the largest first."""
        rows = {role: row[self.life.peak] for role, row in self.life.held_by_role.items()}
        return {
            role: rows[role] for role in sorted(rows, key=lambda role: -rows[role]) if rows[role]
        }

    def most_inactive(self) -> list[CapturedTensor]:
        """The tensors with the most inactive byte-seconds."""
        inactive = self.life.inactive_byte_s
        ranked = sorted(self.life.tensors, key=lambda tensor: -inactive[tensor.number])
        return [tensor for tensor in ranked[:LONGEST] if inactive[tensor.number] > 0]

    def where(self, call: CapturedCall) -> str:
        """Return part and module of a call as text: ``backward of layer1.0.conv1 (Conv2d)``."""
        if call.owner_index is None:
            return call.part
        owner = self.capture.owners[call.owner_index]
        path = owner.path.removeprefix("model.")
        return f"{call.part} of {path} ({owner.what})" if path else f"{call.part} of {owner.what}"

    def to_json(self) -> dict[str, Any]:
        life, capture, peak = self.life, self.capture, self.life.peak
        fields: dict[str, Any] = {
            "title": self.title,
            "variant": self.variant.to_json(),
            "loss": capture.loss,
            "operators_of": capture.device_type,
            "times": self._times(),
            "calls": len(capture.calls),
            "tuples": len(capture.tuples),
            "owners": len(capture.owners),
            "step_us": life.step_us,
            "base_bytes": life.base_bytes,
            "peak": {
                "bytes": self.peak_bytes,
                "allocated_bytes": self.allocated_peak_bytes,
                "active_bytes": life.active_bytes[peak],
                "call": peak,
                "stage": capture.calls[peak].stage,
                "at": self.where(capture.calls[peak]),
                "bytes_by_role": self.at_peak(),
                "unseen_bytes": self.unseen_bytes,
                "read": self.read_peak and asdict(self.read_peak),
            },
            "inactive_periods_by_length": _intervals("least_us", life.by_length(LENGTHS_US)),
            "inactive_periods_by_size": _intervals("least_bytes", life.by_size(SIZES_BYTES)),
            "kernels": [self._kernel(call) for call in capture.calls],
            "tensors": [self._tensor(tensor) for tensor in life.tensors],
        }
        if self.fit is not None:
            captured = self.fit.peaks_bytes.items()
            fields["fit"] = {
                "limit_bytes": self.fit.limit_bytes,
                "batch": self.fit.batch,
                "allocated_peak_bytes": self.fit.allocated_peak_bytes,
                "exact": self.fit.exact,
                "captured": [
                    {"batch": batch, "allocated_peak_bytes": size}
                    for batch, size in sorted(captured)
                ],
            }
        if self.offload is not None:
            fields["offload"] = {**asdict(self.offload), "peak_bytes": self.offload.peak_bytes}
        if self.offload_plans is not None:
            fields["placement"] = offload_json(life, self.offload_plans)
        if self.recomputed:
            fields["recomputed"] = [asdict(row) for row in self.recomputed]
        return fields

    def _times(self) -> dict[str, Any]:
        if not self.read_calls:
            source = "roofline"
        elif self.read_calls == len(self.capture.calls):
            source = "readings"
        else:
            source = "both"
        return {
            "from": source,
            "card": self.times.card,
            "job": self.times.job_id or None,
            "readings": self.times.readings,
            "read_share": self.read_share,
            "read_calls": self.read_calls,
        }

    def _kernel(self, call: CapturedCall) -> dict[str, Any]:
        owner = self.capture.owners[call.owner_index] if call.owner_index is not None else None
        cost = self.costs[call.tuple_id]
        return {
            "index": call.index,
            "operator": self.capture.tuples[call.tuple_id].operator,
            "tuple": call.tuple_id,
            "stage": call.stage,
            "part": call.part,
            "owner": owner and {"path": owner.path, "operator": owner.what, "index": owner.index},
            "begin_us": self.life.begins_us[call.index],
            "time_us": self.life.times_us[call.index],
            "time_from": "reading" if call.tuple_id in self.times.read_us else "roofline",
            "flops": cost.flops,
            "moved_bytes": cost.bytes,
            "reads": call.reads,
            "writes": call.writes,
            "held_bytes": self.life.held_bytes[call.index],
            "active_bytes": self.life.active_bytes[call.index],
        }

    def _tensor(self, tensor: CapturedTensor) -> dict[str, Any]:
        periods = [
            {name: value for name, value in vars(period).items() if name != "tensor"}
            for period in self.life.periods[tensor.number]
        ]
        return {
            "number": tensor.number,
            "name": tensor.name,
            "role": tensor.role,
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "size_bytes": tensor.size_bytes,
            "global": tensor.outlives,
            "birth": tensor.born if tensor.born >= 0 else None,
            "first_use": min(tensor.uses, default=None),
            "last_use": max(tensor.uses, default=None),
            "release": tensor.released,
            "inactive_byte_s": self.life.inactive_byte_s[tensor.number],
            "inactive_periods": periods,
        }


def _intervals(least: str, rows: list[PeriodInterval]) -> list[dict[str, Any]]:
    return [
        {
            least: row.least,
            "periods": row.periods,
            "size_bytes": row.size_bytes,
            "inactive_byte_s": row.byte_s,
        }
        for row in rows
    ]


def memory(
    model: ResolvedModel, variant: Variant, card: str, capture: CapturedPass | None = None
) -> StepMemory:
    """Return the memory of a model's step with estimated times. ``card``: a name that contains
    the name of a card with a data sheet, or "cpu"; ``capture``: the step, extracted on that card;
    without it, extract the step without a card. Raises `UsageError` if there is no data sheet for
    that card, and as `farm.training.extract.extract_step`."""
    return _memory(
        model,
        variant,
        CallTimes("cpu", "cpu") if card.lower() == "cpu" else CallTimes(card_named(card)),
        capture,
    )


def of_job(session: Session, model: ResolvedModel, variant: Variant, word: str) -> StepMemory:
    """Return the memory of a step with times from a job's readings (of any model); other times are
    estimated. Raises `NoSuchJob` if no job matches `word`; `UsageError` if the job has no reading
    of a tuple of the step, and as `memory`."""
    job = find_job(session, word)
    report = reports.build(session, job.id)
    card = report.cards[0] if report.cards else None
    row = session.get(tables.CardRow, card.id) if card else None
    all_us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for row_of_tuple in report.tuples:  # a tuple has a row for each class of data
        if row_of_tuple.time_us is not None:
            all_us[row_of_tuple.subject.operator_id] += row_of_tuple.total_us
            calls[row_of_tuple.subject.operator_id] += row_of_tuple.count
    card_model, kind = (card.model, card.device_type) if card else ("", "cuda")
    torch = ", ".join(sorted({f"torch {software['torch']}" for software in report.software}))
    origin = f"job {job.id}, {card_model}, {torch}, {report.protocol.launch} launch"
    read_us = {tuple_id: all_us[tuple_id] / calls[tuple_id] for tuple_id in all_us}
    fingerprint = row.fingerprint if row else None
    times = CallTimes(card_model, kind, read_us, origin, job.id, fingerprint)
    step = _memory(model, variant, times)
    step = replace(step, read_peak=_read_peak(session, variant, card_model))
    if not step.read_calls:
        asked = Request.from_json(job.request)
        measured = asked.command().removesuffix(" --reuse none") if asked.variant else asked.title
        text = f"Job {job.id} has no reading of a tuple of {step.title}."
        raise UsageError(text, f"The job measured: {measured}. Name a job of that variant.")
    return step


def with_readings(session: Session, found: StepMemory) -> StepMemory:
    """Return the step with times from a database's readings on that card model, or on any CPU. If
    several card models match, use the model whose readings cover the largest share of the step's
    time."""
    capture, variant, kind = found.capture, found.variant, found.times.kind
    protocol = Protocol(launch=found.times.usual_launch)
    needed, weight = [], {}
    for id_, calls in capture.counts.items():
        spec, cost = capture.tuples[id_], found.costs[id_]
        needed.append(needed_tuple(spec, cost, calls))
        weight[id_] = calls * found.times.estimate_us(spec, cost)
    models = _models(session, found.times)
    best = replace(found, read_peak=_read_peak(session, variant, *models))
    for model in models:
        roofline = peaks_of(session, model, variant.computes_in)[1]
        selected = select_for_model(session, variant, needed, weight, model, protocol, roofline)
        if selected is None:
            continue
        wholes = [whole.reading for whole in selected.wholes if whole.reading]
        readings = {
            part.subject.operator_id: part.reading for part in selected.parts if part.reading
        }
        read_us = {
            id_: cost_in_model(reading, wholes, id_).time_us.value
            for id_, reading in readings.items()
        }
        software = session.get_one(tables.SoftwareRow, selected.software_id)
        fingerprints = select(tables.CardRow.fingerprint).where(tables.CardRow.model == model)
        fingerprint = median_fingerprint([*session.exec(fingerprints)])
        origin = f"{model}, torch {software.torch}, {protocol.launch} launch"
        times = CallTimes(model, kind, read_us, origin, fingerprint=fingerprint)
        candidate = replace(best, times=times, life=_life(capture, found.costs, times))
        best = max(best, candidate, key=lambda one: one.read_share)
    return best


def _models(session: Session, times: CallTimes) -> list[str]:
    """Return the card models in the database that match the card of `times`."""
    models = session.exec(
        select(tables.CardRow.model).where(tables.CardRow.kind == times.kind).distinct()
    )
    return [
        model for model in models if times.is_cpu or times.card in (model, sheet_name_of(model))
    ]


def _read_peak(session: Session, variant: Variant, *card_models: str) -> MeasuredPeak | None:
    """Return the peak from the newest reading of the whole step; None without one."""
    reading = tables.ReadingRow
    query = (
        select(reading.card_model, reading.details)
        .where(reading.subject_id == variant.id, col(reading.card_model).in_(card_models))
        .order_by(col(reading.created_at_s).desc())
    )
    for model, details in session.exec(query):
        told = Details.from_json(details).memory
        if told.allocated_peak_bytes is not None:
            return MeasuredPeak(
                model, told.allocated_peak_bytes, told.reserved_peak_bytes, told.workspace_bytes
            )
    return None


def _memory(
    model: ResolvedModel, variant: Variant, times: CallTimes, capture: CapturedPass | None = None
) -> StepMemory:
    capture = capture or _captured(model, variant, times.kind)
    costs = {tuple_id: _cost_of(capture, spec) for tuple_id, spec in capture.tuples.items()}
    return StepMemory(model, variant, times, _life(capture, costs, times), costs)


def card_named(word: str) -> str:
    """Return the card with a data sheet whose name is part of `word`. Raises `UsageError` with the
    nearest name.
    """
    if name := sheet_name_of(word):
        return name
    near = did_you_mean(word, data_sheets())
    raise UsageError(
        f"There is no data sheet for '{word}'.",
        near or f"Choose one of {', '.join(data_sheets())}.",
    )


def largest_batch(peak_of: Callable[[int], int], limit_bytes: int, start: int) -> Fit:
    """Find the largest batch that fits. Memory is almost linear in the batch, so two known peaks
    give the next guess. ``peak_of`` returns the peak of a batch in bytes; it may raise
    `CaptureError` for a batch of 1. Raises `UsageError` if not even the smallest batch fits."""
    peaks: dict[int, int] = {}
    fits, beyond, refused = 0, LARGEST_NUMBER + 1, False
    guess = start
    while beyond - fits > 1 and len(peaks) < _MOST_CAPTURES:
        try:
            peaks[guess] = peak_of(guess)
        except CaptureError:
            if guess > 1:
                raise
            refused = True
            break
        if peaks[guess] <= limit_bytes:
            fits = max(fits, guess)
        else:
            beyond = min(beyond, guess)
        guess = min(max(_next_batch(peaks, limit_bytes), fits + 1), beyond - 1)
    if not fits:
        smallest = min(peaks)
        raise UsageError(
            f"Not even a batch of {smallest} fits: it needs {peaks[smallest] / 1e9:.2f} GB of "
            "memory, and "
            f"{limit_bytes / 1e9:.2f} GB are available.",
            "Reduce the memory with --recompute blocks, --amp bfloat16 or --optimizer sgd.",
        )
    return Fit(limit_bytes, fits, peaks[fits], refused or beyond - fits == 1, peaks)


def _next_batch(peaks: dict[int, int], limit_bytes: int) -> int:
    """The batch with a peak of `limit_bytes` on the line through the largest known batch that fits
    and the smallest that does not; until there are both, through the two batches next to the limit.
    """
    fitting = [batch for batch in peaks if peaks[batch] <= limit_bytes]
    too_large = [batch for batch in peaks if peaks[batch] > limit_bytes]
    line = sorted(fitting)[-2:] or sorted(too_large)[:2]
    if fitting and too_large:
        line = [max(fitting), min(too_large)]
    if len(line) > 1:
        first, second = line
        slope = (peaks[second] - peaks[first]) / (second - first)
        if slope > 0:
            return first + int((limit_bytes - peaks[first]) // slope)
    return 2 * max(fitting) if fitting else min(too_large) // 2


def with_fit(found: StepMemory, limit_bytes: int) -> StepMemory:
    """Return a copy of `found` whose field `fit` has the largest batch that needs at most
    `limit_bytes`.
    """

    def peak_of(batch: int) -> int:
        if batch == found.variant.batch:
            return found.allocated_peak_bytes
        return allocated_peak_bytes(
            _captured(found.model, replace(found.variant, batch=batch), found.times.kind)
        )

    return replace(found, fit=largest_batch(peak_of, limit_bytes, found.variant.batch))


def read_in_slow_memory(session: Session, found: StepMemory) -> MeasuredSlow | None:
    """Return the readings of the step's tuples with slow tensors from a database; None without such
    readings.
    """
    launch, models = found.times.usual_launch, _models(session, found.times)
    return read_slow(session, found.capture.tuples, models, launch=launch)


def with_offload_plans(
    found: StepMemory,
    read: MeasuredSlow | None,
    amounts: Sequence[Amount],
    bytes_per_s: float | None,
    *,
    moves: bool = False,
    wire: Wire | None = None,
) -> StepMemory:
    """Return the step with plans: which tensors to put in slow memory for each amount of fast
    memory.

    Args:
        read: readings with tensors in slow memory.
        amounts: amounts of fast memory, in bytes or as shares of the peak; one plan each.
        bytes_per_s: bandwidth for tensors without such a reading; None: derived from the readings.
        moves: also move tensors to slow memory between two uses, at ``bytes_per_s`` or the
            bandwidth of ``wire``.

    Raises:
        UsageError: see `farm.addons.memory.slow_costs.slow_costs` and
            `farm.addons.memory.offload_plan.plan_offload`.
    """
    copied_bytes_per_s = wire.bytes_per_s if wire is not None else None
    costs = slow_costs(
        found.life,
        read,
        bytes_per_s,
        copied_bytes_per_s,
        variant=found.variant,
        card=found.times.card,
    )
    amounts_bytes = [amount.of(found.allocated_peak_bytes) for amount in amounts]
    rate = (bytes_per_s or copied_bytes_per_s or costs.bytes_per_s) if moves else None
    planned = plan_offload(found.life, costs, *amounts_bytes, moves_bytes_per_s=rate)
    return replace(found, offload_plans=replace(planned, wire=wire))


def with_recomputed(found: StepMemory) -> StepMemory:
    """Return the step with the effect of recomputing each block alone, and of recomputing all
    blocks. Raises `UsageError` if the model has no list of equal blocks."""
    from farm.training.step import blocks_of

    paths, rows = blocks_of(found.model.build(found.variant)), []
    for modules in [*paths, ",".join(paths)] if len(paths) > 1 else paths:
        life = _memory(found.model, replace(found.variant, recompute=modules), found.times).life
        times_us = [
            life.times_us[call.index] for call in life.capture.calls if call.part == "recomputation"
        ]
        peak = max(life.held_bytes)
        rows.append(
            Recomputed(modules, peak, found.peak_bytes - peak, len(times_us), sum(times_us, 0.0))
        )
    return replace(found, recomputed=tuple(rows))


def _captured(model: ResolvedModel, variant: Variant, kind: str) -> CapturedPass:
    from farm.training.extract import extract_step

    return extract_step(variant, device_type=kind, model=model)


def _cost_of(capture: CapturedPass, spec: OperatorTuple) -> Cost:
    """Return the cost of a tuple. For an operator outside the allow-list, count only the bytes of
    its tensors.
    """
    from farm.operators.cost import Cost, cost_in

    try:
        return cost_in(capture, spec)
    except TupleRejected:
        return Cost(0, sum(tensor.distinct_bytes for tensor in spec.tensors))


def _life(capture: CapturedPass, costs: Mapping[str, Cost], times: CallTimes) -> Life:
    estimates_us = {
        id_: times.estimate_us(spec, costs[id_]) for id_, spec in capture.tuples.items()
    }
    times_us = estimates_us | dict(times.read_us)
    return Life(capture, tuple(times_us[call.tuple_id] for call in capture.calls))
