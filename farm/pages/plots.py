"""Drawings: what the card said while one reading was taken, and what a study found.

matplotlib is an extra (`operator-farm[plot]`) and loads only here, when something is drawn, without a display.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.benchmark.intervals import power_by_step, power_of_ticks
from farm.errors import UsageError
from farm.types.reading import Trace

WINDOW, INK, SECOND, THIRD = "#dbe9f6", "#1f4e79", "#c55a11", "#548235"
COLOURS = (INK, SECOND, THIRD, "#7f6000", "#7030a0", "#7f7f7f", "#2e9ca6")
_FEW_TICKS = 12  # so many values of a logarithmic axis stand under it themselves
_KINDS = "Name a .png, .svg or .pdf file."


@dataclass(frozen=True)
class Line:
    """One line or row of points of a chart. `half_widths` are drawn as bars around the points.

    Attributes:
        alone: its points are marks that no line joins.
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
    areas: tuple[Line, ...] = ()  # one on the other, each constant from one x to the next
    x_log: bool = False
    zero: bool = False  # draw the zero line: the values are deviations

    @property
    def empty(self) -> bool:
        """Whether it would be a frame around nothing."""
        return not self.lines and not self.areas and not any(self.bars.values())


def check_available() -> None:
    """Raises:
    UsageError: matplotlib is not installed; before anything is measured for a drawing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Drawing needs matplotlib, which is not installed.",
            "Install it with `pip install 'operator-farm[plot]'`, or leave --png out.",
        ) from error


def check_path(path: Path) -> None:
    """Raises:
    UsageError: matplotlib is missing, or no drawing can be written there; before anything is measured for it.
    """
    check_available()
    from matplotlib.backend_bases import FigureCanvasBase

    if not path.parent.is_dir():
        raise UsageError(f"The folder '{path.parent}' does not exist.", "Name a file in a folder that does.")
    if os.path.isdir(path):
        raise UsageError(f"'{path}' is a folder.", "Name a file in it.")
    if _format(path) not in FigureCanvasBase.get_supported_filetypes():
        raise UsageError(f"Nothing can be drawn as '{path.suffix}': '{path}'.", _KINDS)
    # Opened for once, not only asked about: a read-only disk and a name too long tell so only then.
    try:
        real = Path(os.path.realpath(path))  # where a link leads: the link itself must stay
        there = real.exists()
        with real.open("ab"):
            pass
        if not there:
            real.unlink()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"'{path}' cannot be written: {error}.", "Name a file in a folder that you may write to."
        ) from error


def _format(path: Path) -> str:
    return path.suffix.lstrip(".").lower() or "png"


def counter_power(trace: Trace) -> tuple[list[float], list[float]]:
    """Power from one step of the energy counter to the next: (end of each step in s, W)."""
    steps = power_by_step(*trace.series.get("energy_mj", ([], [])))
    return [end_s for _, end_s, _ in steps], [power_w for _, _, power_w in steps]


def window_power_w(trace: Trace) -> float | None:
    """The counter's slope over the window's ticks, fitted as the reading's own power is. Unit: W."""
    times, energies = trace.series.get("energy_mj", ([], []))
    begin_s, end_s = trace.window_s
    inside = [
        (moment, energy)
        for moment, energy in zip(times, energies, strict=True)
        if begin_s - 1e-3 <= moment <= end_s + 1e-3
    ]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return None
    return power_of_ticks(*zip(*inside, strict=True)).rate


def draw_trace(trace: Trace, path: Path, title: str, levels_w: Mapping[str, float] | None = None) -> None:
    """Power, clocks and temperatures over one reading, its window shaded; bands where it was throttled or shared.

    Args:
        levels_w: powers to draw as dotted lines, by name: idle, base.
    """
    check_path(path)
    panels = [panel for panel in (_PANELS) if any(name in trace.series for name in panel[1])]
    figure, axes = _figure([2.2] * max(1, len(panels)))
    for axis in axes[1:]:
        axis.sharex(axes[0])
    begin_s, end_s = trace.window_s
    for axis, (unit, names) in zip(axes, panels, strict=False):
        axis.axvspan(begin_s, end_s, color=WINDOW, label="window" if axis is axes[0] else None, zorder=0)
        for number, name in enumerate(name for name in names if name in trace.series):
            times, values = trace.series[name]
            if name == "energy_mj":
                _draw_counter(axis, trace)
                continue
            label = name.rsplit("_", 1)[0].replace("_", " ")
            dense = len(times) > 60
            axis.plot(
                times,
                values,
                "-" if dense else ".-",
                color=COLOURS[number % len(COLOURS)],
                linewidth=0.8 if dense else 1.2,
                label=label,
            )
        if axis is axes[0]:
            _draw_bands(axis, trace)
        if unit == "W":
            for name, value in (levels_w or {}).items():
                axis.axhline(value, color="#7f7f7f", linestyle=":", linewidth=1, label=f"{name} {value:.0f} W")
        axis.set_ylabel(unit)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    axes[-1].set_xlabel("s since the warm-up began")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("W", ("power_instant_w", "power_average_w", "energy_mj")),
    ("MHz", ("sm_clock_mhz", "memory_clock_mhz")),
    ("°C", ("temperature_c", "memory_temperature_c")),
)


def _draw_counter(axis: Any, trace: Trace) -> None:
    times, powers = counter_power(trace)
    ticks = trace.series["energy_mj"][0]
    if len(ticks) > 1:
        axis.stairs(powers, [ticks[0], *times], color=SECOND, linewidth=1.2, baseline=None, label="counter, by step")
    if (power_w := window_power_w(trace)) is not None:
        axis.plot(trace.window_s, [power_w, power_w], color=THIRD, linewidth=2, label=f"slope: {power_w:.1f} W")


def _draw_bands(axis: Any, trace: Trace) -> None:
    """What lowered the clocks, and when others were on the card, as bands at the foot of a panel."""
    bands = [name for name in sorted(trace.series) if name.startswith("throttle_") and name != "throttle_reasons"]
    bands += [name for name in ("foreign_processes",) if any(trace.series.get(name, ([], []))[1])]
    for number, name in enumerate(bands):
        times, values = trace.series[name]
        ends = [*times[1:], times[-1] + 0.1]
        label: str | None = name.removeprefix("throttle_").replace("_", " ")
        for begin_s, end_s, value in zip(times, ends, values, strict=True):
            if value:
                colour = COLOURS[(number + 2) % len(COLOURS)]
                axis.axvspan(begin_s, end_s, 0.05 * number, 0.05 * number + 0.04, color=colour, lw=0, label=label)
                label = None  # once in the legend


def draw_charts(charts: Sequence[Chart], path: Path, title: str) -> None:
    """A study's charts below each other."""
    check_path(path)
    figure, axes = _figure([_height(chart) for chart in charts] or [2.8])
    for axis, chart in zip(axes, charts, strict=False):
        lying = _lying(chart)
        if chart.zero:
            (axis.axvline if lying else axis.axhline)(0, color="#7f7f7f", linewidth=0.8)
        if chart.areas:
            colours = [COLOURS[number % len(COLOURS)] for number in range(len(chart.areas))]
            rows = [area.y for area in chart.areas]
            names = [area.name for area in chart.areas]
            axis.stackplot(chart.areas[0].x, *rows, labels=names, colors=colours, step="post", linewidth=0)
            axis.margins(x=0)
        for number, line in enumerate(chart.lines, start=len(chart.areas)):
            colour = COLOURS[number % len(COLOURS)]
            several = len(set(line.x)) < len(line.x)  # repeats at one place are points, not a line
            style = "o" if several or line.alone else ".-"
            axis.errorbar(
                line.x,
                line.y,
                yerr=line.half_widths,
                fmt=style,
                markersize=4,
                color=colour,
                capsize=2,
                linewidth=1,
                label=line.name,
            )
        _draw_bars(axis, chart.bars, lying=lying)
        if chart.x_log and chart.lines:
            axis.set_xscale("log")
            ticks = sorted({value for line in chart.lines for value in line.x if value > 0})
            if len(ticks) <= _FEW_TICKS:
                axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
                axis.minorticks_off()
        axis.set_title(chart.title, fontsize=9, loc="left")
        axis.set_xlabel(chart.y_name if lying else chart.x_name, fontsize=8)
        axis.set_ylabel("" if lying else chart.y_name, fontsize=8)
        if len(chart.lines) + len(chart.areas) > 1 or any(len(row) > 1 for row in chart.bars.values()):
            axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _lying(chart: Chart) -> bool:
    """Whether bars lie, one below the other: so that long labels stand whole beside them."""
    return len(chart.bars) > 3 and any(len(label) > 14 for label in chart.bars)


def _height(chart: Chart) -> float:
    """Of a panel. Unit: inches."""
    return max(1.5, 0.7 + 0.27 * len(chart.bars)) if _lying(chart) else 2.8


def _draw_bars(axis: Any, bars: Mapping[str, Mapping[str, float]], *, lying: bool) -> None:
    if not bars:
        return
    series = list(dict.fromkeys(name for row in bars.values() for name in row))
    width = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(bars))]
        values = [row.get(name, math.nan) for row in bars.values()]
        draw = axis.barh if lying else axis.bar
        draw(places, values, width, color=COLOURS[number % len(COLOURS)], label=name)
    if lying:
        axis.set_yticks(range(len(bars)), list(bars), fontsize=7)
        axis.set_ylim(len(bars) - 0.4, -0.6)  # the first on top
    else:
        axis.set_xticks(range(len(bars)), list(bars), fontsize=7)


def _figure(heights: Sequence[float]) -> tuple[Any, list[Any]]:
    # The object, not pyplot: no display is looked for and nothing is kept globally.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + sum(heights)), dpi=130, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    return figure, [row[0] for row in axes]


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format=_format(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"'{path}' cannot be written: {error}.", _KINDS) from error
