"""Stored readings that are comparable with those of a check: the same tuple, protocol, software and
method, on cards of the same model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.store.columns import READING
from farm.store.reuse import UNSOUND, tells_others
from farm.store.tables import ReadingRow

_COLUMNS = (
    *("id", "subject_id", "card_id", "time_us", "power_w", "temperature_c"),
    *("flags", "created_at_s"),
)


@dataclass(frozen=True)
class Comparable:
    """A stored reading of one figure on one card."""

    card_id: str
    time_us: float
    power_w: float | None
    temperature_c: float | None
    created_at_s: float


def comparable_readings(
    sessions: Sequence[Session], checked: Sequence[ReadingRow]
) -> Mapping[str, Sequence[Comparable]]:
    """Return the id of each reading of a check -> the earlier comparable readings, the oldest
    first.

    Left out are readings that another process disturbed, those of studies, and the check itself. A
    reading that several databases have counts once.
    """
    comparable: dict[str, list[Comparable]] = defaultdict(list)
    for reading in checked:
        rows: dict[str, Any] = {}
        for session in sessions:
            for row in session.execute(_query(reading)):
                if tells_others(row.flags) and not UNSOUND.intersection(row.flags):
                    rows.setdefault(row.id, row)
        for row in sorted(rows.values(), key=lambda row: row.created_at_s):
            comparable[reading.id].append(
                Comparable(
                    row.card_id, row.time_us, row.power_w, row.temperature_c, row.created_at_s
                )
            )
    return comparable


def _query(reading: ReadingRow) -> Any:
    return sqlalchemy.select(*(READING[name] for name in _COLUMNS)).where(
        READING.subject_id == reading.subject_id,
        READING.card_model == reading.card_model,
        READING.software_id == reading.software_id,
        READING.protocol_id == reading.protocol_id,
        READING.method == reading.method,
        READING.simulated == reading.simulated,
        READING.id != reading.id,
        sqlalchemy.or_(
            READING.card_id != reading.card_id,
            READING.created_at_s < reading.created_at_s,
        ),
    )
