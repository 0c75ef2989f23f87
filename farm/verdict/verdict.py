"""What a verdict says: sum against whole of each quantity, what was adjusted, what is missing.

Plain values, apart from the arithmetic (`farm.verdict.aggregate`), so that a stored verdict can be shown without judging
it again. As JSON every key carries its unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from farm.verdict.audit import KernelAudit
from farm.verdict.figures import NOT_IN_SCOPE, Figure, ReadingView, Used, Whole

Outcome = Literal["pass", "fail", "none"]

VERDICT_SCHEMA = 4


@dataclass(frozen=True)
class Comparison:
    """Sum against whole of one quantity, in one unit. `gap` is relative and signed.

    `common` is the part of the total's half-width that longer windows do not narrow: what neighbours in the model, or
    clocks at the power limit, leave unsure of all tuples alike. It is not stored. Where the readings say nothing of the
    model, as on a busy host, the two are not `held` against each other: there is no gap.
    """

    total: Figure
    whole: Figure | None = None
    common: float = 0.0
    held: bool = True

    @property
    def gap(self) -> Figure | None:
        if self.whole is None or not self.whole.value or not self.held:
            return None
        ratio = self.total.value / self.whole.value
        return Figure(ratio - 1, abs(ratio) * math.hypot(self.total.relative, self.whole.relative))

    @property
    def accuracy(self) -> float | None:
        return None if self.gap is None else 1 - abs(self.gap.value)


@dataclass(frozen=True)
class Adjustment:
    """A power-limited tuple that was not taken at its steady figure, and what that changed in the sum."""

    operator_id: str
    label: str
    count: int
    used: Used
    why: str
    effect_time_us: float
    effect_energy_mj: float | None


@dataclass(frozen=True)
class Unmeasured:
    """A tuple without a reading. `share` is its share of the model's estimated cost."""

    operator_id: str
    short_name: str
    label: str
    count: int
    share: float
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Sum against whole for one job and round; everything needed to show it and to argue with it."""

    outcome: Outcome
    reasons: tuple[str, ...]  # why it is not a pass, and what limits it, in plain sentences
    target: float
    launch: str
    coverage: float | None
    time: Comparison
    energy: Comparison | None
    energy_above_idle: Comparison | None
    power: Comparison | None
    systematic_time: float  # relative, added linearly to the sums' half-widths
    systematic_energy: float
    systematic_note: str
    parts: int
    measured: int
    wholes: tuple[Whole, ...]
    unmeasured: tuple[Unmeasured, ...]
    adjustments: tuple[Adjustment, ...]
    flags: dict[str, int]
    launch_gap_us: float | None = None  # eager minus graph, of the whole
    kernels: KernelAudit | None = None  # those of the whole against those of its tuples
    context_time_us: float | None = None  # of the sum: what the tuples' places among other operators change
    context_energy_mj: float | None = None
    weights_in_cache: float | None = None  # share of the weights that a pass of the whole finds in the cache
    asked_for: tuple[str, ...] = ()  # the only operator types asked for, where these cannot reach the target
    asked_share: float | None = None  # of the estimated cost, theirs

    @property
    def missed(self) -> bool:
        """Whether it did not pass, other than because only a part of the model was asked for, all of which was read."""
        partial = bool(self.asked_for) and all(entry.reason == NOT_IN_SCOPE for entry in self.unmeasured)
        return self.outcome != "pass" and not partial

    @property
    def too_large(self) -> bool:
        """Whether a sum exceeds its whole by more than the target allows."""
        gaps = (held.gap for held in (self.time, self.energy) if held)
        return any(gap.value > 1 - self.target for gap in gaps if gap)

    def withheld(self, reason: str) -> Verdict:
        """The same figures without an outcome, for this reason alone."""
        return dataclasses.replace(self, outcome="none", reasons=(reason,), asked_for=(), asked_share=None)

    def columns(self) -> dict[str, Any]:
        """The columns of the table of verdicts."""
        energy = self.energy
        return {
            "outcome": self.outcome,
            "target": self.target,
            "accuracy_time": self.time.accuracy,
            "accuracy_energy": energy.accuracy if energy else None,
            "coverage": self.coverage,
            "sum_time_us": self.time.total.value if self.measured else None,
            "whole_time_us": self.time.whole.value if self.time.whole else None,
            "sum_energy_mj": energy.total.value if energy else None,
            "whole_energy_mj": energy.whole.value if energy and energy.whole else None,
            "details": self.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; gaps, accuracies, shares and coverage are fractions."""
        kept = _VERDICTS.dump_python(self, mode="json", exclude={*_UNITS, "wholes"})
        kept["wholes"] = [_whole_to_json(whole) for whole in self.wholes]
        data: dict[str, Any] = {"schema": VERDICT_SCHEMA}
        for name in (field.name for field in dataclasses.fields(self)):
            data |= _comparison_to_json(name, getattr(self, name)) if name in _UNITS else {name: kept[name]}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_json`; of the wholes, what a report shows of them comes back."""
        comparisons = {name: _comparison_from_json(name, data) for name in _UNITS}
        wholes = [_whole_from_json(entry) for entry in data["wholes"]]
        return _VERDICTS.validate_python({**data, **comparisons, "wholes": wholes})


_VERDICTS, _READINGS = TypeAdapter(Verdict), TypeAdapter(ReadingView)
_UNITS = {"time": "us", "energy": "mj", "energy_above_idle": "mj", "power": "w"}  # of what is compared
#: What is kept of a whole's reading.
_OF_WHOLE = (
    "reading_id",
    "time_us",
    "time_half_width_us",
    "energy_mj",
    "energy_half_width_mj",
    "idle_power_w",
    "sm_clock_mhz",
    "throttle_reasons",
    "flags",
)


def _comparison_to_json(name: str, comparison: Comparison | None) -> dict[str, float | None]:
    def pair(prefix: str, suffix: str, figure: Figure | None) -> dict[str, float | None]:
        return {
            f"{prefix}_{name}{suffix}": figure.value if figure else None,
            f"{prefix}_{name}_half_width{suffix}": figure.half_width if figure else None,
        }

    unit = _UNITS[name]
    return {
        **pair("sum", f"_{unit}", comparison.total if comparison else None),
        **pair("whole", f"_{unit}", comparison.whole if comparison else None),
        **pair("gap", "", comparison.gap if comparison else None),
        f"accuracy_{name}": comparison.accuracy if comparison else None,
    }


def _comparison_from_json(name: str, data: Mapping[str, Any]) -> Comparison | None:
    def figure(prefix: str) -> Figure | None:
        value = data[f"{prefix}_{name}_{_UNITS[name]}"]
        return None if value is None else Figure(value, data[f"{prefix}_{name}_half_width_{_UNITS[name]}"])

    total, whole = figure("sum"), figure("whole")
    held = not (whole and whole.value) or data[f"gap_{name}"] is not None
    return None if total is None else Comparison(total, whole, held=held)


def _whole_to_json(whole: Whole) -> dict[str, Any]:
    read: dict[str, Any] = {"throttle_reasons": [], "flags": []}
    if whole.reading:
        read = _READINGS.dump_python(whole.reading, mode="json", include=set(_OF_WHOLE))
    about = {"card_id": whole.card_id, "launch": whole.launch, "reason": whole.reason}
    return {**about, **{name: read.get(name) for name in _OF_WHOLE}}


def _whole_from_json(data: Mapping[str, Any]) -> Whole:
    reading = None if data["time_us"] is None else _READINGS.validate_python(data)
    return Whole(data["card_id"], reading, data["reason"], data["launch"])
