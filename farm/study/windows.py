"""How long must a window be? Windows of several lengths over a few tuples, each held against the longest of the same."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

from farm.pages.plots import Chart, Line
from farm.store import tables
from farm.study.findings import Column, Findings, change, known
from farm.study.laboratory import Laboratory, Plan, Sample, require

FULL = ((0.5, 5), (1.0, 4), (2.0, 3), (5.0, 2), (10.0, 1), (30.0, 1))  # seconds, how often
QUICK = ((0.5, 3), (1.0, 2), (2.0, 1), (5.0, 1))


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """Read every sample with every window; the longest is the reference, whenever it is read."""
    lengths = [(laboratory.scaled(seconds), times) for seconds, times in (QUICK if plan.quick else FULL)]
    samples = laboratory.samples(plan.variant, plan.tuples or (3 if plan.quick else 4))
    protocol = laboratory.protocol()
    read: dict[float, list[tuple[Sample, tables.Reading]]] = defaultdict(list)
    longest: dict[str, tables.Reading] = {}
    wanted = [window_s for window_s, times in lengths for _ in range(times)]
    laboratory.expect(len(samples) * len(wanted))
    for sample in samples:
        longest_s = 0.0
        # Not as they rise: the tuple's temperature would rise with them.
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
        offs = [abs(row.time_us / ref.time_us - 1) for row, ref in pairs]
        energies = [abs(value) for value in known([change(row.energy_mj, ref.energy_mj) for row, ref in pairs])]
        inside_time, inside_energy = (
            [
                abs(value - true) <= math.hypot(getattr(row, width) or 0, getattr(ref, width) or 0)
                for row, ref in pairs
                if (value := getattr(row, name)) is not None and (true := getattr(ref, name)) is not None
            ]
            for name, width in (("time_us", "time_half_width_us"), ("energy_mj", "energy_half_width_mj"))
        )
        rows.append(
            {
                "window_s": window_s,
                "readings": len(pairs),
                "time_off": statistics.median(offs) if offs else None,
                "time_off_most": max(offs, default=None),
                "time_inside": sum(inside_time) / len(inside_time) if inside_time else None,
                "energy_off": statistics.median(energies) if energies else None,
                "energy_off_most": max(energies, default=None),
                "energy_inside": sum(inside_energy) / len(inside_energy) if inside_energy else None,
                "card_s": statistics.median([row.cost_s.get("total", 0.0) for row, _ in pairs]) if pairs else None,
            }
        )
    columns = (
        Column("window_s", "window", "seconds"),
        Column("readings", "readings", "count"),
        Column("time_off", "time off, median", "share"),
        Column("time_off_most", "most", "share"),
        Column("time_inside", "interval, holds time", "share"),
        Column("energy_off", "energy off, median", "share"),
        Column("energy_off_most", "most", "share"),
        Column("energy_inside", "interval, holds energy", "share"),
        Column("card_s", "card time, of a reading", "seconds"),
    )
    notes = (f"Against the window of {lengths[-1][0]:g} s of the same tuple; the last row is held against itself.",)
    return Findings(columns, tuple(rows), notes, _charts(samples, read, longest))


def _charts(
    samples: list[Sample],
    read: dict[float, list[tuple[Sample, tables.Reading]]],
    longest: dict[str, tables.Reading],
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
