"""Whole models that were read: what predicted sums are held against, and what is held back together in an honest test."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy
from sqlmodel import Session

from farm.prediction.card import CardModel
from farm.prediction.dataset import Circumstances, Dataset, stored_specs
from farm.prediction.described import Described, describe
from farm.prediction.families import model_family
from farm.prediction.predictors import Answers
from farm.store import tables
from farm.store.reuse import tells_others
from farm.types.protocol import Protocol, Variant


@dataclass(frozen=True)
class Summed:
    """A model's sum. Spreads are standard deviations of the logarithm, before any calibration."""

    time_us: float
    time_spread: float
    energy_mj: float
    energy_spread: float


@dataclass(frozen=True)
class ReadModel:
    """A variant with its calls, as if nobody had looked at what stands in its tensors, and what its whole was read at.

    Figures are None where a whole has none; without a reading of the whole both are.
    """

    title: str
    variant: Variant
    family: str
    calls: tuple[Described, ...]
    counts: tuple[int, ...]
    in_cache: float  # of its weights, what a pass finds in the card's cache again
    time_us: float | None = None
    energy_mj: float | None = None

    @property
    def operator_ids(self) -> set[str]:
        return {call.operator_id for call in self.calls}

    def sum(self, answers: Answers) -> Summed:
        """Of what its calls are answered with, in their order."""
        return summed(self.calls, self.counts, answers, self.in_cache)


def in_cache(calls: Sequence[Described], counts: Sequence[int], l2_bytes: float) -> float:
    """The share of a model's weights that the next pass finds in the cache: all, where weights and the largest call fit in it.

    As wholes were read (`farm.benchmark.cache`), it is all or nothing but for models of just that size.
    """
    weights = sum(number * call.parameter_bytes for call, number in zip(calls, counts, strict=True))
    largest = max((call.bytes_moved - call.parameter_bytes for call in calls), default=0)
    return float(np.clip(2 - 1.5 * (weights + max(largest, 0)) / l2_bytes, 0.0, 1.0))


def summed(calls: Sequence[Described], counts: Sequence[int], answers: Answers, found_again: float) -> Summed:
    """A sum over calls: what is said of one operator type is wrong in one way, types are wrong independently of each other.

    Args:
        found_again: the share of weights that a pass finds in the cache (`in_cache`).
    """
    time_us, energy_mj = answers.among_others(found_again)
    number = np.array(counts, dtype=float)
    types = np.array([call.operator_type for call in calls])

    def of(values: Any, spreads: Any) -> tuple[float, float]:
        weighed = number * values
        own = [float((weighed * spreads)[types == one].sum()) for one in np.unique(types)]
        total = float(weighed.sum())
        return total, float(np.sqrt(np.sum(np.square(own)))) / total if total > 0 else 0.0

    return Summed(*of(time_us, answers.time_spread), *of(energy_mj, answers.energy_spread))


_CAPTURE = tables.Capture.__table__.c  # type: ignore[attr-defined]
_CALL = tables.Call.__table__.c  # type: ignore[attr-defined]
_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_VARIANT = tables.ModelVariant.__table__.c  # type: ignore[attr-defined]
_PROTOCOL = tables.Protocol.__table__.c  # type: ignore[attr-defined]


def read_models(session: Session, card: CardModel, about: Circumstances) -> list[ReadModel]:
    """Every variant that was extracted for such cards, with the newest sound reading of its whole."""
    wholes = _wholes(session, about)
    captures = session.execute(
        sqlalchemy.select(_CAPTURE.id, _CAPTURE.variant_id)
        .where(_CAPTURE.device_type == ("cpu" if card.kind == "cpu" else "cuda"))
        .order_by(_CAPTURE.launch != about.protocol.launch, _CAPTURE.origin, _CAPTURE.id.desc())
    ).all()
    chosen: dict[str, int] = {}
    for row in captures:
        chosen.setdefault(row.variant_id, row.id)
    names = [field.name for field in dataclasses.fields(Variant)]
    found = []
    for row in session.execute(sqlalchemy.select(*_VARIANT).where(_VARIANT.id.in_(list(chosen)))):
        variant = Variant(**{name: getattr(row, name) for name in names})
        counts = Counter(
            session.scalars(sqlalchemy.select(_CALL.operator_id).where(_CALL.capture_id == chosen[row.id]))
        )
        calls = blind_calls(session, card, counts, about.protocol)
        whole = wholes.get(row.id)
        found.append(
            ReadModel(
                str(variant),
                variant,
                model_family(variant.model),
                calls,
                (numbers := tuple(counts[call.operator_id] for call in calls)),
                in_cache(calls, numbers, card.l2_bytes),
                whole.time_us if whole else None,
                whole.energy_mj if whole else None,
            )
        )
    return sorted(found, key=lambda one: one.title)


def blind_calls(
    session: Session, card: CardModel, operator_ids: Iterable[str], protocol: Protocol
) -> tuple[Described, ...]:
    """Stored tuples as they are described where nobody has looked at their values."""
    return tuple(
        describe(card, id_, row.short_name, row.spec, row.flops, row.bytes_moved, tf32=protocol.tf32)
        for id_, row in sorted(stored_specs(session, operator_ids).items())
    )


def _wholes(session: Session, about: Circumstances) -> Mapping[str, Any]:
    specs = {row.id: row.spec for row in session.execute(sqlalchemy.select(_PROTOCOL.id, _PROTOCOL.spec))}
    alike = [
        id_
        for id_, spec in specs.items()
        if spec and Protocol(**{**spec, "data": "normal", "grad": False}) == about.protocol
    ]
    names = ("subject_id", "software_id", "method", "time_us", "energy_mj", "flags")
    query = sqlalchemy.select(*(_READING[name] for name in names)).where(
        _READING.subject_kind == "variant",
        _READING.card_model == about.card_model,
        _READING.software_id == about.software.id,
        _READING.method == about.method,
        _READING.protocol_id.in_(alike),
        _READING.simulated.is_(False),
    )
    return {
        row.subject_id: row
        for row in session.execute(query.order_by(_READING.created_at_s, _READING.id))
        if tells_others(row.flags)
    }


def families_of(models: Iterable[ReadModel]) -> dict[str, set[str]]:
    """Family -> the tuples of all its models: held back, all of them are."""
    found: dict[str, set[str]] = {}
    for model in models:
        found.setdefault(model.family, set()).update(model.operator_ids)
    return dict(sorted(found.items()))


def blind(data: Dataset) -> tuple[Described, ...]:
    """The calls of a data set as they are known before their model has run: without what stands in their tensors."""
    return tuple(
        dataclasses.replace(call, data_class="", data_known=False, zeros=0.0, positive=0.0, channels=0.0)
        for call in data.calls
    )
