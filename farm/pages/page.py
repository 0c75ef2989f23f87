"""Writes reports as one HTML page that needs no network and no server. It fits phones and paper, light or dark.

plotly (extra `operator-farm[plot]`) draws the charts in the browser; its JavaScript is part of the page. Jinja escapes
all text, and the page's content security policy forbids all requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlmodel import Session

from farm.errors import UsageError
from farm.operators.roofline import Roofline
from farm.pages import charts, check_file
from farm.report.breakdowns import OF_OWNERS, OwnerGroup, grouped
from farm.report.layers import layers
from farm.report.report import Report, remarks
from farm.requests.partial_request import command_of
from farm.safe_text import printable
from farm.store import tables
from farm.store.database import fetch_values
from farm.types import format
from farm.types.reading import FLAGS
from farm.types.request import Request
from farm.verdict.evidence import Evidence

MOST_TUPLES = 10
_STEP = "Name an .html file in a folder that you may write to."


@dataclass(frozen=True)
class JobPage:
    """The values of one job that a page shows."""

    report: Report
    command: str  # "" for a sweep
    remarks: list[tuple[str, str]]  # except the remarks that have their own section
    sums: list[charts.Chart]
    tree: charts.Chart | None
    roofline: charts.Chart | None
    peaks: Roofline
    peaks_measured: bool  # False: the peaks are from the data sheet
    distributions: list[charts.Chart]
    owner_groups: list[OwnerGroup]
    parts_shown: list[str]  # the parts of a training step that the page shows
    costliest: list[dict[str, Any]]  # the most expensive tuples, with their shares of the sum's time


def job_page(session: Session, report: Report) -> JobPage:
    """Collect the values of a job that a page shows."""
    job = session.get_one(tables.Job, report.job_id)
    peaks = Evidence(session, job, job.round).roofline
    fingerprints = [session.get_one(tables.CardRow, card.id).fingerprint for card in report.cards[:1]]
    reading = tables.ReadingRow.__table__.columns  # type: ignore[attr-defined]
    ids = [row.reading_id for row in report.tuples if row.reading_id]
    readings = fetch_values(session, (reading.id, reading.power_w, reading.sm_clock_mhz), ids)
    of_model = report.kind == "model"
    modules = layers(session, report, "module", outputs=False).rows if of_model else ()
    total_us = sum(row.total_us for row in report.tuples)
    costliest = [row for row in report.tuples if row.time_us][:MOST_TUPLES]
    return JobPage(
        report=report,
        command=command_of(Request.from_json(report.request)),
        remarks=[(what, text) for what, text in remarks(report) if what not in ("coverage", "flags")],
        sums=charts.sum_and_whole(report) if of_model else [],
        tree=charts.modules(modules, report.title),
        roofline=charts.roofline(report, peaks),
        peaks=peaks,
        peaks_measured=bool(fingerprints and (fingerprints[0] or {}).get("copy_bytes_per_s")),
        distributions=charts.distributions(report, readings),
        owner_groups=grouped(report.owners),
        parts_shown=[part for part in OF_OWNERS if any(row.part == part for row in report.owners)],
        costliest=[{"row": row, "share": row.total_us / total_us} for row in costliest],
    )


def check_page(path: Path) -> None:
    """Check that a page can be written to this file, before the report is computed.

    Raises:
        UsageError: plotly is missing, or the file cannot be written.
    """
    plotly_js()
    check_file(path)


def write_page(path: Path, pages: Sequence[JobPage]) -> None:
    """Write one page about one or several jobs.

    Raises:
        UsageError: the file cannot be written, or plotly is missing. No partial file remains.
    """
    title = pages[0].report.title if len(pages) == 1 else f"{len(pages)} jobs"
    values = {"title": title, "pages": pages, "scatters": own_scatters(pages), "script": plotly_js()}
    write_whole(path, render("reports.html", **values))


def own_scatters(pages: Sequence[JobPage]) -> list[charts.Chart]:
    """Return the scatter charts of several jobs, with links to the jobs' sections on the same page."""
    return charts.scatters([(page.report, f"#{page.report.job_id}") for page in pages]) if len(pages) > 1 else []


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it.

    Raises:
        UsageError: the file cannot be written. No partial file remains.
    """
    unfinished = path.with_name(f".{path.name[:100]}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            unfinished.unlink()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"'{path}' cannot be written: {reason}.", _STEP) from error


def plotly_js() -> str:
    """Return the JavaScript of plotly.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        step = "Install it with `pip install 'operator-farm[plot]'`."
        raise UsageError("Pages need plotly, which is not installed.", step) from error
    return str(get_plotlyjs())


def render(template: str, **values: Any) -> str:
    """Render a template to HTML. All text is escaped, and control characters become visible."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value, keep="\n") if type(value) is str else value,
    )
    environment.filters.update(
        {name: getattr(format, name) for name in ("percent", "gap", "span", "plural")},
        time=lambda value: format.quantity(value, format.TIME),
        energy=lambda value: format.quantity(value, format.ENERGY),
        power=lambda value: format.quantity(value, format.POWER),
        interval=lambda figure, units: format.interval(figure, getattr(format, units)),
        count=format.count_of,
        few=format.few,
        day=lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else format.NOTHING,
    )
    return environment.get_template(template).render(flags=FLAGS, made_at_s=time.time(), **values)
