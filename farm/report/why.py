"""Why a job's model takes its time: `farm.verdict.causes` of its readings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqlmodel import Session

from farm.errors import NoReadings
from farm.report.report import Report, build
from farm.store import tables
from farm.store.captures import PlacedCall, placed_calls
from farm.types.format import TIME, plural, quantity
from farm.types.request import Request
from farm.types.variant import Variant
from farm.verdict.causes import Cause, Why, largest_causes, rates_of
from farm.verdict.job_results import JobResults


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
    variant = Request.from_json(report.request).variant
    fused = variant is not None and variant.generates_kernels
    calls = _calls_in_order(session, results, report)
    rows = rates_of(report.tuples, results.roofline)
    return Why(
        job_id=report.job_id,
        title=report.title,
        card_model=", ".join(dict.fromkeys(card.model for card in report.cards)),
        rows=rows,
        causes=largest_causes(
            rows,
            [(call.operator_id, call.data) for call in calls],
            fused=fused,
            half_rate=_half_rate(variant, report, results),
            launch_gap=_launch_gap(report, total_us, fused),
        ),
        peaks=results.roofline,
    )


def _calls_in_order(session: Session, results: JobResults, report: Report) -> Sequence[PlacedCall]:
    if not results.capture_id:
        return ()
    return placed_calls(session, results.capture_id, report.protocol.data)


def _launch_gap(report: Report, sum_us: float, fused: bool) -> Iterator[Cause]:
    """The time that an eager pass takes longer than a CUDA graph of the same work. On a CPU: the
    least time that PyTorch takes for a call, for all calls."""
    if report.on_cpu and not fused:
        yield _calls_on_cpu(report, sum_us)
    gap_us = report.verdict.launch_gap_us
    if gap_us is None or gap_us <= 0:
        return
    remedies = "A CUDA graph or a larger batch avoids that."
    if not fused:
        remedies = "A CUDA graph, `--compile` or a larger batch avoids that."
    yield Cause(
        "launch",
        gap_us,
        sum_us + gap_us,
        "Without a CUDA graph, a pass waits for the host, which launches one kernel after the "
        f"other. {remedies}",
    )


def _calls_on_cpu(report: Report, sum_us: float) -> Cause:
    """The time of a call that computes nothing, for all calls of operators."""
    number = sum(line.count for line in report.tuples)
    floor_us = report.roofline.launch_floor_us
    return Cause(
        "launch",
        min(number * floor_us, sum_us),
        sum_us,
        f"PyTorch itself takes at least {quantity(floor_us, TIME)} for each of {number} "
        f"{plural('call', number)}, before the kernel computes. `--compile` makes fewer calls, and "
        "a larger batch makes this part smaller.",
    )


def _half_rate(variant: Variant | None, report: Report, results: JobResults) -> float | None:
    """See `largest_causes`. None on a CPU, whose rate for bfloat16 is not measured."""
    if report.on_cpu or variant is None or variant.computes_in != "float32" or report.protocol.tf32:
        return None
    return results.roofline_for("bfloat16").flops_per_s / results.roofline.flops_per_s
