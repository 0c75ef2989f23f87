"""Store and query captures: their calls, the values that calls have seen, and what a card has
shown about them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy import insert, update
from sqlmodel import Session, col, func, select

from farm.errors import NoReadings, TupleRejected
from farm.operators.captured import CapturedCall
from farm.store import tables
from farm.store.columns import CAPTURE, GENERATE_KERNELS, OPERATOR
from farm.store.content import store_operators, store_variant
from farm.store.database import Database, database_now, fetch, fetch_values, read_clock_s
from farm.store.tables import CardRow, Job
from farm.subjects.parsing import parse
from farm.types.deciding import declared_operators, lacks_values
from farm.types.fields import content_id
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.tuple import Cost, NeededTuple, OperatorTuple
from farm.types.value_profiles import class_of
from farm.types.variant import Variant
from farm.types.verification import Verification

if TYPE_CHECKING:
    from farm.training.extract import Extraction

#: The key of a capture: for a model, captures with equal values in these columns are
#: interchangeable.
CAPTURE_KEY = ("variant_id", "device_type", "grad", "torch", "launch", "card_model")

#: Key of the verification of an imported capture: the name of the farm that verified it.
VERIFYING_FARM = "imported_from"

#: The origins of captures of this farm.
OWN_CAPTURES = ("observed", "predicted")


def exported_id(capture: Any) -> str:
    """Return the id of a capture in exports, which is the same on every farm. ``capture``: a row
    with the columns `CAPTURE_KEY` and the origin."""
    of_pass = [capture.variant_id, capture.device_type, capture.grad, capture.torch, capture.launch]
    of_pass.append(tables.captured_as(capture.origin))
    return content_id([*of_pass, capture.card_model] if capture.card_model else of_pass)


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
        model_flops=extraction.model_flops or 0,
        bytes_moved=extraction.bytes_moved,
    )
    if captured.mismatches:
        capture.verification = Verification(mismatches=captured.mismatches).to_json()
    return store_capture(session, captured.calls, capture)


def is_unlisted(session: Session, capture_id: int | None) -> bool:
    """True if a capture is of a model whose generated kernels no card has listed."""
    capture, variant = tables.Capture, tables.ModelVariant
    unlisted = (
        select(capture.id)
        .join(variant, col(variant.id) == col(capture.variant_id))
        .where(capture.id == capture_id, GENERATE_KERNELS, col(capture.compiled).is_(None))
    )
    return session.exec(unlisted).first() is not None


def kernel_source(
    session: Session, variant: Variant | None, job_id: str, round_number: int
) -> dict[str, Any] | None:
    """`Subject.compiled` for the items of a round: the variant that generates the kernels, and the
    compiler's choices if a card has listed them. None if the round has no generated kernels."""
    if variant is None or not variant.generates_kernels:
        return None
    capture, numbered = tables.Capture, tables.Round
    query = (
        select(capture.compiled)
        .join(numbered, col(numbered.capture_id) == col(capture.id))
        .where(numbered.job_id == job_id, numbered.number == round_number)
    )
    stored = session.exec(query).first() or {}
    return {"variant": variant.to_json(), "choices": stored.get("choices")}


def mismatches(session: Session, capture_id: int) -> Mapping[str, str]:
    """Return tuple id -> why its reading would not be that of the model's calls, for the tuples of
    a capture.
    """
    return (
        Verification.from_json(session.get_one(tables.Capture, capture_id).verification).mismatches
        or {}
    )


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


def storages_read(session: Session, capture_id: int) -> dict[int, Sequence[int]]:
    """Index of a call -> the numbers of the storages that it reads, in the order of its tuple."""
    call = tables.Call
    query = select(call.call_index, call.reads).where(call.capture_id == capture_id)
    return {index: reads for index, reads in session.exec(query)}


def classes(session: Session, capture_id: int, data: str) -> dict[tuple[str, str], int]:
    """Return (tuple id, data class) -> number of calls, sorted by first call. `data`: as in
    `placed_calls`.
    """
    call = tables.Call
    query = select(call.operator_id, call.data).where(call.capture_id == capture_id)
    numbers = Counter[tuple[str, str]]()
    for operator_id, seen in session.exec(query.order_by(col(call.call_index))):
        numbers[operator_id, class_of(seen) if data == "seen" else data] += 1
    return dict(numbers)


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
    found: Verification,
    *,
    card_id: str,
) -> int | None:
    """Store the verification of a predicted capture. If the observed calls differ, store them as a
    capture too. Returns the id of the new capture, or None."""
    observed = found.observed
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
            found, observed=None, card=card_id, read_at_s=read_clock_s(session), mismatches=unlike
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


def kernels_unknown(variant: Variant, title: str, card_model: str) -> NoReadings:
    """The error for a variant whose generated kernels no card has listed.

    Args:
        title: of the variant, as users see it.
        card_model: "": no card has compiled it.
    """
    request = Request(variant=variant, protocol=Protocol(data=variant.data_of_calls))
    command = request.command().partition(" --launch")[0]
    eager = command.replace(f" --compile {variant.compile}", "")
    explained = eager.replace("farm run", "farm estimate", 1)
    return NoReadings(
        f"The kernels of {title} are unknown: no {card_model or 'card'} has compiled it.",
        f"Compile and measure it on such a card: {command}; or see what fusion saves at most "
        f"of the eager model: `{explained} --why`.",
    )


def capture_to_sum(
    session: Session, variant: Variant, device_type: str, launch: str, card_model: str = ""
) -> int | None:
    """The id of a stored capture of a model, preferably with the same launch; None if there is
    none. A capture with generated kernels is one that a card of the model listed.
    """
    imported = CAPTURE.origin.like(tables.IMPORTED_PREFIX + "%")
    kernels = []
    if variant.generates_kernels:
        kernels = [CAPTURE.card_model == card_model, CAPTURE.origin.like("%observed%")]
    return session.scalars(
        sqlalchemy.select(CAPTURE.id)
        .where(
            CAPTURE.variant_id == variant.id,
            CAPTURE.device_type == device_type,
            CAPTURE.grad.is_(False),
        )
        .where(*kernels)
        .order_by(CAPTURE.launch != launch, imported, CAPTURE.origin, CAPTURE.id.desc())
    ).first()


def stored_tuples(
    session: Session, variant: Variant, device_type: str, launch: str, card_model: str = ""
) -> list[NeededTuple]:
    """Return the tuples of the capture of `capture_to_sum`; [] if there is none."""
    stored = capture_to_sum(session, variant, device_type, launch, card_model)
    return [] if stored is None else tuples_of_capture(session, stored, variant.data_of_calls)


def tuples_of_capture(session: Session, capture_id: int, data: str) -> list[NeededTuple]:
    """Return the tuples of a capture. ``data``: see `classes`."""
    calls: dict[str, dict[str, int]] = defaultdict(dict)
    for (operator_id, of_call), number in classes(session, capture_id, data).items():
        calls[operator_id][of_call] = number
    columns = ["id", "short_name", "label", "flops", "bytes_moved", "spec", "output_shapes"]
    rows, unlike = (
        fetch_values(session, [OPERATOR[name] for name in columns], calls),
        mismatches(session, capture_id),
    )
    needed = []
    for id_, of_data in calls.items():
        row, mismatch = rows[id_], unlike.get(id_, "")
        description = (
            row.short_name,
            row.label,
            row.flops,
            row.bytes_moved,
            of_data,
            row.spec,
            row.output_shapes,
        )
        needed.append(NeededTuple(id_, *description, mismatch=mismatch))
    return needed
