"""The leases of claimed items: a living worker renews its own, and those of a worker that has ended
end.

When a lease ends, another worker may claim the item. Only the token of a claim decides whether a
result is accepted (`farm.jobs.items`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import ColumnElement, update
from sqlmodel import and_, col, select

from farm.jobs import groups
from farm.store import item_state, tables
from farm.store.database import (
    Database,
    database_now,
    without_index,
)
from farm.store.tables import Item


def renew(
    database: Database, holder: str, lease_s: float, item_ids: Collection[int] | None = None
) -> int:
    """Record the heartbeat of a living holder: its card was seen, and its leases go on; return the
    number of leases.

    Args:
        item_ids: the items whose messages the holder has; None: all of its items. Nobody measures a
            claimed item without a message, so its lease must end.
    """
    lease_until_s = database_now() + lease_s
    renewal = item_state.RENEW.update(
        col(Item.holder) == holder, item_state.in_work(), lease_until_s=lease_until_s
    )
    if item_ids is not None:
        renewal = renewal.where(col(Item.id).in_(sorted(item_ids)))
    heartbeat = (
        update(tables.CardRow)
        .where(col(tables.CardRow.worker) == holder)
        .values(last_seen_at_s=database_now())
    )
    with database.write() as session:
        session.execute(heartbeat)
        return session.exec(renewal).rowcount if item_ids or item_ids is None else 0


def renew_together(
    database: Database, held: Mapping[str, Collection[int]], lease_s: float
) -> set[str]:
    """Like `renew` for several living holders, each with the items whose messages it has, in one
    transaction; return the holders whose card was seen.

    Rows that another transaction has locked are left out: a process that hangs in it must not hold
    up other holders. So are leases that the next worker of the card has ended."""

    def free(table: Any, *which: Any) -> ColumnElement[bool]:
        # As a common table expression, PostgreSQL evaluates it once, and not for each item in work
        # of all cards.
        locked = (
            select(table.id).where(*which).with_for_update(key_share=True, skip_locked=True).cte()
        )
        return col(table.id).in_(select(locked.c.id))

    ids = sorted(set[int]().union(*held.values()))
    in_work = without_index(and_(item_state.in_work(), col(Item.lease_until_s) > 0))
    renewed = (col(Item.id).in_(ids), col(Item.holder).in_(held), in_work)
    heartbeat = update(tables.CardRow).where(
        free(tables.CardRow, col(tables.CardRow.worker).in_(held))
    )
    with database.write() as session:
        seen_workers = session.execute(
            heartbeat.values(last_seen_at_s=database_now()).returning(col(tables.CardRow.worker))
        )
        holders = set(seen_workers.scalars())
        if ids:
            session.exec(
                item_state.RENEW.update(
                    free(Item, *renewed), lease_until_s=database_now() + lease_s
                )
            )
        return holders


def release_card(database: Database, card_id: str) -> int:
    """End all leases on a card, and its reservation; return their number. Only the holder of its
    lock may call this.
    """
    with database.write() as session:
        groups.end_reservation(session, card_id)
        return session.exec(
            item_state.END_LEASE.update(col(Item.card_id) == card_id, item_state.in_work())
        ).rowcount


def hand_back(database: Database, worker: str, *, spooled: Collection[int] = ()) -> int:
    """Let the items of a stopped worker wait again without counting the attempt; return their
    number. ``worker``: the holder name, or the prefix from `farm.jobs.cards.holder_of_process`.
    Tokens of items whose reading is ``spooled`` stay valid.

    Only the process that stopped the worker may call this, after it ended. If a worker dies, its
    attempt counts."""
    with database.write() as session:
        of_worker = (
            col(Item.holder).startswith(worker, autoescape=True),
            col(Item.id).not_in(sorted(spooled)),
        )
        session.exec(item_state.LET_GO.update(*of_worker))
        return session.exec(item_state.HAND_BACK.update(*of_worker)).rowcount
