"""Compiled models that no card has compiled: their kernels, the predictor of these, and in words
what compiling gains."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

import sqlalchemy
from sqlmodel import Session

from farm.addons.predict.compiled_predictor import (
    CompiledPredictor,
    library_factors,
    library_readings,
)
from farm.addons.predict.dataset import stored_card_rates
from farm.addons.predict.generated_kernels import KERNEL, LearnedKernels, kernel_readings
from farm.addons.predict.stored_predictor import StoredPredictor
from farm.exchange.packaged import packaged_database
from farm.store.columns import OPERATOR, READING
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.training.extract import Extraction


@functools.lru_cache(maxsize=32)
def kernels_without_card(variant: Variant, multiprocessors: int) -> Extraction:
    """See `farm.training.foreseen_kernels.foreseen_kernels`. The last results are kept."""
    from farm.training.foreseen_kernels import foreseen_kernels

    return foreseen_kernels(variant, multiprocessors)


def compiled_predictor(session: Session, operators: StoredPredictor) -> CompiledPredictor | None:
    """The predictor of compiled models on the card of ``operators``; None if no database has a
    reading of a generated kernel.

    The kernels of the card's model in the database are used; if it has none, those of the package:
    of the same model, or else of the model with most kernels."""
    with packaged_database().read() as packaged:
        for readings in (session, packaged):
            models = _card_models(readings)
            model = operators.card.model
            if model not in models and readings is packaged:
                model = next(iter(models), "")
            source = stored_card_rates(readings, model)
            learned = LearnedKernels.of(kernel_readings(readings, model), source)
            if learned is None:
                continue
            if model == operators.card.model:
                factors = library_factors(library_readings(readings, model), operators)
                return CompiledPredictor(operators, learned, operators.card, factors)
            note = f"Generated kernels are predicted from those of an {model}."
            learned = learned.for_another_card()
            return CompiledPredictor(operators, learned, operators.card, notes=(note,))
    return None


def _card_models(session: Session) -> list[str]:
    """The card models with readings of generated kernels; first the one with most."""
    number = sqlalchemy.func.count()
    query = (
        sqlalchemy.select(READING.card_model)
        .where(READING.subject_id == OPERATOR.id, OPERATOR.kind == KERNEL)
        .where(READING.simulated.is_(False))
        .group_by(READING.card_model)
        .order_by(number.desc(), READING.card_model)
    )
    return list(session.scalars(query))


def notes_on_kernels(variant: Variant) -> Iterator[str]:
    """How the kernels of a model were found that no card has compiled."""
    yield (
        f"Predicted: no card has compiled this model. The compiler of torch {version('torch')} "
        "listed its kernels on this host, without a card."
    )
    if variant.compile == "max-autotune":
        yield (
            "max-autotune chooses kernels by their times on the card. Those of `--compile default` "
            "are predicted instead."
        )


def why_lower_bound(unread: Iterable[NeededTuple]) -> str:
    """Why the prediction of calls without a reading is a lower bound; "" if it is none."""
    # PyTorch, aten/src/ATen/native/cuda/int8mm.cu.
    if all(entry.short_name != "_weight_int8pack_mm" for entry in unread):
        return ""
    return (
        "The time is a lower bound: `_weight_int8pack_mm` is predicted as a usual product, but "
        "PyTorch's kernel computes each output in a loop, without matrix units. No card has a "
        "reading of it."
    )
