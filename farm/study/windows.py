"""Studies of the measuring window: how long it must be, and which average of it to trust."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from operator import attrgetter
from typing import Any

from farm.pages.plots import Chart, Line
from farm.store import tables
from farm.study.laboratory import Laboratory, Sample, StudyOptions, require
from farm.study.results import Findings, ResultColumn, change, known
from farm.types.reading import Details

#: (window in s, readings of each tuple).
LENGTHS = ((0.5, 5), (1.0, 4), (2.0, 3), (5.0, 2), (10.0, 1), (30.0, 1))
QUICK_LENGTHS = ((0.5, 3), (1.0, 2), (2.0, 1), (5.0, 1))


def windows(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How long must a window be? Measure each tuple with every window; the longest window is the reference."""
    lengths = [(laboratory.scaled(seconds), times) for seconds, times in (QUICK_LENGTHS if options.quick else LENGTHS)]
    samples = laboratory.samples(options.variant, options.tuples or (3 if options.quick else 4))
    protocol = laboratory.protocol()
    read: dict[float, list[tuple[Sample, tables.ReadingRow]]] = defaultdict(list)
    longest: dict[str, tables.ReadingRow] = {}
    wanted = [window_s for window_s, times in lengths for _ in range(times)]
    laboratory.expect(len(samples) * len(wanted))
    for sample in samples:
        longest_s = 0.0
        # In random order: the temperature of the card would rise with the length.
        for window_s in laboratory.shuffled(sample, wanted):
            row = laboratory.read(sample, protocol, laboratory.exactly(window_s), window_s=window_s)
            if row is not None:
                read[window_s].append((sample, row))
                if window_s > longest_s:
                    longest_s, longest[sample.subject.id] = window_s, row
    require(list(longest.values()), laboratory)
    rows = []
    for window_s, _ in lengths:
        pairs = [(row, longest[sample.subject.id]) for sample, row in read[window_s]]
        found: dict[str, Any] = {"window_s": window_s, "readings": len(pairs)}
        for name, unit in (("time", "us"), ("energy", "mj")):
            value, width = attrgetter(f"{name}_{unit}"), attrgetter(f"{name}_half_width_{unit}")
            offs = [abs(off) for off in known([change(value(row), value(ref)) for row, ref in pairs])]
            inside = [
                abs(value(row) - value(ref)) <= math.hypot(width(row) or 0, width(ref) or 0)
                for row, ref in pairs
                if value(row) is not None and value(ref) is not None
            ]
            found |= {
                f"{name}_off": statistics.median(offs) if offs else None,
                f"{name}_off_most": max(offs, default=None),
                f"{name}_inside": sum(inside) / len(inside) if inside else None,
            }
        card_s = [row.cost_s.get("total", 0.0) for row, _ in pairs]
        rows.append({**found, "card_s": statistics.median(card_s) if card_s else None})
    columns = (
        ResultColumn("window_s", "window", "seconds"),
        ResultColumn("readings", "readings", "count"),
        ResultColumn("time_off", "time off, median", "share"),
        ResultColumn("time_off_most", "most", "share"),
        ResultColumn("time_inside", "interval, holds time", "share"),
        ResultColumn("energy_off", "energy off, median", "share"),
        ResultColumn("energy_off_most", "most", "share"),
        ResultColumn("energy_inside", "interval, holds energy", "share"),
        ResultColumn("card_s", "card time, of a reading", "seconds"),
    )
    notes = (f"Against the window of {lengths[-1][0]:g} s of the same tuple; the last row is compared with itself.",)
    return Findings(columns, tuple(rows), notes, _window_charts(samples, read, longest))


def _window_charts(
    samples: list[Sample],
    read: dict[float, list[tuple[Sample, tables.ReadingRow]]],
    longest: dict[str, tables.ReadingRow],
) -> tuple[Chart, ...]:
    charts = []
    for quantity, name in (("time_us", "time"), ("energy_mj", "energy")):
        lines = []
        for sample in samples:
            points = [
                (window_s, off * 100)
                for window_s, pairs in sorted(read.items())
                for one, row in pairs
                if one is sample
                and (off := change(getattr(row, quantity), getattr(longest[sample.subject.id], quantity))) is not None
            ]
            if points:
                lines.append(Line(sample.label, [x for x, _ in points], [y for _, y in points]))
        if lines:
            title = f"{name}: deviation from the longest window"
            charts.append(Chart(title, "window in s", "%", tuple(lines), x_log=True, zero=True))
    return tuple(charts)


FIGURES = ("mean", "median", "trimmed mean")


def averaging(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Which average to trust? Deviation and scatter of three averages of short windows, against a long one."""
    short_s, long_s = laboratory.scaled(0.5), laboratory.scaled(4.0 if options.quick else 10.0)
    times = 5 if options.quick else 10
    protocol = laboratory.protocol()
    found: list[tuple[Sample, dict[str, tuple[float, float]]]] = []
    everything: list[tables.ReadingRow | None] = []
    samples = laboratory.samples(options.variant, options.tuples or (4 if options.quick else 8))
    laboratory.expect(len(samples) * (1 + times))
    for sample in samples:
        reference = laboratory.read(sample, protocol, laboratory.exactly(long_s), window_s=long_s)
        again = [laboratory.read(sample, protocol, laboratory.exactly(short_s), window_s=short_s) for _ in range(times)]
        everything += [reference, *again]
        rows = [row for row in again if row is not None]
        if reference is None or len(rows) < 2:
            continue
        # The mean of the long window: its product with the power is the energy.
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
        ResultColumn("figure", "figure"),
        ResultColumn("tuples", "tuples", "count"),
        ResultColumn("off", "off, median", "change"),
        ResultColumn("off_most", "most", "change"),
        ResultColumn("spread", "scatter, median", "share"),
        ResultColumn("spread_most", "most", "share"),
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


def _figures(row: tables.ReadingRow) -> dict[str, float]:
    mean_us = Details.from_json(row.details).time_mean_us or row.time_us
    return {"mean": mean_us, "median": row.time_median_us, "trimmed mean": row.time_trimmed_us}
