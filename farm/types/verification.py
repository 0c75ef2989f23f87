"""What verifying a whole on a card found (`farm.benchmark.verification`): is what runs there what was predicted?

It is stored beside the capture as JSON, which is made and read here alone. None stands for "not looked at".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from farm.types.reading import known


@dataclass(frozen=True)
class Launches:
    """One kernel in one unobserved pass of a whole: how often it was launched, and what that took together."""

    count: int
    time_us: float


@dataclass(frozen=True)
class InModelTimes:
    """What each call took where it stands, between its neighbours in the running model: the median over some passes.

    Attributes:
        calls_us: tuple id -> the times of its calls, in order; None where a call's kernels could not be told.
        source: ``kernels`` (a call's kernels together, the gaps between them left out) or ``ranges`` (by the clock).
        passes: over which the median was taken.
        attributed_share: of the kernels' time, what lies in some call, 0 to 1; 1 for ranges.
        sum_us: of the calls whose times are known.
    """

    calls_us: Mapping[str, tuple[float | None, ...]] | None = None
    source: str | None = None
    passes: int | None = None
    attributed_share: float | None = None
    sum_us: float | None = None


@dataclass(frozen=True)
class OtherCalls:
    """A tuple that an eager pass calls more or less often than the run that is measured."""

    operator_id: str
    label: str
    launched: int  # calls in the run that is measured
    eager: int


@dataclass(frozen=True)
class Eagerly:
    """What an eagerly launched pass runs otherwise than the run that is measured.

    Attributes:
        kernels: name -> launches in the run that is measured, and in the eager pass, where they differ.
        kernel_time_us, eager_kernel_time_us: of all kernels of a pass.
    """

    operators: tuple[OtherCalls, ...] = ()
    kernels: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kernel_time_us: float | None = None
    eager_kernel_time_us: float | None = None


@dataclass(frozen=True)
class Verification:
    """A capture held against the pass of the model on a card.

    Attributes:
        launch: of the run that was looked at, ``graph`` or ``eager``; None of old, when it was eager.
        not_captured: why that is an eager one where a graph was asked for.
        eagerly: what an eager pass runs otherwise; None where it runs the same.
        matches: prediction and observation agree, and observing changed nothing.
        observer_effect: what ran only observed, or only unobserved, in words.
        missing: tuple id -> calls that were predicted and did not come.
        unexpected: tuple id -> calls that came and were not predicted.
        gaps, overlaps: of the observed capture, in words.
        unobserved_kernels: kernels launched in the unobserved pass.
        kernels: those of the unobserved pass by name, the heaviest.
        tuple_kernels: tuple id -> kernel -> launches in one pass of the rebuilt tuple.
        in_model: what each call took in the running model.
        numerics: the flags under which kernels were chosen and calls timed (``tf32`` ...), on or off.
        differences: all of the above that speaks against the prediction, in words; some of `difference_count`.
        card: the id of the card.
        read_at_s: when it was kept, by the database's clock, in seconds since 1970.
        simulated: no model ran.
        other: what this version does not know, as it was written.
    """

    launch: str | None = None
    not_captured: str | None = None
    eagerly: Eagerly | None = None
    matches: bool | None = None
    observer_effect: tuple[str, ...] | None = None
    missing: Mapping[str, int] | None = None
    unexpected: Mapping[str, int] | None = None
    gaps: tuple[str, ...] | None = None
    overlaps: tuple[str, ...] | None = None
    unobserved_kernels: int | None = None
    kernels: Mapping[str, Launches] | None = None
    tuple_kernels: Mapping[str, Mapping[str, int]] | None = None
    in_model: InModelTimes | None = None
    numerics: Mapping[str, bool] | None = None
    differences: tuple[str, ...] | None = None
    difference_count: int | None = None
    card: str | None = None
    read_at_s: float | None = None
    simulated: bool | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    def without_the_card(self) -> Self:
        """What holds on any card: kernels and times are a matter of its model, and of the numeric flags."""
        return dataclasses.replace(self, kernels=None, tuple_kernels=None, in_model=None, eagerly=None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON under the fields' names; what was not looked at is not there."""
        data = {**self.other, **_found(self)}
        if self.kernels is not None:
            data["kernels"] = {name: dataclasses.asdict(launches) for name, launches in self.kernels.items()}
        if self.eagerly is not None:
            data["eagerly"] = dataclasses.asdict(self.eagerly)
        if self.in_model is not None:
            data["in_model"] = _found(self.in_model)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Of any version: keys that are missing are None, those that are not known stay in `other`."""
        data = data or {}
        values = known(cls, data)
        if kernels := values.get("kernels"):
            values["kernels"] = {
                name: Launches(int(one["count"]), float(one["time_us"])) for name, one in kernels.items()
            }
        if eagerly := values.get("eagerly"):
            operators = tuple(OtherCalls(**known(OtherCalls, one)) for one in eagerly.get("operators", ()))
            kernels = {name: tuple(counts) for name, counts in eagerly.get("kernels", {}).items()}
            values["eagerly"] = Eagerly(**{**known(Eagerly, eagerly), "operators": operators, "kernels": kernels})
        if "in_model" in values:
            values["in_model"] = _in_model(values["in_model"])
        return cls(**values, other={name: value for name, value in data.items() if name not in values})


def _found(one: Verification | InModelTimes) -> dict[str, Any]:
    """The fields that hold something."""
    values = {entry.name: getattr(one, entry.name) for entry in dataclasses.fields(one) if entry.name != "other"}
    return {name: value for name, value in values.items() if value is not None}


def _in_model(data: Mapping[str, Any] | None) -> InModelTimes | None:
    if not data:
        return None
    calls_us = {tuple_id: tuple(times_us) for tuple_id, times_us in (data.get("calls_us") or {}).items()}
    return InModelTimes(**{**known(InModelTimes, data), "calls_us": calls_us})
