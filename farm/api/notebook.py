"""HTML tables for notebooks, with all text escaped, and the report of a job as such a table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from farm.jobs import jobs
from farm.report.report import Report, build
from farm.store.database import Database
from farm.types.format import printable
from farm.verdict.figures import Figure

NOTHING = "\N{EN DASH}"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def counted(value: float, unit: str) -> str:
    """A count with a prefix: 1.23 GFLOP."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def figure(value: float | None, half_width: float | None, unit: str) -> str:
    """A figure with its interval, if there is one."""
    if value is None:
        return NOTHING
    return f"{value:.4g} {unit}" if half_width is None else f"{value:.4g} ± {half_width:.2g} {unit}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> str:
    """The HTML of a table. All text is escaped."""

    def cells(tag: str, values: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(value)}</{tag}>" for value in values) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        f"<table><caption>{_text(title)}</caption><thead>{cells('th', columns)}</thead><tbody>{body}</tbody></table>"
        + (f"<p>{_text(note)}</p>" if note else "")
    )


def _text(value: Any) -> str:
    return html.escape(printable(str(value)))


@dataclass(frozen=True)
class JobReport:
    """The report of a job. A notebook shows cost by operator type, sum and whole, and the verdict.

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
        """Everything, as `farm report --json` has it."""
        return self.report.to_json()

    def __repr__(self) -> str:
        return f"<JobReport {self.job_id} {printable(self.report.title)}: {self.outcome}>"

    def _repr_html_(self) -> str:
        report, verdict = self.report, self.report.verdict
        rows: list[tuple[Any, ...]] = [
            (row.short_name, row.calls, row.tuples, figure(row.time_us, None, "µs"), figure(row.energy_mj, None, "mJ"))
            for row in report.types
        ]
        compared = [("time", "µs", verdict.time)] + ([("energy", "mJ", verdict.energy)] if verdict.energy else [])
        held = [
            (name, _interval(one.total, unit), _interval(one.whole, unit), _percent(one.gap))
            for name, unit, one in compared
        ]
        card = ", ".join(dict.fromkeys(card.model for card in report.cards))
        said = ", ".join([verdict.outcome.upper(), *verdict.reasons])
        return table(f"{report.title}, {card}", ("operator", "calls", "tuples", "time", "energy"), rows) + table(
            f"job {report.job_id}", ("", "sum of the parts", "whole model", "gap"), held, said
        )


def _interval(value: Figure | None, unit: str) -> str:
    return NOTHING if value is None else figure(value.value, value.half_width, unit)


def _percent(gap: Figure | None) -> str:
    return NOTHING if gap is None else f"{gap.value:+.1%} ± {gap.half_width:.1%}"


def job_report(database: Database, job: str) -> JobReport:
    """The report of a job.

    Args:
        job: its id, or the beginning of it.

    Raises:
        NoSuchJob: there is none, or several begin so.
    """
    with database.read() as session:
        return JobReport(build(session, jobs.find(session, job).id))
