"""Writes checked rows of an export into the database. Each function gets rows of one table, skips
those that the database has, and returns the number of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.exchange.import_file import Row
from farm.exchange.import_jobs import farm_of, known_capture, write_job
from farm.exchange.import_rows import CheckedCall, CheckedCapture, CheckedReading
from farm.store import captures, content, tables
from farm.store.columns import CALL, CAPTURE, CARD, IMPORTED_VERDICT, OPERATOR, READING
from farm.store.database import among, fetch_values
from farm.subjects.label import label_of
from farm.types.reading import Trace
from farm.types.tuple import Cost, OperatorTuple
from farm.types.variant import Variant
from farm.types.verification import Verification


def _missing(session: Session, column: Any, ids: Sequence[str]) -> set[str]:
    rows = among(session, sqlalchemy.select(column), column, ids)
    return set(ids).difference(row[0] for row in rows)


def _store_operators(session: Session, costs: Mapping[OperatorTuple, Cost]) -> None:
    """Store operators. If exports of two versions have different costs of one, the order of imports
    has no influence. The costs of operators that this farm captured or measured do not change."""
    columns = [OPERATOR[name] for name in ("id", "flops", "bytes_moved", "output_shapes", "label")]
    stored = fetch_values(session, columns, (spec.id for spec in costs))
    new = {spec: cost for spec, cost in costs.items() if spec.id not in stored}
    content.store_operators(session, new)
    for spec, cost in costs.items():
        if spec in new:
            continue
        before = stored[spec.id]._asdict()
        del before["id"]
        merged = {
            "flops": _agreed(before["flops"], cost.flops),
            "bytes_moved": _agreed(before["bytes_moved"], cost.bytes),
            "output_shapes": before["output_shapes"],
            # Versions wrote the keywords of a call in different orders.
            "label": min(before["label"], label_of(spec)),
        }
        if merged["output_shapes"] is None:
            merged["output_shapes"] = _shapes(cost)
        if merged != before and not _is_own(session, spec.id):
            operator = sqlalchemy.update(tables.Operator).where(OPERATOR.id == spec.id)
            session.execute(operator.values(**merged))


def _store_variant(session: Session, variant: Variant, cost: Cost, model_flops: int) -> None:
    """Store a variant. Costs of two versions: as in `_store_operators`."""
    content.store_variant(
        session,
        variant,
        flops=cost.flops,
        model_flops=model_flops,
        bytes_moved=cost.bytes,
    )
    stored = session.get_one(tables.ModelVariant, variant.id)
    before = stored.flops, stored.model_flops, stored.bytes_moved
    merged = (
        _agreed(stored.flops, cost.flops),
        _agreed(stored.model_flops, model_flops),
        _agreed(stored.bytes_moved, cost.bytes),
    )
    if merged != before and not _is_own(session, stored.id):
        stored.flops, stored.model_flops, stored.bytes_moved = merged


def _agreed(first: int, second: int) -> int:
    """Return the smaller of two costs that are known: later versions count less that is not moved.
    0: unknown.
    """
    return min(first, second) if first and second else first or second


def _shapes(cost: Cost) -> list[list[int]] | None:
    return None if cost.output_shapes is None else [list(shape) for shape in cost.output_shapes]


def _is_own(session: Session, subject_id: str) -> bool:
    """True if this farm has captured or measured an operator or a variant."""
    is_own = CAPTURE.origin.in_(captures.OWN_CAPTURES)
    calling = sqlalchemy.select(CAPTURE.id).join(tables.Call, CALL.capture_id == CAPTURE.id)
    queries = (
        sqlalchemy.select(READING.id).where(READING.subject_id == subject_id, READING.origin == ""),
        sqlalchemy.select(CAPTURE.id).where(CAPTURE.variant_id == subject_id, is_own),
        calling.where(CALL.operator_id == subject_id, is_own),
    )
    return any(session.execute(query.limit(1)).first() is not None for query in queries)


def write_readings(session: Session, records: Sequence[CheckedReading]) -> int:
    missing = _missing(session, READING.id, [record.row["id"] for record in records])
    new = {record.row["id"]: record for record in records if record.row["id"] in missing}.values()
    for software in dict.fromkeys(record.software for record in new):
        content.store_software(session, software)
    for protocol in dict.fromkeys(record.protocol for record in new):
        content.store_protocol(session, protocol)
    cards = {record.row["card_id"]: record.card for record in new}
    content.insert_new(session, tables.CardRow, list(cards.values()))

    costs = {}
    variants = {}
    for record in new:
        if isinstance(record.subject, OperatorTuple):
            costs[record.subject] = record.cost
        else:
            variants[record.subject] = record
    _store_operators(session, costs)
    for variant, record in variants.items():
        _store_variant(session, variant, record.cost, record.model_flops)

    content.insert_new(session, tables.ReadingRow, [record.row for record in new])
    return len(new)


def write_captures(session: Session, records: Sequence[CheckedCapture]) -> int:
    """Write the captures that the database does not have yet. Return their number. A capture refers
    to its card only if the database has the card."""
    new = 0
    card_ids = [record.row["card_id"] for record in records if record.row["card_id"]]
    missing_cards = _missing(session, CARD.id, card_ids)
    for record in records:
        _store_variant(session, record.variant, record.cost, record.model_flops)
        row = dict(record.row)
        stored = _same_capture(session, row)
        if stored is None:
            if row["card_id"] in missing_cards:
                row["card_id"] = None
            session.add(tables.Capture(**row))
            session.flush()
            new += 1
        elif _verified_at_s(row["verification"]) > _verified_at_s(stored.verification):
            stored.verification = row["verification"]
    return new


def _same_capture(session: Session, row: Row) -> tables.Capture | None:
    """Return the capture that was imported from the same farm before, or the one of this farm that
    was exported.
    """
    same = [CAPTURE[name] == row[name] for name in captures.CAPTURE_KEY]
    captured = tables.captured_as(row["origin"])
    verification = _without_farm(row["verification"])
    for capture in session.scalars(sqlalchemy.select(tables.Capture).where(*same)):
        if tables.captured_as(capture.origin) != captured:
            continue
        if farm_of(capture) == row["verification"][captures.VERIFYING_FARM]:
            return capture
        is_own = capture.origin == captured
        if is_own and (capture.verification or {}) == verification:
            return capture
    return None


def _without_farm(verification: Row) -> dict[str, Any]:
    return {name: value for name, value in verification.items() if name != captures.VERIFYING_FARM}


def _verified_at_s(verification: Row | None) -> float:
    return Verification.from_json(verification).read_at_s or 0.0


def write_calls(session: Session, records: Sequence[CheckedCall]) -> int:
    _store_operators(session, {record.spec: record.cost for record in records})
    ids = _imported_captures(session)
    rows = [
        {"capture_id": ids[record.capture], **record.row}
        for record in records
        if record.capture in ids
    ]
    keys = sqlalchemy.select(CALL.capture_id, CALL.call_index)
    stored = among(session, keys, CALL.capture_id, (row["capture_id"] for row in rows))
    stored_keys = set(map(tuple, stored))
    new = [row for row in rows if (row["capture_id"], row["call_index"]) not in stored_keys]
    if new:
        session.execute(sqlalchemy.insert(tables.Call.__table__), new)  # type: ignore[attr-defined]
    return len(new)


def _imported_captures(session: Session) -> dict[tuple[str, str], int]:
    """Return (capture id of exports, farm) -> id in this database."""
    columns = (CAPTURE[name] for name in ("id", "origin", *captures.CAPTURE_KEY))
    imported = session.execute(
        sqlalchemy.select(*columns).where(CAPTURE.origin.startswith(tables.IMPORTED_PREFIX))
    ).all()
    farms = {row.id: tables.farm_of_origin(row.origin) for row in imported}
    for id_ in [id_ for id_, farm in farms.items() if not farm]:  # imported by an older version
        farms[id_] = farm_of(session.get_one(tables.Capture, id_))
    return {(captures.exported_id(row), farms[row.id]): row.id for row in imported}


def write_verdicts(session: Session, rows: Sequence[dict[str, Any]]) -> int:
    new = 0
    for row in rows:
        rounds_of = sqlalchemy.select(IMPORTED_VERDICT.round)
        rounds = set(session.scalars(rounds_of.where(IMPORTED_VERDICT.job_id == row["job_id"])))
        if row["round"] in rounds:
            _choose_capture(session, row)
            continue
        if not rounds and session.get(tables.Job, row["job_id"]) is not None:  # a job of this farm
            continue
        session.add(tables.ImportedVerdict(**row))
        session.flush()
        new += 1
        if row["row"].get("made_of"):
            write_job(session, row)
    return new


def _choose_capture(session: Session, row: Row) -> None:
    """Choose the capture of an imported round again: an older version may have dropped the capture
    of its farm.
    """
    stored = session.get(tables.Round, (row["job_id"], row["round"]))
    captured = known_capture(session, row["row"], row["origin"])
    if stored is not None and captured is not None:
        stored.capture_id = captured


def write_traces(session: Session, series: Sequence[tuple[str, Trace]]) -> int:
    """Write the series of imported readings. Two batches may contain series of the same reading."""
    traces: dict[str, Trace] = {}
    for reading_id, trace in series:
        traces.setdefault(reading_id, Trace(trace.window_s, {})).series.update(trace.series)
    imported = READING.id.in_(list(traces)), READING.origin != ""
    new = 0
    for reading_id in session.scalars(sqlalchemy.select(READING.id).where(*imported)).all():
        stored, trace = session.get(tables.TraceRow, reading_id), traces[reading_id]
        before = Trace.unpack(stored.packed) if stored else Trace(trace.window_s, {})
        if more := trace.series.keys() - before.series.keys():
            packed = Trace(before.window_s, {**trace.series, **before.series}).pack()
            session.merge(tables.TraceRow(reading_id=reading_id, packed=packed))
            new += len(more)
    return new
