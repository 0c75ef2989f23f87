"""The interface of an add-on that writes results as pages and drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sqlmodel import Session

from farm.report.history import HistoryRow
from farm.report.report import Report
from farm.report.schemes import SchemeComparison
from farm.types.reading import Trace


class ResultPages(Protocol):
    """Writes results as pages and drawings: a module with these functions.

    A function that writes a file raises `UsageError` if it cannot, or if a package is missing.

    Example:
        >>> writer = extensions.result_pages("--html")  # the option, for the text of an error
        >>> writer.check_page(Path("report.html"))  # before the work that the page shows
        >>> writer.write_jobs(session, Path("report.html"), [report])
    """

    def check_page(self, path: Path) -> None:
        """Raise `UsageError` if no page can be written to this file."""

    def write_jobs(self, session: Session, path: Path, reports: Sequence[Report]) -> None:
        """Write one page of jobs. The session reads what their reports lack: readings, layers and
        fingerprints of cards."""

    def write_history(self, path: Path, model: str, rows: Sequence[HistoryRow]) -> None:
        """Write one page of the results of a model over time (`farm.report.history`)."""

    def write_schemes(self, path: Path, compared: SchemeComparison) -> None:
        """Write one page of the schemes of a model over its sizes."""

    def draw_trace(
        self, trace: Trace, path: Path, title: str, levels_w: Mapping[str, float]
    ) -> None:
        """Draw the sampled series of a reading. `levels_w`: name -> power level to mark in W."""
