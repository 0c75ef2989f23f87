"""Predict whole models on a card model whose families have no reading in the training data.

    python -m benchmarks.blind_predictions --independent DATABASE [--card "NVIDIA H100 80GB HBM3"]

The variants are those of ``blind_variants.toml``, which says how they were chosen. Those that are
not in the package are read from ``--independent``, a database of a farm; without it they are
left out. For each family the predictor of the source card is fitted again, and the transfer to the
card again, without any tuple of the family (also those that it shares with others). The length
scales are learned once, without any of these families. Intervals have the calibration of the stored
predictor. Output: for each variant the measured and predicted time and energy, the 90 % intervals,
and for its tuples the median error and the coverage."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlmodel import Session

from farm.addons.predict import stored_predictor
from farm.addons.predict.dataset import (
    Dataset,
    MeasuredModel,
    TrainingRow,
    datasets,
    families_of,
    measured_models,
    stored_card_rates,
)
from farm.addons.predict.floor import above_floor
from farm.addons.predict.predictors import PREDICTORS, PredictorSpec
from farm.addons.predict.query import database_at
from farm.addons.predict.stored_predictor import PredictedValue, Predictions, StoredPredictor
from farm.addons.predict.transfer import SourceCosts, TransferredPredictor
from farm.exchange.packaged import packaged_database
from farm.store.captures import stored_tuples
from farm.types.figure import PassCost, value_of
from farm.types.tuple import NeededTuple

SOURCE = "NVIDIA H200"
LIST = Path(__file__).with_name("blind_variants.toml")


@dataclass(frozen=True)
class BlindModel:
    """A measured model, and the readings of its tuples in the same database."""

    title: str
    family: str
    cost: PassCost
    needed: list[NeededTuple]
    rows: dict[str, TrainingRow]  # by tuple id
    operator_ids: set[str]  # of all measured models of its family in this database


@dataclass(frozen=True)
class Comparison:
    """A predicted model beside its reading. `errors`: log(predicted / measured) of tuples."""

    model: BlindModel
    predictions: Predictions
    errors: list[float]
    inside: list[bool]

    def to_json(self) -> dict[str, object]:
        total = self.predictions.total
        return {
            "model": self.model.title,
            "time": _compared(total.time_us, self.model.cost.time_us.value),
            "energy": _compared(total.energy_mj, value_of(self.model.cost.energy_mj)),
            "tuples": len(self.errors),
            "median_error_of_tuples": float(np.median(np.abs(np.expm1(self.errors)))),
            "coverage_of_tuples": float(np.mean(self.inside)),
        }


def _compared(predicted: PredictedValue | None, measured: float | None) -> dict[str, float | bool]:
    """Error and half-width as shares, and whether the interval contains the measured value."""
    assert predicted is not None
    assert measured is not None
    low, high = predicted.low or 0.0, predicted.high or math.inf
    return {
        "measured": measured,
        "predicted": predicted.value,
        "error": predicted.value / measured - 1,
        "half_width": (high - low) / 2 / predicted.value,
        "inside": low <= measured <= high,
    }


def models_in(session: Session, card: str, titles: Sequence[str]) -> list[BlindModel]:
    """Return the models with these titles. Raises `SystemExit` if one has no whole reading."""
    data = datasets(session, card, stored_card_rates(session, SOURCE))[0]
    measured = measured_models(session, data.card, data.conditions)
    by_title = {model.title: model for model in measured if model.cost is not None}
    if missing := [title for title in titles if title not in by_title]:
        raise SystemExit(f"no whole reading on {card}: {', '.join(missing)}")
    ids = families_of(measured)
    rows = {row.call.operator_id: row for row in data.rows}
    return [_blind_model(session, data, by_title[title], rows, ids) for title in titles]


def _blind_model(
    session: Session,
    data: Dataset,
    model: MeasuredModel,
    rows: dict[str, TrainingRow],
    ids: dict[str, set[str]],
) -> BlindModel:
    launch = data.conditions.protocol.launch
    needed = stored_tuples(session, model.variant, "cuda", launch, data.conditions.card_model)
    assert model.cost is not None
    own_rows = {
        call.operator_id: rows[call.operator_id] for call in needed if call.operator_id in rows
    }
    return BlindModel(model.title, model.family, model.cost, needed, own_rows, ids[model.family])


def predictor_without(
    spec: PredictorSpec,
    source: Dataset,
    target: Dataset,
    removed: set[str],
    stored: StoredPredictor,
    card: str,
) -> TransferredPredictor:
    """Fit the predictor of the source card, and the transfer, without some tuples."""
    known = source.without(removed)
    fitted = spec.fit(known)
    of_source = dataclasses.replace(
        StoredPredictor.of(known, fitted, stored.calibration), path=None
    )

    def readings_of(ids: set[str]) -> list[TrainingRow]:
        return [row for row in known.rows if row.call.operator_id in ids]

    with packaged_database().read() as session:
        target_card = stored_card_rates(session, card)
    rows = target.without(removed).rows
    return TransferredPredictor.fit(SourceCosts(of_source, readings_of), target_card, rows)


def compared(model: BlindModel, predictor: TransferredPredictor, card: str) -> Comparison:
    predictions = above_floor(predictor.predict(model.needed, model.needed), model.needed, card)
    errors, inside = [], []
    for call, prediction in zip(model.needed, predictions.calls, strict=True):
        row = model.rows.get(call.operator_id)
        if row is None:
            continue
        time_us = row.cost.time_us.value + row.neighbours_us
        predicted = prediction.time_us
        errors.append(float(np.log(predicted.value / time_us)))
        inside.append((predicted.low or 0) <= time_us <= (predicted.high or np.inf))
    return Comparison(model, predictions, errors, inside)


def comparisons(card: str, models: Sequence[BlindModel]) -> Iterator[Comparison]:
    """Predict each model without the readings of its family."""
    with packaged_database().read() as session:
        source = datasets(session, SOURCE)[0]
        target = datasets(session, card, source.card)[0]
        packaged_ids = families_of(measured_models(session, source.card, source.conditions))
    stored = stored_predictor.find([stored_predictor.PACKAGED], SOURCE)
    assert stored is not None
    removed = {model.family: packaged_ids.get(model.family, set()) for model in models}
    for model in models:
        removed[model.family] = removed[model.family] | model.operator_ids
    best = PREDICTORS["best"]
    spec = best.like(best.fit(source.without(set().union(*removed.values()))))
    for family, ids in sorted(removed.items()):
        predictor = predictor_without(spec, source, target, ids, stored, card)
        for model in models:
            if model.family == family:
                yield compared(model, predictor, card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--independent", default="", help="database of the independent variants")
    parser.add_argument("--card", default="NVIDIA H100 80GB HBM3", help="name of the card model")
    arguments = parser.parse_args()
    titles = tomllib.loads(LIST.read_text())
    models = []
    with packaged_database().read() as session:
        models += models_in(session, arguments.card, titles["packaged"])
    if arguments.independent:
        with database_at(arguments.independent).read() as session:
            models += models_in(session, arguments.card, titles["independent"])
    with contextlib.suppress(KeyboardInterrupt):
        for comparison in comparisons(arguments.card, models):
            print(json.dumps(comparison.to_json()), flush=True)


if __name__ == "__main__":
    main()
