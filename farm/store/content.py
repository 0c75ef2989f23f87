"""Store and query software, protocols, operators, variants, token ids, captures with calls,
readings; reuse readings.

Most ids are hashes of the row's content: if two processes write the same row, the second write does
nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy import insert, update
from sqlmodel import Session, SQLModel, col, func, select

from farm.errors import TupleRejected, Unreadable, UsageError
from farm.operators.captured import CapturedCall
from farm.store import tables
from farm.store.columns import CAPTURE, READING, VARIANT, columns_of
from farm.store.database import Database, among, database_now, fetch, fetch_values, read_clock_s
from farm.store.tables import CardRow, ItemRole, Job, ReadingRow, SoftwareRow
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.deciding import declared_operators, lacks_values
from farm.types.details import Details
from farm.types.fields import names_of
from farm.types.protocol import Protocol, Software, Stopping, Subject, Variant
from farm.types.reading import Reading, Verification, method_of
from farm.types.request import Request
from farm.types.tokens import Tokens, TokensRejected, hold_tokens, holds_tokens, tokens_of_text
from farm.types.tuple import Cost, OperatorTuple
from farm.types.value_profiles import class_of

if TYPE_CHECKING:
    from farm.training.extract import Extraction

#: The key of a capture: for a model, captures with equal values in these columns are
#: interchangeable.
CAPTURE_KEY = ("variant_id", "device_type", "grad", "torch", "launch", "card_model")


#: The origins of captures of this farm.
OWN_CAPTURES = ("observed", "predicted")


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
    if holds_tokens(tokens_id):
        store_tokens(session, tokens_of_text(tokens_id))
    else:
        hold_tokens(find_tokens(session, tokens_id))


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
    except (TokensRejected, UsageError, TypeError) as error:
        reason = str(error)
    else:
        if tokens.id == tokens_id:
            return tokens
        reason = "the stored token ids are different"
    raise Unreadable(
        f"The stored token ids {tokens_id} were changed: {reason}.",
        "Restore the database from a backup.",
    )


def find_capture(session: Session, like: tables.Capture) -> int | None:
    """Return the id of the capture with the variant, device type, grad mode, torch version and
    launch of ``like``. Prefer an observed capture to a predicted one. Imported captures are not
    used. None if there is no capture."""
    is_own = col(tables.Capture.origin).in_(OWN_CAPTURES)
    query = select(tables.Capture.id).where(*_like(like), is_own)
    return session.exec(query.order_by(col(tables.Capture.origin))).first()


def _capture_key(capture: tables.Capture) -> dict[str, Any]:
    """The values of `CAPTURE_KEY`."""
    return {
        "variant_id": capture.variant_id,
        "device_type": capture.device_type,
        "grad": capture.grad,
        "torch": capture.torch,
        "launch": capture.launch,
        "card_model": capture.card_model,
    }


def _like(capture: tables.Capture) -> list[Any]:
    """The conditions for captures with the same key."""
    return [CAPTURE[name] == value for name, value in _capture_key(capture).items()]


def store_capture(session: Session, calls: Iterable[CapturedCall], capture: tables.Capture) -> int:
    """Store a capture with its calls if it is new; return its id. The caller has stored its
    operators.
    """
    same = select(tables.Capture.id).where(*_like(capture), tables.Capture.origin == capture.origin)
    stored_id = session.exec(same).first()
    if stored_id is not None:
        return stored_id
    capture.created_at_s = database_now()  # type: ignore[assignment]
    session.add(capture)
    session.flush()
    assert capture.id is not None
    rows = [
        {
            "capture_id": capture.id,
            "call_index": call.index,
            "operator_id": call.tuple_id,
            "module_path": call.module_path,
            "reads": call.reads,
            "writes": call.writes,
            "part": call.part,
            "owner": call.owner,
        }
        for call in calls
    ]
    if rows:
        session.execute(insert(tables.Call), rows)
    return capture.id


def store_extraction(
    session: Session, variant: Variant, extraction: Extraction, capture: tables.Capture
) -> int:
    """Store a variant with its operators and its predicted capture; return the id of the
    capture.
    """
    captured = extraction.capture
    store_operators(
        session, {spec: extraction.costs[tuple_id] for tuple_id, spec in captured.tuples.items()}
    )
    store_variant(
        session,
        variant,
        flops=extraction.flops,
        model_flops=extraction.model_flops,
        bytes_moved=extraction.bytes_moved,
    )
    if captured.mismatches:
        capture.verification = Verification(mismatches=captured.mismatches).to_json()
    return store_capture(session, captured.calls, capture)


def mismatches(session: Session, capture_id: int) -> Mapping[str, str]:
    """Return tuple id -> why its reading would not be that of the model's calls, for the tuples of
    a capture.
    """
    return (
        Verification.from_json(session.get_one(tables.Capture, capture_id).verification).mismatches
        or {}
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


# ----- calls of captures


def store_values(
    session: Session,
    capture_id: int,
    seen: Mapping[tuple[str, str], Sequence[list[dict[str, Any] | None]]],
) -> None:
    """Store the observed input values of each call. Calls are matched by module path, operator and
    order. A call without a match, or with another number of activations, gets an empty list: its
    values are unknown."""
    met: Counter[tuple[str, str]] = Counter()
    rows = []
    query = _calls(capture_id, tables.Operator.spec, tables.Call.call_index)
    for path, name, spec, index in session.execute(query).all():
        key = (path, name)
        profiles = seen.get(key, ())
        data = list(profiles[met[key]]) if met[key] < len(profiles) else []
        met[key] += 1
        tensors = spec.get("tensors", ())
        activations = sum(tensor["role"] == "activation" for tensor in tensors)
        held_tensors = sum(
            tensor["role"] != "activation" and not tensor.get("name") for tensor in tensors
        )
        fits = len(data) in (activations, activations + held_tensors)
        rows.append({"capture_id": capture_id, "call_index": index, "data": data if fits else []})
    if rows:
        session.execute(update(tables.Call), rows)


def _calls(capture_id: int, *columns: Any) -> Any:
    """Return a query for the module path, operator and these columns of each call of a capture, in
    order.
    """
    call, operator = tables.Call, tables.Operator
    query: Any = sqlalchemy.select(call.module_path, operator.name, *columns)  # type: ignore[call-overload]
    query = query.join(operator, col(operator.id) == col(call.operator_id))
    return query.where(call.capture_id == capture_id).order_by(col(call.call_index))


def stored_values(
    session: Session, capture_id: int
) -> dict[tuple[str, str], list[list[dict[str, Any] | None]]]:
    with_data = _calls(capture_id, tables.Call.data).where(col(tables.Call.data).is_not(None))
    data_of: dict[tuple[str, str], list[list[dict[str, Any] | None]]] = defaultdict(list)
    for path, name, data in session.execute(with_data):
        data_of[path, name].append(list(data or []))
    return data_of


@dataclass(frozen=True)
class PlacedCall:
    """One call of a capture with its module path and the value profile that it is measured with."""

    index: int
    module_path: str
    operator_id: str
    data: str


def placed_calls(session: Session, capture_id: int, data: str) -> list[PlacedCall]:
    """Return the calls of a capture in order. ``data``: `Protocol.data`; any value but `seen`
    applies to all calls.
    """
    call = tables.Call
    query = select(call.call_index, call.module_path, call.operator_id, call.data).where(
        call.capture_id == capture_id
    )
    return [
        PlacedCall(index, path, operator_id, class_of(seen) if data == "seen" else data)
        for index, path, operator_id, seen in session.exec(query.order_by(col(call.call_index)))
    ]


def classes(session: Session, capture_id: int, data: str) -> dict[tuple[str, str], int]:
    """Return (tuple id, value profile) -> number of calls, sorted by first call. `data`: as in
    `placed_calls`.
    """
    return dict(
        Counter((call.operator_id, call.data) for call in placed_calls(session, capture_id, data))
    )


def predicted_counts(
    database: Database, capture_id: int, job_id: str, card_id: str
) -> tuple[dict[str, int], bool]:
    """Return (tuple id -> number of calls, whether the job must verify these calls on a card).

    For a real card the ids are those of tuples without values that decide their work: a card shows
    other values than a prediction, or the first ones.

    The job must, unless a card has verified them since the job started. A verification also
    measures the calls in the running model, and these times must be as new as the reading of the
    whole model. A job with ``--within`` or ``--budget`` saves this time if a card of the same model
    has ever verified the calls."""
    with database.read() as session:
        verification = Verification.from_json(
            session.get_one(tables.Capture, capture_id).verification
        )
        job, before = session.get_one(Job, job_id), session.get(CardRow, verification.card or "")
        card = session.get_one(CardRow, card_id)
        short = job.request.get("within") or job.request.get("budget_s")
        verified_before = (
            short
            and before is not None
            and before.model == card.model
            and verification.ran_as(job.request)
        )
        # A time in the future is of before the clock was set back.
        since_s, now_s = job.created_at_s, read_clock_s(session)
        verified = verification.read_at_s is not None and (
            verified_before or since_s <= verification.read_at_s <= now_s
        )
        old = not verified
        if card.is_simulated:
            return counts(session, capture_id), old
        return _counts_without_values(session, capture_id), old or bool(
            lacking_values(session, capture_id)
        )


def _counts_without_values(session: Session, capture_id: int) -> dict[str, int]:
    """Return id of a tuple without values that decide its work -> number of calls in a capture."""
    numbers, plain = Counter[str](), plain_ids(session, capture_id)
    for tuple_id, number in counts(session, capture_id).items():
        numbers[plain.get(tuple_id, tuple_id)] += number
    return dict(numbers)


def plain_ids(session: Session, capture_id: int) -> dict[str, str]:
    """Return the id of each tuple of a capture that may describe values -> the id of the same call
    without them.
    """
    return {spec.id: spec.without_values.id for spec in _may_have_values(session, capture_id)}


def lacking_values(session: Session, capture_id: int) -> set[str]:
    """Return the ids of the tuples of a capture whose work is unknown: no card has shown the values
    that decide it.
    """
    return {spec.id for spec in _may_have_values(session, capture_id) if lacks_values(spec)}


def _may_have_values(session: Session, capture_id: int) -> Iterator[OperatorTuple]:
    """Yield the tuples of a capture whose operator has an input whose values decide its work."""
    call, operator = tables.Call, tables.Operator
    called = select(call.operator_id).where(call.capture_id == capture_id)
    query = select(operator.spec).where(
        col(operator.id).in_(called), col(operator.name).in_(declared_operators())
    )
    for spec in session.exec(query):
        with contextlib.suppress(TupleRejected):  # as in tests with simulated cards
            yield parse(spec)


def counts(session: Session, capture_id: int) -> dict[str, int]:
    """Return tuple id -> number of calls in a capture."""
    call = tables.Call
    query = (
        select(call.operator_id, func.count())
        .where(call.capture_id == capture_id)
        .group_by(col(call.operator_id))
    )
    return {operator_id: int(number) for operator_id, number in session.execute(query)}


def store_observed(
    database: Database,
    capture_id: int,
    observed: Mapping[str, Any] | None,
    found: Verification,
    *,
    card_id: str,
) -> int | None:
    """Store the verification of a predicted capture. If the observed calls differ, store them as a
    capture too. ``observed``: the validated result of the card's benchmark process. Returns the id
    of the new capture, or None."""
    with database.write() as session:
        predicted = session.get_one(tables.Capture, capture_id)
        observed_calls = [CapturedCall(**call) for call in observed["calls"]] if observed else []
        stored_calls = [
            call.operator_id
            for call in session.execute(_calls(capture_id, tables.Call.operator_id))
        ]
        is_same = not observed_calls or stored_calls == [call.tuple_id for call in observed_calls]
        found = _labelled(session, found)
        if not is_same and predicted.origin == "observed" and found.matches:
            found = _with_other_values(found)
        unlike = {**mismatches(session, capture_id), **(found.mismatches or {})} or None
        verification = dataclasses.replace(
            found, card=card_id, read_at_s=read_clock_s(session), mismatches=unlike
        )
        predicted.verification = verification.to_json()
        if observed is None or is_same:
            return None
        specs = {spec.id: spec for spec in map(parse, observed["tuples"].values())}
        store_operators(
            session, {specs[tuple_id]: Cost(**cost) for tuple_id, cost in observed["costs"].items()}
        )
        kept = tables.Capture(
            **_capture_key(predicted),
            origin="observed",
            card_id=card_id,
            verification=verification.to_json(),
            compiled=observed.get("compiled"),
        )
        observed_id = store_capture(session, observed_calls, kept)
        if values := stored_values(session, capture_id):
            store_values(session, observed_id, values)
        return observed_id


def _with_other_values(found: Verification) -> Verification:
    """Say that a card showed other values than those of the capture, whose tuples were measured."""
    text = "the values that decide the work of some calls are not those of the measured tuples"
    differences = (*(found.differences or ()), text)
    return dataclasses.replace(
        found, matches=False, differences=differences, difference_count=len(differences)
    )


def _labelled(session: Session, found: Verification) -> Verification:
    """Replace the ids of missing tuples in a verification by labels, which the benchmark process
    does not know.
    """
    labels = {
        row.id: row.label for row in fetch(session, tables.Operator, found.missing or ()).values()
    }

    def named(difference: str) -> str:
        words, _, last = difference.rpartition(" ")
        return f"{words} {labels[last]}" if last in labels else difference

    return dataclasses.replace(found, differences=tuple(map(named, found.differences or ())))


# ---- reuse of readings


def find_readings(
    session: Session,
    items: Sequence[Any],
    request: Request,
    software_id: str,
    card_ids: Collection[str],
) -> list[ReadingRow | None]:
    """Return for each item the reading to reuse, or None. Readings of the chosen cards
    (``card_ids``) are preferred.
    """
    if request.reuse == "none":
        return [None] * len(items)
    candidates: dict[tuple[str, str], list[ReadingRow]] = defaultdict(list)
    query = select(ReadingRow).where(
        col(ReadingRow.protocol_id).in_({item.protocol_id for item in items}),
        ReadingRow.software_id == software_id,
        col(ReadingRow.simulated).is_(False),
    )
    if request.reuse != "imported":
        query = query.where(ReadingRow.origin == "")
    for (reading,) in among(
        session, query, ReadingRow.subject_id, (item.subject_id for item in items)
    ):
        candidates[reading.subject_id, reading.protocol_id].append(reading)
    return [
        _best(candidates[item.subject_id, item.protocol_id], item, request, card_ids)
        for item in items
    ]


def software_of_groups(session: Session, cards: Sequence[CardRow]) -> str | None:
    """Return the id of the software with which these cards measure together; None if it is unknown
    or differs.
    """
    libraries = {(card.software_id, (card.links or {}).get("communication", "")) for card in cards}
    software_id, communication = libraries.pop()
    row = (
        session.get(SoftwareRow, software_id)
        if software_id and communication and not libraries
        else None
    )
    return (
        dataclasses.replace(row.value, communication=communication).id if row is not None else None
    )


def _best(
    readings: Iterable[ReadingRow], item: Any, request: Request, card_ids: Collection[str]
) -> ReadingRow | None:
    """Return the reading to reuse for an item, or None. Readings of chosen cards come first, then
    the newest.
    """
    if item.role == ItemRole.COMPILE:
        return None
    if item.role != "tuple":
        serving = [reading for reading in readings if reading.card_id == item.card_id]
    elif request.reuse == "card":
        serving = [reading for reading in readings if reading.card_id in card_ids]
    else:
        serving = [reading for reading in readings if reading.card_model == item.card_model]
    stopping = request.stopping.allowing(item.half_width)
    serving = [reading for reading in serving if satisfies(reading, stopping)]
    return max(
        serving,
        key=lambda reading: (reading.card_id in card_ids, reading.created_at_s),
        default=None,
    )


#: Flags of doubtful readings: a repetition may be better.
DOUBTFUL = {"shared", "starved", "throttled_thermal", "canary_off"}
UNSOUND = DOUBTFUL | {"busy_host"}  # by other programs, also on a CPU


def sound(reading: ReadingRow) -> bool:
    """True if the reading has the current method of its card and no doubtful flag."""
    current = method_of(reading.card_id)
    return Details.from_json(reading.details).method == current and not DOUBTFUL & set(
        reading.flags
    )


def tells_others(flags: Iterable[str] | None) -> bool:
    """True if a reading with these flags may be used outside its job: no doubtful flag, and no
    study.
    """
    return not (DOUBTFUL | {"study"}) & set(flags or ())


def sound_readings(
    session: Session, card_model: str, names: Iterable[str], *chosen: Any
) -> Iterator[Any]:
    """Yield columns of the usable readings of a card model, oldest first: without simulations and
    studies.
    """
    query = sqlalchemy.select(*(READING[name] for name in names)).where(
        READING.card_model == card_model,
        READING.simulated.is_(False),
        READING.method.is_not(None),
        *chosen,
    )
    for row in session.execute(query.order_by(READING.created_at_s, READING.id)):
        if tells_others(row.flags):
            yield row


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


def satisfies(reading: ReadingRow, wanted: Stopping) -> bool:
    """True if a reading is precise enough, or if its window was as long as the longest wanted
    window. False for readings that are not `sound`, or have flags that the rule does not accept."""
    if not sound(reading) or not wanted.accepts(reading.flags):
        return False
    time_ok = reading.time_half_width_us <= wanted.time_half_width * reading.time_us * 1.001
    energy_ok = (
        reading.energy_half_width_mj is None
        or reading.energy_mj is None
        or (reading.energy_half_width_mj <= wanted.energy_half_width * reading.energy_mj * 1.001)
    )
    # A window ends with a tick, so it may be a little shorter than its limit.
    given_s = max(
        reading.window_s / 0.9, Details.from_json(reading.details).timing.ceiling_s or 0.0
    )
    return (time_ok and energy_ok) or given_s >= wanted.maximum_s
