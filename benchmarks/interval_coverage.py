"""How often the intervals of gaps contain zero, and how much gaps differ between jobs of one model.

    python benchmarks/interval_coverage.py            # the packaged readings; --json FILE writes
    all gaps

All verdicts are computed again from their readings. *Excess* is the standard deviation of the gaps
of one model in several jobs, minus (as variances) the errors that the jobs state and that differ
from job to job: scatter, canaries and the whole. The mean gap of a model does not affect it. The
gaps of models with only one job are an independent test."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlmodel import col, select

from farm.exchange.packaged import packaged_database
from farm.store import tables
from farm.verdict.job_results import JobResults
from farm.verdict.verdict import Comparison

Z95 = 1.96
QUANTITIES = ("time", "energy", "power")


@dataclass(frozen=True)
class Gap:
    """One gap; all values are fractions. `stated` is the half-width of the errors that differ from
    job to job.
    """

    title: str
    quantity: str
    gap: float
    half_width: float
    stated: float

    @classmethod
    def of(cls, title: str, quantity: str, found: Comparison | None) -> Gap | None:
        if found is None or found.gap is None or found.whole is None:
            return None
        common = math.hypot(found.common / found.whole.value, found.between_jobs)
        stated = math.sqrt(max(0.0, found.gap.half_width**2 - common**2))
        return cls(title, quantity, found.gap.value, found.gap.half_width, stated)


def gaps() -> list[Gap]:
    """Return the gaps of all packaged jobs of GPUs that measured at least 99 % of a model of
    several tuples.
    """
    found: list[Gap | None] = []
    with packaged_database().read() as session:
        for job in session.exec(select(tables.Job).where(tables.Job.kind == "model")):
            rows = select(tables.VerdictRow).where(tables.VerdictRow.job_id == job.id)
            last = session.exec(rows.order_by(col(tables.VerdictRow.round).desc())).first()
            verdict = JobResults(session, job, last.round).verdict() if last else None
            if verdict and verdict.parts > 1 and (verdict.coverage or 0) >= 0.99:
                found += [
                    Gap.of(job.title, quantity, getattr(verdict, quantity))
                    for quantity in QUANTITIES
                ]
    return [gap for gap in found if gap]


def excess(some: Sequence[Gap]) -> tuple[float, int, int]:
    """Return the standard deviation between jobs beyond the stated errors, the models, and the
    degrees of freedom.
    """
    of_model = defaultdict(list)
    for one in some:
        of_model[one.title].append(one)
    repeated = [group for group in of_model.values() if len(group) > 1]
    free = sum(len(group) - 1 for group in repeated)
    between = sum(
        statistics.variance(one.gap for one in group) * (len(group) - 1) for group in repeated
    )
    stated = sum(
        statistics.mean((one.stated / Z95) ** 2 for one in group) * (len(group) - 1)
        for group in repeated
    )
    return math.sqrt(max(0.0, between - stated) / free), len(repeated), free


def table(some: Sequence[Gap]) -> str:
    titles = [one.title for one in some if one.quantity == "time"]
    once = {title for title in titles if titles.count(title) == 1}
    lines = ["| quantity | gaps of | gaps | inside | median half-width | median size | largest |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for quantity in QUANTITIES:
        for name, within in (("all jobs", set(titles)), ("models with one job", once)):
            chosen = [one for one in some if one.quantity == quantity and one.title in within]
            inside = sum(abs(one.gap) <= one.half_width for one in chosen) / len(chosen)
            sizes = [abs(one.gap) for one in chosen]
            figures = (
                statistics.median(one.half_width for one in chosen),
                statistics.median(sizes),
                max(sizes),
            )
            cells = " | ".join(f"{figure * 100:.1f} %" for figure in figures)
            lines.append(
                f"| {quantity} | {name} | {len(chosen)} | {inside * 100:.0f} % | {cells} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all gaps")
    asked = parser.parse_args()
    found = gaps()
    for quantity in QUANTITIES:
        deviation, models, free = excess([one for one in found if one.quantity == quantity])
        print(
            f"excess, {quantity}: {deviation * 100:.2f} % ({models} models, {free} degrees of "
            "freedom)"
        )
    print(f"\n{table(found)}")
    if asked.json:
        asked.json.write_text(json.dumps([vars(one) for one in found], indent=1))


if __name__ == "__main__":
    sys.exit(main())
