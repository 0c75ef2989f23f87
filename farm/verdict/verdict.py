"""What a verdict says: sum against whole of each quantity, what was adjusted, what is missing.

Plain values, apart from the arithmetic (`farm.verdict.aggregate`), so that a stored verdict can be shown without judging
it again. As JSON every key carries its unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from farm.verdict.audit import KernelAudit
from farm.verdict.figures import NOT_IN_SCOPE, Figure, ReadingView, Used, Whole

Outcome = Literal["pass", "fail", "none"]

VERDICT_SCHEMA = 3


@dataclass(frozen=True)
class Comparison:
    """Sum against whole of one quantity, in one unit. `gap` is relative and signed.

    `common` is the part of the total's half-width that longer windows do not narrow: what neighbours in the model, or
    clocks at the power limit, leave unsure of all tuples alike. It is not stored.
    """

    total: Figure
    whole: Figure | None = None
    common: float = 0.0

    @property
    def gap(self) -> Figure | None:
        if self.whole is None or not self.whole.value:
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
    target: float
    launch: str
    reasons: tuple[str, ...]  # why it is not a pass, and what limits it, in plain sentences
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

    def withheld(self, reason: str) -> Self:
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
        return {
            "schema": VERDICT_SCHEMA,
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "target": self.target,
            "launch": self.launch,
            "coverage": self.coverage,
            **_comparison_to_json("time", "us", self.time),
            **_comparison_to_json("energy", "mj", self.energy),
            **_comparison_to_json("energy_above_idle", "mj", self.energy_above_idle),
            **_comparison_to_json("power", "w", self.power),
            "systematic_time": self.systematic_time,
            "systematic_energy": self.systematic_energy,
            "systematic_note": self.systematic_note,
            "parts": self.parts,
            "measured": self.measured,
            "wholes": [_whole_to_json(whole) for whole in self.wholes],
            "unmeasured": [dataclasses.asdict(entry) for entry in self.unmeasured],
            "adjustments": [dataclasses.asdict(entry) for entry in self.adjustments],
            "flags": dict(self.flags),
            "launch_gap_us": self.launch_gap_us,
            "kernels": self.kernels.to_json() if self.kernels else None,
            "context_time_us": self.context_time_us,
            "context_energy_mj": self.context_energy_mj,
            "weights_in_cache": self.weights_in_cache,
            "asked_for": list(self.asked_for),
            "asked_share": self.asked_share,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; of the wholes, what a report shows of them comes back."""
        time = _comparison_from_json("time", "us", data)
        assert time is not None, "a stored verdict has a sum, if only an empty one"
        plain = ("outcome", "target", "launch", "coverage", "systematic_time", "systematic_energy", "systematic_note")
        return cls(
            **{name: data[name] for name in (*plain, "parts", "measured", "launch_gap_us")},
            reasons=tuple(data["reasons"]),
            time=time,
            energy=_comparison_from_json("energy", "mj", data),
            energy_above_idle=_comparison_from_json("energy_above_idle", "mj", data),
            power=_comparison_from_json("power", "w", data),
            wholes=tuple(_whole_from_json(entry) for entry in data["wholes"]),
            unmeasured=tuple(Unmeasured(**entry) for entry in data["unmeasured"]),
            adjustments=tuple(Adjustment(**entry) for entry in data["adjustments"]),
            flags=dict(data["flags"]),
            kernels=KernelAudit.from_json(data["kernels"]) if data.get("kernels") else None,
            context_time_us=data.get("context_time_us"),
            context_energy_mj=data.get("context_energy_mj"),
            weights_in_cache=data.get("weights_in_cache"),
            asked_for=tuple(data.get("asked_for", ())),
            asked_share=data.get("asked_share"),
        )


def _comparison_to_json(name: str, unit: str, comparison: Comparison | None) -> dict[str, float | None]:
    def pair(prefix: str, suffix: str, figure: Figure | None) -> dict[str, float | None]:
        return {
            f"{prefix}_{name}{suffix}": figure.value if figure else None,
            f"{prefix}_{name}_half_width{suffix}": figure.half_width if figure else None,
        }

    return {
        **pair("sum", f"_{unit}", comparison.total if comparison else None),
        **pair("whole", f"_{unit}", comparison.whole if comparison else None),
        **pair("gap", "", comparison.gap if comparison else None),
        f"accuracy_{name}": comparison.accuracy if comparison else None,
    }


def _comparison_from_json(name: str, unit: str, data: Mapping[str, Any]) -> Comparison | None:
    def figure(prefix: str) -> Figure | None:
        value = data[f"{prefix}_{name}_{unit}"]
        return None if value is None else Figure(value, data[f"{prefix}_{name}_half_width_{unit}"])

    total = figure("sum")
    return None if total is None else Comparison(total, figure("whole"))


def _whole_to_json(whole: Whole) -> dict[str, Any]:
    reading = whole.reading
    return {
        "card_id": whole.card_id,
        "launch": whole.launch,
        "reason": whole.reason,
        "reading_id": reading.reading_id if reading else None,
        "time_us": reading.time_us if reading else None,
        "time_half_width_us": reading.time_half_width_us if reading else None,
        "energy_mj": reading.energy_mj if reading else None,
        "energy_half_width_mj": reading.energy_half_width_mj if reading else None,
        "idle_power_w": reading.idle_power_w if reading else None,
        "sm_clock_mhz": reading.sm_clock_mhz if reading else None,
        "throttle_reasons": list(reading.throttle_reasons) if reading else [],
        "flags": list(reading.flags) if reading else [],
    }


def _whole_from_json(data: Mapping[str, Any]) -> Whole:
    reading = None
    if data["time_us"] is not None:
        names = ("time_us", "time_half_width_us", "energy_mj", "energy_half_width_mj", "idle_power_w", "sm_clock_mhz")
        reading = ReadingView(
            **{name: data[name] for name in names},
            throttle_reasons=tuple(data["throttle_reasons"]),
            flags=tuple(data["flags"]),
            card_id=data["card_id"],
            reading_id=data["reading_id"] or "",
        )
    return Whole(data["card_id"], reading, data["reason"], data["launch"])
