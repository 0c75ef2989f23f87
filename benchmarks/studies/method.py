"""Studies of the method: the length of a window, the average of pass times, residency in the cache,
and launching.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.studies.laboratory import Laboratory, Sample, StudyOptions
from benchmarks.studies.results import (
    QUANTITIES,
    Findings,
    ResultColumn,
    ResultRow,
    bar_chart,
    change,
    change_of,
    known,
    median_and_most,
    tabulated,
)
from farm.addons.pages.plots import Chart, Line
from farm.store import tables
from farm.types.details import Details
from farm.types.figure import value_of
from farm.verdict.aggregate import aggregate
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import ReadingView, Whole

#: (length of the window in s, number of readings of each tuple).
LENGTHS = ((0.5, 5), (1.0, 4), (2.0, 3), (5.0, 2), (10.0, 1), (30.0, 1))
QUICK_LENGTHS = ((0.5, 3), (1.0, 2), (2.0, 1), (5.0, 1))


def windows(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How long must a window be? Measure each tuple with every window; the longest window is the
    reference.
    """
    lengths = [
        (laboratory.scaled(seconds), times)
        for seconds, times in (QUICK_LENGTHS if options.quick else LENGTHS)
    ]
    samples = laboratory.samples(options.variant, options.tuples or (3 if options.quick else 4))
    protocol = laboratory.protocol()
    read: dict[float, list[tuple[Sample, tables.ReadingRow]]] = {
        window_s: [] for window_s, _ in lengths
    }
    wanted = [window_s for window_s, times in lengths for _ in range(times)]
    laboratory.expected = len(samples) * len(wanted)
    for sample in samples:
        # Use a random order: in order of length, the temperature of the card would rise with the
        # length.
        for window_s in laboratory.shuffled(sample, wanted):
            row = laboratory.read(sample, protocol, laboratory.exactly(window_s), window_s=window_s)
            if row is not None:
                read[window_s].append((sample, row))
    longest = {sample.subject.id: row for pairs in read.values() for sample, row in reversed(pairs)}
    laboratory.require(list(longest.values()))
    rows: list[ResultRow] = []
    for window_s, found in read.items():
        pairs = [(row, longest[sample.subject.id]) for sample, row in found]
        line: ResultRow = {
            ResultColumn("window_s", "window", "seconds"): window_s,
            ResultColumn("readings", "readings", "count"): len(pairs),
        }
        for name, quantity in QUANTITIES:
            width = quantity.replace("_", "_half_width_")
            off, off_most = median_and_most(
                [abs(off) for off in known(change_of(*pair, quantity) for pair in pairs)]
            )
            inside = [
                abs(getattr(row, quantity) - getattr(reference, quantity))
                <= math.hypot(getattr(row, width) or 0, getattr(reference, width) or 0)
                for row, reference in pairs
                if getattr(row, quantity) is not None and getattr(reference, quantity) is not None
            ]
            held = statistics.fmean(inside) if inside else None
            line |= {
                ResultColumn(f"{name}_off", f"deviation of {name}, median", "share"): off,
                ResultColumn(f"{name}_off_most", "largest", "share"): off_most,
                ResultColumn(f"{name}_inside", f"{name}, within intervals", "share"): held,
            }
        card_s, _ = median_and_most([row.cost_s.get("total", 0.0) for row, _ in pairs])
        rows.append({**line, ResultColumn("card_s", "card time, per reading", "seconds"): card_s})
    charts = []
    for name, quantity in QUANTITIES:
        points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for window_s, found in read.items():
            for sample, row in found:
                if (off := change_of(row, longest[sample.subject.id], quantity)) is not None:
                    points[sample.label, sample.subject.id].append((window_s, off * 100))
        lines = tuple(
            Line(label, *map(list, zip(*several, strict=True)))
            for (label, _), several in points.items()
        )
        title = f"{name}: deviation from the longest window"
        charts.append(Chart(title, "length of the window, s", "%", lines, x_log=True, zero=True))
    notes = (
        f"Reference: the same tuple's window of {lengths[-1][0]:g} s. The last row is compared "
        "with itself.",
    )
    return Findings(*tabulated(rows), notes, tuple(charts), options.variant)


AVERAGES = ("mean", "median", "trimmed mean")


def averaging(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Which average is best? Compare three averages of short windows with a long window: deviation
    and scatter.
    """
    short_s, long_s = laboratory.scaled(0.5), laboratory.scaled(4.0 if options.quick else 10.0)
    times = 5 if options.quick else 10
    protocol = laboratory.protocol()
    found = []
    samples = laboratory.samples(options.variant, options.tuples or (4 if options.quick else 8))
    laboratory.expected = len(samples) * (1 + times)
    for sample in samples:
        reference, *again = (
            laboratory.read(sample, protocol, laboratory.exactly(window_s), window_s=window_s)
            for window_s in (long_s, *[short_s] * times)
        )
        figures = [_averages(row) for row in again if row is not None]
        if reference is None or len(figures) < 2:
            continue
        true_us = _averages(reference)[
            "mean"
        ]  # the mean, because mean time times mean power is the energy
        deviations: dict[str, Any] = {"tuple": sample.label}
        for name in AVERAGES:
            values = [one[name] / true_us for one in figures]
            deviations |= {
                f"{name} off": statistics.mean(values) - 1,
                f"{name} spread": statistics.stdev(values),
            }
        found.append(deviations)
    laboratory.require(laboratory.readings)
    rows: list[ResultRow] = []
    for name in AVERAGES:
        off, off_most = median_and_most([one[f"{name} off"] for one in found])
        spread, spread_most = median_and_most([one[f"{name} spread"] for one in found])
        rows.append(
            {
                ResultColumn("figure", "average"): name,
                ResultColumn("tuples", "tuples", "count"): len(found),
                ResultColumn("off", "deviation, median", "change"): off,
                ResultColumn("off_most", "largest", "change"): off_most,
                ResultColumn("spread", "scatter, median", "share"): spread,
                ResultColumn("spread_most", "largest", "share"): spread_most,
            }
        )
    notes = (
        f"{times} windows of {short_s:g} s are compared with the mean of one window of {long_s:g} "
        "s. Scatter is the "
        "standard deviation.",
    )
    titles = {
        "off": "deviation from the long window's mean",
        "spread": "scatter between short windows",
    }
    charts = tuple(
        bar_chart(title, found, "tuple", {name: f"{name} {key}" for name in AVERAGES})
        for key, title in titles.items()
    )
    return Findings(*tabulated(rows), notes, charts, options.variant)


def _averages(row: tables.ReadingRow) -> dict[str, float]:
    mean_us = Details.from_json(row.details).timing.time_mean_us
    mean_us = value_of(mean_us) or row.time_us
    return dict(zip(AVERAGES, (mean_us, row.time_median_us, row.time_trimmed_us), strict=True))


POLICIES = ("resident", "reuse", "stream", "chain")


def residency(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Which residency policy makes the sum of the tuples equal to the whole model? Compare the sum
    of each with it.

    The table has `resident` twice: measured in a loop, like the other policies, and after other
    operators, as in jobs."""
    stopping = laboratory.stopping(quick=options.quick)
    samples = laboratory.parts(options.variant, options.tuples)
    policies = POLICIES[:3] if options.quick else POLICIES
    laboratory.expected = 1 + len(policies) * len(samples)
    whole = laboratory.read(
        laboratory.whole(options.variant), laboratory.protocol(), stopping, of="whole"
    )
    read = {
        policy: [
            laboratory.read(
                sample,
                laboratory.protocol(residency=policy, data=sample.data_class),
                stopping,
                residency=policy,
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
        changes = known(
            change_of(*pair, "time_us") for pair in zip(read[policy], read["resident"], strict=True)
        )
        median, most = median_and_most(changes)
        pairs = zip(samples, read[policy], strict=True)
        sums = against_whole(
            pairs, whole, laboratory.launches[0], all_tuples=options.tuples is None, looped=looped
        )
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
    notes = [
        "The gap compares the sum of all tuples with the whole model. A row without all tuples "
        "has no gap."
    ]
    if options.tuples is not None:
        notes.append(
            f"Only the {options.tuples} most expensive tuples were measured, so the sum does not "
            "cover the model."
        )
    others = [row for row in table if not row["residency"].startswith("resident")]
    gaps, drawn = (
        {"time": "gap_time", "energy": "gap_energy"},
        {"median": "change_median", "most": "change_most"},
    )
    charts = (
        bar_chart("gap between the sum and the whole model", table, "residency", gaps),
        bar_chart("change of a tuple's time relative to `resident`", others, "residency", drawn),
    )
    return Findings(columns, tuple(table), tuple(notes), charts, options.variant)


def launch(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """What does launching cost? Measure model and tuples by CUDA graph and eagerly; compare sum and
    whole in each mode.

    The batch is 1, where launching matters most; without `quick` the study also measures the given
    batch."""
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
                    "over_graph": change(whole.time_us, wholes.get("graph"))
                    if whole and launch != "graph"
                    else None,
                }
            )
        if {"graph", "eager"} <= set(wholes):
            gap_us = wholes["eager"] - wholes["graph"]
            notes.append(
                f"Eager launch of {variant}: {gap_us:+.0f} µs per pass "
                f"({gap_us / wholes['graph']:+.1%})."
            )
    laboratory.require(laboratory.readings)
    if options.tuples is not None:
        notes.append(
            f"Only the {options.tuples} most expensive tuples were measured: the sum does not "
            "cover the model and is "
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
    """The sum of tuples, the whole model, and the gap between them, computed as in the verdict of a
    job.

    Args:
        all_tuples: True if `read` has all tuples of the model. If not, or if a reading is None, the
            gaps are None.
        looped: use each tuple's time in its loop, even if it was also timed after other operators.
    """
    parts = []
    for sample, row in read:
        view = ReadingView.of(row) if row else None
        if view and looped:
            view = dataclasses.replace(
                view, details=dataclasses.replace(view.details, context=None)
            )
        estimated_us = sample.weight_us / max(1, sample.count)
        described = TupleView(
            sample.subject.id, sample.short_name, sample.label, estimated_us=estimated_us
        )
        if view is None:
            parts.append(CostLine(described, sample.count, "missing"))
        else:
            parts.append(CostLine.of_reading(described, sample.count, view))
    wholes = [Whole(whole.card_id, ReadingView.of(whole), "", launch)] if whole else []
    verdict = aggregate(parts, wholes, target=0.95, launch=launch)
    complete = verdict.measured == verdict.parts
    energy = verdict.energy
    return {
        "tuples": verdict.measured,
        "tuples_of": verdict.parts,
        "sum_time_us": verdict.time.total.value if complete else None,
        "whole_time_us": whole.time_us if whole else None,
        "gap_time": verdict.time.gap.value
        if complete and all_tuples and verdict.time.gap
        else None,
        "sum_energy_mj": energy.total.value if complete and energy else None,
        "whole_energy_mj": whole.energy_mj if whole else None,
        "gap_energy": energy.gap.value
        if complete and all_tuples and energy and energy.gap
        else None,
    }
