"""Check the result of a job whose farm had faults, for the soak tests: open, lost, repeated and twice measured
items.
"""

from __future__ import annotations

import sys
from collections import Counter

from sqlmodel import col, func, select

from farm.jobs import cards
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import ItemState

#: The counts of `judge` that must be 0 after any fault.
NEVER = ("lost", "two_readings", "without_reading", "verdicts_missing", "bad_but_not_failed")


def release_all(database: Database) -> int:
    """Release the cards in quarantine, as a person would; return their number."""
    with database.read() as session:
        query = select(tables.CardRow).where(tables.CardRow.state == tables.CardState.QUARANTINED)
        sick = [(card.id, card.state_reason) for card in session.exec(query)]
    released = [one for one in sick if cards.resume(database, one[0], quarantined=True)]
    for card_id, reason in released:
        print(f"{card_id} is released from quarantine: {reason}", file=sys.stderr)
    return len(released)


def open_items(database: Database, job_ids: list[str]) -> int:
    with database.read() as session:
        wanted = col(tables.Item.job_id).in_(job_ids), col(tables.Item.state).in_(tables.OPEN)
        return session.exec(select(func.count()).select_from(tables.Item).where(*wanted)).one()


def all_ended(database: Database, job_ids: list[str]) -> bool:
    with database.read() as session:
        states = session.exec(select(tables.Job.state).where(col(tables.Job.id).in_(job_ids))).all()
    return all(state != tables.JobState.OPEN for state in states)


def judge(database: Database, job_ids: list[str]) -> dict[str, int]:
    found = Counter[str]()
    with database.read() as session:
        operators = session.exec(select(tables.Operator)).all()
        for job_id in job_ids:
            items = session.exec(select(tables.Item).where(tables.Item.job_id == job_id)).all()
            subjects = {item.subject_id for item in items}
            read = Counter(
                reading for reading in session.exec(select(tables.ReadingRow.subject_id)).all() if reading in subjects
            )
            verdicts = session.exec(select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)).all()
            cancelled = session.get_one(tables.Job, job_id).state == tables.JobState.CANCELLED
            bad = {operator.id for operator in operators if operator.id in subjects and operator.parameters["simulate"]}
            good = [item for item in items if item.subject_id not in bad]
            ends = {ItemState.DONE, ItemState.CANCELLED} if cancelled else {ItemState.DONE}
            found["items"] += len(items)
            found["lost"] += sum(item.state not in ends for item in good)
            found["two_readings"] += sum(number > 1 for number in read.values())
            found["without_reading"] += sum(item.state == ItemState.DONE and not item.reading_id for item in items)
            found["verdicts_missing"] += not cancelled and len(verdicts) != 1
            found["bad_items"] += len(items) - len(good)
            found["bad_but_not_failed"] += sum(
                item.state != ItemState.FAILED for item in items if item.subject_id in bad
            )
            found["begun_again"] += sum(max(0, item.attempts - 1) for item in good)
            found["repeated_and_fenced_out"] += sum(item.repeated for item in items)
    names = ("items", "bad_items", "lost", "two_readings", "without_reading", "verdicts_missing", "bad_but_not_failed")
    return {name: found[name] for name in (*names, "begun_again", "repeated_and_fenced_out")}
