"""``farm trace``: the time series that was sampled while one reading was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli import opening
from cli.options import AsJson
from cli.output import emit, emit_json, say


def trace(
    reading: Annotated[
        str, typer.Argument(help="The reading's id, or its beginning; `farm report JOB --readings` lists them.")
    ],
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw it to a file (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show power, clocks and temperature over one reading, its window marked."""
    from farm.pages import plots
    from farm.report.readings import find_traced

    with opening.open_database().read() as session:
        found = find_traced(session, reading)
    sampled = found.trace
    if png is not None:
        plots.draw_trace(sampled, png, found.title, found.levels_w)
        say(f"Drawn to {png}")
    begin_s, end_s = sampled.window_s
    if as_json:
        series = {name: {"time_s": times, "values": values} for name, (times, values) in sampled.series.items()}
        emit_json({"reading_id": found.reading.id, "window_s": [begin_s, end_s], "series": series})
        return
    emit(found.title)
    emit(f"window {begin_s:.3f} to {end_s:.3f} s")
    for name, (times, values) in sampled.series.items():
        emit(f"{name:>22}  {sparkline(times, values, sampled.window_s)}  {_range(values)}")
    emit(f"{'':>22}  (· before and after the window)")


BARS = "▁▂▃▄▅▆▇█"


def sparkline(times: list[float], values: list[float], window_s: tuple[float, float], width: int = 60) -> str:
    """A row of bars over time, dots outside the window."""
    if not values:
        return ""
    begin, end = times[0], max(times[-1], times[0] + 1e-9)
    low, high = min(values), max(values)
    line = []
    for column in range(width):
        moment = begin + (end - begin) * (column + 0.5) / width
        nearest = min(range(len(times)), key=lambda index: abs(times[index] - moment))
        inside = window_s[0] <= moment <= window_s[1]
        level = 0 if high == low else int((values[nearest] - low) / (high - low) * (len(BARS) - 1))
        line.append(BARS[level] if inside else "·")
    return "".join(line)


def _range(values: list[float]) -> str:
    return f"{min(values):.6g} to {max(values):.6g}" if values else "nothing sampled"
