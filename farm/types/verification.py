"""The comparison of a capture with a pass of its model on a card (`farm.benchmark.verification`).
It is stored with the capture, as JSON. None means "not examined"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from farm.types.stored import plain, stored_fields


@dataclass(frozen=True)
class Launches:
    """One kernel in one unobserved pass of a whole model: its launches and their total time."""

    count: int
    time_us: float


@dataclass(frozen=True)
class InModelTimes:
    """The time of each call in the running model: the median over several passes."""

    # by tuple id; None: kernels of a call unknown
    calls_us: Mapping[str, tuple[float | None, ...]] | None = None
    # kernels (the sum of a call's kernel times, without gaps) or ranges (wall-clock time)
    source: str | None = None
    passes: int | None = None
    # share of the kernel time that was assigned to calls, 0 to 1; 1 for ranges
    attributed_share: float | None = None
    sum_us: float | None = None  # sum over the calls with known times


@dataclass(frozen=True)
class OtherCalls:
    """A tuple whose number of calls differs between an eager pass and the measured run."""

    operator_id: str
    label: str
    launched: int  # calls in the measured run
    eager: int


@dataclass(frozen=True)
class Eagerly:
    """The differences between an eager pass and the measured run."""

    operators: tuple[OtherCalls, ...] = ()
    # Name -> launches in the measured run and eagerly, if they differ. Older records: {"launched":
    # 0, "eager": 12}.
    kernels: Mapping[str, tuple[int, int] | Mapping[str, int]] = field(default_factory=dict)
    kernel_time_us: float | None = None  # of all kernels of a pass in the measured run
    eager_kernel_time_us: float | None = None


@dataclass(frozen=True)
class Verification:
    """The comparison of a capture with a pass of the model on a card. None: not examined."""

    # of the examined run, graph or eager; None in old records, which are eager
    launch: str | None = None
    not_captured: str | None = None  # why the run is eager although a graph was requested
    eagerly: Eagerly | None = None  # the differences of an eager pass; None if there are none
    # True if prediction and observation agree and the observation changed nothing
    matches: bool | None = None
    # differences of the observed from the unobserved pass, in words
    observer_effect: tuple[str, ...] | None = None
    missing: Mapping[str, int] | None = None  # tuple id -> predicted calls that did not occur
    unexpected: Mapping[str, int] | None = None  # tuple id -> calls that were not predicted
    # tuple id -> how its rebuilt operator differs from the model's call
    mismatches: Mapping[str, str] | None = None
    gaps: tuple[str, ...] | None = None  # in the observed capture, in words
    overlaps: tuple[str, ...] | None = None
    unobserved_kernels: int | None = None  # number of kernels launched in the unobserved pass
    # name -> launches, for the heaviest of these kernels
    kernels: Mapping[str, Launches] | None = None
    # tuple id -> kernel -> launches, rebuilt tuple
    tuple_kernels: Mapping[str, Mapping[str, int]] | None = None
    in_model: InModelTimes | None = None  # the time of each call in the running model
    # the numeric flags (tf32 ...), which decide kernels and times
    numerics: Mapping[str, bool] | None = None
    # from the prediction, in words; only some of `difference_count`
    differences: tuple[str, ...] | None = None
    difference_count: int | None = None
    # the capture on the card, as JSON, if it may replace the prediction; stored as a capture
    observed: Mapping[str, Any] | None = None
    card: str | None = None  # the id of the card
    read_at_s: float | None = None  # when it was stored, by the database's clock, in s since 1970
    simulated: bool | None = None  # True if no model ran
    other: Mapping[str, Any] = field(default_factory=dict)  # keys of other versions

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: field name -> value, without fields that are None."""
        data: dict[str, Any] = dict(self.other)
        for name, value in vars(self).items():
            if name != "other" and value is not None:
                data[name] = plain(value)
        if self.in_model is not None:
            items = vars(self.in_model).items()
            data["in_model"] = {name: value for name, value in items if value is not None}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Parse JSON of any version. Missing keys become None; unknown keys are stored in `other`.
        Raises ValueError for an incomplete record.
        """
        data = data or {}
        values = {}
        for entry in stored_fields(cls):  # type: ignore[arg-type]
            if entry.name in data and entry.name != "other":
                values[entry.name] = entry.parse(data)
        other = {name: value for name, value in data.items() if name not in values}
        return cls(**values, other=other)

    def ran_as(self, request: Mapping[str, Any]) -> bool:
        """True if the pass had the numeric flags of a job's request."""
        protocol = request.get("protocol") or {}
        return all(
            protocol.get(name, False) == value for name, value in (self.numerics or {}).items()
        )
