"""Whose part of a training step takes what: forward and backward of a module beside each other, optimizer, accumulation, loss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlmodel import Session, col, func, select

from farm.store import tables
from farm.verdict.figures import Chosen


@dataclass(frozen=True)
class OwnerRow:
    """All calls of one part of what one kind of module or function does; ``owner`` is "" for accumulation and the optimizer.

    ``time_us`` and ``energy_mj`` are None where one of its tuples was not measured. The share is of the whole sum's time.
    """

    owner: str
    part: str
    calls: int
    tuples: int
    time_us: float | None
    energy_mj: float | None
    time_share: float | None


def owners(
    session: Session, capture_id: int, chosen: Mapping[tuple[str, str], Chosen], data: str
) -> tuple[OwnerRow, ...]:
    """The parts of a step, the dearest owner first; () of a forward pass.

    Args:
        chosen: by tuple and class of data, what the sum takes of one call.
        data: the class that all calls of a step are read with.
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
    rows = {key: _summed(counts, chosen, data) for key, counts in groups.items()}
    whole_us = sum(time_us or 0.0 for time_us, _ in rows.values())
    of_owner: Counter[str] = Counter()
    for (owner, part), (time_us, _) in rows.items():
        of_owner[owner or part] += time_us or 0.0  # type: ignore[assignment]
    found = [
        OwnerRow(
            owner,
            part,
            groups[owner, part].total(),
            len(groups[owner, part]),
            time_us,
            energy_mj,
            time_us / whole_us if time_us is not None and whole_us else None,
        )
        for (owner, part), (time_us, energy_mj) in rows.items()
    ]
    return tuple(sorted(found, key=lambda row: (-of_owner[row.owner or row.part], row.owner, row.part)))


@dataclass(frozen=True)
class OwnerGroup:
    """One kind of module or function, or what has no owner: the loss, accumulation, the optimizer.

    Figures are None where one of its tuples was not measured; ``parts_us`` has the parts that there are.
    """

    name: str
    parts_us: Mapping[str, float | None]
    time_us: float | None
    time_share: float | None
    energy_mj: float | None


OF_OWNERS = ("forward", "backward", "recomputation")


def grouped(rows: Iterable[OwnerRow]) -> list[OwnerGroup]:
    """Forward and backward of an owner beside each other. The loss is one thing, whatever functions it is made of."""
    groups: dict[str, list[OwnerRow]] = {}
    for row in rows:
        groups.setdefault(row.owner if row.part in OF_OWNERS else row.part, []).append(row)
    return [
        OwnerGroup(
            name,
            {part: _all_of(row.time_us for row in found if row.part == part) for part in {row.part for row in found}},
            _all_of(row.time_us for row in found),
            _all_of(row.time_share for row in found),
            _all_of(row.energy_mj for row in found),
        )
        for name, found in groups.items()
    ]


def _all_of(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _summed(
    counts: Mapping[str, int], chosen: Mapping[tuple[str, str], Chosen], data: str
) -> tuple[float | None, float | None]:
    time_us = energy_mj = 0.0
    with_energy = True
    for operator_id, count in counts.items():
        taken = chosen.get((operator_id, data))
        if taken is None:
            return None, None
        time_us += count * taken.time.value
        with_energy = with_energy and taken.energy is not None
        energy_mj += count * taken.energy.value if taken.energy else 0.0
    return time_us, energy_mj if with_energy else None
