"""``farm trace``: the time series that was sampled while one reading was taken."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.output import emit_json


def trace(
    reading: Annotated[
        str, typer.Argument(help="The reading's id, or its beginning; `farm report JOB --json` has it.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """Show power, clocks and temperature over one reading, its window marked."""
    from sqlmodel import select

    from farm.benchmark.protocol import Trace
    from farm.errors import UsageError
    from farm.store import tables

    with opening.open_database().read() as session:
        found = session.exec(
            select(tables.Trace).where(tables.Trace.reading_id.startswith(reading)).limit(2)  # type: ignore[attr-defined]
        ).all()
    if len(found) != 1:
        problem = "No reading with a trace has" if not found else "Several readings have"
        raise UsageError(f"{problem} an id that begins with '{reading}'.", "`farm report JOB --json` lists the ids.")
    unpacked = Trace.unpack(found[0].packed)
    if as_json:
        series = {name: {"time_s": times, "values": values} for name, (times, values) in unpacked.series.items()}
        emit_json({"reading_id": found[0].reading_id, "window_s": list(unpacked.window_s), "series": series})
        return
    begin_s, end_s = unpacked.window_s
    typer.echo(f"reading {found[0].reading_id}, window {begin_s:.3f} to {end_s:.3f} s")
    for name, (times, values) in unpacked.series.items():
        typer.echo(f"{name:>22}  {sparkline(times, values, unpacked.window_s)}  {_range(values)}")
    typer.echo(f"{'':>22}  (· before and after the window)")


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
