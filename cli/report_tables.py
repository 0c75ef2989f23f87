"""A job's report as tables and lines: cost by operator type, sum against whole, remarks, and cost by layer.

Formatting, no logic; `farm.report` computes the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from cli import tables
from cli.tables import Text
from farm.report.breakdowns import OF_OWNERS, grouped
from farm.report.layers import sizes_text
from farm.report.remarks import remarks
from farm.types.format import (
    ENERGY,
    NOTHING,
    POWER,
    TIME,
    count_of,
    gap,
    interval,
    part_of,
    percent,
    plural,
    quantity,
    span,
)

if TYPE_CHECKING:
    from farm.report import Report
    from farm.report.layers import LayerRow, Layers
    from farm.verdict.verdict import TupleRow, Verdict

_MOST_UNMEASURED = 10
_MOST_CARDS = 4
_MOST_SWEEP_ROWS = 200
_MOST_PLACEMENTS = 60
_MOST_LAYERS = 2000
_LONGEST_PATH = 34  # of a module in a table; CSV and JSON have all of it


def report(report: Report, *, tuples: int = 0) -> RenderableType:
    """The report of a job.

    Args:
        tuples: the number of heaviest tuples to list as well. A sweep lists all its tuples.
    """
    sweep, blank = report.kind == "sweep", Text()
    parts: list[RenderableType] = [_header(report)]
    if sweep:
        parts += [blank, _tuples(report, _MOST_SWEEP_ROWS)]
    else:
        parts += [blank, _types(report)]
        parts += [blank, _owners(report)] if report.owners else []
        parts += [blank, _tuples(report, tuples)] if tuples else []
        parts += [blank, _comparison(report.verdict)]
    parts += [blank, *_placements(report)] if report.placements else []
    if not sweep or report.verdict.flags:
        parts += [blank, tables.facts(remarks(report))]
    parts += [blank, _rounds(report)] if len(report.rounds) > 1 else []
    parts += [blank, *_unmeasured(report.verdict)] if not sweep and report.verdict.unmeasured else []
    parts += [blank, _verdict(report), Text("  `farm help WORD` explains a word of this report.", style="dim")]
    return Group(*parts)


def _header(report: Report) -> RenderableType:
    rounds = f", round {report.round}" if report.round > 1 else ""
    origin = f", imported from {report.origin}" if report.origin else ""
    lines = [("job", f"{report.job_id}, {report.state}{rounds}{origin}")]
    for card in report.cards[:_MOST_CARDS]:
        driver = f"{'kernel' if card.kind == 'cpu' else 'driver'} {card.driver}" if card.driver else ""
        lines.append(("card", f"{card.model}  ({', '.join(filter(None, (card.id, card.host, driver)))})"))
    if (left := len(report.cards) - _MOST_CARDS) > 0:
        lines.append(("", f"and {left} more {plural('card', left)}"))
    for software in report.software:
        named = (("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("Python", "python"))
        lines.append(("software", ", ".join(f"{name} {software[key]}" for name, key in named if software.get(key))))
    lines.append(("protocol", str(report.protocol)))
    counts = report.readings
    others = {name: name for name in ("failed", "open", "cancelled", "repeated")} | {"not_run": "not run by the card"}
    words = [f"{counts.measured} measured", f"{counts.reused} reused"]
    words += [f"{number} {word}" for name, word in others.items() if (number := getattr(counts, name))]
    spent = ""
    if counts.card_time_s >= 0.5:
        inside = percent(counts.window_time_s / counts.card_time_s, 0)
        spent = f"; {span(counts.card_time_s)} of card time, {inside} in warm-ups and windows"
    lines.append(("readings", ", ".join(words) + spent))
    if report.flops:
        cost = f"{count_of(report.flops, 'FLOP')}, {count_of(report.bytes_moved, 'B')} moved"
        lines.append(("cost", cost + (" per pass" if report.kind == "model" else " in total")))
    facts = tables.facts((name, Text(text, overflow="fold")) for name, text in lines)
    return Group(Text(report.title, style="bold"), facts)


def _types(report: Report) -> Table:
    rows, verdict = report.types, report.verdict
    with_energy = any(row.energy_mj is not None for row in rows)
    in_model = [row.in_model_us for row in rows if row.in_model_us is not None]
    # Each column with its total.
    columns: list[tuple[str, tables.Cell, str]] = [
        ("operator", lambda row: row.short_name, "sum"),
        (">calls", lambda row: str(row.calls), str(sum(row.calls for row in rows))),
        (
            ">tuples",
            lambda row: part_of(row.measured_tuples, row.tuples),
            part_of(sum(row.measured_tuples for row in rows), sum(row.tuples for row in rows)),
        ),
        (
            ">time",
            lambda row: quantity(row.time_us, TIME),
            quantity(verdict.time.total.value, TIME, 4) if verdict.measured else NOTHING,
        ),
    ]
    if in_model:
        total = quantity(sum(in_model), TIME, 4) if len(in_model) == len(rows) else NOTHING
        columns.append((">in model", lambda row: quantity(row.in_model_us, TIME), total))
    columns.append((">share", lambda row: percent(row.time_share), ""))
    if with_energy:
        total = quantity(verdict.energy.total.value, ENERGY, 4) if verdict.energy else "not available"
        columns.append((">energy", lambda row: quantity(row.energy_mj, ENERGY), total))
        columns.append((">share", lambda row: percent(row.energy_share), ""))
    columns.append((">estimate", lambda row: percent(row.estimated_share), ""))
    table = tables.filled(
        rows,
        [(head, cell) for head, cell, _ in columns],
        drops=("estimate", "tuples", "share", "in model", "calls"),
        style=lambda row: "" if row.measured_tuples else "dim",
    )
    table.add_section()
    tables.row(table, *(total for *_, total in columns), style="bold")
    return table


def _placements(report: Report) -> list[RenderableType]:
    """Tuples with tensors in slow memory, the heaviest first."""
    shown = report.placements[:_MOST_PLACEMENTS]
    first = {id(row) for n, row in enumerate(shown) if not n or shown[n - 1].operator_id != row.operator_id}
    table = tables.filled(
        shown,
        [
            ("tuple", lambda row: row.label if id(row) in first else ""),
            ("slow", lambda row: row.placement),
            ("", lambda row: row.tensors),
            (">time", lambda row: quantity(row.time_us, TIME) if row.time_us is not None else row.reason or "open"),
            (">all fast", lambda row: quantity(row.fast_time_us, TIME)),
            (">times", lambda row: f"{row.times_fast:.2f}" if row.times_fast is not None else NOTHING),
            ("workspaces", lambda row: row.workspaces),
        ],
        drops=("workspaces", "all fast"),
    )
    left = len(report.placements) - len(shown)
    return [table, *([tables.more(left, "; --json lists all")] if left else [])]


def _owners(report: Report) -> Table:
    """Forward and backward of each kind of module side by side; parts without an owner in separate lines."""
    shown = [part for part in OF_OWNERS if any(row.part == part for row in report.owners)]

    def time_of(part: str) -> tables.Cell:
        return lambda group: quantity(group.parts_us[part], TIME) if part in group.parts_us else ""

    return tables.filled(
        grouped(report.owners),
        [
            ("of a step", lambda group: group.name),
            *((f">{part}", time_of(part)) for part in shown),
            (">total", lambda group: quantity(group.time_us, TIME)),
            (">share", lambda group: percent(group.time_share)),
            (">energy", lambda group: quantity(group.energy_mj, ENERGY)),
        ],
        drops=("energy",),
    )


def _tuples(report: Report, most: int) -> RenderableType:
    with_energy = any(row.energy_mj is not None for row in report.tuples)

    def time_of(row: TupleRow) -> str:
        half_width = row.time_half_width_us or 0.0
        return quantity(row.time_us, TIME) + (
            f" ± {half_width / row.time_us * 100:.1f} %" if row.time_us and half_width else ""
        )

    def remarks_of(row: TupleRow) -> str:
        return ", ".join(filter(None, (row.reason, "" if row.used == "steady" else row.used, *row.flags)))

    columns: list[tuple[str, tables.Cell]] = [("operator tuple", lambda row: row.label)]
    columns += [(">calls", lambda row: str(row.calls))] if report.kind != "sweep" else []
    columns.append((">time", time_of))
    if with_energy:
        columns.append((">power", lambda row: quantity(row.power_w, POWER)))
        columns.append((">energy", lambda row: quantity(row.energy_mj, ENERGY)))
    columns.append(("remarks", remarks_of))
    table = tables.filled(report.tuples[:most], columns, drops=("power", "calls", "remarks", "energy"))
    left = len(report.tuples) - most
    return Group(table, tables.more(left, "; --json lists all")) if left > 0 else table


def readings(report: Report) -> RenderableType:
    """The readings of a job, wholes first, with the beginning of each id."""
    rows: list[tuple[str | None, str, str, float | None, Sequence[str]]] = [
        (
            whole.reading.reading_id,
            f"whole model, {whole.launch}" if whole.launch else "whole model",
            whole.card_id,
            whole.reading.time_us,
            whole.reading.flags,
        )
        for whole in report.verdict.wholes
        if whole.reading
    ]
    rows += [
        (row.reading_id, row.label, row.card_id, row.time_us, row.flags) for row in report.tuples if row.reading_id
    ]
    if not rows:
        return Text("No readings yet.")
    return tables.filled(
        rows,
        [
            ("reading", lambda row: row[0][:12]),
            ("of", lambda row: row[1]),
            ("card", lambda row: tables.short_id(row[2])),
            (">time", lambda row: quantity(row[3], TIME)),
            ("flags", lambda row: ", ".join(row[4])),
        ],
        drops=("card", "flags", "time"),
    )


def _comparison(verdict: Verdict) -> Table:
    table = tables.ruled("", ">sum of the parts", ">whole model", ">gap", ">accuracy", drops=("accuracy",))
    lines = (
        ("time", verdict.time if verdict.measured or verdict.time.whole else None, TIME),
        ("power", verdict.power, POWER),
        ("energy", verdict.energy, ENERGY),
        ("energy above idle", verdict.energy_above_idle, ENERGY),
    )
    for name, comparison, units in lines:
        judged = name in ("time", "energy")
        if comparison is not None:
            figures = interval(comparison.total, units), interval(comparison.whole, units)
            accuracy = percent(comparison.accuracy) if judged else ""
            tables.row(table, name, *figures, gap(comparison.gap), accuracy)
        elif judged:
            tables.row(table, name, "not available", NOTHING, NOTHING, NOTHING, style="dim")
    return table


def _rounds(report: Report) -> Table:
    seen: set[str] = set()

    def new_operators(row: Any) -> str:
        added = [name for name in row.operators if name not in seen]
        seen.update(added)
        return ", ".join(added[:6]) + (f" and {len(added) - 6} more" if len(added) > 6 else "")

    return tables.filled(
        report.rounds,
        [
            (">round", lambda row: str(row.number)),
            ("why", lambda row: row.reason),
            ("operators added", new_operators),
            (">items", lambda row: str(row.items)),
            (">accuracy\ntime", lambda row: percent(row.accuracy_time)),
            (">accuracy\nenergy", lambda row: percent(row.accuracy_energy)),
            (">coverage", lambda row: percent(row.coverage)),
            ("outcome", lambda row: tables.outcome(row.outcome) if row.outcome else Text("open", style="cyan")),
        ],
        drops=("items", "why", "coverage", "accuracy energy", "accuracy time"),
    )


def _unmeasured(verdict: Verdict) -> list[RenderableType]:
    table = tables.filled(
        verdict.unmeasured[:_MOST_UNMEASURED],
        [
            ("not measured", lambda entry: entry.label),
            (">calls", lambda entry: str(entry.count)),
            (">of the cost", lambda entry: percent(entry.share)),
            ("why", lambda entry: entry.reason),
        ],
        drops=("calls", "of the cost"),
    )
    left = verdict.unmeasured[_MOST_UNMEASURED:]
    share = percent(sum(entry.share for entry in left))
    return [table, *([tables.more(len(left), f" ({share} of the cost); --json lists all")] if left else [])]


def _verdict(report: Report) -> RenderableType:
    verdict = report.verdict
    line = tables.outcome(verdict.outcome)
    if report.preliminary and report.readings.open:
        line = Text("PRELIMINARY ", style="bold cyan").append_text(line)
    accuracies = [
        f"{name} {percent(comparison.accuracy)}"
        for name, comparison in (("time", verdict.time), ("energy", verdict.energy))
        if comparison and comparison.accuracy is not None
    ]
    if report.kind == "sweep":
        line = Text(f"{verdict.measured} of {verdict.parts} tuples measured", style="bold")
    elif verdict.outcome != "none":
        line.append(f"  accuracy {', '.join(accuracies)}; coverage {percent(verdict.coverage)}", style="not bold")
        line.append(f"  (target {percent(verdict.target, 0)})", style="not bold dim")
    reasons = () if report.kind == "sweep" and report.state != "cancelled" else verdict.reasons
    return Group(line, *map(tables.hanging, reasons))


# ------------------------------------------------------------------------------------------------- layers


def layer_table(layers: Layers) -> RenderableType:
    """A job's calls, tuples, types or modules with sizes, parameters and cost. Unmeasured rows are dim."""
    by = layers.by
    columns: list[tuple[str, tables.Cell]] = [("module", lambda row: _path(row.module_path))] if by == "call" else []
    head = {"module": "module", "type": "operator"}.get(by, "operator, parameters")
    columns.append((head, lambda row: _layer_name(row, layers)))
    if by != "call":
        columns.append((">calls", lambda row: part_of(row.measured_calls, row.calls)))
    if by in ("call", "tuple"):
        columns.append(("input", lambda row: sizes_text(row.input_sizes) or NOTHING))
        columns.append(("output", lambda row: sizes_text(row.output_sizes) or NOTHING))
    columns += [
        (">weights", lambda row: count_of(row.held_parameters, "") if row.held_parameters != 0 else NOTHING),
        (">FLOP", lambda row: count_of(row.flops, "")),
        (">bytes", lambda row: count_of(row.bytes_moved, "B")),
        (">time", lambda row: quantity(row.time_us, TIME)),
        (">share", lambda row: percent(row.time_share)),
    ]
    if any(row.energy_mj is not None for row in layers.rows):
        columns.append((">energy", lambda row: quantity(row.energy_mj, ENERGY)))
        columns.append((">share of\nenergy", lambda row: percent(row.energy_share)))
    table = tables.filled(
        layers.rows[:_MOST_LAYERS],
        columns,
        drops=("bytes", "weights", "calls", "output", "share of energy", "FLOP", "input", "energy"),
        style=lambda row: "" if row.measured_calls else "dim",
    )
    left = len(layers.rows) - _MOST_LAYERS
    end = [tables.more(left, "; --csv and --json list all")] if left > 0 else []
    return Group(Text(f"{layers.title}  (job {layers.job_id})", style="bold"), Text(), table, *end)


def _path(path: str) -> str:
    """The module of a call; of a long path the end, which distinguishes it from its neighbours."""
    steps = path.split(".")
    while len(".".join(steps)) > _LONGEST_PATH and len(steps) > 1:
        steps = ["…", *steps[2 if steps[0] == "…" else 1 :]]
    return ".".join(steps).replace("….", "…") or NOTHING


def _layer_name(row: LayerRow, layers: Layers) -> str:
    if layers.by == "module":
        return f"{'  ' * row.depth}{row.name}" if row.depth else layers.title.partition(" ")[0]
    return row.call if layers.by == "tuple" and row.input_sizes else row.name
