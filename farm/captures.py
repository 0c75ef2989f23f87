"""From a request to stored calls: what a model is made of, as predicted at submit time and as seen on a card.

Torch is imported only where a model really has to be taken apart; a variant whose capture is in the database costs
one query.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import update
from sqlmodel import Session, col, func, select

from farm.benchmark.protocol import Variant
from farm.data_classes import class_of
from farm.errors import CaptureError
from farm.request import Request
from farm.roofline import Roofline
from farm.store import tables
from farm.store.content import StoredCall, find_capture, store_capture, store_operators, store_variant
from farm.store.database import Database
from farm.verdict import Part

_log = logging.getLogger(__name__)


def capture_for(database: Database, request: Request, *, device_type: str, torch: str) -> int:
    """The id of the capture that the request's model goes by, taken apart now if the database has none.

    Raises:
        CaptureError: the model cannot be taken apart without gaps.
    """
    assert request.variant is not None
    with database.read() as session:
        known = find_capture(session, request.variant.id, device_type, request.protocol.grad, torch)
    capture_id = known.id if known is not None else None
    if capture_id is None:
        capture_id = _predict(
            database, request.variant, device_type=device_type, grad=request.protocol.grad, torch=torch
        )
    if request.protocol.data == "seen":
        _look_at_values(database, capture_id, request.variant)
    return capture_id


def _look_at_values(database: Database, capture_id: int, variant: Variant) -> None:
    """Keep beside each call what its activations held when the model ran, unless that is known."""
    call = tables.Call
    with database.read() as session:
        if (
            session.exec(select(call.call_index).where(call.capture_id == capture_id, col(call.data).is_(None))).first()
            is None
        ):
            return
        row = session.get(tables.ModelVariant, variant.id)
        flops = row.flops if row else 0
    from farm.operators.seen import seen_values

    seen = seen_values(variant, flops)
    if seen is None:
        _log.warning("%s is not run for the values in its tensors: its tuples get standard normal data.", variant)
    with database.write() as session:
        _store_values(session, capture_id, seen or {})


def _store_values(
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
        activations = sum(tensor["role"] == "activation" for tensor in spec.get("tensors", ()))
        rows.append({"capture_id": capture_id, "call_index": index, "data": data if len(data) == activations else []})
    if rows:
        session.execute(update(call), rows)


def _stored_values(session: Session, capture_id: int) -> dict[tuple[str, str], list[list[dict[str, Any] | None]]]:
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


def classes(session: Session, capture_id: int, data: str) -> dict[tuple[str, str], int]:
    """(tuple id, class of data) -> calls of a capture, in the order of first call.

    Args:
        data: a protocol's data policy. Any but `seen` is the class of every call.
    """
    call = tables.Call
    query = select(call.operator_id, call.data).where(call.capture_id == capture_id).order_by(col(call.call_index))
    number: Counter[tuple[str, str]] = Counter()
    for operator_id, seen in session.exec(query):
        number[operator_id, class_of(seen) if data == "seen" else data] += 1
    return dict(number)


def _predict(database: Database, variant: Variant, *, device_type: str, grad: bool, torch: str) -> int:
    from farm import catalog
    from farm.operators import capture, cost

    model = catalog.build(
        variant.model, device="meta", dtype=variant.dtype, memory_format=variant.memory_format, mode=variant.mode
    )
    arguments = catalog.example_inputs(
        variant.model,
        variant.batch,
        variant.input_size,
        dtype=variant.dtype,
        device="meta",
        memory_format=variant.memory_format,
    )
    # Counted before it is taken apart: PyTorch's own counter over the whole is the witness of the sum.
    model_flops = cost.model_flops(model, arguments)
    taken = capture.predict(model, arguments, device_type=device_type, grad_enabled=grad)
    if taken.gaps or taken.overlaps:
        what = (*taken.gaps, *taken.overlaps)
        raise CaptureError(
            f"{variant.model} cannot be taken apart completely: {'; '.join(what[:3])}"
            + (f" and {len(what) - 3} more." if len(what) > 3 else "."),
            "Its sum would miss these calls. Write the part with public PyTorch functions and modules.",
        )
    costs = {spec: cost.cost(spec) for spec in taken.tuples.values()}
    with database.write() as session:
        store_operators(session, costs)
        store_variant(
            session,
            variant,
            flops=sum(costs[taken.tuples[call.tuple_id]].flops for call in taken.calls),
            bytes_moved=sum(costs[taken.tuples[call.tuple_id]].bytes for call in taken.calls),
            model_flops=model_flops,
        )
        return store_capture(
            session,
            taken.calls,
            variant_id=variant.id,
            device_type=device_type,
            grad=grad,
            torch=torch,
            origin="predicted",
        )


def store_sweep(database: Database, request: Request) -> list[str]:
    """Expand a sweep and store its tuples; their ids."""
    from farm.operators import cost
    from farm.sweep import expand

    assert request.sweep is not None
    specs = expand(request.sweep)
    with database.write() as session:
        store_operators(session, {spec: cost.cost(spec) for spec in specs})
    return [spec.id for spec in specs]


def predicted_counts(database: Database, capture_id: int) -> tuple[dict[str, int], bool]:
    """Tuple id -> calls, and whether they are still to be held against a card."""
    with database.read() as session:
        capture = session.get_one(tables.Capture, capture_id)
        awaited = capture.origin != "observed" and not capture.verification
        return counts(session, capture_id), awaited


def counts(session: Session, capture_id: int) -> dict[str, int]:
    """Tuple id -> calls of a capture."""
    call = tables.Call
    query = select(call.operator_id, func.count()).where(call.capture_id == capture_id).group_by(col(call.operator_id))
    return {operator_id: int(number) for operator_id, number in session.execute(query)}


def store_observed(
    database: Database,
    capture_id: int,
    observed: Mapping[str, Any] | None,
    verification: Mapping[str, Any],
    *,
    card_id: str,
) -> int | None:
    """Keep what a card said of a prediction; the id of the observed capture where it differs, else None.

    ``observed`` comes from the card's benchmark process and is validated again before it is stored.
    """
    from farm.operators.tuple import OperatorTuple

    with database.write() as session:
        predicted = session.get_one(tables.Capture, capture_id)
        verification = _labelled(session, verification)
        predicted.verification = {**verification, "card": card_id}
        session.add(predicted)
        if observed is None:
            return None
        seen = [StoredCall(**call) for call in observed["calls"]]
        if _same_calls(session, capture_id, seen):
            return None
        specs = {spec.id: spec for spec in map(OperatorTuple.from_json, observed["tuples"].values())}
        costs = {specs[tuple_id]: _Cost(**cost) for tuple_id, cost in observed["costs"].items()}
        store_operators(session, costs)
        observed_id = store_capture(
            session,
            seen,
            variant_id=predicted.variant_id,
            device_type=predicted.device_type,
            grad=predicted.grad,
            torch=predicted.torch,
            origin="observed",
            card_id=card_id,
            verification={**verification, "card": card_id},
        )
        if values := _stored_values(session, capture_id):
            _store_values(session, observed_id, values)
        return observed_id


def _labelled(session: Session, verification: Mapping[str, Any]) -> Mapping[str, Any]:
    """The findings with its labels for what a card did not see: it knows the ids alone."""
    missing = list(verification.get("missing") or ())
    operator = tables.Operator
    labels = dict(session.exec(select(operator.id, operator.label).where(col(operator.id).in_(missing))).all())

    def named(difference: str) -> str:
        words, _, last = difference.rpartition(" ")
        return f"{words} {labels[last]}" if last in labels else difference

    return {**verification, "differences": [named(text) for text in verification.get("differences") or ()]}


@dataclass(frozen=True)
class _Cost:
    flops: int
    bytes: int


def _same_calls(session: Session, capture_id: int, seen: list[StoredCall]) -> bool:
    query = select(tables.Call.operator_id).where(tables.Call.capture_id == capture_id)
    return list(session.exec(query.order_by(col(tables.Call.call_index)))) == [call.tuple_id for call in seen]


def unscoped_parts(session: Session, capture_id: int, roofline: Roofline) -> list[Part]:
    """A capture's tuples with their estimated cost and nothing else: what the accuracy loop chooses its first types by."""
    number = counts(session, capture_id)
    operators = session.exec(select(tables.Operator).where(col(tables.Operator.id).in_(list(number))))
    return [
        Part(
            operator_id=operator.id,
            short_name=operator.short_name,
            label=operator.label,
            count=number[operator.id],
            flops=operator.flops,
            bytes_moved=operator.bytes_moved,
            estimated_us=roofline.estimate_us(operator.flops, operator.bytes_moved),
            reading=None,
            reason="not in scope",
            card_id="",
            in_scope=False,
            reused=False,
        )
        for operator in operators
    ]
