"""The rate of a collective on the links between cards."""

from __future__ import annotations

from farm.errors import TupleRejected
from farm.subjects.parsing import parse
from farm.subjects.registry import kind_of
from farm.types.reading import Reading
from farm.types.subject import Subject


def bus_bytes_per_s(subject: Subject, reading: Reading) -> float | None:
    """Return the bus bandwidth of a collective as nccl-tests defines it; None for all other
    subjects."""
    if subject.whole:
        return None
    try:
        spec = parse(subject.spec)
    except TupleRejected:  # as in tests with simulated cards
        return None
    moved_bytes = kind_of(spec).bus_bytes(spec)
    return round(moved_bytes / reading.time_us.value * 1e6) if moved_bytes else None
