"""Lists as tables: jobs and their progress, cards, tuples, models, readings, comparisons.
Formatting, no logic.

The lists take the rows that the commands print with ``--json``, so that both show the same. A
missing key is a dash."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from cli import tables
from cli.tables import Row, Text, cell, clipped
from farm.types.figure import value_of
from farm.types.format import (
    ENERGY,
    NOTHING,
    POWER,
    TIME,
    Units,
    count_of,
    day,
    few,
    gap,
    interval,
    part_of,
    percent,
    plural,
    quantity,
    span,
)

if TYPE_CHECKING:
    from farm.report.comparison import ComparedKernels, ComparedRow, SideComparison
    from farm.report.gate import JudgedRow, PairedComparison
    from farm.report.history import HistoryRow
    from farm.verdict.cost_line import Change

SHOWN = 20  # tuples of one side only, if no other tuples are shown
_STYLES = {"faster": "green", "slower": "red"}


def jobs(rows: Sequence[Row], now_s: float, *, filtered: bool = False) -> RenderableType:
    """Jobs of models, sweeps, and imported jobs, each in a table. `now_s` is the time on the clock
    of the database.
    Keys: id, kind, title, state, items, closed, outcome, accuracy_time, accuracy_energy, coverage,
    created_at_s, origin."""
    if not rows and filtered:
        return Text("No job matches. Omit a filter.")
    if not rows:
        return Text("No jobs yet. Start one with `farm run resnet18`.")
    groups: dict[str, list[Row]] = {"job": [], "sweep": [], "imported job": []}
    for row in rows:
        groups[_group_of(row)].append(row)
    return Group(*(_jobs(some, name, now_s) for name, some in groups.items() if some))


def _group_of(row: Row) -> str:
    if row.get("origin"):
        return "imported job"
    return "sweep" if row.get("kind") == "sweep" else "job"


def _jobs(rows: Sequence[Row], head: str, now_s: float) -> RenderableType:
    return tables.filled(
        rows,
        [
            (head, "id"),
            ("title", "title"),
            (
                "state",
                lambda row: tables.state(
                    f"from {row['origin']}" if row.get("origin") else row.get("state")
                ),
            ),
            (">items", lambda row: part_of(row.get("closed", 0), row.get("items", 0))),
            (">accuracy\ntime", "accuracy_time", percent),
            (">accuracy\nenergy", "accuracy_energy", percent),
            (">coverage", "coverage", percent),
            ("verdict", lambda row: tables.outcome(row["outcome"]) if row.get("outcome") else ""),
            (
                ">age",
                "created_at_s",
                lambda made_s: span(None if made_s is None else now_s - made_s),
            ),
        ],
        drops=("coverage", "items", "age", "accuracy energy", "accuracy time"),
    )


def cards(rows: Sequence[Row]) -> RenderableType:
    """Keys: id, model, host, index, state, state_reason, measuring, waiting, done_last_hour,
    last_seen_ago_s.
    """
    if not rows:
        return Text("No cards yet. Start their workers with `farm worker`.")

    def host(row: Row) -> Text:
        index = f":{row['index']}" if row.get("index") is not None else ""
        return clipped(f"{row.get('host') or NOTHING}{index}", 16)

    return tables.filled(
        rows,
        [
            ("card", lambda row: Text(tables.short_id(cell(row, "id")), no_wrap=True)),
            ("model", lambda row: clipped(cell(row, "model"), 24)),
            ("host", host),
            (
                "state",
                lambda row: tables.state(row.get("state"), str(row.get("state_reason") or "")),
            ),
            (">items\nwaiting", "waiting"),
            (">items/h", "done_last_hour"),
            (">last seen\nago", "last_seen_ago_s", span),
            *([("links", _links)] if any(map(_links, rows)) else []),
            ("measuring", lambda row: clipped(str(row.get("measuring") or ""), 60)),
        ],
        drops=("items/h", "last seen ago", "items waiting", "host", "links", "measuring"),
    )


def _links(row: Row) -> str:
    links = row.get("links") or {}
    words = {"nvlinks": "NVLinks", "peers": "peers"}
    numbers = {name: len(value) if name == "peers" else value for name, value in links.items()}
    return ", ".join(f"{numbers[name]} {word}" for name, word in words.items() if name in numbers)


def operators(rows: Sequence[Row], title: str) -> RenderableType:
    """Keys: label, count, flops_per_call, bytes_per_call, estimated_cost_share (a fraction)."""

    def total(key: str, unit: str) -> str:
        return count_of(sum(row.get("count", 0) * (row.get(key) or 0) for row in rows), unit)

    tuples, calls = (
        f"{len(rows)} {plural('tuple', len(rows))}",
        str(sum(row.get("count", 0) for row in rows)),
    )
    table = tables.filled(
        rows,
        [
            ("operator tuple", "label"),
            (">calls", "count"),
            (">FLOP per call", "flops_per_call", "FLOP"),
            (">bytes per call", "bytes_per_call", "B"),
            (">share of\nestimated cost", "estimated_cost_share", percent),
        ],
        drops=("bytes per call", "FLOP per call"),
        total=(tuples, calls, total("flops_per_call", "FLOP"), total("bytes_per_call", "B"), ""),
    )
    return Group(Text(title, style="bold"), table)


def compared_inputs(found: Row) -> RenderableType:
    """The calls that differ between two inputs, and the totals (`ComparedInputs.to_json`)."""
    calls, equal = found["calls"], found["equal_calls"]
    totals = Text(
        f"{found['calls_a']} and {found['calls_b']} calls, {equal} of them equal; "
        f"{count_of(found['flops_a'], 'FLOP')} and {count_of(found['flops_b'], 'FLOP')}; "
        f"{count_of(found['bytes_a'], 'B')} and {count_of(found['bytes_b'], 'B')}"
    )
    if not calls:
        return Group(Text("All calls are equal with both inputs.", style="bold"), totals)
    table = tables.filled(
        calls,
        [
            ("module", "module_path"),
            (">calls", "count"),
            ("operator tuple", "label_a"),
            ("operator tuple (B)", "label_b"),
        ],
        drops=("module",),
    )
    return Group(table, totals)


def models(rows: Sequence[Row]) -> RenderableType:
    """Keys: name, task, input_size, length, phases, parameters, flops (of one pass at batch 1),
    note.
    """
    if not rows:
        return Text("No model matches.")

    def sizes(row: Row) -> str:
        size, length = row.get("input_size"), row.get("length")
        words = []
        if length:
            words.append(f"{length} tokens" if row.get("phases") else str(length))
        if size:
            words.append(f"{size} px")
        return " + ".join(words) or NOTHING

    return tables.filled(
        rows,
        [
            ("model", "name"),
            ("task", "task"),
            (">input", sizes),
            (">parameters", "parameters", ""),
            (">FLOP per pass", "flops", "FLOP"),
            ("", lambda row: row.get("note") or ""),
        ],
        drops=("task", ""),
    )


def readings(rows: Sequence[Row]) -> RenderableType:
    """Keys as of `farm.report.lookup.LookupRow.to_json`."""

    def label(row: Row) -> str:
        return row["label"] + ("" if row["data_class"] == "normal" else f", {row['data_class']}")

    imported = any(row["origin"] for row in rows)
    return tables.filled(
        rows,
        [
            ("reading of", label),
            (">time", "time_us", TIME),
            (">energy", "energy_mj", ENERGY),
            (">power", "power_w", POWER),
            ("card", lambda row: clipped(cell(row, "card_model").removeprefix("NVIDIA "), 16)),
            ("torch", lambda row: clipped(cell(row, "torch").partition("+")[0], 12)),
            (">age", "age_s", span),
            *(
                [("origin", lambda row: clipped(row["origin"] or "this farm", 16))]
                if imported
                else []
            ),
        ],
        drops=("origin", "torch", "age", "power", "card"),
    )


def history(rows: Sequence[HistoryRow]) -> RenderableType:
    """Rows of `farm.report.history`."""
    columns = [
        ("measurement of", lambda row: row.series.title),
        ("card", lambda row: clipped(row.series.card_model.removeprefix("NVIDIA "), 16)),
        (
            "revision",
            lambda row: f"{row.revision[:12]}{'-dirty' if row.dirty else ''}" or NOTHING,
        ),
        ("torch", lambda row: row.torch.partition("+")[0]),
        ("measured", "measured_at_s", day),
        *((">time", lambda row: interval(row.cost.time_us, TIME)), (">change", "time_change", gap)),
        *(
            (">energy", lambda row: interval(row.cost.energy_mj, ENERGY)),
            (">change", "energy_change", gap),
        ),
        ("flags", lambda row: ", ".join(row.flags)),
        ("protocol", lambda row: row.series.protocol or NOTHING),
    ]
    return tables.filled(rows, columns, drops=("protocol", "flags", "torch", "card", "measured"))


# -----------------------------------------------------------------------------------------------
# comparison


_WEIGHTS = {
    "own calls": "Operator types of each side, with its own calls:",
    "calls of A": (
        "Operator types of the tuples of both sides, measured alone, with the calls of A:"
    ),
    "calls of B": (
        "Operator types of the tuples of both sides, measured alone, with the calls of B:"
    ),
    "once": "Operator types of the tuples of both sides, measured alone, each tuple once:",
}


def comparison(found: SideComparison, limit: int) -> RenderableType:
    """Wholes and sums, differences by operator type and by tuple, and the tuples of one side
    only.
    """
    parts: list[RenderableType] = []
    for name, side in (("A", found.a), ("B", found.b)):
        source = (
            f"{', '.join(side.card_models) or NOTHING}, torch {', '.join(side.software) or NOTHING}"
        )
        text = f"{name}  {side.text}  ({source}; {side.tuples} {plural('tuple', side.tuples)})"
        parts.append(Text(text, style="bold"))
    parts += _compared_wholes(found, limit)
    if found.total is None:
        parts += [Text(), Text("A and B have no tuple in common.")]
    if found.types:
        last = found.total
        if _counts_own_calls(found):
            last = replace(found.sums[0], name="sum")
        parts += [
            Text(),
            Text(_WEIGHTS[found.weights]),
            _differences("operator", found.types, last),
        ]
    if found.kernels and limit:
        parts += [Text(), _kernels(found.kernels, limit)]
    if limit and found.tuples:
        parts += [Text(), _differences("tuple", found.tuples[:limit])]
        parts += _more(len(found.tuples) - limit, "tuple", " with smaller changes")
    every = (*found.wholes, *found.sums, *found.types, *found.tuples[:limit])
    values = itertools.chain.from_iterable((row.time, row.energy) for row in every)
    if any(value.change and not value.apart for value in values):
        parts += [
            Text(),
            Text("  A change in parentheses: the intervals of A and B overlap.", style="dim"),
        ]
    for name, only in (("A", found.tuples_only_a), ("B", found.tuples_only_b)):
        if only:
            parts += [
                Text(),
                Text(f"only in {name}: {len(only)} {plural('tuple', len(only))}", style="bold"),
            ]
            parts += [
                *map(_alone, only[: limit or SHOWN]),
                *_more(len(only) - (limit or SHOWN), "tuple"),
            ]
    return Group(*parts)


def _counts_own_calls(found: SideComparison) -> bool:
    """True if each side is a job, and counts its own calls."""
    return found.weights == "own calls"


def _compared_wholes(found: SideComparison, limit: int) -> list[RenderableType]:
    """Whole models and the sums of their tuples."""
    if _counts_own_calls(found):
        rows = [replace(row, name="whole model") for row in found.wholes]
        rows += [replace(row, name="sum of all tuples") for row in found.sums]
        if found.total and found.total.covers:
            rows.append(replace(found.total, name="tuples of both sides, calls of A"))
        return [Text(), _differences("", rows)]

    models = list(zip(found.wholes or found.sums, found.sums, strict=True))[: limit or SHOWN]
    if models:
        rows = []
        for whole, row in models:
            rows += [whole, replace(row, name="  sum of its tuples")]
        more = _more(len(found.sums) - len(models), "model")
        return [Text(), _differences("whole model", rows), *more]
    if found.a.job_id or found.b.job_id:
        side = "B" if found.a.job_id else "A"
        return [Text(), Text(f"{side} has no verdict of this model.")]
    return []


def _more(left: int, what: str, which: str = "") -> list[Text]:
    text = f"  {left} more {plural(what, left)}{which}; a larger -n shows them."
    return [Text(text, style="dim")] if left > 0 else []


def _differences(
    head: str, rows: Sequence[ComparedRow], total: ComparedRow | None = None
) -> RenderableType:
    """A table of compared rows. If any row is incomplete, the column `covers` says what each of
    them includes.
    """
    every = [*rows, *([total] if total else [])]
    marked = ["covers"] if any(row.covers for row in every) else []
    heads = (
        head,
        ">calls",
        ">time A",
        ">time B",
        ">change",
        ">energy A",
        ">energy B",
        ">change",
        *marked,
    )
    cells = [[*_difference_cells(row), *([row.covers] if marked else [])] for row in every]
    last = cells.pop() if total else ()
    return tables.ruled(heads, cells, ("calls", "energy A", "energy B", "time A"), last)


def _kernels(rows: Sequence[ComparedKernels], most: int) -> RenderableType:
    def counted(operators: Mapping[str, int]) -> str:
        return few([f"{what} ×{n}" for what, n in operators.items()], 3) or NOTHING

    text = "  Kernels match by source, else by module paths; a module counts with its first kernel."
    table = tables.filled(
        rows,
        [
            ("modules", lambda row: few(row.modules) or "without a match"),
            ("operators of A", lambda row: counted(row.a_operators)),
            ("operators of B", lambda row: counted(row.b_operators)),
            (">time A", lambda row: quantity(value_of(row.row.time.a), TIME)),
            (">time B", lambda row: quantity(value_of(row.row.time.b), TIME)),
            (">saved", lambda row: quantity(row.saved(row.row.time), TIME)),
            (">energy\nsaved", lambda row: quantity(row.saved(row.row.energy), ENERGY)),
        ],
        drops=("time A", "time B"),
        most=most,
    )
    return Group(table, Text(text, style="dim"))


def _difference_cells(entry: ComparedRow) -> list[Any]:
    def cells(found: Change, units: Units) -> list[Any]:
        sides = [quantity(value_of(side), units) for side in (found.a, found.b)]
        if entry.incomplete and found.change:
            return [*sides, Text("incomplete")]
        change = gap(found.change) if found.apart or not found.change else f"({gap(found.change)})"
        return [*sides, Text(change, style=_STYLES.get(found.verdict, ""))]

    calls = str(entry.a.calls or "")
    if entry.a.calls != entry.b.calls:
        calls = f"{entry.a.calls} / {entry.b.calls}"
    return [entry.name, calls, *cells(entry.time, TIME), *cells(entry.energy, ENERGY)]


def _alone(entry: ComparedRow) -> Text:
    """A tuple of one side: its share of that side's sum, its time and its label."""
    share = entry.b.share if entry.a.share is None else entry.a.share
    time = entry.time.a or entry.time.b
    note = f" ({entry.covers})" if entry.covers.startswith("no reading") else ""
    return Text(f"  {percent(share):>7}  {quantity(value_of(time), TIME):>8}  {entry.name}{note}")


def paired(found: PairedComparison) -> RenderableType:
    """The rows of a comparison in paired rounds, with the bounds of their changes."""
    parts: list[RenderableType] = [
        Text(f"{name}  {title}", style="bold")
        for name, title in zip("AB", found.titles, strict=True)
    ]
    parts.append(Text(f"{len(found.jobs)} rounds on {found.card}"))

    def cells(row: JudgedRow) -> list[Any]:
        a, b, change, *bounds = row.cells
        style = ""
        if row.fails:
            style = "bold red"
        elif row.low > 0:
            style = "red"
        elif row.high < 0:
            style = "green"
        return [
            f"{row.quantity} of {row.name}",
            percent(row.share),
            a,
            b,
            Text(change, style=style),
            *bounds,
            str(row.rounds),
        ]

    heads = ("row", ">share", ">A", ">B", ">change", ">at least", ">at most", ">rounds")
    parts += [
        Text(),
        tables.ruled(heads, [cells(row) for row in found.judgement.rows], ("rounds", "at most")),
    ]
    return Group(*parts)
