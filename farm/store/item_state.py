"""The states of an item: every transition from one state to the next, and the columns that it
writes.

All code that sets an item's state uses these transitions, also the import of jobs.
`Transition.update` changes rows that other processes may change at the same time: it changes only
rows in a state in which the transition begins, and the caller checks the number of changed rows.
`Transition.apply` changes a new row or a row that the caller has locked. `Transition.values`
returns the columns for an INSERT of many rows. The caller checks all other conditions.

``docs/design/item-states.md`` shows this table and says when each transition happens; a test
compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Update, case, update
from sqlmodel import and_, col, or_

from farm.store.content import storable_text
from farm.store.database import database_now, without_index
from farm.store.tables import OPEN, Item, ItemRole, ItemState

WAITING, CLAIMED, DEFERRED, DONE, FAILED, CANCELLED = ItemState
# the states in which a worker may be measuring an item, see `in_work`
IN_WORK = (
    CLAIMED,
    CANCELLED,
)

#: The reason of a whole or canary item whose card left the farm. The row is used again if the card
#: is needed again.
CARD_LEFT = "card_left"
#: What the verdict of a round says about a whole model that was compiled, and the reason of its
#: items before schema 0019.
KERNELS_LISTED = "kernels_listed"
KERNELS_LISTED_MESSAGE = "The model was compiled; its kernels are measured in the next round."
CARD_LEFT_MESSAGE = "The card left the farm before it measured this item."

#: The reason of a predicted tuple that is not measured because the card does not run it.
NOT_RUN = "not_run"
NOT_RUN_MESSAGE = "The model does not run this operator on this card."

#: The claim has ended. The token stays valid, so a late result of the last holder is still
#: accepted.
_LEASE_ENDED: Mapping[str, Any] = {"claim_key": None, "lease_until_s": 0.0}
#: The claim has ended, and no late result is accepted.
_NO_CLAIM: Mapping[str, Any] = {"token": "", "holder": "", **_LEASE_ENDED}
_ENDED: Mapping[str, Any] = {**_LEASE_ENDED, "ended_at_s": database_now()}
_TIMES: Mapping[str, Any] = dict.fromkeys(("published_at_s", "put_off_at_s", "ended_at_s"))
_BEFORE_ANY_ATTEMPT: Mapping[str, Any] = {
    "attempts": 0,
    "reason": "",
    "message": "",
    **_TIMES,
    "message_used": False,
}
_CLAIMED: Mapping[str, Any] = {
    "attempts": col(Item.attempts) + 1,
    "started_at_s": database_now(),
    "put_off_at_s": None,
    "message_used": False,
}


@dataclass(frozen=True)
class Transition:
    """One event in the life of an item.

    Attributes:
        found: the states in which it begins; empty if it creates an item.
        next: the state after it; None if the state does not change.
        writes: column -> value, except the state.
        given: columns whose values the caller passes.
    """

    event: str
    found: tuple[ItemState, ...]
    next: ItemState | None
    writes: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """The columns that this transition writes, except the state."""
        return (*self.given, *self.writes)

    def update(self, *which: ColumnElement[bool], **given: Any) -> Update:
        """Return the UPDATE of matching items in a `found` state. It does not refresh objects in a
        session.
        """
        state = col(Item.state)
        is_found = state == self.found[0] if len(self.found) == 1 else state.in_(self.found)
        if any(getattr(getattr(condition, "left", None), "key", "") == "id" for condition in which):
            is_found = without_index(is_found)
        statement = update(Item).where(*which, is_found).values(**self.values(**given))
        return statement.execution_options(synchronize_session=False)

    def apply(self, item: Item, **given: Any) -> None:
        """Change a new item, or an item that this transaction has locked. Raises `ValueError` if
        the transition does not begin in the item's state."""
        begins = item.state in self.found if self.found else item.id is None
        if not begins:
            raise ValueError(
                f"Item {item.id} has the state {item.state}. The transition '{self.event}' is "
                "allowed only from: "
                f"{', '.join(self.found) or 'a new item'}."
            )
        for column, value in self.values(**given).items():
            setattr(item, column, value)

    def values(self, **given: Any) -> dict[str, Any]:
        """Return column -> value for all columns that this transition writes, the state
        included.
        """
        if set(given) != set(self.given):
            raise TypeError(f"'{self.event}' needs the columns {self.given}, not {tuple(given)}.")
        return {**({"state": self.next} if self.next else {}), **self.writes, **given}


def why(reason: str, message: str) -> dict[str, str]:
    """Return the columns with the reason why an item, or an attempt at it, ended without a
    reading.
    """
    return {"reason": storable_text(reason), "message": storable_text(message[:2000])}


_WHY = ("reason", "message")

PLAN = Transition("plan", (), WAITING)
REUSE = Transition(
    "reuse", (WAITING,), DONE, {"reused": True}, given=("reading_id", "card_id", "ended_at_s")
)
IMPORT = Transition("import", (), DONE, given=("reading_id", "reused", "ended_at_s"))
CLAIM = Transition(
    "claim",
    OPEN,
    CLAIMED,
    _CLAIMED,
    given=("token", "holder", "claim_key", "lease_until_s", "subject_key"),
)
SERVE = Transition("serve", OPEN, DONE, {"reused": True, **_ENDED}, given=("reading_id",))
DEFER = Transition("defer", (WAITING,), DEFERRED, given=("subject_key",))
WAKE = Transition("wake", (DEFERRED,), WAITING)
READ = Transition("read", (CLAIMED,), DONE, {"reused": False, **_ENDED}, given=("reading_id",))
LIST = Transition("list", (CLAIMED,), DONE, {"reused": False, **_ENDED})
FAIL = Transition("fail", (CLAIMED,), FAILED, _ENDED, given=_WHY)
EXHAUST = Transition("exhaust", OPEN, FAILED, _ENDED, given=_WHY)
HAND_BACK = Transition(
    "hand back", (CLAIMED,), WAITING, {**_NO_CLAIM, "attempts": col(Item.attempts) - 1}
)
PUT_OFF = Transition(
    "put off",
    OPEN,
    WAITING,
    {**_NO_CLAIM, "put_off_at_s": database_now(), "message_used": True},
    given=("attempts",),
)
MOVE = Transition("move", OPEN, WAITING, _NO_CLAIM, given=("card_id",))
GIVE_UP = Transition(
    "give up",
    (WAITING, CLAIMED),
    FAILED,
    {**_NO_CLAIM, **why(CARD_LEFT, CARD_LEFT_MESSAGE), "ended_at_s": database_now()},
)
CANCEL = Transition(
    "cancel",
    OPEN,
    CANCELLED,
    # A running measurement continues, and its reading is kept. During its lease the item keeps its
    # key too: items of other jobs with the same subject continue to wait for that reading.
    {
        "claim_key": case(
            (
                and_(col(Item.state) == CLAIMED, col(Item.lease_until_s) >= database_now()),
                col(Item.claim_key),
            ),
            else_=None,
        ),
        "ended_at_s": database_now(),
    },
)
DROP = Transition(
    "drop", (WAITING,), CANCELLED, {**why(NOT_RUN, NOT_RUN_MESSAGE), "ended_at_s": database_now()}
)
KEEP = Transition("keep", (CANCELLED,), CANCELLED, _NO_CLAIM, given=("reading_id",))
LET_GO = Transition("let go", (CANCELLED,), CANCELLED, _NO_CLAIM)
STAND = Transition("stand", (CANCELLED,), DONE)
GO_ON = Transition("go on", (CANCELLED,), CLAIMED, {"ended_at_s": None})
AGAIN = Transition(
    "again", (FAILED, CANCELLED), WAITING, {**_NO_CLAIM, **_BEFORE_ANY_ATTEMPT}, given=("round",)
)
REFUSE = Transition("refuse", OPEN, FAILED, _ENDED, given=_WHY)
NOTE = Transition("note", (CLAIMED,), None, given=_WHY)
RENEW = Transition("renew", IN_WORK, None, given=("lease_until_s",))
SHORTEN_LEASE = Transition("shorten lease", IN_WORK, None, given=("lease_until_s",))
END_LEASE = Transition("end lease", IN_WORK, None, _LEASE_ENDED)
REMOVE_CLAIM_KEY = Transition("remove claim key", IN_WORK, None, {"claim_key": None})
REPEAT = Transition("repeat", tuple(ItemState), None, {"repeated": col(Item.repeated) + 1})


def has_listed(item: Any = Item) -> ColumnElement[bool]:
    """SQL condition: the item has listed the kernels of its model, and they are stored. A worker of
    an older version closed such items as failed."""
    closed = or_(col(item.state) == DONE, col(item.reason) == KERNELS_LISTED)
    return and_(col(item.role) == ItemRole.COMPILE, closed)


def in_work() -> ColumnElement[bool]:
    """SQL condition: a worker measures the item. It is claimed, or was cancelled during the
    measurement.
    """
    return or_(
        col(Item.state) == CLAIMED,
        and_(col(Item.state) == CANCELLED, col(Item.claim_key).is_not(None)),
    )


def has_message() -> ColumnElement[bool]:
    """SQL condition: the newest message of a published item was not used up by putting the item
    off.
    """
    return col(Item.message_used).is_(False)
