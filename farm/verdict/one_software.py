"""Readings of different software are never summed: a verdict that would be made of such says so and judges nothing.

A job is planned for one software. But a host may be given another torch while the job waits: what its cards read from then
on is of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sqlmodel import Session, col, select

from farm.store.rows import fetch, in_batches
from farm.store.tables import Reading, Software
from farm.verdict.figures import Part, Whole
from farm.verdict.verdict import Verdict

NAMES = {"torch": "torch", "torchvision": "torchvision", "cuda": "CUDA", "cudnn": "cuDNN", "driver": "driver"}


def of_one_software(session: Session, verdict: Verdict, parts: Iterable[Part], wholes: Iterable[Whole]) -> Verdict:
    """The verdict, without an outcome where its readings are of several."""
    views = [part.reading for part in parts] + [whole.reading for whole in wholes]
    numbers: Counter[str] = Counter()
    for batch in in_batches(view.reading_id for view in views if view is not None):
        numbers.update(session.exec(select(Reading.software_id).where(col(Reading.id).in_(batch))))
    if len(numbers) < 2:
        return verdict
    found = fetch(session, Software, numbers)
    told = _told_apart([found[software_id] for software_id, _ in numbers.most_common()])
    each = " and ".join(f"{number} with {name}" for (_, number), name in zip(numbers.most_common(), told, strict=True))
    return verdict.withheld(
        f"Readings of different software are not summed, and these are: {each}. Give all hosts the same, then run it "
        "again: what was read with that is not read twice."
    )


def _told_apart(rows: Sequence[Software]) -> list[str]:
    """What differs between them, in words."""
    fields = [*NAMES, "python", "platform"]
    differ = [name for name in fields if len({getattr(row, name) for row in rows}) > 1]
    return [", ".join(f"{NAMES.get(name, name)} {getattr(row, name) or 'none'}" for name in differ) for row in rows]
