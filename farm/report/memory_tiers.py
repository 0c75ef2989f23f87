"""What each tuple takes with some of its tensors in slow memory, beside what it takes with none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, col, select

from farm.store import tables
from farm.store.rows import in_batches
from farm.types.memory_tiers import Placement
from farm.verdict.figures import Part


@dataclass(frozen=True)
class PlacementRow:
    """One tuple in one configuration; figures are of one call, looped, as read."""

    operator_id: str
    label: str
    calls: int  # in the model, whatever their class of data
    placement: str  # what is slow: `farm.types.memory_tiers`
    tensors: str  # the same by name: "weight, output"
    time_us: float | None
    time_half_width_us: float | None
    fast_time_us: float | None  # with everything fast
    energy_mj: float | None
    slow_memory: str  # what it was
    workspaces: str  # where they were: fast, or may be with the output
    reading_id: str | None
    reason: str  # why it is not measured
    message: str

    @property
    def times_fast(self) -> float | None:
        """The time over that with everything fast."""
        return self.time_us / self.fast_time_us if self.time_us is not None and self.fast_time_us else None


def placements(
    session: Session, parts: Sequence[Part], items: Sequence[Any], readings: Mapping[str, Any]
) -> tuple[PlacementRow, ...]:
    """The configurations of a job's tuples: tuples in the order of their weight, configurations as they were planned.

    Args:
        items, readings: as of `farm.verdict.composing.Evidence`.
    """
    protocol = tables.Protocol
    specs: dict[str, Mapping[str, Any]] = {}
    for batch in in_batches(dict.fromkeys(item.protocol_id for item in items)):
        query = select(protocol.id, protocol.spec).where(col(protocol.id).in_(batch))
        specs |= {id_: spec or {} for id_, spec in session.exec(query)}
    calls: Counter[str] = Counter()
    for part in parts:
        calls[part.operator_id] += part.count
    labels = {part.operator_id: part.label for part in reversed(parts)}
    operator, tensors = tables.Operator, dict[str, Sequence[Mapping[str, Any]]]()
    for batch in in_batches(labels):
        for id_, spec in session.exec(select(operator.id, operator.spec).where(col(operator.id).in_(batch))):
            tensors[id_] = spec.get("tensors", ())
    of_tuples = [item for item in items if item.role == "tuple" and item.subject_id in labels]
    fast = {
        (item.subject_id, specs[item.protocol_id].get("data")): readings[item.reading_id]
        for item in of_tuples
        if not specs[item.protocol_id].get("placement") and item.reading_id in readings
    }
    most: dict[str, int] = defaultdict(int)  # tensors of a tuple that are slow at once
    for item in of_tuples:
        word = specs[item.protocol_id].get("placement") or ""
        most[item.subject_id] = max(most[item.subject_id], len(Placement.parse(word)))
    rows = []
    for item in of_tuples:
        if not (word := specs[item.protocol_id].get("placement")):
            continue
        row, beside = readings.get(item.reading_id or ""), fast.get((item.subject_id, specs[item.protocol_id]["data"]))
        details = row.details if row else {}
        rows.append(
            PlacementRow(
                operator_id=item.subject_id,
                label=labels[item.subject_id],
                calls=calls[item.subject_id],
                placement=word,
                tensors=_names(word, tensors.get(item.subject_id, ()), most[item.subject_id]),
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
    """What a placement's tensors are called: parameters by their name, other inputs and outputs by their order.

    Args:
        most: tensors that are slow at once in any of the tuple's configurations: with all inputs among them, all.
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
