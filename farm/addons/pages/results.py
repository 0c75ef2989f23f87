"""Writes the results of the core as pages and drawings: a `farm.report.pages.ResultPages`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlmodel import Session

from farm.addons.pages.page import check_page, job_page, write_history, write_page, write_schemes
from farm.addons.pages.plots import draw_trace
from farm.report.report import Report

__all__ = ["check_page", "draw_trace", "write_history", "write_jobs", "write_schemes"]


def write_jobs(session: Session, path: Path, reports: Sequence[Report]) -> None:
    write_page(path, [job_page(session, report) for report in reports])
