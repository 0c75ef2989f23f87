"""Measure two requests alternately on one card, in rounds: the jobs of `farm compare --run`.

Each round is one job of A and one job of B, directly after each other, without reuse. Odd rounds
measure A first, even rounds B. A job's request names its comparison, round and side, so an
interrupted command continues: complete rounds count, and an interrupted round is measured again as
a whole. After the last round the same command begins anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sqlmodel import Session, col, select

from farm.devices.device import Card
from farm.devices.quiet import quiet
from farm.devices.software import torch_version
from farm.errors import FarmError, UsageError
from farm.requests.partial_request import PartialRequest
from farm.requests.resolved import ResolvedRequest
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import JobState
from farm.types.fields import content_id
from tasks.submissions import resolve_all

SIDES = ("A", "B")


@dataclass(frozen=True)
class PairedRounds:
    """A comparison of two requests on one card.

    Attributes:
        sides: the requests of A and B; each round creates a job for each.
        jobs: round -> ids of the jobs of A and B, for complete rounds. `batches` adds rounds.
    """

    card: Card
    rounds: int
    sides: Mapping[str, ResolvedRequest]
    jobs: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for commands that continue each other: requests, number of rounds, card, driver
        and torch.
        """
        requests = [side.request.to_json() for side in self.sides.values()]
        on = (self.card.id, self.card.driver, torch_version())
        return content_id({"requests": requests, "rounds": self.rounds, "on": on})

    @property
    def complete(self) -> list[tuple[str, str]]:
        """The jobs of A and B in each complete round, in order."""
        return [self.jobs[number] for number in sorted(self.jobs)]

    def batches(
        self,
        database: Database,
        measured: Callable[[int, str, str], None] = lambda number, a, b: None,
    ) -> Iterator[list[ResolvedRequest]]:
        """Yield the jobs that are missing, one at a time. The caller measures each before it takes
        the next. Call ``measured`` after each round with its number and its jobs. Raises
        `FarmError` if a job ends without result."""
        with database.read() as session:
            serial, done = _newest(session, self)
        self.jobs.update(done)
        with quiet(settings().lock_dir):  # compilations of the host pause during all rounds
            for number in range(1, self.rounds + 1):
                if number in self.jobs:
                    continue
                for side in SIDES if number % 2 else SIDES[::-1]:
                    job = self.sides[side]
                    mark = f"{self.key}/{serial}/{number}/{side}"
                    yield [dataclasses.replace(job, request=job.request.replace(comparison=mark))]
                with database.read() as session:
                    jobs = _jobs(session, self).get(serial, {})
                ids = tuple(jobs.get((number, side), "") for side in SIDES)
                if not all(ids):
                    text = (
                        f"Round {number} has no result of {SIDES[ids.index('')]}: its job was "
                        "cancelled or abandoned."
                    )
                    raise FarmError(text, "The same command continues with this round.")
                self.jobs[number] = (ids[0], ids[1])
                measured(number, *self.jobs[number])


def paired_rounds(a: PartialRequest, b: PartialRequest, card: Card, rounds: int) -> PairedRounds:
    """Plan the comparison of two requests. Raises `UsageError` if a side is a sweep or has a policy
    of reuse, and as `tasks.submissions.resolve_all`."""
    sides = {}
    for name, partial in zip(SIDES, (a, b), strict=True):
        if partial.reuse not in (None, "none"):
            raise UsageError(
                f"{name} has --reuse {partial.reuse}, but every round is measured.",
                "Leave --reuse out.",
            )
        (resolved,) = resolve_all([partial], [card], target=settings().target)
        if resolved.variant is None:
            raise UsageError(f"{name} is a sweep, which has no whole model.", "Name a model.")
        request = resolved.request.replace(reuse="none")
        sides[name] = dataclasses.replace(resolved, request=request)
    return PairedRounds(card, rounds, sides)


def _jobs(session: Session, paired: PairedRounds) -> dict[int, dict[tuple[int, str], str]]:
    """Return number of the comparison -> (round, side) -> id of its newest job that is done."""
    ids = {side.request.id for side in paired.sides.values()}
    asked = select(tables.Job).where(
        col(tables.Job.request_id).in_(ids), tables.Job.state == JobState.DONE
    )
    jobs: dict[int, dict[tuple[int, str], str]] = {}
    for job in session.exec(asked.order_by(col(tables.Job.created_at_s))):
        key, *position = str(job.asked.get("comparison", "")).split("/")
        if key == paired.key:
            serial, number, side = position
            jobs.setdefault(int(serial), {})[int(number), side] = job.id
    return jobs


def _newest(session: Session, paired: PairedRounds) -> tuple[int, dict[int, tuple[str, str]]]:
    """Return the number of the comparison to continue, and its complete rounds; a new number after
    a complete one.
    """
    series = _jobs(session, paired)
    serial = max(series, default=1)
    jobs = series.get(serial, {})
    sides = {number: tuple(jobs.get((number, side), "") for side in SIDES) for number, _ in jobs}
    complete = {number: (ids[0], ids[1]) for number, ids in sides.items() if all(ids)}
    return (serial + 1, {}) if len(complete) == paired.rounds else (serial, complete)
