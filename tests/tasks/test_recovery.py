"""What the reconciler finds out of step in the database."""

from __future__ import annotations

from farm.planning import add_round
from farm.store import tables
from tasks.recovery import _unpublished
from tests.planned import plan_model, register


def test_a_round_that_was_answered_from_the_database_is_not_missed_in_the_broker(any_database):
    job_id = plan_model(any_database, register(any_database, 0), ["Conv2d", "ReLU"], scope=("Conv2d",))
    with any_database.write() as session:
        assert _unpublished(session, "", -1.0) == [(job_id, 1)]
        job = session.get_one(tables.Job, job_id)
        first = session.get_one(tables.Round, (job_id, 1))
        add_round(session, job, scope=("Conv2d", "ReLU"), capture_id=first.capture_id, reason="below the target")
        assert _unpublished(session, "", -1.0) == [(job_id, 2)]
