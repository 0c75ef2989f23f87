"""Loads the rows of a job's round from the database as parts, wholes and canaries, and computes the
verdict.

Call counts come from the round's capture, readings from the job's items. A tuple of the model
without an item is a part too, with the reason why it has no reading. So no tuple of the model is
left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import sqlalchemy
from sqlmodel import Session, col, func, select

from farm.store import item_state, tables
from farm.store.captures import classes, counts, lacking_values
from farm.store.columns import ITEM, OPERATOR, READING
from farm.store.database import fetch, id_ranges, streamed, values
from farm.store.reuse import sound
from farm.store.tables import ItemRole, ItemState
from farm.types.details import CanaryNote, canary_of
from farm.types.format import told_apart
from farm.types.protocol import Protocol
from farm.types.request import named
from farm.types.roofline import Bound, Roofline, roofline_of
from farm.types.software import software_values
from farm.types.variant import Variant
from farm.types.verification import Verification
from farm.verdict.aggregate import added, aggregate, sum_lines
from farm.verdict.canaries import REFERENCE_OPERATOR, CanaryReadings
from farm.verdict.check_readings import figures_of_checks
from farm.verdict.checked_cards import CheckedCards, levels_of, shares_of
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import (
    NOT_IN_SCOPE,
    NOT_SHOWN,
    VIEW_COLUMNS,
    ReadingView,
    Whole,
)
from farm.verdict.replay import measured_lines, of_launch
from farm.verdict.verdict import Verdict

# Load only the columns that verdicts and reports use: there are tens of thousands of rows.
_OF_ITEM = (
    ITEM.id,
    ITEM.role,
    ITEM.round,
    ITEM.subject_id,
    ITEM.protocol_id,
    ITEM.card_id,
    ITEM.state,
    ITEM.reading_id,
    ITEM.reused,
    ITEM.repeated,
    ITEM.reason,
    ITEM.message,
)
_OF_OPERATOR = (
    OPERATOR.id,
    OPERATOR.short_name,
    OPERATOR.label,
    OPERATOR.flops,
    OPERATOR.bytes_moved,
)
_OF_READING = (*VIEW_COLUMNS, "subject_id", "software_id", "cost_s", "created_at_s")
_STATES = {
    ItemState.CLAIMED: "being measured",
    ItemState.DEFERRED: "waits for another job's reading",
}
#: If a subject has several items, that of the last state counts.
_PREFERENCE = (
    ItemState.FAILED,
    ItemState.WAITING,
    ItemState.DEFERRED,
    ItemState.CLAIMED,
    ItemState.DONE,
)
#: Column of the table of software -> its name for people.
_SOFTWARE = {
    "torch": "torch",
    "torchvision": "torchvision",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "driver",
    "python": "python",
    "platform": "platform",
    "communication": "communication",
}

#: The most tuples in a verdict of a sweep, and entries in its other lists. A larger sweep is read
#: in batches of `IN_BATCH` items.
MOST_TUPLES, IN_BATCH = 20_000, 5000

#: Where a canary was measured: card, process and its number there.
CanaryRun = tuple[str, int | None, int]


class JobResults:
    """The database rows of a job up to one of its rounds. Each attribute is loaded at its first
    use.

    The rows of a large sweep are never all in memory: its verdict reads them in batches.

    Attributes:
        of_items: the conditions that select the items.
    """

    def __init__(self, session: Session, job: tables.Job, number: int) -> None:
        self.session, self.job, self.number = session, job, number
        self.of_items = (ITEM.job_id == job.id, ITEM.round <= number)
        self.round = session.get(tables.Round, (job.id, number))
        self.capture_id = self.round.capture_id if self.round else None

    @cached_property
    def is_large(self) -> bool:
        """True for a sweep of more than `MOST_TUPLES` items."""
        if not self.job.is_sweep or self.job.asked.get("placements"):
            return False
        items = select(func.count()).where(ITEM.job_id == self.job.id)
        return self.session.exec(items).one() > MOST_TUPLES

    # ---- rows

    @cached_property
    def tallies(self) -> list[Any]:
        """The number of items and of their late results (`repeated`) by round, role, state, reused,
        reason and card.
        """
        keys = (ITEM.round, ITEM.role, ITEM.state, ITEM.reused, ITEM.reason, ITEM.card_id)
        columns = (*keys, func.count().label("items"), func.sum(ITEM.repeated).label("repeated"))
        return values(self.session, columns, *self.of_items, grouped_by=keys)

    @cached_property
    def items(self) -> Sequence[Any]:
        """The items of all rounds up to this one, ordered by id."""
        return values(self.session, _OF_ITEM, *self.of_items, in_order_of=ITEM.id)

    def items_of(self, role: str) -> list[Any]:
        """Return the items with a role, see `ItemRole`."""
        return [item for item in self.items if item.role == role]

    @cached_property
    def readings(self) -> dict[str, Any]:
        """Reading id -> reading, for the readings of the items."""
        return self.columns_of_readings(_OF_READING)

    def columns_of_readings(
        self, names: Sequence[str], *of: Any, reading: Any = True
    ) -> dict[str, Any]:
        """Return reading id -> the named columns, for the items that meet the conditions `of`, and
        their `reading`.
        """
        ids = sqlalchemy.select(ITEM.reading_id).where(*self.of_items, *of)
        columns = [READING[name] for name in names]
        rows = values(self.session, columns, READING.id.in_(ids), reading)
        return {row.id: row for row in rows}

    @cached_property
    def protocol(self) -> Protocol:
        return Protocol.from_json(self.job.request["protocol"])

    @cached_property
    def roofline(self) -> Roofline:
        """The roofline of the most frequent card. It is used for all tuples, so that weights are
        comparable.
        """
        variant = self.job.request.get("variant") or {}
        return self.roofline_for(variant.get("amp") or variant.get("dtype", "float32"))

    def roofline_for(self, dtype: str) -> Roofline:
        """The roofline of the most frequent card for another dtype."""
        card = self._most_frequent_card
        tf32 = bool((self.job.request.get("protocol") or {}).get("tf32"))
        if card is None:
            return roofline_of("cuda", "", None, dtype=dtype, tf32=tf32)
        return roofline_of(card.kind, card.model, card.fingerprint, dtype=dtype, tf32=tf32)

    @cached_property
    def _most_frequent_card(self) -> tables.CardRow | None:
        if self.is_large:
            cards = Counter[str]()
            for tally in self.tallies:
                cards[tally.card_id] += tally.items
        else:
            cards = Counter(item.card_id for item in self.items_of("whole") or self.items)
        if not cards:
            return None
        most_frequent, _ = cards.most_common(1)[0]
        return self.session.get(tables.CardRow, most_frequent)

    # ---- tuples

    @cached_property
    def parts(self) -> Sequence[CostLine]:
        """The tuples of the model with their number of calls. In a sweep, the number is 1."""
        operators = self._operators()
        labels = _labels(operators.values())
        items = _preferred(self.items_of("tuple"))
        usual_data = (self.protocol.of_whole.data, "copied")
        protocol_ids: dict[str, str] = {}

        parts = []
        for (operator_id, data), count in self._calls().items():
            if data not in protocol_ids:
                protocol_ids[data] = self.protocol.with_data(data).id
            label = labels[operator_id]
            if data not in usual_data:
                label = f"{label}, {data}"
            subject = _subject(operators[operator_id], self.roofline, label, data)
            item = items.get((operator_id, protocol_ids[data]))
            row = self.readings.get(item.reading_id or "") if item else None
            parts.append(self._part(subject, count, item, row))
        return parts

    def _calls(self) -> Mapping[tuple[str, str], int]:
        """Return (operator id, data class) -> calls of the model, in the order of the first
        call.
        """
        if self.capture_id is not None:
            return classes(self.session, self.capture_id, self.protocol.data)
        usual = self.protocol.of_whole
        of_sweep = [item for item in self.items_of("tuple") if item.protocol_id == usual.id]
        return dict.fromkeys(((item.subject_id, usual.data) for item in of_sweep), 1)

    def _part(self, subject: TupleView, count: int, item: Any, row: Any) -> CostLine:
        """Build the line of a tuple from its item and its reading, which may be None."""
        in_scope = item is not None or self._selects(subject.short_name)
        mismatch = (self.verification.mismatches or {}).get(subject.operator_id, "")
        if row is None or mismatch:
            return CostLine(
                subject,
                count,
                "missing",
                reason=mismatch or self._reason(subject.operator_id, item, in_scope),
                card_id=item.card_id if item else "",
                in_scope=in_scope,
            )
        return CostLine.of_reading(subject, count, self._view(row), reused=bool(item.reused))

    def _selects(self, short_name: str) -> bool:
        """True if the job measures this operator type up to this round."""
        in_round = self.round.operators if self.round else None
        scope = in_round or self.job.request.get("operators", ["all"])
        return "all" in scope or short_name in scope

    def _view(self, row: Any) -> ReadingView:
        """Return a tuple's reading on all cards of the model, flagged if the canary changed after
        it.
        """
        view = ReadingView.of(row).on_cards(self._cards)
        note = canary_of(row.details)
        if note and _run(row.card_id, note) in self.changed:
            return replace(view, flags=tuple(sorted({*view.flags, "canary_off"})))
        return view

    @cached_property
    def _cards(self) -> int:
        variant = self.job.request.get("variant")
        return Variant.from_json(variant).cards if variant else 1

    @cached_property
    def lacking_values(self) -> set[str]:
        """The tuples whose work is unknown, because no card has shown the values that decide it."""
        return set() if self.capture_id is None else lacking_values(self.session, self.capture_id)

    def _reason(self, operator_id: str, item: Any, in_scope: bool) -> str:
        if item is None and in_scope and operator_id in self.lacking_values:
            return NOT_SHOWN
        return _why_missing(item, in_scope)

    def _operators(self) -> dict[str, Any]:
        ids = select(ITEM.subject_id).where(*self.of_items, ITEM.role == "tuple")
        if self.capture_id is not None:
            ids = select(tables.Call.operator_id).where(tables.Call.capture_id == self.capture_id)
        rows = values(self.session, _OF_OPERATOR, OPERATOR.id.in_(ids))
        return {row.id: row for row in rows}

    # ---- whole models and canaries

    @cached_property
    def wholes(self) -> Sequence[Whole]:
        """The whole model on each card, and with the other launch if the card has such a
        reading.
        """
        if self.job.is_sweep:
            return ()
        launch, wholes = self.protocol.launch, []
        rows = self.columns_of_readings(_OF_READING, ITEM.role == "whole")
        for item in self._items_of_wholes():
            row = rows.get(item.reading_id or "")
            if row is None:
                wholes.append(
                    Whole(item.card_id, None, _why_missing(item, True, whole=True), launch)
                )
                continue
            wholes.append(Whole(row.card_id, ReadingView.of(row), "", launch))
            wholes += self._with_other_launch(row)
        return wholes

    def _items_of_wholes(self) -> list[Any]:
        """Return the item of the whole model on each card: of a card that has only listed its
        kernels, that item.
        """
        measuring = {item.card_id for item in self.items_of(ItemRole.WHOLE)}
        return [
            item
            for item in self.items
            if item.role == ItemRole.WHOLE
            or (not ItemRole(item.role).has_reading and item.card_id not in measuring)
        ]

    def _with_other_launch(self, row: Any) -> list[Whole]:
        """Return the newest sound reading of the whole on the same card and software, with the
        other launch.
        """
        protocol, reading = self.protocol.of_whole, tables.ReadingRow
        other = "eager" if protocol.launch == "graph" else "graph"
        other_id = Protocol.from_json({**protocol.to_json(), "launch": other}).id
        same = (
            select(reading)
            .where(
                reading.subject_id == row.subject_id,
                reading.card_id == row.card_id,
                reading.software_id == row.software_id,
                reading.protocol_id == other_id,
                reading.origin == "",
            )
            .order_by(col(reading.created_at_s).desc())
        )
        newest = next(filter(sound, self.session.exec(same)), None)
        return [Whole(newest.card_id, ReadingView.of(newest), "", other)] if newest else []

    @cached_property
    def canaries(self) -> CanaryReadings:
        """The readings of canary items, of tuple items with the same operators, and of the
        reference operator.
        """
        subjects = {(item.subject_id, item.protocol_id) for item in self.items_of("canary")}
        reading_ids: dict[str, None] = {}  # in the order of the items, each once
        for item in self.items:
            if item.role != "whole" and (item.subject_id, item.protocol_id) in subjects:
                reading_ids[item.reading_id] = None

        canaries: dict[str, list[ReadingView]] = defaultdict(list)
        for reading_id in reading_ids:
            row = self.readings.get(reading_id)
            if row:
                canaries[row.subject_id].append(ReadingView.of(row))
        return {**canaries, REFERENCE_OPERATOR: self._reference_canaries()}

    def _reference_canaries(self) -> list[ReadingView]:
        """Return the measurements of the reference operator. Each benchmark process measures it
        repeatedly; each reading stores the last result."""
        noted: dict[tuple[CanaryRun, float], ReadingView] = {}
        for row in self.readings.values():
            note = canary_of(row.details)
            if note is None:
                continue
            view = ReadingView(note.time_us, note.energy_mj, card_id=row.card_id)
            run = _run(row.card_id, note)
            noted[run, note.time_us.value] = view
        return list(noted.values())

    @cached_property
    def changed(self) -> set[CanaryRun]:
        """The places of the last good canary before each changed one. The time of the change is
        unknown, so readings after it are doubtful. A reading stores only the canary before it, so
        later rows show the change."""
        off = sqlalchemy.cast(READING.flags, sqlalchemy.String).contains("canary_off")
        rows = self.columns_of_readings(("id", "card_id", "details"), reading=off)
        notes = [(row.card_id, canary_of(row.details)) for row in rows.values()]
        return {_run(card_id, note, -1) for card_id, note in notes if note}

    @cached_property
    def verification(self) -> Verification:
        """The verification of the round's capture on a card, without the parts that are not valid
        for this job. Kernels and times of calls depend on the card model and the numeric flags; the
        rest does not."""
        capture = self.session.get(tables.Capture, self.capture_id) if self.capture_id else None
        verification = Verification.from_json(capture.verification if capture else None)
        if verification.ran_as(self.job.request) and self._has_model_of(verification.card):
            return verification
        return replace(verification, kernels=None, tuple_kernels=None, in_model=None, eagerly=None)

    def _has_model_of(self, card_id: str | None) -> bool:
        """True if the job has items on cards of the model of this card, or if no card is given."""
        if not card_id:
            return True
        card = self.session.get(tables.CardRow, card_id)
        models = select(tables.Item.card_model).where(tables.Item.job_id == self.job.id)
        return card is not None and card.model in set(self.session.exec(models.distinct()))

    @cached_property
    def checked_cards(self) -> CheckedCards | None:
        """The differences between the cards of the job. None if it has one card or no whole, or
        splits a model; if one of its cards has no check with the same software, not long before or
        after its readings; or if all figures of a kind of its work are tuples of the job."""
        wholes = of_launch(self.wholes, self.protocol.launch)
        if not wholes or self._cards > 1:
            return None
        readings = [part.reading for part in self.parts if part.reading]
        card_ids = {view.card_id for view in (*readings, *wholes)}
        if len(card_ids) < 2:
            return None
        rows = [self.readings[view.reading_id] for view in (*readings, *wholes)]
        kinds: dict[str, Bound] = {REFERENCE_OPERATOR: "compute"}
        for part in self.parts:
            kinds[part.subject.operator_id] = self.roofline.bound_of(part.subject)
        figures = figures_of_checks(self.session, rows, kinds.keys(), self.roofline)
        levels = levels_of(figures, card_ids)
        if any((kind, "time") not in levels for kind in kinds.values()):
            return None
        return CheckedCards(levels, kinds, shares_of(self.parts, wholes))

    # ---- the verdict

    @property
    def tuples(self) -> tuple[CostLine, ...]:
        """Return the tuples with the figures that the sum uses."""
        lines = measured_lines(self.parts, self.wholes, self.protocol.launch, self.checked_cards)
        return sum_lines(self.parts, lines)

    def verdict(self) -> Verdict:
        """Compute the verdict from the readings so far. While items are open, it is preliminary.
        The intervals of a large sweep do not include the differences of canaries."""
        if self.is_large:
            return self._verdict_of_batches()
        verdict = self._verdict_of(self.parts, self.canaries)
        views = [part.reading for part in self.parts] + [whole.reading for whole in self.wholes]
        software = Counter[str]()
        for view in views:
            row = self.readings.get(view.reading_id) if view else None
            if row:
                software[row.software_id] += 1
        return self._of_one_software(verdict, software)

    def _verdict_of(
        self, parts: Sequence[CostLine], canaries: CanaryReadings = MappingProxyType({})
    ) -> Verdict:
        return aggregate(
            parts,
            self.wholes,
            canaries,
            target=self.job.request.get("target", 0.95),
            launch=self.protocol.launch,
            requested=named(self.job.request.get("operators", ())),
            verification=self.verification,
            cards=self.checked_cards,
        )

    def _verdict_of_batches(self) -> Verdict:
        """Compute the verdict of a large sweep: each batch is added to the sums of those before."""
        data = self.protocol.of_whole.data
        verdict, software = None, Counter[str]()
        for rows in self._batches_of_tuples():
            labels = _labels(operator for _, operator, _ in rows)
            parts = []
            for item, operator, reading in rows:
                subject = _subject(operator, self.roofline, labels[operator.id], data)
                parts.append(self._part(subject, 1, item, reading))
                if reading:
                    software[reading.software_id] += 1
            of_batch = self._verdict_of(parts)
            verdict = added(verdict, of_batch, MOST_TUPLES) if verdict else of_batch
        assert verdict is not None
        return self._of_one_software(verdict, software)

    def _batches_of_tuples(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the tuples of a large sweep as rows of item, operator and reading, ordered by item.

        They are sorted in ranges of ids: a sort of all rows would precede the first one, and sums
        in the order of the database would have other last digits."""
        of_readings = [READING[name] for name in _OF_READING]
        for of_range in id_ranges(self.session, self.job.id):
            tuples = (
                sqlalchemy.select(ITEM.id)
                .join(tables.Operator, OPERATOR.id == ITEM.subject_id)
                .outerjoin(tables.ReadingRow, READING.id == ITEM.reading_id)
                .where(of_range, ITEM.round <= self.number, ITEM.role == "tuple")
                .order_by(ITEM.id)
            )
            columns = (_OF_ITEM, _OF_OPERATOR, of_readings)
            yield from streamed(self.session, columns, tuples, IN_BATCH)

    def _of_one_software(self, verdict: Verdict, numbers: Counter[str]) -> Verdict:
        """Remove the outcome if the readings are of different software, because such readings are
        never summed. A job is planned for one software. If a host gets another torch during the
        job, its later readings differ. ``numbers``: software id -> number of readings."""
        if len(numbers) < 2:
            return verdict
        rows = fetch(self.session, tables.SoftwareRow, numbers)
        of_cards = {row.value.of_one_card.id for row in rows.values()}
        if len(of_cards) == 1 and len(software_values(rows.values(), "communication")) < 2:
            return verdict

        differ = [name for name in _SOFTWARE if len(software_values(rows.values(), name)) > 1]
        groups = []
        for software_id, number in sorted(numbers.items(), key=lambda item: (-item[1], item[0])):
            columns = rows[software_id].model_dump()
            versions = (f"{_SOFTWARE[name]} {columns[name] or 'none'}" for name in differ)
            groups.append(f"{number} with {', '.join(versions)}")
        return verdict.withheld(
            f"The readings come from different software, so they are not summed: "
            f"{' and '.join(groups)}. Install the same software on all hosts and run the job "
            "again. The job reuses the readings with that software."
        )


def unscoped_parts(session: Session, capture_id: int, roofline: Roofline) -> list[CostLine]:
    """Return the tuples of a capture with estimated costs only. The accuracy loop uses them for its
    first choice.
    """
    number = counts(session, capture_id)
    operators = select(tables.Operator).where(col(tables.Operator.id).in_(list(number)))
    parts = []
    for operator in session.exec(operators):
        subject = _subject(operator, roofline, operator.label, "normal")
        calls = number[operator.id]
        parts.append(CostLine(subject, calls, "missing", reason=NOT_IN_SCOPE, in_scope=False))
    return parts


def _labels(operators: Iterable[Any]) -> Mapping[str, str]:
    """Return operator id -> label. Equal labels are told apart."""
    labels = {operator.id: operator.label for operator in operators}
    if len(set(labels.values())) < len(labels):
        return told_apart(labels)
    return labels


def _subject(operator: Any, roofline: Roofline, label: str, data: str) -> TupleView:
    return TupleView(
        operator_id=operator.id,
        short_name=operator.short_name,
        label=label,
        data=data,
        flops=operator.flops,
        bytes_moved=operator.bytes_moved,
        estimated_us=roofline.call_us(operator),
    )


def _preferred(items: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """Choose one item per (subject id, protocol id): preferably with a reading, else an open one,
    else a failed one; the first of several.
    """
    rank = {str(state): position for position, state in enumerate(_PREFERENCE)}
    worst_first = sorted(reversed([*items]), key=lambda item: rank.get(item.state, -1))
    return {(item.subject_id, item.protocol_id): item for item in worst_first}


def _why_missing(item: Any, in_scope: bool, whole: bool = False) -> str:
    """Say why a tuple has no reading, in one line, or why a whole model has none. `item` is None if
    it has no item.
    """
    if item is None:
        return "not planned" if in_scope else NOT_IN_SCOPE
    if item.state == ItemState.FAILED:
        message = item.message.strip()
        text = message if whole else message.partition("\n")[0][:200]
        return f"{item.reason}: {text}" if text else item.reason or "failed"
    if item.state == ItemState.DONE and not ItemRole(item.role).has_reading:
        return f"{item_state.KERNELS_LISTED}: {item_state.KERNELS_LISTED_MESSAGE}"
    return _STATES.get(ItemState(item.state), item.state)


def _run(card_id: str, note: CanaryNote, after: int = 0) -> CanaryRun:
    return card_id, note.process, note.number + after
