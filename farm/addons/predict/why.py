"""Why an estimated model takes its time, from readings and predictions: see
`farm.verdict.causes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from farm.addons.predict.estimate import Estimate
from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple
from farm.verdict.causes import Why, largest_causes, rates_of
from farm.verdict.cost_line import CostLine, Origin, TupleView
from farm.verdict.figures import CallCost


def why_of(
    estimate: Estimate,
    needed: Sequence[NeededTuple],
    order: Sequence[str],
    peaks: Roofline,
    half_rate: float | None,
) -> Why:
    """Explain the time of an estimate.

    Args:
        needed: the tuples of the model.
        order: the tuple id of each call, in order.
        peaks: of the card, for the dtype of the model.
        half_rate: see `farm.verdict.causes.largest_causes`.
    """
    missing = estimate.missing_by_id
    lines = []
    for one_tuple in needed:
        origin: Origin = "missing"
        cost = None
        reading = estimate.measured.get(one_tuple.operator_id)
        unread = missing.get(one_tuple.operator_id)
        if reading is not None:
            origin, cost = "reused", CallCost(reading.time_us, reading.energy_mj)
        elif unread is not None and unread.predicted is not None:
            of_call = unread.predicted.without_intervals
            origin, cost = "estimated", CallCost(of_call.time_us, of_call.energy_mj)
        subject = TupleView.of_needed(one_tuple, peaks)
        lines.append(CostLine(subject, one_tuple.all_calls, origin, cost))
    rows = rates_of(lines, peaks)
    return Why(
        job_id="",
        title=f"{estimate.title} on {estimate.card_model}, estimated (~ predicted)",
        card_model=estimate.card_model,
        rows=rows,
        causes=largest_causes(
            rows,
            [(operator_id, "normal") for operator_id in order],
            fused=estimate.variant.generates_kernels,
            half_rate=half_rate,
        ),
        peaks=peaks,
    )
