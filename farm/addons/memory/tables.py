"""The memory of a training step as text and tables for a terminal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from cli import tables
from cli.tables import Text, sparkline
from farm.addons.memory.offload_plan import OffloadPlans
from farm.addons.memory.plans import plan_rows, sentences
from farm.addons.memory.step_memory import LENGTHS_US, SIZES_BYTES, StepMemory
from farm.operators.captured import CapturedTensor
from farm.types.format import TIME, count_of, gap, interval, percent, quantity

_LONGEST_PATH = 48
_MOST_SLOW = 20


def table(found: StepMemory) -> RenderableType:
    """Title, facts, the peak by role, the tensors that wait longest, and what the options
    request.
    """
    parts: list[RenderableType] = [
        _facts(found),
        Text(),
        _at_peak(found),
        Text(),
        _most_inactive(found),
        Text(),
    ]
    parts.append(_periods(found))
    if answers := [*_fit(found), *_offload(found)]:
        parts += [Text(), *map(tables.hanging, answers)]
    if found.recomputed:
        parts += [Text(), _recomputed(found)]
    if (plans := found.offload_plans) is not None:
        parts += [Text(), *map(tables.hanging, sentences(found.life, plans)), Text()]
        if len(plans.plans) > 1 or plans.run is not None:
            parts += [_plans(found, plans), Text()]
        parts.append(_curve(plans))
        if len(plans.plans) == 1 and plans.plan.slow:
            parts += [Text(), _placement(found, plans)]
    return Group(Text(found.title, style="bold"), *parts)


def _facts(found: StepMemory) -> Table:
    life, capture = found.life, found.capture
    at = capture.calls[life.peak]
    owners = f"{len(capture.owners)} modules and functions"
    measured = found.read_calls == len(capture.calls)
    calls = f"{len(capture.calls)} calls of {len(capture.tuples)} tuples, by {owners}"
    operator = f"{capture.tuples[at.tuple_id].operator} in the {found.where(at)}"
    rows = {
        "loss": capture.loss,
        "optimizer": _optimizer(found),
        "step": f"{calls}; {'about' if measured else 'at least'} {quantity(life.step_us, TIME)}",
        "times": found.clock,
        **({"note": found.predicted} if found.predicted else {}),
        "base": f"{_size(life.base_bytes)} held before and after the step",
        "peak": f"{_size(found.peak_bytes)} at call {life.peak}: {operator}",
        "other memory": found.unseen_why,
        "curve": sparkline(
            list(life.begins_us[:-1]), list(map(float, life.held_bytes)), (0.0, life.step_us)
        ),
    }
    table = tables.grid(2)
    for name, text in rows.items():
        table.add_row(Text(f"  {name}", style="dim"), Text(text))
    return table


def _optimizer(step_memory: StepMemory) -> str:
    """The implementation that the times and tensors assume, and whether PyTorch chooses it."""
    from farm.training.extract import implementation  # late: it needs torch

    name = step_memory.variant.optimizer
    assumed = implementation(name, step_memory.times.kind)
    if assumed == name:
        return name
    return f"{assumed}, PyTorch's default on a GPU; --optimizer {name}-fused is the fused one"


def _at_peak(found: StepMemory) -> Table:
    counts = Counter(tensor.role for tensor in found.life.at_peak())
    rows = []
    for role, size in found.at_peak().items():
        active = _size(found.life.active_by_role[role][found.life.peak])
        rows.append(
            (role, _size(size), percent(size / found.peak_bytes), active, str(counts[role]))
        )
    rows.append(
        (
            "other memory",
            "not known" if found.unseen_bytes is None else _size(found.unseen_bytes),
            "",
            "",
            "",
        )
    )
    return tables.ruled(
        ("at the peak", ">held", ">share", ">in use", ">tensors"), rows, ("tensors", "share")
    )


def _most_inactive(found: StepMemory) -> Table:
    longest_head = "longest period, between calls"
    heads = ("inactive longest", "role", ">size", ">inactive", ">byte-seconds", longest_head)
    rows = []
    for tensor in found.most_inactive():
        periods = found.life.periods[tensor.number]
        longest = max(periods, key=lambda period: period.time_us)
        inactive = quantity(sum(period.time_us for period in periods), TIME)
        byte_seconds = count_of(found.life.inactive_byte_s[tensor.number], "B·s")
        calls = (
            f"{longest.begin} to {longest.end}{' of the next step' if longest.over_the_end else ''}"
        )
        rows.append(
            (_named(tensor), tensor.role, _size(tensor.size_bytes), inactive, byte_seconds, calls)
        )
    return tables.ruled(heads, rows, drops=(longest_head, "role"))


def _named(tensor: CapturedTensor) -> Text:
    """The name of a tensor; an activation has the name and number of the call that made it."""
    of_call = "" if tensor.born < 0 else f" of call {tensor.born}"
    return tables.clipped(f"{tensor.name.removeprefix('model.')}{of_call}", _LONGEST_PATH)


def _periods(found: StepMemory) -> Table:
    both = tables.ruled(("inactive periods", ">number", ">size", ">byte-seconds"))
    by_length, by_size = found.life.by_length(LENGTHS_US), found.life.by_size(SIZES_BYTES)
    for rows, text in ((by_length, lambda least: quantity(least, TIME, 1)), (by_size, _size)):
        for row, following in itertools.zip_longest(rows, rows[1:]):
            if row.periods:
                name = f"{text(row.least)} and more"
                if following is not None:
                    below = text(following.least)
                    name = f"{text(row.least)} to {below}" if row.least else f"below {below}"
                tables.row(
                    both, name, str(row.periods), _size(row.size_bytes), count_of(row.byte_s, "B·s")
                )
        both.add_section()
    return both


def _fit(found: StepMemory) -> list[str]:
    if found.fit is None:
        return []
    fit, batch = found.fit, found.variant.batch
    limit, peak = _size(fit.limit_bytes), _size(fit.allocated_peak_bytes)
    told = [
        f"The largest batch that fits in {limit} is {fit.batch}; its peak is {peak}."
        if fit.exact
        else f"A batch of {fit.batch} fits in {limit}; its peak is {peak}. "
        "Larger batches may fit, too."
    ]
    if batch > fit.batch:
        told.append(
            f"The batch of {batch} does not fit: its peak is {_size(found.allocated_peak_bytes)}."
        )
    captured = ", ".join(map(str, sorted(fit.peaks_bytes)))
    counted = (
        "The peak counts tensors, each rounded up to 512 bytes as by the allocator. It does not "
        "include workspaces"
    )
    counted += " of libraries, the CUDA context and unused gaps."
    return [*told, f"The step was captured at batch {captured}. {counted}"]


def _offload(found: StepMemory) -> list[str]:
    if found.offload is None:
        return []
    moved = found.offload
    away = (
        f"At {_size(moved.bytes_per_s)}/s in each direction, {moved.long_enough} of "
        f"{moved.periods} inactive periods "
        "are long enough to move a tensor out and back. The link has time for "
        f"{len(moved.hidden)} of these periods, "
        f"chosen by their byte-seconds. Each step moves {_size(moved.moved_bytes)}; the link is "
        "busy for "
        f"{percent(moved.link_share)} of the step."
    )
    left = f"The peak would be {_size(moved.peak_bytes)} instead of {_size(found.peak_bytes)}."
    return [
        away,
        left,
        "This assumes that transfers do not slow calls down and have the full bandwidth.",
    ]


def _recomputed(found: StepMemory) -> Table:
    rows = []
    for row in found.recomputed:
        name = "all blocks" if "," in row.modules else row.modules
        time = f"{quantity(row.time_us, TIME)} ({percent(row.time_us / found.life.step_us)})"
        rows.append((name, _size(row.peak_bytes), _size(row.freed_bytes), str(row.calls), time))
    heads = ("recomputed block", ">peak", ">freed", ">extra calls", ">extra time")
    return tables.ruled(heads, rows, drops=("extra calls",))


def _plans(found: StepMemory, plans: OffloadPlans) -> Table:
    """A row for all tensors fast and one for each plan, predicted and run."""
    ran, moves = plans.run is not None, plans.moves_bytes_per_s is not None
    heads = [
        ">fast memory",
        ">predicted time",
        *((">measured time", ">prediction error") if ran else ()),
    ]
    heads += [">slow tensors", *([">moves per step"] if moves else []), ">solver gap"]
    rows = []
    for row in plan_rows(found.life, plans):
        plan = row.plan
        size, to_best = "all fast", ""
        if plan is not plans.all_fast:
            size, to_best = _size(plan.fast_bytes), percent(plan.gap)
        as_run = (interval(row.run_us, TIME), gap(row.deviation)) if ran else ()
        more = [row.moves_told] if moves else []
        rows.append(
            (size, quantity(plan.time_us, TIME), *as_run, str(len(plan.slow)), *more, to_best)
        )
    return tables.ruled(heads, rows, drops=("solver gap", "slow tensors"))


def _curve(plans: OffloadPlans) -> Table:
    heads = (
        ">fast memory",
        ">predicted time",
        ">ratio to all fast",
        ">slow tensors",
        ">solver gap",
    )
    rows = []
    for plan in plans.curve:
        times = quantity(plan.time_us, TIME), f"{plan.time_us / plans.all_fast.time_us:.3f}"
        rows.append((_size(plan.fast_bytes), *times, str(len(plan.slow)), percent(plan.gap)))
    return tables.ruled(heads, rows, drops=("solver gap",))


def _placement(found: StepMemory, plans: OffloadPlans) -> Table:
    def cells(
        name: str | Text, role: str, tensors: Sequence[CapturedTensor]
    ) -> tuple[str | Text, ...]:
        adds_us = sum(plans.costs.slow_us.get(tensor.number, 0.0) for tensor in tensors)
        return (
            name,
            role,
            _size(sum(tensor.size_bytes for tensor in tensors)),
            quantity(adds_us, TIME),
        )

    slow = plans.slow(found.life, plans.plan)
    rows = [cells(_named(tensor), tensor.role, [tensor]) for tensor in slow[:_MOST_SLOW]]
    if rest := slow[_MOST_SLOW:]:
        rows.append(cells(f"and {len(rest)} more; --json lists all", "", rest))
    return tables.ruled(("in slow memory", "role", ">size", ">added time"), rows, drops=("role",))


def _size(number: float) -> str:
    return count_of(number, "B")
