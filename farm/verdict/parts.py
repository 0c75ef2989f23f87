"""From the rows of a job to what is judged: parts with their counts, wholes, canaries.

Occurrence counts come from the calls of the round's capture, readings from the job's items. An operator of the
model without an item is a part as well, with the reason why it has no reading: nothing of the model goes missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sqlmodel import Session, col, select

from farm.operators.roofline import Roofline, roofline_of
from farm.store import tables
from farm.store.content import classes, counts
from farm.store.reuse import sound
from farm.store.rows import values
from farm.store.tables import ItemState
from farm.types.label import told_apart
from farm.types.protocol import Protocol
from farm.types.reading import Verification, canary_of
from farm.verdict.figures import NOT_IN_SCOPE, Canary, Part, ReadingView, Whole


def parts_of(
    session: Session, job: tables.Job, number: int, items: Sequence[Any], readings: dict[str, Any]
) -> list[Part]:
    """The parts of a job up to round `number`; of a sweep, every tuple is one with the count 1.

    Args:
        items: the job's up to that round, in the order of their ids.
        readings: of the items, by id.
    """
    counts = occurrences(session, job, number, items)
    operators = _operators(session, job, number)
    labels = told_apart({operator.id: operator.label for operator in operators.values()})
    roofline = roofline_for(session, job, items)
    scope = scope_of(session, job, number)
    doubtful = _before_a_changed_canary(readings.values())
    by_subject = _preferred(item for item in items if item.role == "tuple")
    protocol = Protocol.from_json(job.request["protocol"])
    protocol_ids = {data: protocol.with_data(data).id for data in {data for _, data in counts}}
    own_data = protocol.of_whole.data

    parts = []
    for (operator_id, data), count in counts.items():
        operator = operators[operator_id]
        item = by_subject.get((operator_id, protocol_ids[data]))
        row = readings.get(item.reading_id or "") if item else None
        in_scope = item is not None or scope is None or operator.short_name in scope
        parts.append(
            Part(
                operator_id=operator_id,
                short_name=operator.short_name,
                label=labels[operator_id] + ("" if data == own_data else f", {data}"),
                data=data,
                count=count,
                flops=operator.flops,
                bytes_moved=operator.bytes_moved,
                estimated_us=roofline.estimate_us(operator.flops, operator.bytes_moved),
                reading=_flagged(ReadingView.of(row), row.id in doubtful) if row else None,
                reason="" if row else _reason(item, in_scope),
                card_id=row.card_id if row else item.card_id if item else "",
                in_scope=in_scope,
                reused=bool(item and item.reused),
            )
        )
    return parts


def _operators(session: Session, job: tables.Job, number: int) -> dict[str, Any]:
    """What a part needs to know of its operator, by id."""
    operator, item, call = tables.Operator.__table__.columns, tables.Item, tables.Call  # type: ignore[attr-defined]
    round_row = session.get(tables.Round, (job.id, number))
    if round_row is None or round_row.capture_id is None:
        its = select(item.subject_id).where(item.job_id == job.id, item.round <= number, item.role == "tuple")
    else:
        its = select(call.operator_id).where(call.capture_id == round_row.capture_id)
    wanted = (operator.id, operator.short_name, operator.label, operator.flops, operator.bytes_moved)
    return {row.id: row for row in values(session, wanted, operator.id.in_(its))}


def occurrences(session: Session, job: tables.Job, number: int, items: Sequence[Any]) -> dict[tuple[str, str], int]:
    """(Operator id, class of data) -> how often the model calls it, in the order of first call. Of a sweep: once each."""
    protocol = Protocol.from_json(job.request["protocol"])
    round_row = session.get(tables.Round, (job.id, number))
    if round_row is None or round_row.capture_id is None:
        data = protocol.of_whole.data
        return dict.fromkeys(((item.subject_id, data) for item in items if item.role == "tuple"), 1)
    return classes(session, round_row.capture_id, protocol.data)


def seen_on_card(session: Session, job: tables.Job, number: int) -> Verification:
    """What verifying the round's capture found on a card, as far as it holds for this job.

    The kernels and what calls took are a matter of the card's model and of the numeric flags; the rest is not.
    """
    round_row = session.get(tables.Round, (job.id, number))
    capture = session.get(tables.Capture, round_row.capture_id) if round_row and round_row.capture_id else None
    found = Verification.from_json(capture.verification if capture else None)
    protocol = job.request.get("protocol") or {}
    same = all(protocol.get(name, False) == value for name, value in (found.numerics or {}).items())
    if same and found.card:
        cards = select(tables.Item.card_model).where(tables.Item.job_id == job.id).distinct()
        card = session.get(tables.Card, found.card)
        same = card is not None and card.model in set(session.exec(cards))
    return found if same else found.without_the_card()


def scope_of(session: Session, job: tables.Job, number: int) -> frozenset[str] | None:
    """The operator types chosen so far; None means all."""
    round_row = session.get(tables.Round, (job.id, number))
    chosen = round_row.operators if round_row and round_row.operators else job.request.get("operators", ["all"])
    return None if "all" in chosen else frozenset(name for name in chosen if name != "auto")


def roofline_for(session: Session, job: tables.Job, items: Sequence[Any]) -> Roofline:
    """One roofline for the whole job, so that its weights compare: of the card of the whole, or the busiest."""
    cards = Counter(item.card_id for item in items if item.role == "whole") or Counter(i.card_id for i in items)
    card = session.get(tables.Card, cards.most_common(1)[0][0]) if cards else None
    variant = job.request.get("variant") or {}
    dtype = variant.get("amp") or variant.get("dtype", "float32")
    tf32 = bool((job.request.get("protocol") or {}).get("tf32"))
    kind, model = (card.kind, card.model) if card else ("cuda", "")
    return roofline_of(kind, model, card.fingerprint if card else None, dtype=dtype, tf32=tf32)


def _preferred(items: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """One item per subject and protocol: one with a reading before one without, an open one before a failed one."""
    rank = {ItemState.DONE: 0, ItemState.CLAIMED: 1, ItemState.DEFERRED: 2, ItemState.WAITING: 3, ItemState.FAILED: 4}
    chosen: dict[tuple[str, str], Any] = {}
    for item in items:
        key = (item.subject_id, item.protocol_id)
        before = chosen.get(key)
        if before is None or rank.get(ItemState(item.state), 9) < rank.get(ItemState(before.state), 9):
            chosen[key] = item
    return chosen


def _reason(item: Any, in_scope: bool) -> str:
    if item is None:
        return "not planned" if in_scope else NOT_IN_SCOPE
    if item.state == ItemState.FAILED:
        lines = item.message.strip().splitlines()
        return f"{item.reason}: {lines[0][:200]}" if lines else item.reason or "failed"
    return {ItemState.CLAIMED: "being measured", ItemState.DEFERRED: "measured for another job"}.get(
        ItemState(item.state), item.state
    )


def wholes_of(session: Session, job: tables.Job, items: Sequence[Any], readings: dict[str, Any]) -> list[Whole]:
    """The job's whole on each card, and that of the other launch where the same card has one: they tell the launch gap."""
    launch = (job.request.get("protocol") or {}).get("launch", "")
    wholes = []
    for item in items:
        if item.role != "whole":
            continue
        row = readings.get(item.reading_id or "")
        if row is None:
            wholes.append(Whole(item.card_id, None, _reason(item, True), launch))
            continue
        wholes.append(Whole(row.card_id, ReadingView.of(row), "", launch))
        if (other := _other_launch(session, job, row)) is not None:
            wholes.append(other)
    return wholes


def _other_launch(session: Session, job: tables.Job, row: Any) -> Whole | None:
    """The same whole on the same card and software, launched the other way, if somebody has read it."""
    protocol = Protocol.from_json(job.request["protocol"]).of_whole
    other = "eager" if protocol.launch == "graph" else "graph"
    twin = Protocol.from_json({**protocol.to_json(), "launch": other})
    reading = tables.Reading
    found = session.exec(
        select(reading)
        .where(
            reading.subject_id == row.subject_id,
            reading.card_id == row.card_id,
            reading.software_id == row.software_id,
            reading.protocol_id == twin.id,
            reading.origin == "",
        )
        .order_by(col(reading.created_at_s).desc())
    )
    newest = next(filter(sound, found), None)
    return Whole(newest.card_id, ReadingView.of(newest), "", other) if newest else None


def canaries_of(items: Sequence[Any], readings: dict[str, Any]) -> list[Canary]:
    """The canary items' readings, and those that the same subjects have as tuples. No reading counts twice."""
    subjects = {(item.subject_id, item.protocol_id) for item in items if item.role == "canary"}
    rows = {
        item.reading_id: readings[item.reading_id]
        for item in items
        if item.role in ("canary", "tuple")
        and (item.subject_id, item.protocol_id) in subjects
        and item.reading_id in readings
    }
    found = [Canary(row.subject_id, row.card_id, ReadingView.of(row)) for row in rows.values()]
    return found + _references(readings.values())


def _before_a_changed_canary(rows: Iterable[Any]) -> frozenset[str]:
    """The readings that were good by the canary before them, while the next one of their process had changed.

    When between the two it changed is not known. Each reading notes the canary before it alone, so only the rows of those
    that came later tell.
    """
    noted = {
        row.id: (row.card_id, note.process, note.number, "canary_off" in row.flags)
        for row in rows
        if (note := canary_of(row.details))
    }
    changed = {(card, process, number - 1) for card, process, number, off in noted.values() if off}
    return frozenset(
        reading_id for reading_id, (card, process, number, _) in noted.items() if (card, process, number) in changed
    )


def _flagged(view: ReadingView, doubtful: bool) -> ReadingView:
    return replace(view, flags=tuple(sorted({*view.flags, "canary_off"}))) if doubtful else view


def _references(rows: Iterable[Any]) -> list[Canary]:
    """The reference operator that each benchmark process reads again and again, as the readings around it noted it."""
    seen: dict[tuple[Any, ...], Canary] = {}
    for row in rows:
        if note := canary_of(row.details):
            view = ReadingView(note.time_us, energy_mj=note.energy_mj, card_id=row.card_id)
            seen[row.card_id, note.process, note.number, note.time_us] = Canary("reference operator", row.card_id, view)
    return list(seen.values())


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
