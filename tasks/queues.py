"""Publishing: a chord per (job, round) over the cards' queues, and single messages where a chord has no part.

Messages carry ids only. A message too many is harmless (its claim is declined), so whoever is in doubt publishes.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy
from celery import chord
from celery.canvas import Signature
from kombu.exceptions import OperationalError
from redis import RedisError
from redis.exceptions import OutOfMemoryError
from sqlalchemy import update
from sqlmodel import Session, and_, col, func, or_, select

from farm.errors import BrokerUnreachable
from farm.jobs.items import Closed
from farm.masking import masked
from farm.settings import settings
from farm.store import tables
from farm.store.batches import in_batches
from farm.store.database import Database, database_now
from farm.store.tables import Item, ItemState
from tasks.app import CONTROL_QUEUE, EMBEDDED_VARIABLE, app, refuses


def card_queue(card_id: str) -> str:
    """The name of a card's own queue."""
    return f"card.{card_id}"


def own_farm() -> str:
    """The embedded farm that this process belongs to, "" for the one that all hosts share."""
    return os.environ.get(EMBEDDED_VARIABLE, "")


def publish_round(database: Database, job_id: str, number: int) -> int:
    """Publish a chord of the job's items that wait, or that nobody holds any more; how many.

    A round without any goes straight to aggregation.
    """
    # A lease that has ended lets another take the item; until then its late result still counts.
    let_go = and_(col(Item.state) == ItemState.CLAIMED, col(Item.lease_until_s) < database_now())
    with database.read() as session:
        rows = session.execute(
            _labelled().where(Item.job_id == job_id, or_(col(Item.state) == ItemState.WAITING, let_go))
        ).all()
    # The whole first, since it may show that the prediction was wrong; the rest in random order, so that what
    # drifts on the card does not line up with what varies over the model.
    rows = sorted(rows, key=lambda row: row.id)
    random.Random(f"{job_id}/{number}").shuffle(rows)
    rows.sort(key=lambda row: row.role != "whole")
    body = aggregate_signature(job_id, number)
    with _publishing():
        if rows:
            chord([_measure(row.id, row.card_id, row.short_name, row.label) for row in rows])(
                body.on_error(aggregate_signature(job_id, number))
            )
        else:
            body.apply_async()
    with database.write() as session:
        _mark_published(session, [row.id for row in rows])
        session.execute(
            update(tables.Round)
            .where(col(tables.Round.job_id) == job_id, col(tables.Round.number) == number)
            .values(published_at_s=database_now())
        )
    return len(rows)


def publish_items(database: Database, item_ids: Sequence[int]) -> None:
    """Publish single messages for items that wait (woken, moved or lost by the broker)."""
    if not item_ids:
        return
    with database.read() as session:
        rows = [
            row for batch in in_batches(item_ids) for row in session.execute(_labelled().where(col(Item.id).in_(batch)))
        ]
    with _publishing(), app.producer_pool.acquire(block=True) as producer:
        for row in rows:
            _measure(row.id, row.card_id, row.short_name, row.label).apply_async(producer=producer)
    with database.write() as session:
        _mark_published(session, [row.id for row in rows])


def publish_aggregate(job_id: str, number: int) -> None:
    with _publishing():
        aggregate_signature(job_id, number).apply_async()


def follow_up(database: Database, closed: Closed) -> None:
    """Publish what closing an item asks for.

    What it asks of another farm's jobs, that farm's reconciler finds: its workers hear of nothing on this broker.
    """
    if not closed.rounds and not closed.woken:
        return
    job, ids = tables.Job, {job_id for job_id, _ in closed.rounds}
    with database.read() as session:
        ours = {
            job_id
            for batch in in_batches(ids)
            for job_id in session.exec(select(job.id).where(col(job.id).in_(batch), job.farm == own_farm()))
        }
        woken = [
            item_id
            for batch in in_batches(closed.woken)
            for item_id in session.exec(
                select(Item.id)
                .join(job, col(job.id) == col(Item.job_id))
                .where(col(Item.id).in_(batch), job.farm == own_farm())
                .order_by(col(Item.id))
            )
        ]
    for job_id, number in closed.rounds:
        if job_id in ours:
            publish_aggregate(job_id, number)
    publish_items(database, [item_id for item_id in woken if item_id is not None])


def queue_depths(card_ids: Sequence[str]) -> dict[str, int]:
    """Messages waiting in each card's queue, asked all at once: every host asks at every pass."""
    if not card_ids:
        return {}
    with _publishing(), app.connection_for_read() as connection:
        together = connection.default_channel.client.pipeline(transaction=False)
        for card_id in card_ids:
            together.llen(card_queue(card_id))
        return {card_id: int(depth) for card_id, depth in zip(card_ids, together.execute(), strict=True)}


def aggregate_signature(job_id: str, number: int) -> Signature:
    signature: Signature = app.signature("aggregate", (f"{job_id}/{number}",), immutable=True, app=app)
    return signature.set(queue=CONTROL_QUEUE, argsrepr=f"job {job_id}, round {number}")


def _measure(item_id: int, card_id: str, short_name: str | None, label: str | None) -> Signature:
    signature: Signature = app.signature("measure", (item_id,), immutable=True, app=app)
    # The shadow name becomes a Prometheus label in Flower: the operator's name, never its shapes. The time limit is the
    # worker's own: a publisher that knows the task would send its own along, which would count instead.
    return signature.set(
        queue=card_queue(card_id),
        shadow=short_name or "whole model",
        argsrepr=label or "",
        kwargsrepr="",
        time_limit=None,
    )


def _labelled() -> Any:
    operator, variant = tables.Operator, tables.ModelVariant
    return (
        sqlalchemy.select(  # type: ignore[call-overload]
            Item.id,
            Item.card_id,
            Item.role,
            func.coalesce(operator.short_name, "whole " + col(variant.model)).label("short_name"),
            func.coalesce(operator.label, tables.Job.title).label("label"),
        )
        .join(tables.Job, col(tables.Job.id) == col(Item.job_id))
        .join(operator, col(operator.id) == col(Item.subject_id), isouter=True)
        .join(variant, col(variant.id) == col(Item.subject_id), isouter=True)
    )


def _mark_published(session: Session, item_ids: Sequence[int]) -> None:
    for batch in in_batches(item_ids):
        session.execute(update(Item).where(col(Item.id).in_(batch)).values(published_at_s=database_now()))


@contextlib.contextmanager
def _publishing() -> Iterator[None]:
    """Turns a broker that does not answer, or is full, into an error for people."""
    try:
        yield
    except (OperationalError, RedisError) as error:
        if isinstance(error, OutOfMemoryError) or isinstance(error.__cause__, OutOfMemoryError):
            raise BrokerUnreachable(
                f"The broker {masked(settings().broker_url)} is full: it takes no more messages.",
                "Raise its `maxmemory`; the job is in the database and goes on by itself when there is room.",
            ) from error
        told = "refuses the user or the password" if refuses(error) else "does not answer"
        raise BrokerUnreachable(
            f"The broker {masked(settings().broker_url)} {told}: {error}.",
            "Mend that, or start it again; the job is in the database, continue it with `farm resume JOB`.",
        ) from error
