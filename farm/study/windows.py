"""Studies of the measurement window: its length, and the average that represents its pass times best."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

from farm.pages.plots import Chart, Line
from farm.store import tables
from farm.study.laboratory import Laboratory, Sample, StudyOptions
from farm.study.results import (
    QUANTITIES,
    Findings,
    ResultColumn,
    ResultRow,
    bar_chart,
    change_of,
    known,
    median_and_most,
    tabulated,
)
from farm.types.reading import Details

#: (length of the window in s, number of readings of each tuple).
LENGTHS = ((0.5, 5), (1.0, 4), (2.0, 3), (5.0, 2), (10.0, 1), (30.0, 1))
QUICK_LENGTHS = ((0.5, 3), (1.0, 2), (2.0, 1), (5.0, 1))


def windows(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How long must a window be? Measure each tuple with every window; the longest window is the reference."""
    lengths = [(laboratory.scaled(seconds), times) for seconds, times in (QUICK_LENGTHS if options.quick else LENGTHS)]
    samples = laboratory.samples(options.variant, options.tuples or (3 if options.quick else 4))
    protocol = laboratory.protocol()
    read: dict[float, list[tuple[Sample, tables.ReadingRow]]] = {window_s: [] for window_s, _ in lengths}
    wanted = [window_s for window_s, times in lengths for _ in range(times)]
    laboratory.expected = len(samples) * len(wanted)
    for sample in samples:
        # Use a random order: in order of length, the temperature of the card would rise with the length.
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
            off, off_most = median_and_most([abs(off) for off in known(change_of(*pair, quantity) for pair in pairs)])
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
        lines = tuple(Line(label, *map(list, zip(*several, strict=True))) for (label, _), several in points.items())
        title = f"{name}: deviation from the longest window"
        charts.append(Chart(title, "length of the window, s", "%", lines, x_log=True, zero=True))
    notes = (f"Reference: the same tuple's window of {lengths[-1][0]:g} s. The last row is compared with itself.",)
    return Findings(*tabulated(rows), notes, tuple(charts), options.variant)


AVERAGES = ("mean", "median", "trimmed mean")


def averaging(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Which average is best? Compare three averages of short windows with a long window: deviation and scatter."""
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
        true_us = _averages(reference)["mean"]  # the mean, because mean time times mean power is the energy
        deviations: dict[str, Any] = {"tuple": sample.label}
        for name in AVERAGES:
            values = [one[name] / true_us for one in figures]
            deviations |= {f"{name} off": statistics.mean(values) - 1, f"{name} spread": statistics.stdev(values)}
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
        f"{times} windows of {short_s:g} s are compared with the mean of one window of {long_s:g} s. Scatter is the "
        "standard deviation.",
    )
    titles = {"off": "deviation from the long window's mean", "spread": "scatter between short windows"}
    charts = tuple(
        bar_chart(title, found, "tuple", {name: f"{name} {key}" for name in AVERAGES}) for key, title in titles.items()
    )
    return Findings(*tabulated(rows), notes, charts, options.variant)


def _averages(row: tables.ReadingRow) -> dict[str, float]:
    mean_us = Details.from_json(row.details).time_mean_us or row.time_us
    return dict(zip(AVERAGES, (mean_us, row.time_median_us, row.time_trimmed_us), strict=True))
