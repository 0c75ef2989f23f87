"""The rounds of a job: plan the items of a round, close the round with a verdict, plan the next
round.

If an existing reading can be used for an item, the item is closed at once. The other items are
placed on cards, together with items for the whole model and a canary. Planning runs in the
transaction of the caller."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeGuard

from sqlalchemy import insert, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import defer
from sqlmodel import Session, col, func, select

from farm.errors import (
    NoSuchCard,
    TupleRejected,
    UnknownOperator,
    Unreadable,
    UsageError,
    did_you_mean,
)
from farm.jobs.balance import QueuedItem, assign
from farm.jobs.groups import leading_cards
from farm.jobs.items import open_items
from farm.jobs.plan import JobPlan, PlanState
from farm.store import item_state, tables
from farm.store.content import (
    classes,
    find_capture,
    find_readings,
    lacking_values,
    mismatches,
    software_of_groups,
    store_protocol,
)
from farm.store.database import (
    Database,
    among,
    database_now,
    fetch,
    fetch_values,
    locked,
    read_clock_s,
    remembered,
)
from farm.store.tables import (
    OPEN,
    CardRow,
    Item,
    ItemRole,
    ItemState,
    Job,
    JobState,
    Round,
    SignificantOperator,
    VerdictRow,
)
from farm.subjects.parsing import parse
from farm.subjects.registry import kind_of, kinds_on_several_cards
from farm.types.format import plural
from farm.types.measured_constants import MEASURED
from farm.types.protocol import Stopping
from farm.types.reading import Verification
from farm.types.request import Request
from farm.types.roofline import Roofline, roofline_of
from farm.types.tuple import OperatorTuple
from farm.verdict.aggregate import aggregate, next_operators
from farm.verdict.evidence import Evidence
from farm.verdict.verdict import Verdict

#: The time of an item in addition to window and warm-up: rebuilding, writing, the pause between
#: items. Unit: s.
ITEM_OVERHEAD_S = 0.2
#: The same of a whole model, with its window; on GPUs also with the verification and the replays.
WHOLE_S, WHOLE_ON_GPU_S = 5.0, MEASURED["whole"].value
#: The loads of the cards of a job that is planned in parts are queried again after this time.
#: Unit: s.
LOADS_VALID_S = 30.0
#: The least precise half-width of a tuple's time, and the share of the sum's interval that its
#: tuples may use up. The rest is for errors that they share.
LEAST_PRECISE, OF_TUPLES = 0.1, 0.5


def chosen_cards(session: Session, card_ids: Sequence[str]) -> list[CardRow]:
    """Return the cards with these ids, in this order; check that one job can measure on all of
    them.

    Raises:
        NoSuchCard: a chosen card is not registered.
        UsageError: the chosen cards are of several models or run different software.
    """
    rows = fetch(session, CardRow, card_ids)
    for card_id in card_ids:
        if card_id not in rows:
            raise NoSuchCard(
                f"No card '{card_id}' is registered.", "Start `farm worker` on the card's host."
            )
    cards = [rows[card_id] for card_id in card_ids]
    if not cards:
        raise NoSuchCard(
            "No card was chosen.", "Start a worker with `farm worker`, or choose one with --card."
        )
    models = {card.model for card in cards}
    if len(models) > 1:
        raise UsageError(
            f"The chosen cards have several card models: {', '.join(sorted(models))}.",
            "A job measures on one card model: choose one with --card.",
        )
    if len({card.software_id for card in cards}) > 1:
        raise UsageError(
            "The chosen cards run different software, and readings of different software are not "
            "summed.",
            "`farm cards --json` shows the versions. Install the same torch, CUDA and driver on "
            "all hosts, or choose "
            "cards with --card.",
        )
    return cards


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
        def protocol_id(data: str, placement: str = "") -> str:
            protocol = request.protocol.with_data(data)
            if placement:
                protocol = protocol.with_placement(placement)
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
        measurements = [
            _Measurement(rows[operator_id], protocol_id(data), calls)
            for (operator_id, data), calls in calls_of.items()
        ]
        if request.placements != "none":
            from farm.operators.rebuild import placements_of

            # Each placement is measured with the data of the first call only: values do not affect
            # transfers.
            specs = tuples_with_ids(session, data_of)
            for operator_id, data in data_of.items():
                if operator_id not in specs:
                    continue
                for placement in placements_of(specs[operator_id], request.placements):
                    placed_id = protocol_id(data, placement)
                    measurements.append(_Measurement(rows[operator_id], placed_id, 1))
        of_job = select(Item.subject_id, Item.protocol_id).where(
            Item.job_id == self.job.id, Item.role == "tuple"
        )
        existing = set(map(tuple, among(session, of_job, Item.subject_id, rows)))
        return [
            measurement
            for measurement in measurements
            if (measurement.operator.id, measurement.protocol_id) not in existing
        ]

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
        calls_us = []
        for measurement in measurements:
            operator = measurement.operator
            calls_us.append(roofline.estimate_us(operator.flops, operator.bytes_moved))
        return calls_us

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
        left_s = self.request.budget_s - _whole_s(self.cards)
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
            "expected_s": _whole_s(cards),
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
        subject = longest.model_dump(include=_SUBJECT)
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


def _whole_s(cards: Sequence[CardRow]) -> float:
    return WHOLE_ON_GPU_S if cards[0].is_gpu else WHOLE_S


def wait_on_card(session: Session, job: Job, card_id: str) -> list[Item]:
    """Request a job's whole model on a card, and return the items to publish.

    The wholes and canaries of the card that ended with `card_left` are opened again and returned
    too."""
    role = _role_in_newest_round(session, job)
    # Use the rows of given-up items again: a new row would violate the unique key.
    given_up = (
        col(Item.job_id) == job.id,
        col(Item.role).in_((role, ItemRole.CANARY)),
        col(Item.card_id) == card_id,
        col(Item.reason) == item_state.CARD_LEFT,
    )
    reopen = item_state.AGAIN.update(*given_up, round=job.round).returning(col(Item.id))
    reopened_ids = session.exec(reopen).scalars().all()
    items = _fresh(session, col(Item.id).in_(reopened_ids))
    of_variant = _fresh(session, *_runs_variant(job.id))
    wholes = [item for item in of_variant if item.role == role]
    if of_variant and all(item.card_id != card_id and item.cards == 1 for item in wholes):
        like = of_variant[0]
        whole = new_item(
            job, session.get_one(CardRow, card_id), role, **like.model_dump(include=_SUBJECT)
        )
        whole.cards = like.cards
        if like.cards == 1 or like.card_id == card_id:  # a group keeps its leading card
            items.append(whole)
    session.add_all(items)
    session.flush()
    return items


def wholes_of(session: Session, job: Job) -> list[Item]:
    """Return the whole models of a job; before its kernels are listed, the items that compile."""
    role = _role_in_newest_round(session, job)
    return _fresh(session, *_runs_variant(job.id), Item.role == role)


def role_of_wholes(session: Session, capture_id: int | None) -> ItemRole:
    """The role of the items that run the whole model in a round with this capture. The kernels of a
    compiled model are listed first."""
    capture, variant = tables.Capture, tables.ModelVariant
    unlisted = (
        select(capture.id)
        .join(variant, col(variant.id) == col(capture.variant_id))
        .where(capture.id == capture_id, variant.compile != "", col(capture.compiled).is_(None))
    )
    is_unlisted = session.exec(unlisted).first() is not None
    return ItemRole.COMPILE if is_unlisted else ItemRole.WHOLE


def _role_in_newest_round(session: Session, job: Job) -> ItemRole:
    return role_of_wholes(session, session.get_one(Round, (job.id, job.round)).capture_id)


def _runs_variant(job_id: str) -> tuple[Any, ...]:
    """Conditions of a job's items that run the whole model: the database reads few entries of an
    index.
    """
    return Item.job_id == job_id, Item.subject_kind == "variant"


def _fresh(session: Session, *conditions: Any) -> list[Item]:
    """Read items again, also those that the session has."""
    query = select(Item).where(*conditions).order_by(col(Item.id))
    return list(session.exec(query.execution_options(populate_existing=True)))


#: The columns of an item that describe what is measured.
_SUBJECT = {"subject_kind", "subject_id", "protocol_id", "expected_s"}


def new_item(
    job: Job, card: CardRow, role: str, now_s: float | None = None, **subject: Any
) -> Item:
    """Return a new waiting item.

    Args:
        now_s: the time on the database's clock. Pass it for many items: if the database fills in
            the time, rows are inserted one by one. Unit: s.
        subject: the columns of `_SUBJECT`.
    """
    created_at_s: Any = database_now() if now_s is None else now_s
    item = Item(
        job_id=job.id,
        round=job.round,
        role=role,
        card_id=card.id,
        card_model=card.model,
        created_at_s=created_at_s,
        **subject,
    )
    item_state.PLAN.apply(item)
    return item


def tuples_with_ids(session: Session, operator_ids: Iterable[str]) -> dict[str, OperatorTuple]:
    """Return id -> stored tuple. Rows that do not parse (as in tests with simulated cards) are left
    out.
    """
    operator, tuples = tables.Operator, {}
    for id_, spec in among(session, select(operator.id, operator.spec), operator.id, operator_ids):
        with contextlib.suppress(TupleRejected):
            tuples[id_] = parse(spec)
    return tuples


def card_for_each(
    session: Session, items: Sequence[Item], cards: Sequence[CardRow], growing_job_id: str = ""
) -> list[str]:
    """Return a card id for each item. The longest item is placed first, on the card that finishes
    it first (LPT). ``growing_job_id``: a job that is planned in parts. Then the cards' loads are
    queried only every `LOADS_VALID_S`."""
    now_s, ids = time.monotonic(), [card.id for card in cards]
    if len(ids) == 1:
        return ids * len(items)
    loads = remembered(session, "loads of the cards of growing jobs")
    read_s, free_at_s = loads.pop(growing_job_id, (-math.inf, {}))
    if now_s - read_s > LOADS_VALID_S or list(free_at_s) != ids:
        read_s, free_at_s = now_s, _loads_s(session, ids)
    in_order = sorted(range(len(items)), key=lambda number: items[number].subject_id)
    placed = assign(
        (QueuedItem(key, items[number].expected_s) for key, number in enumerate(in_order)),
        free_at_s,
    )
    chosen = {number: placed[key] for key, number in enumerate(in_order)}
    if growing_job_id:
        for number, card_id in chosen.items():
            free_at_s[card_id] += items[number].expected_s
        loads.clear()
        loads[growing_job_id] = read_s, free_at_s
    return [chosen[number] for number in range(len(items))]


def _loads_s(session: Session, card_ids: Sequence[str]) -> dict[str, float]:
    """Return card id -> expected time of its open items, in the order of the ids. Unit: s."""
    query = select(Item.card_id, func.sum(Item.expected_s)).group_by(col(Item.card_id))
    of_open_items = query.where(col(Item.state).in_(OPEN), col(Item.card_id).in_(card_ids))
    stored = dict(session.execute(of_open_items).all())
    return {card_id: float(stored.get(card_id) or 0.0) for card_id in card_ids}


# ---- closing a round


class Closing(StrEnum):
    """The result of closing a round."""

    OPEN = "open"  # not closed: some items of the round are open
    ALREADY = "already"  # the round already has a verdict, or its job has ended
    DONE = "done"  # closed; it was the last round of the job
    NEXT = "next"  # closed; the next round is planned, and the caller must publish it


@dataclass(frozen=True)
class ClosedRound:
    """The result of closing a round, with the number of the next round and the outcome of the
    verdict.
    """

    closing: Closing
    next_round: int | None = None
    outcome: str = ""


def close_round(database: Database, job_id: str, number: int, *, failed: str = "") -> ClosedRound:
    """Write the verdict of a round if all its items are closed; plan the next round or end the job.

    Args:
        failed: why the round cannot be aggregated. Then the verdict has only this reason, and the
            job ends; the readings are kept.
    """
    try:
        verdict = None if failed else _of_large_sweep(database, job_id, number)
        with database.write() as session:
            job = locked(session, Job, job_id)
            if not _is_open(job, number):
                return ClosedRound(Closing.ALREADY)
            if failed:
                return _end_without_sum(session, job, failed)
            return _close(session, job, verdict)
    except IntegrityError:
        return ClosedRound(Closing.ALREADY)


def _of_large_sweep(database: Database, job_id: str, number: int) -> Verdict | None:
    """Return the verdict of a large sweep without open items; None for other jobs. It takes
    minutes, too long for a transaction that writes."""
    with database.read() as session:
        job = session.get(Job, job_id)
        if not _is_open(job, number) or not _is_complete(session, job):
            return None
        evidence = Evidence(session, job, number)
        return evidence.verdict() if evidence.is_large else None


def _is_open(job: Job | None, number: int) -> TypeGuard[Job]:
    """True if the job is open, and this is its newest round."""
    return job is not None and job.state == JobState.OPEN and number == job.round


def close_complete_rounds(database: Database, job_id: str, number: int) -> int | None:
    """Close rounds from ``number`` on as long as all items are closed; return the first round with
    open items.
    """
    following: int | None = number
    while following is not None:
        closed = close_round(database, job_id, following)
        if closed.closing is Closing.OPEN:
            return following
        following = closed.next_round
    return None


def _is_complete(session: Session, job: Job) -> bool:
    key = job.id, job.round
    return session.get_one(Round, key).planned_at_s is not None and not open_items(session, *key)


def _close(session: Session, job: Job, verdict: Verdict | None) -> ClosedRound:
    if not _is_complete(session, job):
        return ClosedRound(Closing.OPEN)
    stored = select(VerdictRow).where(VerdictRow.job_id == job.id, VerdictRow.round == job.round)
    if session.exec(stored).first() is not None:
        return ClosedRound(Closing.ALREADY)
    request = Request.from_json(job.request)
    evidence = Evidence(session, job, job.round)
    if verdict is None:
        if evidence.is_large:
            # Its last item has just ended, and another aggregation is on its way.
            return ClosedRound(Closing.OPEN)
        verdict = evidence.verdict()
    row = _add_verdict(session, job, verdict)
    following, why = None, ""
    try:
        following = _next_round(session, job, request, evidence, verdict)
    except (NoSuchCard, UsageError) as error:
        # The cards have changed. The error was raised before anything was planned.
        why = f"No further round could be planned: {error.message}"
    if following is not None:
        return ClosedRound(Closing.NEXT, following, verdict.outcome)
    if request.operators == ("auto",) and verdict.too_large and not why:
        why = "No operator type was added, because the sum is already larger than the whole model."
    if why:
        row.details = {**row.details, "reasons": [*row.details["reasons"], why]}
    return _end(job, verdict)


def _add_verdict(session: Session, job: Job, verdict: Verdict) -> VerdictRow:
    now: Any = database_now()
    row = VerdictRow(job_id=job.id, round=job.round, created_at_s=now, **verdict.columns())
    session.add(row)
    session.flush()
    return row


def _end(job: Job, verdict: Verdict) -> ClosedRound:
    job.state, job.ended_at_s = JobState.DONE, database_now()  # type: ignore[assignment]
    return ClosedRound(Closing.DONE, None, verdict.outcome)


def _end_without_sum(session: Session, job: Job, why: str) -> ClosedRound:
    try:
        request = Request.from_json(job.request)
        target, launch = request.target, request.protocol.launch
    except Unreadable:
        target, launch = 0.0, "graph"
    verdict = aggregate((), target=target, launch=launch).withheld(why)
    _add_verdict(session, job, verdict)
    return _end(job, verdict)


def _next_round(
    session: Session, job: Job, request: Request, evidence: Evidence, verdict: Verdict
) -> int | None:
    """Plan another round if the card ran other operators than predicted, if it showed values that
    decide the work of operators, or if the accuracy loop adds operators."""
    this = session.get_one(Round, (job.id, job.round))
    if this.capture_id is None:
        return None
    without = [defer(tables.Capture.verification)]  # type: ignore[arg-type]
    newest = find_capture(
        session, session.get_one(tables.Capture, this.capture_id, options=without)
    )
    if newest not in (None, this.capture_id):
        compiled = not session.scalar(
            select(func.count()).where(tables.Call.capture_id == this.capture_id)
        )
        reason = _why_next(session, this.capture_id, compiled=compiled)
        return add_round(session, job, scope=this.operators, capture_id=newest, reason=reason).round
    # Without a whole or without valid readings, more operators do not help. If the sum is too
    # large, each added type makes it larger.
    if request.operators != ("auto",) or verdict.outcome == "none" or verdict.too_large:
        return None
    remember_significant(session, this.operators, "loop")
    if verdict.outcome == "fail":
        added = next_operators(evidence.parts, significant(session), target=request.target)
        if added:
            remember_significant(session, added, job.id)
            reason = (
                f"accuracy or coverage below the target with {len(this.operators)} operator types"
            )
            scope = [*this.operators, *added]
            return add_round(
                session, job, scope=scope, capture_id=this.capture_id, reason=reason
            ).round
    return None


def _why_next(session: Session, capture_id: int, *, compiled: bool) -> str:
    """Say what a card has shown about a predicted capture."""
    if compiled:
        return "the card listed its kernels"
    verification = Verification.from_json(session.get_one(tables.Capture, capture_id).verification)
    lacking = len(lacking_values(session, capture_id))
    values = (
        f"the card showed the values that decide the work of {lacking} {plural('tuple', lacking)}"
    )
    other = "the card ran other operators than predicted"
    if not lacking:
        return other
    return (
        f"{other}, and {values.removeprefix('the card ')}"
        if verification.missing or verification.unexpected
        else values
    )


def significant(session: Session) -> set[str]:
    """Return the operator types with which the accuracy loop starts for every model."""
    return set(session.exec(select(SignificantOperator.name)))


def remember_significant(session: Session, names: Sequence[str], added_by: str) -> None:
    """Add operator types to the global set. Types that are already in the set do not change."""
    stored = significant(session)
    now: Any = database_now()
    for name in dict.fromkeys(names):
        if name not in stored:
            session.add(SignificantOperator(name=name, added_by=added_by, created_at_s=now))


def forget_significant(session: Session, names: Sequence[str]) -> None:
    """Remove operator types from the global set.

    Raises:
        UnknownOperator: a type is not in the set.
    """
    types = sorted(significant(session))
    for name in dict.fromkeys(names):
        if (row := session.get(SignificantOperator, name)) is None:
            raise UnknownOperator(
                f"'{name}' is not a significant operator type.",
                did_you_mean(name, types)
                or f"The significant operator types are: {', '.join(types) or 'none'}.",
            )
        session.delete(row)
