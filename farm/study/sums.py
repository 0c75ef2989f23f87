"""Studies that compare sums of tuples with the whole model: residency in the cache, and launching."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from farm.pages.plots import Chart
from farm.store import tables
from farm.study.laboratory import Laboratory, Sample, StudyOptions
from farm.study.results import Findings, ResultColumn, bar_chart, change, change_of, known, median_and_most
from farm.types.reading import Details
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Part, ReadingView, Whole

POLICIES = ("resident", "reuse", "stream", "chain")


def residency(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Which residency policy makes the sum of the tuples equal to the whole model? Compare the sum of each with it.

    The table has `resident` twice: measured in a loop, like the other policies, and after other operators, as in jobs.
    """
    stopping = laboratory.stopping(quick=options.quick)
    samples = laboratory.parts(options.variant, options.tuples)
    policies = POLICIES[:3] if options.quick else POLICIES
    laboratory.expected = 1 + len(policies) * len(samples)
    whole = laboratory.read(laboratory.whole(options.variant), laboratory.protocol(), stopping, of="whole")
    read = {
        policy: [
            laboratory.read(
                sample, laboratory.protocol(residency=policy, data=sample.data_class), stopping, residency=policy
            )
            for sample in samples
        ]
        for policy in policies
    }
    laboratory.require([row for rows in read.values() for row in rows])
    table = []
    states = [(policy, policy, True) for policy in read]
    if any(Details.from_json(row.details).context for row in read["resident"] if row):
        states.insert(0, ("resident, among other operators", "resident", False))
    for name, policy, looped in states:
        changes = known(change_of(*pair, "time_us") for pair in zip(read[policy], read["resident"], strict=True))
        median, most = median_and_most(changes)
        pairs = zip(samples, read[policy], strict=True)
        sums = against_whole(pairs, whole, laboratory.launches[0], all_tuples=options.tuples is None, looped=looped)
        table.append({"residency": name, **sums, "change_median": median, "change_most": most})
    columns = (
        ResultColumn("residency", "residency"),
        ResultColumn("tuples", "tuples", "count"),
        ResultColumn("sum_time_us", "sum, time", "time_us"),
        ResultColumn("gap_time", "gap", "change"),
        ResultColumn("sum_energy_mj", "sum, energy", "energy_mj"),
        ResultColumn("gap_energy", "gap", "change"),
        ResultColumn("change_median", "change relative to resident, median", "change"),
        ResultColumn("change_most", "largest", "change"),
    )
    notes = ["The gap compares the sum of all tuples with the whole model. A row without all tuples has no gap."]
    if options.tuples is not None:
        notes.append(
            f"Only the {options.tuples} most expensive tuples were measured, so the sum does not cover the model."
        )
    others = [row for row in table if not row["residency"].startswith("resident")]
    gaps, drawn = {"time": "gap_time", "energy": "gap_energy"}, {"median": "change_median", "most": "change_most"}
    charts = (
        bar_chart("gap between the sum and the whole model", table, "residency", gaps),
        bar_chart("change of a tuple's time relative to `resident`", others, "residency", drawn),
    )
    return Findings(columns, tuple(table), tuple(notes), charts, options.variant)


def launch(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """What does launching cost? Measure model and tuples by CUDA graph and eagerly; compare sum and whole in each mode.

    The batch is 1, where launching matters most; without `quick` the study also measures the given batch.
    """
    stopping = laboratory.stopping(quick=options.quick)
    batches = [1] if options.quick else sorted({1, options.variant.batch})
    table: list[dict[str, Any]] = []
    notes = []
    variants = [dataclasses.replace(options.variant, batch=batch) for batch in batches]
    parts = [laboratory.parts(variant, options.tuples) for variant in variants]
    laboratory.expected = len(laboratory.launches) * sum(1 + len(samples) for samples in parts)
    for batch, variant, samples in zip(batches, variants, parts, strict=True):
        wholes: dict[str, float] = {}
        for launch in laboratory.launches:
            whole, *read = (
                laboratory.read(
                    sample,
                    laboratory.protocol(launch=launch, data=sample.data_class),
                    stopping,
                    launch=launch,
                    batch=batch,
                )
                for sample in (laboratory.whole(variant), *samples)
            )
            pairs = zip(samples, read, strict=True)
            if whole is not None:
                wholes[launch] = whole.time_us
            table.append(
                {
                    "batch": batch,
                    "launch": launch,
                    **against_whole(pairs, whole, launch, all_tuples=options.tuples is None),
                    "over_graph": change(whole.time_us, wholes.get("graph")) if whole and launch != "graph" else None,
                }
            )
        if {"graph", "eager"} <= set(wholes):
            gap_us = wholes["eager"] - wholes["graph"]
            notes.append(f"Eager launch of {variant}: {gap_us:+.0f} µs per pass ({gap_us / wholes['graph']:+.1%}).")
    laboratory.require(laboratory.readings)
    if options.tuples is not None:
        notes.append(
            f"Only the {options.tuples} most expensive tuples were measured: the sum does not cover the model and is "
            "not drawn."
        )
    if laboratory.launches == ("eager",):
        notes.append("A CPU has no CUDA graphs, so only eager launch was measured.")
    columns = (
        ResultColumn("batch", "batch", "count"),
        ResultColumn("launch", "launch"),
        ResultColumn("tuples", "tuples", "count"),
        ResultColumn("whole_time_us", "whole, time", "time_us"),
        ResultColumn("over_graph", "change relative to graph", "change"),
        ResultColumn("sum_time_us", "sum, time", "time_us"),
        ResultColumn("gap_time", "gap", "change"),
        ResultColumn("whole_energy_mj", "whole, energy", "energy_mj"),
        ResultColumn("gap_energy", "gap", "change"),
    )
    drawn = {"whole": "whole_time_us"} | ({"sum": "sum_time_us"} if options.tuples is None else {})
    bars = {
        f"batch {row['batch']}, {row['launch']}": {
            name: row[key] / 1e3 for name, key in drawn.items() if row[key] is not None
        }
        for row in table
    }
    chart = Chart("time of one pass", y_name="ms", bars=bars)
    return Findings(columns, tuple(table), tuple(notes), (chart,), variants[-1])


def against_whole(
    read: Iterable[tuple[Sample, tables.ReadingRow | None]],
    whole: tables.ReadingRow | None,
    launch: str,
    *,
    all_tuples: bool,
    looped: bool = False,
) -> dict[str, Any]:
    """The sum of tuples, the whole model, and the gap between them, computed as in the verdict of a job.

    Args:
        all_tuples: True if `read` has all tuples of the model. If not, or if a reading is None, the gaps are None.
        looped: use each tuple's time in its loop, even if it was also timed after other operators.
    """
    parts = []
    for sample, row in read:
        view = ReadingView.of(row) if row else None
        if view and looped:
            view = dataclasses.replace(view, details=dataclasses.replace(view.details, context=None))
        estimated_us = sample.weight_us / max(1, sample.count)
        parts.append(
            Part(
                sample.subject.id,
                sample.short_name,
                sample.label,
                sample.count,
                estimated_us=estimated_us,
                reading=view,
            )
        )
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
