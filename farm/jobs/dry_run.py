"""A dry run: plan the jobs of one command without storing them.

It uses the code of real jobs. It copies cards, captures and readings into a temporary database and
plans there. It never writes to the farm's database."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlmodel import SQLModel, col, select

from farm.devices.device import Card
from farm.devices.host import links_of
from farm.jobs.balance import together_s
from farm.jobs.captures import checked_capture
from farm.jobs.cards import ensure_card, has_installed_software
from farm.jobs.create import open_job
from farm.jobs.plan import JobPlan, PlanState
from farm.requests.resolved import ResolvedRequest
from farm.store import tables
from farm.store.captures import counts
from farm.store.database import Database, in_batches
from farm.store.tables import Item, ItemState
from farm.types.request import Sweep
from farm.types.variant import Variant

#: The time from a command until the first measurement, if the command starts the workers: servers,
#: worker processes, the import of torch, and the capture of a model. Runs with nothing to measure
#: but one item took 13 s on two cores.
START_S = 10.0


@contextmanager
def dry_running(database: Database | None, own_cards: Collection[Card] = ()) -> Iterator[DryRun]:
    """Provide a dry run of the jobs of one command. ``database`` is None if it does not exist yet.
    ``own_cards``: cards of this host whose workers would start with the jobs; only readings of the
    software that is installed here are reused for them."""
    temporary = tempfile.TemporaryDirectory(prefix="farm-dry-run-")
    with temporary as folder, closing(Database(f"sqlite:///{Path(folder, 'farm.db')}")) as scratch:
        scratch.create_or_check()
        yield DryRun(database, scratch, own_cards)


class DryRun:
    """Plans jobs in a temporary database; see `dry_running`."""

    def __init__(
        self, database: Database | None, scratch: Database, own_cards: Collection[Card]
    ) -> None:
        self.database = database
        self.scratch = scratch
        # The items that earlier jobs of this command measure: subject, protocol, and the card of a
        # whole model or the card model of a tuple.
        self.measured: set[tuple[str, str, str]] = set()
        # The cards whose workers no earlier job of this command starts.
        self.to_start = {card.id for card in own_cards}
        for table in (
            tables.SoftwareRow,
            tables.CardRow,
            tables.ProtocolRow,
            tables.SignificantOperator,
        ):
            self._copy(table)
        with self.scratch.write() as session:
            for card in own_cards:  # each is planned as if its worker had registered it
                ensure_card(session, card)
                session.get_one(tables.CardRow, card.id).links = links_of(card)
                if not has_installed_software(session, card):
                    session.get_one(tables.CardRow, card.id).software_id = None

    def preview(self, resolved: ResolvedRequest) -> JobPlan:
        """Plan a job and return the plan. Raises the errors of `open_job`."""
        if resolved.variant is not None:
            capture_id = self._capture_of_model(resolved, resolved.variant)
            resolved = dataclasses.replace(resolved, capture_id=capture_id)
        elif resolved.request.sweep is not None:
            self._copy_readings_of_sweep(resolved.request.sweep)
        plan = open_job(self.scratch, resolved)
        new, left_s = self._new_items(plan, remeasured=resolved.request.reuse == "none")
        return dataclasses.replace(
            plan,
            state=PlanState.PREVIEW,
            job_id="",
            new=new,
            reused=plan.new + plan.reused - new,
            expected_s=self._expected_s(left_s),
        )

    def _capture_of_model(self, resolved: ResolvedRequest, variant: Variant) -> int:
        """Copy what the database knows of a model, and capture it if the database does not have
        it."""
        captures = select(tables.Capture.id).where(tables.Capture.variant_id == variant.id)
        called = select(tables.Call.operator_id).where(col(tables.Call.capture_id).in_(captures))
        self._copy(tables.ModelVariant, tables.ModelVariant.id == variant.id)
        self._copy(tables.Operator, col(tables.Operator.id).in_(called))
        self._copy(tables.Capture, tables.Capture.variant_id == variant.id)
        self._copy(tables.Call, col(tables.Call.capture_id).in_(captures))
        capture_id = checked_capture(self.scratch, resolved)
        with self.scratch.read() as session:
            calls = counts(session, capture_id)
        for subject_ids in in_batches([*calls, variant.id]):
            self._copy(tables.ReadingRow, col(tables.ReadingRow.subject_id).in_(subject_ids))
        return capture_id

    def _copy_readings_of_sweep(self, sweep: Sweep) -> None:
        of_operator = select(tables.Operator.id).where(tables.Operator.short_name == sweep.operator)
        self._copy(tables.ReadingRow, col(tables.ReadingRow.subject_id).in_(of_operator))

    def _new_items(self, plan: JobPlan, *, remeasured: bool) -> tuple[int, dict[str, float]]:
        """Return the number of items that no earlier job of this command measures, and their time
        by card. ``remeasured``: the job measures all. Unit: s."""
        new, left_s = 0, defaultdict[str, float](float)
        waiting = select(Item).where(Item.job_id == plan.job_id, Item.state == ItemState.WAITING)
        with self.scratch.read() as session:
            for item in session.exec(waiting):
                measured_on = item.card_model if item.role == "tuple" else item.card_id
                measurement = (item.subject_id, item.protocol_id, measured_on)
                if remeasured or measurement not in self.measured:
                    new += 1
                    left_s[item.card_id] += item.expected_s
                    self.measured.add(measurement)
        return new, left_s

    def _expected_s(self, left_s: dict[str, float]) -> float:
        """The time until a job with this time of items by card ends. Unit: s."""
        if not left_s:
            return 0.0
        with (self.database or self.scratch).read() as session:
            expected_s = together_s(session, left_s)
        if self.to_start.intersection(left_s):  # the workers of all cards start at the same time
            self.to_start.clear()
            expected_s += START_S
        return expected_s

    def _copy(self, table: type[SQLModel], *where: Any) -> None:
        if self.database is None:
            return
        of = table.__table__  # type: ignore[attr-defined]
        with self.database.read() as session:
            rows = [dict(row) for row in session.execute(select(of).where(*where)).mappings()]
        if rows:
            with self.scratch.write() as session:
                session.execute(insert(of).prefix_with("OR IGNORE", dialect="sqlite"), rows)
