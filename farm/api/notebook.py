"""The report of a job as tables of a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farm.errors.safe_text import printable
from farm.report.report import Report, build
from farm.store.database import Database
from farm.store.job_ids import find_job
from farm.types.format import ENERGY, TIME, interval, quantity
from farm.types.notebook import table


@dataclass(frozen=True)
class JobReport:
    """The report of a job. A notebook shows the cost by operator type, the sum, the whole model and
    the verdict.

    `report` has all plain values; `to_json` returns them as JSON with units in the keys.
    """

    report: Report

    @property
    def job_id(self) -> str:
        return self.report.job_id

    @property
    def outcome(self) -> str:
        """ "pass", "fail" or "none"."""
        return self.report.verdict.outcome

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `farm report --json`."""
        return self.report.to_json()

    def __repr__(self) -> str:
        return f"<JobReport {self.job_id} {printable(self.report.title)}: {self.outcome}>"

    def _repr_html_(self) -> str:
        report, verdict = self.report, self.report.verdict
        rows = [
            (
                row.short_name,
                row.cost.calls,
                row.cost.tuples,
                quantity(row.cost.measured_us, TIME),
                quantity(row.cost.measured_mj, ENERGY),
            )
            for row in report.types
        ]
        compared = [
            (name, interval(sums.total, units), interval(sums.whole, units), verdict.gap_text(sums))
            for name, units, sums in (
                ("time", TIME, verdict.time),
                ("energy", ENERGY, verdict.energy),
            )
            if sums is not None
        ]
        card = ", ".join(dict.fromkeys(card.model for card in report.cards))
        note = ", ".join([verdict.outcome.upper(), *verdict.reasons])
        return table(
            f"{report.title}, {card}", ("operator", "calls", "tuples", "time", "energy"), rows
        ) + table(
            f"job {report.job_id}", ("", "sum of the parts", "whole model", "gap"), compared, note
        )


def job_report(database: Database, job: str) -> JobReport:
    """Build the report of a job.

    Args:
        job: the id of the job, or the beginning of the id.

    Raises:
        NoSuchJob: no id or several ids begin so.
    """
    with database.read() as session:
        return JobReport(build(session, find_job(session, job).id))
