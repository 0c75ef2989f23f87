"""Do many calls with tensors in slow memory, changed in one run, take what each takes alone, and as a tuple by itself?

Each tuple of a model is changed at its first call: every tensor slow alone, and all of them. `together` changes as many calls in a
run as do not touch each other, `alone` one; `isolated` is the tuple's own reading under that placement.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from farm.errors import FarmError
from farm.pages.plots import Chart, Line
from farm.study.findings import Column, Findings, change, known
from farm.study.laboratory import Laboratory, Plan
from farm.types.format import percent

MOST, QUICK = 160, 12  # configurations


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """All configurations in place, both ways; a full go reads each by itself as well.

    Raises:
        FarmError: the card has no slow memory, or nothing could be placed.
    """
    found = laboratory.in_situ(plan.variant, plan.tuples or (QUICK if plan.quick else MOST))
    if not found["changes"]:
        why = next((one["why"] for one in found["left_out"]), "the model has no calls")
        raise FarmError(f"No tensor of {plan.variant} could be placed: {why}", "Choose another model.")
    isolated = {} if plan.quick else _isolated(laboratory, plan, found["changes"])
    rows = tuple(_row(one, isolated.get((one["tuple_id"], one["placement"]))) for one in found["changes"])
    columns = (
        Column("operator", "operator tuple"),
        Column("placement", "slow"),
        Column("alone_time_us", "one a run", "time_us"),
        Column("together_time_us", "many a run", "time_us"),
        Column("change", "change", "change"),
        Column("half_width", "±", "share"),
        *(
            (Column("isolated_time_us", "by itself", "time_us"), Column("change_isolated", "in place", "change"))
            if isolated
            else ()
        ),
    )
    return Findings(columns, rows, tuple(_notes(found, rows)), _charts(rows))


def _isolated(laboratory: Laboratory, plan: Plan, changes: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    samples = {sample.subject.id: sample for sample in laboratory.samples(plan.variant)}
    wanted = [one for one in changes if one["tuple_id"] in samples]
    laboratory.expect(len(wanted))
    stopping = laboratory.stopping(quick=True)
    read = {}
    for one in wanted:
        word = one["placement"]
        row = laboratory.read(samples[one["tuple_id"]], laboratory.protocol(placement=word), stopping, placement=word)
        if row is not None:
            read[one["tuple_id"], word] = row.time_us
    return read


def _row(one: dict[str, Any], isolated_us: float | None) -> dict[str, Any]:
    alone, together = one["alone"], one["together"]
    half_width_us = math.hypot(alone["half_width_us"], together["half_width_us"])
    return {
        "operator": one["label"],
        "placement": one["placement"],
        "alone_time_us": alone["time_us"],
        "together_time_us": together["time_us"],
        "change": change(together["time_us"], alone["time_us"]),
        "half_width": half_width_us / alone["time_us"] if alone["time_us"] > 0 else None,
        "isolated_time_us": isolated_us,
        "change_isolated": change(alone["time_us"], isolated_us),
    }


def _notes(found: dict[str, Any], rows: tuple[dict[str, Any], ...]) -> list[str]:
    runs, took_s = found["runs"], found["took_s"]
    notes = [
        f"{runs['alone']} runs one at a time, {runs['together']} with many together: {runs['alone'] / runs['together']:.1f} times "
        f"fewer; {took_s['alone']:.1f} s and {took_s['together']:.1f} s."
    ]
    changes = known([row["change"] for row in rows])
    if len(changes) > 1:
        low, *_, high = statistics.quantiles(changes, n=20)
        within = statistics.fmean(
            abs(row["change"]) <= row["half_width"]
            for row in rows
            if row["change"] is not None and row["half_width"] is not None
        )
        notes.append(
            f"Many against one: {statistics.median(changes):+.2%} in the median of {len(changes)}, nine tenths between {low:+.2%} "
            f"and {high:+.2%}; {percent(within, 0)} within their intervals."
        )
    if apart := known([row["change_isolated"] for row in rows]):
        size = statistics.median(map(abs, apart))
        notes.append(
            f"In place against by itself: {statistics.median(apart):+.2%} in the median of {len(apart)}, {size:.2%} whatever the sign."
        )
    if left_out := found["left_out"]:
        notes.append(
            f"{len(left_out)} configurations could not be placed in a run, the first: {left_out[0]['label']}, "
            f"{left_out[0]['placement']}: {left_out[0]['why']}"
        )
    return notes


def _charts(rows: tuple[dict[str, Any], ...]) -> tuple[Chart, ...]:
    def against(key: str) -> Line | None:
        points = sorted((row["alone_time_us"], row[key] * 100) for row in rows if row[key] is not None)
        names = {"change": "many a run", "change_isolated": "against the tuple by itself"}
        return Line(names[key], *map(list, zip(*points, strict=True)), alone=True) if points else None

    lines = tuple(line for key in ("change", "change_isolated") if (line := against(key)) is not None)
    return (
        Chart(
            "calls in place with tensors in slow memory", "time with one a run, µs", "%", lines, x_log=True, zero=True
        ),
    )
