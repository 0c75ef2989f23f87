"""The estimated cost of a model on a card: figures with intervals, what they are made of, and JSON.

`farm.addons.predict.estimating` makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farm.addons.predict.floor import IdlePower, idle_energy_mj
from farm.addons.predict.stored_predictor import CallPrediction, PredictedCost, PredictedValue
from farm.errors import FarmError, UsageError
from farm.requests.memory import MemoryNeed, pass_memory
from farm.requests.partial_request import title_of
from farm.types.fields import figure_json
from farm.types.figure import Figure, PassCost, value_of
from farm.types.format import ENERGY, TIME, quantity
from farm.types.protocol import Protocol
from farm.types.software import Software
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.expectation import Quantity, expected_whole
from farm.verdict.figures import PerToken
from farm.verdict.token_floor import TokenFloor, implementation_of

LEVEL, PREDICTED_LEVEL = 0.95, 0.90  # levels of the intervals of readings and of predictions
# factor: half-width of a 95 % interval -> half-width of the 90 % interval
_NARROWER = 1.645 / 1.960
_UNITS = {"time": "us", "energy": "mj"}
#: Fields that the JSON leaves out, or has in another form.
_OTHER_JSON = frozenset(
    (
        "readings",
        "whole",
        "ranks",
        "predicted",
        "total",
        "measured",
        "oldest_age_s",
        "gain",
        "largest_call_bytes",
        "least_us",
        "idle_power",
    )
)
# card time to measure a tuple if the database has no reading: the median on an H200
SECONDS_A_TUPLE = 1.4


@dataclass(frozen=True)
class MissingTuple:
    """A tuple without a reading."""

    needed: NeededTuple
    share: float  # of the model's estimated cost
    predicted: CallPrediction | None = None  # the cost of one call; None without a predictor

    @property
    def predicted_us(self) -> float | None:
        """The predicted time of one call."""
        return self.predicted.time_us.value if self.predicted else None

    @property
    def all_calls_us(self) -> float:
        """The predicted time of all calls; 0 without a predictor."""
        return self.needed.all_calls * (self.predicted_us or 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names. The ends of the interval are those of 90 %."""
        predicted = dict.fromkeys(
            ("predicted_us", "predicted_low_us", "predicted_high_us", "predicted_mj")
        )
        marks: dict[str, bool | None] = {"known": None, "far": None}
        if self.predicted is not None:
            predicted = {
                **interval_json("predicted", "us", self.predicted.time_us),
                "predicted_mj": value_of(self.predicted.without_intervals.energy_mj),
            }
            marks = {"known": self.predicted.known, "far": self.predicted.far}
        return {
            "operator_id": self.needed.operator_id,
            "operator": self.needed.short_name,
            "label": self.needed.label,
            "calls": self.needed.all_calls,
            "share": self.share,
            **predicted,
            **marks,
            "mismatch": self.needed.mismatch,
        }


@dataclass(frozen=True)
class CompileGain:
    """What a predicted compiled model is compared with.

    Attributes:
        roofline_us: of all kernels of the compiled model. Kernels whose bytes are in the card's
            cache may be faster.
        eager: one pass of the model without --compile; None: not estimated.
        eager_is_measured: whether a card has measured the whole model without --compile.
    """

    roofline_us: float
    eager: PredictedCost | None = None
    eager_is_measured: bool = False

    def over(self, eager: Estimate) -> CompileGain:
        """The same, with the estimate of the model without --compile."""
        cost = PredictedCost(eager.time, eager.energy)
        return CompileGain(self.roofline_us, cost, eager.whole is not None)

    def faster(self, compiled: PredictedValue) -> PredictedValue | None:
        """The time without --compile over the time with it; None if one of them is unknown or a
        lower bound, which has no interval. Its own interval is too wide, because the errors of both
        times have common causes."""
        if self.eager is None or not compiled.low or not compiled.high:
            return None
        eager = self.eager.time_us
        factor = eager.value / compiled.value
        if eager.low is None or eager.high is None:
            return PredictedValue(factor)
        return PredictedValue(factor, eager.low / compiled.high, eager.high / compiled.low)

    def to_json(self, compiled: PredictedValue) -> dict[str, Any]:
        """Plain JSON with units in the key names."""
        eager = self.eager
        time_us, energy_mj = (eager.time_us, eager.energy_mj) if eager else (None, None)
        return {
            **interval_json("eager_time", "us", time_us),
            **interval_json("eager_energy", "mj", energy_mj),
            "eager_is_measured": self.eager_is_measured,
            "roofline_us": self.roofline_us,
            **interval_json("faster", "times", self.faster(compiled)),
        }


@dataclass(frozen=True)
class Estimate:
    """The cost of one pass of a model. Each `Figure` has a 95 % interval, each `PredictedValue` a
    90 % interval.

    `time` and `energy` are the cost of the whole model.
    """

    variant: Variant
    card_model: str
    protocol: Protocol
    software: Software
    method: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost that has readings
    readings: PassCost  # the sum of the readings
    whole: PassCost | None  # the reading of the whole model, if there is one
    missing: tuple[MissingTuple, ...]  # largest share first
    measuring_rest_s: float  # card time to measure the missing tuples
    other_data_calls: int  # calls that use a reading of another data class
    flags: Mapping[str, int]
    origins: Mapping[str, int]  # farm ("": this farm) -> number of readings
    oldest_at_s: float | None
    notes: tuple[str, ...]
    measured: Mapping[str, PassCost]  # tuple id -> cost of one call alone; not in the JSON
    predictor: str = ""
    predicted: PredictedCost | None = None  # of the missing tuples, if there is a predictor
    total: PredictedCost | None = None  # readings and predictions together
    narrowing: tuple[
        str, ...
    ] = ()  # ids of missing tuples; the one that would narrow the total most is first
    # what predictions from another card model are based on
    transfer: Mapping[str, Any] | None = None
    # time of all collectives alone, readings and predictions; part of `time`
    communication_us: float = 0.0
    # of a split model: what calls take longer in the ranks; part of `time`
    ranks: PassCost | None = None
    # what the whole model takes longer than its other tuples; None: not measured
    exposed_us: float | None = None
    incomplete_reason: str = ""  # why `time` is only a part or a lower bound; "" if it is complete
    memory: MemoryNeed | None = None  # None: the memory of the card or the model is unknown
    largest_call_bytes: int = 0  # the tensors of the largest call, without its weights
    # the doubtful readings of missing tuples and, without another one, of the whole model
    left_out: str = ""
    # of a decode: what its weights and cache need at least; None: not known
    floor: TokenFloor | None = None
    # of a compiled model that no card has compiled
    gain: CompileGain | None = None
    # the least time of a sum with predictions by the data sheet of the card; 0: not known
    least_us: float = 0.0
    # of all cards together: no predicted energy is below that of idle cards
    idle_power: IdlePower = dataclasses.field(default_factory=IdlePower)
    # the age of the oldest reading, by the clock of the database; not in the JSON
    oldest_age_s: float | None = None

    def __repr__(self) -> str:
        cost = (
            f"{quantity(self.time.value, TIME)}, "
            f"{quantity(self.energy.value if self.energy else None, ENERGY)}"
        )
        source = f"{self.covered_tuples} of {self.tuples} tuples measured"
        return f"<Estimate {self.title} on {self.card_model}: {cost}; {source}>"

    @property
    def title(self) -> str:
        """The title of the variant; for a user's own model with the sizes of its inputs."""
        return title_of(self.variant)

    def with_memory(self) -> Estimate:
        """The estimate of a forward pass with the memory that it needs, also if that is certainly
        less than the card has. Builds the model on the meta device; if that is impossible, or for a
        training step, the estimate stays as it is."""
        need = self.memory
        if need is None or need.needed_bytes is not None:
            return self
        with contextlib.suppress(FarmError):
            of_pass = pass_memory(self.variant, need.card_bytes, self.largest_call_bytes)
            return dataclasses.replace(self, memory=of_pass)
        return self

    @property
    def complete(self) -> bool:
        """True if `time` includes all tuples; False if it omits some or is a lower bound (see
        `incomplete_reason`).
        """
        return not self.incomplete_reason

    @property
    def level(self) -> float:
        """The level of the intervals on a page with this estimate: 0.90 if it has predictions, else
        0.95.
        """
        return (
            PREDICTED_LEVEL
            if self.missing and self.total and self.total.time_us.low is not None
            else LEVEL
        )

    @property
    def time(self) -> PredictedValue:
        """The time of the whole model; if `complete` is False, the time of a part. Unit: µs."""
        return self.time_at(self.level)

    @property
    def energy(self) -> PredictedValue | None:
        """The energy of the same pass as `time`. Unit: mJ."""
        return self.energy_at(self.level)

    def time_at(self, level: float) -> PredictedValue:
        """Return `time` with an interval of `level`, which must not exceed `self.level`. No
        interval if incomplete.
        """
        cost = cost_at(self.whole, level) if self.whole else self.sum_at(level)
        return cost.time_us if self.complete else PredictedValue(cost.time_us.value)

    def energy_at(self, level: float) -> PredictedValue | None:
        whole_mj = self.whole.energy_mj if self.whole else None
        has_total = self.total is not None and self.total.energy_mj is not None
        if self.whole and not whole_mj and self.missing and not has_total:
            return None
        cost = cost_at(self.whole, level) if self.whole and whole_mj else self.sum_at(level)
        energy_mj = cost.energy_mj
        if self.complete or energy_mj is None:
            return energy_mj
        return PredictedValue(energy_mj.value)

    def sum_at(self, level: float) -> PredictedCost:
        """Return the cost of readings, predictions and effects of the ranks together.

        The interval is one of the whole model: it includes what differs between two runs of a
        model."""
        cost = cost_at(self.readings, level)
        if self.missing and self.total:
            has_interval = self.total.time_us.low is not None
            energy_mj = self.total.energy_mj if has_interval else cost.energy_mj
            cost = PredictedCost(self.total.time_us, energy_mj)
        if self.ranks:
            cost = sum_of_costs([cost, cost_at(self.ranks, level)])

        time_us = _of_whole(cost.time_us, "time", level)
        energy_mj = cost.energy_mj and _of_whole(cost.energy_mj, "energy", level)
        if self.missing and self.total:
            time_us = time_us.at_least(self.least_us)
            least_mj = idle_energy_mj(time_us, self.idle_power.power_w)
            energy_mj = energy_mj and energy_mj.above(least_mj)
        return PredictedCost(time_us, energy_mj)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the total time: measured, predicted, and predicted for operator types without a
        reading.
        """
        total = self.total.time_us.value if self.total else 0.0
        if not total:
            return {}
        unseen = math.fsum(
            entry.all_calls_us
            for entry in self.missing
            if entry.predicted is not None and not entry.predicted.known
        )
        predicted = (self.predicted.time_us.value if self.predicted else 0.0) - unseen
        return {
            "measured": self.readings.time_us.value / total,
            "predicted": predicted / total,
            "unseen_types": unseen / total,
        }

    @property
    def missing_by_id(self) -> dict[str, MissingTuple]:
        """Tuple id -> the tuple without a reading, largest share first."""
        return {entry.needed.operator_id: entry for entry in self.missing}

    @property
    def implementation(self) -> str:
        """Which implementation tokens per second are of; "" for a model without tokens."""
        return implementation_of(self.variant)

    @property
    def per_token(self) -> PerToken:
        """The cost per token of the whole model, if it is complete."""
        return PerToken.of(
            self.variant, *((self.time, self.energy) if self.complete else (None, None))
        )

    def to_measure(self, most: int | None = None, seconds: float | None = None) -> tuple[str, ...]:
        """Return ids of missing tuples to measure first, at least one: in the order of `narrowing`,
        or of cost if that is empty. ``seconds``: card time to spend. Raises `UsageError` if every
        tuple has a reading, or the model generates kernels or is split over cards."""
        if self.variant.cards > 1:
            raise UsageError(
                "--measure and --budget measure on one card.", "Omit them, and measure the model."
            )
        if self.variant.generates_kernels:
            raise UsageError(
                "Generated kernels are measured with their model only.",
                "Omit --measure and --budget.",
            )
        if not self.missing:
            text = "All tuples of the model have readings, so there is nothing left to measure."
            raise UsageError(text, "Omit --measure.")
        missing = self.missing_by_id
        order = tuple(id_ for id_ in self.narrowing or missing if not missing[id_].needed.mismatch)
        if not order:
            text = "The tuples without a reading cannot be measured alone as the model runs them."
            raise UsageError(text, "Omit --measure and --budget, and measure the whole model.")
        affordable = (
            max(1, int(seconds / self.measuring_rest_s * len(self.missing)))
            if seconds
            else len(order)
        )
        return order[: min(most or len(order), affordable)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions. The first figures are for
        the whole model.

        ``low`` and ``high`` are the ends of an interval of ``interval_level``; in ``total``, of a
        90 % interval. Half-widths belong to 95 % intervals."""
        figures: dict[str, float | None] = {}
        for name, cost in (
            ("measured", self.readings),
            ("whole", self.whole),
            ("ranks", self.ranks),
        ):
            figures |= figure_json(f"{name}_time", "us", cost.time_us if cost else None)
            figures |= figure_json(f"{name}_energy", "mj", cost.energy_mj if cost else None)
        predicted: dict[str, float | None] = {"predicted_us": None, "predicted_mj": None}
        if self.predicted is not None:
            cost = self.predicted.without_intervals
            predicted = {
                "predicted_us": cost.time_us.value,
                "predicted_mj": value_of(cost.energy_mj),
            }
        total_us, total_mj = (
            (self.total.time_us, self.total.energy_mj) if self.total else (None,) * 2
        )
        return {
            **cost_json(self.time, self.energy, self.level),
            "complete": self.complete,
            **{name: value for name, value in vars(self).items() if name not in _OTHER_JSON},
            "basis": "whole model" if self.whole else "sum",
            **predicted,
            "shares": self.shares,
            "variant": self.variant.to_json(),
            "protocol": self.protocol.to_json(),
            "software": self.software.to_json(),
            **figures,
            **asdict(self.per_token),
            **interval_json("total_time", "us", total_us),
            **interval_json("total_energy", "mj", total_mj),
            "missing": [entry.to_json() for entry in self.missing],
            "memory": self.memory.to_json() if self.memory else None,
            "implementation": self.implementation,
            "floor": self.floor.to_json() if self.floor else None,
            "gain": self.gain.to_json(self.time) if self.gain else None,
        }


def cost_at(cost: PassCost, level: float) -> PredictedCost:
    """Convert a measured cost: its intervals get the level `LEVEL` or `PREDICTED_LEVEL`."""
    energy_mj = _interval_at(cost.energy_mj, level) if cost.energy_mj else None
    return PredictedCost(_interval_at(cost.time_us, level), energy_mj)


def _interval_at(figure: Figure, level: float) -> PredictedValue:
    half_width = figure.half_width * (1.0 if level == LEVEL else _NARROWER)
    return PredictedValue(figure.value, figure.value - half_width, figure.value + half_width)


def _of_whole(total: PredictedValue, quantity: Quantity, level: float) -> PredictedValue:
    """Widen the interval of a sum to one of the whole model, which differs from run to run
    (`expected_whole`).
    """
    if total.low is None or total.high is None:
        return total

    run = expected_whole(Figure(total.value), quantity)
    run_half_width = run.half_width if level == LEVEL else run.half_width * _NARROWER
    below = math.hypot(total.value - total.low, run_half_width)
    above = math.hypot(total.high - total.value, run_half_width)
    return PredictedValue(total.value, max(0.0, total.value - below), total.value + above)


def interval_json(name: str, unit: str, found: PredictedValue | None) -> dict[str, float | None]:
    """JSON of a value and the ends of its interval: ``name_unit``, ``name_low_unit`` and
    ``name_high_unit``.
    """
    keys = f"{name}_{unit}", f"{name}_low_{unit}", f"{name}_high_{unit}"
    return dict(zip(keys, vars(found).values() if found else (None,) * 3, strict=True))


def cost_json(
    time: PredictedValue, energy: PredictedValue | None, level: float
) -> dict[str, float | None]:
    """The first keys of an estimate's JSON. Half-widths belong to 95 % intervals: None if `level`
    is not 0.95.
    """
    costs: dict[str, float | None] = {}
    for (name, unit), value in zip(_UNITS.items(), (time, energy), strict=True):
        costs |= interval_json(name, unit, value)
        half_width = None
        if level == LEVEL and value is not None and value.high is not None:
            half_width = value.high - value.value
        costs[f"{name}_half_width_{unit}"] = half_width
    return {**costs, "interval_level": level}


def too_large_from(curve: Sequence[Estimate]) -> Estimate | None:
    """Return the estimate with the smallest batch and length that exceeds the card's memory, or
    None.
    """
    too_large = [estimate for estimate in curve if estimate.memory and not estimate.memory.fits]
    return min(too_large, key=lambda one: (one.variant.batch, one.variant.length), default=None)


def sum_of_costs(costs: Sequence[PredictedCost]) -> PredictedCost:
    """Add the times and the energies of costs. See `sum_of`."""
    time_us = sum_of([cost.time_us for cost in costs])
    assert time_us is not None, "each cost has a time"
    return PredictedCost(time_us, sum_of([cost.energy_mj for cost in costs]))


def sum_of(values: Sequence[PredictedValue | None]) -> PredictedValue | None:
    """Add predictions. Half-widths add linearly, because all may be wrong in the same direction."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    ends = [[value.low for value in present], [value.high for value in present]]
    low, high = (None if None in end else math.fsum(filter(None, end)) for end in ends)
    return PredictedValue(math.fsum(value.value for value in present), low, high)
