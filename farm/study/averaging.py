"""Which average to trust? Mean, median and 3-sigma-trimmed mean of many short windows against one long window."""

from __future__ import annotations

import statistics
from typing import Any

from farm.pages.plots import Chart
from farm.store import tables
from farm.study.findings import Column, Findings
from farm.study.laboratory import Laboratory, Plan, Sample, require
from farm.types.reading import Details

FIGURES = ("mean", "median", "trimmed mean")


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """Short windows again and again, with a long one before: how far off and how scattered is each figure?"""
    short_s, long_s = laboratory.scaled(0.5), laboratory.scaled(4.0 if plan.quick else 10.0)
    times = 5 if plan.quick else 10
    protocol = laboratory.protocol()
    found: list[tuple[Sample, dict[str, tuple[float, float]]]] = []
    everything: list[tables.Reading | None] = []
    samples = laboratory.samples(plan.variant, plan.tuples or (4 if plan.quick else 8))
    laboratory.expect(len(samples) * (1 + times))
    for sample in samples:
        reference = laboratory.read(sample, protocol, laboratory.exactly(long_s), window_s=long_s)
        again = [laboratory.read(sample, protocol, laboratory.exactly(short_s), window_s=short_s) for _ in range(times)]
        everything += [reference, *again]
        rows = [row for row in again if row is not None]
        if reference is None or len(rows) < 2:
            continue
        # The mean of the long window: what power must be multiplied with to give the energy that was drawn.
        true_us = _figures(reference)["mean"]
        found.append(
            (
                sample,
                {
                    name: (
                        statistics.mean(_figures(row)[name] for row in rows) / true_us - 1,
                        statistics.stdev(_figures(row)[name] for row in rows) / true_us,
                    )
                    for name in FIGURES
                },
            )
        )
    require(everything, laboratory)
    table: list[dict[str, Any]] = []
    for name in FIGURES:
        off = [figures[name][0] for _, figures in found]
        spread = [figures[name][1] for _, figures in found]
        table.append(
            {
                "figure": name,
                "tuples": len(off),
                "off": statistics.median(off) if off else None,
                "off_most": max(off, key=abs, default=None),
                "spread": statistics.median(spread) if spread else None,
                "spread_most": max(spread, default=None),
            }
        )
    columns = (
        Column("figure", "figure"),
        Column("tuples", "tuples", "count"),
        Column("off", "off, median", "change"),
        Column("off_most", "most", "change"),
        Column("spread", "scatter, median", "share"),
        Column("spread_most", "most", "share"),
    )
    notes = (
        f"{times} windows of {short_s:g} s against the mean of one of {long_s:g} s; scatter is the standard deviation.",
    )
    charts = tuple(
        Chart(
            title,
            y_name="%",
            bars={sample.label: {name: figures[name][position] * 100 for name in FIGURES} for sample, figures in found},
            zero=True,
        )
        for position, title in ((0, "deviation from the long window's mean"), (1, "scatter between short windows"))
    )
    return Findings(columns, tuple(table), notes, charts if found else ())


def _figures(row: tables.Reading) -> dict[str, float]:
    mean_us = Details.from_json(row.details).time_mean_us or row.time_us
    return {"mean": mean_us, "median": row.time_median_us, "trimmed mean": row.time_trimmed_us}
