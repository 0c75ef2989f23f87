"""Captures in the database: the calls a model is made of, as predicted at submit time and as seen on a card."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import update
from sqlmodel import Session, col, func, select

from farm.store import tables
from farm.store.content import StoredCall, store_capture, store_operators
from farm.store.database import Database, read_clock_s
from farm.types.validation import parse
from farm.types.value_profiles import class_of
from farm.types.verification import Verification


def store_values(
    session: Session, capture_id: int, seen: Mapping[tuple[str, str], Sequence[list[dict[str, Any] | None]]]
) -> None:
    """Beside each call, what was seen at it: calls match by module path, operator and order.

    A call that finds no match, or one of another number of activations, keeps an empty list: nothing is known.
    """
    call, operator = tables.Call, tables.Operator
    query = (
        select(call.call_index, call.module_path, operator.name, operator.spec)
        .join(operator, col(operator.id) == col(call.operator_id))
        .where(call.capture_id == capture_id)
        .order_by(col(call.call_index))
    )
    met: Counter[tuple[str, str]] = Counter()
    rows = []
    for index, path, name, spec in session.exec(query).all():
        key = (path, name)
        there = seen.get(key, ())
        data = list(there[met[key]]) if met[key] < len(there) else []
        met[key] += 1
        tensors = spec.get("tensors", ())
        activations = sum(tensor["role"] == "activation" for tensor in tensors)
        held = sum(tensor["role"] != "activation" and not tensor.get("name") for tensor in tensors)
        fits = len(data) in (activations, activations + held)
        rows.append({"capture_id": capture_id, "call_index": index, "data": data if fits else []})
    if rows:
        session.execute(update(call), rows)


def stored_values(session: Session, capture_id: int) -> dict[tuple[str, str], list[list[dict[str, Any] | None]]]:
    call, operator = tables.Call, tables.Operator
    query = (
        select(call.module_path, operator.name, call.data)
        .join(operator, col(operator.id) == col(call.operator_id))
        .where(call.capture_id == capture_id, col(call.data).is_not(None))
        .order_by(col(call.call_index))
    )
    found: dict[tuple[str, str], list[list[dict[str, Any] | None]]] = defaultdict(list)
    for path, name, data in session.exec(query):
        found[path, name].append(list(data or []))
    return found


@dataclass(frozen=True)
class PlacedCall:
    """One call of a capture where it stands in the model, with the class of data that it is read with."""

    index: int
    module_path: str
    operator_id: str
    data: str


def placed_calls(session: Session, capture_id: int, data: str) -> list[PlacedCall]:
    """The calls of a capture in their order.

    Args:
        data: a protocol's data policy. Any but `seen` is the class of every call.
    """
    call = tables.Call
    query = select(call.call_index, call.module_path, call.operator_id, call.data).where(call.capture_id == capture_id)
    return [
        PlacedCall(index, path, operator_id, class_of(seen) if data == "seen" else data)
        for index, path, operator_id, seen in session.exec(query.order_by(col(call.call_index)))
    ]


def classes(session: Session, capture_id: int, data: str) -> dict[tuple[str, str], int]:
    """(tuple id, class of data) -> calls of a capture, in the order of first call. `data`: as in `placed_calls`."""
    return dict(Counter((call.operator_id, call.data) for call in placed_calls(session, capture_id, data)))


def predicted_counts(database: Database, capture_id: int, job_id: str) -> tuple[dict[str, int], bool]:
    """Tuple id -> calls, and whether they are to be held against a card for this job.

    They are, unless a card has said something of them since the job began: what calls took in the running model is read
    with the whole, and as new as that.
    """
    with database.read() as session:
        capture = session.get_one(tables.Capture, capture_id)
        began_s = session.get_one(tables.Job, job_id).created_at_s
        read_at_s = Verification.from_json(capture.verification).read_at_s
        return counts(session, capture_id), read_at_s is None or read_at_s < began_s


def counts(session: Session, capture_id: int) -> dict[str, int]:
    """Tuple id -> calls of a capture."""
    call = tables.Call
    query = select(call.operator_id, func.count()).where(call.capture_id == capture_id).group_by(col(call.operator_id))
    return {operator_id: int(number) for operator_id, number in session.execute(query)}


def store_observed(
    database: Database,
    capture_id: int,
    observed: Mapping[str, Any] | None,
    found: Verification,
    *,
    card_id: str,
) -> int | None:
    """Keep what a card said of a prediction; the id of the observed capture where it differs, else None.

    ``observed`` comes from the card's benchmark process and is validated again before it is stored.
    """

    with database.write() as session:
        predicted = session.get_one(tables.Capture, capture_id)
        verification = dataclasses.replace(_labelled(session, found), card=card_id, read_at_s=read_clock_s(session))
        predicted.verification = verification.to_json()
        session.add(predicted)
        if observed is None:
            return None
        seen = [StoredCall(**call) for call in observed["calls"]]
        if _same_calls(session, capture_id, seen):
            return None
        specs = {spec.id: spec for spec in map(parse, observed["tuples"].values())}
        costs = {specs[tuple_id]: _Cost(**cost) for tuple_id, cost in observed["costs"].items()}
        store_operators(session, costs)
        observed_id = store_capture(
            session,
            seen,
            variant_id=predicted.variant_id,
            device_type=predicted.device_type,
            grad=predicted.grad,
            torch=predicted.torch,
            launch=predicted.launch,
            origin="observed",
            card_id=card_id,
            verification=verification,
        )
        if values := stored_values(session, capture_id):
            store_values(session, observed_id, values)
        return observed_id


def _labelled(session: Session, found: Verification) -> Verification:
    """The findings with its labels for what a card did not see: it knows the ids alone."""
    missing = list(found.missing or ())
    operator = tables.Operator
    labels = dict(session.exec(select(operator.id, operator.label).where(col(operator.id).in_(missing))).all())

    def named(difference: str) -> str:
        words, _, last = difference.rpartition(" ")
        return f"{words} {labels[last]}" if last in labels else difference

    return dataclasses.replace(found, differences=tuple(named(text) for text in found.differences or ()))


@dataclass(frozen=True)
class _Cost:
    flops: int
    bytes: int


def _same_calls(session: Session, capture_id: int, seen: list[StoredCall]) -> bool:
    query = select(tables.Call.operator_id).where(tables.Call.capture_id == capture_id)
    return list(session.exec(query.order_by(col(tables.Call.call_index)))) == [call.tuple_id for call in seen]
