"""Estimate models and predict operators from Python. Nothing here runs on a card."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlmodel import Session

from farm.addons.predict.estimate import Estimate
from farm.addons.predict.floor import above_floor
from farm.addons.predict.query import EstimateQuery
from farm.addons.predict.stored_predictor import CallPrediction
from farm.errors import UsageError
from farm.exchange.first_answer import first_answer
from farm.operators.cost import cost
from farm.requests.partial_request import usual_variant
from farm.store.card_models import peaks_of
from farm.store.database import Database
from farm.subjects.needed import needed_tuple
from farm.training.captured_model import (
    CapturedModel,
    as_captured_for,
    capture_model,
    no_model,
    positional,
)
from farm.training.version import versioned
from farm.types.card_file import card_of_file
from farm.types.tuple import OperatorTuple
from farm.types.variant import Variant


def estimate(
    model: Any,
    inputs: Any = None,
    *,
    card: str | Path = "",
    batch: int | None = None,
    torch: str = "",
    fill: str = "auto",
    database: Database | None = None,
    **fields: Any,
) -> Estimate:
    """Estimate the cost of one pass of a model from readings, and from predictions where there are
    none.

    Args:
        model: a `torch.nn.Module` with its ``inputs``, a name, a variant or a `CapturedModel`:
            ``farm.estimate("resnet50", card="H200", batch=32)``.
        inputs: example inputs of a module: a tensor, a tuple of positional arguments, or a mapping
            of keyword arguments. Their sizes count, and their values do not.
        card: part of a card model's name, or the path of a file that describes a card
            (`farm.types.card_file`).
        batch: default: that of `farm run` on such a card.
        torch: a version or its beginning. Default: the version whose readings cover most of the
            model.
        fill: "auto", "roofline" or "none", as in `farm estimate --fill`.
        database: default: the database of the settings, then the packaged readings.
        fields: other fields of a variant, for a name, such as ``dtype="bfloat16"``.

    Returns:
        The estimate: ``time`` in us and ``energy`` in mJ with intervals; ``to_json()`` equals `farm
        estimate --json`.

    Raises:
        UsageError, NoReadings, CaptureError: the model or card is unknown, or nothing is known
        about the model.

    Example:
        >>> farm.estimate(torch.nn.Linear(64, 8), torch.randn(4, 64), card="H200").time
        PredictedValue(value=1.9, low=1.7, high=2.1)
    """
    if inputs is not None:
        model = capture_model(model, *positional(inputs))
    named = card_of_file(card) if isinstance(card, Path) else card
    query = EstimateQuery(named, torch=torch, fill=fill)
    if isinstance(model, CapturedModel):
        extraction = as_captured_for(model, query.kind(database))
        return query.answer(model.variant, extraction.needed(), database=database)
    if isinstance(model, str):
        kind = query.kind(database)
        model = usual_variant(model, kind, batch=batch, **fields).variant
    if not isinstance(model, Variant):
        raise no_model(model)
    return query.answer(versioned(model), database=database)


def predict(
    tuples: Iterable[OperatorTuple], *, card: str, torch: str = "", database: Database | None = None
) -> list[CallPrediction]:
    """Predict the time and energy of operator tuples on a card, with 90 % intervals. Readings are
    not used.

    Args:
        tuples: such as ``farm.capture_model(model, inputs).tuples``.
        card: part of a card model's name.

    Raises:
        UsageError: no card or several cards match, or there is no predictor for the card.
    """
    needed = [needed_tuple(spec, cost(spec)) for spec in tuples]
    query = EstimateQuery(card, torch=torch)

    def answer(session: Session) -> list[CallPrediction]:
        model = query.card_model(session)
        kind, _ = peaks_of(session, model, "float32")
        predictor, _, why = query.predictor(session, model, query.protocol(kind), kind)
        if predictor is None:
            raise UsageError(
                f"Nothing is predicted: {why}.", "Measure on the card first: `farm calibrate`."
            )
        return list(above_floor(predictor.predict(needed, needed), needed, model).calls)

    return first_answer(answer, bool, database=database)
