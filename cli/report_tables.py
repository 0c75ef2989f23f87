"""A job's report as tables and lines: sum against whole, by operator type, and what is to be known of both.

Formatting, no logic; what is shown was worked out by `farm.report`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from cli import tables
from cli.tables import Text
from farm.words.data_classes import holds_nothing
from farm.words.written import (
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
    from farm.verdict.audit import KernelAudit
    from farm.verdict.verdict import Adjustment, Verdict
    from farm.words.verification import InModelTimes

_MOST_UNMEASURED = 10
_MOST_CARDS = 4
_MOST_EAGERLY = 4
_MOST_SWEEP_ROWS = 200


def report(report: Report, *, tuples: int = 0) -> RenderableType:
    """The report of a job. `tuples`: how many of the heaviest tuples to list as well (a sweep lists them all)."""
    parts: list[RenderableType] = [_header(report), Text()]
    if report.kind == "sweep":
        parts.append(_tuples(report, _MOST_SWEEP_ROWS))
    else:
        parts += [_types(report), Text()]
        if tuples:
            parts += [_tuples(report, tuples), Text()]
        parts.append(_comparison(report.verdict))
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
    lines = [("job", f"{report.job_id}, {report.state}" + (f", round {report.round}" if report.round > 1 else ""))]
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
    told += [
        f"{number} {name}" for name in ("failed", "open", "cancelled", "repeated") if (number := getattr(counts, name))
    ]
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
    verdict = report.verdict
    grid = tables.grid(3)
    grid.columns[1].style = "dim"
    if verdict.parts and report.kind == "model":
        measured = f"{percent(verdict.coverage)} of the estimated cost; {verdict.measured} of {verdict.parts} tuples"
        tables.row(grid, " ", "coverage", measured)
    if report.kind == "model":
        tables.row(grid, " ", "intervals", f"95 %. {_systematic(verdict)}")
    if taken := [entry for entry in verdict.adjustments if entry.used != "steady"]:
        tables.row(grid, " ", "power limit", _power_limit(taken))
    if verdict.context_time_us is not None:
        tables.row(grid, " ", "neighbours", _neighbours(verdict))
    if verdict.launch_gap_us is not None:
        more = "more" if verdict.launch_gap_us >= 0 else "less"
        gap_us = abs(verdict.launch_gap_us)
        tables.row(grid, " ", "launch gap", f"{quantity(gap_us, TIME)} {more} when launched eagerly")
    if report.capture_origin:
        tables.row(grid, " ", "operators", _capture(report))
    if report.eagerly:
        tables.row(grid, " ", "eagerly", _eagerly(report))
    if verdict.kernels:
        tables.row(grid, " ", "kernels", _kernels(verdict.kernels, verdict.launch))
    if timed := report.verification.in_model:
        tables.row(grid, " ", "in model", _in_model(timed, report.verification.read_at_s))
    if empty := sum(holds_nothing(row.data) for row in report.tuples):
        told = (
            f"{empty} {plural('tuple', empty)} read with buffers of zeros alone, as the model has them (empty caches)"
        )
        tables.row(grid, " ", "data", f"{told}: filled ones take more energy")
    if verdict.flags:
        tables.row(grid, " ", "flags", ", ".join(f"{name} ×{number}" for name, number in verdict.flags.items()))
    return [grid] if grid.row_count else []


def _power_limit(taken: Sequence[Adjustment]) -> str:
    """What the sum takes of tuples that hit the power limit when they are looped."""
    ways = {"burst": "as in bursts", "interpolated": "between steady and in bursts, by the whole's clock"}
    told = []
    for used, way in ways.items():
        if number := sum(entry.used == used for entry in taken):
            told.append(f"{number} {plural('tuple', number)} taken {way}")
    time_us = sum(entry.effect_time_us for entry in taken)
    return f"{', '.join(told)}, not steady: {round(time_us, 1) + 0.0:+.1f} µs on the sum"  # no negative zero


def _neighbours(verdict: Verdict) -> str:
    """What the sum holds because its operators stand among others."""
    added_us = verdict.context_time_us or 0.0
    share = added_us / (verdict.time.total.value - added_us)
    weights = "what stays in the cache is not known"
    if verdict.weights_in_cache is not None:
        weights = f"{percent(verdict.weights_in_cache)} of the weights stay in the cache"
    return f"what the operators around them change: {share * 100:+.1f} % on the looped sum; {weights}"


def _systematic(verdict: Verdict) -> str:
    if not verdict.systematic_time and not verdict.systematic_energy:
        return verdict.systematic_note
    spread = f"time by {percent(verdict.systematic_time, 2)}"
    if verdict.energy:
        spread += f", energy by {percent(verdict.systematic_energy, 2)}"
    return f"Added linearly: {spread} ({verdict.systematic_note.rstrip('.')})."


def _capture(report: Report) -> str:
    found = report.verification
    if found.matches is None:
        return f"{report.capture_origin}; not held against a run on the card"
    if (looked_at := found.launch or "eager") != report.verdict.launch:
        why = f" ({found.not_captured})" if found.not_captured else ""
        return f"{report.capture_origin}; held against an {looked_at} pass, not against the run that was measured{why}"
    if found.matches:
        return f"{report.capture_origin}; an unobserved run on the card has the same"
    differences = found.differences or ()
    number = len(differences) if found.difference_count is None else found.difference_count
    first = f", the first: {differences[0]}" if differences else ""
    return f"{report.capture_origin}; {number} {plural('difference', number)} between prediction and card{first}"


def _eagerly(report: Report) -> str:
    """Which operators an eager pass has otherwise, and what each costs."""
    told = []
    for row in report.eagerly[:_MOST_EAGERLY]:
        each = f" of {quantity(row.time_us, TIME)}" if row.time_us is not None else ""
        told.append(f"{row.launched} {row.label}{each} instead of {row.eager}")
    rest = len(report.eagerly) - len(told)
    more = f"; {rest} more" if rest > 0 else ""
    return f"in a graph this model runs other operators than eagerly: {'; '.join(told)}{more}"


def _kernels(audit: KernelAudit, launch: str) -> str:
    told = [f"those of the tuples account for {percent(audit.explained)} of the whole's kernel time"]
    for kernels, number, what in (
        (audit.only_whole, audit.only_whole_count, "only in the whole"),
        (audit.only_tuples, audit.only_tuples_count, "only in the tuples"),
        (audit.other_counts, audit.other_counts_count, "launched more or less often"),
    ):
        if number:
            told.append(f"{number} {what} ({_kernel_name(kernels[0].name)}{', ...' if number > 1 else ''})")
    if audit.unknown_tuples:
        told.append(f"{audit.unknown_tuples} {plural('tuple', audit.unknown_tuples)} not looked at")
    if audit.launch != launch:
        told.append(f"of an {audit.launch} pass, not of the run that was measured")
    return "; ".join(told) if len(told) > 1 else f"{told[0]}; the same, as often"


def _kernel_name(name: str, most: int = 48) -> str:
    """The part that a person knows a kernel by: no return type, no template arguments."""
    short = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return short if len(short) <= most else short[: most - 1] + "…"


def _in_model(timed: InModelTimes, read_at_s: float | None) -> str:
    passes = f"median of {timed.passes} passes"
    if read_at_s is not None:
        passes += f", read {span(time.time() - read_at_s)} ago"
    if timed.source != "kernels":
        return f"each call by the clock where it stands, {passes}"
    share = timed.attributed_share or 0.0
    missing = "" if share >= 0.999 else f"; {percent(1 - share)} of the kernel time belongs to no call"
    return f"the kernels of each call where it stands, without the gaps between them, {passes}{missing}"


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
