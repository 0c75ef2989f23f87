"""The predictors by name: what each learns, from what, and how its answers become microseconds and watts.

All have one interface: `Recipe.fit` learns from a `Dataset`, `Fitted.answer` says what calls cost and how unsure that is, and
`Fitted.explain` what an answer rests on. An operator type that no reading is of is marked; what its family teaches answers for
it, and where no reading is of the family either, roofline x family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.errors import UsageError, did_you_mean
from farm.prediction.blend import Blend, BlendOf
from farm.prediction.braun import OnPortable, OnPortableOf
from farm.prediction.dataset import Dataset
from farm.prediction.described import Described
from farm.prediction.factors import Factors, FactorsOf
from farm.prediction.gaussian_process import Process, ProcessOf
from farm.prediction.knn import Neighbours, NeighboursOf
from farm.prediction.neural_power import Polynomials, PolynomialsOf
from farm.prediction.regressor import Arrays, Floats, Inputs, Learnt, Regressor, named, part, with_times
from farm.prediction.trees import Forest, ForestOf

LEAST_ROWS = 20  # readings that a fit takes


@dataclass(frozen=True)
class Answers:
    """What calls cost, in their order. Spreads are standard deviations of the logarithm, before any calibration.

    `power_w` is NaN where no reading had one.
    """

    time_us: Floats
    time_spread: Floats
    power_w: Floats
    power_spread: Floats
    neighbours_us: Floats  # that others add where it stands in a model
    fetching_us: Floats  # of the time, what fetching weights takes that are not in the cache
    known: npt.NDArray[np.bool_]  # its operator type has been read
    waiting_w: float = 0.0  # that the card draws at most while a kernel waits

    @property
    def energy_mj(self) -> Floats:
        return self.time_us * self.power_w * 1e-3

    def among_others(self, in_cache: float) -> tuple[Floats, Floats]:
        """Time in us and energy in mJ of each call where it stands in a model (`farm.verdict.choice`).

        Args:
            in_cache: the share of the model's weights that the next pass finds in the card's cache.
        """
        shift_us = np.maximum(self.neighbours_us - in_cache * self.fetching_us, -0.9 * self.time_us)
        shift_w = (self.power_w + np.minimum(self.power_w, self.waiting_w)) / 2
        return self.time_us + shift_us, self.energy_mj + shift_us * shift_w * 1e-3

    @property
    def energy_spread(self) -> Floats:
        return np.hypot(self.time_spread, self.power_spread)


@dataclass(frozen=True)
class Recipe:
    """How a predictor is made. Targets: the time over a roofline as a logarithm, or raw microseconds and watts."""

    name: str
    about: str
    time: Regressor
    power: Regressor
    over: str = "tile_roofline_us"  # the roofline that `time` is learnt over; "": raw
    raw_power: bool = False
    among: Regressor = dataclasses.field(default_factory=FactorsOf)  # what neighbours and fetching weights take

    def fit(self, data: Dataset) -> Fitted:
        """
        Raises:
            UsageError: there are too few readings, or scikit-learn is not installed.
        """
        if len(data) < LEAST_ROWS:
            raise UsageError(
                f"There are {len(data)} readings of operators of {data.card.model}, and a fit takes {LEAST_ROWS}.",
                "Measure some models first, for instance `farm run resnet18`, or take `--card H200`.",
            )
        inputs = Inputs.of(data.calls)
        times = np.array([row.time_us for row in data.rows])
        added = np.array([row.neighbours_us for row in data.rows])
        fetching = np.array([row.fetching_us for row in data.rows])
        powers = np.array([np.nan if row.power_w is None else row.power_w for row in data.rows])
        with_power = np.flatnonzero(np.isfinite(powers))
        residual = np.log(times / _over(inputs, "roofline_us"))
        # Steps of training and prompts are rows like others; a type's typical data are asked where nobody says which.
        fallback = Fallback(FactorsOf().fit(inputs, residual), None)
        power: Learnt | None = None
        if len(with_power) >= LEAST_ROWS:
            of, watts = inputs.where(with_power), powers[with_power]
            fallback = Fallback(fallback.time, FactorsOf().fit(of, np.log(watts)))
            # As read; who asks has the predicted time.
            timed = with_times(of, times[with_power])
            power = self.power.fit(timed, watts if self.raw_power else np.log(watts))
        targets = np.log(times / _over(inputs, self.over)) if self.over else times
        return Fitted(
            self.name,
            self.over,
            self.raw_power,
            data.card.base_power_w,
            self.time.fit(inputs, targets),
            power,
            self.among.fit(inputs, np.log1p(added / times)),
            self.among.fit(inputs, np.log1p(-fetching / times)),
            fallback,
            _typical(inputs),
        )


@dataclass(frozen=True)
class Fallback:
    """Roofline x family."""

    time: Factors
    power: Factors | None


@dataclass(frozen=True)
class Typical:
    """What stands in the inputs of an operator type where nobody says: the mean over its readings. "" is all of them."""

    types: npt.NDArray[np.str_]
    data: Floats  # types x (zeros, positive, channels)
    families: npt.NDArray[np.str_]  # that were read
    readings: npt.NDArray[np.int64]  # of each type

    def filled(self, calls: Sequence[Described]) -> list[Described]:
        place = {str(name): index for index, name in enumerate(self.types)}
        found = []
        for call in calls:
            if not call.data_known:
                zeros, positive, channels = self.data[place.get(call.operator_type, place[""])]
                call = dataclasses.replace(call, zeros=zeros, positive=positive, channels=channels)
            found.append(call)
        return found


@dataclass(frozen=True)
class Fitted:
    """A predictor that has learnt."""

    name: str
    over: str
    raw_power: bool
    base_power_w: float
    time: Learnt
    power: Learnt | None
    neighbours: Learnt
    fetching: Learnt
    fallback: Fallback
    typical: Typical

    def answer(self, calls: Sequence[Described]) -> Answers:
        if not calls:
            none = np.empty(0)
            return Answers(none, none, none, none, none, none, np.empty(0, dtype=bool), self.base_power_w)
        inputs = Inputs.of(self.typical.filled(calls))
        times, time_spread, lacking = self._times(inputs)
        powers, power_spread = self._powers(with_times(inputs, times), lacking)
        added_us = times * np.expm1(np.clip(self.neighbours.predict(inputs)[0], -0.4, 2.0))
        fetching_us = -times * np.expm1(np.clip(self.fetching.predict(inputs)[0], -2.0, 0.2))
        known = np.isin(inputs.types, self.typical.types)
        return Answers(times, time_spread, powers, power_spread, added_us, fetching_us, known, self.base_power_w)

    def _times(self, inputs: Inputs) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        values, spreads = self.time.predict(inputs)
        with np.errstate(invalid="ignore"):
            times = np.exp(values) * _over(inputs, self.over) if self.over else values
            spreads = spreads if self.over else spreads / times
        lacking = ~np.isin(inputs.families, self.typical.families) | ~np.isfinite(values) | ~(times > 0)
        factors, factor_spreads = self.fallback.time.predict(inputs)
        times = np.where(lacking, np.exp(factors) * _over(inputs, "roofline_us"), times)
        return times, np.where(lacking, factor_spreads, spreads), lacking

    def _powers(self, inputs: Inputs, lacking: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        if self.power is None or self.fallback.power is None:
            return np.full(len(inputs), np.nan), np.full(len(inputs), np.nan)
        values, spreads = self.power.predict(inputs)
        with np.errstate(invalid="ignore"):
            powers = values if self.raw_power else np.exp(values)
            spreads = spreads / powers if self.raw_power else spreads
        lacking = lacking | ~np.isfinite(values) | ~(powers > 0)
        factors, factor_spreads = self.fallback.power.predict(inputs)
        return np.where(lacking, np.exp(factors), powers), np.where(lacking, factor_spreads, spreads)

    def explain(self, call: Described) -> list[str]:
        """What the time of a call rests on."""
        inputs = Inputs.of(self.typical.filled([call]))
        at = np.flatnonzero(self.typical.types == call.operator_type)
        number = f"{self.typical.readings[at[0]]} readings are" if len(at) else "no reading is"
        said = [f"{number} of {call.operator_type}"]
        if self._times(inputs)[2][0]:
            return [*said, "roofline x family", *self.fallback.time.explain(inputs, 0)]
        over = f"over the {self.over.removesuffix('_us').replace('_', ' ')}" if self.over else "of the time itself"
        return [*said, f"{self.name}, {over}", *self.time.explain(inputs, 0)]

    # -- as arrays

    def arrays(self) -> Arrays:
        parts: dict[str, Learnt | None] = {
            "time": self.time,
            "power": self.power,
            "neighbours": self.neighbours,
            "fetching": self.fetching,
            "fallback time": self.fallback.time,
            "fallback power": self.fallback.power,
        }
        kept: Arrays = named(
            "typical", {name: getattr(self.typical, name) for name in ("types", "data", "families", "readings")}
        )
        for name, one in parts.items():
            if one is not None:
                kept |= named(name, one.arrays())
        return kept

    def about(self) -> dict[str, Any]:
        """What is no array, as plain JSON."""
        return {
            "predictor": self.name,
            "over": self.over,
            "raw_power": self.raw_power,
            "base_power_w": self.base_power_w,
            "time": _kind(self.time),
            "power": _kind(self.power),
            "neighbours": _kind(self.neighbours),
            "fetching": _kind(self.fetching),
        }

    @classmethod
    def from_arrays(cls, about: Mapping[str, Any], arrays: Arrays) -> Fitted:
        """The inverse of both.

        Raises:
            KeyError, ValueError: they are not what `arrays` and `about` gave.
        """
        time, neighbours, fetching = (
            _learnt(about[name], part(arrays, name)) for name in ("time", "neighbours", "fetching")
        )
        fallback_time, fallback_power = (part(arrays, f"fallback {name}") for name in ("time", "power"))
        return cls(
            about["predictor"],
            about["over"],
            about["raw_power"],
            about["base_power_w"],
            time,
            _learnt(about["power"], part(arrays, "power")) if about["power"] else None,
            neighbours,
            fetching,
            Fallback(Factors(**fallback_time), Factors(**fallback_power) if fallback_power else None),
            Typical(**part(arrays, "typical")),
        )


_KINDS: dict[str, Callable[[Arrays], Learnt]] = {
    "Factors": lambda arrays: Factors(**arrays),
    "Neighbours": lambda arrays: Neighbours(**arrays),
    "Forest": Forest.from_arrays,
    "Process": Process.from_arrays,
    "Polynomials": Polynomials.from_arrays,
    "OnPortable": OnPortable.from_arrays,
}


def _kind(learnt: Learnt | None) -> Any:
    if isinstance(learnt, Blend):
        return [_kind(one) for one in learnt.parts]
    return type(learnt).__name__ if learnt is not None else None


def _learnt(kind: Any, arrays: Arrays) -> Learnt:
    if isinstance(kind, list):
        parts = tuple(_learnt(one, part(arrays, str(number))) for number, one in enumerate(kind))
        return Blend(parts)
    return _KINDS[kind](arrays)


def _over(inputs: Inputs, name: str) -> Floats:
    return np.array([getattr(call, name) for call in inputs.calls])


def _typical(inputs: Inputs) -> Typical:
    own = np.array([[call.zeros, call.positive, call.channels] for call in inputs.calls])
    types = np.unique(inputs.types)
    means = [own.mean(axis=0), *(own[inputs.types == one].mean(axis=0) for one in types)]
    return Typical(
        np.array(["", *types], dtype=np.str_), np.array(means), np.unique(inputs.families), _readings(inputs, types)
    )


def _readings(inputs: Inputs, types: npt.NDArray[np.str_]) -> npt.NDArray[np.int64]:
    return np.array([len(inputs), *((inputs.types == one).sum() for one in types)], dtype=np.int64)


_NOTHING, _ONE = FactorsOf(at_all=False), FactorsOf(by_type=False, by_family=False)
_AMONG = ForestOf("extra", trees=40, least_in_leaf=4)

RECIPES: dict[str, Recipe] = {
    one.name: one
    for one in (
        Recipe("roofline", "the card's peaks: a lower bound", _NOTHING, _ONE, "roofline_us", among=_NOTHING),
        Recipe("family", "roofline x the median of the type or family", FactorsOf(), FactorsOf(), "roofline_us"),
        Recipe(
            "neural-power",
            "polynomials of layer parameters, lasso, by type (Cai et al.)",
            PolynomialsOf(),
            PolynomialsOf(logarithms=True),
            "",
            raw_power=True,
        ),
        Recipe(
            "braun",
            "random forest on portable features (Braun et al.)",
            OnPortableOf(),
            OnPortableOf(),
            "",
            raw_power=True,
        ),
        Recipe("neighbours", "the nearest readings of the family", NeighboursOf(), NeighboursOf(), among=_AMONG),
        Recipe(
            "boosting",
            "boosted trees on time / tile roofline",
            ForestOf("boosted", trees=300, depth=5, least_in_leaf=2, features=0.5),
            ForestOf("boosted", trees=300, depth=5, least_in_leaf=2, features=0.5),
            among=_AMONG,
        ),
        Recipe("trees", "extra trees on time / tile roofline", ForestOf(), ForestOf(), among=_AMONG),
        Recipe("process", "Gaussian process, Matérn 3/2", ProcessOf(), ProcessOf(), among=_AMONG),
        Recipe(
            "best",
            "process and trees, geometric mean",
            BlendOf((ProcessOf(), ForestOf(trees=60))),
            BlendOf((ProcessOf(), ForestOf(trees=60, least_in_leaf=2))),
            among=_AMONG,
        ),
    )
}
BEST = "best"


def recipe(name: str) -> Recipe:
    """
    Raises:
        UsageError: there is none of the name.
    """
    if name not in RECIPES:
        near = did_you_mean(name, RECIPES)
        raise UsageError(f"There is no predictor '{name}'.", near or f"Choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]
