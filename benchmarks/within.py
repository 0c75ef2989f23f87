"""Compare jobs with ``--within`` or ``--budget`` to jobs with precise readings, from the database
of a farm.

    farm run resnet50 -b 32
    for n in 1 2 3 4 5 6 7 8 9 10; do farm run resnet50 -b 32 --within 1% --reuse none; done
    farm run -f examples/within.yml
    farm run -f examples/within.yml --within 1% --reuse none
    python benchmarks/within.py farm.db

For each job: the card time of its items, the half-width of the sum's interval, and whether the
interval contains the sum of the precise readings of the same variant on the same card."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from sqlmodel import col, select

from farm.store.database import Database
from farm.store.tables import Item, ItemState, Job, VerdictRow


def main(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    jobs: dict[tuple[str, str], list[tuple[bool, float, dict[str, float]]]] = defaultdict(list)
    with database.read() as session:
        rows = select(Job, VerdictRow).join(VerdictRow, col(VerdictRow.job_id) == col(Job.id))
        for job, verdict in session.exec(rows.order_by(col(Job.created_at_s))):
            measured = select(Item).where(
                Item.job_id == job.id, Item.state == ItemState.DONE, col(Item.reused).is_(False)
            )
            items = [
                item for item in session.exec(measured) if item.started_at_s and item.ended_at_s
            ]
            if not items or job.request.get("variant") is None:
                continue
            took_s = sum(item.ended_at_s - item.started_at_s for item in items)  # type: ignore[operator]
            limited = bool(job.request.get("within") or job.request.get("budget_s"))
            jobs[job.title, items[0].card_id].append((limited, took_s, verdict.details))
    print(
        "| variant | card time, s | of precise | ± time | ± energy | off, time | off, energy | "
        "inside |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    inside = {"time": 0, "energy": 0}
    number = 0
    for (title, _), found in jobs.items():
        precise = [(took_s, details) for limited, took_s, details in found if not limited]
        for limited, took_s, details in found:
            if not limited or not precise:
                continue
            long_s, reference = precise[-1]
            cells, number = [], number + 1
            for name, unit in (("time", "us"), ("energy", "mj")):
                value, width = (
                    details[f"sum_{name}_{unit}"],
                    details[f"sum_{name}_half_width_{unit}"],
                )
                off = value - reference[f"sum_{name}_{unit}"]
                inside[name] += abs(off) <= width
                cells.append((width / value, off / value, abs(off) <= width))
            (time, time_off, time_in), (energy, energy_off, energy_in) = cells
            print(
                f"| {title} | {took_s:.1f} | {took_s / long_s:.0%} | {time:.2%} | {energy:.2%} | "
                f"{time_off:+.2%} "
                f"| {energy_off:+.2%} | {'time' if time_in else '-'}, "
                f"{'energy' if energy_in else '-'} |"
            )
    print(f"\ninside: time {inside['time']} of {number}, energy {inside['energy']} of {number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
