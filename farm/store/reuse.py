"""Which stored reading serves an item, so that several jobs measure a tuple only once.

The request's policy decides whose readings count (``model``: any card of that model, ``card``: the chosen cards,
``imported``: those of other farms, too; ``none``: nobody's), and its stopping rule how tight they must be. Wholes and
canaries are a matter of the very card.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from sqlmodel import Session, col, select

from farm.store.database import in_batches
from farm.store.tables import Item, ReadingRow
from farm.types.protocol import Stopping
from farm.types.reading import METHOD, Details
from farm.types.request import Request


def subject_key(item: Item, reuse: str, software_id: str) -> str:
    """Return the key that items share if one reading serves them all."""
    scope = item.card_model if item.role == "tuple" and reuse in ("model", "imported") else item.card_id
    key = f"{item.subject_id}:{scope}:{software_id}:{item.protocol_id}"
    return key if reuse != "none" else f"{key}:{item.job_id}:{item.role}"


def find_readings(
    session: Session, items: Sequence[Item], request: Request, software_id: str, card_ids: Collection[str]
) -> list[ReadingRow | None]:
    """The reading that serves each item, or None. Readings of the chosen cards (``card_ids``) are preferred."""
    if request.reuse == "none":
        return [None] * len(items)
    candidates: dict[tuple[str, str], list[ReadingRow]] = defaultdict(list)
    for subject_ids in in_batches(item.subject_id for item in items):
        query = select(ReadingRow).where(
            col(ReadingRow.subject_id).in_(subject_ids),
            col(ReadingRow.protocol_id).in_({item.protocol_id for item in items}),
            ReadingRow.software_id == software_id,
            col(ReadingRow.simulated).is_(False),
        )
        if request.reuse != "imported":
            query = query.where(ReadingRow.origin == "")
        for reading in session.exec(query):
            candidates[reading.subject_id, reading.protocol_id].append(reading)
    return [_best(candidates[item.subject_id, item.protocol_id], item, request, card_ids) for item in items]


def _best(readings: Iterable[ReadingRow], item: Item, request: Request, card_ids: Collection[str]) -> ReadingRow | None:
    """The best of the readings of one subject, protocol and software: chosen cards first, then the newest."""
    if item.role != "tuple":
        serving = [reading for reading in readings if reading.card_id == item.card_id]
    elif request.reuse == "card":
        serving = [reading for reading in readings if reading.card_id in card_ids]
    else:
        serving = [reading for reading in readings if reading.card_model == item.card_model]
    serving = [reading for reading in serving if satisfies(reading, request.stopping)]
    return max(serving, key=lambda reading: (reading.card_id in card_ids, reading.created_at_s), default=None)


#: Flags of readings that may be better if repeated.
DOUBTFUL = {"shared", "starved", "throttled_thermal", "canary_off"}


def sound(reading: ReadingRow) -> bool:
    """Whether a reading is of the current method and not doubtful."""
    return Details.from_json(reading.details).method == METHOD and not DOUBTFUL & set(reading.flags)


def tells_others(flags: Iterable[str] | None) -> bool:
    """Whether a reading with these flags may be used outside its job: not doubtful, and not of a study."""
    return not (DOUBTFUL | {"study"}) & set(flags or ())


def satisfies(reading: ReadingRow, wanted: Stopping) -> bool:
    """Whether a reading is precise enough, or did not converge in a window as long as the wanted one.

    Readings that are not sound never serve, nor do those of a study (`farm.study`), which has its own windows.
    """
    if not sound(reading) or "study" in reading.flags:
        return False
    time_ok = reading.time_half_width_us <= wanted.time_half_width * reading.time_us * 1.001
    energy_ok = (
        reading.energy_half_width_mj is None
        or reading.energy_mj is None
        or (reading.energy_half_width_mj <= wanted.energy_half_width * reading.energy_mj * 1.001)
    )
    # A window ends on its last tick.
    given_s = max(reading.window_s / 0.9, Details.from_json(reading.details).ceiling_s or 0.0)
    return (time_ok and energy_ok) or given_s >= wanted.maximum_s
