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
from farm.operators.roofline import Roofline
from farm.store import tables
from farm.store.columns import OPERATOR, PROTOCOL
from farm.store.content import plain_ids
from farm.store.database import by_key, fetch_values
from farm.types.protocol import Placement, Variant
from farm.types.tuple import NeededTuple
from farm.verdict.aggregate import aggregate
from farm.verdict.evidence import Evidence
from farm.verdict.expectation import Quantity, expected_whole
from farm.verdict.figures import Figure, Part, PerToken, figure_json, share_of
from farm.verdict.model_readings import stored_tuples
from farm.verdict.verdict import Comparison, TupleRow, Unmeasured, Verdict

OF_OWNERS = (
    "forward",
    "backward",
    "recomputation",
)  # the parts of a training step that have an owner


@dataclass(frozen=True)
class OwnerRow:
    """The cost of one kind of module or function (``owner``) in one part of a training step
    (forward, backward, ...).

    ``owner`` is "" for accumulation and the optimizer. ``time_us`` and ``energy_mj`` are None if
    one of the tuples is not measured. The share is a share of the sum's time."""

    owner: str
    part: str
    calls: int
    tuples: int
    time_us: float | None
    energy_mj: float | None
    time_share: float | None


@dataclass(frozen=True)
class OwnerGroup:
    """The cost of one kind of module or function, over all parts; or of the loss, accumulation or
    optimizer. Figures are None if one of the tuples is not measured. ``parts_us`` has only the
    parts that occur."""

    name: str
    parts_us: Mapping[str, float | None]
    time_us: float | None
    time_share: float | None
    energy_mj: float | None


def owners(
    session: Session, capture_id: int, tuples: Iterable[TupleRow], data: str
) -> tuple[OwnerRow, ...]:
    """Return the rows of a training step, the most expensive owner first. `data` is the data class
    of all its calls.
    """
    call = tables.Call
    query = (
        select(call.owner, call.part, call.operator_id, func.count())
        .where(call.capture_id == capture_id, call.part != "")
        .group_by(col(call.owner), col(call.part), col(call.operator_id))
    )
    groups: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for owner, part, operator_id, count in session.exec(query):
        groups[owner, part][operator_id] = count
    cost = {row.operator_id: row for row in tuples if row.data == data}

    def total(counts: Mapping[str, int], name: str) -> float | None:
        values = [(getattr(cost.get(id_), name, None), count) for id_, count in counts.items()]
        return _sum(None if value is None else value * count for value, count in values)

    times = {key: total(counts, "time_us") for key, counts in groups.items()}
    total_us = sum(time_us or 0.0 for time_us in times.values())
    of_owner: dict[str, float] = defaultdict(float)
    for (owner, part), time_us in times.items():
        of_owner[owner or part] += time_us or 0.0
    found = []
    for key, counts in groups.items():
        cost_of_all = times[key], total(counts, "energy_mj"), share_of(times[key], total_us)
        found.append(OwnerRow(*key, sum(counts.values()), len(counts), *cost_of_all))
    return tuple(
        sorted(found, key=lambda row: (-of_owner[row.owner or row.part], row.owner, row.part))
    )


def grouped(rows: Iterable[OwnerRow]) -> list[OwnerGroup]:
    """Group the rows by owner. All functions of the loss are one group."""
    groups = by_key(lambda row: row.owner if row.part in OF_OWNERS else row.part, rows)
    return [
        OwnerGroup(
            name,
            {
                part: _sum(row.time_us for row in found if row.part == part)
                for part in {row.part for row in found}
            },
            _sum(row.time_us for row in found),
            _sum(row.time_share for row in found),
            _sum(row.energy_mj for row in found),
        )
        for name, found in groups.items()
    ]


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if any value is None."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


@dataclass(frozen=True)
class PlacementRow:
    """A tuple with some of its tensors in slow memory. Figures are for one call, measured in a
    loop.
    """

    operator_id: str
    label: str
    calls: int  # in the model, in all data classes
    placement: str  # the slow tensors: `farm.types.protocol`
    tensors: str  # the names of the slow tensors: "weight, output"
    time_us: float | None
    time_half_width_us: float | None
    fast_time_us: float | None  # time with all tensors in fast memory
    energy_mj: float | None
    slow_memory: str  # kind of the slow memory
    workspaces: str  # where the workspaces are: fast, or possibly with the output
    reading_id: str | None
    reason: str  # why it is not measured
    message: str

    @property
    def times_fast(self) -> float | None:
        """The time as a multiple of the time with all tensors in fast memory."""
        return (
            self.time_us / self.fast_time_us
            if self.time_us is not None and self.fast_time_us
            else None
        )


def placements(evidence: Evidence) -> tuple[PlacementRow, ...]:
    """Return the placements of a job's tuples: tuples by falling weight, placements in planned
    order.
    """
    session, readings = evidence.session, evidence.readings
    labels = {part.operator_id: part.label for part in reversed(evidence.parts)}
    calls: Counter[str] = Counter()
    for part in evidence.parts:
        calls[part.operator_id] += part.count
    protocols = fetch_values(
        session, (PROTOCOL.id, PROTOCOL.spec), (item.protocol_id for item in evidence.items)
    )
    operators = fetch_values(session, (OPERATOR.id, OPERATOR.spec), labels)
    groups: dict[str, list[tuple[Any, str, Any]]] = defaultdict(
        list
    )  # tuple -> items with placement and data class
    for item in evidence.items:
        if item.role == "tuple" and item.subject_id in labels:
            spec = protocols[item.protocol_id].spec or {}
            groups[item.subject_id].append((item, spec.get("placement") or "", spec.get("data")))
    weighted = []
    for id_, group in groups.items():
        fast = {
            data: readings[one.reading_id]
            for one, word, data in group
            if not word and one.reading_id in readings
        }
        most = max(len(Placement.parse(word)) for _, word, _ in group)
        tensors = operators[id_].spec.get("tensors", ()) if id_ in operators else ()
        rows = []
        for item, word, data in group:
            if not word:
                continue
            row, beside = readings.get(item.reading_id or ""), fast.get(data)
            details = row.details if row else {}
            rows.append(
                PlacementRow(
                    operator_id=id_,
                    label=labels[id_],
                    calls=calls[id_],
                    placement=word,
                    tensors=_names(word, tensors, most),
                    **{
                        name: getattr(row, name, None)
                        for name in ("time_us", "time_half_width_us", "energy_mj")
                    },
                    fast_time_us=beside.time_us if beside else None,
                    slow_memory=details.get("slow_memory") or "",
                    workspaces=details.get("workspaces") or "",
                    reading_id=item.reading_id if row else None,
                    reason="" if row else item.reason,
                    message="" if row else item.message,
                )
            )
        if rows:
            weighted.append((-calls[id_] * (rows[-1].fast_time_us or 0.0), id_, rows))
    return tuple(row for *_, rows in sorted(weighted) for row in rows)


def _names(word: str, tensors: Sequence[Mapping[str, Any]], most: int) -> str:
    """Name the tensors of a placement: parameters by name, other inputs and outputs by number.
    Return "all" for the placement with all inputs and `most` tensors (the largest number among the
    tuple's placements)."""
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
    return ", ".join(
        [*(named.get(number, f"in{number}") for number in sorted(placement.inputs)), *outputs]
    )


@dataclass(frozen=True)
class AllLayers:
    """The estimated cost of one pass of the complete model, in µs and mJ with 95 % half-widths."""

    variant: Variant
    layers: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost
    time: Figure | None  # None: there are no readings
    energy: Figure | None
    lacking: tuple[Unmeasured, ...]

    @property
    def per_token(self) -> PerToken:
        """Cost per token; unknown (None) unless readings cover all tuples."""
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
            "lacking": [
                {
                    "operator_id": one.operator_id,
                    "label": one.label,
                    "calls": one.count,
                    "share": one.share,
                }
                for one in self.lacking
            ],
            **asdict(self.per_token),
        }


def all_layers(
    evidence: Evidence, variant: Variant, capture: tables.Capture, measured: Verdict
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
    wanted = stored_tuples(
        evidence.session, whole, capture.device_type, capture.launch, capture.card_model
    )
    if not wanted:
        return None
    try:
        layers = catalog.find(whole.model).depth
    except FarmError:  # a model of another farm
        return None
    plain = {} if evidence.capture_id is None else plain_ids(evidence.session, evidence.capture_id)
    exact = by_key(lambda part: part.operator_id, evidence.parts)
    alike = by_key(lambda part: plain.get(part.operator_id, part.operator_id), evidence.parts)
    read = {**alike, **exact}
    parts = [
        part
        for one in wanted
        for part in _extrapolated(one, read.get(one.operator_id, ()), evidence.roofline)
    ]
    # The wholes of the measured layers show at which clocks the card runs the model. Their replays
    # have other calls.
    wholes = [one.without_replay() for one in evidence.wholes]
    summed = aggregate(
        parts, wholes, evidence.canaries, target=0.95, launch=evidence.protocol.launch
    )
    return AllLayers(
        variant=whole,
        layers=layers,
        tuples=len(wanted),
        covered_tuples=len(wanted) - len({one.operator_id for one in summed.unmeasured}),
        coverage=summed.coverage or 0.0,
        time=_of_complete_model(summed.time, measured.time, "time") if summed.measured else None,
        energy=_of_complete_model(summed.energy, measured.energy, "energy"),
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


def _extrapolated(one: NeededTuple, parts: Sequence[Part], roofline: Roofline) -> Iterator[Part]:
    """Yield parts of a tuple with the calls of the complete model, in the data classes of the
    measured layers.
    """
    if not parts:
        estimated_us = roofline.estimate_us(one.flops, one.bytes_moved)
        about = (
            one.operator_id,
            one.short_name,
            one.label,
            one.all_calls,
            one.flops,
            one.bytes_moved,
        )
        yield Part(*about, estimated_us)
    ends = [0, *itertools.accumulate(part.count for part in parts)]
    upto = [one.all_calls * end // (ends[-1] or 1) for end in ends]
    for part, begin, end in zip(parts, upto, upto[1:], strict=False):
        if end > begin:
            yield replace(part, count=end - begin)
