"""Reports on jobs, readings and models, computed from the rows of the database."""

from farm.report.report import Report, ReportCard, RoundView, TypeRow, build
from farm.verdict.verdict import TupleRow

__all__ = ["Report", "ReportCard", "RoundView", "TupleRow", "TypeRow", "build"]
