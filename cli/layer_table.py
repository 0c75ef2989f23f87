"""A job's calls, tuples, types or modules as one table: sizes, parameters, arithmetic, time and energy side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from cli import tables
from cli.tables import Text
from farm.report.layers import sizes_text
from farm.types.format import ENERGY, NOTHING, TIME, count_of, part_of, percent, quantity

if TYPE_CHECKING:
    from farm.report.layers import LayerRow, Layers

_MOST_ROWS = 2000
_LONGEST_PATH = 34  # shown of a module's; CSV and JSON have all of it
# First the one that is missed least.
_DROPS = ("bytes", "weights", "calls", "output", "share of energy", "FLOP", "input", "energy")


def layer_table(layers: Layers) -> RenderableType:
    """The rows with their units. What was not measured is dim and has none."""
    by = layers.by
    places, sizes, counted = by == "call", by in ("call", "tuple"), by != "call"
    with_energy = any(row.energy_mj is not None for row in layers.rows)
    table = tables.ruled(
        *(["module"] * places),
        {"module": "module", "type": "operator"}.get(by, "operator, parameters"),
        *([">calls"] * counted),
        *(["input", "output"] * sizes),
        *(">weights", ">FLOP", ">bytes", ">time", ">share"),
        *([">energy", ">share of\nenergy"] * with_energy),
        drops=_DROPS,
    )
    for row in layers.rows[:_MOST_ROWS]:
        cells = [_path(row.module_path)] if places else []
        cells.append(_name(row, layers))
        cells += [part_of(row.measured_calls, row.calls)] * counted
        cells += [sizes_text(row.input_sizes) or NOTHING, sizes_text(row.output_sizes) or NOTHING] * sizes
        cells += [count_of(row.held_parameters, "") if row.held_parameters != 0 else NOTHING]
        cells += [count_of(row.flops, ""), count_of(row.bytes_moved, "B")]
        cells += [quantity(row.time_us, TIME), percent(row.time_share)]
        cells += [quantity(row.energy_mj, ENERGY), percent(row.energy_share)] * with_energy
        tables.row(table, *cells, style="" if row.measured_calls else "dim")
    parts: list[RenderableType] = [Text(f"{layers.title}  (job {layers.job_id})", style="bold"), Text(), table]
    if (left := len(layers.rows) - _MOST_ROWS) > 0:
        parts.append(Text(f"  and {left} more; --csv and --json list all", style="dim"))
    return Group(*parts)


def _path(path: str) -> str:
    """The place of a call; of a long one its end, which tells it from its neighbours."""
    steps = path.split(".")
    while len(".".join(steps)) > _LONGEST_PATH and len(steps) > 1:
        steps = ["…", *steps[2 if steps[0] == "…" else 1 :]]
    return ".".join(steps).replace("….", "…") or NOTHING


def _name(row: LayerRow, layers: Layers) -> str:
    if layers.by == "module":
        return f"{'  ' * row.depth}{row.name}" if row.depth else layers.title.partition(" ")[0]
    return row.name.partition(" | ")[0] if layers.by == "tuple" and row.input_sizes else row.name
