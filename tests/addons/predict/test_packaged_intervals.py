"""The printed intervals contain the measured value that stands beside them, over all packaged
jobs.
"""

import pytest
from sqlmodel import select

from farm.addons.predict.query import EstimateQuery
from farm.errors import FarmError
from farm.exchange.packaged import packaged_database
from farm.store import tables
from farm.types.request import Request
from farm.verdict.verdict import Verdict
from tests import slow

LEAST_SHARE = 0.9
COMPLETE = 0.999


def inside(low, value, high):
    return low <= value <= high


@pytest.mark.parametrize("quantity", ["time", "energy"])
def test_the_interval_of_a_gap_contains_zero(quantity):
    with packaged_database().read() as session:
        verdicts = [
            Verdict.from_json(row.details) for row in session.exec(select(tables.VerdictRow))
        ]
    complete = [verdict for verdict in verdicts if (verdict.coverage or 0) > COMPLETE]
    gaps = [
        comparison.gap
        for verdict in complete
        if (comparison := getattr(verdict, quantity)) and comparison.gap
    ]
    assert len(gaps) > 100
    share = sum(abs(gap.value) <= gap.half_width for gap in gaps) / len(gaps)
    assert share >= LEAST_SHARE


def packaged_variants(session):
    """The variants of the packaged jobs that the farm can estimate, each once, with the request of
    a job.
    """
    requests = {}
    for job in session.exec(select(tables.Job).where(tables.Job.kind == "model")):
        request = Request.from_json(job.request)
        variant = request.variant
        if not variant.compile and variant.cards == 1:
            requests.setdefault(variant.id, request)
    return [requests[variant_id] for variant_id in sorted(requests)]


@slow.MEASURED
def test_the_interval_of_a_sum_of_parts_contains_the_measured_whole_model():
    times, energies = [], []
    with packaged_database().read() as session:
        for request in packaged_variants(session)[::2]:
            query = EstimateQuery(
                "H200", launch=request.protocol.launch, tf32=request.protocol.tf32
            )
            try:
                estimate = query.estimate(session, request.variant)
            except FarmError:  # a model of another user, or without readings on this card
                continue
            if estimate.whole is None or not estimate.complete:
                continue
            cost = estimate.sum_at(estimate.level)
            time, energy = cost.time_us, cost.energy_mj
            times.append(inside(time.low, estimate.whole.time_us.value, time.high))
            if energy and energy.low is not None and estimate.whole.energy_mj:
                energies.append(inside(energy.low, estimate.whole.energy_mj.value, energy.high))
    assert len(times) > 20
    assert sum(times) / len(times) >= LEAST_SHARE
    assert sum(energies) / len(energies) >= LEAST_SHARE
