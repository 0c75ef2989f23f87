"""A job's report as tables and lines: cost by operator type, sum against whole, remarks, and cost
by layer.

Formatting, no logic; `farm.report` computes the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from cli import tables
from cli.tables import Text
from farm.report.kernels import JobKernels
from farm.report.layers import LayerRow, Layers, sizes_text
from farm.report.owners import OF_OWNERS, grouped
from farm.report.report import ReadingCounts, Report, remarks
from farm.store.database import by_key
from farm.types.figure import Figure, value_of
from farm.types.format import (
    ENERGY,
    NOTHING,
    POWER,
    TIME,
    count_of,
    few,
    interval,
    part_of,
    percent,
    plural,
    quantity,
    span,
)

if TYPE_CHECKING:
    from farm.verdict.causes import Why
    from farm.verdict.cost_line import CostLine
    from farm.verdict.rates import Rates
    from farm.verdict.verdict import Verdict

_MOST_UNMEASURED = 10
_ON_A_GPU = "tmcks4gd"  # the packaged job that shows a result of a GPU
_MOST_CARDS = 4
_MOST_SWEEP_ROWS = 200
_MOST_PLACEMENTS = 60
_MOST_KERNELS = 30
_MOST_RATES = 20
_MOST_CAUSES = 3
_MOST_LAYERS = 2000
_LONGEST_PATH = 34  # of a module in a table; CSV and JSON have all of it


def report(report: Report, *, tuples: int = 0) -> RenderableType:
    """The report of a job, with so many of the heaviest tuples. A sweep lists all its tuples."""
    sweep, verdict = report.is_sweep, report.verdict
    tuples = _MOST_SWEEP_ROWS if sweep else tuples
    parts = [
        _header(report),
        None if sweep else _types(report),
        _owners(report) if report.owners and not sweep else None,
        _kernels(report.compiled) if report.compiled else None,
        _tuples(report, tuples) if tuples else None,
        None if sweep else _comparison(verdict),
        _placements(report) if report.placements else None,
        tables.facts(remarks(report)) if not sweep or verdict.flags else None,
        _rounds(report) if len(report.rounds) > 1 else None,
        _unmeasured(verdict) if not sweep and verdict.unmeasured else None,
        _verdict(report),
    ]
    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown += [part, Text()]
    return Group(
        *shown[:-1], Text("  `farm help WORD` explains a word of this report.", style="dim")
    )


def _header(report: Report) -> RenderableType:
    rounds = f", round {report.round}" if report.round > 1 else ""
    origin = f", imported from {report.origin}" if report.origin else ""
    lines = [("job", f"{report.job_id}, {report.state}{rounds}{origin}")]
    lines += _card_lines(report)
    lines += [("software", _software_text(software)) for software in report.software]
    lines.append(("protocol", str(report.protocol)))
    lines.append(("readings", _readings_text(report.readings)))
    if report.flops:
        cost = f"{count_of(report.flops, 'FLOP')}, {count_of(report.bytes_moved, 'B')} moved"
        lines.append(("cost", cost + (" per pass" if not report.is_sweep else " in total")))
    facts = tables.facts((name, Text(text, overflow="fold")) for name, text in lines)
    return Group(Text(report.title, style="bold"), facts)


def _card_lines(report: Report) -> list[tuple[str, str]]:
    lines = []
    for card in report.cards[:_MOST_CARDS]:
        name = "kernel" if card.is_cpu else "driver"
        driver = f"{name} {card.driver}" if card.driver else ""
        details = ", ".join(filter(None, (card.id, card.host, driver)))
        lines.append(("card", f"{card.model}  ({details})"))
    left = len(report.cards) - _MOST_CARDS
    if left > 0:
        lines.append(("", f"and {left} more {plural('card', left)}"))
    return lines


def _software_text(software: Mapping[str, Any]) -> str:
    named = (("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("Python", "python"))
    words = [f"{name} {software[key]}" for name, key in named if software.get(key)]
    if software.get("communication"):
        words.append(software["communication"])
    return ", ".join(words)


def _readings_text(counts: ReadingCounts) -> str:
    """The numbers of readings by origin, and the card time that they took."""
    words = [f"{counts.measured} measured", f"{counts.reused} reused"]
    for number, word in (
        (counts.failed, "failed"),
        (counts.open, "open"),
        (counts.cancelled, "cancelled"),
        (counts.repeated, "repeated"),
        (counts.not_run, "not run by the card"),
    ):
        if number:
            words.append(f"{number} {word}")
    text = ", ".join(words)
    if counts.card_time_s < 0.5:
        return text
    inside = percent(counts.window_time_s / counts.card_time_s, 0)
    return f"{text}; {span(counts.card_time_s)} of card time, {inside} in warm-ups and windows"


def _types(report: Report) -> RenderableType:
    rows, verdict = report.types, report.verdict
    in_model = [row.in_model_us for row in rows if row.in_model_us is not None]
    in_model_total = quantity(sum(in_model), TIME, 4) if len(in_model) == len(rows) else NOTHING
    total = report.cost
    energy = quantity(verdict.energy.total.value, ENERGY, 4) if verdict.energy else "not available"
    of_energy = [
        (">energy", lambda row: quantity(row.cost.measured_mj, ENERGY), None, energy),
        (">share", "energy_share", percent, ""),
    ]
    # Each column with its total.
    columns: list[Any] = [
        ("operator", "short_name", None, "sum"),
        (">calls", lambda row: str(row.cost.calls), None, str(total.calls)),
        (
            ">tuples",
            lambda row: part_of(row.cost.measured_tuples, row.cost.tuples),
            None,
            part_of(total.measured_tuples, total.tuples),
        ),
        (
            ">time",
            lambda row: quantity(row.cost.measured_us, TIME),
            None,
            quantity(verdict.time.total.value, TIME, 4) if verdict.measured else NOTHING,
        ),
        *([(">in model", "in_model_us", TIME, in_model_total)] if in_model else []),
        (">share", "time_share", percent, ""),
        *(of_energy if any(row.cost.measured_mj is not None for row in rows) else []),
        (">estimate", "estimated_share", percent, ""),
    ]
    return tables.filled(
        rows,
        [column[:-1] for column in columns],
        drops=("estimate", "tuples", "share", "in model", "calls"),
        dim=lambda row: not row.cost.measured_tuples,
        total=[column[-1] for column in columns],
    )


def _placements(report: Report) -> RenderableType:
    """Tuples with tensors in slow memory, the heaviest first."""
    rows = report.placements
    first = {id(of_tuple[0]) for of_tuple in by_key(lambda row: row.line.subject, rows).values()}
    return tables.filled(
        rows,
        [
            ("tuple", lambda row: row.line.subject.label if id(row) in first else ""),
            ("slow tensors", lambda row: row.placement),
            ("", lambda row: row.tensors),
            (
                ">time",
                lambda row: (
                    quantity(row.line.time_us.value, TIME)
                    if row.line.time_us
                    else row.line.reason or "open"
                ),
            ),
            (">time all fast", "fast_time_us", TIME),
            (
                ">ratio",
                "times_fast",
                lambda times: f"{times:.2f}" if times is not None else NOTHING,
            ),
            ("workspaces", lambda row: row.workspaces),
        ],
        drops=("workspaces", "time all fast"),
        most=_MOST_PLACEMENTS,
    )


def _owners(report: Report) -> RenderableType:
    """Forward and backward of each kind of module side by side; parts without an owner in separate
    lines.
    """
    shown = [part for part in OF_OWNERS if any(row.part == part for row in report.owners)]

    def time_of(part: str) -> tables.Cell:
        return lambda group: (
            quantity(group.parts[part].complete_us, TIME) if part in group.parts else ""
        )

    return tables.filled(
        grouped(report.owners),
        [
            ("module of the step", "name"),
            *((f">{part}", time_of(part)) for part in shown),
            (">total", lambda group: quantity(group.cost.complete_us, TIME)),
            (">share", "time_share", percent),
            (">energy", lambda group: quantity(group.cost.complete_mj, ENERGY)),
        ],
        drops=("energy",),
    )


def _kernels(job: JobKernels) -> RenderableType:
    """The kernels of a compiled model, the most expensive first."""
    table = tables.filled(
        job.kernels,
        [
            (
                "kernel",
                lambda row: f"{'* ' if row.rates.improvable else ''}{row.line.subject.short_name}",
            ),
            ("fused from", lambda row: few(row.fused)),
            ("modules", lambda row: few(row.modules)),
            (">calls", lambda row: str(row.line.count)),
            (">time\nper call", lambda row: quantity(value_of(row.line.time_us), TIME)),
            (">share", lambda row: percent(row.rates.time_share)),
            (">B/s", lambda row: count_of(row.rates.bytes_per_s, "B/s")),
            (">FLOP/s", lambda row: _flops_per_s(row.rates)),
            (">roofline", lambda row: percent(row.rates.roofline_share)),
        ],
        drops=("calls", "FLOP/s", "B/s", "modules", "fused from"),
        most=_MOST_KERNELS,
    )
    return Group(table, tables.hanging(job.rule, "dim"))


def why(answer: Why) -> RenderableType:
    """What limits each operator of a job, the most expensive first, and the largest causes."""
    table = tables.filled(
        answer.rows,
        [
            (
                "operator tuple",
                lambda row: f"{'* ' if row.improvable else ''}{row.line.subject.label}",
            ),
            (">calls", lambda row: str(row.line.count)),
            (">time", _time_of_line),
            (">share", lambda row: percent(row.time_share)),
            (">B/s", lambda row: count_of(row.bytes_per_s, "B/s")),
            (">FLOP/s", lambda row: _flops_per_s(row)),
            (">roofline", lambda row: percent(row.roofline_share)),
            ("bound", lambda row: row.bound),
        ],
        drops=("calls", "FLOP/s", "B/s"),
        most=_MOST_RATES,
    )
    parts: list[RenderableType] = [
        Text(answer.title, style="bold"),
        Text(f"  {_sum_of_operators(answer)}"),
        table,
        tables.hanging(answer.rule, "dim"),
        Text(),
    ]
    if not answer.causes:
        parts.append(Text("No cause saves 1 % of the sum or more."))
    for number, cause in enumerate(answer.causes[:_MOST_CAUSES], 1):
        part = "an eager pass" if cause.topic == "launch" else "the sum"
        saved = f"{quantity(cause.saves_us, TIME)}, {percent(cause.share)} of {part}"
        parts.append(tables.hanging(f"{number}. {cause.text} It saves at most {saved}."))
    if len(answer.causes) > 1:
        left = len(answer.causes) - _MOST_CAUSES
        more = f"{left} smaller {plural('cause', left)}: --json. " if left > 0 else ""
        note = f"{more}Two causes may save the same time, so do not add them."
        parts.append(tables.hanging(note, "dim"))
    return Group(*parts)


def _sum_of_operators(answer: Why) -> str:
    """`sum of the operators: ~1.31 ms on an NVIDIA H200`; `~` if a part is predicted."""
    least = "" if all(row.line.total_us for row in answer.rows) else "at least "
    mark = "~" if any(row.line.origin == "estimated" for row in answer.rows) else ""
    return (
        f"sum of the operators: {least}{mark}{quantity(answer.sum_us, TIME)} on {answer.card_model}"
    )


def _time_of_line(rates: Rates) -> str:
    """The time of all calls; `~` marks a prediction."""
    mark = "~" if rates.line.origin == "estimated" else ""
    return mark + quantity(rates.line.total_us or None, TIME)


def _flops_per_s(rates: Rates) -> str:
    return count_of(rates.flops_per_s, "FLOP/s") if rates.flops else NOTHING


def _tuples(report: Report, most: int) -> RenderableType:
    def time_of(line: CostLine) -> str:
        text = quantity(value_of(line.time_us), TIME)
        relative = line.time_us.relative if line.time_us else 0.0
        return f"{text} ± {relative * 100:.1f} %" if relative else text

    def remarks_of(line: CostLine) -> str:
        used = line.cost.used if line.cost and line.cost.used != "steady" else ""
        return ", ".join(filter(None, (line.reason, line.bus, used, *line.flags)))

    energies = [
        (">power", "power_w", POWER),
        (">energy", lambda line: quantity(value_of(line.energy_mj), ENERGY)),
    ]
    columns = [
        ("operator tuple", lambda line: line.subject.label or NOTHING),
        *([(">calls", "count")] if not report.is_sweep else []),
        (">time", time_of),
        *(energies if any(line.energy_mj for line in report.tuples) else []),
        ("remarks", remarks_of),
    ]
    listed = (
        f"the {len(report.tuples)} heaviest of {report.verdict.parts}"
        if report.verdict.types
        else "all"
    )
    drops = ("power", "calls", "remarks", "energy")
    return tables.filled(
        report.tuples, columns, drops=drops, most=most, rest=f"; --json lists {listed}"
    )


def readings(report: Report) -> RenderableType:
    """The readings of a job, wholes first, with the beginning of each id."""
    rows = []
    for whole in report.verdict.wholes:
        name = f"whole model, {whole.launch}" if whole.launch else "whole model"
        if whole.reading:
            view = whole.reading
            rows.append(_reading(view.reading_id, name, whole.card_id, view.time_us, view.flags))
    for line in report.tuples:
        if line.reading_id:
            label = line.subject.label
            rows.append(_reading(line.reading_id, label, line.card_id, line.time_us, line.flags))
    if not rows:
        return Text("No readings yet.")
    return tables.ruled(
        ("reading", "subject", "card", ">time", "flags"), rows, drops=("card", "flags", "time")
    )


def _reading(
    reading_id: str, subject: str, card_id: str, time_us: Figure | None, flags: Sequence[str]
) -> list[str]:
    time = quantity(value_of(time_us), TIME)
    return [reading_id[:12], subject, tables.short_id(card_id), time, ", ".join(flags)]


def _comparison(verdict: Verdict) -> Table:
    table = tables.ruled(
        ("", ">sum of the parts", ">whole model", ">gap", ">accuracy"), drops=("accuracy",)
    )
    for name, comparison, units in (
        ("time", verdict.time if verdict.measured or verdict.time.whole else None, TIME),
        ("power", verdict.power, POWER),
        ("energy", verdict.energy, ENERGY),
        ("energy above idle", verdict.energy_above_idle, ENERGY),
    ):
        judged = name in ("time", "energy")
        if comparison is not None:
            values = (
                interval(comparison.total, units),
                interval(comparison.whole, units),
                verdict.gap_text(comparison),
            )
            accuracy = percent(verdict.accuracy_of(comparison)) if judged else ""
            tables.row(table, name, *values, accuracy)
        elif judged:
            tables.row(table, name, "not available", NOTHING, NOTHING, NOTHING, style="dim")
    return table


def _rounds(report: Report) -> RenderableType:
    named: set[str] = set()

    def new_operators(names: Sequence[str]) -> str:
        added = [name for name in names if name not in named]
        named.update(added)
        return ", ".join(added[:6]) + (f" and {len(added) - 6} more" if len(added) > 6 else "")

    return tables.filled(
        report.rounds,
        [
            (">round", "number"),
            ("why", lambda row: row.reason),
            ("operators added", "operators", new_operators),
            (">items", "items"),
            (">accuracy\ntime", lambda row: percent(row.accuracies.get("time"))),
            (">accuracy\nenergy", lambda row: percent(row.accuracies.get("energy"))),
            (">coverage", "coverage", percent),
            (
                "outcome",
                lambda row: (
                    tables.outcome(row.outcome) if row.outcome else Text("open", style="cyan")
                ),
            ),
        ],
        drops=("items", "why", "coverage", "accuracy energy", "accuracy time"),
    )


def _unmeasured(verdict: Verdict) -> RenderableType:
    share = percent(sum(entry.share for entry in verdict.unmeasured[_MOST_UNMEASURED:]))
    return tables.filled(
        verdict.unmeasured,
        [
            ("not measured", "label"),
            (">calls", "count"),
            (">share of\nestimated cost", "share", percent),
            ("why", lambda entry: entry.reason),
        ],
        drops=("calls", "share of estimated cost"),
        most=_MOST_UNMEASURED,
        rest=f" ({share} of the estimated cost); --json lists all",
    )


def _verdict(report: Report) -> RenderableType:
    verdict = report.verdict
    line = tables.outcome(verdict.outcome)
    if report.preliminary and report.readings.open:
        line = Text("PRELIMINARY ", style="bold cyan").append_text(line)
    accuracies = []
    for name, comparison in (("time", verdict.time), ("energy", verdict.energy)):
        value = verdict.accuracy_of(comparison)
        if value is not None:
            accuracies.append(f"{name} {percent(value)}")
    if report.is_sweep:
        line = Text(f"{verdict.measured} of {verdict.parts} tuples measured", style="bold")
    elif verdict.outcome != "none":
        accuracy = f"accuracy {', '.join(accuracies)}; " if accuracies else ""
        line.append(f"  {accuracy}coverage {percent(verdict.coverage)}", style="not bold")
        line.append(f"  (target {percent(verdict.target, 0)})", style="not bold dim")
    reasons = () if report.is_sweep and report.state != "cancelled" else verdict.reasons
    if (
        not report.is_sweep
        and report.cards
        and all(card.is_cpu for card in report.cards)
        and verdict.missed
    ):
        reasons = (
            *reasons,
            f"`farm import h200`, then `farm report {_ON_A_GPU}` shows a result of a GPU "
            "(resnet18).",
        )
    return Group(line, *map(tables.hanging, reasons))


# -------------------------------------------------------------------------------------------------
# layers


def layer_table(layers: Layers) -> RenderableType:
    """A job's calls, tuples, types or modules with sizes, parameters and cost. Unmeasured rows are
    dim.
    """
    by = layers.by
    head = {"module": "module", "type": "operator"}.get(by, "operator, parameters")
    sizes = [
        ("input", lambda row: sizes_text(row.input_sizes) or NOTHING),
        ("output", lambda row: sizes_text(row.output_sizes) or NOTHING),
    ]
    energies = [(">energy", "energy_mj", ENERGY), (">share of\nenergy", "energy_share", percent)]
    columns: list[Any] = [
        *([("module", "module_path", _path)] if by == "call" else []),
        (head, lambda row: _layer_name(row, layers)),
        *(
            [(">calls", lambda row: part_of(row.measured_calls, row.cost.calls))]
            if by != "call"
            else []
        ),
        *(sizes if by in ("call", "tuple") else []),
        (
            ">weights",
            lambda row: count_of(row.held_parameters, "") if row.held_parameters != 0 else NOTHING,
        ),
        (">FLOP", lambda row: count_of(row.cost.flops, "")),
        (">bytes", lambda row: count_of(row.cost.bytes_moved, "B")),
        (">time", "time_us", TIME),
        (">share", "time_share", percent),
        *(energies if any(row.energy_mj is not None for row in layers.rows) else []),
    ]
    table = tables.filled(
        layers.rows,
        columns,
        drops=("bytes", "weights", "calls", "output", "share of energy", "FLOP", "input", "energy"),
        dim=lambda row: not row.measured_calls,
        most=_MOST_LAYERS,
        rest="; --csv and --json list all",
    )
    return Group(Text(f"{layers.title}  (job {layers.job_id})", style="bold"), Text(), table)


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
