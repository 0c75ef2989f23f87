"""The figures of a page, as plain values that plotly draws in the browser.

Each is ``{"data": [...], "layout": {...}}`` as plotly's schema has it; a test holds them against it. Beside these may
stand ``legend``, names with their colours, which the page shows: plotly's own scrolls where it is narrow. Axis titles name
their unit. Colours of text, lines and background come from the page, which is light or dark. What others wrote (labels,
types, paths) is escaped in data and layout, because plotly reads some HTML in its texts.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.operators.roofline import Roofline
from farm.report.layers import LayerRow
from farm.report.report import Report, TypeRow
from farm.types.format import ENERGY, TIME, count_of, gap, percent, printable, quantity
from farm.verdict.verdict import TupleRow

Chart = dict[str, Any]

#: Told apart by people who see colours differently, on white and on black (Okabe and Ito, and a grey).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f6fc9")
OTHERS = "#9a9a9a"
_MOST_TYPES = len(COLOURS)
_BINS = 24


@dataclass(frozen=True)
class State:
    """What a card did while a tuple was read."""

    power_w: float | None
    sm_clock_mhz: float | None


def colours_of(types: Sequence[TypeRow]) -> dict[str, str]:
    """Operator type -> colour, the costliest types first; all beyond the last colour share a grey."""
    return {row.short_name: COLOURS[n] if n < _MOST_TYPES else OTHERS for n, row in enumerate(types)}


def sum_and_whole(report: Report) -> list[Chart]:
    """The sum by operator type as stacked bars over the whole, for time and, where there is one, for energy."""
    charts = []
    verdict = report.verdict
    if verdict.measured:
        whole_us = verdict.time.whole.value if verdict.time.whole else None
        unit, factor = _unit(whole_us or verdict.time.total.value, TIME)
        of_types = {row.short_name: row.time_us for row in report.types}
        in_model = {row.short_name: row.in_model_us for row in report.types}
        bars = [("sum of<br>the parts", of_types), ("in the<br>model", in_model)]
        charts.append(_stacked(report, bars, whole_us, f"time of one pass, {unit}", unit, factor))
    if verdict.energy is not None:
        whole_mj = verdict.energy.whole.value if verdict.energy.whole else None
        unit, factor = _unit(whole_mj or verdict.energy.total.value, ENERGY)
        energies = {row.short_name: row.energy_mj for row in report.types}
        title = f"energy of one pass, {unit}"
        charts.append(_stacked(report, [("sum of<br>the parts", energies)], whole_mj, title, unit, factor))
    return charts


def _stacked(
    report: Report,
    bars: Sequence[tuple[str, Mapping[str, float | None]]],
    whole: float | None,
    title: str,
    unit: str,
    factor: float,
) -> Chart:
    bars = [(name, values) for name, values in bars if any(value is not None for value in values.values())]
    colours = colours_of(report.types)
    named = [name for name, colour in colours.items() if colour != OTHERS]
    rest = [name for name, colour in colours.items() if colour == OTHERS]
    data, legend = [], []
    for names, label, colour in [
        *(([name], name, colours[name]) for name in named),
        (rest, f"{len(rest)} others", OTHERS),
    ]:
        if names:
            x = [sum(values.get(name) or 0.0 for name in names) / factor for _, values in bars]
            hover = f"{_text(label)}: %{{x:.4g}} {unit}<extra></extra>"
            data.append(_bar([name for name, _ in bars], x, _text(label), colour, hover))
            legend.append((label, colour))
    if whole is not None:
        hover = f"whole model: %{{x:.4g}} {unit}<extra></extra>"
        data.append(_bar(["whole<br>model"], [whole / factor], "whole model", "#5f6b7a", hover))
    layout = {
        "barmode": "stack",
        "height": 120 + 45 * len(bars),
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "title": {"text": ""}},
        "showlegend": False,
        "margin": {"l": 80, "r": 15, "t": 10, "b": 45},
    }
    return {"data": data, "layout": layout, "legend": legend}


def _bar(y: list[str], x: list[float], name: str, colour: str, hover: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "y": y,
        "x": x,
        "name": name,
        "marker": {"color": colour},
        "hovertemplate": hover,
    }


def roofline(report: Report, peaks: Roofline) -> Chart | None:
    """Arithmetic rate over arithmetic intensity of all tuples that compute, below what the card reaches."""
    shown = [row for row in report.tuples if row.time_us and row.flops and row.bytes_moved]
    if not shown:
        return None
    colours = colours_of(report.types)
    total_us = sum(row.calls * (row.time_us or 0.0) for row in shown)
    groups: dict[str, list[TupleRow]] = defaultdict(list)
    for row in shown:
        groups[row.short_name].append(row)
    intensities = [row.flops / row.bytes_moved for row in shown]
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    ends = [min([*intensities, ridge]) / 2, ridge, max([*intensities, ridge]) * 2]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "what the card reaches",
            "x": ends,
            "y": [min(peaks.flops_per_s, x * peaks.bytes_per_s) / 1e12 for x in ends],
            "line": {"color": OTHERS, "width": 2},
            "hoverinfo": "skip",
        }
    ]
    for name in sorted(groups, key=list(colours).index):
        members = groups[name]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _text(name),
                "x": [row.flops / row.bytes_moved for row in members],
                "y": [row.flops / (row.time_us or 1.0) / 1e6 for row in members],
                "text": [_told(row) for row in members],
                "hovertemplate": "%{text}<br>%{x:.3g} FLOP/B, %{y:.3g} TFLOP/s<extra></extra>",
                "marker": {
                    "color": colours[name],
                    "size": [7 + 25 * (row.calls * (row.time_us or 0.0) / total_us) ** 0.5 for row in members],
                    "opacity": 0.75,
                },
            }
        )
    layout = {
        "height": 430,
        "xaxis": {**_LOG, "title": {"text": "arithmetic intensity, FLOP/B"}},
        "yaxis": {**_LOG, "title": {"text": "arithmetic rate, TFLOP/s"}, "automargin": True},
        "showlegend": False,
        "margin": {"l": 65, "r": 15, "t": 10, "b": 55},
    }
    legend = [("what the card reaches", OTHERS), *((name, colours[name]) for name in groups if colours[name] != OTHERS)]
    legend += [("others", OTHERS)] * (OTHERS in map(colours.get, groups))
    return {"data": data, "layout": layout, "legend": legend}


_LOG = {"type": "log", "exponentformat": "power", "dtick": 1, "minor": {"ticks": "outside", "nticks": 9}}


def _told(row: TupleRow) -> str:
    share = f"{row.calls} × {quantity(row.time_us, TIME)}"
    return f"{_text(row.label)}<br>{share}"


def modules(rows: Sequence[LayerRow], title: str) -> Chart | None:
    """The tree of modules as nested areas: as large as what each costs in time."""
    timed = [row for row in rows if row.time_us]
    if not timed or timed[0].depth:
        return None
    ids, parents = [], []
    above: list[str] = []
    for row in timed:
        above = above[: row.depth]
        ids.append("/".join([*above, row.name]) if row.depth else "model")
        parents.append("" if not row.depth else above[-1])
        above.append(ids[-1])
    unit, factor = _unit(timed[0].time_us or 0.0, TIME)
    root = title.partition(" ")[0]
    hover = [
        f"{_text(row.module_path or root)}<br>{_text(row.operator)}{'<br>' if row.operator else ''}"
        f"{row.calls} calls, {quantity(row.time_us, TIME)}, {percent(row.time_share)} of the time"
        + (f"<br>{quantity(row.energy_mj, ENERGY)}, {percent(row.energy_share)} of the energy" if row.energy_mj else "")
        + f"<br>{count_of(row.flops, 'FLOP')}, {count_of(row.bytes_moved, 'B')}"
        for row in timed
    ]
    data = {
        "type": "treemap",
        "ids": [_text(id_) for id_ in ids],
        "labels": [_text(row.name or root) for row in timed],
        "parents": [_text(parent) for parent in parents],
        "values": [(row.time_us or 0.0) / factor for row in timed],
        "branchvalues": "total",
        "maxdepth": 4,
        "text": hover,
        "texttemplate": f"%{{label}}<br>%{{value:.3g}} {unit}",
        "hovertemplate": "%{text}<extra></extra>",
        "tiling": {"pad": 2},
        "pathbar": {"visible": True},
        "marker": {"cornerradius": 2, "depthfade": False, "line": {"width": 1, "color": "#ffffff"}},
    }
    layout = {
        "height": 460,
        "margin": {"l": 5, "r": 5, "t": 30, "b": 5},
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "treemapcolorway": list(COLOURS),
        "meta": {"unit": unit},
    }
    return {"data": [_summing(data)], "layout": layout}


def _summing(treemap: dict[str, Any]) -> dict[str, Any]:
    """Parents no smaller than what stands under them: sums in another order differ in their last digits, and plotly
    draws nothing then."""
    values, parents, ids = treemap["values"], treemap["parents"], treemap["ids"]
    place = {id_: index for index, id_ in enumerate(ids)}
    under: dict[int, float] = defaultdict(float)
    for index in reversed(range(len(ids))):
        values[index] = max(values[index], under[index])
        if parents[index]:
            under[place[parents[index]]] += values[index]
    return treemap


def distributions(report: Report, states: Mapping[str, State]) -> list[Chart]:
    """How much of the model's time is spent at which power, and at which clock."""
    read = [(row, states.get(row.reading_id or "")) for row in report.tuples if row.time_us]
    rows = [(row, state) for row, state in read if state is not None]
    total_us = sum(row.calls * (row.time_us or 0.0) for row, _ in rows)
    charts = []
    for title, values in (
        ("power while it was read, W", [(row, state.power_w) for row, state in rows]),
        ("clock of the multiprocessors while it was read, MHz", [(row, state.sm_clock_mhz) for row, state in rows]),
    ):
        known = [
            (value, row.calls * (row.time_us or 0.0) / total_us * 100) for row, value in values if value is not None
        ]
        if not known:
            continue
        low, high = min(value for value, _ in known), max(value for value, _ in known)
        size = max((high - low) / _BINS, abs(high) / 100, 1e-9)  # all at one clock are one narrow bar
        data = {
            "type": "histogram",
            "x": [value for value, _ in known],
            "y": [share for _, share in known],
            "histfunc": "sum",
            "xbins": {"start": low - size / 2, "end": high + size, "size": size},
            "marker": {"color": COLOURS[0]},
            "hovertemplate": "%{x}: %{y:.1f} % of the time<extra></extra>",
        }
        layout = {
            "height": 280,
            "bargap": 0.05,
            "xaxis": {"title": {"text": title}, "range": [low - 4 * size, high + 4 * size], "nticks": 6},
            "yaxis": {"title": {"text": "share of the sum's time, %"}, "rangemode": "tozero", "automargin": True},
            "margin": {"l": 60, "r": 15, "t": 10, "b": 50},
        }
        charts.append({"data": [data], "layout": layout})
    return charts


@dataclass(frozen=True)
class Point:
    """One job of the scatter: its sum and its whole, in one unit."""

    title: str
    group: str  # what is told apart by colour
    total: float
    half_width: float
    whole: float
    gap: str  # as a person reads it
    link: str = ""


def scatter(points: Iterable[Point], colours: Mapping[str, str], quantity_name: str, unit: str) -> Chart | None:
    """The sum of the parts over the whole model, a point a job: what is on the line is explained by its parts.

    Args:
        colours: of each group.
    """
    shown = sorted(points, key=lambda point: point.group)
    if not shown:
        return None
    ends = [min(point.whole for point in shown) / 2, max(point.whole for point in shown) * 2]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": ends,
            "y": [end * factor for end in ends],
            "line": {"color": OTHERS, "width": width, "dash": dash},
            "hoverinfo": "skip",
        }
        for factor, width, dash in ((1.0, 2, "solid"), (1.05, 1, "dot"), (0.95, 1, "dot"))
    ]
    legend = [("sum = whole, and 5 % off", OTHERS)]
    for group in dict.fromkeys(point.group for point in shown):
        members = [point for point in shown if point.group == group]
        legend.append((group, colours[group]))
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _text(group),
                "x": [point.whole for point in members],
                "y": [point.total for point in members],
                "error_y": {"type": "data", "array": [point.half_width for point in members], "thickness": 1},
                "customdata": [point.link for point in members],
                "text": [f"{_text(point.title)}<br>gap {_text(point.gap)}" for point in members],
                "hovertemplate": f"%{{text}}<br>sum %{{y:.4g}} {unit}, whole %{{x:.4g}} {unit}<extra></extra>",
                "marker": {"color": colours[group], "size": 9, "opacity": 0.85},
            }
        )
    layout = {
        "height": 430,
        "xaxis": {**_LOG, **_ticks(*ends), "title": {"text": f"{quantity_name} of the whole model, {unit}"}},
        "yaxis": {
            **_LOG,
            **_ticks(*ends),
            "title": {"text": f"{quantity_name} as the sum of the parts, {unit}"},
            "automargin": True,
        },
        "showlegend": False,
        "margin": {"l": 65, "r": 15, "t": 10, "b": 55},
    }
    return {"data": data, "layout": layout, "legend": legend}


def _ticks(least: float, most: float) -> dict[str, Any]:
    """Of a logarithmic axis over few decades: 1, 2 and 5 of each, since there may be no power of ten among them."""
    if most / least > 1e3:
        return {}
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    values = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}


def scatters(reports: Sequence[tuple[Report, str]]) -> list[Chart]:
    """The scatter of jobs for time and for energy.

    Args:
        reports: each with where its own page is, "" for nowhere.
    """
    times: list[Point] = []
    energies: list[Point] = []
    for report, link in reports:
        variant = report.request.get("variant") or {}
        group = f"{report.cards[0].model if report.cards else '?'}, {variant.get('dtype', '')}".strip(", ")
        for comparison, points, factor in (
            (report.verdict.time, times, 1e3),
            (report.verdict.energy, energies, 1e3),
        ):
            if comparison is None or comparison.whole is None or not report.verdict.measured:
                continue
            if comparison.whole.value > 0 and comparison.total.value > 0:
                told = gap(comparison.gap)
                total, half_width = comparison.total.value / factor, comparison.total.half_width / factor
                whole = comparison.whole.value / factor
                points.append(Point(report.title, group, total, half_width, whole, told, link))
    groups = sorted({point.group for point in (*times, *energies)})
    colours = {group: COLOURS[number % len(COLOURS)] for number, group in enumerate(groups)}  # the same in both
    charts = [scatter(times, colours, "time", "ms"), scatter(energies, colours, "energy", "J")]
    return [chart for chart in charts if chart is not None]


def _unit(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    return next(((unit, factor) for unit, factor in units if abs(value) >= factor), units[-1])


def _text(text: str) -> str:
    return html.escape(printable(text))
