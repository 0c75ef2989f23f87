"""Plan the items of a job's round.

If an existing reading can be used for an item, the item is closed at once. The other items are
placed on cards, together with items for the whole model and a canary. Planning runs in the
transaction of the caller. `farm.jobs.closing` closes a round and asks for the next one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import insert, update
from sqlmodel import Session, col, select

from farm.errors import (
    UsageError,
)
from farm.jobs.groups import leading_cards
from farm.jobs.job_cards import card_for_each, chosen_cards
from farm.jobs.plan import JobPlan, PlanState
from farm.jobs.slow_memory import slow_protocols
from farm.jobs.whole_items import SUBJECT_COLUMNS, new_item, role_of_wholes, wait_on_card
from farm.store import item_state, tables
from farm.store.captures import classes, lacking_values, mismatches
from farm.store.content import store_protocol, tuples_with_ids
from farm.store.database import (
    among,
    database_now,
    fetch_values,
    read_clock_s,
)
from farm.store.reuse import find_readings, software_of_groups
from farm.store.tables import (
    CardRow,
    Item,
    ItemRole,
    ItemState,
    Job,
    Round,
)
from farm.subjects.registry import kind_of, kinds_on_several_cards
from farm.subjects.sweep import packaged_tuples
from farm.types.measured_constants import MEASURED
from farm.types.protocol import Protocol, Stopping
from farm.types.request import PACKAGED_LISTS, Request
from farm.types.roofline import Roofline, roofline_of

#: The time of an item in addition to window and warm-up: rebuilding, writing, the pause between
#: items. Unit: s.
ITEM_OVERHEAD_S = 0.2
#: The same of a whole model, with its window; on GPUs also with the verification and the replays.
WHOLE_S, WHOLE_ON_GPU_S = 5.0, MEASURED["whole"].value
COMPILE_ON_GPU_S = MEASURED["compile"].value
#: The least precise half-width of a tuple's time, and the share of the sum's interval that its
#: tuples may use up. The rest is for errors that they share.
LEAST_PRECISE, OF_TUPLES = 0.1, 0.5


def add_round(
    session: Session,
    job: Job,
    *,
    scope: Sequence[str],
    capture_id: int | None,
    operator_ids: Sequence[str] = (),
    reason: str,
    fully_planned: bool = True,
) -> JobPlan:
    """Create the next round of a job in the caller's transaction. Its items are closed, or placed
    on the job's cards.

    Args:
        scope: short names of the operator types to measure, or ("all",).
        capture_id: the capture of a model.
        operator_ids: the tuples of a sweep.
        reason: why this round is needed, as text for people.
        fully_planned: True if the round has no further tuples. False: `add_tuples` adds more, and
            `note_planning` ends the planning.

    Raises:
        NoSuchCard, UsageError: see `chosen_cards`.
    """
    planner = _Planner(session, job)
    job.round += 1
    now: Any = database_now()
    row = Round(
        job_id=job.id,
        number=job.round,
        reason=reason,
        capture_id=capture_id,
        operators=list(scope),
        created_at_s=now,
        planning_at_s=now,
        progress_at_s=now,
        planned_at_s=now if fully_planned else None,
    )
    session.add(row)
    session.flush()
    later = planner.later(capture_id)
    measurements = [
        measurement
        for measurement in planner.measurements(capture_id, operator_ids)
        if ("all" in scope or measurement.operator.short_name in scope)
        and measurement.operator.id not in later
    ]
    tuples = planner.tuple_items(measurements)
    extra: list[Item] = []
    if planner.request.variant is not None and job.round == 1:
        role = role_of_wholes(session, capture_id)
        extra = planner.whole_items(tuples, role, again=bool(later))
        extra += planner.canary_items(tuples)
    elif planner.request.variant is not None:
        extra = planner.further_whole_items(tuples)
    planner.insert(tuples)
    session.add_all(extra)
    session.flush()
    return planner.plan_of(tuples + extra)


def add_tuples(session: Session, job: Job, operator_ids: Sequence[str]) -> JobPlan:
    """Add tuples to the round of a sweep that is still being planned. The caller's transaction has
    locked the job.

    Tuples that the job already has are left out.

    Raises:
        NoSuchCard, UsageError: see `chosen_cards`.
    """
    planner = _Planner(session, job)
    tuples = planner.tuple_items(planner.measurements(None, operator_ids))
    planner.insert(tuples)
    note_planning(session, job)
    return planner.plan_of(tuples)


def note_planning(session: Session, job: Job, *, ended: bool = False) -> None:
    """Record progress in planning a job's newest round; with ``ended``, the end of the planning."""
    values = {"planning_at_s": database_now()}
    if ended:
        values["planned_at_s"] = database_now()
    this = (col(Round.job_id) == job.id, col(Round.number) == job.round)
    session.execute(update(Round).where(*this).values(**values))


def roofline_on(card: CardRow, request: Request) -> Roofline:
    """Return the roofline of a card for the dtype of a request."""
    dtype = request.variant.computes_in if request.variant else "float32"
    return roofline_of(
        card.kind, card.model, card.fingerprint, dtype=dtype, tf32=request.protocol.tf32
    )


class _Measurement(NamedTuple):
    """A tuple to measure under one protocol.

    ``operator`` is a named tuple of the columns that planning needs, without the spec."""

    operator: Any
    protocol_id: str
    calls: int


class _Planner:
    """Plans items of a job's newest round in the caller's transaction. Raises as `chosen_cards`."""

    def __init__(self, session: Session, job: Job) -> None:
        self.session = session
        self.job = job
        self.request = Request.from_json(job.request)
        self.cards = chosen_cards(session, job.request["cards"])

    # ---- what to measure

    def later(self, capture_id: int | None) -> set[str]:
        """Return the tuples that a later round measures: a card first shows the values that decide
        how much work they do.

        A simulated card runs no model, so it shows none.
        """
        is_simulated = self.cards[0].is_simulated
        if self.request.variant is None or capture_id is None or is_simulated:
            return set()
        return lacking_values(self.session, capture_id)

    def measurements(
        self, capture_id: int | None, operator_ids: Sequence[str]
    ) -> list[_Measurement]:
        """Return the measurements that have no item in the job yet.

        A tuple with two value profiles has two protocols. A tuple that is not what the model runs
        is not measured."""
        session, request = self.session, self.request

        @functools.cache
        def protocol_id(protocol: Protocol) -> str:
            return store_protocol(session, protocol)

        calls_of = self._calls(capture_id, operator_ids)
        data_of: dict[str, str] = {}  # tuple id -> data of its first call
        for operator_id, data in calls_of:
            data_of.setdefault(operator_id, data)
        operator = tables.Operator
        columns = (
            operator.id,
            operator.short_name,
            operator.flops,
            operator.bytes_moved,
            operator.kind,
        )
        rows = fetch_values(session, columns, data_of)
        measurements = []
        for operator_id, protocol, calls in self._protocols(calls_of):
            measurements.append(_Measurement(rows[operator_id], protocol_id(protocol), calls))
        if request.measures_slow_memory:
            for operator_id, protocol in slow_protocols(session, request, data_of):
                measurements.append(_Measurement(rows[operator_id], protocol_id(protocol), 1))
        of_job = select(Item.subject_id, Item.protocol_id).where(
            Item.job_id == self.job.id, Item.role == "tuple"
        )
        existing = set(map(tuple, among(session, of_job, Item.subject_id, rows)))
        return [
            measurement
            for measurement in measurements
            if (measurement.operator.id, measurement.protocol_id) not in existing
        ]

    def _protocols(
        self, calls_of: Mapping[tuple[str, str], int]
    ) -> Iterator[tuple[str, Protocol, int]]:
        """Yield tuple id, protocol and number of calls. In a packaged list, each tuple has its own
        conditions."""
        usual = self.request.protocol
        sweep = self.request.sweep
        if sweep is not None and sweep.operator in PACKAGED_LISTS:
            operator_ids = {operator_id for operator_id, _ in calls_of}
            for packaged in packaged_tuples(sweep.operator):
                if packaged.spec.id in operator_ids:
                    yield packaged.spec.id, packaged.protocol(usual.of_whole), 1
            return
        for (operator_id, data), calls in calls_of.items():
            yield operator_id, usual.with_data(data), calls

    def _calls(
        self, capture_id: int | None, operator_ids: Sequence[str]
    ) -> dict[tuple[str, str], int]:
        """Return (tuple id, data) -> number of calls, of a capture or of a sweep's tuples."""
        if capture_id is None:
            data = self.request.protocol.of_whole.data
            return {(operator_id, data): 1 for operator_id in operator_ids}
        unlike = mismatches(self.session, capture_id)
        called = classes(self.session, capture_id, self.request.protocol.data)
        return {key: calls for key, calls in called.items() if key[0] not in unlike}

    # ---- items

    def tuple_items(self, measurements: Sequence[_Measurement]) -> list[Item]:
        """Create an item for each measurement: closed if a reading can be reused, else put on a
        card.
        """
        items = self._new_tuple_items(measurements)
        calls_us = self._calls_us(measurements)
        self._set_precision(items, measurements, calls_us, self.request.within * OF_TUPLES)
        self.reuse(items, self.cards)
        if self.request.budget_s:
            self._fit_in_budget(items, measurements, calls_us)
        waiting = [item for item in items if item.state == ItemState.WAITING]
        self._put_on_cards(waiting, growing_job_id=self.job.id)
        return items

    def _new_tuple_items(self, measurements: Sequence[_Measurement]) -> list[Item]:
        """Create a waiting item for each measurement, with its number of cards, on the first
        card.
        """
        now_s = read_clock_s(self.session)
        cards_of_tuple = self._cards_of_each(measurements)
        items = []
        for measurement in measurements:
            operator_id = measurement.operator.id
            item = new_item(
                self.job,
                self.cards[0],
                "tuple",
                now_s,
                subject_kind="operator",
                subject_id=operator_id,
                protocol_id=measurement.protocol_id,
            )
            item.cards = max(self.request.protocol.cards, cards_of_tuple.get(operator_id, 1))
            items.append(item)
        return items

    def _calls_us(self, measurements: Sequence[_Measurement]) -> list[float]:
        """Return the estimated time of one call of each measurement. Unit: us."""
        roofline = roofline_on(self.cards[0], self.request)
        return [roofline.call_us(measurement.operator) for measurement in measurements]

    def _set_precision(
        self,
        items: Sequence[Item],
        measurements: Sequence[_Measurement],
        calls_us: Sequence[float],
        within: float,
    ) -> float:
        """Set how precise each item must be so that the sum has the relative half-width `within`,
        and its expected time. Return the expected time of the items that wait. Unit: s.
        """
        times_us = []
        for measurement, call_us in zip(measurements, calls_us, strict=True):
            times_us.append(call_us * measurement.calls)
        total_us = math.fsum(times_us) or 1.0
        for item, call_us, time_us in zip(items, calls_us, times_us, strict=True):
            item.half_width = _half_width(within, time_us / total_us)
            stopping = self.request.stopping.allowing(item.half_width)
            item.expected_s = _expected_s(stopping, call_us)
        return math.fsum(item.expected_s for item in items if item.state == ItemState.WAITING)

    def _fit_in_budget(
        self,
        items: Sequence[Item],
        measurements: Sequence[_Measurement],
        calls_us: Sequence[float],
    ) -> None:
        """Let the items be as precise as the time budget of the job allows, without that of the
        whole model.
        """
        left_s = self.request.budget_s - _whole_s(self.cards, self.request.stopping, ItemRole.WHOLE)
        within = 0.0
        while self._set_precision(items, measurements, calls_us, within) > left_s:
            if within >= LEAST_PRECISE:
                break
            within = 1.25 * within or 1e-4

    def _cards_of_each(self, measurements: Sequence[_Measurement]) -> dict[str, int]:
        """Return tuple id -> number of cards for the measurements whose kind has several."""
        several = kinds_on_several_cards()
        operators = (measurement.operator for measurement in measurements)
        ids = [operator.id for operator in operators if operator.kind in several]
        specs = tuples_with_ids(self.session, ids)
        return {operator_id: kind_of(spec).cards(spec) for operator_id, spec in specs.items()}

    def _put_on_cards(self, items: Sequence[Item], growing_job_id: str = "") -> None:
        """Choose the (leading) card of each item, see `card_for_each`. Raises `UsageError` if no
        host has enough cards.
        """
        cards = self.cards
        for number in sorted({item.cards for item in items}):
            alike = [item for item in items if item.cards == number]
            leading = leading_cards(cards, number) if number > 1 else cards
            if not leading:
                most = max(sum(card.host == other.host for other in cards) for card in cards)
                raise UsageError(
                    f"The job needs {number} cards of one host, but no host has more than {most} "
                    "of the chosen cards.",
                    "Give fewer cards, or choose the cards of a host with more of them; `farm "
                    "cards` lists them.",
                )
            card_ids = card_for_each(self.session, alike, leading, growing_job_id)
            for item, card_id in zip(alike, card_ids, strict=True):
                item.card_id = card_id

    def whole_items(self, tuples: Sequence[Item], role: ItemRole, *, again: bool) -> list[Item]:
        """Create a whole item for every card that measures tuples or whose readings are reused; one
        for a split model.

        Args:
            role: of these items, see `role_of_wholes`.
            again: do not reuse readings of the whole model, because a card has to run it.
        """
        session, request, cards = self.session, self.request, self.cards
        assert request.variant is not None, "a sweep has no whole model"
        subject: dict[str, Any] = {
            "subject_kind": "variant",
            "subject_id": request.variant.id,
            "expected_s": _whole_s(cards, request.stopping, role),
            "protocol_id": store_protocol(session, request.protocol.of_whole),
        }
        number = max(request.variant.cards, request.protocol.cards)
        if number > 1:
            split = new_item(self.job, cards[0], role, **subject)
            split.cards = number
            self._put_on_cards([split])
            if not again:
                self.reuse([split], cards)
            return [split]
        by_id = {card.id: card for card in cards}
        wholes = []
        for card_id in sorted({item.card_id for item in tuples}) or [cards[0].id]:
            card = by_id.get(card_id) or session.get_one(CardRow, card_id)
            whole = new_item(self.job, card, role, **subject)
            if not again:
                self.reuse([whole], [card])
            # A card that was not chosen measures nothing; only its readings are reused.
            if whole.state == ItemState.DONE or card_id in by_id:
                wholes.append(whole)
        return wholes or [new_item(self.job, cards[0], role, **subject)]

    def canary_items(self, tuples: Sequence[Item]) -> list[Item]:
        """Create an item of the longest tuple for each card that measures tuples, if several do."""
        new = [item for item in tuples if item.state == ItemState.WAITING]
        busy = {item.card_id for item in new}
        on_one_card = [item for item in new if item.cards == 1]
        if not on_one_card or len(busy) < 2:
            return []
        longest = max(on_one_card, key=lambda item: item.expected_s)
        subject = longest.model_dump(include=SUBJECT_COLUMNS)
        return [
            new_item(self.job, card, "canary", **subject) for card in self.cards if card.id in busy
        ]

    def further_whole_items(self, tuples: Sequence[Item]) -> list[Item]:
        """Request the whole model on the cards that measure tuples of a further round, and on those
        that have listed kernels."""
        listed = select(Item.card_id).where(Item.job_id == self.job.id, item_state.has_listed())
        busy = {item.card_id for item in tuples if item.state == ItemState.WAITING}
        wholes: list[Item] = []
        for card_id in sorted(busy.union(self.session.exec(listed))):
            wholes += wait_on_card(self.session, self.job, card_id)
        self.reuse(wholes, self.cards)
        return wholes

    def reuse(self, items: Sequence[Item], cards: Sequence[CardRow]) -> None:
        """Close the items for which an existing reading of these cards can be used."""
        on_one_card = [item for item in items if item.cards == 1]
        on_several = [item for item in items if item.cards > 1]
        of_groups = software_of_groups(self.session, cards) if on_several else None
        card_ids, now_s = {card.id for card in cards}, read_clock_s(self.session)
        for software_id, group in ((cards[0].software_id, on_one_card), (of_groups, on_several)):
            if software_id is None:
                continue
            readings = find_readings(self.session, group, self.request, software_id, card_ids)
            for item, reading in zip(group, readings, strict=True):
                if reading is not None:
                    item_state.REUSE.apply(
                        item, reading_id=reading.id, card_id=reading.card_id, ended_at_s=now_s
                    )

    def insert(self, items: Sequence[Item]) -> None:
        """Insert new items. If they were objects of the session, half of the time of a plan would
        be the driver's.
        """
        if items:
            self.session.execute(insert(Item), [item.model_dump(exclude={"id"}) for item in items])

    def plan_of(self, items: Sequence[Item]) -> JobPlan:
        """The plan of these items."""
        new = [item for item in items if item.state != ItemState.DONE]
        tuple_ids = {item.subject_id for item in items if item.role == "tuple"}
        return JobPlan(
            PlanState.PLANNED,
            job_id=self.job.id,
            round=self.job.round,
            card_ids=tuple(card.id for card in self.cards),
            card_model=self.cards[0].model,
            tuples=len(tuple_ids),
            new=len(new),
            reused=len(items) - len(new),
            expected_s=math.fsum(item.expected_s for item in new),
        )


def _half_width(within: float, share: float) -> float:
    """The half-width of a tuple with this share of the sum's time. Half-widths of r / sqrt(share)
    give the sum the half-width r, for the least time in windows."""
    if share:
        return min(LEAST_PRECISE, within / math.sqrt(share))
    return LEAST_PRECISE * bool(within)


def _expected_s(stopping: Stopping, call_us: float) -> float:
    """The expected time of a tuple's item. Unit: s."""
    window_s = max(stopping.shortest_s, 12e-6 * call_us)  # the window has at least a dozen passes
    return ITEM_OVERHEAD_S + stopping.warm_up_s + window_s


def _whole_s(cards: Sequence[CardRow], stopping: Stopping, role: ItemRole) -> float:
    """The expected time of a whole model's item, or of the item that compiles it. Unit: s."""
    if not cards[0].is_gpu:
        return WHOLE_S
    if role == ItemRole.COMPILE:
        return COMPILE_ON_GPU_S
    return WHOLE_ON_GPU_S + stopping.warm_up_s + stopping.shortest_s
