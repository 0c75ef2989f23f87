"""Publishing messages: rounds as chords over the queues of the cards, single items, and
aggregations.

Messages contain ids only. An extra message is harmless, since the worker's claim is declined, but
thousands would fill the broker. So the database marks items that need a message (``published_at_s``
is NULL), only one process at a time publishes a round, and a queue gets messages only for the next
items of its card."""

from __future__ import annotations

import contextlib
import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import sqlalchemy
from celery import chord
from celery.backends.redis import RedisBackend
from celery.canvas import Signature
from kombu.exceptions import OperationalError
from redis import RedisError
from sqlalchemy import update
from sqlmodel import Session, and_, col, func, or_, select

from farm.errors import FarmError
from farm.jobs.items import FollowUp
from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database, among, database_now, in_batches, lock_items, long_ago
from farm.store.tables import Item, ItemState
from tasks.app import EMBEDDED_VARIABLE, app, broker_unreachable
from tasks.message_filter import CONTROL_QUEUE, FRONT


class UnsubscribedResults(RedisBackend):  # type: ignore[misc]
    """Celery's Redis result backend without subscriptions. It only counts the finished parts of
    chords.

    Celery would subscribe the publisher to the result of every message and every part of a chord:
    thousands of subscriptions to results that no process uses, since progress is in the database.
    """

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing: Celery would subscribe to the result of the message that was just sent."""

    def add_pending_result(
        self, result: Any, weak: bool = False, start_drainer: bool = True
    ) -> Any:
        """Return the result without subscribing to it."""
        return result

    def remove_pending_result(self, result: Any) -> Any:
        return result


#: Messages per chord. If a publisher dies, it has sent at most this many messages that the database
#: does not know.
BATCH = 250

#: The keys of the broker that tell which reconciler makes the next pass, and that one has completed
#: a pass lately.
PASS_KEY, COMPLETED_KEY = "farm.reconciler", "farm.reconciler.completed"

#: The most messages in the queue of a card, and in all queues. A queue gets more when it is half
#: empty.
MOST_IN_QUEUE, MOST_IN_ALL_QUEUES = 250, 100_000

#: The items of a card from which the next messages are chosen at random.
CHOSEN_FROM = 2000


def card_queue(card_id: str) -> str:
    return f"card.{card_id}"


def own_farm() -> str:
    """Return the name of the embedded farm of this process; "" for the shared farm."""
    return os.environ.get(EMBEDDED_VARIABLE, "")


def stale_after_s(current: Settings) -> float:
    """Return how long a publisher may make no progress before another process publishes its round.
    Unit: s.
    """
    return 6 * current.reconcile_s


def publish_round(database: Database, job_id: str, number: int, *, again: bool = False) -> int:
    """Publish the next waiting items of a job's round that have no message yet; return the number
    of messages. With ``again``, also publish items that had a message, and claimed items whose
    lease has ended.

    Only one process at a time publishes a round; other callers return at once. Progress is stored
    after each batch: if the publisher dies, the next publisher sends at most one batch again. The
    reconciler publishes items for which the queues have no room yet. If no item of a planned round
    needs a message, publish its aggregation."""
    sent = _publish(database, job_id, number, partial(_send_chord, job_id, number), again=again)
    if sent == 0:
        with database.read() as session:
            this_round = session.get(tables.Round, (job_id, number))
        if this_round is not None and this_round.published_at_s is not None:
            publish_aggregate(job_id, number)
    return sent or 0


def publish_items(
    database: Database, item_ids: Sequence[int], *, unless_within_s: float | None = None
) -> None:
    """Publish a single message for each of these items that waits or whose lease has ended. Leave
    out items that a process published within ``unless_within_s``."""
    rounds: set[tuple[str, int]] = set()
    for batch in in_batches(item_ids):
        chosen = col(Item.id).in_(batch)
        conditions = [chosen, _claimable()]
        if unless_within_s is not None:
            conditions.append(long_ago(col(Item.published_at_s), unless_within_s))
        with database.write() as session:
            rounds.update(session.exec(select(Item.job_id, Item.round).where(chosen).distinct()))
            _mark_unsent(session, *conditions)
    for job_id, number in sorted(rounds):
        _publish(database, job_id, number, _send_single)


def publish_groups(database: Database, item_ids: Sequence[int]) -> None:
    """Publish items on several cards (`farm.jobs.groups.due`) in front of the queues of their
    leading cards.
    """
    for batch in in_batches(item_ids):
        with database.write() as session:
            # Before the message: if its claim comes first, it marks the message as used up.
            _update_items(
                session,
                col(Item.id).in_(batch),
                _claimable(),
                published_at_s=database_now(),
                message_used=False,
            )
        with _publishing():
            _send_single(_rows(database, batch))


def _publish(
    database: Database,
    job_id: str,
    number: int,
    send: Callable[[Sequence[Any]], None],
    *,
    again: bool = False,
) -> int | None:
    """Publish the marked items of a job as the only publisher of its newest round. Return the
    number of messages; None if another process publishes the round, which then also sends the
    marked items."""
    publisher_id = f"{settings().host}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
    stale = long_ago(col(tables.Round.progress_at_s), stale_after_s(settings()))
    free = or_(col(tables.Round.publisher).is_(None), stale)
    with database.write() as session:
        # If another process marks items from now on, the query in `_end_publishing` finds them.
        _update_round(session, job_id, number, published_at_s=None)
        if not _update_round(
            session, job_id, number, free, publisher=publisher_id, progress_at_s=database_now()
        ):
            return None
        if again:
            _mark_unsent(
                session, Item.job_id == job_id, _claimable(), col(Item.published_at_s).is_not(None)
            )
    sent = 0
    try:
        while True:
            next_ids, cards_with_room = _next_items(database, job_id, number)
            for ids in in_batches(next_ids, BATCH):
                with _publishing():
                    send(_rows(database, ids))
                sent += len(ids)
                with database.write() as session:
                    # Not `message_used`: a worker may have used up the message by now.
                    _update_items(session, col(Item.id).in_(ids), published_at_s=database_now())
                    if not _progressed(session, job_id, number, publisher_id):
                        return sent
            with database.write() as session:
                if _end_publishing(session, job_id, number, publisher_id, cards_with_room):
                    return sent
    except BaseException:
        with contextlib.suppress(FarmError), database.write() as session:
            _progressed(session, job_id, number, publisher_id, publisher=None)
        raise


def _mark_unsent(session: Session, *which: Any) -> None:
    """Mark items as items that need a message."""
    _update_items(session, *which, published_at_s=None, message_used=False)


def _update_items(session: Session, *which: Any, **values: Any) -> None:
    lock_items(session, *which)
    session.execute(update(Item).where(*which).values(**values))


def _claimable() -> Any:
    """The condition of an item that a worker may claim: it waits, or its lease has ended. Until
    another worker claims it, a late result of the first worker is accepted.
    """
    lease_ended = and_(
        col(Item.state) == ItemState.CLAIMED, col(Item.lease_until_s) < database_now()
    )
    return or_(col(Item.state) == ItemState.WAITING, lease_ended)


def _unsent(job_id: str) -> tuple[Any, ...]:
    return Item.job_id == job_id, tables.UNSENT, _claimable()


def _update_round(session: Session, job_id: str, number: int, *which: Any, **values: Any) -> bool:
    """Update the row of a round if the conditions are true; return whether they are."""
    is_round = (col(tables.Round.job_id) == job_id, col(tables.Round.number) == number)
    updated = session.execute(update(tables.Round).where(*is_round, *which).values(**values))
    return bool(updated.rowcount)  # type: ignore[attr-defined]


def _progressed(
    session: Session, job_id: str, number: int, publisher_id: str, **values: Any
) -> bool:
    """Record progress of the publisher; return False if another process has become the
    publisher.
    """
    is_publisher = col(tables.Round.publisher) == publisher_id
    return _update_round(
        session, job_id, number, is_publisher, progress_at_s=database_now(), **values
    )


def _end_publishing(
    session: Session, job_id: str, number: int, publisher_id: str, cards_with_room: Sequence[str]
) -> bool:
    """End publishing; return False if an item of the cards in ``cards_with_room`` must be
    published first.
    """
    # This locks the row of the round: other processes mark their items either before this
    # transaction or after it.
    if not _progressed(session, job_id, number, publisher_id, publisher=None):
        return True
    # The order of the index: without it, PostgreSQL may read the whole table if it expects many
    # such items.
    left = (
        select(Item.id).where(*_unsent(job_id)).order_by(col(Item.card_id), col(Item.id)).limit(1)
    )
    if next(among(session, left, Item.card_id, cards_with_room), None) is not None:
        session.rollback()
        return False
    if session.exec(left).first() is None:
        # A round whose items are still being added is not fully published.
        planned = col(tables.Round.planned_at_s).is_not(None)
        _update_round(session, job_id, number, planned, published_at_s=database_now())
    return True


def _next_items(database: Database, job_id: str, number: int) -> tuple[list[int], list[str]]:
    """Return the ids of the items to publish now, in order, and the ids of the cards whose queues
    then have room for more. They are marked items (`_mark_unsent`) of cards with a half-empty
    queue.

    The whole is first, since it may show that the predicted capture is wrong. The other items are
    in random order: slow changes of the card must not correlate with the position in the model."""
    chance = random.Random(f"{job_id}/{number}")
    rows: list[Any] = []
    with database.read() as session:
        room = _room_in_queues(session)
        for card_id in _cards_with_unsent_items(session, job_id, room):
            chosen = _first_unsent(session, job_id, card_id)
            _shuffle_wholes_first(chosen, chance)
            rows += chosen[: room[card_id]]
            room[card_id] -= len(chosen)
    _shuffle_wholes_first(rows, chance)
    return [row.id for row in rows], [card_id for card_id, left in room.items() if left > 0]


def _room_in_queues(session: Session) -> dict[str, int]:
    """Return card id -> the number of messages that its queue has room for, of the cards of this
    farm whose queue is at least half empty.
    """
    of_this_farm = select(tables.CardRow.id).where(tables.CardRow.origin == "")
    depths = queue_depths(session.exec(of_this_farm).all())
    most = min(MOST_IN_QUEUE, MOST_IN_ALL_QUEUES // max(1, len(depths)) or 1)
    return {card_id: most - depth for card_id, depth in depths.items() if depth <= most // 2}


def _cards_with_unsent_items(session: Session, job_id: str, card_ids: Iterable[str]) -> list[str]:
    """Return those of the cards that have an item of the job without a message."""
    of_card = (*_unsent(job_id), col(Item.card_id) == col(tables.CardRow.id))
    first = select(Item.id).where(*of_card).order_by(col(Item.id)).limit(1)
    cards = select(tables.CardRow.id).where(first.scalar_subquery().is_not(None))
    return [card_id for (card_id,) in among(session, cards, tables.CardRow.id, card_ids)]


def _first_unsent(session: Session, job_id: str, card_id: str) -> list[Any]:
    """Return the first items (id, role) of a job on a card without a message, from which the next
    ones are chosen.
    """
    query = select(Item.id, Item.role).where(*_unsent(job_id), Item.card_id == card_id)
    return list(session.exec(query.order_by(col(Item.id)).limit(CHOSEN_FROM)))


def _shuffle_wholes_first(rows: list[Any], chance: random.Random) -> None:
    chance.shuffle(rows)
    rows.sort(key=lambda row: row.role != "whole")


def _rows(database: Database, item_ids: Sequence[int]) -> list[Any]:
    """Return the rows (id, card_id, cards, short_name, label) for the messages of these items, in
    the given order.
    """
    operator, variant = tables.Operator, tables.ModelVariant
    query = (
        sqlalchemy.select(  # type: ignore[call-overload]
            Item.id,
            Item.card_id,
            Item.cards,
            func.coalesce(operator.short_name, "whole " + col(variant.model)).label("short_name"),
            func.coalesce(operator.label, tables.Job.title).label("label"),
        )
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .join(operator, col(operator.id) == col(Item.subject_id), isouter=True)
        .join(variant, col(variant.id) == col(Item.subject_id), isouter=True)
        .where(col(Item.id).in_(item_ids))
    )
    with database.read() as session:
        row_of_item = {row.id: row for row in session.execute(query)}
    return [row_of_item[item_id] for item_id in item_ids if item_id in row_of_item]


def _send_chord(job_id: str, number: int, rows: Sequence[Any]) -> None:
    body = aggregate_signature(job_id, number).on_error(aggregate_signature(job_id, number))
    chord([_measure(row) for row in rows])(body)


def _send_single(rows: Sequence[Any]) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for row in rows:
            # An item on several cards may have waited before: it would begin anew behind all other
            # items of its card.
            front = {"headers": {FRONT: True}} if row.cards > 1 else {}
            _measure(row).apply_async(producer=producer, **front)


def publish_aggregate(job_id: str, number: int) -> None:
    with _publishing():
        aggregate_signature(job_id, number).apply_async()


def follow_up(database: Database, closed: FollowUp) -> None:
    """Publish the aggregations and items that follow from closing an item, if their jobs belong to
    this farm. Other farms use other brokers; their reconcilers find their items in the database."""
    publish_groups(database, closed.due)
    if not closed.rounds and not closed.woken:
        return
    jobs_of_farm = select(col(tables.Job.id)).where(tables.Job.farm == own_farm())
    items: Any = select(Item.id).where(col(Item.job_id).in_(jobs_of_farm)).order_by(col(Item.id))
    with database.read() as session:
        job_ids = {
            job_id
            for (job_id,) in among(
                session, jobs_of_farm, tables.Job.id, (job_id for job_id, _ in closed.rounds)
            )
        }
        woken = [item_id for (item_id,) in among(session, items, Item.id, closed.woken)]
    for job_id, number in closed.rounds:
        if job_id in job_ids:
            publish_aggregate(job_id, number)
    publish_items(database, woken)


def queue_depths(card_ids: Sequence[str]) -> dict[str, int]:
    """Return card id -> number of messages in its queue, with one request to the broker for all
    cards.
    """
    if not card_ids:
        return {}
    with _publishing(), app.connection_for_read() as connection:
        together = connection.default_channel.client.pipeline(transaction=False)
        for card_id in card_ids:
            together.llen(card_queue(card_id))
        return dict(zip(card_ids, together.execute(), strict=True))


def control_messages() -> int:
    """Return the number of messages that wait for a control worker."""
    with _publishing(), app.connection_for_read() as connection:
        return int(connection.default_channel.client.llen(CONTROL_QUEUE))


def reserves_pass(for_s: float, *, longer: bool = False) -> bool:
    """Reserve a time for this host's reconciler; False if another host has (``longer``: this one)
    reserved it.
    """
    with contextlib.suppress(FarmError), _publishing(), app.connection_for_write() as connection:
        client = connection.default_channel.client
        return bool(
            client.set(PASS_KEY, settings().host, nx=not longer, px=max(1, int(900 * for_s)))
        )
    return True


def note_completed_pass(for_s: float) -> None:
    """Show for some time, in the broker, that a reconciler completes its passes."""
    with contextlib.suppress(FarmError), _publishing(), app.connection_for_write() as connection:
        connection.default_channel.client.set(COMPLETED_KEY, settings().host, px=int(1000 * for_s))


def reconciler_works() -> bool:
    """True if a reconciler of this broker's farm has completed a pass lately. Raises
    `BrokerUnreachable`.
    """
    with _publishing(), app.connection_for_read() as connection:
        return connection.default_channel.client.get(COMPLETED_KEY) is not None


def aggregate_signature(job_id: str, number: int) -> Signature:
    signature: Signature = app.signature(
        "aggregate", (f"{job_id}/{number}",), immutable=True, app=app
    )
    return signature.set(queue=CONTROL_QUEUE, argsrepr=f"job {job_id}, round {number}")


def _measure(row: Any) -> Signature:
    signature: Signature = app.signature("measure", (row.id,), immutable=True, app=app)
    # The shadow name is the operator without shapes, because Flower uses it as a Prometheus label.
    # The time limit is None, so that the worker's limit applies; if the publisher has imported the
    # task, Celery would send its limit.
    return signature.set(
        queue=card_queue(row.card_id),
        shadow=row.short_name or "whole model",
        argsrepr=f"{row.label or ''}{f' on {row.cards} cards' if row.cards > 1 else ''}",
        kwargsrepr="",
        time_limit=None,
    )


@contextlib.contextmanager
def _publishing() -> Iterator[None]:
    """Raise `BrokerUnreachable` if the broker does not answer or is full."""
    try:
        yield
    except (OperationalError, RedisError) as error:
        then = (
            "The job is in the database: the control worker continues it then, or `farm resume "
            "JOB` at once."
        )
        raise broker_unreachable(settings().broker_url, error, then=then) from error
