"""Predicted and needed card time of each job of a database, and where the time went.

    python -m benchmarks.card_time farm.db [OTHER.db ...]     # Markdown

A row is a job. *Predicted* is the sum of its items' expected times, as `farm run` shows it;
*needed* is the sum of the times from claim to end. Readings that were reused are not counted.
*Waiting* is the time from the first claim to the last end in which no item of the job ran: those of
other jobs did. The phases are `Reading.cost_s`; *host* is what remains of the needed time: building
models, verification, compilation and the database."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from sqlmodel import Session, col, select

from farm.store import tables
from farm.store.database import Database

ROLES = ("tuple", "whole", "compile")
#: Columns of the table -> the phases of `Reading.cost_s` that they add up.
PHASES = {
    "warm up": ("warm_up",),
    "windows": ("window", "canary_window"),
    "bursts": ("burst",),
    "in order, context": ("in_order", "context", "places", "added", "eager", "restoring"),
    "rebuild, around": ("rebuild", "around", "close", "canary"),
}


@dataclass
class JobTime:
    """The card time of one job. Unit: s."""

    title: str
    predicted: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by role
    needed: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by role
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    items: int = 0
    span_s: float = 0.0

    def row(self) -> list[str]:
        predicted_s, needed_s = sum(self.predicted.values()), sum(self.needed.values())
        of_phases = [sum(self.phases[name] for name in names) for names in PHASES.values()]
        by_role = [
            f"{self.predicted[role]:.0f} / {self.needed[role]:.0f}" if self.needed[role] else ""
            for role in ROLES
        ]
        figures = [*of_phases, needed_s - sum(of_phases), self.span_s - needed_s]
        error = f"{predicted_s / needed_s - 1:+.0%}"
        total = f"{predicted_s:.0f} / {needed_s:.0f}"
        rest = [f"{value:.1f}" for value in figures]
        return [self.title, str(self.items), total, error, *by_role, *rest]


def times_of(session: Session, job: tables.Job) -> JobTime | None:
    """The card time of a job; None if no item ran."""
    query = (
        select(tables.Item, tables.ReadingRow)
        .join(
            tables.ReadingRow,
            col(tables.ReadingRow.id) == col(tables.Item.reading_id),
            isouter=True,
        )
        .where(
            tables.Item.job_id == job.id,
            col(tables.Item.started_at_s).is_not(None),
            col(tables.Item.ended_at_s).is_not(None),
            col(tables.Item.reused).is_not(True),
        )
    )
    found = JobTime(job.title)
    starts_s, ends_s = [], []
    for item, reading in session.exec(query):
        assert item.started_at_s is not None
        assert item.ended_at_s is not None
        starts_s.append(item.started_at_s)
        ends_s.append(item.ended_at_s)
        found.items += 1
        found.predicted[item.role] += item.expected_s or 0.0
        found.needed[item.role] += item.ended_at_s - item.started_at_s
        for phase, cost_s in ((reading.cost_s if reading else None) or {}).items():
            found.phases[phase] += cost_s
    if not starts_s:
        return None
    found.span_s = max(ends_s) - min(starts_s)
    return found


def table(file: Path) -> str:
    """A table in Markdown of the jobs of a database."""
    header = ["job", "items", "predicted / needed, s", "error", "tuples", "whole", "compilation"]
    header += [*PHASES, "host", "waiting"]
    lines = [header, ["---"] * len(header)]
    database = Database(f"sqlite:///{file}")
    with database.read() as session:
        for job in session.exec(select(tables.Job).order_by(col(tables.Job.created_at_s))):
            found = times_of(session, job)
            if found is not None:
                lines.append(found.row())
    database.close()
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("databases", nargs="+", type=Path, help="SQLite; the schema is upgraded")
    for file in parser.parse_args().databases:
        sys.stdout.write(f"{file.name}\n\n{table(file)}\n\n")


if __name__ == "__main__":
    main()
