"""The cost of a training step by owner: the modules and functions that its calls belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, col, func, select

from farm.store import tables
from farm.store.database import by_key
from farm.types.figure import share_of
from farm.verdict.cost_line import CostGroup, CostLine, merged

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
    # In a fixed order: a sum of the same numbers in another order has other last digits.
    for owner, part, operator_id, count in sorted(session.exec(query).all()):
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
