"""Rows that never change: software, protocols, operators, variants, token ids, captures and their calls.

Their ids are hashes of their content, so two writers of the same row agree, and the second write does nothing.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import insert, update
from sqlmodel import Session, SQLModel, col, func, select

from farm.errors import Unreadable, UsageError
from farm.models.texts import hold_tokens, holds_tokens, tokens_of_text
from farm.store.database import Database, database_now, read_clock_s
from farm.store.rows import in_batches
from farm.store.tables import (
    Call,
    Capture,
    Job,
    ModelVariant,
    Operator,
    ProtocolRow,
    ReadingRow,
    SoftwareRow,
    TokenInput,
    TraceRow,
)
from farm.types import protocol as protocols
from farm.types.label import label_of
from farm.types.reading import Reading, Verification
from farm.types.tokens import Tokens, TokensRejected
from farm.types.tuple import Cost, parse
from farm.types.value_profiles import class_of

if TYPE_CHECKING:
    from farm.types.tuple import OperatorTuple


class CallLike(Protocol):
    """One call in order; `farm.operators.capture.Call` is one."""

    @property
    def index(self) -> int: ...
    @property
    def module_path(self) -> str: ...
    @property
    def tuple_id(self) -> str: ...
    @property
    def reads(self) -> Sequence[int]: ...
    @property
    def writes(self) -> Sequence[int]: ...
    @property
    def part(self) -> str: ...
    @property
    def owner(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class StoredCall:
    """A call from a benchmark process, received as JSON."""

    index: int
    module_path: str
    tuple_id: str
    reads: Sequence[int]
    writes: Sequence[int]
    part: str = ""
    owner: str = ""


def insert_new(session: Session, table: type[SQLModel], rows: list[dict[str, Any]]) -> None:
    """Insert the rows whose key is not there yet, in the order of ids: two writers of the same rows wait for each
    other.

    In different orders, each would wait for a row of the other.
    """
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["id"])
    # The engine has loaded its dialect; the other one would be a twentieth of every worker's start.
    dialect: Any
    if session.get_bind().dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite as dialect
    else:
        from sqlalchemy.dialects import postgresql as dialect
    session.execute(dialect.insert(table).on_conflict_do_nothing(), rows)


def store_software(session: Session, software: protocols.Software) -> str:
    insert_new(session, SoftwareRow, [{"id": software.id, **software.to_json()}])
    return software.id


def store_protocol(session: Session, protocol: protocols.Protocol) -> str:
    row = {
        "id": protocol.id,
        "launch": protocol.launch,
        "residency": protocol.residency,
        "data": protocol.data,
        "spec": protocol.to_json(),
    }
    insert_new(session, ProtocolRow, [row])
    return protocol.id


def store_operators(session: Session, operators: Mapping[OperatorTuple, Cost]) -> None:
    known = {
        operator_id
        for batch in in_batches(spec.id for spec in operators)
        for operator_id in session.exec(select(Operator.id).where(col(Operator.id).in_(batch)))
    }
    rows = [
        {
            "id": spec.id,
            "schema_version": spec.to_json()["schema"],
            "name": spec.operator,
            "short_name": spec.short_name,
            "kind": spec.kind,
            "label": label_of(spec),
            "training": spec.training,
            "flops": cost.flops,
            "bytes_moved": cost.bytes,
            "parameters": spec.parameters_for_query(),
            "spec": spec.to_json(),
        }
        for spec, cost in operators.items()
        if spec.id not in known
    ]
    insert_new(session, Operator, rows)


def store_variant(
    session: Session, variant: protocols.Variant, *, flops: int = 0, model_flops: int = 0, bytes_moved: int = 0
) -> str:
    row = {
        "id": variant.id,
        **dataclasses.asdict(variant),
        "flops": flops,
        "model_flops": model_flops,
        "bytes_moved": bytes_moved,
    }
    insert_new(session, ModelVariant, [row])
    return variant.id


def store_tokens(session: Session, tokens: Tokens) -> str:
    """Store token ids; return the id with which `find_tokens` finds them on any host."""
    row = {
        "id": tokens.id,
        "batch": tokens.batch,
        "length": tokens.length,
        "row_lengths": list(tokens.row_lengths),
        "padding": tokens.padding,
        "packed": tokens.compressed(),
    }
    insert_new(session, TokenInput, [row])
    return tokens.id


def share_tokens(session: Session, tokens_id: str) -> None:
    """Copy the token ids of a text between this process and the database, from the one that has them.

    Raises:
        Unreadable: see `find_tokens`.
    """
    if holds_tokens(tokens_id):
        store_tokens(session, tokens_of_text(tokens_id))
    else:
        hold_tokens(find_tokens(session, tokens_id))


def find_tokens(session: Session, tokens_id: str) -> Tokens:
    """
    Raises:
        Unreadable: there are none of that id, or no longer the ones that were stored.
    """
    row = session.get(TokenInput, tokens_id)
    if row is None:
        raise Unreadable(f"The database has no token ids {tokens_id}.", "Submit the model again with its text.")
    try:
        found = Tokens.of_compressed(row.batch, row.length, row.row_lengths, row.padding, row.packed)
    except (TokensRejected, UsageError, TypeError) as error:
        reason = str(error)
    else:
        if found.id == tokens_id:
            return found
        reason = "they are others"
    raise Unreadable(
        f"The database no longer holds the token ids {tokens_id}: {reason}.", "Restore the database from a backup."
    )


def find_capture(
    session: Session, variant_id: str, device_type: str, grad: bool, torch: str, launch: str
) -> Capture | None:
    """Return the capture to use: an observed one if there is one, otherwise a predicted one."""
    query = (
        select(Capture)
        .where(
            Capture.variant_id == variant_id,
            Capture.device_type == device_type,
            Capture.grad == grad,
            Capture.torch == torch,
            Capture.launch == launch,
            col(Capture.origin).in_(("observed", "predicted")),  # of this farm's own cards and programs
        )
        .order_by(col(Capture.origin))  # "observed" < "predicted"
    )
    return session.exec(query).first()


def store_capture(
    session: Session,
    calls: Iterable[CallLike],
    *,
    variant_id: str,
    device_type: str,
    grad: bool,
    torch: str,
    launch: str,
    origin: str,
    card_id: str | None = None,
    verification: Verification | None = None,
) -> int:
    """Store a capture if it is new; return its id. Its operators must be stored before."""
    query = select(Capture).where(
        Capture.variant_id == variant_id,
        Capture.device_type == device_type,
        Capture.grad == grad,
        Capture.torch == torch,
        Capture.launch == launch,
        Capture.origin == origin,
    )
    if (known := session.exec(query).first()) is not None:
        assert known.id is not None
        return known.id
    capture = Capture(
        variant_id=variant_id,
        device_type=device_type,
        grad=grad,
        torch=torch,
        launch=launch,
        origin=origin,
        card_id=card_id,
        verification=verification.to_json() if verification else {},
        created_at_s=database_now(),  # type: ignore[arg-type]
    )
    session.add(capture)
    session.flush()
    assert capture.id is not None
    rows = [
        {
            "capture_id": capture.id,
            "call_index": call.index,
            "module_path": call.module_path,
            "operator_id": call.tuple_id,
            "reads": list(call.reads),
            "writes": list(call.writes),
            "part": call.part,
            "owner": call.owner,
        }
        for call in calls
    ]
    if rows:
        session.execute(insert(Call), rows)
    return capture.id


def reading_row(reading: Reading) -> dict[str, Any]:
    """Return the columns of a reading without its provenance."""
    skip = {"trace"}
    row = {f.name: getattr(reading, f.name) for f in dataclasses.fields(reading) if f.name not in skip}
    row["throttle_reasons"] = list(reading.throttle_reasons)
    row["flags"] = list(reading.flags)
    row["details"] = reading.details.to_json()
    row["method"] = reading.details.method
    columns = ReadingRow.__table__.columns  # type: ignore[attr-defined]
    # A required number that is not finite is kept, so that the database refuses the row.
    return {
        name: storable(value) if columns[name].nullable or not isinstance(value, float) else value
        for name, value in row.items()
    }


def add_reading(
    session: Session,
    reading: Reading,
    *,
    subject: protocols.Subject,
    protocol: protocols.Protocol,
    software: protocols.Software,
    card_id: str,
    card_model: str,
) -> ReadingRow:
    """Add the row of a reading without an item, with its trace. Its card must be stored before."""
    values = reading_row(reading)
    row = ReadingRow(
        id=uuid.uuid4().hex,
        subject_kind=subject.kind,
        subject_id=subject.id,
        card_id=card_id,
        card_model=card_model,
        software_id=store_software(session, software),
        protocol_id=store_protocol(session, protocol),
        simulated="simulated" in values["flags"],
        created_at_s=database_now(),  # type: ignore[arg-type]
        **values,
    )
    session.add(row)
    session.flush()
    if reading.trace is not None:
        session.add(TraceRow(reading_id=row.id, packed=reading.trace.pack()))
    session.refresh(row)
    return row


def storable(value: Any) -> Any:
    """What any database takes: PostgreSQL has no zero byte in a text and no NaN in JSON, and none has half a
    surrogate.
    """
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value


def storable_text(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


# ----- calls of captures


def store_values(
    session: Session, capture_id: int, seen: Mapping[tuple[str, str], Sequence[list[dict[str, Any] | None]]]
) -> None:
    """Store the observed input values of each call. Calls match by module path, operator and order.

    A call without a match, or with another number of activations, gets an empty list: nothing is known.
    """
    call, operator = Call, Operator
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
    call, operator = Call, Operator
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
    """One call of a capture with its module path and the value profile that it is measured with."""

    index: int
    module_path: str
    operator_id: str
    data: str


def placed_calls(session: Session, capture_id: int, data: str) -> list[PlacedCall]:
    """The calls of a capture in their order.

    Args:
        data: `Protocol.data`. Any value but `seen` applies to every call.
    """
    call = Call
    query = select(call.call_index, call.module_path, call.operator_id, call.data).where(call.capture_id == capture_id)
    return [
        PlacedCall(index, path, operator_id, class_of(seen) if data == "seen" else data)
        for index, path, operator_id, seen in session.exec(query.order_by(col(call.call_index)))
    ]


def classes(session: Session, capture_id: int, data: str) -> dict[tuple[str, str], int]:
    """(tuple id, value profile) -> number of calls, in the order of the first call. `data`: as in `placed_calls`."""
    return dict(Counter((call.operator_id, call.data) for call in placed_calls(session, capture_id, data)))


def predicted_counts(database: Database, capture_id: int, job_id: str) -> tuple[dict[str, int], bool]:
    """Tuple id -> number of calls, and whether the job must verify them on a card.

    It must, unless a card has verified them since the job started: the times of calls in the running model are then as
    new as the reading of the whole model.
    """
    with database.read() as session:
        capture = session.get_one(Capture, capture_id)
        began_s = session.get_one(Job, job_id).created_at_s
        read_at_s = Verification.from_json(capture.verification).read_at_s
        return counts(session, capture_id), read_at_s is None or read_at_s < began_s


def counts(session: Session, capture_id: int) -> dict[str, int]:
    """Tuple id -> number of calls of a capture."""
    call = Call
    query = select(call.operator_id, func.count()).where(call.capture_id == capture_id).group_by(col(call.operator_id))
    return {operator_id: int(number) for operator_id, number in session.execute(query)}


def store_observed(
    database: Database, capture_id: int, observed: Mapping[str, Any] | None, found: Verification, *, card_id: str
) -> int | None:
    """Store the verification of a predicted capture. If the observed calls differ, store them as a capture and return
    its id.

    ``observed`` comes from the benchmark process of the card and is validated before it is stored.
    """

    with database.write() as session:
        predicted = session.get_one(Capture, capture_id)
        verification = dataclasses.replace(_labelled(session, found), card=card_id, read_at_s=read_clock_s(session))
        predicted.verification = verification.to_json()
        session.add(predicted)
        if observed is None:
            return None
        seen = [StoredCall(**call) for call in observed["calls"]]
        if _same_calls(session, capture_id, seen):
            return None
        specs = {spec.id: spec for spec in map(parse, observed["tuples"].values())}
        costs = {specs[tuple_id]: Cost(**cost) for tuple_id, cost in observed["costs"].items()}
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
    """The verification with labels in place of the ids of missing tuples; the card knows only their ids."""
    missing = list(found.missing or ())
    operator = Operator
    labels = dict(session.exec(select(operator.id, operator.label).where(col(operator.id).in_(missing))).all())

    def named(difference: str) -> str:
        words, _, last = difference.rpartition(" ")
        return f"{words} {labels[last]}" if last in labels else difference

    return dataclasses.replace(found, differences=tuple(named(text) for text in found.differences or ()))


def _same_calls(session: Session, capture_id: int, seen: list[StoredCall]) -> bool:
    query = select(Call.operator_id).where(Call.capture_id == capture_id)
    return list(session.exec(query.order_by(col(Call.call_index)))) == [call.tuple_id for call in seen]
