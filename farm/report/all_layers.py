"""The cost of a complete model, extrapolated from a job that measured some of its layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from farm.errors import FarmError
from farm.store import tables
from farm.store.captures import plain_ids, stored_tuples
from farm.store.database import by_key
from farm.types.fields import cost_json
from farm.types.figure import Figure, PassCost
from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.aggregate import aggregate
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.expectation import Quantity, expected_whole
from farm.verdict.figures import PerToken
from farm.verdict.job_results import JobResults
from farm.verdict.verdict import Comparison, Unmeasured, Verdict


@dataclass(frozen=True)
class AllLayers:
    """The estimated cost of one pass of the complete model."""

    variant: Variant
    layers: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost
    cost: PassCost | None  # None: there are no readings
    lacking: tuple[Unmeasured, ...]

    @property
    def per_token(self) -> PerToken:
        """Cost per token; unknown (None) unless readings cover all tuples."""
        if self.cost is None or self.covered_tuples < self.tuples:
            return PerToken.of(self.variant, None, None)
        return PerToken.of(self.variant, self.cost.time_us, self.cost.energy_mj)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions."""
        return {
            "layers": self.layers,
            **cost_json(self.cost),
            "tuples": self.tuples,
            "covered_tuples": self.covered_tuples,
            "covered": self.coverage,
            "lacking": [
                {
                    "operator_id": line.operator_id,
                    "label": line.label,
                    "calls": line.count,
                    "share": line.share,
                }
                for line in self.lacking
            ],
            **asdict(self.per_token),
        }


def all_layers(
    results: JobResults, variant: Variant, capture: tables.Capture, measured: Verdict
) -> AllLayers | None:
    """Estimate all layers of a model from the readings of some of them (`--layers`): a sum without
    a whole.

    The cost of a call is its cost in the job's own sum. Layers whose values nobody has recorded
    (the routing of experts) cost as much as those of the job. The sum of all layers may be wrong by
    as much as the sum of the measured ones, so its interval contains the gap of `measured`, the
    verdict of the measured layers.

    Returns:
        None if there is no capture of the complete model, which is made when the job is planned.
    """
    from farm.models import catalog

    whole = replace(variant, layers=0)
    needed = stored_tuples(
        results.session, whole, capture.device_type, capture.launch, capture.card_model
    )
    if not needed:
        return None
    try:
        layers = catalog.find(whole.model).depth
    except FarmError:  # a model of another farm
        return None
    plain = {} if results.capture_id is None else plain_ids(results.session, results.capture_id)
    exact = by_key(lambda part: part.subject.operator_id, results.parts)
    alike = by_key(
        lambda part: plain.get(part.subject.operator_id, part.subject.operator_id), results.parts
    )
    measured_parts = {**alike, **exact}
    parts: list[CostLine] = []
    for entry in needed:
        of_tuple = measured_parts.get(entry.operator_id, ())
        parts += _extrapolated(entry, of_tuple, results.roofline)
    # The wholes of the measured layers show at which clocks the card runs the model. Their replays
    # have other calls.
    wholes = [whole_model.without_replay() for whole_model in results.wholes]
    summed = aggregate(
        parts,
        wholes,
        results.canaries,
        target=0.95,
        launch=results.protocol.launch,
        cards=results.checked_cards,
    )
    time_us = _of_complete_model(summed.time, measured.time, "time")
    energy_mj = _of_complete_model(summed.energy, measured.energy, "energy")
    cost = None
    if summed.measured and time_us is not None:
        cost = PassCost(time_us, energy_mj)
    return AllLayers(
        variant=whole,
        layers=layers,
        tuples=len(needed),
        covered_tuples=len(needed) - len({entry.operator_id for entry in summed.unmeasured}),
        coverage=summed.coverage or 0.0,
        cost=cost,
        lacking=summed.unmeasured,
    )


def _of_complete_model(
    summed: Comparison | None, measured: Comparison | None, quantity: Quantity
) -> Figure | None:
    """Return the sum over all layers with an interval that contains the gap of the measured
    layers.
    """
    if summed is None:
        return None
    gap = measured.gap if measured else None
    return expected_whole(summed.total, quantity, gap)


def _extrapolated(
    needed: NeededTuple, parts: Sequence[CostLine], roofline: Roofline
) -> Iterator[CostLine]:
    """Yield parts of a tuple with the calls of the complete model, in the data classes of the
    measured layers.
    """
    if not parts:
        yield CostLine(TupleView.of_needed(needed, roofline), needed.all_calls, "missing")
    ends = [0, *itertools.accumulate(part.count for part in parts)]
    upto = [needed.all_calls * end // (ends[-1] or 1) for end in ends]
    for part, begin, end in zip(parts, upto, upto[1:], strict=False):
        if end > begin:
            yield replace(part, count=end - begin)
