"""Reports as one self-contained HTML page: without network or server, on a phone, on paper, with a light or dark theme.

plotly draws the charts in the browser. Its JavaScript, an extra (`operator-farm[plot]`), is part of the page. Jinja
escapes all text, and the page's policy forbids requests of the browser.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlmodel import Session

from farm.errors import Unreadable, UsageError
from farm.operators.roofline import Roofline
from farm.pages import charts
from farm.report.breakdowns import OF_OWNERS, OwnerGroup, grouped
from farm.report.layers import LayerRow, layers
from farm.report.remarks import remarks
from farm.report.report import Report
from farm.requests.partial_request import command_of
from farm.store import tables
from farm.store.rows import fetch_values
from farm.types import format
from farm.types.format import printable
from farm.types.reading import FLAGS
from farm.types.request import Request
from farm.verdict.evidence import Evidence

MOST_TUPLES = 10
_STEP = "Name an .html file in a folder that you may write to."


@dataclass(frozen=True)
class JobPage:
    """The values that a page shows of one job."""

    report: Report
    modules: tuple[LayerRow, ...]  # empty for a sweep
    peaks: Roofline
    peaks_measured: bool  # False: from the data sheet
    levels: Mapping[str, charts.CardLevels]  # by reading id
    command: str  # "" for a sweep

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """The remarks of the report, without those that have their own section."""
        return [(what, text) for what, text in remarks(self.report) if what not in ("coverage", "flags")]

    @property
    def sums(self) -> list[charts.Chart]:
        return charts.sum_and_whole(self.report) if self.report.kind == "model" else []

    @property
    def roofline(self) -> charts.Chart | None:
        return charts.roofline(self.report, self.peaks)

    @property
    def tree(self) -> charts.Chart | None:
        return charts.modules(self.modules, self.report.title)

    @property
    def distributions(self) -> list[charts.Chart]:
        return charts.distributions(self.report, self.levels)

    @property
    def owner_groups(self) -> list[OwnerGroup]:
        """The cost of a training step by owner."""
        return grouped(self.report.owners)

    @property
    def parts_shown(self) -> list[str]:
        return [part for part in OF_OWNERS if any(row.part == part for row in self.report.owners)]

    @property
    def costliest(self) -> list[dict[str, Any]]:
        """The ten most expensive tuples, with their share of the sum's time."""
        total_us = sum(row.total_us for row in self.report.tuples)
        rows = [row for row in self.report.tuples if row.time_us][:MOST_TUPLES]
        return [{"row": row, "share": row.total_us / total_us} for row in rows]


def job_page(session: Session, report: Report) -> JobPage:
    """The values that a page shows of a job."""
    job = session.get_one(tables.Job, report.job_id)
    peaks = Evidence(session, job, job.round).roofline
    fingerprints = [session.get_one(tables.CardRow, card.id).fingerprint for card in report.cards[:1]]
    reading = tables.ReadingRow.__table__.columns  # type: ignore[attr-defined]
    wanted = (reading.id, reading.power_w, reading.sm_clock_mhz)
    ids = [row.reading_id for row in report.tuples if row.reading_id]
    levels = {key: charts.CardLevels(*row[1:]) for key, row in fetch_values(session, wanted, ids).items()}
    of_model = report.kind == "model"
    return JobPage(
        report=report,
        modules=layers(session, report, "module", outputs=False).rows if of_model else (),
        peaks=peaks,
        peaks_measured=bool(fingerprints and (fingerprints[0] or {}).get("copy_bytes_per_s")),
        levels=levels,
        command=_command(report),
    )


def _command(report: Report) -> str:
    try:
        return command_of(Request.from_json(report.request))
    except Unreadable:
        return ""


# --------------------------------------------------------------------------------------------------- HTML


def check_page(path: Path) -> None:
    """Check that a page can be written to this file, before the report is made.

    Raises:
        UsageError: plotly is missing, or the file cannot be written.
    """
    plotly_js()
    if path.is_dir():
        raise UsageError(f"'{path}' is a folder.", "Name a file in it.")
    if not path.parent.is_dir():
        raise UsageError(f"The folder '{path.parent}' does not exist.", "Name a file in a folder that does.")


def write_page(path: Path, pages: Sequence[JobPage]) -> None:
    """Write one page of one job or several jobs.

    Raises:
        UsageError: it cannot be written, or plotly is missing. No partial file remains.
    """
    title = pages[0].report.title if len(pages) == 1 else f"{len(pages)} jobs"
    text = render(
        "reports.html",
        title=title,
        pages=pages,
        scatters=charts.scatters([(page.report, f"#{page.report.job_id}") for page in pages]) if len(pages) > 1 else [],
        script=plotly_js(),
    )
    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it.

    Raises:
        UsageError: it cannot be written. No partial file remains.
    """
    unfinished = path.with_name(f".{path.name[:100]}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            unfinished.unlink()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"'{path}' cannot be written: {reason}.", _STEP) from error


def plotly_js() -> str:
    """The JavaScript of plotly.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            "Pages need plotly, which is not installed.", "Install it with `pip install 'operator-farm[plot]'`."
        ) from error
    return str(get_plotlyjs())


def render(template: str, **values: Any) -> str:
    """A template as HTML. All text is escaped, and control characters are made visible."""
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
        time=lambda value: format.quantity(value, format.TIME),
        energy=lambda value: format.quantity(value, format.ENERGY),
        power=lambda value: format.quantity(value, format.POWER),
        percent=format.percent,
        interval=lambda figure, units: format.interval(figure, getattr(format, units)),
        gap=format.gap,
        count=format.count_of,
        span=format.span,
        plural=format.plural,
        day=lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else format.NOTHING,
    )
    return environment.get_template(template).render(flags=FLAGS, made_at_s=time.time(), **values)
