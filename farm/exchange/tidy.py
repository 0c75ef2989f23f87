"""Reads the database and fills every column of `farm.store.data_columns`, in batches of rows for an
export.

Rows are read as plain tuples, because a million ORM objects would take minutes. They are read in
batches, because all rows would not fit in memory. Arrow's `take` repeats a tuple, card or protocol
for each reading that refers to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from farm.devices.fingerprint import sound_fingerprint
from farm.operators.roofline import Roofline, roofline_of
from farm.store import data_columns as declared
from farm.store import tables
from farm.store.columns import (
    CALL,
    CAPTURE,
    CARD,
    IMPORTED,
    ITEM,
    JOB,
    OPERATOR,
    READING,
    ROUND,
    VARIANT,
    columns_of,
)
from farm.store.data_columns import Column
from farm.store.database import among, by_key
from farm.store.query import (
    OPERATOR_ROW,
    Selection,
    card_values,
    operator_values,
    protocol_values,
)
from farm.types.protocol import content_id
from farm.types.reading import Trace

if TYPE_CHECKING:
    import pyarrow as pa

Batches = Iterator[Mapping[str, Sequence[Any]]]

BATCH = 20_000  # rows in one batch: about 100 MB with all intermediate copies
KEPT = 20_000  # tuples and variants whose columns stay in memory


def _text(column: Any) -> Any:
    """Select a JSON column as text, because documents that are only copied need no parsing."""
    return sqlalchemy.cast(column, sqlalchemy.Text).label(column.name)


def _columns(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _places(keys: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the distinct keys, and for each key its index among them."""
    place: dict[str, int] = {}
    at = [place.setdefault(key, len(place)) for key in keys]
    return list(place), at


def _spread(
    rows: Sequence[Mapping[str, Any]], at: Sequence[int], columns: Sequence[Column]
) -> dict[str, pa.Array]:
    """Build columns from `rows`: element i has the values of row `at[i]`."""
    import pyarrow as pa

    taken = pa.RecordBatch.from_pylist(list(rows), declared.arrow_schema(columns)).take(
        pa.array(at, pa.int64())
    )
    return dict(zip(taken.schema.names, taken.columns, strict=True))


# -------------------------------------------------------------------------------------------
# readings

_DTYPE = Column("dtype", "text", "")
_OF_SUBJECT = tuple(
    {column.name: column for column in (_DTYPE, *declared.OPERATOR, *declared.VARIANT)}.values()
)
_DIRECT = (
    "subject_kind",
    "subject_id",
    "method",
    "origin",
    *(column.name for column in declared.FIGURES),
)
_REFERRING = ("card_id", "software_id", "protocol_id")
_JSON = ("flags", "throttle_reasons", "details", "cost_s", "kernels")


def readings(session: Session, selection: Selection) -> Batches:
    references = _References(session)
    wanted = [
        READING.id,
        *(READING[name] for name in (*_DIRECT, *_REFERRING)),
        *(_text(READING[name]) for name in _JSON),
    ]
    names = ("reading_id", *_DIRECT, *_REFERRING, *_JSON)
    for conditions in selection.where():
        query = sqlalchemy.select(*wanted).where(*conditions)
        for rows in session.execute(query, execution_options={"yield_per": BATCH}).partitions(
            BATCH
        ):
            yield _of_readings(_columns(rows, names), references)


def _of_readings(
    read: dict[str, Sequence[Any]], references: _References
) -> dict[str, Sequence[Any]]:
    ids, subject_at = _places(read["subject_id"])
    subjects = references.subjects(ids)
    costs_s = [json.loads(text or "{}") for text in read["cost_s"]]
    found: dict[str, Sequence[Any]] = {
        **{name: read[name] for name in ("reading_id", *_DIRECT, "cost_s")},
        **_spread(subjects, subject_at, _OF_SUBJECT),
        "flags": [json.loads(text or "[]") for text in read["flags"]],
        "throttle_reasons": [json.loads(text or "[]") for text in read["throttle_reasons"]],
        "details": [text or "{}" for text in read["details"]],
        "card_time_s": [
            cost.get("total", math.fsum(cost.values())) if cost else None for cost in costs_s
        ],
    }
    details = [json.loads(text) for text in found["details"]]
    for name, (part, key) in declared.IN_DETAILS.items():
        found[name] = [((entry.get(part) or {}) if part else entry).get(key) for entry in details]
    for key, rows, columns in (
        ("software_id", references.software, declared.SOFTWARE),
        ("protocol_id", references.protocols, declared.PROTOCOL),
        ("card_id", references.cards, declared.CARD),
    ):
        ids, at = _places(read[key])
        found |= _spread([rows[id_] for id_ in ids], at, columns)
    found["roofline_share"] = [
        references.roofline_share(card, protocol, subjects[place], time_us)
        for card, protocol, place, time_us in zip(
            read["card_id"], read["protocol_id"], subject_at, read["time_us"], strict=True
        )
    ]
    keys = zip(
        *(read[name] for name in ("subject_id", "card_id", "protocol_id", "software_id")),
        strict=True,
    )
    # In a JSON column, null is stored as the text "null".
    found["kernels"] = [
        references.kernels(*key) if own in (None, "null") else own
        for own, key in zip(read["kernels"], keys, strict=True)
    ]
    return found


class _References:
    """The rows that readings refer to. Loads all software, protocols and cards (few) at once,
    subjects on demand.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.software = {row.id: row._mapping for row in self._all(tables.SoftwareRow)}
        self.protocols = {row.id: protocol_values(row) for row in self._all(tables.ProtocolRow)}
        self.cards = {row.id: card_values(row) for row in self._all(tables.CardRow)}
        self._peaks = {id_: card["card_fingerprint"] for id_, card in self.cards.items()}
        for card in self.cards.values():
            card["card_fingerprint"] = json.dumps(sound_fingerprint(card["card_fingerprint"]))
        self._subjects: dict[str, dict[str, Any]] = {}
        self._rooflines: dict[tuple[str, str, str | None], Roofline] = {}
        self._kernels = _kernels(session)

    def _all(self, table: Any) -> Sequence[Any]:
        return self.session.execute(sqlalchemy.select(table.__table__)).all()

    def subjects(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the columns of the tuples or variants with these ids."""
        if len(self._subjects) > KEPT:
            self._subjects.clear()
        missing = [id_ for id_ in ids if id_ not in self._subjects]
        self._subjects |= operator_columns(self.session, missing)
        variants = [id_ for id_ in missing if id_ not in self._subjects]
        for row in among(self.session, sqlalchemy.select(*VARIANT), VARIANT.id, variants):
            per_byte = row.flops / row.bytes_moved if row.bytes_moved else None
            self._subjects[row.id] = {**row._mapping, "flops_per_byte": per_byte}
        return [self._subjects.get(id_) or {} for id_ in ids]

    def roofline_share(
        self, card_id: str, protocol_id: str, subject: Mapping[str, Any], time_us: float
    ) -> float | None:
        flops, bytes_moved, dtype = (
            subject.get("flops"),
            subject.get("bytes_moved"),
            subject.get("dtype"),
        )
        if not time_us or (not flops and not bytes_moved):
            return None
        key = card_id, protocol_id, dtype
        peaks = self._rooflines.get(key)
        if peaks is None:
            card, tf32 = self.cards[card_id], bool(self.protocols[protocol_id].get("tf32"))
            peaks = self._rooflines[key] = roofline_of(
                card["card_kind"],
                card["card_model"],
                self._peaks[card_id],
                dtype=dtype or "float32",
                tf32=tf32,
            )
        return (
            max((flops or 0) / peaks.flops_per_s, (bytes_moved or 0) / peaks.bytes_per_s)
            * 1e6
            / time_us
        )

    def kernels(
        self, subject_id: str, card_id: str, protocol_id: str, software_id: str
    ) -> str | None:
        """The kernels of one call as JSON. None if not observed on this card model with this torch
        and these flags.
        """
        protocol = self.protocols[protocol_id]
        for card_model, torch, numerics, kernels in self._kernels.get(subject_id, ()):
            if (
                card_model == self.cards[card_id]["card_model"]
                and torch == self.software[software_id]["torch"]
                and all(protocol.get(name, False) == value for name, value in numerics.items())
            ):
                return kernels
        return None


def _kernels(session: Session) -> dict[str, list[tuple[str, str, dict[str, Any], str]]]:
    """Return tuple id -> (card model, torch, numeric flags, kernels as JSON), from verified
    captures.
    """
    models = {row.id: row.model for row in session.execute(sqlalchemy.select(CARD.id, CARD.model))}
    found: dict[str, list[tuple[str, str, dict[str, Any], str]]] = {}
    for torch, seen in session.execute(
        sqlalchemy.select(CAPTURE.torch, CAPTURE.verification).order_by(CAPTURE.id)
    ):
        if not isinstance(seen, dict) or seen.get("card") not in models:
            continue
        for operator_id, kernels in (seen.get("tuple_kernels") or {}).items():
            about = (models[seen["card"]], torch, seen.get("numerics") or {}, json.dumps(kernels))
            found.setdefault(operator_id, []).append(about)
    return found


def operator_columns(session: Session, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return operator id -> its columns. JSON values are texts."""
    found, documents = {}, ("input_shapes", "output_shapes", "parameters", "operator_spec")
    for row in among(
        session, sqlalchemy.select(*(OPERATOR[name] for name in OPERATOR_ROW)), OPERATOR.id, ids
    ):
        values = operator_values(row) | {"operator_spec": row.spec}
        found[row.id] = values | {name: json.dumps(values[name]) for name in documents}
    return found


# ------------------------------------------------------------------------ calls, captures,
# verdicts, traces


def _captures_of(session: Session, selection: Selection) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the captures that contain the selected operators or variants, with the columns that
    their calls share.
    """
    wanted: set[int] | None = None
    if selection.conditions or selection.subject_ids is not None:
        subjects = {
            subject
            for conditions in selection.where()
            for subject in session.scalars(
                sqlalchemy.select(READING.subject_id).where(*conditions).distinct()
            )
        }
        calling = among(
            session, sqlalchemy.select(CALL.capture_id).distinct(), CALL.operator_id, subjects
        )
        of_variants = among(session, sqlalchemy.select(CAPTURE.id), CAPTURE.variant_id, subjects)
        wanted = {capture_id for (capture_id,) in (*calling, *of_variants)}
    of_variant = (*declared.VARIANT_FIELDS, "flops", "model_flops", "bytes_moved")
    query = sqlalchemy.select(*CAPTURE, *(VARIANT[name] for name in of_variant)).join(
        tables.ModelVariant, VARIANT.id == CAPTURE.variant_id
    )
    for row in session.execute(query.order_by(CAPTURE.id)).all():
        if wanted is None or row.id in wanted:
            captured = tables.captured_as(row.origin)
            same = ("device_type", "grad", "torch", "launch", "variant_id", *of_variant)
            columns = {
                "capture_id": capture_key(row),
                "captured": captured,
                **{name: row._mapping[name] for name in same},
                "origin": (row.verification or {}).get(ORIGIN, "")
                if row.origin != captured
                else "",
            }
            yield row, columns


def capture_key(row: Any) -> str:
    """Return the id of a capture, which is the same on every farm. `row` is a row of the table of
    captures.
    """
    captured = tables.captured_as(row.origin)
    about = (row.variant_id, row.device_type, row.grad, row.torch, row.launch, captured)
    return content_id([*about, row.card_model] if row.card_model else list(about))


ORIGIN = "imported_from"  # key for the farm's name in an imported capture's verification


def captures(session: Session, selection: Selection) -> Batches:
    for row, columns in _captures_of(session, selection):
        seen = {name: value for name, value in (row.verification or {}).items() if name != ORIGIN}
        rest = {
            "card_id": row.card_id,
            "verification": json.dumps(seen),
            "created_at_s": row.created_at_s,
        }
        rest |= {
            "compiled_for": row.card_model,
            "compiled": row.compiled and json.dumps(row.compiled),
        }
        yield {name: [value] for name, value in (columns | rest).items()}


def calls(session: Session, selection: Selection) -> Batches:
    names = ("call_index", "module_path", "operator_id", "part", "owner", "seen", "reads", "writes")
    wanted = [CALL[name] for name in names[:5]] + [
        _text(CALL[name]) for name in ("data", "reads", "writes")
    ]
    for row, columns in _captures_of(session, selection):
        query = (
            sqlalchemy.select(*wanted).where(CALL.capture_id == row.id).order_by(CALL.call_index)
        )
        rows = session.execute(query).all()
        if not rows:  # a compiled model, before a card listed its kernels
            continue
        found = _columns(rows, names)
        ids, at = _places(found["operator_id"])
        known = operator_columns(session, ids)
        yield {
            **{name: [value] * len(at) for name, value in columns.items()},
            **found,
            **_spread([known[id_] for id_ in ids], at, declared.OPERATOR),
        }


def verdicts(session: Session, selection: Selection) -> Batches:
    """Yield the verdicts of jobs that accepted a selected reading. An imported verdict without a
    job needs a selected reading, too. Cancelled jobs are left out, because they ended before they
    had all readings."""
    wanted = (
        _jobs_of(session, selection)
        if selection.conditions or selection.subject_ids is not None
        else None
    )
    yield from _own_verdicts(session, wanted)
    imported = sqlalchemy.select(tables.ImportedVerdict).order_by(tables.ImportedVerdict.job_id)  # type: ignore[arg-type]
    for row in session.scalars(imported):
        if wanted is None or row.job_id in wanted:
            empty = dict.fromkeys(column.name for column in declared.VERDICTS)
            yield _one(**{**empty, **row.row, "origin": row.origin})


def _jobs_of(session: Session, selection: Selection) -> set[str]:
    """Return the ids of the jobs, also of other farms, that accepted a selected reading."""
    accepted = sqlalchemy.select(ITEM.job_id).join(tables.ReadingRow, READING.id == ITEM.reading_id)
    imported = imported_without_job(session)
    readings_of = {reading_id for ids in imported.values() for reading_id in ids}
    wanted, selected = set[str](), set[str]()
    for conditions in selection.where():
        wanted.update(session.scalars(accepted.where(*conditions).distinct()))
        found = among(
            session, sqlalchemy.select(READING.id).where(*conditions), READING.id, readings_of
        )
        selected.update(id_ for (id_,) in found)
    return wanted | {job_id for job_id, ids in imported.items() if not selected.isdisjoint(ids)}


def imported_without_job(
    session: Session, *, without_readings: bool = False
) -> dict[str, set[str]]:
    """Return job id -> ids of the readings that the verdict is made of, for the imported verdicts
    without a job.

    A verdict has no job if its export had only a part of its readings. ``without_readings``: only
    the verdicts of which the database has no reading."""
    query = sqlalchemy.select(tables.ImportedVerdict).where(
        IMPORTED.job_id.not_in(sqlalchemy.select(JOB.id))
    )
    found: dict[str, set[str]] = {}
    for row in session.scalars(query):
        made_of = json.loads(row.row.get("made_of") or "[]")
        found.setdefault(row.job_id, set()).update(entry[0] for entry in made_of)
    if not without_readings:
        return found
    all_ids = {reading_id for ids in found.values() for reading_id in ids}
    there = {id_ for (id_,) in among(session, sqlalchemy.select(READING.id), READING.id, all_ids)}
    return {job_id: ids for job_id, ids in found.items() if there.isdisjoint(ids)}


def _own_verdicts(session: Session, wanted: set[str] | None) -> Batches:
    """Yield the verdicts of the jobs with the ids `wanted` (None: of all jobs)."""
    verdict, job = tables.VerdictRow, tables.Job
    theirs = set(session.scalars(sqlalchemy.select(IMPORTED.job_id)))
    query = sqlalchemy.select(verdict, job).join(job, job.id == verdict.job_id).order_by(verdict.id)  # type: ignore[arg-type,attr-defined]
    query = query.where(job.state != tables.JobState.CANCELLED)  # type: ignore[arg-type]
    found = session.execute(query).all()
    rows = [
        row for row in found if row[1].id not in theirs and (wanted is None or row[1].id in wanted)
    ]
    ids = [of.id for _, of in rows]
    card_models = sqlalchemy.select(ITEM.job_id, ITEM.card_model).distinct()
    models = by_key(lambda row: row.job_id, among(session, card_models, ITEM.job_id, ids))
    made_of, rounds = _made_of(session, ids), _rounds(session, ids)
    for found_verdict, of in rows:
        details = {
            name: value for name, value in (found_verdict.details or {}).items() if name != "tuples"
        }
        protocol = of.asked.get("protocol") or {}
        yield _one(
            job_id=of.id,
            title=of.title,
            job_kind=of.kind,
            variant_id=of.variant_id,
            card_models=sorted({row.card_model for row in models.get(of.id, ())}),
            launch=protocol.get("launch"),
            residency=protocol.get("residency"),
            data_policy=protocol.get("data"),
            **{name: getattr(found_verdict, name) for name in _SAME_IN_VERDICT},
            **{name: details.get(name) for name in _FROM_DETAILS},
            details=json.dumps(details),
            request=json.dumps(of.asked),
            **rounds.get((of.id, found_verdict.round), {"capture_id": None, "operators": []}),
            made_of=json.dumps(
                [entry for entry in made_of.get(of.id, ()) if entry[2] <= found_verdict.round]
            ),
            origin="",
        )


_FROM_DETAILS = ["parts", "measured"]
_FROM_DETAILS += [one.name for one in declared.VERDICTS if one.name.startswith(("sum_", "whole_"))]
_SAME_IN_VERDICT = [
    "round",
    "outcome",
    "target",
    "coverage",
    "accuracy_time",
    "accuracy_energy",
    "created_at_s",
]


def _made_of(
    session: Session, job_ids: Iterable[str]
) -> dict[str, list[tuple[str, str, int, bool]]]:
    """Return job id -> (reading id, role, round, reused) of each item that has a reading."""
    query = sqlalchemy.select(ITEM.job_id, ITEM.reading_id, ITEM.role, ITEM.round, ITEM.reused)
    query = query.where(ITEM.reading_id.is_not(None)).order_by(ITEM.id)
    items = by_key(lambda row: row.job_id, among(session, query, ITEM.job_id, job_ids))
    return {job_id: [tuple(row)[1:] for row in its] for job_id, its in items.items()}


def _rounds(session: Session, job_ids: Iterable[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return (job id, round number) -> the columns `operators` and `capture_id`."""
    found = {}
    query = sqlalchemy.select(ROUND.job_id, ROUND.number, ROUND.operators, *CAPTURE)
    query = query.outerjoin(tables.Capture, CAPTURE.id == ROUND.capture_id)
    for row in among(session, query, ROUND.job_id, job_ids):
        capture = None if row.id is None else capture_key(row)
        found[row.job_id, row.number] = {"capture_id": capture, "operators": list(row.operators)}
    return found


def _one(**values: Any) -> dict[str, Sequence[Any]]:
    return {name: [value] for name, value in values.items()}


def traces(session: Session, selection: Selection) -> Batches:
    trace = columns_of(tables.TraceRow)
    for conditions in selection.where():
        of_reading = READING.id == trace.reading_id
        query = sqlalchemy.select(trace.reading_id, trace.packed).join(
            tables.ReadingRow, of_reading
        )
        for rows in session.execute(
            query.where(*conditions), execution_options={"yield_per": 200}
        ).partitions(200):
            unpacked = [(reading_id, Trace.unpack(packed)) for reading_id, packed in rows]
            found = [
                (id_, name, *one.window_s, *both)
                for id_, one in unpacked
                for name, both in one.series.items()
            ]
            yield {column: [row[place] for row in found] for place, column in enumerate(_TRACE)}


_TRACE = ("reading_id", "series", "window_begin_s", "window_end_s", "times_s", "values")
