"""Store and query software, protocols, operators, variants, token ids and readings.

Most ids are hashes of the row's content: if two processes write the same row, the second write does
nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlmodel import Session, SQLModel, col, select

from farm.errors import TupleRejected, Unreadable
from farm.settings import user_models
from farm.store import tables
from farm.store.columns import VARIANT, columns_of
from farm.store.database import among, database_now, fetch_values
from farm.store.tables import SoftwareRow
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.fields import names_of
from farm.types.protocol import Protocol
from farm.types.reading import Reading
from farm.types.software import Software
from farm.types.subject import Subject
from farm.types.tokens import Tokens, TokensRejected
from farm.types.tuple import Cost, OperatorTuple
from farm.types.variant import Variant


def insert_new(session: Session, table: type[SQLModel], rows: list[dict[str, Any]]) -> None:
    """Insert the rows whose key is not in the table yet. Rows are inserted in the order of their
    ids. Otherwise two writers of the same rows could deadlock."""
    if not rows:
        return
    # Import only the dialect that the engine uses: the other would add 5 % to the start time of
    # every worker.
    dialect: Any
    if session.get_bind().dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite as dialect
    else:
        from sqlalchemy.dialects import postgresql as dialect
    statement = dialect.insert(table.__table__).on_conflict_do_nothing()  # type: ignore[attr-defined]
    session.execute(statement, sorted(rows, key=lambda row: row["id"]))


def store_software(session: Session, software: Software) -> str:
    insert_new(session, tables.SoftwareRow, [{"id": software.id, **software.to_json()}])
    return software.id


def store_protocol(session: Session, protocol: Protocol) -> str:
    row = {
        "id": protocol.id,
        "launch": protocol.launch,
        "residency": protocol.residency,
        "data": protocol.data,
        "spec": protocol.to_json(),
    }
    insert_new(session, tables.ProtocolRow, [row])
    return protocol.id


def store_operators(session: Session, operators: Mapping[OperatorTuple, Cost]) -> None:
    stored_ids = fetch_values(session, [col(tables.Operator.id)], (spec.id for spec in operators))
    rows = [
        {
            "id": spec.id,
            "short_name": spec.short_name,
            "kind": spec.kind,
            "training": spec.training,
            "schema_version": spec.to_json()["schema"],
            "name": spec.operator,
            "label": label_of(spec),
            "flops": cost.flops,
            "bytes_moved": cost.bytes,
            "parameters": spec.parameters_for_query(),
            "spec": spec.to_json(),
            "output_shapes": cost.output_shapes,
        }
        for spec, cost in operators.items()
        if spec.id not in stored_ids
    ]
    insert_new(session, tables.Operator, rows)


def store_variant(session: Session, variant: Variant, **costs: int) -> None:
    """Store a variant. ``costs``: its flops, model_flops and bytes_moved, if known."""
    insert_new(
        session, tables.ModelVariant, [{"id": variant.id, **dataclasses.asdict(variant), **costs}]
    )


def other_versions(session: Session, variant: Variant) -> Sequence[str]:
    """Return the variant ids of the other versions of a user's own model; [] for a model of the
    catalog.
    """
    if not variant.version:
        return []
    variants = tables.ModelVariant
    return session.exec(
        select(variants.id).where(*_same(variant, "version"), variants.id != variant.id)
    ).all()


def other_dtypes(session: Session, variant: Variant) -> Sequence[str]:
    """Return the ids of a user's own model in other dtypes, in any version; [] for a model of the
    catalog.
    """
    if not variant.version:
        return []
    variants = tables.ModelVariant
    return session.exec(
        select(variants.id).where(
            *_same(variant, "version", "dtype"), variants.dtype != variant.dtype
        )
    ).all()


def _same(variant: Variant, *without: str) -> list[Any]:
    """The conditions for variants with the same fields, except the fields ``without``."""
    fields = dataclasses.asdict(variant).items()
    return [VARIANT[name] == value for name, value in fields if name not in without]


def store_tokens(session: Session, tokens: Tokens) -> str:
    """Store token ids; return the id with which `find_tokens` finds them on any host."""
    row = {
        "id": tokens.id,
        "batch": tokens.batch,
        "length": tokens.length,
        "row_lengths": tokens.row_lengths,
        "padding": tokens.padding,
        "packed": tokens.compressed(),
    }
    insert_new(session, tables.TokenInput, [row])
    return tokens.id


def share_tokens(session: Session, tokens_id: str) -> None:
    """Store the token ids of a text if this process has them; otherwise load them from the database
    (`find_tokens`).
    """
    if user_models.has_text(tokens_id):
        store_tokens(session, user_models.text(tokens_id))
    else:
        user_models.add_text(tokens_id, find_tokens(session, tokens_id))


def find_tokens(session: Session, tokens_id: str) -> Tokens:
    """Return the stored token ids. Raises `Unreadable` if the id is unknown or the stored data was
    changed.
    """
    row = session.get(tables.TokenInput, tokens_id)
    if row is None:
        step = "Submit the model again with its text."
        raise Unreadable(
            f"The database does not have the text with the token ids {tokens_id}.", step
        )
    try:
        tokens = Tokens.of_compressed(
            row.batch, row.length, row.row_lengths, row.padding, row.packed
        )
    except (TokensRejected, TypeError) as error:
        reason = str(error)
    else:
        if tokens.id == tokens_id:
            return tokens
        reason = "the stored token ids are different"
    raise Unreadable(
        f"The stored token ids {tokens_id} were changed: {reason}.",
        "Restore the database from a backup.",
    )


def reading_row(reading: Reading) -> dict[str, Any]:
    """Return the columns of a reading, without ids and origin."""
    row = {**reading.columns(), "method": reading.details.method}
    columns = columns_of(tables.ReadingRow)
    # A required number stays even if it is not finite: the database then refuses the row.
    return {
        name: storable(value) if columns[name].nullable or not isinstance(value, float) else value
        for name, value in row.items()
    }


def add_reading(
    session: Session, reading: Reading, trace: bytes | None, subject: Subject, **ids: str
) -> tables.ReadingRow:
    """Add the row of a reading, and its packed trace; return the row. ``ids``: the columns card_*
    and *_id. Raises `Unmeasurable` if its time is not positive."""
    reading = reading.plausible()
    row = tables.ReadingRow(
        id=uuid.uuid4().hex,
        subject_kind=subject.kind,
        subject_id=subject.id,
        simulated=reading.power_source == "simulated" or "simulated" in reading.flags,
        created_at_s=database_now(),  # type: ignore[arg-type]
        **ids,
        **reading_row(reading),
    )
    session.add(row)
    session.flush()
    if trace is not None:
        session.add(tables.TraceRow(reading_id=row.id, packed=trace))
    return row


def storable(value: Any) -> Any:
    """Replace what databases cannot store: zero bytes in texts, non-finite numbers, halves of
    surrogate pairs.
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


def stored_software(session: Session, software_id: str) -> Software:
    return session.get_one(SoftwareRow, software_id).value


def stored_variant(columns: Mapping[str, Any]) -> Variant:
    """Return the variant of a row of `tables.ModelVariant`, or of a row with its columns."""
    return Variant(**{name: columns[name] for name in names_of(Variant)})


def tuples_with_ids(session: Session, operator_ids: Iterable[str]) -> dict[str, OperatorTuple]:
    """Return id -> stored tuple. Rows that do not parse (as in tests with simulated cards) are left
    out.
    """
    operator, tuples = tables.Operator, {}
    for id_, spec in among(session, select(operator.id, operator.spec), operator.id, operator_ids):
        with contextlib.suppress(TupleRejected):
            tuples[id_] = parse(spec)
    return tuples
