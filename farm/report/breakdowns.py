"""Breakdowns of a job's cost: by owner in a training step, by slow memory, and extrapolated to all
layers.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlmodel import Session, col, func, select

from farm.errors import FarmError
from farm.store import tables
from farm.store.captures import plain_ids, stored_tuples
from farm.store.columns import OPERATOR, PROTOCOL
from farm.store.database import by_key, fetch_values
from farm.types.fields import cost_json, figure_json
from farm.types.figure import Figure, PassCost, figure_of, share_of, value_of
from farm.types.protocol import Placement, Variant
from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple
from farm.verdict.aggregate import aggregate
from farm.verdict.cost_line import CostGroup, CostLine, TupleView, merged
from farm.verdict.expectation import Quantity, expected_whole
from farm.verdict.figures import CallCost, PerToken
from farm.verdict.job_results import JobResults
from farm.verdict.verdict import Comparison, Unmeasured, Verdict

# the parts of a training step that have an owner
OF_OWNERS = ("forward", "backward", "recomputation")


@dataclass(frozen=True)
class OwnerRow:
    """The cost of one kind of module or function (``owner``) in one part of a training step
    (forward, backward, ...).

    ``owner`` is "" for accumulation and the optimizer. The share is a share of the sum's time."""

    owner: str
    part: str
    cost: CostGroup
    time_share: float | None

    @property
    def name(self) -> str:
        """The owner; without one, the part."""
        return self.owner or self.part

    def to_json(self) -> dict[str, Any]:
        return {
            "owner": self.owner,
            "part": self.part,
            "calls": self.cost.calls,
            "tuples": self.cost.tuples,
            "time_us": self.cost.complete_us,
            "energy_mj": self.cost.complete_mj,
            "time_share": self.time_share,
        }


@dataclass(frozen=True)
class OwnerGroup:
    """The cost of one kind of module or function, over all parts; or of the loss, accumulation or
    optimizer. ``parts`` has only the parts that occur."""

    name: str
    parts: Mapping[str, CostGroup]
    cost: CostGroup
    time_share: float | None


def owners(
    session: Session, capture_id: int, lines: Iterable[CostLine], data: str
) -> tuple[OwnerRow, ...]:
    """Return the rows of a training step, the most expensive owner first. `data` is the data class
    of all its calls. Empty for a forward pass: its calls have no owners.
    """
    call = tables.Call
    query = (
        select(call.owner, call.part, call.operator_id, func.count())
        .where(call.capture_id == capture_id, call.part != "")
        .group_by(col(call.owner), col(call.part), col(call.operator_id))
    )
    line_of = {line.subject.operator_id: line for line in lines if line.subject.data == data}
    groups: dict[tuple[str, str], CostGroup] = defaultdict(CostGroup)
    for owner, part, operator_id, count in session.exec(query):
        line = line_of.get(operator_id)
        if line is None:
            groups[owner, part].add_unknown(count)
        else:
            groups[owner, part].add(line, count)

    total_us = sum(group.complete_us or 0.0 for group in groups.values())
    of_owner_us: dict[str, float] = defaultdict(float)
    rows = []
    for (owner, part), group in groups.items():
        row = OwnerRow(owner, part, group, share_of(group.complete_us, total_us))
        of_owner_us[row.name] += group.complete_us or 0.0
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-of_owner_us[row.name], row.owner, row.part)))


def grouped(rows: Iterable[OwnerRow]) -> list[OwnerGroup]:
    """Group the rows by owner. All functions of the loss are one group."""
    groups = []
    by_name = by_key(lambda row: row.owner if row.part in OF_OWNERS else row.part, rows)
    for name, of_name in by_name.items():
        parts = {
            part: merged(row.cost for row in of_part)
            for part, of_part in by_key(lambda row: row.part, of_name).items()
        }
        shares = [row.time_share for row in of_name]
        share = None if None in shares else sum(share or 0.0 for share in shares)
        groups.append(OwnerGroup(name, parts, merged(row.cost for row in of_name), share))
    return groups


@dataclass(frozen=True)
class PlacementRow:
    """A tuple with some of its tensors in slow memory."""

    line: CostLine  # of one call, measured in a loop; its count is in all data classes
    placement: str  # the slow tensors: `farm.types.protocol`
    tensors: str  # the names of the slow tensors: "weight, output"
    fast: CostLine | None  # the same tuple with all tensors in fast memory
    slow_memory: str  # kind of the slow memory
    workspaces: str  # where the workspaces are: fast, or possibly with the output
    message: str  # details of `line.reason`

    @property
    def fast_time_us(self) -> float | None:
        """The time with all tensors in fast memory."""
        return value_of(self.fast.time_us) if self.fast else None

    @property
    def times_fast(self) -> float | None:
        """The time as a multiple of the time with all tensors in fast memory."""
        if self.line.time_us is None or not self.fast_time_us:
            return None
        return self.line.time_us.value / self.fast_time_us

    def to_json(self) -> dict[str, Any]:
        return {
            "operator_id": self.line.subject.operator_id,
            "label": self.line.subject.label,
            "calls": self.line.count,
            "placement": self.placement,
            "tensors": self.tensors,
            **figure_json("time", "us", self.line.time_us),
            "fast_time_us": self.fast_time_us,
            "energy_mj": value_of(self.line.energy_mj),
            "slow_memory": self.slow_memory,
            "workspaces": self.workspaces,
            "reading_id": self.line.reading_id,
            "reason": self.line.reason,
            "message": self.message,
            "times_fast": self.times_fast,
        }


@dataclass(frozen=True)
class _PlacedItem:
    """An item of a tuple with a placement ("": all tensors in fast memory) and a data class."""

    item: Any
    placement: str
    data: str | None


def placements(results: JobResults) -> tuple[PlacementRow, ...]:
    """Return the placements of a job's tuples: tuples by falling weight, placements in planned
    order. Empty if the job asked for none.
    """
    if not results.job.asked.get("placements"):
        return ()
    items = results.items
    protocols = fetch_values(
        results.session, (PROTOCOL.id, PROTOCOL.spec), (item.protocol_id for item in items)
    )
    subjects: dict[str, TupleView] = {}
    calls: Counter[str] = Counter()
    for part in results.parts:
        subjects.setdefault(part.subject.operator_id, part.subject)
        calls[part.subject.operator_id] += part.count

    placed: dict[str, list[_PlacedItem]] = defaultdict(list)
    for item in results.items_of("tuple"):
        if item.subject_id in subjects:
            spec = protocols[item.protocol_id].spec or {}
            entry = _PlacedItem(item, spec.get("placement") or "", spec.get("data"))
            placed[item.subject_id].append(entry)

    operators = fetch_values(results.session, (OPERATOR.id, OPERATOR.spec), subjects)
    weighted = []
    for operator_id, of_tuple in placed.items():
        stored = operators.get(operator_id)
        tensors = stored.spec.get("tensors", ()) if stored else ()
        count = calls[operator_id]
        rows = _placements_of(subjects[operator_id], count, of_tuple, results.readings, tensors)
        if rows:
            weighted.append((-count * (rows[-1].fast_time_us or 0.0), operator_id, rows))
    weighted.sort(key=lambda entry: entry[:2])
    return tuple(itertools.chain.from_iterable(rows for *_, rows in weighted))


def _placements_of(
    subject: TupleView,
    count: int,
    placed: Sequence[_PlacedItem],
    readings: Mapping[str, Any],
    tensors: Sequence[Mapping[str, Any]],
) -> list[PlacementRow]:
    """Return the placements of one tuple, in planned order."""
    fast = {}  # data class -> the tuple with all tensors in fast memory
    for entry in placed:
        if not entry.placement and entry.item.reading_id in readings:
            reading = readings[entry.item.reading_id]
            fast[entry.data] = _line_of(subject, count, entry.item, reading)
    most = max(len(Placement.parse(entry.placement)) for entry in placed)

    rows = []
    for entry in placed:
        if not entry.placement:
            continue
        item, reading = entry.item, readings.get(entry.item.reading_id or "")
        details = reading.details if reading else {}
        rows.append(
            PlacementRow(
                line=_line_of(subject, count, item, reading),
                placement=entry.placement,
                tensors=_names(entry.placement, tensors, most),
                fast=fast.get(entry.data),
                slow_memory=details.get("slow_memory") or "",
                workspaces=details.get("workspaces") or "",
                message="" if reading else item.message,
            )
        )
    return rows


def _line_of(subject: TupleView, count: int, item: Any, reading: Any) -> CostLine:
    if reading is None:
        return CostLine(subject, count, "missing", reason=item.reason)
    return CostLine(
        subject,
        count,
        origin="reused" if item.reused else "measured",
        cost=CallCost(
            Figure(reading.time_us, reading.time_half_width_us),
            figure_of(reading.energy_mj, reading.energy_half_width_mj),
        ),
        reading_id=item.reading_id,
    )


def _names(word: str, tensors: Sequence[Mapping[str, Any]], most: int) -> str:
    """Name the tensors of a placement: parameters by name, other inputs and outputs by number.
    Return "all" for the placement with all inputs and `most` tensors (the largest number among the
    tuple's placements)."""
    placement = Placement.parse(word)
    named: dict[int, str] = {}
    for tensor in tensors:
        named.setdefault(tensor["storage"], tensor.get("name", ""))
    inputs = [storage for storage, name in named.items() if not name]
    for position, storage in enumerate(inputs):
        named[storage] = "input" if len(inputs) == 1 else f"input {position}"
    if placement.inputs == named.keys() and len(placement) == most > 1:
        return "all"
    outputs = (f"output {number}" if number else "output" for number in sorted(placement.outputs))
    return ", ".join(
        [*(named.get(number, f"in{number}") for number in sorted(placement.inputs)), *outputs]
    )


@dataclass(frozen=True)
class AllLayers:
    """The estimated cost of one pass of the complete model."""

    variant: Variant
    layers: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost
    cost: PassCost | None  # None: there are no readings
    lacking: tuple[Unmeasured, ...]

    @property
    def per_token(self) -> PerToken:
        """Cost per token; unknown (None) unless readings cover all tuples."""
        if self.cost is None or self.covered_tuples < self.tuples:
            return PerToken.of(self.variant, None, None)
        return PerToken.of(self.variant, self.cost.time_us, self.cost.energy_mj)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions."""
        return {
            "layers": self.layers,
            **cost_json(self.cost),
            "tuples": self.tuples,
            "covered_tuples": self.covered_tuples,
            "covered": self.coverage,
            "lacking": [
                {
                    "operator_id": line.operator_id,
                    "label": line.label,
                    "calls": line.count,
                    "share": line.share,
                }
                for line in self.lacking
            ],
            **asdict(self.per_token),
        }


def all_layers(
    results: JobResults, variant: Variant, capture: tables.Capture, measured: Verdict
) -> AllLayers | None:
    """Estimate all layers of a model from the readings of some of them (`--layers`): a sum without
    a whole.

    The cost of a call is its cost in the job's own sum. Layers whose values nobody has recorded
    (the routing of experts) cost as much as those of the job. The sum of all layers may be wrong by
    as much as the sum of the measured ones, so its interval contains the gap of `measured`, the
    verdict of the measured layers.

    Returns:
        None if there is no capture of the complete model, which is made when the job is planned.
    """
    from farm.models import catalog

    whole = replace(variant, layers=0)
    needed = stored_tuples(
        results.session, whole, capture.device_type, capture.launch, capture.card_model
    )
    if not needed:
        return None
    try:
        layers = catalog.find(whole.model).depth
    except FarmError:  # a model of another farm
        return None
    plain = {} if results.capture_id is None else plain_ids(results.session, results.capture_id)
    exact = by_key(lambda part: part.subject.operator_id, results.parts)
    alike = by_key(
        lambda part: plain.get(part.subject.operator_id, part.subject.operator_id), results.parts
    )
    measured_parts = {**alike, **exact}
    parts: list[CostLine] = []
    for entry in needed:
        of_tuple = measured_parts.get(entry.operator_id, ())
        parts += _extrapolated(entry, of_tuple, results.roofline)
    # The wholes of the measured layers show at which clocks the card runs the model. Their replays
    # have other calls.
    wholes = [whole_model.without_replay() for whole_model in results.wholes]
    summed = aggregate(parts, wholes, results.canaries, target=0.95, launch=results.protocol.launch)
    time_us = _of_complete_model(summed.time, measured.time, "time")
    energy_mj = _of_complete_model(summed.energy, measured.energy, "energy")
    cost = None
    if summed.measured and time_us is not None:
        cost = PassCost(time_us, energy_mj)
    return AllLayers(
        variant=whole,
        layers=layers,
        tuples=len(needed),
        covered_tuples=len(needed) - len({entry.operator_id for entry in summed.unmeasured}),
        coverage=summed.coverage or 0.0,
        cost=cost,
        lacking=summed.unmeasured,
    )


def _of_complete_model(
    summed: Comparison | None, measured: Comparison | None, quantity: Quantity
) -> Figure | None:
    """Return the sum over all layers with an interval that contains the gap of the measured
    layers.
    """
    if summed is None:
        return None
    gap = measured.gap if measured else None
    return expected_whole(summed.total, quantity, gap)


def _extrapolated(
    needed: NeededTuple, parts: Sequence[CostLine], roofline: Roofline
) -> Iterator[CostLine]:
    """Yield parts of a tuple with the calls of the complete model, in the data classes of the
    measured layers.
    """
    if not parts:
        yield CostLine(TupleView.of_needed(needed, roofline), needed.all_calls, "missing")
    ends = [0, *itertools.accumulate(part.count for part in parts)]
    upto = [needed.all_calls * end // (ends[-1] or 1) for end in ends]
    for part, begin, end in zip(parts, upto, upto[1:], strict=False):
        if end > begin:
            yield replace(part, count=end - begin)
