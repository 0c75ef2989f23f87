"""The memory of a training step as text and tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from cli import tables
from cli.tables import Text, sparkline
from farm.memory_report.plans import plan_rows, sentences
from farm.types.format import TIME, count_of, gap, interval, percent, quantity

if TYPE_CHECKING:
    from farm.memory_report.step_memory import StepMemory
    from farm.operators.captured import CapturedTensor
    from farm.slow_memory.offload_plan import OffloadPlans
    from farm.training.tensor_lifetime import PeriodInterval

_LONGEST_PATH = 48
_MOST_SLOW = 20


def table(found: StepMemory) -> RenderableType:
    """Title, facts, the peak by role, the tensors that wait longest, and what the options request."""
    parts: list[RenderableType] = [
        Text(found.title, style="bold"),
        _facts(found),
        Text(),
        _at_peak(found),
        Text(),
        _most_inactive(found),
        Text(),
        _periods(found),
    ]
    answers = [*_fit(found), *_offload(found)]
    if answers:
        parts += [Text(), *map(tables.hanging, answers)]
    if found.recomputed:
        parts += [Text(), _recomputed(found)]
    if found.offload_plans is not None:
        offload_plans = found.offload_plans
        parts += [Text(), *map(tables.hanging, sentences(found.life, offload_plans)), Text()]
        if len(offload_plans.plans) > 1 or offload_plans.run is not None:
            parts += [_plans(found, offload_plans), Text()]
        parts.append(_curve(offload_plans))
        if len(offload_plans.plans) == 1 and offload_plans.plan.slow:
            parts += [Text(), _placement(found, offload_plans)]
    return Group(*parts)


def _facts(found: StepMemory) -> Table:
    life, capture = found.life, found.capture
    at = capture.calls[life.peak]
    table = tables.grid(2)
    rows = [
        ("loss", capture.loss),
        (
            "step",
            f"{len(capture.calls)} calls of {len(capture.tuples)} tuples, {len(capture.owners)} owners; "
            f"about {quantity(life.step_us, TIME)}",
        ),
        ("times", found.clock),
        *([("note", found.predicted)] if found.predicted else []),
        ("base", f"{_size(life.base_bytes)} before the step and behind it"),
        (
            "peak",
            f"{_size(found.peak_bytes)} at call {life.peak}: {capture.tuples[at.tuple_id].operator} in the "
            f"{found.where(at)}",
        ),
        ("no operator's", found.unseen_why),
        ("curve", sparkline(list(life.begins_us[:-1]), list(map(float, life.held_bytes)), (0.0, life.step_us))),
    ]
    for name, told in rows:
        table.add_row(Text(f"  {name}", style="dim"), Text(told))
    return table


def _at_peak(found: StepMemory) -> Table:
    active = {role: row[found.life.peak] for role, row in found.life.active_by_role.items()}
    table = tables.ruled("at the peak", ">held", ">share", ">in use", ">tensors", drops=("tensors", "share"))
    counts: dict[str, int] = {}
    for tensor in found.life.at_peak():
        counts[tensor.role] = counts.get(tensor.role, 0) + 1
    for role, size in found.at_peak().items():
        tables.row(table, role, _size(size), percent(size / found.peak_bytes), _size(active[role]), str(counts[role]))
    unseen = "not known" if found.unseen_bytes is None else _size(found.unseen_bytes)
    tables.row(table, "no operator's", unseen, "", "", "")
    return table


def _most_inactive(found: StepMemory) -> Table:
    table = tables.ruled(
        "waits most",
        "role",
        ">size",
        ">inactive",
        ">byte-seconds",
        "longest from call to call",
        drops=("longest from call to call", "role"),
    )
    for tensor in found.most_inactive():
        periods = found.life.periods[tensor.number]
        longest = max(periods, key=lambda period: period.time_us)
        over = " of the next step" if longest.over_the_end else ""
        tables.row(
            table,
            tables.clipped(_named(tensor), _LONGEST_PATH),
            tensor.role,
            _size(tensor.size_bytes),
            quantity(sum(period.time_us for period in periods), TIME),
            count_of(found.life.inactive_byte_s[tensor.number], "B·s"),
            f"{longest.begin} to {longest.end}{over}",
        )
    return table


def _named(tensor: CapturedTensor) -> str:
    """The name of a tensor; an activation has the name and number of the call that made it."""
    return (
        tensor.name.removeprefix("model.")
        if tensor.born < 0
        else f"{tensor.name.removeprefix('model.')} of call {tensor.born}"
    )


def _periods(found: StepMemory) -> Table:
    from farm.memory_report.step_memory import LENGTHS_US, SIZES_BYTES

    both = tables.ruled("inactive periods", ">number", ">size", ">byte-seconds")
    _add(both, found.life.by_length(LENGTHS_US), lambda least: quantity(least, TIME, 1))
    both.add_section()
    _add(both, found.life.by_size(SIZES_BYTES), lambda least: count_of(least, "B"))
    return both


def _fit(found: StepMemory) -> list[str]:
    if found.fit is None:
        return []
    fit, batch = found.fit, found.variant.batch
    most = "the largest that fits" if fit.exact else "fits; larger ones may, too,"
    told = [f"A batch of {fit.batch} is {most} in {_size(fit.limit_bytes)}: its peak is {_size(fit.peak_bytes)}."]
    if batch > fit.batch:
        told.append(f"The batch of {batch} does not fit: its peak is {_size(found.allocated_peak_bytes)}.")
    captured = ", ".join(map(str, sorted(fit.peaks_bytes)))
    assumed = "tensors in the allocator's pieces of 512 bytes, without libraries' workspaces, the CUDA context and gaps"
    return [*told, f"Captured at batches {captured}; counted are {assumed}."]


def _offload(found: StepMemory) -> list[str]:
    if found.offload is None:
        return []
    moved = found.offload
    away = (
        f"At {_size(moved.bytes_per_s)}/s each way {moved.long_enough} of {moved.periods} inactive periods are "
        "long enough to "
        f"move a tensor out and back. The link has time for {len(moved.hidden)} of them, those with the most "
        "byte-seconds "
        f"first: {_size(moved.moved_bytes)} are moved in a step, and the link is busy for "
        f"{percent(moved.link_share)} of it."
    )
    left = f"The peak would be {_size(moved.peak_bytes)} instead of {_size(found.peak_bytes)}."
    return [away, left, "This assumes that transfers do not slow calls down and have the full bandwidth."]


def _recomputed(found: StepMemory) -> Table:
    table = tables.ruled("recomputed", ">peak", ">freed", ">calls more", ">time more", drops=("calls more",))
    for row in found.recomputed:
        name = "all of them" if "," in row.what else row.what
        time = f"{quantity(row.time_us, TIME)} ({percent(row.time_us / found.life.step_us)})"
        tables.row(table, name, _size(row.peak_bytes), _size(row.freed_bytes), str(row.calls), time)
    return table


def _plans(found: StepMemory, offload_plans: OffloadPlans) -> Table:
    """A row for all tensors fast and one for each plan, predicted and run."""
    ran = offload_plans.run is not None
    names = (">fast memory", ">predicted", *((">as run", ">prediction off") if ran else ()), ">slow tensors")
    if moves := offload_plans.moves_bytes_per_s is not None:
        names += (">moves a step",)
    table = tables.ruled(*names, ">gap", drops=("gap", "slow tensors"))
    for row in plan_rows(found.life, offload_plans):
        plan = row.plan
        size, slow, to_best = (
            ("all fast", "0", "") if plan is None else (_size(plan.fast_bytes), str(len(plan.slow)), percent(plan.gap))
        )
        as_run = (interval(row.run_us, TIME), gap(row.off)) if ran else ()
        tables.row(
            table, size, quantity(row.predicted_us, TIME), *as_run, slow, *([row.moves_told] if moves else []), to_best
        )
    return table


def _curve(offload_plans: OffloadPlans) -> Table:
    table = tables.ruled(">fast memory", ">step", ">times all fast", ">slow tensors", ">gap", drops=("gap",))
    for plan in offload_plans.curve:
        times = f"{plan.time_us / offload_plans.all_fast_us:.3f}"
        tables.row(
            table, _size(plan.fast_bytes), quantity(plan.time_us, TIME), times, str(len(plan.slow)), percent(plan.gap)
        )
    return table


def _placement(found: StepMemory, offload_plans: OffloadPlans) -> Table:
    table = tables.ruled("in slow memory", "role", ">size", ">adds", drops=("role",))
    slow = offload_plans.slow(found.life, offload_plans.plan)
    for tensor in slow[:_MOST_SLOW]:
        adds_us = offload_plans.costs.slow_us.get(tensor.number, 0.0)
        name = tables.clipped(_named(tensor), _LONGEST_PATH)
        tables.row(table, name, tensor.role, _size(tensor.size_bytes), quantity(adds_us, TIME))
    if len(slow) > _MOST_SLOW:
        rest = slow[_MOST_SLOW:]
        adds_us = sum(offload_plans.costs.slow_us.get(tensor.number, 0.0) for tensor in rest)
        size = _size(sum(tensor.size_bytes for tensor in rest))
        tables.row(table, f"and {len(rest)} more, see --json", "", size, quantity(adds_us, TIME))
    return table


def _add(table: Table, rows: list[PeriodInterval], text: Callable[[float], str]) -> None:
    bounds = [row.least for row in rows]
    for row, below in zip(rows, [*bounds[1:], None], strict=True):
        if row.periods:
            least = f"{text(row.least)} and more" if below is None else f"{text(row.least)} to {text(below)}"
            name = f"below {text(below)}" if below is not None and not row.least else least
            tables.row(table, name, str(row.periods), _size(row.size_bytes), count_of(row.byte_s, "B·s"))


def _size(number: float) -> str:
    return count_of(number, "B")
