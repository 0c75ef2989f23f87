"""New items of a job, and those that run its whole model.

All items that run the whole model of a job have one subject. They differ in the card and in the
role: as long as the kernels that a model generates are not listed, an item lists them and measures
nothing."""

from __future__ import annotations

from typing import Any

from sqlmodel import Session, col, select

from farm.store import item_state
from farm.store.captures import is_unlisted
from farm.store.columns import RUN_WHOLES
from farm.store.database import database_now
from farm.store.tables import CardRow, Item, ItemRole, Job, Round

#: The columns of an item that describe what is measured.
SUBJECT_COLUMNS = {"subject_kind", "subject_id", "protocol_id", "expected_s"}


def new_item(
    job: Job, card: CardRow, role: str, now_s: float | None = None, **subject: Any
) -> Item:
    """Return a new waiting item.

    Args:
        now_s: the time on the database's clock. Pass it for many items: if the database fills in
            the time, rows are inserted one by one. Unit: s.
        subject: the columns of `SUBJECT_COLUMNS`.
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
            job, session.get_one(CardRow, card_id), role, **like.model_dump(include=SUBJECT_COLUMNS)
        )
        whole.cards = like.cards
        if like.cards == 1 or like.card_id == card_id:  # a group keeps its leading card
            items.append(whole)
    session.add_all(items)
    session.flush()
    return items


def wholes_of(session: Session, job: Job) -> list[Item]:
    """Return the whole models of a job; before its kernels are listed, the items that list them."""
    role = _role_in_newest_round(session, job)
    return _fresh(session, *_runs_variant(job.id), Item.role == role)


def role_of_wholes(session: Session, capture_id: int | None) -> ItemRole:
    """The role of the items that run the whole model in a round with this capture. Generated
    kernels are listed first."""
    return ItemRole.COMPILE if is_unlisted(session, capture_id) else ItemRole.WHOLE


def _role_in_newest_round(session: Session, job: Job) -> ItemRole:
    return role_of_wholes(session, session.get_one(Round, (job.id, job.round)).capture_id)


def _runs_variant(job_id: str) -> tuple[Any, ...]:
    """Conditions of a job's items that run the whole model: the database reads few entries of an
    index.
    """
    return Item.job_id == job_id, RUN_WHOLES


def _fresh(session: Session, *conditions: Any) -> list[Item]:
    """Read items again, also those that the session has."""
    query = select(Item).where(*conditions).order_by(col(Item.id))
    return list(session.exec(query.execution_options(populate_existing=True)))
