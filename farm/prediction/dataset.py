"""The data set that predictors are fitted to: one row for each tuple, card model, software and class of data that was read.

What a row holds of the call is known before it is read (`farm.prediction.described`); beside it stands what the reading said:
one call looped, and what a sum takes of it, with what other operators add. Of several readings alike the newest counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import sqlalchemy
from sqlmodel import Session

from farm.prediction import features
from farm.prediction.card import CardModel, card_model
from farm.prediction.described import Described, describe
from farm.store import tables
from farm.store.reuse import tells_others
from farm.store.rows import in_batches
from farm.types.protocol import Protocol, Software
from farm.types.reading import Details

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Circumstances:
    """What readings must have in common to be learnt from together."""

    card_model: str
    software: Software
    method: int
    protocol: Protocol  # the class of data and autograd do not count: they are told by the call

    def to_json(self) -> dict[str, Any]:
        return {
            "card_model": self.card_model,
            "software": self.software.to_json(),
            "method": self.method,
            "protocol": self.protocol.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        software, protocol = Software(**data["software"]), Protocol(**data["protocol"])
        return cls(data["card_model"], software, data["method"], protocol)


@dataclass(frozen=True)
class Row:
    """One tuple as it was read, looped. Figures are of one call, half-widths of the 95 % interval."""

    reading_id: str
    call: Described
    time_us: float
    time_half_width_us: float
    power_w: float | None  # energy over time
    energy_mj: float | None
    energy_half_width_mj: float | None
    neighbours_us: float  # what other operators add to the time where it stands in a model
    fetching_us: float  # of the time looped, what fetching its weights takes that a small model finds in the cache
    flags: tuple[str, ...]
    kernels: tuple[str, ...]  # that ran, where a card was looked at: known of a reading alone, and never learnt from


@dataclass(frozen=True)
class Dataset:
    """Readings of one card model under the same circumstances."""

    card: CardModel
    circumstances: Circumstances
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def calls(self) -> tuple[Described, ...]:
        return tuple(row.call for row in self.rows)

    @functools.cached_property
    def key(self) -> str:
        """A hash of the readings, what is known of the card, and the features' version: what was fitted to it has the same."""
        about = hashlib.sha256(
            f"{features.VERSION} {json.dumps(self.circumstances.to_json(), sort_keys=True)}".encode()
        )
        about.update(json.dumps(self.card.to_json(), sort_keys=True).encode())
        for reading_id in sorted(row.reading_id for row in self.rows):
            about.update(reading_id.encode())
        return about.hexdigest()[:32]

    def of(self, operator_ids: Iterable[str]) -> Dataset:
        wanted = set(operator_ids)
        return self.where([row.call.operator_id in wanted for row in self.rows])

    def without(self, operator_ids: Iterable[str]) -> Dataset:
        left_out = set(operator_ids)
        return self.where([row.call.operator_id not in left_out for row in self.rows])

    def where(self, chosen: Sequence[bool]) -> Dataset:
        return dataclasses.replace(self, rows=tuple(row for row, taken in zip(self.rows, chosen, strict=True) if taken))

    def records(self) -> Iterator[dict[str, Any]]:
        """A plain record for each row: the columns of the data dictionary."""
        software = self.circumstances.software
        for row in self.rows:
            yield {
                **dataclasses.asdict(row.call),
                **{name: getattr(row, name) for name in _FIGURES},
                "flags": list(row.flags),
                "kernels": list(row.kernels),
                "card_model": self.card.model,
                **{name: getattr(software, name) for name in ("torch", "cuda", "cudnn", "driver")},
                "method": self.circumstances.method,
                **{name: getattr(self.circumstances.protocol, name) for name in ("launch", "residency", "tf32")},
                "features_version": features.VERSION,
            }

    def frame(self) -> pandas.DataFrame:
        """The same as a frame; needs pandas."""
        import pandas

        return pandas.DataFrame.from_records(list(self.records()))


_FIGURES = [field.name for field in dataclasses.fields(Row) if field.name not in ("call", "flags", "kernels")]
_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_OPERATOR = tables.Operator.__table__.c  # type: ignore[attr-defined]
_CARD = tables.Card.__table__.c  # type: ignore[attr-defined]
_SOFTWARE = tables.Software.__table__.c  # type: ignore[attr-defined]
_PROTOCOL = tables.Protocol.__table__.c  # type: ignore[attr-defined]
_COLUMNS = (
    *("id", "subject_id", "software_id", "protocol_id", "method", "time_us", "time_half_width_us", "energy_mj"),
    *("energy_half_width_mj", "flags", "details", "kernels", "created_at_s"),
)


def stored_card(session: Session, model: str) -> CardModel:
    """What the database knows of a card model."""
    rows = session.execute(sqlalchemy.select(_CARD.kind, _CARD.fingerprint).where(_CARD.model == model)).all()
    return card_model(rows[0].kind if rows else "cuda", model, [row.fingerprint for row in rows])


def datasets(session: Session, model: str) -> list[Dataset]:
    """All that was read of a card model, the largest set of like circumstances first. Sound readings alone, none of a study.

    Args:
        model: the card's, as it is stored.
    """
    card = stored_card(session, model)
    software = {
        row.id: Software(**{name: value for name, value in row._mapping.items() if name != "id"})
        for row in session.execute(sqlalchemy.select(*_SOFTWARE))
    }
    protocols = {row.id: row.spec for row in session.execute(sqlalchemy.select(_PROTOCOL.id, _PROTOCOL.spec))}
    query = sqlalchemy.select(*(_READING[name] for name in _COLUMNS)).where(
        _READING.card_model == model, _READING.subject_kind == "operator", _READING.simulated.is_(False)
    )
    newest: dict[Circumstances, dict[tuple[str, str], Any]] = defaultdict(dict)
    of: dict[tuple[int, str, str], tuple[Circumstances, str]] = {}
    for row in session.execute(query.order_by(_READING.created_at_s, _READING.id)):
        if row.method is None or not tells_others(row.flags) or not row.time_us > 0:
            continue
        key = (row.method, row.software_id, row.protocol_id)
        if key not in of:
            spec = protocols[row.protocol_id] or {}
            protocol = Protocol(**{**spec, "data": "normal", "grad": False})
            about = Circumstances(model, software[row.software_id], row.method, protocol)
            of[key] = (about, spec["data"])
        circumstances, data = of[key]
        if circumstances.protocol.placement:
            continue  # what a wire takes is not what is learnt here
        newest[circumstances][row.subject_id, data] = row
    specs = stored_specs(session, {subject for rows in newest.values() for subject, _ in rows})
    found = []
    for circumstances, rows in newest.items():
        made = [
            _row(card, specs[subject], data, row, circumstances.protocol.tf32)
            for (subject, data), row in rows.items()
            if subject in specs
        ]
        found.append(Dataset(card, circumstances, tuple(made)))
    return sorted(found, key=lambda one: (-len(one), str(one.circumstances)))


def stored_specs(session: Session, ids: Iterable[str]) -> dict[str, Any]:
    """Operator id -> its row: name, description, FLOPs and bytes."""
    names = ("id", "short_name", "spec", "flops", "bytes_moved")
    return {
        row.id: row
        for batch in in_batches(sorted(ids))
        for row in session.execute(
            sqlalchemy.select(*(_OPERATOR[name] for name in names)).where(_OPERATOR.id.in_(batch))
        )
    }


def _row(card: CardModel, operator: Any, data: str, row: Any, tf32: bool) -> Row:
    call = describe(
        card, operator.id, operator.short_name, operator.spec, operator.flops, operator.bytes_moved, data, tf32=tf32
    )
    details = Details.from_json(row.details)
    context = details.context
    return Row(
        reading_id=row.id,
        call=call,
        time_us=row.time_us,
        time_half_width_us=row.time_half_width_us,
        power_w=row.energy_mj / row.time_us * 1e3 if row.energy_mj else None,
        energy_mj=row.energy_mj,
        energy_half_width_mj=row.energy_half_width_mj,
        # What was seen as less than nothing is noise of operators that take a microsecond.
        neighbours_us=max(context.effect_us, -0.5 * row.time_us) if context else 0.0,
        fetching_us=_fetching_us(row.time_us, details),
        flags=tuple(row.flags or ()),
        kernels=tuple(sorted(row.kernels or ())),
    )


def _fetching_us(time_us: float, details: Details) -> float:
    """As `farm.verdict.choice` takes it: against the loop with everything warm, where the loop walked through copies."""
    if details.context is None or (details.copies or 1) == 1:
        return 0.0
    looped_us = (details.burst.time_us if details.burst else None) or time_us
    return max(-0.3 * time_us, min(0.9 * time_us, looped_us - details.context.alone_us))
