"""Breakdowns of a job's cost: by owner in a training step, by slow memory, and for all layers of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlmodel import Session, col, func, select

from farm.errors import FarmError
from farm.estimate.estimate import PerToken
from farm.estimate.readings import stored_tuples
from farm.models import catalog
from farm.operators.roofline import Roofline
from farm.prediction.stored_predictor import NeededTuple
from farm.store import tables
from farm.store.rows import fetch_values
from farm.types.memory_tiers import Placement
from farm.types.protocol import Variant
from farm.types.request import Request
from farm.verdict.aggregate import aggregate
from farm.verdict.evidence import Evidence
from farm.verdict.figures import Figure, Part, figure_json
from farm.verdict.verdict import TupleRow

OF_OWNERS = ("forward", "backward", "recomputation")  # the parts of a training step that have an owner


# ---------------------------------------------------------------------------------------------- owners


@dataclass(frozen=True)
class OwnerRow:
    """All calls of one part of a training step (forward, backward, ...) that belong to one kind of module or function.

    ``owner`` is "" for accumulation and the optimizer. ``time_us`` and ``energy_mj`` are None if one of the tuples is
    not measured. The share is of the time of the sum.
    """

    owner: str
    part: str
    calls: int
    tuples: int
    time_us: float | None
    energy_mj: float | None
    time_share: float | None


@dataclass(frozen=True)
class OwnerGroup:
    """All parts of one kind of module or function; or the loss, accumulation or optimizer, which have no owner.

    Figures are None if one of the tuples is not measured. ``parts_us`` has only the parts that exist.
    """

    name: str
    parts_us: Mapping[str, float | None]
    time_us: float | None
    time_share: float | None
    energy_mj: float | None


def owners(session: Session, capture_id: int, tuples: Iterable[TupleRow], data: str) -> tuple[OwnerRow, ...]:
    """The parts of a training step, the most expensive owner first; () for a forward pass.

    Args:
        data: the data class with which all calls of a step are measured.
    """
    call = tables.Call
    query = (
        select(call.owner, call.part, call.operator_id, func.count())
        .where(call.capture_id == capture_id, call.part != "")
        .group_by(col(call.owner), col(call.part), col(call.operator_id))
    )
    groups: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for owner, part, operator_id, count in session.exec(query):
        groups[owner, part][operator_id] += count
    cost = {row.operator_id: row for row in tuples if row.data == data}

    def total(ids: Counter[str], name: str) -> float | None:
        of_one = {id_: getattr(cost.get(id_), name, None) for id_ in ids}
        return _sum(None if value is None else ids[id_] * value for id_, value in of_one.items())

    times = {key: total(ids, "time_us") for key, ids in groups.items()}
    total_us = sum(time_us or 0.0 for time_us in times.values())
    of_owner: dict[str, float] = defaultdict(float)
    for (owner, part), time_us in times.items():
        of_owner[owner or part] += time_us or 0.0
    found = [
        OwnerRow(
            *key,
            ids.total(),
            len(ids),
            times[key],
            total(ids, "energy_mj"),
            None if times[key] is None or not total_us else (times[key] or 0.0) / total_us,
        )
        for key, ids in groups.items()
    ]
    return tuple(sorted(found, key=lambda row: (-of_owner[row.owner or row.part], row.owner, row.part)))


def grouped(rows: Iterable[OwnerRow]) -> list[OwnerGroup]:
    """Group the parts by owner. The loss is one group, whatever functions it consists of."""
    groups: dict[str, list[OwnerRow]] = {}
    for row in rows:
        groups.setdefault(row.owner if row.part in OF_OWNERS else row.part, []).append(row)
    return [
        OwnerGroup(
            name,
            {part: _sum(row.time_us for row in found if row.part == part) for part in {row.part for row in found}},
            _sum(row.time_us for row in found),
            _sum(row.time_share for row in found),
            _sum(row.energy_mj for row in found),
        )
        for name, found in groups.items()
    ]


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None if a value is None."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


# ---------------------------------------------------------------------------------------------- slow memory


@dataclass(frozen=True)
class PlacementRow:
    """One tuple with some of its tensors in slow memory; figures are of one call in a loop."""

    operator_id: str
    label: str
    calls: int  # in the model, in all data classes
    placement: str  # the slow tensors: `farm.types.memory_tiers`
    tensors: str  # the same by name: "weight, output"
    time_us: float | None
    time_half_width_us: float | None
    fast_time_us: float | None  # with all tensors in fast memory
    energy_mj: float | None
    slow_memory: str  # its kind
    workspaces: str  # their place: fast, or possibly with the output
    reading_id: str | None
    reason: str  # why it is not measured
    message: str

    @property
    def times_fast(self) -> float | None:
        """The time divided by the time with all tensors in fast memory."""
        return self.time_us / self.fast_time_us if self.time_us is not None and self.fast_time_us else None


def placements(evidence: Evidence) -> tuple[PlacementRow, ...]:
    """The placements of a job's tuples: tuples in the order of their weight, placements as planned."""
    protocol = tables.ProtocolRow.__table__.columns  # type: ignore[attr-defined]
    operator = tables.Operator.__table__.columns  # type: ignore[attr-defined]
    session, readings = evidence.session, evidence.readings
    ids = dict.fromkeys(item.protocol_id for item in evidence.items)
    specs = {row.id: row.spec or {} for row in fetch_values(session, (protocol.id, protocol.spec), ids).values()}
    calls: Counter[str] = Counter()
    for part in evidence.parts:
        calls[part.operator_id] += part.count
    labels = {part.operator_id: part.label for part in reversed(evidence.parts)}
    stored = fetch_values(session, (operator.id, operator.spec), labels)
    # Each item of a tuple with its placement ("": all tensors in fast memory) and its data class.
    of_tuples = [
        (item, specs[item.protocol_id].get("placement") or "", specs[item.protocol_id].get("data"))
        for item in evidence.items
        if item.role == "tuple" and item.subject_id in labels
    ]
    fast = {
        (item.subject_id, data): readings[item.reading_id]
        for item, word, data in of_tuples
        if not word and item.reading_id in readings
    }
    most: dict[str, int] = defaultdict(int)  # tensors of a tuple that are slow at once
    for item, word, _ in of_tuples:
        most[item.subject_id] = max(most[item.subject_id], len(Placement.parse(word)))
    rows = []
    for item, word, data in of_tuples:
        if not word:
            continue
        row, beside = readings.get(item.reading_id or ""), fast.get((item.subject_id, data))
        details = row.details if row else {}
        tensors = stored[item.subject_id].spec.get("tensors", ()) if item.subject_id in stored else ()
        rows.append(
            PlacementRow(
                operator_id=item.subject_id,
                label=labels[item.subject_id],
                calls=calls[item.subject_id],
                placement=word,
                tensors=_names(word, tensors, most[item.subject_id]),
                time_us=row.time_us if row else None,
                time_half_width_us=row.time_half_width_us if row else None,
                fast_time_us=beside.time_us if beside else None,
                energy_mj=row.energy_mj if row else None,
                slow_memory=details.get("slow_memory") or "",
                workspaces=details.get("workspaces") or "",
                reading_id=item.reading_id if row else None,
                reason="" if row else item.reason,
                message="" if row else item.message,
            )
        )
    weight = {row.operator_id: row.calls * (row.fast_time_us or 0.0) for row in rows}
    return tuple(sorted(rows, key=lambda row: (-weight[row.operator_id], row.operator_id)))


def _names(word: str, tensors: Sequence[Mapping[str, Any]], most: int) -> str:
    """The names of a placement's tensors: parameters by name, other inputs and outputs by their order.

    Args:
        most: the largest number of slow tensors among the placements of the tuple. A placement with that many, and
            with all inputs, is "all".
    """
    placement = Placement.parse(word)
    named: dict[int, str] = {}
    for tensor in tensors:
        named.setdefault(tensor["storage"], tensor.get("name", ""))
    given = [storage for storage, name in named.items() if not name]
    for place, storage in enumerate(given):
        named[storage] = "input" if len(given) == 1 else f"input {place}"
    if placement.inputs == named.keys() and len(placement) == most > 1:
        return "all"
    outputs = (f"output {number}" if number else "output" for number in sorted(placement.outputs))
    return ", ".join([*(named.get(number, f"in{number}") for number in sorted(placement.inputs)), *outputs])


# ---------------------------------------------------------------------------------------------- all layers


@dataclass(frozen=True)
class LackingTuple:
    """A tuple of the complete model without a reading of the job. `share` is of the model's estimated cost."""

    operator_id: str
    label: str
    calls: int
    share: float


@dataclass(frozen=True)
class AllLayers:
    """One pass of the complete model, in µs and mJ with half-widths of the 95 % interval, if it has readings."""

    variant: Variant
    layers: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost
    time: Figure | None  # None: there are no readings
    energy: Figure | None
    lacking: tuple[LackingTuple, ...]

    @property
    def per_token(self) -> PerToken:
        """Cost per token, if readings cover all tuples."""
        complete = self.covered_tuples == self.tuples
        return PerToken.of(self.variant, *((self.time, self.energy) if complete else (None, None)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions."""
        return {
            "layers": self.layers,
            **figure_json("time", "us", self.time),
            **figure_json("energy", "mj", self.energy),
            "tuples": self.tuples,
            "covered_tuples": self.covered_tuples,
            "covered": self.coverage,
            "lacking": [asdict(entry) for entry in self.lacking],
            **asdict(self.per_token),
        }


def all_layers(evidence: Evidence, capture: tables.Capture | None) -> AllLayers | None:
    """Estimate all layers of a model from the readings of some of them (`--layers`): a sum without a whole.

    The calls are those of the complete model, captured when the job was planned. The cost of each is what the job's
    own sum takes from its readings: the gap of the measured layers shows how good this sum is.

    Returns:
        None if the job measures all layers, or if there is no capture of the complete model.
    """
    request = Request.from_json(evidence.job.request)
    if request.variant is None or not request.variant.layers or capture is None:
        return None
    whole = replace(request.variant, layers=0)
    wanted = stored_tuples(evidence.session, whole, capture.device_type, capture.launch)
    if not wanted:
        return None
    try:
        layers = catalog.find(whole.model).depth
    except FarmError:  # a model of another farm
        return None
    read: dict[str, list[Part]] = defaultdict(list)
    for part in evidence.parts:
        read[part.operator_id].append(part)
    parts = [part for one in wanted for part in _extrapolated(one, read[one.operator_id], evidence.roofline)]
    # The wholes of the measured layers show in which state the card runs the model.
    summed = aggregate(parts, evidence.wholes, evidence.canaries, target=0.95, launch=request.protocol.launch)
    lacking = tuple(LackingTuple(one.operator_id, one.label, one.count, one.share) for one in summed.unmeasured)
    return AllLayers(
        variant=whole,
        layers=layers,
        tuples=len(wanted),
        covered_tuples=len(wanted) - len({one.operator_id for one in lacking}),
        coverage=summed.coverage or 0.0,
        time=summed.time.total if summed.measured else None,
        energy=summed.energy.total if summed.energy else None,
        lacking=lacking,
    )


def _extrapolated(one: NeededTuple, parts: Sequence[Part], roofline: Roofline) -> Iterator[Part]:
    """A tuple with the calls of the complete model, divided among data classes as in the measured layers."""
    calls = sum(one.calls.values())
    if not parts:
        estimated_us = roofline.estimate_us(one.flops, one.bytes_moved)
        yield Part(
            one.operator_id, one.short_name, one.label, calls, one.flops, one.bytes_moved, estimated_us=estimated_us
        )
    passed, given, total = 0, 0, sum(part.count for part in parts)
    for part in parts:
        passed += part.count
        upto = calls * passed // total
        if upto > given:
            yield replace(part, count=upto - given)
        given = upto
