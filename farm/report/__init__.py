"""What a person or a program is shown of a job: `build` makes a `Report` from the rows of the database."""

from farm.report.report import CardView, Report, RoundView, TupleRow, TypeRow, build

__all__ = ["CardView", "Report", "RoundView", "TupleRow", "TypeRow", "build"]
