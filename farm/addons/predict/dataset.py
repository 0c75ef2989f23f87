"""The training data of predictors: readings as rows, and measured models to compare predicted sums
with.

A row is one tuple on one card model, software and class of data. It has the description of the call
(`farm.addons.predict.call_features`) and values of the newest reading: time, power and energy of
one call in a loop, and the corrections for a call within a model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import sqlalchemy
from sqlmodel import Session

from farm.addons.predict import call_features
from farm.addons.predict.call_features import CallDescription, describe
from farm.addons.predict.families import model_family
from farm.addons.predict.tile_roofline import CardRates, card_rates
from farm.store.columns import (
    CALL,
    CAPTURE,
    CARD,
    GENERATE_KERNELS,
    OF_TUPLES,
    OF_WHOLES,
    OPERATOR,
    PROTOCOL,
    READING,
    VARIANT,
)
from farm.store.content import stored_software, stored_variant
from farm.store.database import among
from farm.store.reuse import sound_readings
from farm.subjects.registry import unpredictable_kinds
from farm.types.details import Details
from farm.types.fields import Record, adapter, cost_from_json, figure_json
from farm.types.figure import Figure, PassCost, figure_of
from farm.types.protocol import Protocol
from farm.types.software import Software
from farm.types.variant import Variant


@dataclass(frozen=True)
class DatasetConditions(Record):
    """Properties that are equal for all readings of one predictor's training data."""

    card_model: str
    software: Software
    method: int
    protocol: Protocol  # without the class of data and autograd, which are properties of a call

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return adapter(cls).validate_python(data)  # type: ignore[no-any-return, arg-type]


@dataclass(frozen=True)
class TrainingRow:
    """Measured values of one tuple, for one call in a loop."""

    reading_id: str
    call: CallDescription
    cost: PassCost
    neighbours_us: float  # added by other operators if the call is part of a model
    fetching_us: float  # part of the time: loading weights that a small model finds in the cache
    flags: tuple[str, ...]
    kernels: tuple[str, ...]  # known only after measuring, so never a feature
    card_id: str = ""  # cards of one model differ; not a feature


@dataclass(frozen=True)
class Dataset:
    card: CardRates
    conditions: DatasetConditions
    rows: tuple[TrainingRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def calls(self) -> tuple[CallDescription, ...]:
        return tuple(row.call for row in self.rows)

    @functools.cached_property
    def key(self) -> str:
        """Hash of the readings, the card model and the version of the features. A stored predictor
        contains it.
        """
        conditions = json.dumps(self.conditions.to_json(), sort_keys=True)
        digest = hashlib.sha256(f"{call_features.VERSION} {conditions}".encode())
        digest.update(json.dumps(dataclasses.asdict(self.card), sort_keys=True).encode())
        for reading_id in sorted(row.reading_id for row in self.rows):
            digest.update(reading_id.encode())
        return digest.hexdigest()[:32]

    def without(self, operator_ids: Iterable[str]) -> Dataset:
        """Return the training rows of all other tuples."""
        removed = set(operator_ids)
        return self.where([call.operator_id not in removed for call in self.calls])

    def where(self, chosen: Iterable[bool]) -> Dataset:
        return dataclasses.replace(
            self,
            rows=tuple(row for row, is_chosen in zip(self.rows, chosen, strict=True) if is_chosen),
        )

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record for each row, with the columns of the data dictionary."""
        software, protocol = self.conditions.software, self.conditions.protocol
        for row in self.rows:
            yield {
                **dataclasses.asdict(row.call),
                "reading_id": row.reading_id,
                **figure_json("time", "us", row.cost.time_us),
                "power_w": row.cost.mean_power_w,
                **figure_json("energy", "mj", row.cost.energy_mj),
                "neighbours_us": row.neighbours_us,
                "fetching_us": row.fetching_us,
                "flags": list(row.flags),
                "kernels": list(row.kernels),
                "card_model": self.card.model,
                "torch": software.torch,
                "cuda": software.cuda,
                "cudnn": software.cudnn,
                "driver": software.driver,
                "method": self.conditions.method,
                "launch": protocol.launch,
                "residency": protocol.residency,
                "tf32": protocol.tf32,
                "features_version": call_features.VERSION,
            }


def _plain_protocol(spec: Mapping[str, Any]) -> Protocol:
    return Protocol(**{**spec, "data": "normal", "grad": False})


_COLUMNS = [
    "id",
    "subject_id",
    "software_id",
    "protocol_id",
    "method",
    "time_us",
    "time_half_width_us",
    "energy_mj",
]
_COLUMNS += ["energy_half_width_mj", "flags", "details", "kernels", "card_id", "created_at_s"]


def stored_card_rates(session: Session, model: str) -> CardRates:
    """Build a card model from the fingerprints of its cards in the database and from its data
    sheet.
    """
    # Cards that measured only generated kernels do not change the peaks: their readings are not
    # used.
    generating = sqlalchemy.select(VARIANT.id).where(GENERATE_KERNELS)
    copied = sqlalchemy.select(PROTOCOL.id).where(PROTOCOL.spec["data"].as_string() == "copied")
    used = sqlalchemy.select(READING.card_id).where(READING.subject_id.not_in(generating))
    used = used.where(READING.protocol_id.not_in(copied))
    fingerprints = sqlalchemy.select(CARD.kind, CARD.fingerprint).where(CARD.model == model)
    cards = (
        session.execute(fingerprints.where(CARD.id.in_(used))).all()
        or session.execute(fingerprints).all()
    )
    return card_rates(cards[0].kind if cards else "cuda", model, [row.fingerprint for row in cards])


def datasets(
    session: Session,
    model: str,
    described_for: CardRates | None = None,
    only: Collection[str] | None = None,
) -> list[Dataset]:
    """Return all usable readings of a card model (stored name): one data set by
    `DatasetConditions`, the largest first. ``described_for``: describe the calls for this card
    model instead; ``only``: ids of tuples."""
    card = described_for or stored_card_rates(session, model)
    protocols = {
        row.id: row.spec or {}
        for row in session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec))
    }
    newest: dict[DatasetConditions, dict[tuple[str, str], Any]] = defaultdict(dict)

    @functools.cache
    def conditions_of(method: int, software_id: str, protocol_id: str) -> DatasetConditions:
        return DatasetConditions(
            model,
            stored_software(session, software_id),
            method,
            _plain_protocol(protocols[protocol_id]),
        )

    chosen = [
        OF_TUPLES,
        *([READING.subject_id.in_(only)] if only is not None else []),
    ]
    for row in sound_readings(session, model, _COLUMNS, *chosen):
        conditions = conditions_of(row.method, row.software_id, row.protocol_id)
        data = protocols[row.protocol_id]["data"]
        # Predictions cover fast memory only; the values of copied data are unknown.
        if row.time_us > 0 and not conditions.protocol.slow_tensors and data != "copied":
            newest[conditions][row.subject_id, data] = row
    keys = itertools.chain.from_iterable(newest.values())
    specs = stored_specs(session, {subject for subject, _ in keys})
    data_sets = []
    for conditions, rows in newest.items():
        of = functools.partial(_training_row, card, tf32=conditions.protocol.tf32)
        made = tuple(
            of(specs[subject], data, row)
            for (subject, data), row in rows.items()
            if subject in specs
        )
        data_sets.append(Dataset(card, conditions, made))
    return sorted(data_sets, key=lambda one: (-len(one), str(one.conditions)))


def stored_specs(session: Session, ids: Iterable[str]) -> dict[str, Any]:
    """Return stored operators by id, without generated kernels: rows with name, spec, FLOPs and
    bytes.
    """
    names = ("id", "short_name", "spec", "flops", "bytes_moved", "output_shapes")
    query = sqlalchemy.select(*(OPERATOR[name] for name in names)).where(
        OPERATOR.kind.not_in(unpredictable_kinds())
    )
    return {row.id: row for row in among(session, query, OPERATOR.id, sorted(ids))}


def _training_row(
    card: CardRates, operator: Any, data: str, row: Any, *, tf32: bool
) -> TrainingRow:
    details, rough = Details.from_json(row.details), "rough" in (row.flags or ())
    context, fetching_us = details.context, 0.0
    if context is not None and (details.launching.copies or 1) > 1:
        # As in `farm.verdict.corrections`: time of a loop over copies minus time of a loop with all
        # tensors in the cache.
        looped_us = (details.burst.time_us.value if details.burst else None) or row.time_us
        fetching_us = max(-0.3 * row.time_us, min(0.9 * row.time_us, looped_us - context.alone_us))
    # Only the time of a rough reading is precise enough to learn from.
    energy_mj = None if rough else figure_of(row.energy_mj, row.energy_half_width_mj)
    return TrainingRow(
        reading_id=row.id,
        call=_described(card, operator, data, tf32=tf32),
        cost=PassCost(Figure(row.time_us, row.time_half_width_us), energy_mj),
        # A negative effect larger than this is noise of operators that take a microsecond.
        neighbours_us=max(context.effect_us.value, -0.5 * row.time_us) if context else 0.0,
        fetching_us=fetching_us,
        flags=tuple(row.flags or ()),
        kernels=tuple(sorted(row.kernels or ())),
        card_id=row.card_id or "",
    )


def _described(card: CardRates, row: Any, data: str = "", *, tf32: bool) -> CallDescription:
    costs = row.flops, row.bytes_moved
    return describe(
        card, row.id, row.short_name, row.spec, *costs, data, tf32=tf32, outputs=row.output_shapes
    )


@dataclass(frozen=True)
class MeasuredModel:
    """A variant with its calls (described without tensor values) and its whole reading, if there is
    one.
    """

    title: str
    variant: Variant
    family: str
    calls: tuple[CallDescription, ...]
    counts: tuple[int, ...]
    cached_share: float  # share of its weights that the next pass finds in the card's cache
    cost: PassCost | None = None  # of the whole model; None: it has no reading

    @property
    def operator_ids(self) -> set[str]:
        return {call.operator_id for call in self.calls}


def cached_share(calls: Sequence[CallDescription], counts: Sequence[int], l2_bytes: float) -> float:
    """Estimate the share (0 to 1) of a model's weights that the next pass finds in the L2 cache.

    In measurements the share is 0 or 1, except for models about as large as the cache
    (`farm.benchmark.cache`)."""
    weights = sum(number * call.parameter_bytes for call, number in zip(calls, counts, strict=True))
    largest = max((call.bytes_moved - call.parameter_bytes for call in calls), default=0)
    return float(np.clip(2 - 1.5 * (weights + max(largest, 0)) / l2_bytes, 0.0, 1.0))


def measured_models(
    session: Session, card: CardRates, conditions: DatasetConditions
) -> list[MeasuredModel]:
    """Return all variants captured for this kind of card, with the newest usable whole reading, if
    there is one.
    """
    protocol = conditions.protocol
    specs = session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec))
    alike = {row.id for row in specs if row.spec and _plain_protocol(row.spec) == protocol}
    wholes = {
        row.subject_id: row
        for row in sound_readings(session, conditions.card_model, _COLUMNS, OF_WHOLES)
        if (row.software_id, row.method) == (conditions.software.id, conditions.method)
        and row.protocol_id in alike
    }
    captures = session.execute(
        sqlalchemy.select(CAPTURE.id, CAPTURE.variant_id)
        .where(CAPTURE.device_type == card.device_type)
        .order_by(CAPTURE.launch != protocol.launch, CAPTURE.origin, CAPTURE.id.desc())
    ).all()
    chosen = {row.variant_id: row.id for row in reversed(captures)}
    models = []
    for row in session.execute(
        sqlalchemy.select(*VARIANT).where(VARIANT.id.in_(list(chosen)), ~GENERATE_KERNELS)
    ):
        variant = stored_variant(row._asdict())
        numbers = Counter(
            session.scalars(
                sqlalchemy.select(CALL.operator_id).where(CALL.capture_id == chosen[row.id])
            )
        )
        specs_of = sorted(stored_specs(session, numbers).items())
        calls = tuple(_described(card, spec, tf32=protocol.tf32) for _, spec in specs_of)
        counts = tuple(numbers[id_] for id_, _ in specs_of)
        share, whole = cached_share(calls, counts, card.l2_bytes), wholes.get(row.id)
        models.append(
            MeasuredModel(
                title=str(variant),
                variant=variant,
                family=model_family(variant.model),
                calls=calls,
                counts=counts,
                cached_share=share,
                cost=cost_from_json(whole._mapping) if whole else None,
            )
        )
    return sorted(models, key=lambda one: one.title)


def families_of(models: Iterable[MeasuredModel]) -> dict[str, set[str]]:
    """Return the tuple ids of each family of models; an evaluation leaves them out together."""
    families: dict[str, set[str]] = {}
    for model in sorted(models, key=lambda model: model.family):
        families.setdefault(model.family, set()).update(model.operator_ids)
    return families


def without_values(data: Dataset) -> tuple[CallDescription, ...]:
    """Return the calls of a data set without their tensors' values, which are unknown until the
    model runs.
    """
    unknown = {
        "data_class": "",
        "data_known": False,
        "zeros": 0.0,
        "positive": 0.0,
        "channels": 0.0,
    }
    return tuple(dataclasses.replace(call, **unknown) for call in data.calls)  # type: ignore[arg-type]
