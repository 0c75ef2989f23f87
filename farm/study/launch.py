"""What does launching cost? The whole model and its tuples, by CUDA graph and eagerly, each sum against its own whole."""

from __future__ import annotations

import dataclasses

from farm.pages.plots import Chart
from farm.store import tables
from farm.study.findings import Column, Findings, change
from farm.study.laboratory import Laboratory, Plan, require
from farm.study.summing import against_whole


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """At batch 1, where launching weighs most, and at the batch asked for (that one only in a full go)."""
    stopping = laboratory.stopping(quick=plan.quick)
    batches = [1] if plan.quick else sorted({1, plan.variant.batch})
    table: list[dict[str, object]] = []
    everything: list[tables.Reading | None] = []
    notes = []
    variants = [dataclasses.replace(plan.variant, batch=batch) for batch in batches]
    parts = [laboratory.parts(variant, plan.tuples) for variant in variants]
    laboratory.expect(len(laboratory.launches) * sum(1 + len(samples) for samples in parts))
    for batch, variant, samples in zip(batches, variants, parts, strict=True):
        wholes: dict[str, float] = {}
        for launch in laboratory.launches:
            protocol = laboratory.protocol(launch=launch)
            whole = laboratory.read(laboratory.whole(variant), protocol, stopping, launch=launch, batch=batch)
            read = [
                (
                    one,
                    laboratory.read(
                        one, dataclasses.replace(protocol, data=one.data_class), stopping, launch=launch, batch=batch
                    ),
                )
                for one in samples
            ]
            everything += [whole, *(row for _, row in read)]
            if whole is not None:
                wholes[launch] = whole.time_us
            table.append(
                {
                    "batch": batch,
                    "launch": launch,
                    **against_whole(read, whole, launch, all_tuples=plan.tuples is None),
                    "over_graph": change(whole.time_us, wholes.get("graph")) if whole and launch != "graph" else None,
                }
            )
        if {"graph", "eager"} <= set(wholes):
            gap_us = wholes["eager"] - wholes["graph"]
            notes.append(f"Launch gap of {variant}: {gap_us:+.0f} µs a pass ({gap_us / wholes['graph']:+.1%}).")
    require(everything, laboratory)
    if plan.tuples is not None:
        notes.append(
            f"Only the {plan.tuples} heaviest tuples were read: their sum is not the model's, and is not drawn."
        )
    if laboratory.launches == ("eager",):
        notes.append("A CPU has no CUDA graphs: there is one launch mode to read.")
    columns = (
        Column("batch", "batch", "count"),
        Column("launch", "launch"),
        Column("tuples", "tuples", "count"),
        Column("whole_time_us", "whole, time", "time_us"),
        Column("over_graph", "over graph", "change"),
        Column("sum_time_us", "sum, time", "time_us"),
        Column("gap_time", "gap", "change"),
        Column("whole_energy_mj", "whole, energy", "energy_mj"),
        Column("gap_energy", "gap", "change"),
    )
    bars: dict[str, dict[str, float]] = {}
    for row in table:
        named = {"whole": row["whole_time_us"], "sum": row["sum_time_us"] if plan.tuples is None else None}
        bars[f"batch {row['batch']}, {row['launch']}"] = {
            name: value / 1e3 for name, value in named.items() if isinstance(value, float)
        }
    chart = Chart("time of one pass", y_name="ms", bars=bars)
    return Findings(columns, tuple(table), tuple(notes), (chart,), variants[-1])
