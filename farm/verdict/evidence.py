"""Loads the rows of a job's round from the database as parts, wholes and canaries, and computes the
verdict.

Call counts come from the round's capture, readings from the job's items. A tuple of the model
without an item is a part too, with the reason why it has no reading. So no tuple of the model is
left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import sqlalchemy
from sqlmodel import Session, col, func, select

from farm.operators.roofline import Roofline, roofline_of
from farm.store import tables
from farm.store.columns import ITEM, OPERATOR, READING
from farm.store.content import classes, counts, lacking_values, sound
from farm.store.database import fetch, id_ranges, values
from farm.store.tables import ItemState
from farm.subjects.label import told_apart
from farm.types.protocol import Protocol, Variant, software_values
from farm.types.reading import CanaryNote, Verification, canary_of
from farm.types.request import named
from farm.verdict.aggregate import added, aggregate, choices_of, tuple_rows
from farm.verdict.figures import (
    NOT_IN_SCOPE,
    NOT_SHOWN,
    VIEW_COLUMNS,
    CanaryReading,
    Part,
    ReadingView,
    Whole,
)
from farm.verdict.verdict import TupleRow, Verdict

# Load only the columns that verdicts and reports use: there are tens of thousands of rows.
_OF_ITEM = (
    "id role round subject_id protocol_id card_id state reading_id reused repeated reason message"
)
_OF_READING = (*VIEW_COLUMNS, "subject_id", "software_id", "cost_s")
_STATES = {
    ItemState.CLAIMED: "being measured",
    ItemState.DEFERRED: "waits for another job's reading",
}
_SOFTWARE = {
    "torch": "torch",
    "torchvision": "torchvision",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "driver",
}

#: The most tuples in a verdict of a sweep, and entries in its other lists. The items in a part of a
#: larger sweep: for the readings of 20,000 items, PostgreSQL reads its whole table of a million
#: readings.
MOST_TUPLES, IN_PART = 20_000, 5000


class Evidence:
    """The database rows of a job up to one of its rounds. Each attribute is loaded at its first
    use.

    A large sweep has `spans`, conditions that divide its items. Its rows are never all in memory:
    use `chunks`."""

    def __init__(self, session: Session, job: tables.Job, number: int, *span: Any) -> None:
        self.session, self.job, self.number = session, job, number
        self.its = *(span or (ITEM.job_id == job.id,)), ITEM.round <= number
        self.round = session.get(tables.Round, (job.id, number))
        self.capture_id = self.round.capture_id if self.round else None
        sweep = job.kind == "sweep" and not span and not job.asked.get("placements")
        items = select(func.count()).where(ITEM.job_id == job.id)
        self.spans = (
            id_ranges(session, job.id, IN_PART)
            if sweep and session.exec(items).one() > MOST_TUPLES
            else ()
        )

    def chunks(self) -> Iterator[Evidence]:
        """Yield the evidence of each span of a large sweep; else this evidence."""
        for span in self.spans:
            yield Evidence(self.session, self.job, self.number, span)
        if not self.spans:
            yield self

    @cached_property
    def tallies(self) -> list[Any]:
        """The number of items and of their late results (`repeated`) by round, state, reused,
        reason and card.
        """
        keys = (ITEM.round, ITEM.state, ITEM.reused, ITEM.reason, ITEM.card_id)
        columns = (*keys, func.count().label("items"), func.sum(ITEM.repeated).label("repeated"))
        return [
            row
            for one in self.chunks()
            for row in values(self.session, columns, *one.its, grouped_by=keys)
        ]

    @cached_property
    def items(self) -> Sequence[Any]:
        """The items of all rounds up to this one, ordered by id."""
        return values(
            self.session, [ITEM[name] for name in _OF_ITEM.split()], *self.its, in_order_of=ITEM.id
        )

    @cached_property
    def readings(self) -> dict[str, Any]:
        """Reading id -> reading, for the readings of the items."""
        return self.columns_of_readings(_OF_READING)

    @property
    def origins_of_readings(self) -> dict[str, Any]:
        """Reading id -> its card, software and card time. Loads much less than `readings`."""
        return self.__dict__.get("readings") or self.columns_of_readings(
            ("id", "card_id", "software_id", "cost_s")
        )

    def columns_of_readings(
        self, names: Sequence[str], *of: Any, reading: Any = True
    ) -> dict[str, Any]:
        """Return reading id -> the named columns, for the items that meet the conditions `of`, and
        their `reading`.
        """
        its = sqlalchemy.select(ITEM.reading_id).where(*self.its, *of)
        found = values(
            self.session, [READING[name] for name in names], READING.id.in_(its), reading
        )
        return {row.id: row for row in found}

    @cached_property
    def protocol(self) -> Protocol:
        return Protocol.from_json(self.job.request["protocol"])

    @cached_property
    def roofline(self) -> Roofline:
        """The roofline of the most frequent card. It is used for all tuples, so that weights are
        comparable.
        """
        if self.spans:
            return next(self.chunks()).roofline
        cards = Counter(item.card_id for item in self.items if item.role == "whole")
        cards = cards or Counter(item.card_id for item in self.items)
        card = self.session.get(tables.CardRow, cards.most_common(1)[0][0]) if cards else None
        variant = self.job.request.get("variant") or {}
        dtype = variant.get("amp") or variant.get("dtype", "float32")
        tf32 = bool((self.job.request.get("protocol") or {}).get("tf32"))
        kind, model = (card.kind, card.model) if card else ("cuda", "")
        return roofline_of(kind, model, card.fingerprint if card else None, dtype=dtype, tf32=tf32)

    @cached_property
    def parts(self) -> Sequence[Part]:
        """The tuples of the model with their number of calls. In a sweep, the number is 1."""
        protocol, own_data = self.protocol, self.protocol.of_whole.data
        variant = self.job.request.get("variant")
        cards = Variant.from_json(variant).cards if variant else 1
        # (Operator id, data class) -> calls of the model, in the order of the first call
        number = dict.fromkeys(
            ((item.subject_id, own_data) for item in self.items if item.role == "tuple"), 1
        )
        if self.capture_id is not None:
            number = classes(self.session, self.capture_id, protocol.data)
        operators = self._operators()
        labels = {operator.id: operator.label for operator in operators.values()}
        if len(set(labels.values())) < len(labels):
            labels = told_apart(labels)
        # The operator types that the job measures up to this round
        scope = (self.round and self.round.operators) or self.job.request.get("operators", ["all"])
        by_subject = _preferred(item for item in self.items if item.role == "tuple")
        protocol_ids = {data: protocol.with_data(data).id for data in {data for _, data in number}}
        unlike = self.seen.mismatches or {}
        parts = []
        for (operator_id, data), count in number.items():
            operator = operators[operator_id]
            item = by_subject.get((operator_id, protocol_ids[data]))
            mismatch = unlike.get(operator_id, "")
            row = self.readings.get(item.reading_id or "") if item and not mismatch else None
            view = ReadingView.of(row).on_cards(cards) if row else None
            if (
                row
                and view
                and (note := canary_of(row.details))
                and _place(row.card_id, note) in self.changed
            ):
                view = replace(view, flags=tuple(sorted({*view.flags, "canary_off"})))
            in_scope = item is not None or "all" in scope or operator.short_name in scope
            parts.append(
                Part(
                    **_of_operator(operator, self.roofline),
                    label=labels[operator_id]
                    + ("" if data in (own_data, "copied") else f", {data}"),
                    data=data,
                    count=count,
                    reading=view,
                    reason="" if row else mismatch or self._reason(operator_id, item, in_scope),
                    card_id=row.card_id if row else item.card_id if item else "",
                    in_scope=in_scope,
                    reused=bool(row and item and item.reused),
                )
            )
        return parts

    @cached_property
    def lacking_values(self) -> set[str]:
        """The tuples whose work is unknown, because no card has shown the values that decide it."""
        return set() if self.capture_id is None else lacking_values(self.session, self.capture_id)

    def _reason(self, operator_id: str, item: Any, in_scope: bool) -> str:
        if item is None and in_scope and operator_id in self.lacking_values:
            return NOT_SHOWN
        return _reason(item, in_scope)

    def _operators(self) -> dict[str, Any]:
        its = select(ITEM.subject_id).where(*self.its, ITEM.role == "tuple")
        if self.capture_id is not None:
            its = select(tables.Call.operator_id).where(tables.Call.capture_id == self.capture_id)
        wanted = (
            OPERATOR.id,
            OPERATOR.short_name,
            OPERATOR.label,
            OPERATOR.flops,
            OPERATOR.bytes_moved,
        )
        return {row.id: row for row in values(self.session, wanted, OPERATOR.id.in_(its))}

    @cached_property
    def wholes(self) -> Sequence[Whole]:
        """The whole model on each card, and with the other launch if the card has such a
        reading.
        """
        if self.job.kind == "sweep":
            return ()
        launch, wholes = self.protocol.launch, []
        found = self.columns_of_readings(_OF_READING, ITEM.role == "whole")
        for item in (item for item in self.items if item.role == "whole"):
            row = found.get(item.reading_id or "")
            if row is None:
                wholes.append(Whole(item.card_id, None, _reason(item, True, whole=True), launch))
                continue
            wholes.append(Whole(row.card_id, ReadingView.of(row), "", launch))
            wholes += self._with_other_launch(row)
        return wholes

    def _with_other_launch(self, row: Any) -> list[Whole]:
        """Return the newest sound reading of the whole on the same card and software, with the
        other launch.
        """
        protocol, reading = self.protocol.of_whole, tables.ReadingRow
        other = "eager" if protocol.launch == "graph" else "graph"
        other_id = Protocol.from_json({**protocol.to_json(), "launch": other}).id
        same = [
            getattr(reading, name) == getattr(row, name)
            for name in ("subject_id", "card_id", "software_id")
        ]
        found = select(reading).where(*same, reading.protocol_id == other_id, reading.origin == "")
        newest = next(
            filter(sound, self.session.exec(found.order_by(col(reading.created_at_s).desc()))), None
        )
        return [Whole(newest.card_id, ReadingView.of(newest), "", other)] if newest else []

    @cached_property
    def canaries(self) -> Sequence[CanaryReading]:
        """The readings of canary items, of tuple items with the same operators, and of the
        reference operator.
        """
        subjects = {
            (item.subject_id, item.protocol_id) for item in self.items if item.role == "canary"
        }
        its = (
            item
            for item in self.items
            if (item.subject_id, item.protocol_id) in subjects and item.role != "whole"
        )
        rows = map(self.readings.get, dict.fromkeys(item.reading_id for item in its))
        found = [
            CanaryReading(row.subject_id, row.card_id, ReadingView.of(row)) for row in rows if row
        ]
        # Each benchmark process measures the reference operator repeatedly; each reading stores the
        # last result.
        noted: dict[tuple[Any, ...], CanaryReading] = {}
        for row in self.readings.values():
            if note := canary_of(row.details):
                view = ReadingView(note.time_us, energy_mj=note.energy_mj, card_id=row.card_id)
                place = (*_place(row.card_id, note), note.time_us)
                noted[place] = CanaryReading("reference operator", row.card_id, view)
        return [*found, *noted.values()]

    @cached_property
    def changed(self) -> set[tuple[str, int | None, int]]:
        """The places (`_place`) of the last good canary before each changed one. The time of the
        change is unknown, so readings after it are doubtful. A reading stores only the canary
        before it, so later rows show the change."""
        off = sqlalchemy.cast(READING.flags, sqlalchemy.String).contains("canary_off")
        its = (
            one.columns_of_readings(("id", "card_id", "details"), reading=off)
            for one in self.chunks()
        )
        rows = [row for found in its for row in found.values()]
        return {_place(row.card_id, note, -1) for row in rows if (note := canary_of(row.details))}

    @cached_property
    def seen(self) -> Verification:
        """The verification of the round's capture on a card, without the parts that are not valid
        for this job. Kernels and times of calls depend on the card model and the numeric flags; the
        rest does not."""
        capture = self.session.get(tables.Capture, self.capture_id) if self.capture_id else None
        found = Verification.from_json(capture.verification if capture else None)
        same = found.ran_as(self.job.request)
        if same and found.card:
            card_models = (
                select(tables.Item.card_model).where(tables.Item.job_id == self.job.id).distinct()
            )
            card = self.session.get(tables.CardRow, found.card)
            same = card is not None and card.model in set(self.session.exec(card_models))
        return (
            found
            if same
            else replace(found, kernels=None, tuple_kernels=None, in_model=None, eagerly=None)
        )

    @property
    def tuples(self) -> tuple[TupleRow, ...]:
        """Return the tuples with the figures that the sum uses."""
        return tuple_rows(choices_of(self.parts, self.wholes, self.protocol.launch))

    def verdict(self) -> Verdict:
        """Compute the verdict from the readings so far. While items are open, it is preliminary.
        The intervals of a large sweep do not include the differences of canaries."""
        found, numbers = None, Counter[str]()
        for one in self.chunks():
            if self.spans:
                one.roofline, one.changed = self.roofline, self.changed
            part = aggregate(
                one.parts,
                one.wholes,
                () if self.spans else one.canaries,
                target=self.job.request.get("target", 0.95),
                launch=self.protocol.launch,
                requested=named(self.job.request.get("operators", ())),
                seen=one.seen,
            )
            found = added(found, part, MOST_TUPLES) if found else part
            views = [part.reading for part in one.parts] + [whole.reading for whole in one.wholes]
            read = (one.readings.get(view.reading_id) for view in views if view)
            numbers += Counter(row.software_id for row in read if row)
        assert found is not None
        return self._of_one_software(found, numbers)

    def _of_one_software(self, verdict: Verdict, numbers: Counter[str]) -> Verdict:
        """Remove the outcome if the readings are of different software, because such readings are
        never summed. A job is planned for one software. If a host gets another torch during the
        job, its later readings differ. ``numbers``: software id -> number of readings."""
        if len(numbers) < 2:
            return verdict
        found = fetch(self.session, tables.SoftwareRow, numbers)
        of_cards = {row.value.of_one_card.id for row in found.values()}
        if len(of_cards) == 1 and len(software_values(found.values(), "communication")) < 2:
            return verdict
        rows = [(found[software_id], number) for software_id, number in numbers.most_common()]
        names = [*_SOFTWARE, "python", "platform", "communication"]
        differ = [name for name in names if len(software_values(found.values(), name)) > 1]
        each = " and ".join(
            f"{number} with "
            + ", ".join(
                f"{_SOFTWARE.get(name, name)} {getattr(row, name) or 'none'}" for name in differ
            )
            for row, number in rows
        )
        return verdict.withheld(
            f"The readings come from different software, so they are not summed: {each}. Install "
            "the same software on "
            "all hosts and run the job again. The job reuses the readings with that software."
        )


def _of_operator(operator: Any, roofline: Roofline) -> dict[str, Any]:
    """Return the fields of a part that its operator determines."""
    same = {name: getattr(operator, name) for name in ("short_name", "flops", "bytes_moved")}
    estimated_us = roofline.estimate_us(operator.flops, operator.bytes_moved)
    return {**same, "operator_id": operator.id, "estimated_us": estimated_us}


def unscoped_parts(session: Session, capture_id: int, roofline: Roofline) -> list[Part]:
    """Return the tuples of a capture with estimated costs only. The accuracy loop uses them for its
    first choice.
    """
    number = counts(session, capture_id)
    operators = session.exec(
        select(tables.Operator).where(col(tables.Operator.id).in_(list(number)))
    )
    more: dict[str, Any] = {"reason": NOT_IN_SCOPE, "in_scope": False}
    return [
        Part(**_of_operator(one, roofline), label=one.label, count=number[one.id], **more)
        for one in operators
    ]


def _preferred(items: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """Choose one item per (subject id, protocol id): preferably with a reading, else an open one,
    else a failed one.
    """
    order = (
        ItemState.DONE,
        ItemState.CLAIMED,
        ItemState.DEFERRED,
        ItemState.WAITING,
        ItemState.FAILED,
    )
    rank = {str(state): place for place, state in enumerate(reversed(order))}
    worst_first = sorted(reversed([*items]), key=lambda item: rank.get(item.state, -1))
    return {(item.subject_id, item.protocol_id): item for item in worst_first}


def _reason(item: Any, in_scope: bool, whole: bool = False) -> str:
    """Say why a tuple has no reading, in one line, or why a whole model has none. `item` is None if
    it has no item.
    """
    if item is None:
        return "not planned" if in_scope else NOT_IN_SCOPE
    if item.state == ItemState.FAILED:
        message = item.message.strip()
        text = message if whole else message.partition("\n")[0][:200]
        return f"{item.reason}: {text}" if text else item.reason or "failed"
    return _STATES.get(ItemState(item.state), item.state)


def _place(card_id: str, note: CanaryNote, after: int = 0) -> tuple[str, int | None, int]:
    """Where a canary was measured: card, process and its number there."""
    return card_id, note.process, note.number + after
