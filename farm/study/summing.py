"""Sum against whole within a study: the same arithmetic that judges jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from farm.store import tables
from farm.study.laboratory import Sample
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Part, ReadingView, Whole


def against_whole(
    read: Iterable[tuple[Sample, tables.Reading | None]],
    whole: tables.Reading | None,
    launch: str,
    *,
    all_tuples: bool,
    looped: bool = False,
) -> dict[str, Any]:
    """Sums and gaps of tuples against a whole.

    Args:
        all_tuples: whether these are all of the model's tuples; otherwise, or if one has no reading, there is no gap.
        looped: take every tuple as it ran in its loop, also where it was timed among other operators.
    """

    def view(row: tables.Reading) -> ReadingView:
        found = ReadingView.of(row)
        if not looped:
            return found
        return dataclasses.replace(found, details=dataclasses.replace(found.details, context=None))

    parts = [
        Part(
            sample.subject.id,
            sample.short_name,
            sample.label,
            sample.count,
            estimated_us=sample.weight_us / max(1, sample.count),
            reading=view(row) if row else None,
        )
        for sample, row in read
    ]
    wholes = [Whole(whole.card_id, ReadingView.of(whole), "", launch)] if whole else []
    verdict = aggregate(parts, wholes, target=0.95, launch=launch)
    complete = verdict.measured == verdict.parts
    energy = verdict.energy
    return {
        "tuples": verdict.measured,
        "tuples_of": verdict.parts,
        "sum_time_us": verdict.time.total.value if complete else None,
        "whole_time_us": whole.time_us if whole else None,
        "gap_time": verdict.time.gap.value if complete and all_tuples and verdict.time.gap else None,
        "sum_energy_mj": energy.total.value if complete and energy else None,
        "whole_energy_mj": whole.energy_mj if whole else None,
        "gap_energy": energy.gap.value if complete and all_tuples and energy and energy.gap else None,
    }
