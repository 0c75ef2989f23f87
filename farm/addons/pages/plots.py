"""Draws image files: the time series of a reading, and the charts of a study.

matplotlib is an extra (`operator-farm[plot]`). It is imported only for drawing and needs no
display."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.addons.pages import COLOURS, GREY, SHADE, check_file
from farm.errors import UsageError, needing, writing_to
from farm.types.intervals import power_by_step, power_of_ticks
from farm.types.reading import Trace

_NEAR_S = 0.02  # a change of the energy counter belongs to a window if it is not farther from it
_FEW_TICKS = 12  # a logarithmic axis with at most this many values has a tick at each value
_FORMATS = "Name a .png, .svg or .pdf file."
# legend right of the chart
_OUTSIDE = {
    "loc": "center left",
    "bbox_to_anchor": (1.01, 0.5),
    "frameon": False,
}
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("W", ("power_instant_w", "power_average_w", "energy_mj")),
    ("MHz", ("sm_clock_mhz", "memory_clock_mhz")),
    ("°C", ("temperature_c", "memory_temperature_c")),
)


@dataclass(frozen=True)
class Line:
    """One line of a chart. `half_widths` are drawn as error bars. If `alone` is True, the points
    are not joined.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    half_widths: Sequence[float] | None = None
    alone: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Chart:
    """One panel. `bars` (label -> value of each series) draws groups of bars instead of lines."""

    title: str
    x_name: str = ""
    y_name: str = ""
    lines: tuple[Line, ...] = ()
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    areas: tuple[Line, ...] = ()  # stacked areas; each is constant from one x to the next
    x_log: bool = False
    zero: bool = False  # draw the zero line: the values are deviations

    @property
    def empty(self) -> bool:
        """True if there is nothing to draw."""
        return not self.lines and not self.areas and not any(self.bars.values())

    @property
    def horizontal(self) -> bool:
        """True if the bars are horizontal, so that long labels fit beside them."""
        return len(self.bars) > 3 and any(len(label) > 14 for label in self.bars)


def check_available() -> None:
    """Raise `UsageError` if matplotlib is not installed, before the measurement that needs the
    drawing.
    """
    with needing("Drawing needs matplotlib", "plot", ", or omit --png"):
        import matplotlib  # noqa: F401


def check_path(path: Path) -> None:
    """Raise `UsageError` if a drawing cannot be written to this file, before the measurement that
    needs the drawing.
    """
    check_available()
    from matplotlib.backend_bases import FigureCanvasBase

    check_file(path)
    if _format(path) not in FigureCanvasBase.get_supported_filetypes():
        raise UsageError(f"The format '{path.suffix}' of '{path}' is not supported.", _FORMATS)
    # Only opening the file detects a read-only disk or a name that is too long.
    try:
        real = Path(os.path.realpath(path))  # follow a symbolic link, which must not be removed
        exists = real.exists()
        real.open("ab").close()
        if not exists:
            real.unlink()
    except (OSError, ValueError) as error:
        step = "Name a file in a folder that you may write to."
        raise UsageError(f"'{path}' cannot be written: {error}.", step) from error


def _format(path: Path) -> str:
    return path.suffix.lstrip(".").lower() or "png"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure and its axes. Unit of the sizes: inches."""
    # pyplot is avoided: it looks for a display and stores figures globally.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def label_logs(*axes: Any) -> None:
    """Label logarithmic axes with plain numbers: powers of ten; on a short axis, also 2 and 5 of
    each decade.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    try:
        with writing_to(path, _FORMATS):
            figure.savefig(path, format=_format(path))
    except ValueError as error:
        raise UsageError(f"'{path}' cannot be written: {error}.", _FORMATS) from error


def counter_power(trace: Trace, rank: str = "") -> tuple[list[float], list[float]]:
    """The mean power between two steps of the energy counter, as two lists: (end of each interval
    in s, power in W). ``rank``: "rank_1_" for the second card of a group."""
    steps = power_by_step(*trace.series.get(f"{rank}energy_mj", ([], [])))
    return [end_s for _, end_s, _ in steps], [power_w for _, _, power_w in steps]


def window_power_w(trace: Trace, rank: str = "") -> float | None:
    """The slope of the energy counter in the window, at the times that queries saw. Unit: W. A
    reading uses whole periods of the counter, and the power of a whole model is without its
    pauses."""
    ticks = zip(*trace.series.get(f"{rank}energy_mj", ([], [])), strict=True)
    begin_s, end_s = trace.window_s
    inside = [tick for tick in ticks if begin_s - _NEAR_S <= tick[0] <= end_s + _NEAR_S]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return None
    return power_of_ticks(*zip(*inside, strict=True)).rate


def draw_trace(
    trace: Trace, path: Path, title: str, levels_w: Mapping[str, float] | None = None
) -> None:
    """Draw power, clocks and temperatures of one reading, with its window, throttling and other
    processes. `levels_w`: name (idle, base) -> power in W, drawn as a dotted line."""
    check_path(path)
    # The names of the first rank's series have no prefix.
    ranks = sorted({match[0] for name in trace.series if (match := re.match(r"rank_\d+_", name))})
    panels = [
        (unit, [f"{rank}{name}" for rank in ("", *ranks) for name in names])
        for unit, names in _PANELS
    ]
    panels = [panel for panel in panels if any(name in trace.series for name in panel[1])]
    figure, axes = new_figure(9, 0.8 + 2.2 * (len(panels) or 1), len(panels) or 1, sharex=True)
    for axis, (unit, names) in zip(axes, panels, strict=False):
        axis.axvspan(
            *trace.window_s, color=SHADE, label="window" if axis is axes[0] else None, zorder=0
        )
        for number, name in enumerate(name for name in names if name in trace.series):
            times, values = trace.series[name]
            if name.endswith("energy_mj"):
                _draw_counter(axis, trace, name.removesuffix("energy_mj"))
                continue
            style, width = ("-", 0.8) if len(times) > 60 else (".-", 1.2)
            label = name.rsplit("_", 1)[0].replace("_", " ")
            axis.plot(times, values, style, color=_colour(number), linewidth=width, label=label)
        if axis is axes[0]:
            _draw_bands(axis, trace)
        if unit == "W" and not ranks:  # the levels are those of all cards
            for name, value in (levels_w or {}).items():
                axis.axhline(
                    value, color=GREY, linestyle=":", linewidth=1, label=f"{name} {value:.0f} W"
                )
        axis.set_ylabel(unit)
        axis.legend(fontsize=8, **_OUTSIDE)
    axes[-1].set_xlabel("time since the warm-up began, s")
    save_figure(figure, path, title)


def _draw_counter(axis: Any, trace: Trace, rank: str) -> None:
    times, powers = counter_power(trace, rank)
    said, line = rank.replace("_", " "), "--" if rank else "-"
    if len(ticks := trace.series[f"{rank}energy_mj"][0]) > 1:
        style = {"color": COLOURS[5], "linewidth": 1.2, "baseline": None, "linestyle": line}
        axis.stairs(powers, [ticks[0], *times], label=f"{said}from the energy counter", **style)
    if (power_w := window_power_w(trace, rank)) is not None:
        label = f"{said}mean of the window: {power_w:.1f} W"
        axis.plot(
            trace.window_s,
            [power_w, power_w],
            color=COLOURS[2],
            linewidth=2,
            linestyle=line,
            label=label,
        )


def _draw_bands(axis: Any, trace: Trace) -> None:
    """Draw throttle reasons and other processes on the card as bands at the bottom of a panel."""
    bands = [
        name
        for name in sorted(trace.series)
        if name.startswith("throttle_") and name != "throttle_reasons"
    ]
    bands += [name for name in ("foreign_processes",) if any(trace.series.get(name, ([], []))[1])]
    for number, name in enumerate(bands):
        times, values = trace.series[name]
        ends = [*times[1:], times[-1] + 0.1]
        spans = [
            (begin, end - begin)
            for begin, end, value in zip(times, ends, values, strict=True)
            if value
        ]
        if spans:
            label = name.removeprefix("throttle_").replace("_", " ")
            place = {"transform": axis.get_xaxis_transform(), "label": label, "lw": 0}
            axis.broken_barh(spans, (0.05 * number, 0.04), color=_colour(number + 3), **place)


def draw_charts(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw the charts of a study one below the other."""
    check_path(path)
    heights = [
        max(1.5, 0.7 + 0.27 * len(chart.bars)) if chart.horizontal else 2.8 for chart in charts
    ] or [2.8]
    figure, axes = new_figure(9, 0.8 + sum(heights), len(heights), height_ratios=heights)
    for axis, chart in zip(axes, charts, strict=False):
        if chart.zero:
            (axis.axvline if chart.horizontal else axis.axhline)(0, color=GREY, linewidth=0.8)
        if chart.areas:
            style = {
                "step": "post",
                "linewidth": 0,
                "colors": [_colour(n) for n in range(len(chart.areas))],
            }
            rows = [area.y for area in chart.areas]
            axis.stackplot(
                chart.areas[0].x, *rows, labels=[area.name for area in chart.areas], **style
            )
            axis.margins(x=0)
        for number, line in enumerate(chart.lines, start=len(chart.areas)):
            repeats = len(set(line.x)) < len(line.x)  # points with the same x are not joined
            style = {
                "fmt": "o" if repeats or line.alone else ".-",
                "markersize": 4,
                "capsize": 2,
                "linewidth": 1,
            }
            axis.errorbar(
                line.x,
                line.y,
                yerr=line.half_widths,
                color=_colour(number),
                label=line.name,
                **style,
            )
        _draw_bars(axis, chart)
        if chart.x_log and chart.lines:
            axis.set_xscale("log")
            ticks = sorted({value for line in chart.lines for value in line.x if value > 0})
            if len(ticks) <= _FEW_TICKS:
                axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
                axis.minorticks_off()
            else:
                label_logs(axis.xaxis)
        axis.set_title(chart.title, fontsize=9, loc="left")
        axis.set_xlabel(chart.y_name if chart.horizontal else chart.x_name, fontsize=8)
        axis.set_ylabel("" if chart.horizontal else chart.y_name, fontsize=8)
        if len(chart.lines) + len(chart.areas) > 1 or any(
            len(row) > 1 for row in chart.bars.values()
        ):
            axis.legend(fontsize=7, **_OUTSIDE)
    save_figure(figure, path, title)


def _draw_bars(axis: Any, chart: Chart) -> None:
    if not chart.bars:
        return
    series = list(dict.fromkeys(name for row in chart.bars.values() for name in row))
    width = 0.8 / max(1, len(series))
    draw = axis.barh if chart.horizontal else axis.bar
    for number, name in enumerate(series):
        places = [
            index + (number - (len(series) - 1) / 2) * width for index in range(len(chart.bars))
        ]
        draw(
            places,
            [row.get(name, math.nan) for row in chart.bars.values()],
            width,
            color=_colour(number),
            label=name,
        )
    (axis.set_yticks if chart.horizontal else axis.set_xticks)(
        range(len(chart.bars)), list(chart.bars), fontsize=7
    )
    if chart.horizontal:
        axis.set_ylim(len(chart.bars) - 0.4, -0.6)  # the first bar is at the top
