"""How well predictors predict: by random tuples, as papers print it, and by families of models that were held back whole.

Ten folds grouped by tuple ask for a tuple whose siblings of the same model were learnt from. Leaving a family out asks what users
meet: a model like none that was read. No tuple of the family is learnt from, those that it shares with others included, and nobody
has looked at what stands in its tensors. Intervals of a family are calibrated by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.errors import UsageError
from farm.prediction import predictor_store
from farm.prediction.calibration import SUM_FLOOR, SUM_LEAST, WIDENED, Calibration, Errors, quantile, unseen
from farm.prediction.dataset import Dataset
from farm.prediction.measured_models import ReadModel, Summed, blind, families_of
from farm.prediction.predictor_store import Kept
from farm.prediction.predictors import Answers, Fitted, Recipe
from farm.prediction.regressor import Floats

FOLDS = 10
LEAST_FAMILIES = 3
LEAST_CASES = 10  # of a family, for its share covered to be one to compare
MEASURED = (1, 3, 5, 8, 12)  # dearest tuples of a model, taken as read
Say = Callable[[str], None]


@dataclass(frozen=True)
class Score:
    """Shares, of the measured: mean and median of the absolute error, and cases within 10 and 20 %."""

    count: int
    mean: float
    median: float
    within_10: float
    within_20: float

    @classmethod
    def of(cls, off: Floats) -> Score | None:
        """
        Args:
            off: logarithms of predicted over measured; None comes of none.
        """
        error = np.abs(np.expm1(off[np.isfinite(off)]))
        if not len(error):
            return None
        return cls(
            len(error),
            float(error.mean()),
            float(np.median(error)),
            float((error <= 0.1).mean()),
            float((error <= 0.2).mean()),
        )


@dataclass(frozen=True)
class Interval:
    """The 90 % interval: the share that it covers, that of the worst family, and the median of its width (x and ÷).

    The worst of those with ten cases or more, if there are such.
    """

    coverage: float
    worst: float
    worst_family: str
    width: float


@dataclass(frozen=True)
class HeldOut:
    """A data set's rows as they were answered by predictors that had not learnt from them; NaN where none was asked."""

    answers: Answers
    families: npt.NDArray[np.str_]
    sums: tuple[tuple[ReadModel, Summed], ...]
    narrowed: tuple[
        tuple[ReadModel, dict[int, float]], ...
    ] = ()  # the sum's time, so many of its dearest tuples as read

    def narrowed_errors(self, number: int) -> Floats:
        return np.array([np.log(times[number] / model.time_us) for model, times in self.narrowed if model.time_us])

    def errors(self, data: Dataset, of: str) -> Errors:
        measured = np.array([np.nan if (value := getattr(row, of)) is None else value for row in data.rows])
        spread = getattr(self.answers, f"{of.split('_')[0]}_spread")
        with np.errstate(invalid="ignore", divide="ignore"):
            return Errors(np.log(getattr(self.answers, of) / measured), spread, self.families)

    def sum_errors(self, of: str) -> Errors:
        """`of`: time_us or energy_mj, of the wholes that were read."""
        known = [(model, one) for model, one in self.sums if getattr(model, of)]
        return Errors(
            np.array([np.log(getattr(one, of) / getattr(model, of)) for model, one in known]),
            np.hypot([getattr(one, f"{of.split('_')[0]}_spread") for _, one in known], SUM_FLOOR),
            np.array([model.family for model, _ in known], dtype=np.str_),
        )


def leave_families_out(
    recipe: Recipe, data: Dataset, models: Sequence[ReadModel], say: Say = lambda _: None, only: Sequence[str] = ()
) -> HeldOut:
    """Each family of models answered by a predictor that has learnt from no tuple of it.

    A tuple of several families is answered for each of them and counts for the last.

    Raises:
        UsageError: there are too few families.
    """
    ids = {call.operator_id for call in data.calls}
    families = {name: held for name, held in families_of(models).items() if held & ids and (not only or name in only)}
    if len(families) < (1 if only else LEAST_FAMILIES):
        raise UsageError(
            f"There are readings of {len(families)} families of models, and leaving one out takes {LEAST_FAMILIES}.",
            "Measure models of other architectures first.",
        )
    asked = blind(data)
    answered = _Kept(len(data))
    of_row = np.full(len(data), "", dtype=object)
    sums, narrowed = [], []
    read = read_times(data)
    for number, (name, held) in enumerate(families.items()):
        say(f"{recipe.name}: without {name} ({number + 1} of {len(families)})")
        fitted = recipe.fit(data.without(held))
        rows = np.array([place for place, call in enumerate(data.calls) if call.operator_id in held])
        answered.put(rows, fitted.answer([asked[row] for row in rows]))
        of_row[rows] = name
        for model in models:
            if model.family == name:
                told = fitted.answer(model.calls)
                sums.append((model, model.sum(told)))
                narrowed.append((model, with_readings(model, told, read)))
    return HeldOut(answered.answers(), of_row.astype(np.str_), tuple(sums), tuple(narrowed))


def read_times(data: Dataset) -> dict[str, tuple[float, float]]:
    """Tuple -> what neighbours make of its time, and what it is less where its weights are in the cache. Means, in us."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in data.rows:
        found.setdefault(row.call.operator_id, []).append((row.time_us + row.neighbours_us, row.fetching_us))
    return {id_: tuple(np.mean(values, axis=0)) for id_, values in found.items()}


def with_readings(model: ReadModel, answers: Answers, read: Mapping[str, tuple[float, float]]) -> dict[int, float]:
    """The sum's time in us where the 1, 3, 5 ... tuples that are predicted dearest are taken as they were read."""
    counts = np.array(model.counts, dtype=float)
    times = answers.among_others(model.in_cache)[0].copy()
    found, order = {}, np.argsort(-counts * times, kind="stable")
    for number in range(max(MEASURED) + 1):
        if number in MEASURED:
            found[number] = float(counts @ times)
        if number < len(order) and model.calls[order[number]].operator_id in read:
            among_us, fetching_us = read[model.calls[order[number]].operator_id]
            times[order[number]] = among_us - model.in_cache * fetching_us
    return found


def cross_validated(recipe: Recipe, data: Dataset, say: Say = lambda _: None, seed: int = 0) -> HeldOut:
    """Ten folds grouped by tuple: all readings of one tuple are held back together."""
    fold = folds_of(data, seed)
    asked, answered = blind(data), _Kept(len(data))
    for number in range(FOLDS):
        say(f"{recipe.name}: fold {number + 1} of {FOLDS}")
        rows = np.flatnonzero(fold == number)
        if len(rows):
            fitted = recipe.fit(data.where(list(fold != number)))
            answered.put(rows, fitted.answer([asked[row] for row in rows]))
    return HeldOut(answered.answers(), fold.astype(np.str_), ())


def folds_of(data: Dataset, seed: int = 0) -> npt.NDArray[np.intp]:
    """The fold of each row, 0 to 9; that of all rows of a tuple."""
    ids = sorted({call.operator_id for call in data.calls})
    place = dict(zip(ids, np.random.default_rng(seed).permutation(len(ids)) % FOLDS, strict=True))
    return np.array([place[call.operator_id] for call in data.calls], dtype=np.intp)


class _Kept:
    """Answers that come in parts."""

    _NAMES = ("time_us", "time_spread", "power_w", "power_spread", "neighbours_us", "fetching_us")

    def __init__(self, rows: int) -> None:
        self.columns = {name: np.full(rows, np.nan) for name in self._NAMES}
        self.known = np.zeros(rows, dtype=bool)

    def put(self, rows: npt.NDArray[np.intp], answers: Answers) -> None:
        for name, column in self.columns.items():
            column[rows] = getattr(answers, name)
        self.known[rows] = answers.known

    def answers(self) -> Answers:
        found: dict[str, Any] = {**self.columns, "known": self.known}
        return Answers(**found)


# -- what comes of it


@dataclass(frozen=True)
class Evaluation:
    """One predictor. Scores by target: time_us, power_w, energy_mj; of sums time_us and energy_mj."""

    predictor: str
    cross_validation: dict[str, Score | None]
    families: dict[str, Score | None]
    intervals: dict[str, Interval]
    sums: dict[str, Score | None]
    sum_intervals: dict[str, Interval]
    by_type: dict[str, Score] = field(default_factory=dict)  # time, families left out
    by_family: dict[str, Score] = field(default_factory=dict)
    narrowed: dict[int, Score | None] = field(default_factory=dict)  # sums' time, so many dearest tuples as read
    unseen: Score | None = None  # time, of operator types that were not learnt from
    models: tuple[dict[str, Any], ...] = ()
    curve: tuple[tuple[int, float], ...] = ()  # tuples learnt from, median error of the time of others

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


TARGETS = ("time_us", "power_w", "energy_mj")


def evaluate(
    recipe: Recipe,
    data: Dataset,
    models: Sequence[ReadModel],
    *,
    folds: bool = True,
    curve: bool = False,
    say: Say = lambda _: None,
) -> tuple[Evaluation, HeldOut]:
    """
    Raises:
        UsageError: too few readings or families.
    """
    held = leave_families_out(recipe, data, models, say)
    random = cross_validated(recipe, data, say) if folds else None
    time = held.errors(data, "time_us")
    asked = np.isfinite(time.off)
    types = np.array([call.operator_type for call in data.calls])
    return (
        Evaluation(
            recipe.name,
            {of: Score.of(random.errors(data, of).off) for of in TARGETS} if random else {},
            {of: Score.of(held.errors(data, of).off) for of in TARGETS},
            {of: _interval(held.errors(data, of), held.answers.known) for of in TARGETS},
            {of: Score.of(held.sum_errors(of).off) for of in ("time_us", "energy_mj")},
            {of: _interval(held.sum_errors(of)) for of in ("time_us", "energy_mj")},
            _by(types, time.off),
            _by(time.families, time.off),
            {number: Score.of(held.narrowed_errors(number)) for number in MEASURED},
            Score.of(time.off[asked & ~held.answers.known]),
            tuple(_model(model, one) for model, one in held.sums if model.time_us),
            tuple(learning_curve(recipe, data, say)) if curve else (),
        ),
        held,
    )


def calibration(data: Dataset, held: HeldOut) -> Calibration:
    """From families that were left out."""
    known = held.answers.known
    own, others = {}, {}
    for of in TARGETS:
        errors = held.errors(data, of)
        asked = np.isfinite(errors.off)
        own[of] = quantile(errors.where(asked & known)) * (1.0 if of == "power_w" else WIDENED)
        others[of] = unseen(own[of], errors.where(asked & ~known))
    least = SUM_LEAST / SUM_FLOOR
    sums = {of: float(np.maximum(quantile(held.sum_errors(of)), least)) for of in ("time_us", "energy_mj")}
    return Calibration(
        time=own["time_us"],
        power=own["power_w"],
        energy=own["energy_mj"],
        unseen_time=others["time_us"],
        unseen_power=others["power_w"],
        unseen_energy=others["energy_mj"],
        sum_time=sums["time_us"],
        sum_energy=sums["energy_mj"],
        families=len(set(held.families) - {""}),
    )


def fit(recipe: Recipe, data: Dataset, models: Sequence[ReadModel], say: Say = lambda _: None) -> Kept:
    """Learnt from all readings, its intervals calibrated by leaving families out.

    Raises:
        UsageError: too few readings or families, or scikit-learn is not installed.
    """
    held = leave_families_out(recipe, data, models, say)
    say(f"{recipe.name}: all {len(data)} tuples")
    return predictor_store.of(data, recipe.fit(data), calibration(data, held))


def learning_curve(recipe: Recipe, data: Dataset, say: Say = lambda _: None) -> Iterator[tuple[int, float]]:
    """Tuples learnt from, chosen at random, and the median error of the time of a fifth that was held back."""
    ids = np.array(sorted({call.operator_id for call in data.calls}))
    order = np.random.default_rng(1).permutation(len(ids))
    held, rest = ids[order[: len(ids) // 5]], ids[order[len(ids) // 5 :]]
    asked = data.of(held)
    measured = np.array([row.time_us for row in asked.rows])
    for number in (25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800):
        number = min(number, len(rest))
        say(f"{recipe.name}: {number} tuples")
        score = Score.of(np.log(recipe.fit(data.of(rest[:number])).answer(blind(asked)).time_us / measured))
        if score:
            yield number, score.median
        if number == len(rest):
            return


def held_against(
    fitted: Fitted,
    data: Dataset,
    models: Sequence[ReadModel],
    calibrated: Calibration,
    everything: Dataset | None = None,
) -> Evaluation:
    """A predictor that was fitted before, against readings that it has not learnt from and whole models.

    Args:
        everything: also the readings that it has learnt from, which may stand in for predictions of a model's dearest tuples.
    """
    answers = fitted.answer(blind(data))
    ids = families_of(models)
    of_row = [next((name for name, held in ids.items() if call.operator_id in held), "") for call in data.calls]
    told, read = [fitted.answer(one.calls) for one in models], read_times(everything or data)
    held = HeldOut(
        answers,
        np.array(of_row, dtype=np.str_),
        tuple((one, one.sum(said)) for one, said in zip(models, told, strict=True)),
        tuple((one, with_readings(one, said, read)) for one, said in zip(models, told, strict=True)),
    )
    time = held.errors(data, "time_us")
    names = dict(zip(TARGETS, ("time", "power", "energy"), strict=True))
    intervals = {}
    for of, name in names.items():
        errors = held.errors(data, of)
        spreads = np.where(answers.known, getattr(calibrated, name), getattr(calibrated, f"unseen_{name}"))
        found = _covering(errors, spreads * errors.spread)
        if found:
            intervals[of] = found
    sums = {of: held.sum_errors(of) for of in ("time_us", "energy_mj")}
    of_sums = {
        of: found
        for of, errors in sums.items()
        if (found := _covering(errors, getattr(calibrated, f"sum_{of.split('_')[0]}") * errors.spread))
    }
    return Evaluation(
        fitted.name,
        {},
        {of: Score.of(held.errors(data, of).off) for of in TARGETS},
        intervals,
        {of: Score.of(errors.off) for of, errors in sums.items()},
        of_sums,
        _by(np.array([call.operator_type for call in data.calls]), time.off),
        _by(time.families, time.off),
        {number: Score.of(held.narrowed_errors(number)) for number in MEASURED},
        Score.of(time.off[~answers.known]),
        tuple(_model(model, one) for model, one in held.sums if model.time_us),
    )


def across_cards(recipe: Recipe, learnt: Dataset, asked: Dataset, models: Sequence[ReadModel]) -> Evaluation:
    """Learnt from one card model, asked for another: features and rooflines are of the card that is asked for."""
    fitted = recipe.fit(learnt)
    return held_against(fitted, asked, models, Calibration.none())


def _by(names: npt.NDArray[np.str_], off: Floats) -> dict[str, Score]:
    found = {str(name): Score.of(off[names == name]) for name in np.unique(names) if name}
    known = {name: score for name, score in found.items() if score}
    return dict(sorted(known.items(), key=lambda entry: -entry[1].count))


def _interval(errors: Errors, known: npt.NDArray[np.bool_] | None = None) -> Interval:
    """Each family covered by what the others say."""
    half_widths = np.full(len(errors.off), np.nan)
    usable = np.isfinite(errors.off)
    for name in np.unique(errors.families[usable]):
        others, own = usable & (errors.families != name), usable & (errors.families == name)
        if known is None:
            half_widths[own] = quantile(errors.where(others)) * errors.spread[own]
            continue
        spreads = quantile(errors.where(others & known))
        half_widths[own & known] = spreads * errors.spread[own & known]
        strange = own & ~known
        half_widths[strange] = unseen(spreads, errors.where(others & ~known)) * errors.spread[strange]
    return _covering(errors, half_widths) or Interval(np.nan, np.nan, "", np.nan)


def _covering(errors: Errors, half_widths: Floats) -> Interval | None:
    usable = np.isfinite(errors.off) & np.isfinite(half_widths)
    if not usable.any():
        return None
    inside = (np.abs(errors.off) <= half_widths)[usable]
    names = errors.families[usable]
    shares = {str(name): float(inside[names == name].mean()) for name in np.unique(names)}
    many = [name for name in shares if (names == name).sum() >= LEAST_CASES]
    worst = min(many or shares, key=lambda name: shares[name])
    return Interval(
        float(np.mean(list(shares.values()))), shares[worst], worst, float(np.exp(np.median(half_widths[usable])))
    )


def _model(model: ReadModel, one: Summed) -> dict[str, Any]:
    return {
        "model": model.title,
        "family": model.family,
        "time_us": one.time_us,
        "whole_time_us": model.time_us,
        "energy_mj": None if np.isnan(one.energy_mj) else one.energy_mj,
        "whole_energy_mj": model.energy_mj,
    }
