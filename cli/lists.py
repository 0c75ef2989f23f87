"""Lists as tables: jobs, cards, operator tuples, models. Formatting, no logic.

They take the same rows that the verbs print with ``--json``, so that both show the same; a key that a row lacks shows
as a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from cli import tables
from cli.tables import Row, Text
from farm.types.format import ENERGY, NOTHING, POWER, TIME, count_of, part_of, percent, plural, quantity, span


def jobs(rows: Sequence[Row], now_s: float) -> RenderableType:
    """Keys: id, title, state, round, items, closed, outcome, accuracy_time, accuracy_energy, coverage, created_at_s, origin.

    Args:
        now_s: the time on the clock of the database, which ages are relative to. Unit: s.
    """
    if not rows:
        return Text("No jobs yet. Start one with `farm run resnet18`.")
    columns = (
        "job",
        "title",
        "state",
        ">items",
        ">accuracy\ntime",
        ">accuracy\nenergy",
        ">coverage",
        "verdict",
        ">age",
    )
    table = tables.ruled(*columns, drops=("coverage", "items", "age", "accuracy energy", "accuracy time"))
    for row in rows:
        age = None if row.get("created_at_s") is None else now_s - row["created_at_s"]
        tables.row(
            table,
            tables.cell(row, "id"),
            tables.cell(row, "title"),
            tables.state(f"of {row['origin']}" if row.get("origin") else row.get("state")),
            part_of(row.get("closed", 0), row.get("items", 0)),
            percent(row.get("accuracy_time")),
            percent(row.get("accuracy_energy")),
            percent(row.get("coverage")),
            tables.outcome(row["outcome"]) if row.get("outcome") else "",
            span(age),
        )
    return table


def cards(rows: Sequence[Row]) -> RenderableType:
    """Keys: id, model, host, index, state, state_reason, measuring, waiting, done_last_hour, last_seen_ago_s."""
    if not rows:
        return Text("No cards yet. Start their workers with `farm worker`.")
    columns = ("card", "model", "host", "state", ">waiting", ">items/h", ">seen", "measuring")
    table = tables.ruled(*columns, drops=("items/h", "seen", "waiting", "host", "measuring"))
    for row in rows:
        index = f":{row['index']}" if row.get("index") is not None else ""
        tables.row(
            table,
            Text(tables.short_id(tables.cell(row, "id")), no_wrap=True),
            tables.clipped(tables.cell(row, "model"), 24),
            tables.clipped(f"{row.get('host') or NOTHING}{index}", 16),
            tables.state(row.get("state"), str(row.get("state_reason") or "")),
            tables.cell(row, "waiting"),
            tables.cell(row, "done_last_hour"),
            span(row.get("last_seen_ago_s")),
            tables.clipped(str(row.get("measuring") or ""), 60),
        )
    return table


def operators(rows: Sequence[Row], title: str = "") -> RenderableType:
    """Keys: label, count, flops_per_call, bytes_per_call, estimated_cost_share (a fraction)."""
    columns = ("operator tuple", ">calls", ">FLOP a call", ">bytes a call", ">of the cost")
    table = tables.ruled(*columns, drops=("bytes a call", "FLOP a call"))
    for row in rows:
        tables.row(
            table,
            tables.cell(row, "label"),
            tables.cell(row, "count"),
            count_of(row.get("flops_per_call"), "FLOP"),
            count_of(row.get("bytes_per_call"), "B"),
            percent(row.get("estimated_cost_share")),
        )
    table.add_section()
    calls = sum(row.get("count", 0) for row in rows)
    flops = sum(row.get("count", 0) * (row.get("flops_per_call") or 0) for row in rows)
    moved = sum(row.get("count", 0) * (row.get("bytes_per_call") or 0) for row in rows)
    total = f"{len(rows)} {plural('tuple', len(rows))}"
    tables.row(table, total, str(calls), count_of(flops, "FLOP"), count_of(moved, "B"), "", style="bold")
    return Group(Text(title, style="bold"), table) if title else table


def models(rows: Sequence[Row]) -> RenderableType:
    """Keys: name, task, input_size, length, phases, parameters, flops (of one pass at batch 1), note."""
    if not rows:
        return Text("No model matches.")
    table = tables.ruled("model", "task", ">input", ">parameters", ">FLOP a pass", "", drops=("task", ""))
    for row in rows:
        size, length = row.get("input_size"), row.get("length")
        sizes = [f"{length}{' tokens' if row.get('phases') else ''}"] if length else []
        sizes += [f"{size} px"] if size else []
        tables.row(
            table,
            tables.cell(row, "name"),
            tables.cell(row, "task"),
            " + ".join(sizes) or NOTHING,
            count_of(row.get("parameters"), "").strip(),
            count_of(row.get("flops"), "FLOP"),
            str(row.get("note") or ""),
        )
    return table


def readings(rows: Sequence[Row]) -> RenderableType:
    """Keys as of `farm.report.lookup.Found`."""
    foreign = any(row["origin"] for row in rows)
    columns = ["reading of", ">time", ">energy", ">power", "card", "torch", ">age", *(["from"] if foreign else [])]
    table = tables.ruled(*columns, drops=("from", "torch", "age", "power", "card"))
    for row in rows:
        data = "" if row["data_class"] == "normal" else f", {row['data_class']}"
        cells: list[RenderableType] = [
            f"{row['label']}{data}",
            quantity(row["time_us"], TIME),
            quantity(row["energy_mj"], ENERGY),
            quantity(row["power_w"], POWER),
            tables.clipped(tables.cell(row, "card_model").removeprefix("NVIDIA "), 16),
            tables.clipped(tables.cell(row, "torch").partition("+")[0], 12),
            span(row["age_s"]),
        ]
        tables.row(table, *cells, *([tables.clipped(row["origin"] or "here", 16)] if foreign else []))
    return table
