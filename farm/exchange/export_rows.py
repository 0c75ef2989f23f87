"""Reads the database and fills every column of `farm.store.data_columns`, in batches of rows for an
export.

Rows are read as plain tuples, because a million ORM objects would take minutes. They are read in
batches, because all rows would not fit in memory. Arrow's `take` repeats a tuple, card or protocol
for each reading that refers to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from farm.store import data_columns as declared
from farm.store import tables
from farm.store.captures import VERIFYING_FARM, exported_id
from farm.store.columns import (
    CALL,
    CAPTURE,
    CARD,
    IMPORTED_VERDICT,
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
from farm.types.fingerprint import sound_fingerprint
from farm.types.reading import Trace
from farm.types.roofline import Roofline, roofline_of
from farm.types.tuple import short_name_of

if TYPE_CHECKING:
    import pyarrow as pa

Batches = Iterator[Mapping[str, Sequence[Any]]]

BATCH = 20_000  # rows in one batch: about 100 MB with all intermediate copies
TRACES_AT_ONCE = 200
KEPT = 20_000  # tuples and variants whose columns stay in memory


def _text(column: Any) -> Any:
    """Select a JSON column as text, because documents that are only copied need no parsing."""
    return sqlalchemy.cast(column, sqlalchemy.Text).label(column.name)


def _columns(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _positions(keys: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the distinct keys, and for each key its index among them."""
    position: dict[str, int] = {}
    at = [position.setdefault(key, len(position)) for key in keys]
    return list(position), at


def _spread(
    rows: Sequence[Mapping[str, Any]], at: Sequence[int], columns: Sequence[Column]
) -> dict[str, pa.Array]:
    """Build columns from `rows`: element i has the values of row `at[i]`."""
    import pyarrow as pa

    distinct = pa.RecordBatch.from_pylist(list(rows), declared.arrow_schema(columns))
    repeated = distinct.take(pa.array(at, pa.int64()))
    return dict(zip(repeated.schema.names, repeated.columns, strict=True))


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
    names = (*_DIRECT, *_REFERRING)
    columns = [READING.id]
    columns += [READING[name] for name in names]
    columns += [_text(READING[name]) for name in _JSON]
    for conditions in selection.where():
        query = sqlalchemy.select(*columns).where(*conditions)
        result = session.execute(query, execution_options={"yield_per": BATCH})
        for rows in result.partitions(BATCH):
            yield _of_readings(_columns(rows, ("reading_id", *names, *_JSON)), references)


def _of_readings(
    stored: dict[str, Sequence[Any]], references: _References
) -> dict[str, Sequence[Any]]:
    """Return the exported columns of readings from their stored columns."""
    ids, subject_at = _positions(stored["subject_id"])
    subjects = references.subjects(ids)

    columns = {name: stored[name] for name in ("reading_id", *_DIRECT, "cost_s")}
    columns |= _spread(subjects, subject_at, _OF_SUBJECT)
    columns["flags"] = [json.loads(text or "[]") for text in stored["flags"]]
    columns["throttle_reasons"] = [json.loads(text or "[]") for text in stored["throttle_reasons"]]
    columns["card_time_s"] = [_total_s(json.loads(text or "{}")) for text in stored["cost_s"]]

    columns["details"] = [text or "{}" for text in stored["details"]]
    details = [json.loads(text) for text in columns["details"]]
    for name, (part, key) in declared.IN_DETAILS.items():
        parts = [entry.get(part) or {} for entry in details] if part else details
        columns[name] = [entry.get(key) for entry in parts]

    for key, rows, referred in (
        ("software_id", references.software, declared.SOFTWARE),
        ("protocol_id", references.protocols, declared.PROTOCOL),
        ("card_id", references.cards, declared.CARD),
    ):
        ids, at = _positions(stored[key])
        columns |= _spread([rows[id_] for id_ in ids], at, referred)

    card_ids, protocol_ids = stored["card_id"], stored["protocol_id"]
    columns["roofline_share"] = [
        references.roofline_share(card_id, protocol_id, subjects[position], time_us)
        for card_id, protocol_id, position, time_us in zip(
            card_ids, protocol_ids, subject_at, stored["time_us"], strict=True
        )
    ]
    keys = zip(stored["subject_id"], card_ids, protocol_ids, stored["software_id"], strict=True)
    # In a JSON column, null is stored as the text "null".
    columns["kernels"] = [
        references.kernels(*key) if kernels in (None, "null") else kernels
        for kernels, key in zip(stored["kernels"], keys, strict=True)
    ]
    return columns


def _total_s(cost_s: Mapping[str, float]) -> float | None:
    """Return the card time of a reading from the times of its phases; None if it has none."""
    if not cost_s:
        return None
    return cost_s.get("total", math.fsum(cost_s.values()))


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
        flops, bytes_moved = subject.get("flops") or 0, subject.get("bytes_moved") or 0
        if not time_us or not (flops or bytes_moved):
            return None
        peaks = self._roofline(card_id, protocol_id, subject.get("dtype"))
        compute_s = flops / peaks.rate_of(short_name_of(subject.get("operator") or ""))
        memory_s = bytes_moved / peaks.bytes_per_s
        return max(compute_s, memory_s) * 1e6 / time_us

    def _roofline(self, card_id: str, protocol_id: str, dtype: str | None) -> Roofline:
        key = card_id, protocol_id, dtype
        if key not in self._rooflines:
            card = self.cards[card_id]
            self._rooflines[key] = roofline_of(
                card["card_kind"],
                card["card_model"],
                self._peaks[card_id],
                dtype=dtype or "float32",
                tf32=bool(self.protocols[protocol_id].get("tf32")),
            )
        return self._rooflines[key]

    def kernels(
        self, subject_id: str, card_id: str, protocol_id: str, software_id: str
    ) -> str | None:
        """The kernels of one call as JSON. None if not observed on this card model with this torch
        and these flags.
        """
        protocol = self.protocols[protocol_id]
        card_model = self.cards[card_id]["card_model"]
        torch = self.software[software_id]["torch"]
        for observed in self._kernels.get(subject_id, ()):
            is_same = observed.card_model == card_model and observed.torch == torch
            if is_same and _has_flags(protocol, observed.numerics):
                return observed.kernels
        return None


def _has_flags(protocol: Mapping[str, Any], numerics: Mapping[str, Any]) -> bool:
    return all(protocol.get(name, False) == value for name, value in numerics.items())


@dataclass(frozen=True)
class _ObservedKernels:
    """The kernels of one call of a tuple, as a verification saw them on a card.

    Attributes:
        numerics: the numeric flags of the protocol, by name.
        kernels: JSON.
    """

    card_model: str
    torch: str
    numerics: Mapping[str, Any]
    kernels: str


def _kernels(session: Session) -> dict[str, list[_ObservedKernels]]:
    """Return tuple id -> its kernels, from verified captures."""
    cards = session.execute(sqlalchemy.select(CARD.id, CARD.model))
    models = {row.id: row.model for row in cards}
    captures = sqlalchemy.select(CAPTURE.torch, CAPTURE.verification).order_by(CAPTURE.id)
    by_tuple: dict[str, list[_ObservedKernels]] = {}
    for torch, verification in session.execute(captures):
        if not isinstance(verification, dict) or verification.get("card") not in models:
            continue
        card_model = models[verification["card"]]
        numerics = verification.get("numerics") or {}
        for operator_id, kernels in (verification.get("tuple_kernels") or {}).items():
            observed = _ObservedKernels(card_model, torch, numerics, json.dumps(kernels))
            by_tuple.setdefault(operator_id, []).append(observed)
    return by_tuple


def operator_columns(session: Session, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return operator id -> its columns. JSON values are texts."""
    query = sqlalchemy.select(*(OPERATOR[name] for name in OPERATOR_ROW))
    by_id = {}
    for row in among(session, query, OPERATOR.id, ids):
        columns = operator_values(row)
        columns["operator_spec"] = row.spec
        for name in ("input_shapes", "output_shapes", "parameters", "operator_spec"):
            columns[name] = json.dumps(columns[name])
        by_id[row.id] = columns
    return by_id


# ------------------------------------------------------------------------ calls, captures,
# verdicts, traces


def _captures_of(session: Session, selection: Selection) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the captures that contain the selected operators or variants, with the columns that
    their calls share.
    """
    capture_ids: set[int] | None = None
    if _is_narrowed(selection):
        capture_ids = _selected_captures(session, selection)
    of_variant = (*declared.VARIANT_FIELDS, "flops", "model_flops", "bytes_moved")
    query = sqlalchemy.select(*CAPTURE, *(VARIANT[name] for name in of_variant)).join(
        tables.ModelVariant, VARIANT.id == CAPTURE.variant_id
    )
    same = ("device_type", "grad", "torch", "launch", "variant_id", *of_variant)
    for row in session.execute(query.order_by(CAPTURE.id)).all():
        if capture_ids is not None and row.id not in capture_ids:
            continue
        columns = {name: row._mapping[name] for name in same}
        columns["captured"] = tables.captured_as(row.origin)
        columns["capture_id"] = exported_id(row)
        is_imported = row.origin != columns["captured"]
        columns["origin"] = (row.verification or {}).get(VERIFYING_FARM, "") if is_imported else ""
        yield row, columns


def _is_narrowed(selection: Selection) -> bool:
    """True if a selection leaves readings out."""
    return bool(selection.conditions) or selection.subject_ids is not None


def _selected_captures(session: Session, selection: Selection) -> set[int]:
    """Return the ids of the captures of selected variants, and of those that call selected
    operators.
    """
    subjects: set[str] = set()
    for conditions in selection.where():
        query = sqlalchemy.select(READING.subject_id).where(*conditions).distinct()
        subjects.update(session.scalars(query))
    calls_of = sqlalchemy.select(CALL.capture_id).distinct()
    captures_of = sqlalchemy.select(CAPTURE.id)
    ids = {row[0] for row in among(session, calls_of, CALL.operator_id, subjects)}
    ids.update(row[0] for row in among(session, captures_of, CAPTURE.variant_id, subjects))
    return ids


def captures(session: Session, selection: Selection) -> Batches:
    for row, columns in _captures_of(session, selection):
        verification = {**(row.verification or {})}
        verification.pop(VERIFYING_FARM, None)
        columns["card_id"] = row.card_id
        columns["verification"] = json.dumps(verification)
        columns["created_at_s"] = row.created_at_s
        columns["compiled_for"] = row.card_model
        columns["compiled"] = row.compiled and json.dumps(row.compiled)
        yield _batch_of(columns)


def calls(session: Session, selection: Selection) -> Batches:
    plain = ("call_index", "module_path", "operator_id", "part", "owner")
    columns_read = [CALL[name] for name in plain]
    columns_read += [_text(CALL[name]) for name in ("data", "reads", "writes")]
    calls_of = sqlalchemy.select(*columns_read).order_by(CALL.call_index)
    for capture, of_capture in _captures_of(session, selection):
        rows = session.execute(calls_of.where(CALL.capture_id == capture.id)).all()
        if not rows:  # no card has listed the generated kernels yet
            continue
        columns: dict[str, Any] = {name: [value] * len(rows) for name, value in of_capture.items()}
        columns |= _columns(rows, (*plain, "seen", "reads", "writes"))
        ids, at = _positions(columns["operator_id"])
        operators = operator_columns(session, ids)
        columns |= _spread([operators[id_] for id_ in ids], at, declared.OPERATOR)
        yield columns


def verdicts(session: Session, selection: Selection) -> Batches:
    """Yield the verdicts of jobs that accepted a selected reading. An imported verdict without a
    job needs a selected reading, too. Cancelled jobs are left out, because they ended before they
    had all readings."""
    job_ids = _jobs_of(session, selection) if _is_narrowed(selection) else None
    yield from _own_verdicts(session, job_ids)
    imported = sqlalchemy.select(tables.ImportedVerdict).order_by(tables.ImportedVerdict.job_id)  # type: ignore[arg-type]
    for verdict in session.scalars(imported):
        if job_ids is not None and verdict.job_id not in job_ids:
            continue
        row = dict.fromkeys(column.name for column in declared.VERDICTS)
        row.update(verdict.row)
        row["origin"] = verdict.origin
        yield _batch_of(row)


def _jobs_of(session: Session, selection: Selection) -> set[str]:
    """Return the ids of the jobs, also of other farms, that accepted a selected reading."""
    accepted = sqlalchemy.select(ITEM.job_id).join(tables.ReadingRow, READING.id == ITEM.reading_id)
    imported = imported_without_job(session)
    readings_of = set[str]().union(*imported.values())
    job_ids, selected = set[str](), set[str]()
    for conditions in selection.where():
        job_ids.update(session.scalars(accepted.where(*conditions).distinct()))
        matching = sqlalchemy.select(READING.id).where(*conditions)
        selected.update(row[0] for row in among(session, matching, READING.id, readings_of))
    for job_id, reading_ids in imported.items():
        if not selected.isdisjoint(reading_ids):
            job_ids.add(job_id)
    return job_ids


def imported_without_job(
    session: Session, *, without_readings: bool = False
) -> dict[str, set[str]]:
    """Return job id -> ids of the readings that the verdict is made of, for the imported verdicts
    without a job.

    A verdict has no job if its export had only a part of its readings. ``without_readings``: only
    the verdicts of which the database has no reading."""
    query = sqlalchemy.select(tables.ImportedVerdict).where(
        IMPORTED_VERDICT.job_id.not_in(sqlalchemy.select(JOB.id))
    )
    by_job: dict[str, set[str]] = {}
    for verdict in session.scalars(query):
        made_of = json.loads(verdict.row.get("made_of") or "[]")
        by_job.setdefault(verdict.job_id, set()).update(entry[0] for entry in made_of)
    if not without_readings:
        return by_job

    reading_ids = set[str]().union(*by_job.values())
    stored = among(session, sqlalchemy.select(READING.id), READING.id, reading_ids)
    stored_ids = {row[0] for row in stored}
    return {job_id: ids for job_id, ids in by_job.items() if stored_ids.isdisjoint(ids)}


def _own_verdicts(session: Session, job_ids: set[str] | None) -> Batches:
    """Yield the verdicts of the jobs with these ids (None: of all jobs)."""
    verdict, job = tables.VerdictRow, tables.Job
    query = sqlalchemy.select(verdict, job).join(job, job.id == verdict.job_id).order_by(verdict.id)  # type: ignore[arg-type,attr-defined]
    query = query.where(job.state != tables.JobState.CANCELLED)  # type: ignore[arg-type]
    imported_ids = set(session.scalars(sqlalchemy.select(IMPORTED_VERDICT.job_id)))
    rows = [
        (found_verdict, found_job)
        for found_verdict, found_job in session.execute(query).all()
        if found_job.id not in imported_ids and (job_ids is None or found_job.id in job_ids)
    ]
    ids = [found_job.id for _, found_job in rows]
    query_models = sqlalchemy.select(ITEM.job_id, ITEM.card_model).distinct()
    models = by_key(lambda row: row.job_id, among(session, query_models, ITEM.job_id, ids))
    made_of, rounds = _made_of(session, ids), _rounds(session, ids)
    no_round: dict[str, Any] = {"capture_id": None, "operators": []}
    for found_verdict, found_job in rows:
        details = dict(found_verdict.details or {})
        details.pop("tuples", None)
        protocol = found_job.asked.get("protocol") or {}
        card_models = {row.card_model for row in models.get(found_job.id, ())}
        entries = made_of.get(found_job.id, ())
        row = {
            "job_id": found_job.id,
            "title": found_job.title,
            "job_kind": found_job.kind,
            "variant_id": found_job.variant_id,
            "card_models": sorted(card_models),
            "launch": protocol.get("launch"),
            "residency": protocol.get("residency"),
            "data_policy": protocol.get("data"),
            "round": found_verdict.round,
            "outcome": found_verdict.outcome,
            "target": found_verdict.target,
            "coverage": found_verdict.coverage,
            "accuracy_time": found_verdict.accuracy_time,
            "accuracy_energy": found_verdict.accuracy_energy,
            "created_at_s": found_verdict.created_at_s,
            "details": json.dumps(details),
            "request": json.dumps(found_job.asked),
            "made_of": json.dumps([entry for entry in entries if entry[2] <= found_verdict.round]),
            "origin": "",
        }
        row |= {name: details.get(name) for name in _FROM_DETAILS}
        row |= rounds.get((found_job.id, found_verdict.round), no_round)
        yield _batch_of(row)


_FROM_DETAILS = ["parts", "measured"]
_FROM_DETAILS += [
    column.name for column in declared.VERDICTS if column.name.startswith(("sum_", "whole_"))
]


def _made_of(
    session: Session, job_ids: Iterable[str]
) -> dict[str, list[tuple[str, str, int, bool]]]:
    """Return job id -> (reading id, role, round, reused) of each item that has a reading."""
    query = sqlalchemy.select(ITEM.job_id, ITEM.reading_id, ITEM.role, ITEM.round, ITEM.reused)
    query = query.where(ITEM.reading_id.is_not(None)).order_by(ITEM.id)
    items = by_key(lambda row: row.job_id, among(session, query, ITEM.job_id, job_ids))
    return {job_id: [tuple(row)[1:] for row in rows] for job_id, rows in items.items()}


def _rounds(session: Session, job_ids: Iterable[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return (job id, round number) -> the columns `operators` and `capture_id`."""
    rounds = {}
    query = sqlalchemy.select(ROUND.job_id, ROUND.number, ROUND.operators, *CAPTURE)
    query = query.outerjoin(tables.Capture, CAPTURE.id == ROUND.capture_id)
    for row in among(session, query, ROUND.job_id, job_ids):
        capture = None if row.id is None else exported_id(row)
        rounds[row.job_id, row.number] = {"capture_id": capture, "operators": list(row.operators)}
    return rounds


def _batch_of(row: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    return {name: [value] for name, value in row.items()}


def traces(session: Session, selection: Selection) -> Batches:
    trace = columns_of(tables.TraceRow)
    query = sqlalchemy.select(trace.reading_id, trace.packed).join(
        tables.ReadingRow, READING.id == trace.reading_id
    )
    for conditions in selection.where():
        result = session.execute(
            query.where(*conditions), execution_options={"yield_per": TRACES_AT_ONCE}
        )
        for rows in result.partitions(TRACES_AT_ONCE):
            series: list[tuple[Any, ...]] = []
            for reading_id, packed in rows:
                unpacked = Trace.unpack(packed)
                for name, (times_s, values) in unpacked.series.items():
                    series.append((reading_id, name, *unpacked.window_s, times_s, values))
            yield {name: [row[position] for row in series] for position, name in enumerate(_TRACE)}


_TRACE = ("reading_id", "series", "window_begin_s", "window_end_s", "times_s", "values")
