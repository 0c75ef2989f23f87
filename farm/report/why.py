"""Why a model takes its time: the rates of its calls, and the largest causes, each with the time
that it would save at most.

Nothing is measured or predicted here. Each saving is an upper bound from the job's readings and the
card's peak rates; the docstring of each cause says how it is computed. Two causes may save the
same time, so their savings are not added."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlmodel import Session

from farm.errors import NoReadings
from farm.report.rates import MOST_OF_ROOFLINE, Rates
from farm.report.report import Report, build
from farm.store import tables
from farm.store.captures import PlacedCall, placed_calls
from farm.types.figure import share_of
from farm.types.format import TIME, few, percent, plural, quantity
from farm.types.request import Request
from farm.types.roofline import Roofline
from farm.verdict.cost_line import CostLine
from farm.verdict.job_results import JobResults

#: Operators that move or convert data and compute nothing.
COPIES = frozenset(
    {
        *("to", "_to_copy", "type_as", "float", "half", "bfloat16", "double"),
        *("clone", "contiguous", "copy_", "reshape"),
        *("cat", "concat", "stack", "pad", "repeat", "repeat_interleave", "roll", "flip"),
    }
)
# A cause that saves less is not worth a sentence.
_LEAST_SAVING = 0.01


@dataclass(frozen=True)
class RateRow:
    """One tuple of the model with the rates of its calls."""

    line: CostLine
    rates: Rates

    def to_json(self) -> dict[str, Any]:
        return {
            "operator_id": self.line.subject.operator_id,
            "label": self.line.subject.label,
            "calls": self.line.count,
            "time_us": self.line.total_us,
            **self.rates.to_json(),
            "bound": self.rates.bound,
        }


@dataclass(frozen=True)
class Cause:
    """A reason for time that another way to run the model would save.

    Attributes:
        topic: fusion, copies, launch, small calls, dtype or rate.
        saves_us: the largest possible saving of one pass.
        of_us: the time that it is a part of: the sum, or an eager pass if the topic is launch.
        text: sentences with the numbers and what to do.
    """

    topic: str
    saves_us: float
    of_us: float
    text: str

    @property
    def share(self) -> float | None:
        """The saving as a share of the sum, or of an eager pass if the topic is launch."""
        return share_of(self.saves_us, self.of_us)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "share": self.share}


@dataclass(frozen=True)
class Why:
    """The rates of a job's tuples, the most expensive first, and its causes, the largest first."""

    job_id: str
    title: str
    sum_us: float
    rows: tuple[RateRow, ...]
    causes: tuple[Cause, ...]
    peaks: Roofline

    def to_json(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "title": self.title,
            "sum_us": self.sum_us,
            "peaks": vars(self.peaks),
            "causes": [cause.to_json() for cause in self.causes],
            "rows": [row.to_json() for row in self.rows],
        }


def why(session: Session, job_id: str) -> Why:
    """Explain the time of a job from its readings.

    Raises:
        NoSuchJob: there is no such job.
        NoReadings: no tuple of the job is measured.
    """
    report = build(session, job_id)
    job = session.get_one(tables.Job, report.job_id)
    results = JobResults(session, job, job.round)
    total_us = math.fsum(line.total_us for line in report.tuples)
    if not total_us:
        raise NoReadings(
            f"No operator of job {job_id} is measured.", "Wait for the job, or run it again."
        )
    rows = []
    for line in report.tuples:
        rows.append(RateRow(line, Rates.of(line, total_us, results.roofline)))
    rows.sort(key=lambda row: -row.line.total_us)

    part = _Part(report, results, tuple(rows), total_us)
    calls = _calls_in_order(session, results, report)
    candidates = [
        *_fusion(part, calls),
        *_copies(part),
        *_launch_gap(part),
        *_small_calls(part),
        *_dtype(part),
        *_slow_operators(part),
    ]
    large = [cause for cause in candidates if cause.saves_us >= _LEAST_SAVING * total_us]
    large.sort(key=lambda cause: -cause.saves_us)
    return Why(
        job_id=report.job_id,
        title=report.title,
        sum_us=total_us,
        rows=tuple(rows),
        causes=tuple(large),
        peaks=results.roofline,
    )


@dataclass(frozen=True)
class _Part:
    """What the causes are found in: a job's report and results, and the rates of its tuples."""

    report: Report
    results: JobResults
    rows: Sequence[RateRow]
    sum_us: float

    def cause(self, topic: str, saves_us: float, text: str) -> Cause:
        return Cause(topic, saves_us, self.sum_us, text)


def _calls_in_order(session: Session, results: JobResults, report: Report) -> Sequence[PlacedCall]:
    if not results.capture_id:
        return ()
    return placed_calls(session, results.capture_id, report.protocol.data)


def _fusion(part: _Part, calls: Sequence[PlacedCall]) -> Iterator[Cause]:
    """Calls without matrix products that follow each other. A compiler makes one kernel of them.

    Such a kernel takes at least as long as the longest of its calls: it reads and writes at least
    that call's data. The rest of each run is the saving."""
    if part.report.compiled is not None:
        return
    row_of: Mapping[tuple[str, str], RateRow] = {row.line.subject.key: row for row in part.rows}
    saves_us, fused, names = 0.0, 0, Counter[str]()
    placed = [row_of.get((call.operator_id, call.data)) for call in calls]
    for without_products, run in groupby(placed, _is_without_products):
        times_us = []
        run_names = []
        for row in run:
            if row is not None:
                times_us.append(row.rates.time_us)
                run_names.append(row.line.subject.short_name)
        if not without_products or len(times_us) < 2:
            continue
        saves_us += math.fsum(times_us) - max(times_us)
        fused += len(times_us)
        names.update(run_names)
    common = few([name for name, _ in names.most_common()], 4)
    yield part.cause(
        "fusion",
        saves_us,
        f"{fused} calls without matrix products follow each other ({common}). `--compile` makes "
        "fewer kernels of them, which keep intermediate results on the chip.",
    )


def _is_without_products(row: RateRow | None) -> bool:
    return row is not None and not row.line.subject.flops


def _copies(part: _Part) -> Iterator[Cause]:
    """Calls that only copy or convert data: all of their time."""
    copies = [row for row in part.rows if row.line.subject.short_name in COPIES]
    number = sum(row.line.count for row in copies)
    names = few(list(dict.fromkeys(row.line.subject.short_name for row in copies)), 4)
    yield part.cause(
        "copies",
        math.fsum(row.line.total_us for row in copies),
        f"{number} {plural('call', number)} only copy or convert data ({names}). Another layout, "
        "one dtype, or fusion with the next operator avoids them.",
    )


def _launch_gap(part: _Part) -> Iterator[Cause]:
    """The time that an eager pass takes longer than a CUDA graph of the same work."""
    gap_us = part.report.verdict.launch_gap_us
    if gap_us is None or gap_us <= 0:
        return
    remedies = "A CUDA graph or a larger batch avoids that."
    if part.report.compiled is None:
        remedies = "A CUDA graph, `--compile` or a larger batch avoids that."
    yield Cause(
        "launch",
        gap_us,
        part.sum_us + gap_us,
        "Without a CUDA graph, a pass waits for the host, which launches one kernel after the "
        f"other. {remedies}",
    )


def _small_calls(part: _Part) -> Iterator[Cause]:
    """Calls whose data and arithmetic need less than the least time of a kernel: the time above
    that of their data and arithmetic at the card's peak rates."""
    small = [row for row in part.rows if row.rates.bound == "launch" and row.rates.time_us]
    number = sum(row.line.count for row in small)
    total = sum(row.line.count for row in part.rows)
    saved_us = [row.line.count * max(row.rates.time_us - row.rates.ideal_us, 0.0) for row in small]
    yield part.cause(
        "small calls",
        math.fsum(saved_us),
        f"{number} of {total} calls are too small for the card: the least time of a kernel is "
        "longer than their work. With a larger batch they cost less per sample; fusion removes "
        "some.",
    )


def _dtype(part: _Part) -> Iterator[Cause]:
    """Matrix products in float32 that arithmetic limits: their time above the same products at the
    card's ratio of the rates of bfloat16 and float32, or above half of their data's time."""
    variant = Request.from_json(part.report.request).variant
    if variant is None or variant.computes_in != "float32" or part.report.protocol.tf32:
        return
    peaks = part.results.roofline
    ratio = peaks.flops_per_s / part.results.roofline_for("bfloat16").flops_per_s
    products = [row for row in part.rows if row.rates.bound == "compute"]
    if ratio >= 1 or not products:
        return
    saved_us, total_us = 0.0, 0.0
    for row in products:
        memory_us = row.line.subject.bytes_moved / 2 / peaks.bytes_per_s * 1e6
        least_us = max(row.rates.time_us * ratio, memory_us)
        saved_us += row.line.count * max(row.rates.time_us - least_us, 0.0)
        total_us += row.line.total_us
    yield part.cause(
        "dtype",
        saved_us,
        f"Matrix products in float32 take {quantity(total_us, TIME)}. The card's rate for bfloat16 "
        f"is {1 / ratio:.1f} times as high: `--dtype bfloat16`.",
    )


def _slow_operators(part: _Part) -> Iterator[Cause]:
    """The tuples of each operator with room for improvement: their time above that at the card's
    peak rates."""
    slow: dict[str, list[RateRow]] = defaultdict(list)
    for row in part.rows:
        if row.rates.improvable and row.rates.bound != "launch":
            slow[row.line.subject.short_name].append(row)
    for name, rows in slow.items():
        number = sum(row.line.count for row in rows)
        worst = max(rows, key=lambda row: row.rates.excess_us)
        limit = "arithmetic" if worst.rates.bound == "compute" else "bandwidth"
        yield part.cause(
            "rate",
            math.fsum(row.rates.excess_us for row in rows),
            f"{name} reaches less than {percent(MOST_OF_ROOFLINE, 0)} of the roofline in {number} "
            f"{plural('call', number)}. The largest part is "
            f"{worst.line.subject.label}: {percent(worst.rates.roofline_share)}, where {limit} is "
            "the limit. Other sizes, another layout or another kernel may come closer.",
        )
