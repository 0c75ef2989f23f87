"""Where jobs stand, while they are measured: bars for a terminal, lines for a log. Formatting, no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar

from cli import tables
from cli.tables import Text
from farm.types.format import span

if TYPE_CHECKING:
    from farm.jobs.jobs import Progress


def bars(jobs: Sequence[Progress], *, width: int = 16) -> RenderableType:
    """Live: per job a bar of its items, and what each card measures now."""
    blocks: list[RenderableType] = []
    for job in jobs:
        grid = tables.grid(4)
        grid.columns[0].min_width = min(40, max(len(each.title) for each in jobs))
        finished = job.state != "open"
        bar = ProgressBar(total=max(1, job.total), completed=job.closed, width=width, finished_style="green")
        tables.row(
            grid, Text(job.title, style="bold"), bar, f"{job.closed}/{job.total}", Text(_aside(job), style="dim")
        )
        blocks.append(grid)
        if finished:
            continue
        measuring = tables.grid(3)
        for card_id, label in job.current:
            tables.row(
                measuring,
                " ",
                Text(tables.short_id(card_id), style="cyan"),
                Text(label, no_wrap=True, overflow="ellipsis"),
            )
        if job.message:
            tables.row(measuring, " ", "", Text(job.message, style="yellow"))
        if measuring.row_count:
            blocks.append(measuring)
    return Group(*blocks)


def line(job: Progress) -> str:
    """The same for a log: one line per change, without bars or colours."""
    told = f"{job.title} [{job.job_id}] {job.closed}/{job.total} {_aside(job)}".rstrip()
    return f"{told}: {job.message}" if job.message else told


def _aside(job: Progress) -> str:
    failed = job.counts.get("failed", 0)
    told = [f"{job.reused} reused" if job.reused else "", f"{failed} failed" if failed else ""]
    told.append(f"round {job.round}" if job.round > 1 else "")
    if job.state == "open":
        told.append(f"{span(job.expected_left_s)} left" if job.expected_left_s >= 1 else "")
    else:
        told.append(f"{job.state} in {span(job.elapsed_s)}")
    return ", ".join(part for part in told if part)
