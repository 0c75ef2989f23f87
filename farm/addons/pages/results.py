"""Writes the results of the core as pages and drawings: `farm.report.pages.ResultPages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlmodel import Session

from farm.addons.pages import page, plots
from farm.report.pages import ResultPages
from farm.report.report import Report
from farm.types.reading import Trace


class HtmlPages(ResultPages):
    """Pages with charts of plotly, and drawings of matplotlib."""

    def check_page(self, path: Path) -> None:
        page.check_page(path)

    def write_jobs(self, session: Session, path: Path, reports: Sequence[Report]) -> None:
        page.write_page(path, [page.job_page(session, report) for report in reports])

    def write_history(self, path: Path, model: str, rows: list[dict[str, Any]]) -> None:
        page.write_history(path, model, rows)

    def draw_trace(
        self, trace: Trace, path: Path, title: str, levels_w: Mapping[str, float]
    ) -> None:
        plots.draw_trace(trace, path, title, levels_w)


PAGES = HtmlPages()
