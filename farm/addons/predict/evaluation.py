"""Evaluate predictors on left-out readings: random tuples, or all tuples of a family of models.

With ten folds grouped by tuple, the training data contain other tuples of the same model. Leaving a
family out shows the error for a new model that is unlike all measured models. The evaluation leaves
out all tuples of the family, even if other families have them, and the values of its tensors. It
calibrates the family's intervals with the other families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from farm.addons.predict.calibration import (
    Calibration,
    IntervalCoverage,
    PredictionErrors,
    coverage,
    jackknife_half_widths,
    without_nan,
)
from farm.addons.predict.dataset import Dataset, MeasuredModel, families_of, without_values
from farm.addons.predict.predictors import CallCosts, FittedPredictor, PredictedSum, PredictorSpec
from farm.addons.predict.regressors import Floats, Names, needs_scikit_learn
from farm.addons.predict.stored_predictor import StoredPredictor
from farm.errors import UsageError
from farm.types.fields import cost_json
from farm.types.figure import value_of

FOLDS = 10
LEAST_FAMILIES = 3
MEASURED = (1, 3, 5, 8, 12)  # numbers of a model's most expensive tuples that have readings
TARGETS = {"time_us": "time", "power_w": "power", "energy_mj": "energy"}
SUM_TARGETS = {"time_us": "time", "energy_mj": "energy"}
DISTANCE_QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)  # limits of the rows of `Evaluation.by_distance`
Say = Callable[[str], None]


@dataclass(frozen=True)
class Score:
    """Mean and median of the absolute error, and cases within 10 and 20 %; all as shares of the
    measured value.
    """

    count: int
    mean: float
    median: float
    within_10: float
    within_20: float

    @classmethod
    def of(cls, log_ratio: Floats) -> Score | None:
        """``log_ratio``: log(predicted / measured), NaN for a call without a prediction."""
        error = np.abs(np.expm1(log_ratio[np.isfinite(log_ratio)]))
        if not len(error):
            return None
        values = (error.mean(), np.median(error), (error <= 0.1).mean(), (error <= 0.2).mean())
        return cls(len(error), *map(float, values))


@dataclass(frozen=True)
class ModelPrediction:
    """A model and its predicted sum.

    `narrowed` maps n to a time in us in which readings replace the predictions of the model's n
    most expensive tuples, for each n of `MEASURED`.
    """

    model: MeasuredModel
    total: PredictedSum
    narrowed: dict[int, float]


@dataclass(frozen=True)
class HeldOutPredictions:
    """Predictions for the rows of a data set by predictors that were trained without them; NaN
    without a prediction.
    """

    costs: CallCosts
    families: Names  # family of models or fold, for each row
    sums: tuple[ModelPrediction, ...] = ()

    def errors(self, data: Dataset) -> dict[str, PredictionErrors]:
        """Errors of calls by time, power and energy."""
        costs = self.costs
        times_us = [row.cost.time_us.value for row in data.rows]
        powers_w = [row.cost.mean_power_w for row in data.rows]
        energies_mj = [value_of(row.cost.energy_mj) for row in data.rows]
        return {
            "time": self._errors(costs.time_us, costs.time_spread, times_us),
            "power": self._errors(costs.power_w, costs.power_spread, powers_w),
            "energy": self._errors(costs.energy_mj, costs.energy_spread, energies_mj),
        }

    def _errors(
        self, predicted: Floats, spread: Floats, measured: Sequence[float | None]
    ) -> PredictionErrors:
        with np.errstate(invalid="ignore", divide="ignore"):
            log_ratio = np.log(predicted / np.array(measured, dtype=float))
        return PredictionErrors(log_ratio, spread, self.families, self.costs.known)

    def sum_errors(self) -> dict[str, PredictionErrors]:
        """Errors of whole models that have a reading, by time and energy."""
        times, energies = [], []
        for prediction in self.sums:
            model, total = prediction.model, prediction.total
            if model.cost is None:
                continue
            if model.cost.time_us.value:
                ratio = total.time_us / model.cost.time_us.value
                times.append((ratio, total.time_spread, model.family))
            energy_mj = value_of(model.cost.energy_mj)
            if energy_mj:
                ratio = total.energy_mj / energy_mj
                energies.append((ratio, total.energy_spread, model.family))
        return {"time": _sum_errors(times), "energy": _sum_errors(energies)}


def _sum_errors(sums: Sequence[tuple[float, float, str]]) -> PredictionErrors:
    """``sums``: predicted / measured, spread and family of each model."""
    return PredictionErrors(
        log_ratio=np.array([np.log(ratio) for ratio, _, _ in sums]),
        spread=np.array([spread for _, spread, _ in sums]),
        families=np.array([family for _, _, family in sums], dtype=np.str_),
        known=np.ones(len(sums), dtype=bool),
    )


def leave_families_out(
    spec: PredictorSpec, data: Dataset, models: Sequence[MeasuredModel], say: Say = lambda _: None
) -> HeldOutPredictions:
    """Predict each family of models by a predictor that was trained without its tuples. A tuple of
    several families is predicted for each family; its last prediction is kept. Raises `UsageError`
    if there are too few families."""
    ids = {call.operator_id for call in data.calls}
    families = {name: members for name, members in families_of(models).items() if members & ids}
    if len(families) < LEAST_FAMILIES:
        raise UsageError(
            f"There are readings of {len(families)} model families; an evaluation needs at least "
            f"{LEAST_FAMILIES}.",
            "Measure models of other architectures first, for instance resnet18, vgg11, vit_b_16 "
            "and gpt2.",
        )
    calls = without_values(data)
    costs = CallCosts.empty(len(data))
    family_of = np.full(len(data), "", dtype=object)
    sums = []
    measured = measured_times(data)
    for number, (name, members) in enumerate(families.items()):
        say(f"{spec.name}: fitted without the family {name} ({number + 1} of {len(families)})")
        fitted = spec.fit(data.without(members))
        rows = np.array(
            [position for position, call in enumerate(data.calls) if call.operator_id in members]
        )
        costs.put(rows, fitted.predict([calls[row] for row in rows]))
        family_of[rows] = name
        sums += [_predicted(model, fitted, measured) for model in models if model.family == name]
    return HeldOutPredictions(costs, family_of.astype(np.str_), tuple(sums))


def measured_times(data: Dataset) -> dict[str, tuple[float, float]]:
    """Return by tuple id: time of a call within a model, and time saved if its weights are cached.
    Means, in us.
    """
    costs_of: dict[str, list[tuple[float, float]]] = {}
    for row in data.rows:
        costs_of.setdefault(row.call.operator_id, []).append(
            (row.cost.time_us.value + row.neighbours_us, row.fetching_us)
        )
    return {id_: tuple(np.mean(values, axis=0)) for id_, values in costs_of.items()}


def _predicted(
    model: MeasuredModel, fitted: FittedPredictor, measured: Mapping[str, tuple[float, float]]
) -> ModelPrediction:
    """``measured``: result of `measured_times`."""
    costs = fitted.predict(model.calls)
    counts = np.array(model.counts, dtype=float)
    times_us = costs.in_model(model.cached_share)[0].copy()
    order = np.argsort(-counts * times_us, kind="stable")
    narrowed = {}
    for number in range(max(MEASURED) + 1):
        if number in MEASURED:
            narrowed[number] = float(counts @ times_us)
        if number >= len(order):
            continue
        position = order[number]
        reading = measured.get(model.calls[position].operator_id)
        if reading is not None:
            time_us, fetching_us = reading
            times_us[position] = time_us - model.cached_share * fetching_us

    total = costs.sum(model.calls, model.counts, model.cached_share)
    return ModelPrediction(model, total, narrowed)


def cross_validated(
    spec: PredictorSpec, data: Dataset, say: Say = lambda _: None
) -> HeldOutPredictions:
    """Predict by ten-fold cross-validation. All readings of one tuple are in the same fold."""
    needs_scikit_learn()
    from sklearn.model_selection import GroupKFold

    ids = [call.operator_id for call in data.calls]
    calls = without_values(data)
    costs = CallCosts.empty(len(data))
    fold_of = np.zeros(len(data), dtype=int)
    folds = GroupKFold(min(FOLDS, len(set(ids))), shuffle=True, random_state=0)
    for number, (train, test) in enumerate(folds.split(ids, groups=ids)):
        say(f"{spec.name}: fold {number + 1} of {FOLDS}")
        fitted = spec.fit(data.where(np.isin(np.arange(len(data)), train)))
        costs.put(test, fitted.predict([calls[row] for row in test]))
        fold_of[test] = number
    return HeldOutPredictions(costs, fold_of.astype(np.str_))


@dataclass(frozen=True)
class DistanceCoverage:
    """Intervals by target, of calls that have up to this distance from the readings, and more than
    the row before.
    """

    distance: float
    count: int
    intervals: dict[str, IntervalCoverage]


@dataclass(frozen=True)
class Evaluation:
    """Scores of one predictor by target: time_us, power_w, energy_mj; of sums time_us and
    energy_mj.
    """

    predictor: str
    cross_validation: dict[str, Score | None]
    families: dict[str, Score | None]
    intervals: dict[str, IntervalCoverage]
    sums: dict[str, Score | None]
    sum_intervals: dict[str, IntervalCoverage]
    by_type: dict[str, Score] = field(default_factory=dict)  # time, families left out
    by_family: dict[str, Score] = field(default_factory=dict)
    narrowed: dict[int, Score | None] = field(default_factory=dict)  # see `ModelPrediction`
    unseen: Score | None = None  # time, of operator types outside the training data
    models: tuple[dict[str, Any], ...] = ()
    curve: tuple[tuple[int, float], ...] = ()  # (number of training tuples, median error of time)
    by_distance: tuple[
        DistanceCoverage, ...
    ] = ()  # between `DISTANCE_QUANTILES`, families left out

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; NaN, which JSON lacks, becomes None."""
        return without_nan(asdict(self))  # type: ignore[no-any-return]


def evaluate(
    spec: PredictorSpec,
    data: Dataset,
    models: Sequence[MeasuredModel],
    *,
    folds: bool = True,
    curve: bool = False,
    say: Say = lambda _: None,
) -> tuple[Evaluation, HeldOutPredictions]:
    """Raises `UsageError` if there are too few readings or families."""
    predictions = leave_families_out(spec, data, models, say)
    random = cross_validated(spec, data, say) if folds else None
    evaluation = replace(
        _evaluation(
            spec.name,
            data,
            predictions,
            *jackknife_half_widths(predictions.errors(data), predictions.sum_errors()),
        ),
        cross_validation=_scores(TARGETS, random.errors(data)) if random else {},
        curve=tuple(learning_curve(spec, data, say)) if curve else (),
    )
    return evaluation, predictions


def _scores(
    targets: Mapping[str, str], errors: Mapping[str, PredictionErrors]
) -> dict[str, Score | None]:
    return {target: Score.of(errors[name].log_ratio) for target, name in targets.items()}


def _coverages(
    targets: Mapping[str, str],
    errors: Mapping[str, PredictionErrors],
    widths: Mapping[str, Floats],
    chosen: Any = ...,
) -> dict[str, IntervalCoverage]:
    """``chosen``: the cases that count. Default: all."""
    intervals = {
        of: coverage(errors[name].where(chosen), widths[name][chosen])
        for of, name in targets.items()
    }
    return {of: interval for of, interval in intervals.items() if interval}


def _by_distance(
    distance: Floats, errors: Mapping[str, PredictionErrors], widths: Mapping[str, Floats]
) -> Iterator[DistanceCoverage]:
    low, limits = -np.inf, distance[np.isfinite(distance)]
    for share in DISTANCE_QUANTILES if len(limits) else ():
        high = float(np.quantile(limits, share))
        chosen, low = (distance > low) & (distance <= high), high
        yield DistanceCoverage(high, int(chosen.sum()), _coverages(TARGETS, errors, widths, chosen))


def _evaluation(
    name: str,
    data: Dataset,
    held: HeldOutPredictions,
    widths: Mapping[str, Floats],
    sum_widths: Mapping[str, Floats],
) -> Evaluation:
    """``widths``: half-widths of the intervals of calls; ``sum_widths``: of sums."""
    errors, of_sums = held.errors(data), held.sum_errors()
    log_ratio = errors["time"].log_ratio

    narrowed: dict[int, list[float]] = {number: [] for number in MEASURED}
    models = []
    for prediction in held.sums:
        cost = prediction.model.cost
        if cost is not None and cost.time_us.value:
            models.append(_model_json(prediction))
            for number, time_us in prediction.narrowed.items():
                narrowed[number].append(np.log(time_us / cost.time_us.value))
    return Evaluation(
        name,
        cross_validation={},
        families=_scores(TARGETS, errors),
        intervals=_coverages(TARGETS, errors, widths),
        sums=_scores(SUM_TARGETS, of_sums),
        sum_intervals=_coverages(SUM_TARGETS, of_sums, sum_widths),
        by_type=_scores_by(np.array([call.operator_type for call in data.calls]), log_ratio),
        by_family=_scores_by(held.families, log_ratio),
        narrowed={number: Score.of(np.array(ratios)) for number, ratios in narrowed.items()},
        unseen=Score.of(log_ratio[~held.costs.known]),
        models=tuple(models),
        by_distance=tuple(_by_distance(held.costs.distance, errors, widths)),
    )


def _scores_by(names: Names, log_ratio: Floats) -> dict[str, Score]:
    """Return the score of each name, the most frequent name first."""
    scores = {}
    for name in np.unique(names):
        score = Score.of(log_ratio[names == name])
        if name and score:
            scores[str(name)] = score
    return dict(sorted(scores.items(), key=lambda entry: -entry[1].count))


def _model_json(prediction: ModelPrediction) -> dict[str, Any]:
    model, total = prediction.model, prediction.total
    whole = cost_json(model.cost)
    return {
        "model": model.title,
        "family": model.family,
        "time_us": total.time_us,
        "whole_time_us": whole["time_us"],
        "energy_mj": None if np.isnan(total.energy_mj) else total.energy_mj,
        "whole_energy_mj": whole["energy_mj"],
    }


def learning_curve(
    spec: PredictorSpec, data: Dataset, say: Say = lambda _: None
) -> Iterator[tuple[int, float]]:
    """Yield (number of random training tuples, median error of time). The test set is a fixed fifth
    of the tuples.
    """
    ids = np.array(sorted({call.operator_id for call in data.calls}))
    order = np.random.default_rng(1).permutation(len(ids))
    test_ids, rest = ids[order[: len(ids) // 5]], ids[order[len(ids) // 5 :]]
    test = data.without(rest)
    measured = np.array([row.cost.time_us.value for row in test.rows])
    for number in (25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800):
        number = min(number, len(rest))
        say(f"{spec.name}: fitted with {number} tuples")
        predicted = spec.fit(data.without([*test_ids, *rest[number:]])).predict(
            without_values(test)
        )
        if score := Score.of(np.log(predicted.time_us / measured)):
            yield number, score.median
        if number == len(rest):
            return


def evaluate_fitted(
    fitted: FittedPredictor,
    data: Dataset,
    models: Sequence[MeasuredModel],
    calibration: Calibration = Calibration(),  # noqa: B008 - it is frozen
    all_readings: Dataset | None = None,
) -> tuple[Evaluation, HeldOutPredictions]:
    """Compare a fitted predictor with readings outside its training data, and with whole models.
    Without a ``calibration``, as for a predictor of another card model, there are no intervals.
    ``all_readings``: readings that may replace predictions of a model's most expensive tuples."""
    measured = measured_times(all_readings or data)
    family_of: dict[str, str] = {}
    for name, members in families_of(models).items():
        for operator_id in members:
            family_of.setdefault(operator_id, name)
    families = [family_of.get(call.operator_id, "") for call in data.calls]
    predictions = HeldOutPredictions(
        fitted.predict(without_values(data)),
        np.array(families, dtype=np.str_),
        tuple(_predicted(model, fitted, measured) for model in models),
    )
    widths = {
        name: calibration.half_widths(name, errors.spread, errors.known)
        for name, errors in predictions.errors(data).items()
    }
    sum_widths = {
        name: calibration.sum_half_widths(name, errors.spread)
        for name, errors in predictions.sum_errors().items()
    }
    return _evaluation(fitted.name, data, predictions, widths, sum_widths), predictions


def fit(
    spec: PredictorSpec, data: Dataset, models: Sequence[MeasuredModel], say: Say = lambda _: None
) -> StoredPredictor:
    """Learn from all readings, and calibrate the intervals by leaving families out, with the length
    scales of all readings. Raises `UsageError` if there are too few readings or families, or
    scikit-learn is not installed."""
    fitted = spec.fit(data)
    say(f"{spec.name}: fitted with all {len(data)} tuples")
    predictions = leave_families_out(spec.like(fitted), data, models, say)
    return StoredPredictor.of(
        data, fitted, Calibration.of(predictions.errors(data), predictions.sum_errors())
    )
