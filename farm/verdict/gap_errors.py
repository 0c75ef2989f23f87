"""The errors of a sum and of its gap that the readings of the tuples do not contain.

`errors_of_gap` begins with the scatter of the tuples and the errors that they share, and applies
`CORRECTIONS_OF_GAPS` in order. None of them changes the sum: they change its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from farm.types.figure import Figure
from farm.types.measured_constants import MEASURED

#: Half-width of a gap for what differs between jobs and no job can see itself, relative to the
#: whole.
BETWEEN_JOBS = {
    "time": MEASURED["between_jobs_time"].value,
    "energy": MEASURED["between_jobs_energy"].value,
    "power": MEASURED["between_jobs_power"].value,
}


@dataclass(frozen=True)
class ErrorSources:
    """What a job shows about the sources of its sums' errors.

    Attributes:
        among_others: True if a tuple was timed among other operators.
        addresses: the relative half-width of the time for the addresses of the data, from replays
            at several addresses; None if it was not measured.
        canaries: quantity -> the largest relative deviation of a canary from its mean.
    """

    among_others: bool
    addresses: float | None
    canaries: Mapping[str, float]

    def between_jobs(self, quantity: str) -> float:
        """Return the relative half-width for what no reading shows: that of the addresses, if they
        were measured, else the differences between jobs.
        """
        if self.addresses is not None:
            return self.addresses
        # The differences were measured for tuples that are timed among other operators.
        return BETWEEN_JOBS[quantity] if self.among_others else 0.0


@dataclass(frozen=True)
class GapErrors:
    """The errors of one sum, while the corrections apply.

    Attributes:
        quantity: ``time`` or ``energy``.
        total: the sum, in the unit of the quantity.
        replay: the same quantity of the replay of all calls in order; None if it has none.
        independent: half-width of the errors that are independent of each other, in the same unit.
        replay_difference: the known difference from the replay. It adds to the other errors
            linearly.
        between_jobs: half-width of the gap for what no reading shows, relative to the whole.
    """

    quantity: str
    total: float
    replay: Figure | None
    independent: float
    replay_difference: float = 0.0
    between_jobs: float = 0.0

    @property
    def half_width(self) -> float:
        """The half-width of the sum."""
        return self.replay_difference + self.independent


class CorrectionOfGaps(Protocol):
    """One error of a sum or of its gap. `correct` is called only if `applies` is True."""

    def applies(self, errors: GapErrors, sources: ErrorSources) -> bool: ...

    def correct(self, errors: GapErrors, sources: ErrorSources) -> GapErrors: ...


def errors_of_gap(errors: GapErrors, sources: ErrorSources) -> GapErrors:
    """Apply the corrections to the scatter and the common errors of a sum."""
    for correction in CORRECTIONS_OF_GAPS:
        if correction.applies(errors, sources):
            errors = correction.correct(errors, sources)
    return errors


class BetweenJobs:
    """The gaps of one model differ from job to job by more than the stated errors: other cards,
    other tensors, another state of the card.

    Evidence: 27 models with two to five jobs each on H200s and H100s
    (`benchmarks/interval_coverage.py`). These tuples were timed among other operators."""

    def applies(self, errors: GapErrors, sources: ErrorSources) -> bool:
        return sources.among_others or sources.addresses is not None

    def correct(self, errors: GapErrors, sources: ErrorSources) -> GapErrors:
        return replace(errors, between_jobs=BETWEEN_JOBS[errors.quantity])


class OrderReplay:
    """A replay of all calls in order has neither the scatter of the tuples nor the errors of their
    neighbours. So the error of a sum is its difference from the replay, and that of the replay.

    The differences between jobs contain the difference from the replay. Evidence: the replays and
    wholes of 19 models (docs/design/interval-coverage.md)."""

    def applies(self, errors: GapErrors, sources: ErrorSources) -> bool:
        return errors.replay is not None

    def correct(self, errors: GapErrors, sources: ErrorSources) -> GapErrors:
        assert errors.replay
        difference = abs(errors.total - errors.replay.value)
        return replace(errors, independent=errors.replay.half_width + difference)


class Addresses:
    """A replay at several addresses shows how much the time depends on the addresses of the data.
    With it, the replay shows all of the rest, so nothing else differs between jobs. The difference
    from the replay then adds linearly to all other errors of the gap.

    Half of the square of this error belongs to the replay, the other half to the whole. The error
    of the energy is assumed to be proportional. Evidence:
    docs/design/addresses.md."""

    def applies(self, errors: GapErrors, sources: ErrorSources) -> bool:
        return sources.addresses is not None and errors.replay is not None

    def correct(self, errors: GapErrors, sources: ErrorSources) -> GapErrors:
        assert sources.addresses is not None
        assert errors.replay
        between_jobs = sources.addresses / math.sqrt(2)
        return replace(
            errors,
            independent=math.hypot(errors.replay.half_width, between_jobs * errors.total),
            replay_difference=abs(errors.total - errors.replay.value),
            between_jobs=between_jobs,
        )


class Canaries:
    """The card changes during a job, and cards differ: the readings of a reference tuple show by
    how much. The error is common to all tuples. Evidence: the canaries of the job itself."""

    def applies(self, errors: GapErrors, sources: ErrorSources) -> bool:
        return bool(sources.canaries[errors.quantity])

    def correct(self, errors: GapErrors, sources: ErrorSources) -> GapErrors:
        systematic = sources.canaries[errors.quantity] * errors.total
        return replace(errors, independent=math.hypot(errors.independent, systematic))


#: In the order in which they apply.
CORRECTIONS_OF_GAPS: tuple[CorrectionOfGaps, ...] = (
    BetweenJobs(),
    OrderReplay(),
    Addresses(),
    Canaries(),
)
