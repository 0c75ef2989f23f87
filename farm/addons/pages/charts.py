"""The charts of a page, as plain values that plotly draws in the browser.

A chart is ``{"data": [...], "layout": {...}}`` in plotly's schema. A chart may also have a
``legend`` (names with colours) that the page draws itself, because plotly's own legend scrolls on
narrow pages. Axis titles name the unit. The page sets the colours of text, lines and background.
All texts are escaped, because plotly interprets some HTML."""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from farm.addons.pages import COLOURS, GREY
from farm.errors.safe_text import printable
from farm.report.history import HistoryRow
from farm.report.layers import LayerRow
from farm.report.report import Report, TypeRow
from farm.report.schemes import SchemeComparison
from farm.store.database import by_key
from farm.types.figure import Figure, value_of
from farm.types.format import ENERGY, TIME, Units, count_of, fitting_unit, gap, percent, quantity
from farm.types.roofline import Roofline

if TYPE_CHECKING:
    from farm.verdict.cost_line import CostLine
    from farm.verdict.verdict import Comparison

Chart = dict[str, Any]
Legend = list[tuple[str, str]]  # names with their colours

#: Share of the time of a module from which on a child of it is drawn in its place.
NEARLY_ALL = 0.9
_BINS = 24
_NARROW = {"t": 10, "r": 15}


def colours_of(types: Sequence[TypeRow]) -> dict[str, str]:
    """Return operator type -> colour, the most expensive type first. Types after the last colour
    are grey.
    """
    return {row.short_name: COLOURS[n] if n < len(COLOURS) else GREY for n, row in enumerate(types)}


def page_chart(
    data: list[dict[str, Any]],
    height: int,
    x: str,
    y: str,
    *,
    axes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    legend: Legend | None = None,
    **layout: Any,
) -> Chart:
    """Build a chart with two titled axes, and a legend that the page draws."""
    of_chart = {
        "height": height,
        "xaxis": {**axes[0], "title": {"text": x}},
        "yaxis": {"automargin": True, **axes[1], "title": {"text": y}},
        "showlegend": False,
        "margin": {"l": 65, "b": 55, **_NARROW},
        **layout,
    }
    return {"data": data, "layout": of_chart, **({} if legend is None else {"legend": legend})}


def _points(
    name: str, x: Sequence[Any], y: list[float], text: list[str], hover: str, **more: Any
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": _text(name),
        "x": x,
        "y": y,
        "text": text,
        "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
        **more,
    }


def _line(x: list[float], y: list[float], width: int = 2, dash: str = "solid") -> dict[str, Any]:
    """Build a reference line through the given points."""
    line = {"color": GREY, "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def sum_and_whole(report: Report) -> list[Chart]:
    """Draw the sum as bars stacked by operator type, above a bar of the whole. One chart for time,
    one for energy.
    """
    types, verdict = report.types, report.verdict
    in_sum, in_model = "sum of<br>the parts", "in the<br>model"
    time = {
        in_sum: [row.cost.measured_us for row in types],
        in_model: [row.in_model_us for row in types],
    }
    charts = [_stacked(report, time, verdict.time, "time", TIME)] if verdict.measured else []
    if verdict.energy is not None:
        charts.append(
            _stacked(
                report,
                {in_sum: [row.cost.measured_mj for row in types]},
                verdict.energy,
                "energy",
                ENERGY,
            )
        )
    return charts


def _stacked(
    report: Report,
    bars: Mapping[str, list[float | None]],
    compared: Comparison,
    what: str,
    units: Units,
) -> Chart:
    """Stack the values of the operator types in bars (bar name -> value of each type); add a bar of
    the whole.
    """
    unit, factor = fitting_unit((compared.whole or compared.total).value, units)
    values_of_group = {
        name: values for name, values in bars.items() if any(value is not None for value in values)
    }
    colours = colours_of(report.types)
    groups = [
        ([n], name, colour) for n, (name, colour) in enumerate(colours.items()) if colour != GREY
    ]
    if rest := [n for n, colour in enumerate(colours.values()) if colour == GREY]:
        groups.append((rest, f"{len(rest)} other types", GREY))

    def bar(y: list[str], x: list[float], name: str, colour: str) -> dict[str, Any]:
        hover = f"{_text(name)}: %{{x:.4g}} {unit}<extra></extra>"
        style = {"orientation": "h", "marker": {"color": colour}, "hovertemplate": hover}
        return {
            "type": "bar",
            "y": y,
            "x": [value / factor for value in x],
            "name": _text(name),
            **style,
        }

    data = [
        bar(
            list(values_of_group),
            [sum(values[n] or 0.0 for n in numbers) for values in values_of_group.values()],
            name,
            colour,
        )
        for numbers, name, colour in groups
    ]
    if compared.whole is not None:
        data.append(bar(["whole<br>model"], [compared.whole.value], "whole model", "#5f6b7a"))
    return page_chart(
        data,
        120 + 45 * len(values_of_group),
        f"{what} of one pass, {unit}",
        "",
        axes=({"rangemode": "tozero"}, {"autorange": "reversed"}),
        legend=[(name, colour) for _, name, colour in groups],
        barmode="stack",
        margin={"l": 80, "b": 45, **_NARROW},
    )


def roofline(report: Report, peaks: Roofline) -> Chart | None:
    """Draw FLOP/s over FLOP per byte for all tuples that have FLOPs, with the card's peaks as
    limits.
    """
    shown = [
        line
        for line in report.tuples
        if line.total_us and line.subject.flops and line.subject.bytes_moved
    ]
    if not shown:
        return None
    colours = colours_of(report.types)
    total_us = sum(row.total_us for row in shown)
    groups = by_key(lambda line: line.subject.short_name, shown)
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    intensities = [*map(_intensity, shown), ridge]
    rates = [*map(_tflops_per_s, shown), peaks.flops_per_s / 1e12]
    ends = [min(intensities) / 2, ridge, max(intensities) * 2]
    data = [_line(ends, [min(peaks.flops_per_s, x * peaks.bytes_per_s) / 1e12 for x in ends])]
    for name in sorted(groups, key=list(colours).index):
        sizes = [7 + 25 * (row.total_us / total_us) ** 0.5 for row in groups[name]]
        data.append(
            _points(
                name,
                [_intensity(line) for line in groups[name]],
                [_tflops_per_s(line) for line in groups[name]],
                [
                    f"{_text(line.subject.label)}<br>"
                    f"{line.count} × {quantity(value_of(line.time_us), TIME)}"
                    for line in groups[name]
                ],
                "%{x:.3g} FLOP/B, %{y:.3g} TFLOP/s",
                marker={"color": colours[name], "size": sizes, "opacity": 0.75},
            )
        )
    named = [(name, colours[name]) for name in groups if colours[name] != GREY]
    others = [("other types", GREY)] * (len(named) < len(groups))
    return page_chart(
        data,
        430,
        "arithmetic intensity, FLOP/B",
        "arithmetic rate, TFLOP/s",
        axes=(_log_axis(intensities), _log_axis(rates)),
        legend=[("peaks of the card", GREY), *named, *others],
    )


def _intensity(line: CostLine) -> float:
    """FLOP per byte."""
    return line.subject.flops / line.subject.bytes_moved


def _tflops_per_s(line: CostLine) -> float:
    return line.subject.flops / (line.time_us.value if line.time_us else 1.0) / 1e6


def modules(rows: Sequence[LayerRow], title: str) -> Chart | None:
    """Draw the tree of modules as nested areas. The area is proportional to the time.

    The drawing begins at the deepest module that has nearly all of the time, such as the list of
    layers of a language model; the bar above it leads to the modules around. Each of its children
    has a colour."""
    timed = [row for row in rows if row.time_us]
    if not timed or timed[0].depth:
        return None
    unit, factor = fitting_unit(timed[0].time_us or 0.0, TIME)
    values = [(row.time_us or 0.0) / factor for row in timed]
    above, parents, paths = list[int](), list[int](), list[list[int]]()
    for n, row in enumerate(timed):
        above = [*above[: row.depth], n]
        parents.append(above[-2] if row.depth else -1)
        paths.append(above)
    children: dict[int, float] = defaultdict(float)
    for n in reversed(range(len(timed))):
        # plotly draws nothing if rounding makes a parent smaller
        values[n] = max(values[n], children[n])
        children[parents[n]] += values[n]
    first = _first_shown(values, parents)
    branches = [n for n, parent in enumerate(parents) if parent == first]
    colour_of = {n: COLOURS[number % len(COLOURS)] for number, n in enumerate(branches)}
    colours = []
    for path in paths:
        branch = next((n for n in path if n in colour_of), -1)
        colours.append(colour_of.get(branch, GREY))
    root, ids = title.partition(" ")[0], ["model", *map(str, range(1, len(timed)))]
    style = json.loads((Path(__file__).parent / "templates" / "modules.json").read_text("utf-8"))
    data = {
        **style["data"],
        "ids": ids,
        "labels": [_text(row.name or root) for row in timed],
        "parents": ["" if n < 0 else ids[n] for n in parents],
        "values": values,
        "text": [_module_text(row, root) for row in timed],
        "texttemplate": f"%{{label}}<br>%{{value:.3g}} {unit}",
        "level": ids[first],
        "marker": {**style["data"]["marker"], "colors": colours},
    }
    layout = {**style["layout"], "meta": {"unit": unit}}
    return {"data": [data], "layout": layout}


def _first_shown(values: Sequence[float], parents: Sequence[int]) -> int:
    """The number of the deepest module with children of which none has nearly all of its time."""
    children: dict[int, list[int]] = defaultdict(list)
    for n, parent in enumerate(parents):
        children[parent].append(n)
    shown = 0
    while children[shown]:
        largest = max(children[shown], key=lambda n: values[n])
        if values[largest] < NEARLY_ALL * values[shown] or not children[largest]:
            break
        shown = largest
    return shown


def _module_text(row: LayerRow, root: str) -> str:
    lines = [_text(row.module_path or root), _text(row.operator)]
    time = quantity(row.time_us, TIME)
    lines.append(f"{row.cost.calls} calls, {time}, {percent(row.time_share)} of the time")
    if row.energy_mj:
        lines.append(
            f"{quantity(row.energy_mj, ENERGY)}, {percent(row.energy_share)} of the energy"
        )
    lines.append(f"{count_of(row.cost.flops, 'FLOP')}, {count_of(row.cost.bytes_moved, 'B')}")
    return "<br>".join(filter(None, lines))


def distributions(report: Report, readings: Mapping[str, Any]) -> list[Chart]:
    """Draw histograms: the share of the model's time at each power, and at each clock of `readings`
    (by reading id).
    """
    of_rows = [
        (line, readings.get(line.reading_id or "")) for line in report.tuples if line.total_us
    ]
    rows = [(row, reading) for row, reading in of_rows if reading is not None]
    total_us = sum(row.total_us for row, _ in rows)
    charts = []
    shares = [row.total_us / total_us * 100 for row, _ in rows]
    for title, values in (
        ("power during the reading, W", [reading.power_w for _, reading in rows]),
        (
            "clock of the card's multiprocessors during the reading, MHz",
            [reading.sm_clock_mhz for _, reading in rows],
        ),
    ):
        pairs = zip(values, shares, strict=True)
        points = [(value, share) for value, share in pairs if value is not None]
        if not points:
            continue
        low, high = min(points)[0], max(points)[0]
        size = max((high - low) / _BINS, abs(high) / 100, 1e-9)  # equal values give one narrow bar
        data = {
            "type": "histogram",
            "x": [value for value, _ in points],
            "y": [share for _, share in points],
            "histfunc": "sum",
            "xbins": {"start": low - size / 2, "end": high + size, "size": size},
            "marker": {"color": COLOURS[0]},
            "hovertemplate": "%{x}: %{y:.1f} % of the time<extra></extra>",
        }
        axes = {"range": [low - 4 * size, high + 4 * size], "nticks": 6}, {"rangemode": "tozero"}
        charts.append(
            page_chart([data], 280, title, "share of the sum's time, %", axes=axes, bargap=0.05)
        )
    return charts


def is_complete(report: Report) -> bool:
    """True if the job has finished and its sum covers enough of the model to be compared with the
    whole.
    """
    return report.state == "done" and (report.verdict.coverage or 0.0) >= report.verdict.target


def scatters(reports: Sequence[tuple[Report, str]]) -> list[Chart]:
    """Draw the sum of the tuples (y) over the whole model (x): a chart for time, one for energy,
    with a point for each complete job (`is_complete`) that has a gap. On the diagonal, both are
    equal. Each pair of card model and dtype has a colour. A report comes with the link to its page
    ("": no link)."""
    points: dict[str, list[_Point]] = {"time": [], "energy": []}
    for report, link in reports:
        if not is_complete(report):
            continue
        dtype = (report.request.get("variant") or {}).get("dtype", "")
        group = f"{report.cards[0].model if report.cards else '?'}, {dtype}".strip(", ")
        for what, comparison in (("time", report.verdict.time), ("energy", report.verdict.energy)):
            if comparison is None or comparison.whole is None or comparison.gap is None:
                continue
            if comparison.whole.value > 0 and comparison.total.value > 0:
                points[what].append(
                    _Point(
                        group,
                        report.title,
                        comparison.total,
                        comparison.whole,
                        comparison.gap,
                        link,
                    )
                )
    groups: set[str] = set()  # both charts use the same colours
    for of_quantity in points.values():
        groups.update(point.group for point in of_quantity)
    colours = {group: COLOURS[n % len(COLOURS)] for n, group in enumerate(sorted(groups))}
    units = {"time": "ms", "energy": "J"}  # 1000 times the units of a verdict
    return [
        _scatter(points_of_group, colours, what, units[what])
        for what, points_of_group in points.items()
        if points_of_group
    ]


class _Point(NamedTuple):
    """A job in a chart of sums over wholes."""

    group: str  # card model and dtype
    title: str
    total: Figure
    whole: Figure
    gap: Figure
    link: str


def _scatter(points: Sequence[_Point], colours: Mapping[str, str], what: str, unit: str) -> Chart:
    wholes = [point.whole.value / 1e3 for point in points]
    ends = [min(wholes) / 2, max(wholes) * 2]
    data = [
        _line(ends, [end * factor for end in ends], width, dash)
        for factor, width, dash in ((1.0, 2, "solid"), (1.05, 1, "dot"), (0.95, 1, "dot"))
    ]
    in_order = sorted(points, key=lambda point: point.group)
    members = by_key(lambda point: point.group, in_order)
    for group, points_of_group in members.items():
        data.append(
            _points(
                group,
                [point.whole.value / 1e3 for point in points_of_group],
                [point.total.value / 1e3 for point in points_of_group],
                [f"{_text(point.title)}<br>gap {gap(point.gap)}" for point in points_of_group],
                f"sum %{{y:.4g}} {unit}, whole model %{{x:.4g}} {unit}",
                error_y={
                    "type": "data",
                    "array": [point.total.half_width / 1e3 for point in points_of_group],
                    "thickness": 1,
                },
                customdata=[point.link for point in points_of_group],
                marker={"color": colours[group], "size": 9, "opacity": 0.85},
            )
        )
    axis = _log_axis(ends)
    return page_chart(
        data,
        430,
        f"{what} of the whole model, {unit}",
        f"{what} as the sum of the parts, {unit}",
        axes=(axis, axis),
        legend=[
            ("sum = whole model; dotted: ± 5 %", GREY),
            *((group, colours[group]) for group in members),
        ],
    )


def history(rows: Sequence[HistoryRow]) -> Chart:
    """Draw the time of each row of a series of `farm.report.history`, in order."""
    times = [row.cost.time_us for row in rows]
    unit, factor = fitting_unit(times[-1].value, TIME)
    names = [f"{n}: {_text(row.revision[:12] or row.torch)}" for n, row in enumerate(rows, 1)]
    error = {"type": "data", "array": [time.half_width / factor for time in times], "thickness": 1}
    values, style = (
        [time.value / factor for time in times],
        {"error_y": error, "marker": {"color": COLOURS[0]}},
    )
    data = _points(
        "time", names, values, names, f"%{{y:.4g}} {unit}", mode="lines+markers", **style
    )
    axes = ({"type": "category"}, {"rangemode": "tozero"})
    return page_chart([data], 320, "revision, oldest first", f"time of one pass, {unit}", axes=axes)


def schemes(compared: SchemeComparison, quantity: str) -> Chart | None:
    """Draw time or energy of each scheme over the sizes; None if nothing is measured."""
    units = TIME if quantity == "time" else ENERGY
    curves: dict[str, dict[int, Figure]] = defaultdict(dict)
    for row in compared.rows:
        figure = row.time.b if quantity == "time" else row.energy.b
        if figure is not None:
            curves[row.scheme][row.size] = figure
    if not curves:
        return None
    values: list[float] = []
    for curve in curves.values():
        values += [figure.value for figure in curve.values()]
    unit, factor = fitting_unit(max(values), units)
    data, legend = [], []
    for number, (scheme, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        legend.append((scheme, colour))
        widths = [figure.half_width / factor for figure in curve.values()]
        data.append(
            _points(
                scheme,
                list(curve),
                [figure.value / factor for figure in curve.values()],
                [f"{scheme} at {size}" for size in curve],
                f"%{{y:.4g}} {unit}",
                mode="lines+markers",
                error_y={"type": "data", "array": widths, "thickness": 1},
                marker={"color": colour},
            )
        )
    sizes = sorted({row.size for row in compared.rows})
    ticks = {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes))}
    axes = (ticks, _log_axis([value / factor for value in values]))
    y = f"{quantity} of one pass, {unit}"
    return page_chart(data, 360, compared.axis, y, axes=axes, legend=legend)


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis with labels at powers of ten; on a short axis, at 1, 2 and 5 of
    each decade.
    """
    least, most = min(values), max(values)
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    digits, step = (
        ((1, 2, 5), 1) if most / least < 100 else ((1,), 1 + int(math.log10(most / least) // 7))
    )
    labelled = [digit * 10.0**decade for decade in decades[::step] for digit in digits]
    texts = [f"{value:,.12f}".rstrip("0").rstrip(".") for value in labelled]
    minor = {
        "ticks": "outside",
        "tickvals": [digit * 10.0**decade for decade in decades for digit in range(2, 10)],
    }
    return {"type": "log", "tickvals": labelled, "ticktext": texts, "minor": minor}


def _text(text: str) -> str:
    return html.escape(printable(text))
