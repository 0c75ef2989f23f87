"""The classes of a verdict: comparison of sum and whole, tuples in the sum, adjustments, and
unmeasured tuples.

They are plain values without the arithmetic (`farm.verdict.aggregate`), so a stored verdict can be
shown without computing it again. In JSON every key ends with its unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from farm.types.collective import COLLECTIVES
from farm.types.fields import adapter, figure_from_json, figure_json, names_of
from farm.types.figure import Figure
from farm.types.format import gap
from farm.verdict.cost_line import CostGroup, CostLine
from farm.verdict.figures import NOT_IN_SCOPE, ReadingView, Used, Whole
from farm.verdict.kernel_audit import KernelAudit

Outcome = Literal["pass", "fail", "none"]

VERDICT_SCHEMA = 4
#: The share of tuples without a reading is an estimate. It may be wrong by this factor.
ESTIMATE_ERROR = 2.0


@dataclass(frozen=True)
class Comparison:
    """The sum of the tuples and the whole model, in one quantity such as time.

    A verdict stores sum, whole and gap, not the fields below `whole`, from which the gap is
    computed. A comparison that was read back has two of them: `representative` is False if the
    whole has no gap, and `gap_half_width` is the stored one if it does not follow from sum and
    whole.

    Attributes:
        total: the sum over all calls.
        common: the part of the sum's half-width that longer windows cannot reduce: errors that all
            tuples share, caused by neighbours in the model or by clocks at the power limit.
        between_jobs: the half-width of the gap for differences between jobs, relative to the whole.
        replay_difference: the part of the sum's half-width that is its difference from the replay
            in order. It adds to the other errors linearly.
        representative: False if the readings do not represent the model, for example on a busy
            host. Then there is no gap.
        gap_half_width: the half-width of the gap if tuples and whole were timed in turn, because
            their errors are then not independent. None: it follows from sum and whole.
    """

    total: Figure
    whole: Figure | None = None
    common: float = 0.0
    between_jobs: float = 0.0
    replay_difference: float = 0.0
    representative: bool = True
    gap_half_width: float | None = None

    @property
    def gap(self) -> Figure | None:
        """Sum / whole - 1; None without a whole, or if it would not represent the model."""
        if self.whole is None or not self.whole.value or not self.representative:
            return None
        independent_half_width = self.total.half_width - self.replay_difference
        gap = replace(self.total, half_width=independent_half_width).deviation_from(self.whole)
        if self.gap_half_width is not None:
            return replace(gap, half_width=self.gap_half_width)
        independent = math.hypot(gap.half_width, self.between_jobs)
        return replace(gap, half_width=self.replay_difference / self.whole.value + independent)

    @property
    def accuracy(self) -> float | None:
        return None if self.gap is None else 1 - abs(self.gap.value)


@dataclass(frozen=True)
class Adjustment:
    """A power-limited tuple whose steady figure is not used in the sum, and the effect of that on
    the sum.
    """

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


#: Operator type -> sums over its tuples.
Sums = Mapping[str, CostGroup]


@dataclass(frozen=True)
class Verdict:
    """The comparison of sum and whole for one round of a job, with all details that a report
    shows.
    """

    outcome: Outcome
    reasons: tuple[str, ...]  # sentences: why it does not pass, and what limits it
    target: float
    launch: str
    coverage: float | None
    time: Comparison
    energy: Comparison | None
    energy_above_idle: Comparison | None
    power: Comparison | None
    systematic_time: float  # relative, added linearly to the half-widths of the sums
    systematic_energy: float
    systematic_note: str
    parts: int
    measured: int
    wholes: tuple[Whole, ...]
    unmeasured: tuple[Unmeasured, ...]
    adjustments: tuple[Adjustment, ...]
    flags: dict[str, int]
    launch_gap_us: float | None = None  # eager time minus graph time of the whole
    kernels: KernelAudit | None = None
    context_time_us: float | None = None  # part of the sum: the effect of neighbouring operators
    context_energy_mj: float | None = None
    # share of the weights that a pass of the whole finds in the cache
    weights_in_cache: float | None = None
    # part of the sum: energies restated to the temperature of the whole
    temperature_energy_mj: float | None = None
    between_jobs_time: float = 0.0  # relative half-widths of the gaps for differences between jobs
    between_jobs_energy: float = 0.0
    # in loops, if the sum has what they add to a pass instead
    collectives_alone_us: float | None = None
    host_steps: str = ""  # what the graph of the whole does with operators for which the host waits
    asked_for: tuple[
        str, ...
    ] = ()  # the requested operator types, if these alone cannot reach the target
    asked_share: float | None = None  # share of these types in the estimated cost
    # stored, but not part of the JSON
    tuples: tuple[CostLine, ...] = field(default=(), compare=False)
    # only if `tuples` are the heaviest ones of more: sums over all
    types: Sums = field(default_factory=dict)

    @property
    def communication_us(self) -> tuple[float, float] | None:
        """The time of all collectives alone, and the exposed part: what they add to a pass. The
        rest is hidden behind computation. Without replays of the pass, the exposed part is what the
        whole takes longer than the other tuples. None without collectives or a whole."""
        summed_us = math.fsum(
            line.total_us for line in self.tuples if line.subject.short_name in COLLECTIVES
        )
        if not summed_us or self.time.whole is None:
            return None
        if self.collectives_alone_us is not None:
            return self.collectives_alone_us, summed_us
        return summed_us, min(
            summed_us, max(0.0, self.time.whole.value - self.time.total.value + summed_us)
        )

    @property
    def missed(self) -> bool:
        """True if the verdict does not pass. False if only a part of the model was requested and
        all of it measured.
        """
        partial = bool(self.asked_for) and all(
            entry.reason == NOT_IN_SCOPE for entry in self.unmeasured
        )
        return self.outcome != "pass" and not partial

    @property
    def incomplete(self) -> bool:
        """True if many tuples have no reading, and this can explain why the sum is below the whole.
        The gaps then say nothing about the readings, and no text shows them.
        """
        missing, time_gap = 1 - (self.coverage or 0.0), self.time.gap
        if time_gap is None or missing <= ESTIMATE_ERROR * (1 - self.target):
            return False
        return -ESTIMATE_ERROR * missing <= time_gap.value < 0

    def gap_text(self, comparison: Comparison | None) -> str:
        """Return the gap of a quantity for people: ``-2.5 ± 1.1 %``, or ``incomplete``."""
        if comparison and comparison.gap and self.incomplete:
            return "incomplete"
        return gap(comparison.gap if comparison else None)

    def accuracy_of(self, comparison: Comparison | None) -> float | None:
        """Return the accuracy of a quantity for people; None if the sum is incomplete."""
        return None if comparison is None or self.incomplete else comparison.accuracy

    @property
    def too_large(self) -> bool:
        """True if a sum exceeds its whole by more than the target allows."""
        gaps = (comparison.gap for comparison in (self.time, self.energy) if comparison)
        return any(gap.value > 1 - self.target for gap in gaps if gap)

    def withheld(self, reason: str) -> Verdict:
        """Return the verdict without an outcome. `reason` replaces its reasons."""
        return replace(self, outcome="none", reasons=(reason,), asked_for=(), asked_share=None)

    def columns(self) -> dict[str, Any]:
        """Return the values for the table of verdicts. The tuples are stored as one list per
        field.
        """
        details = self.to_json()
        if self.tuples:
            stored = [line.stored() for line in self.tuples]
            details["tuples"] = {name: [row[name] for row in stored] for name in stored[0]}
        return {
            "outcome": self.outcome,
            "target": self.target,
            "accuracy_time": self.time.accuracy,
            "accuracy_energy": details["accuracy_energy"],
            "coverage": self.coverage,
            "sum_time_us": self.time.total.value if self.measured else None,
            "whole_time_us": details["whole_time_us"],
            "sum_energy_mj": details["sum_energy_mj"],
            "whole_energy_mj": details["whole_energy_mj"],
            "details": details,
        }

    @property
    def comparisons(self) -> dict[str, Comparison | None]:
        """Quantity -> its comparison of sum and whole."""
        return {
            "time": self.time,
            "energy": self.energy,
            "energy_above_idle": self.energy_above_idle,
            "power": self.power,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; gaps, accuracies, shares and coverage are
        fractions.
        """
        comparisons = self.comparisons
        separate = {*comparisons, "wholes", "tuples"}
        if not self.types:
            separate.add("types")
        plain = adapter(Verdict).dump_python(self, mode="json", exclude=separate)

        data: dict[str, Any] = {"schema": VERDICT_SCHEMA}
        for name in names_of(Verdict):
            if name in comparisons:
                data |= _comparison_to_json(name, comparisons[name])
            elif name == "wholes":
                data["wholes"] = [_whole_to_json(whole) for whole in self.wholes]
            elif name in plain:
                data[name] = plain[name]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Parse the JSON of `to_json`, or stored details with tuples. Wholes have only the columns
        that are in JSON.
        """
        parsed: dict[str, Any] = dict(data)
        for name in UNITS:
            parsed[name] = _comparison_from_json(name, data)
        parsed["wholes"] = [_whole_from_json(entry) for entry in data["wholes"]]
        parsed["types"] = {name: CostGroup(**sums) for name, sums in data.get("types", {}).items()}

        columns = data.get("tuples") or {}
        lines = []
        for cells in zip(*columns.values(), strict=True):
            lines.append(CostLine.from_stored(dict(zip(columns, cells, strict=True))))
        parsed["tuples"] = lines
        return adapter(Verdict).validate_python(parsed)  # type: ignore[no-any-return]


#: Quantity -> its unit in the names of JSON keys.
UNITS = {"time": "us", "energy": "mj", "energy_above_idle": "mj", "power": "w"}


def _comparison_to_json(name: str, comparison: Comparison | None) -> dict[str, float | None]:
    total = comparison.total if comparison else None
    whole = comparison.whole if comparison else None
    gap = comparison.gap if comparison else None
    return {
        **figure_json(f"sum_{name}", UNITS[name], total),
        **figure_json(f"whole_{name}", UNITS[name], whole),
        **figure_json(f"gap_{name}", "", gap),
        f"accuracy_{name}": comparison.accuracy if comparison else None,
    }


def _comparison_from_json(name: str, data: Mapping[str, Any]) -> Comparison | None:
    total = figure_from_json(data, f"sum_{name}", UNITS[name])
    whole = figure_from_json(data, f"whole_{name}", UNITS[name])
    if total is None:
        return None

    has_gap = data[f"gap_{name}"] is not None
    comparison = Comparison(total, whole, representative=has_gap or not (whole and whole.value))
    half_width = data[f"gap_{name}_half_width"]
    if comparison.gap and not math.isclose(half_width, comparison.gap.half_width):
        return replace(comparison, gap_half_width=half_width)
    return comparison


def _whole_to_json(whole: Whole) -> dict[str, Any]:
    return {
        "card_id": whole.card_id,
        "launch": whole.launch,
        "reason": whole.reason,
        **_reading_to_json(whole.reading),
    }


def _reading_to_json(reading: ReadingView | None) -> dict[str, Any]:
    """Return the columns of a whole's reading that a verdict stores."""
    if reading is None:
        return {
            "reading_id": None,
            **figure_json("time", "us", None),
            **figure_json("energy", "mj", None),
            "idle_power_w": None,
            "sm_clock_mhz": None,
            "throttle_reasons": [],
            "flags": [],
        }
    return {
        "reading_id": reading.reading_id,
        **figure_json("time", "us", reading.time_us),
        **figure_json("energy", "mj", reading.energy_mj),
        "idle_power_w": reading.idle_power_w,
        "sm_clock_mhz": reading.sm_clock_mhz,
        "throttle_reasons": list(reading.throttle_reasons),
        "flags": list(reading.flags),
    }


def _whole_from_json(data: Mapping[str, Any]) -> Whole:
    time_us = figure_from_json(data, "time", "us")
    if time_us is None:
        return Whole(data["card_id"], None, data["reason"], data["launch"])
    reading = ReadingView(
        time_us=time_us,
        energy_mj=figure_from_json(data, "energy", "mj"),
        idle_power_w=data["idle_power_w"],
        sm_clock_mhz=data["sm_clock_mhz"],
        throttle_reasons=tuple(data["throttle_reasons"]),
        flags=tuple(data["flags"]),
        card_id=data["card_id"],
        reading_id=data["reading_id"],
    )
    return Whole(data["card_id"], reading, data["reason"], data["launch"])
