"""A dry run of a job: how many items it would measure, how many readings serve, how long it would take.

The job is planned by the same code as every job, in a temporary database. Cards, captures and readings are copied into
it; the farm's database is only read.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlmodel import Session, SQLModel, col, select

from farm.devices.device import Card
from farm.devices.host import is_installed
from farm.jobs.balance import together_s
from farm.jobs.create import open_job, tuples_of
from farm.store.database import Database
from farm.store.rows import in_batches
from farm.store.tables import (
    Call,
    Capture,
    CardRow,
    Item,
    ItemState,
    ModelVariant,
    Operator,
    ProtocolRow,
    ReadingRow,
    SignificantOperator,
    SoftwareRow,
)
from farm.types.protocol import Software
from farm.types.request import Request


@dataclass(frozen=True)
class JobPreview:
    """The plan of a job. Items that an earlier job of the same command measures are not new in a later one."""

    title: str
    cards: tuple[str, ...]  # ids
    tuples: int
    calls: int
    new: int  # items to measure
    reused: int  # items that a reading serves
    expected_s: float  # without other work, if the cards stay as fast as lately

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "cards": list(self.cards),
            "tuples": self.tuples,
            "calls": self.calls,
            "items_new": self.new,
            "items_reused": self.reused,
            "expected_s": self.expected_s,
        }


@contextmanager
def dry_running(database: Database | None, own: Collection[Card] = ()) -> Iterator[DryRun]:
    """A dry run of the jobs of one command.

    Args:
        database: None: there is none yet.
        own: cards of this host whose workers would start with the jobs; readings of other software than the installed
            one do not serve them.
    """
    with tempfile.TemporaryDirectory(prefix="farm-dry-run-") as folder:
        scratch = Database(f"sqlite:///{Path(folder, 'farm.db')}")
        try:
            scratch.upgrade()
            yield DryRun(database, scratch, own)
        finally:
            scratch.close()


class DryRun:
    """Plans jobs in a temporary database; see `dry_running`."""

    def __init__(self, database: Database | None, scratch: Database, own: Collection[Card]) -> None:
        self.database = database
        self.scratch = scratch
        self.met: set[tuple[str, str, str]] = set()  # subjects that earlier jobs of this command measure
        for table in (SoftwareRow, CardRow, ProtocolRow, SignificantOperator):
            self._copy(table)
        with self.scratch.write() as session:
            for card in own:
                _renew(session, card)

    def preview(self, request: Request, card_ids: Sequence[str]) -> JobPreview:
        """
        Raises:
            FarmError: as `farm.jobs.create.open_job`.
        """
        tuples = None
        if request.variant is not None:
            captures = select(Capture.id).where(Capture.variant_id == request.variant.id)
            called = select(Call.operator_id).where(col(Call.capture_id).in_(captures))
            self._copy(ModelVariant, ModelVariant.id == request.variant.id)
            self._copy(Operator, col(Operator.id).in_(called))
            self._copy(Capture, Capture.variant_id == request.variant.id)
            self._copy(Call, col(Call.capture_id).in_(captures))
            tuples = tuples_of(self.scratch, request, card_ids)
            for subject_ids in in_batches([*tuples.calls, request.variant.id]):
                self._copy(ReadingRow, col(ReadingRow.subject_id).in_(subject_ids))
        elif request.sweep is not None:
            of_its_kind = select(Operator.id).where(Operator.short_name == request.sweep.operator)
            self._copy(ReadingRow, col(ReadingRow.subject_id).in_(of_its_kind))
        opened = open_job(self.scratch, request, card_ids, tuples=tuples)
        new, left_s = 0, defaultdict[str, float](float)
        with self.scratch.read() as session:
            waiting = select(Item).where(Item.job_id == opened.job_id, Item.state == ItemState.WAITING)
            for item in session.exec(waiting):
                scope = item.card_model if item.role == "tuple" else item.card_id
                subject = (item.subject_id, item.protocol_id, scope)
                if request.reuse == "none" or subject not in self.met:
                    new += 1
                    left_s[item.card_id] += item.expected_s
                    self.met.add(subject)
        expected_s = 0.0
        if left_s:
            with (self.database or self.scratch).read() as session:
                expected_s = together_s(session, left_s)
        known = opened.new + opened.reused - new
        return JobPreview(opened.title, tuple(card_ids), opened.tuples, opened.calls, new, known, expected_s)

    def _copy(self, table: type[SQLModel], *where: Any) -> None:
        if self.database is None:
            return
        of = table.__table__  # type: ignore[attr-defined]
        with self.database.read() as session:
            rows = [dict(row) for row in session.execute(select(of).where(*where)).mappings()]
        if rows:
            with self.scratch.write() as session:
                session.execute(insert(of).prefix_with("OR IGNORE", dialect="sqlite"), rows)


def _renew(session: Session, card: Card) -> None:
    """Write a card of this host as its worker would register it, as far as that is known without the worker."""
    row = session.get(CardRow, card.id)
    if row is None:
        row = CardRow(id=card.id, kind=card.kind, model=card.model, memory_bytes=card.memory_bytes, host=card.host)
        session.add(row)
    software = session.get(SoftwareRow, row.software_id) if row.software_id else None
    if software is None or not is_installed(Software(**software.model_dump(exclude={"id"})), card):
        row.software_id = None
