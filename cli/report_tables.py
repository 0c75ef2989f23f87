"""A job's report as tables and lines: sum against whole, by operator type, and what is to be known of both.

Formatting, no logic; what is shown was worked out by `farm.report`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from cli import tables
from cli.tables import Text
from farm.report.breakdowns import OF_OWNERS, grouped
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
    from farm.report import Report, TypeRow
    from farm.verdict.verdict import Verdict

_MOST_UNMEASURED = 10
_MOST_CARDS = 4
_MOST_SWEEP_ROWS = 200
_MOST_PLACEMENTS = 60


def report(report: Report, *, tuples: int = 0) -> RenderableType:
    """The report of a job. `tuples`: how many of the heaviest tuples to list as well (a sweep lists them all)."""
    parts: list[RenderableType] = [_header(report), Text()]
    if report.kind == "sweep":
        parts.append(_tuples(report, _MOST_SWEEP_ROWS))
    else:
        parts += [_types(report), Text()]
        if report.owners:
            parts += [_owners(report), Text()]
        if tuples:
            parts += [_tuples(report, tuples), Text()]
        parts.append(_comparison(report.verdict))
    if report.placements:
        parts += [Text(), _placements(report)]
    parts += [Text(), *_remarks(report)] if report.kind == "model" or report.verdict.flags else []
    if len(report.rounds) > 1:
        parts += [Text(), _rounds(report)]
    if report.kind == "model" and report.verdict.unmeasured:
        parts += [Text(), _unmeasured(report.verdict)]
    parts += [Text(), _verdict(report), Text("  `farm help WORD` says what a word here means.", style="dim")]
    return Group(*parts)


def _header(report: Report) -> RenderableType:
    grid = tables.grid(3)
    grid.columns[1].style = "dim"
    rounds = f", round {report.round}" if report.round > 1 else ""
    theirs = f", imported from {report.origin}" if report.origin else ""
    lines = [("job", f"{report.job_id}, {report.state}{rounds}{theirs}")]
    for card in report.cards[:_MOST_CARDS]:
        driver = f"{'kernel' if card.kind == 'cpu' else 'driver'} {card.driver}" if card.driver else ""
        detail = [card.id, card.host, driver]
        lines.append(("card", f"{card.model}  ({', '.join(part for part in detail if part)})"))
    if (left := len(report.cards) - _MOST_CARDS) > 0:
        lines.append(("", f"and {left} more {plural('card', left)}"))
    for software in report.software:
        named = (("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("Python", "python"))
        lines.append(("software", ", ".join(f"{name} {software[key]}" for name, key in named if software.get(key))))
    lines.append(("protocol", str(report.protocol)))
    counts = report.readings
    told = [f"{counts.measured} measured", f"{counts.reused} reused"]
    others = {name: name for name in ("failed", "open", "cancelled", "repeated")} | {"not_run": "not run by the card"}
    told += [f"{number} {words}" for name, words in others.items() if (number := getattr(counts, name))]
    spent = ""
    if counts.card_time_s >= 0.5:
        inside = percent(counts.window_time_s / counts.card_time_s, 0)
        spent = f"; {span(counts.card_time_s)} of card time, {inside} in warm-ups and windows"
    lines.append(("readings", ", ".join(told) + spent))
    if report.flops:
        cost = f"{count_of(report.flops, 'FLOP')}, {count_of(report.bytes_moved, 'B')} moved"
        lines.append(("cost", cost + (" per pass" if report.kind == "model" else " in all")))
    for name, text in lines:
        tables.row(grid, " ", name, Text(text, overflow="fold"))
    return Group(Text(report.title, style="bold"), grid)


def _types(report: Report) -> Table:
    with_energy = any(row.energy_mj is not None for row in report.types)
    in_model = any(row.in_model_us is not None for row in report.types)
    table = tables.ruled(
        "operator",
        ">calls",
        ">tuples",
        ">time",
        *([">in model"] * in_model),
        ">share",
        *([">energy", ">share"] * with_energy),
        ">estimate",
        drops=("estimate", "tuples", "share", "in model", "calls"),
    )
    for row in report.types:
        tables.row(table, *_type_cells(row, with_energy, in_model), style="" if row.measured_tuples else "dim")
    table.add_section()
    verdict = report.verdict
    total = [
        "sum",
        str(sum(row.calls for row in report.types)),
        part_of(sum(row.measured_tuples for row in report.types), sum(row.tuples for row in report.types)),
        quantity(verdict.time.total.value, TIME, 4) if verdict.measured else NOTHING,
    ]
    if in_model:
        known = [row.in_model_us for row in report.types if row.in_model_us is not None]
        total.append(quantity(sum(known), TIME, 4) if len(known) == len(report.types) else NOTHING)
    total.append("")
    if with_energy:
        total += [quantity(verdict.energy.total.value, ENERGY, 4) if verdict.energy else "not available", ""]
    tables.row(table, *total, "", style="bold")
    return table


def _placements(report: Report) -> Table:
    """Tuples by configuration, the heaviest first."""
    table = tables.ruled(
        "tuple",
        "slow",
        "",
        ">time",
        ">all fast",
        ">times",
        "workspaces",
        drops=("workspaces", "all fast"),
    )
    before = ""
    for row in report.placements[:_MOST_PLACEMENTS]:
        told = quantity(row.time_us, TIME) if row.time_us is not None else row.reason or "open"
        fast = quantity(row.fast_time_us, TIME) if row.fast_time_us is not None else NOTHING
        times = f"{row.times_fast:.2f}" if row.times_fast is not None else NOTHING
        label = row.label if row.operator_id != before else ""
        tables.row(table, label, row.placement, row.tensors, told, fast, times, row.workspaces)
        before = row.operator_id
    if (left := len(report.placements) - _MOST_PLACEMENTS) > 0:
        table.add_section()
        tables.row(table, f"and {left} more; --json has them all", "", "", "", "", "", "")
    return table


def _owners(report: Report) -> Table:
    """Forward and backward of a module beside each other; what has no owner in lines of its own."""
    shown = [part for part in OF_OWNERS if any(row.part == part for row in report.owners)]
    table = tables.ruled(
        "of a step", *(f">{part}" for part in shown), ">in all", ">share", ">energy", drops=("energy",)
    )
    for group in grouped(report.owners):
        tables.row(
            table,
            group.name,
            *(quantity(group.parts_us[part], TIME) if part in group.parts_us else "" for part in shown),
            quantity(group.time_us, TIME),
            percent(group.time_share) if group.time_share is not None else NOTHING,
            quantity(group.energy_mj, ENERGY),
        )
    return table


def _type_cells(row: TypeRow, with_energy: bool, in_model: bool) -> list[str]:
    cells = [row.short_name, str(row.calls), part_of(row.measured_tuples, row.tuples), quantity(row.time_us, TIME)]
    if in_model:
        cells.append(quantity(row.in_model_us, TIME))
    cells.append(percent(row.time_share))
    if with_energy:
        cells += [quantity(row.energy_mj, ENERGY), percent(row.energy_share)]
    return [*cells, percent(row.estimated_share)]


def _tuples(report: Report, most: int) -> RenderableType:
    with_energy = any(row.energy_mj is not None for row in report.tuples)
    counted = report.kind != "sweep"
    table = tables.ruled(
        "operator tuple",
        *([">calls"] * counted),
        ">time",
        *([">power", ">energy"] * with_energy),
        "remarks",
        drops=("power", "calls", "remarks", "energy"),
    )
    for row in report.tuples[:most]:
        remarks = [row.reason, row.used if row.used not in ("", "steady") else "", *row.flags]
        cells = [row.label, *([str(row.calls)] * counted), quantity(row.time_us, TIME)]
        if row.time_us and row.time_half_width_us:
            cells[-1] += f" ± {row.time_half_width_us / row.time_us * 100:.1f} %"
        if with_energy:
            cells += [quantity(row.power_w, POWER), quantity(row.energy_mj, ENERGY)]
        tables.row(table, *cells, ", ".join(remark for remark in remarks if remark))
    left = len(report.tuples) - most
    if left <= 0:
        return table
    return Group(table, Text(f"  and {left} more; --json lists all", style="dim"))


def readings(report: Report) -> RenderableType:
    """The readings that a job goes by, wholes first, with the beginning of each id."""
    table = tables.ruled("reading", "of", "card", ">time", "flags", drops=("card", "flags", "time"))
    for whole in report.verdict.wholes:
        if (read := whole.reading) is not None:
            told = f"whole model, {whole.launch}" if whole.launch else "whole model"
            tables.row(
                table,
                read.reading_id[:12],
                told,
                tables.short_id(whole.card_id),
                quantity(read.time_us, TIME),
                ", ".join(read.flags),
            )
    for row in report.tuples:
        if row.reading_id:
            cells = [row.reading_id[:12], row.label, tables.short_id(row.card_id), quantity(row.time_us, TIME)]
            tables.row(table, *cells, ", ".join(row.flags))
    return table if table.row_count else Text("No readings yet.")


def _comparison(verdict: Verdict) -> Table:
    table = tables.ruled("", ">sum of the parts", ">whole model", ">gap", ">accuracy", drops=("accuracy",))
    lines = (
        ("time", verdict.time if verdict.measured or verdict.time.whole else None, TIME),
        ("power", verdict.power, POWER),
        ("energy", verdict.energy, ENERGY),
        ("energy above idle", verdict.energy_above_idle, ENERGY),
    )
    for name, comparison, units in lines:
        if comparison is None:
            if name in ("time", "energy"):
                tables.row(table, name, "not available", NOTHING, NOTHING, NOTHING, style="dim")
            continue
        tables.row(
            table,
            name,
            interval(comparison.total, units),
            interval(comparison.whole, units),
            gap(comparison.gap),
            percent(comparison.accuracy) if name in ("time", "energy") else "",
        )
    return table


def _remarks(report: Report) -> Iterable[RenderableType]:
    grid = tables.grid(3)
    grid.columns[1].style = "dim"
    for what, told in remarks(report):
        tables.row(grid, " ", what, told)
    return [grid] if grid.row_count else []


def _rounds(report: Report) -> Table:
    accuracies = (">accuracy\ntime", ">accuracy\nenergy")
    table = tables.ruled(
        *(">round", "why", "operators added", ">items", *accuracies, ">coverage", "outcome"),
        drops=("items", "why", "coverage", "accuracy energy", "accuracy time"),
    )
    there: set[str] = set()
    for row in report.rounds:
        added = [name for name in row.operators if name not in there]
        there.update(added)
        operators = ", ".join(added[:6]) + (f" and {len(added) - 6} more" if len(added) > 6 else "")
        tables.row(
            table,
            str(row.number),
            row.reason,
            operators,
            str(row.items),
            percent(row.accuracy_time),
            percent(row.accuracy_energy),
            percent(row.coverage),
            tables.outcome(row.outcome) if row.outcome else Text("open", style="cyan"),
        )
    return table


def _unmeasured(verdict: Verdict) -> RenderableType:
    table = tables.ruled("not measured", ">calls", ">of the cost", "why", drops=("calls", "of the cost"))
    for entry in verdict.unmeasured[:_MOST_UNMEASURED]:
        tables.row(table, entry.label, str(entry.count), percent(entry.share), entry.reason)
    left = verdict.unmeasured[_MOST_UNMEASURED:]
    if not left:
        return table
    share = percent(sum(entry.share for entry in left))
    return Group(table, Text(f"  and {len(left)} more ({share} of the cost); --json lists all", style="dim"))


def _verdict(report: Report) -> RenderableType:
    verdict = report.verdict
    line = tables.outcome(verdict.outcome)
    if report.preliminary:
        line = Text("PRELIMINARY ", style="bold cyan").append_text(line) if report.readings.open else line
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
