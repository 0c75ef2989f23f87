"""What a job measures, and what it takes from existing readings: one plan from the dry run to the
published job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class PlanState(StrEnum):
    """How far a plan has come."""

    PREVIEW = "preview"  # of a dry run: nothing is stored
    PLANNED = "planned"  # items of a round are stored
    OPENED = "opened"  # the first round is complete and can be published


@dataclass(frozen=True)
class JobPlan:
    """A job, or one of its rounds.

    `farm.jobs.rounds` plans a round, `farm.jobs.create.open_job` returns the job with its first
    round, `farm.jobs.dry_run` the same job without storing it.

    Attributes:
        job_id: the id of the job; "" in a preview.
        round: the number of the newest round.
        card_ids: the cards of the job.
        card_model: their model.
        tuples: the operator tuples. Of a planned round, only those of its new rows.
        new: items to measure. In a preview, an item that an earlier job of the same command
            measures is not new.
        reused: items with an existing reading.
        expected_s: card time of the new items. In a preview, the time until the job ends if the
            cards have no other work. Unit: s.
        calls: the calls of these tuples in one pass; for a sweep, the number of tuples.
        title: the title for people.
        left_out: reason -> number of impossible combinations of a sweep.
        changed: how a user's model differs from that of its newest earlier job, as text; "" if it
            does not.
    """

    state: PlanState
    job_id: str
    round: int
    card_ids: tuple[str, ...]
    card_model: str
    tuples: int
    new: int
    reused: int
    expected_s: float = 0.0
    calls: int = 0
    title: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    changed: str = ""

    def grown_by(self, batch: JobPlan) -> JobPlan:
        """Add another batch of tuples of the same round."""
        return dataclasses.replace(
            self,
            tuples=self.tuples + batch.tuples,
            calls=self.calls + batch.tuples,
            new=self.new + batch.new,
            reused=self.reused + batch.reused,
            expected_s=self.expected_s + batch.expected_s,
        )

    def to_json(self) -> dict[str, Any]:
        """The plan for programs: with its job; of a preview with its cards and expected time."""
        counts = {
            "tuples": self.tuples,
            "calls": self.calls,
            "items_new": self.new,
            "items_reused": self.reused,
        }
        if self.state == PlanState.PREVIEW:
            return {
                "title": self.title,
                "cards": list(self.card_ids),
                **counts,
                "expected_s": self.expected_s,
            }
        return {"job": self.job_id, "title": self.title, **counts}
