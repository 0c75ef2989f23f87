"""The operator types with which the accuracy loop starts for every model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlmodel import Session, select

from farm.errors import UnknownOperator, did_you_mean
from farm.store.database import database_now
from farm.store.tables import SignificantOperator


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
