"""The costs of a job's tuples with some of their tensors in slow memory."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.store.columns import OPERATOR, PROTOCOL
from farm.store.database import fetch_values
from farm.types.card_kind import is_cpu_id
from farm.types.fields import figure_json
from farm.types.figure import Figure, figure_of, value_of
from farm.types.placement import Placement
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import CallCost
from farm.verdict.job_results import JobResults

#: The last method of a CPU whose passes redirected slow outputs in Python
#: (`farm.types.reading.CPU_METHOD`): 6 us for a ReLU that takes 2 us.
_REDIRECTING_METHOD = 8
_REDIRECTED = (
    "The time includes Python code of the farm, because an earlier version measured it. Measure it "
    "again: give --reuse none."
)


@dataclass(frozen=True)
class PlacementRow:
    """A tuple with some of its tensors in slow memory."""

    line: CostLine  # of one call, measured in a loop; its count is in all data classes
    placement: str  # the slow tensors: `farm.types.placement`
    tensors: str  # the names of the slow tensors: "weight, output"
    fast: CostLine | None  # the same tuple with all tensors in fast memory
    slow_memory: str  # kind of the slow memory
    workspaces: str  # where the workspaces are: fast, or possibly with the output
    message: str  # details of `line.reason`, or what the time includes
    comparable: bool = True  # False: the time includes Python code of the farm

    @property
    def fast_time_us(self) -> float | None:
        """The time with all tensors in fast memory."""
        return value_of(self.fast.time_us) if self.fast else None

    @property
    def times_fast(self) -> float | None:
        """The time as a multiple of the time with all tensors in fast memory. None if one of them
        is missing, or if they are not comparable."""
        if self.line.time_us is None or not self.fast_time_us or not self.comparable:
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
    order.
    """
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
        comparable = reading is None or not _redirected(entry.placement, reading)
        message = item.message if reading is None else ""
        rows.append(
            PlacementRow(
                line=_line_of(subject, count, item, reading),
                placement=entry.placement,
                tensors=_names(entry.placement, tensors, most),
                fast=fast.get(entry.data),
                slow_memory=details.get("slow_memory") or "",
                workspaces=details.get("workspaces") or "",
                message=message if comparable else _REDIRECTED,
                comparable=comparable,
            )
        )
    return rows


def _redirected(placement: str, reading: Any) -> bool:
    """True if the time of a reading includes Python code that redirected slow outputs."""
    has_old_method = (reading.details.get("method") or 0) <= _REDIRECTING_METHOD
    return (
        is_cpu_id(reading.card_id) and has_old_method and bool(Placement.parse(placement).outputs)
    )


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
