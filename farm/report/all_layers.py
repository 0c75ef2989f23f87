"""What all layers of a model come to, from the readings of some of them (`--layers`): a sum without a whole.

The calls are the whole model's, taken apart when the job was planned; what each costs is what the job's own sum takes of its
readings, so that the gap of the layers that ran tells how good this sum is, too.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session

from farm.errors import FarmError
from farm.estimate.estimate import Wanted, stored_tuples
from farm.estimate.per_token import PerToken, per_token
from farm.models import catalog
from farm.operators.roofline import Roofline
from farm.store import tables
from farm.types.protocol import Variant
from farm.types.request import Request
from farm.verdict.aggregate import aggregate
from farm.verdict.composing import Evidence
from farm.verdict.figures import Figure, Part
from farm.verdict.parts import canaries_of, roofline_for


@dataclass(frozen=True)
class LackingTuple:
    """A tuple of the whole model that no reading of the job covers. `share` is of the model's estimated cost."""

    operator_id: str
    label: str
    calls: int
    share: float


@dataclass(frozen=True)
class AllLayers:
    """One pass of the whole model, in µs and mJ with half-widths of the 95 % interval, over the part that readings cover."""

    variant: Variant
    layers: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost
    time: Figure | None  # None: no reading covers any of it
    energy: Figure | None
    lacking: tuple[LackingTuple, ...]

    @property
    def per_token(self) -> PerToken:
        """Where readings cover all of it."""
        complete = self.covered_tuples == self.tuples
        return per_token(self.variant, *((self.time, self.energy) if complete else (None, None)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions."""
        return {
            "layers": self.layers,
            "time_us": self.time.value if self.time else None,
            "time_half_width_us": self.time.half_width if self.time else None,
            "energy_mj": self.energy.value if self.energy else None,
            "energy_half_width_mj": self.energy.half_width if self.energy else None,
            "tuples": self.tuples,
            "covered_tuples": self.covered_tuples,
            "covered": self.coverage,
            "lacking": [dataclasses.asdict(entry) for entry in self.lacking],
            **dataclasses.asdict(self.per_token),
        }


def all_layers(
    session: Session, job: tables.Job, capture: tables.Capture | None, evidence: Evidence
) -> AllLayers | None:
    """All layers of the model of which a job reads some; None where it reads all, or nobody has taken the whole model apart.

    Args:
        capture: that the job goes by.
        evidence: what it has read.
    """
    request = Request.from_json(job.request)
    if request.variant is None or not request.variant.layers or capture is None:
        return None
    whole = dataclasses.replace(request.variant, layers=0)
    wanted = stored_tuples(session, whole, capture.device_type, capture.launch)
    if not wanted:
        return None
    try:
        layers = catalog.find(whole.model).depth
    except FarmError:  # a model of another farm's
        return None
    read: dict[str, list[Part]] = defaultdict(list)
    for part in evidence.parts:
        read[part.operator_id].append(part)
    roofline = roofline_for(session, job, evidence.items)
    parts = [part for one in wanted for part in _called(one, read[one.operator_id], roofline)]
    # With the wholes of the layers that ran: they tell in which state the card runs the model.
    canaries = canaries_of(evidence.items, evidence.readings)
    summed = aggregate(parts, evidence.wholes, canaries, target=0.95, launch=request.protocol.launch)
    lacking = tuple(LackingTuple(one.operator_id, one.label, one.count, one.share) for one in summed.unmeasured)
    return AllLayers(
        variant=whole,
        layers=layers,
        tuples=len(wanted),
        covered_tuples=len(wanted) - len({one.operator_id for one in lacking}),
        coverage=summed.coverage or 0.0,
        time=summed.time.total if summed.measured else None,
        energy=summed.energy.total if summed.energy else None,
        lacking=lacking,
    )


def _called(one: Wanted, parts: Sequence[Part], roofline: Roofline) -> Iterator[Part]:
    """A tuple as often as the whole model calls it, in the classes of data that the layers which ran have, in their proportion."""
    calls = sum(one.calls.values())
    if not parts:
        estimated_us = roofline.estimate_us(one.flops, one.bytes_moved)
        yield Part(
            one.operator_id, one.short_name, one.label, calls, one.flops, one.bytes_moved, estimated_us=estimated_us
        )
    passed, given, of = 0, 0, sum(part.count for part in parts)
    for part in parts:
        passed += part.count
        upto = calls * passed // of
        if upto > given:
            yield dataclasses.replace(part, count=upto - given)
        given = upto
