"""What memory a training step needs and when, as plain values: from a capture alone, with times of calls as they were read
where there are readings of their tuples, and by a card's roofline where not."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlmodel import Session, col, select

from farm.errors import TupleRejected, UsageError, did_you_mean
from farm.estimate.estimate import Wanted, peaks_of, readings_taken
from farm.jobs import jobs
from farm.memory_report.plan_table import PlanRow, plan_rows
from farm.memory_report.slow_costs import ReadSlow, read_slow, slow_costs
from farm.models import catalog
from farm.operators.captured import Capture, CapturedCall, CapturedTensor
from farm.operators.roofline import KNOWN_CARDS, Roofline, roofline_of
from farm.report import report as reports
from farm.requests.memory import Amount
from farm.requests.partial_request import command_of
from farm.slow_memory.offload_plan import OffloadPlan, OffloadPlans, plan_offload
from farm.slow_memory.options import Fit, Recomputed, largest_batch, recomputed
from farm.slow_memory.transfers import Offload, Wire, offload
from farm.store import tables
from farm.training.tensor_lifetime import Inactive, Life, PeriodInterval, allocated_peak_bytes
from farm.types.format import count_of, percent
from farm.types.label import label_of
from farm.types.protocol import Launch, Protocol, Variant
from farm.types.reading import Details
from farm.types.request import Request
from farm.types.tuple import DTYPES, OperatorTuple
from farm.verdict.choice import choose

if TYPE_CHECKING:
    from farm.operators.cost import Cost

LENGTHS_US = (10.0, 100.0, 1e3, 1e4, 1e5)
SIZES_BYTES = (1e5, 1e6, 1e7, 1e8, 1e9)
LONGEST = 10  # tensors that are named


@dataclass(frozen=True)
class Times:
    """What one call of a tuple takes on a card: as it was read there, else at least by its peaks.

    Attributes:
        card: its model, or part of it.
        kind: cuda or cpu.
        read_us: of one call, by tuple id.
        readings: what these are of, for people; "" where there are none.
        job: that they were taken for, where one was named.
        fingerprint: the card's own peaks, where they were measured.
    """

    card: str
    kind: str = "cuda"
    read_us: Mapping[str, float] = field(default_factory=dict)
    readings: str = ""
    job: str = ""
    fingerprint: Mapping[str, Any] | None = None

    def of(self, spec: OperatorTuple, cost: Cost) -> float:
        read_us = self.read_us.get(spec.id)
        return self.estimate_us(spec, cost) if read_us is None else read_us

    def estimate_us(self, spec: OperatorTuple, cost: Cost) -> float:
        floating = [one.dtype for one in spec.tensors if DTYPES[one.dtype][1].startswith(("fp", "bf"))]
        return self._roofline(floating[0] if floating else "float32").estimate_us(cost.flops, cost.bytes)

    def _roofline(self, dtype: str) -> Roofline:
        return roofline_of(self.kind, self.card, self.fingerprint, dtype=dtype)


@dataclass(frozen=True)
class ReadPeak:
    """What PyTorch's allocator said of the whole step on a card."""

    card: str
    allocated_bytes: int
    reserved_bytes: int | None
    workspace_bytes: int | None  # of what is allocated: what cuBLAS keeps from call to call


@dataclass(frozen=True)
class Memory:
    """One training step of a variant.

    Attributes:
        times: what its calls take.
        costs: of each tuple.
        read_peak: None where nobody has read the whole step on that card.
    """

    variant: Variant
    times: Times
    life: Life
    costs: Mapping[str, Cost]
    read_peak: ReadPeak | None = None
    fit: Fit | None = None
    offload: Offload | None = None
    recomputed: tuple[Recomputed, ...] = field(default=())
    offload_plans: OffloadPlans | None = None

    @property
    def capture(self) -> Capture:
        return self.life.capture

    @property
    def title(self) -> str:
        return catalog.title_of(self.variant)

    @property
    def peak_bytes(self) -> int:
        return self.life.held_bytes[self.life.peak]

    @property
    def read_calls(self) -> int:
        """Calls whose time was read."""
        return sum(call.tuple_id in self.times.read_us for call in self.capture.calls)

    @property
    def read_share(self) -> float:
        """What share of the step's time was read, 0 to 1; the rest is estimated."""
        read = [call.index for call in self.capture.calls if call.tuple_id in self.times.read_us]
        return sum(self.life.times_us[index] for index in read) / self.life.step_us if read else 0.0

    @property
    def clock(self) -> str:
        """Where times come from, for people."""
        sheet = f"an {sheet_of(self.times.card) or self.times.card}'s data sheet"
        by = "what a few cores reach" if self.times.kind == "cpu" else f"{sheet}: arithmetic and traffic at its peaks"
        estimates = f"estimates, from {by}, and a launch"
        if not self.read_calls:
            return estimates
        read = f"{percent(self.read_share)} of the step read ({self.read_calls} of {len(self.capture.calls)} calls: {self.times.readings})"
        return read if self.read_calls == len(self.capture.calls) else f"{read}; the rest {estimates}"

    @property
    def clock_name(self) -> str:
        """The same in two words, for a drawing."""
        return "estimated" if not self.read_calls else f"{percent(self.read_share)} read, rest estimated"

    @property
    def predicted(self) -> str:
        """What the operators are where no card was asked; empty where one was."""
        told = "The operators are the CPU's: a capture without a card is a prediction for a card."
        return told if self.capture.device_type != self.times.kind else ""

    @functools.cached_property
    def allocated_peak_bytes(self) -> int:
        return allocated_peak_bytes(self.capture)

    @property
    def unseen_bytes(self) -> int | None:
        """What is allocated at the peak and no operator's tensor: libraries' workspaces, and what a card's own operators keep
        more, or less, than the captured ones. None where nobody has read it: a capture alone cannot know."""
        return None if self.read_peak is None else self.read_peak.allocated_bytes - self.allocated_peak_bytes

    @property
    def unseen_why(self) -> str:
        """Where that comes from, or why it is not known."""
        if self.times.kind == "cpu":
            return "not known: on a CPU nobody keeps account of what libraries allocate"
        if self.read_peak is None:
            return f"not known: no whole step was read on an {sheet_of(self.times.card) or self.times.card}"
        kept = count_of(self.read_peak.workspace_bytes or 0, "B")
        return (
            f"{count_of(self.unseen_bytes or 0, 'B')}: {count_of(self.read_peak.allocated_bytes, 'B')} were allocated at once on "
            f"{self.read_peak.card}, workspaces of cuBLAS among them ({kept}); reserved {count_of(self.read_peak.reserved_bytes or 0, 'B')}"
        )

    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by role, the most first."""
        rows = {role: row[self.life.peak] for role, row in self.life.held_by_role.items()}
        return {role: rows[role] for role in sorted(rows, key=lambda role: -rows[role]) if rows[role]}

    def most_inactive(self) -> list[CapturedTensor]:
        """The tensors with the most inactive byte-seconds."""
        ranked = sorted(self.life.tensors, key=lambda tensor: -self.life.inactive_byte_s[tensor.number])
        return [tensor for tensor in ranked[:LONGEST] if self.life.inactive_byte_s[tensor.number] > 0]

    def where(self, call: CapturedCall) -> str:
        """``backward of layer1.0.conv1 (Conv2d)``"""
        if call.owner_index is None:
            return call.part
        owner = self.capture.owners[call.owner_index]
        path = owner.path.removeprefix("model.")
        return f"{call.part} of {path} ({owner.what})" if path else f"{call.part} of {owner.what}"

    def to_json(self) -> dict[str, Any]:
        life, capture, peak = self.life, self.capture, self.life.peak
        found: dict[str, Any] = {
            "title": self.title,
            "variant": self.variant.to_json(),
            "loss": capture.loss,
            "operators_of": capture.device_type,
            "times": {
                "from": "readings"
                if self.read_calls == len(self.capture.calls)
                else "both"
                if self.read_calls
                else "roofline",
                "card": self.times.card,
                "job": self.times.job or None,
                "readings": self.times.readings,
                "read_share": self.read_share,
                "read_calls": self.read_calls,
            },
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
                "read": self.read_peak and vars(self.read_peak),
            },
            "inactive_periods_by_length": _intervals("least_us", life.by_length(LENGTHS_US)),
            "inactive_periods_by_size": _intervals("least_bytes", life.by_size(SIZES_BYTES)),
            "kernels": [self._kernel(call) for call in capture.calls],
            "tensors": [self._tensor(tensor) for tensor in life.tensors],
        }
        if self.fit is not None:
            found["fit"] = {
                "limit_bytes": self.fit.limit_bytes,
                "batch": self.fit.batch,
                "allocated_peak_bytes": self.fit.peak_bytes,
                "exact": self.fit.exact,
                "captured": [
                    {"batch": batch, "allocated_peak_bytes": size}
                    for batch, size in sorted(self.fit.peaks_bytes.items())
                ],
            }
        if self.offload is not None:
            found["offload"] = {
                "bytes_per_s": self.offload.bytes_per_s,
                "periods": self.offload.periods,
                "long_enough": self.offload.long_enough,
                "hidden": [_period(period, with_tensor=True) for period in self.offload.hidden],
                "moved_bytes": self.offload.moved_bytes,
                "link_share": self.offload.link_share,
                "peak_bytes": self.offload.peak_bytes,
                "held_bytes": list(self.offload.held_bytes),
            }
        if self.offload_plans is not None:
            found["placement"] = self._placement(self.offload_plans)
        if self.recomputed:
            found["recomputed"] = [
                {
                    "modules": row.what,
                    "peak_bytes": row.peak_bytes,
                    "freed_bytes": row.freed_bytes,
                    "calls": row.calls,
                    "time_us": row.time_us,
                }
                for row in self.recomputed
            ]
        return found

    def _placement(self, offload_plans: OffloadPlans) -> dict[str, Any]:
        """The first plan, all of them, and the curve."""
        plan, costs, run = offload_plans.plan, offload_plans.costs, offload_plans.run
        return {
            "fast_bytes": plan.fast_bytes,
            "time_us": plan.time_us,
            "all_fast_us": offload_plans.all_fast_us,
            "all_slow_us": offload_plans.all_slow_us,
            "peak_bytes": plan.peak_bytes,
            "least_bytes": offload_plans.least_bytes,
            "gap": plan.gap,
            "ended_in_time": plan.in_time,
            "slow_bytes_per_s": costs.bytes_per_s,
            "read_share": costs.read_share,
            "costs_from": costs.told,
            "sum_over_together": costs.together,
            "moves": offload_plans.moves_bytes_per_s is not None,
            "moves_bytes_per_s": offload_plans.moves_bytes_per_s,
            "wire": offload_plans.wire
            and {**asdict(offload_plans.wire), "bytes_per_s": offload_plans.wire.bytes_per_s},
            "slow": [
                {
                    "tensor": tensor.number,
                    "name": tensor.name,
                    "role": tensor.role,
                    "size_bytes": tensor.size_bytes,
                    "slow_us": costs.slow_us.get(tensor.number, 0.0),
                }
                for tensor in offload_plans.slow(self.life, plan)
            ],
            "moved": self._moved(plan),
            "curve": [
                {"fast_bytes": one.fast_bytes, "time_us": one.time_us, "gap": one.gap, "slow": len(one.slow)}
                for one in offload_plans.curve
            ],
            "unsolved_bytes": list(offload_plans.unsolved),
            "plans": [
                {
                    "fast_bytes": row.plan.fast_bytes,
                    "time_us": row.plan.time_us,
                    "peak_bytes": row.plan.peak_bytes,
                    "gap": row.plan.gap,
                    "ended_in_time": row.plan.in_time,
                    "slow": sorted(row.plan.slow),
                    "moved": self._moved(row.plan),
                    "moved_bytes": row.moved_bytes,
                    "run": _run(row),
                    "not_run": row.why_not or None,
                }
                for row in plan_rows(self.life, offload_plans)
                if row.plan is not None
            ],
            "run": run
            and {
                "slow_memory": run.slow_memory,
                "took_s": run.took_s,
                "all_fast": next(_run(row) for row in plan_rows(self.life, offload_plans) if row.plan is None),
            },
        }

    def _moved(self, plan: OffloadPlan) -> list[dict[str, Any]]:
        return [_period(self.life.periods[number][index], with_tensor=True) for number, index in plan.moved]

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
            "reads": list(call.reads),
            "writes": list(call.writes),
            "held_bytes": self.life.held_bytes[call.index],
            "active_bytes": self.life.active_bytes[call.index],
        }

    def _tensor(self, tensor: CapturedTensor) -> dict[str, Any]:
        return {
            "number": tensor.number,
            "name": tensor.name,
            "role": tensor.role,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "size_bytes": tensor.size_bytes,
            "global": tensor.outlives,
            "birth": tensor.born if tensor.born >= 0 else None,
            "first_use": tensor.uses[0] if tensor.uses else None,
            "last_use": tensor.uses[-1] if tensor.uses else None,
            "release": tensor.released,
            "inactive_byte_s": self.life.inactive_byte_s[tensor.number],
            "inactive_periods": [_period(period) for period in self.life.periods[tensor.number]],
        }


def _run(row: PlanRow) -> dict[str, Any] | None:
    if row.run is None or row.off is None:
        return None
    return {**asdict(row.run), "stayed_fast_bytes": row.stayed_fast_bytes, "prediction_off": row.off.value}


def _period(period: Inactive, *, with_tensor: bool = False) -> dict[str, Any]:
    told = {
        "begin": period.begin,
        "end": period.end,
        "begin_us": period.begin_us,
        "time_us": period.time_us,
        "over_the_end": period.over_the_end,
    }
    return {"tensor": period.tensor, **told} if with_tensor else told


def _intervals(least: str, rows: list[PeriodInterval]) -> list[dict[str, Any]]:
    return [
        {least: row.least, "periods": row.periods, "size_bytes": row.size_bytes, "inactive_byte_s": row.byte_s}
        for row in rows
    ]


# ------------------------------------------------------------------------------------------------ asking


def memory(variant: Variant, card: str, capture: Capture | None = None) -> Memory:
    """A step extracted without a card, with estimated times.

    Args:
        card: the name of a card with a data sheet, or part of it; or cpu.
        capture: the step as that card runs it, if it was captured there.

    Raises:
        UsageError: there is no data sheet for that card; and what `farm.training.extract.extract_step` raises.
    """
    return _memory(variant, Times("cpu", "cpu") if card.lower() == "cpu" else Times(card_named(card)), capture)


def of_job(session: Session, variant: Variant, word: str) -> Memory:
    """A step with times as a job read them, on whatever model's tuples; what it has not read is estimated for its card.

    Raises:
        NoSuchJob: there is none.
        UsageError: it has read none of the step's tuples; and as `memory` raises.
    """
    job = jobs.find(session, word)
    report = reports.build(session, job.id)
    card = report.cards[0] if report.cards else None
    row = session.get(tables.Card, card.id) if card else None
    all_us: dict[str, float] = {}
    calls: dict[str, int] = {}
    for one in report.tuples:  # one tuple in several classes of data is several rows
        if one.time_us is not None:
            all_us[one.operator_id] = all_us.get(one.operator_id, 0.0) + one.calls * one.time_us
            calls[one.operator_id] = calls.get(one.operator_id, 0) + one.calls
    torch = ", ".join(sorted({f"torch {software['torch']}" for software in report.software}))
    about = f"job {job.id}, {card.model if card else ''}, {torch}, {report.protocol.launch} launch"
    times = Times(
        card.model if card else "",
        "cpu" if card and card.kind == "cpu" else "cuda",
        {tuple_id: all_us[tuple_id] / calls[tuple_id] for tuple_id in all_us},
        about,
        job.id,
        row.fingerprint if row else None,
    )
    found = _memory(variant, times)
    found = replace(found, read_peak=_read_peak(session, variant, times.card))
    if not found.read_calls:
        asked = Request.from_json(job.request)
        measured = command_of(asked).removesuffix(" --reuse none") if asked.variant else asked.title
        raise UsageError(f"Job {job.id} has read no tuple of {variant}.", f"It is of: {measured}.")
    return found


def with_readings(session: Session, found: Memory) -> Memory:
    """The same step with the readings that a database has of its tuples on that model of card, or of any CPU; of several models
    that are meant, and of several kinds of software, those that cover most."""
    capture, variant, kind = found.capture, found.variant, found.times.kind
    protocol = Protocol(launch="eager" if kind == "cpu" else "graph")
    specs = capture.tuples
    wanted = [
        Wanted(id_, spec.short_name, label_of(spec), found.costs[id_].flops, found.costs[id_].bytes, {"": number}, {})
        for id_, number in capture.counts.items()
        for spec in (specs[id_],)
    ]
    weight = {
        id_: number * found.times.estimate_us(specs[id_], found.costs[id_]) for id_, number in capture.counts.items()
    }
    best = replace(found, read_peak=_read_peak(session, variant, *_models(session, found.times)))
    for model in _models(session, found.times):
        roofline = peaks_of(session, model, variant.computes_in)[1]
        taken = readings_taken(session, variant, wanted, weight, model, protocol, roofline)
        if taken is None:
            continue
        wholes = [whole.reading for whole in taken.wholes if whole.reading]
        read_us = {
            part.operator_id: choose(part.reading, wholes, part.operator_id).time.value
            for part in taken.parts
            if part.reading
        }
        software = session.get_one(tables.Software, taken.software_id)
        fingerprint = session.exec(
            select(tables.Card.fingerprint).where(tables.Card.model == model, col(tables.Card.fingerprint).is_not(None))
        ).first()
        about = f"{model}, torch {software.torch}, {protocol.launch} launch"
        times = Times(model, kind, read_us, about, fingerprint=fingerprint)
        there = replace(best, times=times, life=_life(capture, found.costs, times))
        best = max(best, there, key=lambda one: one.read_share)
    return best


def _models(session: Session, times: Times) -> list[str]:
    """The models of card in a database that are meant."""
    models = session.exec(select(tables.Card.model).where(tables.Card.kind == times.kind).distinct())
    return [model for model in models if times.kind == "cpu" or times.card in (model, sheet_of(model))]


def _read_peak(session: Session, variant: Variant, *card_models: str) -> ReadPeak | None:
    """The newest that a reading of the whole tells."""
    reading = tables.Reading
    query = (
        select(reading.card_model, reading.details)
        .where(reading.subject_id == variant.id, col(reading.card_model).in_(card_models))
        .order_by(col(reading.created_at_s).desc())
    )
    for model, details in session.exec(query):
        told = Details.from_json(details)
        if told.allocated_peak_bytes is not None:
            return ReadPeak(model, told.allocated_peak_bytes, told.reserved_peak_bytes, told.workspace_bytes)
    return None


def _memory(variant: Variant, times: Times, capture: Capture | None = None) -> Memory:
    capture = capture or _captured(variant, times.kind)
    costs = {tuple_id: _cost_of(spec) for tuple_id, spec in capture.tuples.items()}
    return Memory(variant, times, _life(capture, costs, times), costs)


def sheet_of(model: str) -> str:
    """The card whose data sheet counts for a model of card; "" where there is none."""
    return next((name for name in KNOWN_CARDS if name in model), "")


def card_named(word: str) -> str:
    """Raises:
    UsageError: no card with a data sheet has that name.
    """
    names = [name for name in KNOWN_CARDS if name.lower() in word.lower() or word.lower() == name.lower()]
    if not names:
        near = did_you_mean(word, KNOWN_CARDS)
        raise UsageError(f"There is no data sheet for '{word}'.", near or f"Choose one of {', '.join(KNOWN_CARDS)}.")
    return names[0]


def with_fit(found: Memory, limit_bytes: int) -> Memory:
    """Raises:
    UsageError: not even the smallest batch fits.
    """

    def peak_of(batch: int) -> int:
        if batch == found.variant.batch:
            return found.allocated_peak_bytes
        return allocated_peak_bytes(_captured(replace(found.variant, batch=batch), found.times.kind))

    return replace(found, fit=largest_batch(peak_of, limit_bytes, found.variant.batch))


def with_offload(found: Memory, bytes_per_s: float) -> Memory:
    return replace(found, offload=offload(found.life, bytes_per_s))


def read_in_slow_memory(session: Session, found: Memory) -> ReadSlow | None:
    """What a database has of the step's tuples with tensors in slow memory; None where it has nothing."""
    times = found.times
    launch: Launch = "eager" if times.kind == "cpu" else "graph"
    return read_slow(session, found.capture.tuples, _models(session, times), launch=launch)


def with_offload_plans(
    found: Memory,
    read: ReadSlow | None,
    amounts: Sequence[Amount],
    bytes_per_s: float | None,
    *,
    moves: bool = False,
    wire: Wire | None = None,
) -> Memory:
    """With plans of what lies in slow memory.

    Args:
        read: with tensors there.
        amounts: of fast memory, one for each plan; shares are of the peak.
        bytes_per_s: of the wire, for tensors that nobody has read in slow memory; None: as those have it that were.
        moves: let tensors lie there while they wait, too; at ``bytes_per_s``, or else as the wire was measured.

    Raises:
        UsageError: see `farm.memory_report.slow_costs.slow_costs` and `farm.slow_memory.offload_plan.plan_offload`.
    """
    copied_bytes_per_s = wire.bytes_per_s if wire is not None else None
    costs = slow_costs(
        found.life,
        read,
        bytes_per_s,
        copied_bytes_per_s=copied_bytes_per_s,
        variant=found.variant,
        card=found.times.card,
    )
    amounts_bytes = [amount.of(found.allocated_peak_bytes) for amount in amounts]
    rate = (bytes_per_s or copied_bytes_per_s or costs.bytes_per_s) if moves else None
    planned = plan_offload(found.life, costs, *amounts_bytes, moves_bytes_per_s=rate)
    return replace(found, offload_plans=replace(planned, wire=wire))


def with_recomputed(found: Memory) -> Memory:
    """Each block alone, and all of them.

    Raises:
        UsageError: the model has no list of equal blocks.
    """
    from farm.training.step import blocks_of

    paths = blocks_of(catalog.build(found.variant))

    def again(what: str) -> Life:
        return _memory(replace(found.variant, recompute=what), found.times).life

    return replace(found, recomputed=tuple(recomputed(found.life, again, paths)))


def _captured(variant: Variant, kind: str) -> Capture:
    from farm.training.extract import extract_step

    return extract_step(variant, device_type=kind)


def _cost_of(spec: OperatorTuple) -> Cost:
    """An operator that is on no list is measured nowhere; what it is given it moves."""
    from farm.operators.cost import Cost, cost

    try:
        return cost(spec)
    except TupleRejected:
        return Cost(0, sum(tensor.distinct_bytes for tensor in spec.tensors))


def _life(capture: Capture, costs: Mapping[str, Cost], times: Times) -> Life:
    of = {tuple_id: times.of(spec, costs[tuple_id]) for tuple_id, spec in capture.tuples.items()}
    return Life(capture, tuple(of[call.tuple_id] for call in capture.calls))
