"""What do tensors in another GPU's memory cost, against the host's?

Each tuple of a model by itself: every tensor slow alone, and all of them, and between these none. First with the slow ones in a
neighbour's memory, then in the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from farm.devices.lock import CardLock
from farm.pages.plots import Chart, Line
from farm.settings import settings
from farm.study.findings import Column, Findings, change, known
from farm.study.laboratory import Laboratory, Plan, Sample, require, require_neighbours
from farm.types.format import percent
from farm.types.tuple import parse

QUICK = 4  # tuples, a dozen configurations
FAST = ""  # nothing is slow

Configurations = Sequence[tuple[Sample, Sequence[str]]]
Times = Mapping[tuple[str, str], float]  # us, by tuple and what is slow


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """In the memory of the first neighbour, which rests meanwhile, then in the host's; all fast beside both.

    Raises:
        UsageError: the host has one card.
        CardBusy: a worker serves the neighbour, or somebody else measures on it.
        Unmeasurable: the card does not reach its memory.
        FarmError: nothing could be read.
    """
    from farm.operators.replay import placements_of

    require_neighbours(laboratory, plan)
    peer = plan.neighbours[0]
    with CardLock(peer.id, settings().lock_dir):
        samples = laboratory.samples(plan.variant, plan.tuples or (QUICK if plan.quick else None))
        wanted = [(sample, placements_of(parse(sample.subject.spec), "each")) for sample in samples]
        laboratory.expect(2 * sum(1 + len(words) for _, words in wanted))
        with laboratory.slow_on(peer):  # first: a card that does not reach it says so before anything is read
            there = _read(laboratory, wanted, "of another GPU")
        here = _read(laboratory, wanted, "of the host")
    rows = tuple(_row(sample, word, here, there) for sample, words in wanted for word in words)
    columns = (
        Column("operator", "operator tuple"),
        Column("placement", "slow"),
        Column("fast_time_us", "time, all fast", "time_us"),
        Column("host_time_us", "time, host", "time_us"),
        Column("peer_time_us", "time, other GPU", "time_us"),
        Column("change_fast", "other GPU, to all fast", "change"),
        Column("change_host", "other GPU, to host", "change"),
    )
    points = sorted((row["host_time_us"], row["change_host"] * 100) for row in rows if row["change_host"] is not None)
    lines = (Line("another GPU's memory", *map(list, zip(*points, strict=True)), alone=True),) if points else ()
    chart = Chart(
        "in another GPU's memory, against the host's", "time in the host's, µs", "%", lines, x_log=True, zero=True
    )
    return Findings(columns, rows, (f"The other GPU is {peer}.", *_notes(rows, here, there)), (chart,))


def _read(laboratory: Laboratory, wanted: Configurations, memory: str) -> Times:
    stopping = laboratory.stopping(quick=True)
    times, rows = {}, []
    for sample, words in wanted:
        for word in laboratory.shuffled(sample, [FAST, *words]):
            protocol = laboratory.protocol(placement=word)
            row = laboratory.read(sample, protocol, stopping, placement=word or "none", memory=memory)
            if row is not None:
                # The median of the passes, as of those without energy the figure is.
                times[sample.subject.id, word] = row.time_median_us
                rows.append(row if word else None)
    require(rows, laboratory)
    return times


def _row(sample: Sample, word: str, here: Times, there: Times) -> dict[str, Any]:
    tuple_id = sample.subject.id
    host_us, peer_us = here.get((tuple_id, word)), there.get((tuple_id, word))
    return {
        "operator": sample.label,
        "placement": word,
        "fast_time_us": here.get((tuple_id, FAST)),
        "host_time_us": host_us,
        "peer_time_us": peer_us,
        "change_fast": change(peer_us, there.get((tuple_id, FAST))),
        "change_host": change(peer_us, host_us),
    }


def _notes(rows: Sequence[Mapping[str, Any]], here: Times, there: Times) -> list[str]:
    notes = []
    for name, times in (("the host's memory", here), ("the other GPU's", there)):
        slower = [
            time_us / times[tuple_id, FAST]
            for (tuple_id, word), time_us in times.items()
            if word != FAST and times.get((tuple_id, FAST))
        ]
        if slower:
            notes.append(
                f"Slow in {name}: {statistics.median(slower):.3g} times all fast in the median of {len(slower)}, "
                f"{min(slower):.3g} to {max(slower):.3g}."
            )
    if shares := [1 + off for off in known([row["change_host"] for row in rows])]:
        notes.append(
            f"The other GPU's memory takes {percent(statistics.median(shares))} of the host's time in the median, "
            f"{percent(min(shares))} to {percent(max(shares))}."
        )
    fast = known([change(there.get(key), time_us) for key, time_us in here.items() if key[1] == FAST])
    if fast:
        notes.append(
            f"All fast, read beside both: {statistics.median(fast):+.2%} in the median of {len(fast)}, "
            f"{max(fast, key=abs):+.2%} at most."
        )
    return notes
