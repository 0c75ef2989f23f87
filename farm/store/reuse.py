"""The stored readings that may be used again: for an item of a job, or outside of their job."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy
from sqlmodel import Session, col, select

from farm.store.columns import READING
from farm.store.database import among
from farm.store.tables import CardRow, ItemRole, ReadingRow, SoftwareRow
from farm.types.details import Details
from farm.types.protocol import Stopping
from farm.types.reading import method_of
from farm.types.request import Request


def find_readings(
    session: Session,
    items: Sequence[Any],
    request: Request,
    software_id: str,
    card_ids: Collection[str],
) -> list[ReadingRow | None]:
    """Return for each item the reading to reuse, or None. Readings of the chosen cards
    (``card_ids``) are preferred.
    """
    if request.reuse == "none":
        return [None] * len(items)
    candidates: dict[tuple[str, str], list[ReadingRow]] = defaultdict(list)
    query = select(ReadingRow).where(
        col(ReadingRow.protocol_id).in_({item.protocol_id for item in items}),
        ReadingRow.software_id == software_id,
        col(ReadingRow.simulated).is_(False),
    )
    if request.reuse != "imported":
        query = query.where(ReadingRow.origin == "")
    for (reading,) in among(
        session, query, ReadingRow.subject_id, (item.subject_id for item in items)
    ):
        candidates[reading.subject_id, reading.protocol_id].append(reading)
    return [
        _best(candidates[item.subject_id, item.protocol_id], item, request, card_ids)
        for item in items
    ]


def software_of_groups(session: Session, cards: Sequence[CardRow]) -> str | None:
    """Return the id of the software with which these cards measure together; None if it is unknown
    or differs.
    """
    libraries = {(card.software_id, (card.links or {}).get("communication", "")) for card in cards}
    software_id, communication = libraries.pop()
    row = (
        session.get(SoftwareRow, software_id)
        if software_id and communication and not libraries
        else None
    )
    return (
        dataclasses.replace(row.value, communication=communication).id if row is not None else None
    )


def _best(
    readings: Iterable[ReadingRow], item: Any, request: Request, card_ids: Collection[str]
) -> ReadingRow | None:
    """Return the reading to reuse for an item, or None. Readings of chosen cards come first, then
    the newest.
    """
    if not ItemRole(item.role).has_reading:
        return None
    if item.role != "tuple":
        serving = [reading for reading in readings if reading.card_id == item.card_id]
    elif request.reuse == "card":
        serving = [reading for reading in readings if reading.card_id in card_ids]
    else:
        serving = [reading for reading in readings if reading.card_model == item.card_model]
    stopping = request.stopping.allowing(item.half_width)
    serving = [reading for reading in serving if satisfies(reading, stopping)]
    return max(
        serving,
        key=lambda reading: (reading.card_id in card_ids, reading.created_at_s),
        default=None,
    )


#: Flags of doubtful readings: a repetition may be better.
DOUBTFUL = {"shared", "starved", "throttled_thermal", "canary_off"}

UNSOUND = DOUBTFUL | {"busy_host"}  # by other programs, also on a CPU


def sound(reading: ReadingRow) -> bool:
    """True if the reading has the current method of its card and no doubtful flag."""
    current = method_of(reading.card_id)
    return Details.from_json(reading.details).method == current and not DOUBTFUL & set(
        reading.flags
    )


def tells_others(flags: Iterable[str] | None) -> bool:
    """True if a reading with these flags may be used outside its job: no doubtful flag, and no
    study.
    """
    return not (DOUBTFUL | {"study"}) & set(flags or ())


def sound_readings(
    session: Session, card_model: str, names: Iterable[str], *chosen: Any
) -> Iterator[Any]:
    """Yield columns of the usable readings of a card model, oldest first: without simulations and
    studies.
    """
    query = sqlalchemy.select(*(READING[name] for name in names)).where(
        READING.card_model == card_model,
        READING.simulated.is_(False),
        READING.method.is_not(None),
        *chosen,
    )
    for row in session.execute(query.order_by(READING.created_at_s, READING.id)):
        if tells_others(row.flags):
            yield row


def satisfies(reading: ReadingRow, wanted: Stopping) -> bool:
    """True if a reading is precise enough, or if its window was as long as the longest wanted
    window. False for readings that are not `sound`, or have flags that the rule does not accept."""
    if not sound(reading) or not wanted.accepts(reading.flags):
        return False
    time_ok = reading.time_half_width_us <= wanted.time_half_width * reading.time_us * 1.001
    energy_ok = (
        reading.energy_half_width_mj is None
        or reading.energy_mj is None
        or (reading.energy_half_width_mj <= wanted.energy_half_width * reading.energy_mj * 1.001)
    )
    # A window ends with a tick, so it may be a little shorter than its limit.
    given_s = max(
        reading.window_s / 0.9, Details.from_json(reading.details).timing.ceiling_s or 0.0
    )
    return (time_ok and energy_ok) or given_s >= wanted.maximum_s
