"""Which jobs of a command are done already."""

from __future__ import annotations

import pytest

from cli.output import Interrupted
from cli.run import interruptible, measure
from farm.devices.device import Card
from farm.jobs.rounds import close_known_rounds
from farm.requests.partial_request import PartialRequest
from tasks.submissions import PlannedJob, Submissions
from tests.planned import claim, complete, items_of, plan, register, sweep


def test_the_job_that_did_the_same_is_told_and_skips_an_entry_of_a_file(database):
    (card,) = register(database, 0)
    job_id = plan(database, [card])
    complete(database, claim(database, items_of(database, job_id)[0]), card)
    close_known_rounds(database, job_id, 1)
    typed, written, afresh = (
        PlannedJob(PartialRequest(where=where), sweep(1, reuse=reuse), [])
        for where, reuse in (("", "model"), ("jobs.yml:1", "model"), ("jobs.yml:2", "none"))
    )
    other = PlannedJob(PartialRequest(), sweep(2), [])
    left = (submissions := Submissions(print)).still_to_do(database, [typed, written, afresh, other])
    assert [(job.partial, job.done_by) for job in left] == [
        (typed.partial, job_id),
        (afresh.partial, ""),
        (other.partial, ""),
    ]
    assert submissions.shown_ids == [job_id]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_interruption_says_what_is_kept(database, kind):
    def batches():
        raise KeyboardInterrupt
        yield

    card = Card("CARD-1", kind, "a card", 1)
    with pytest.raises(Interrupted, match="the same command continues") as told:
        interruptible(lambda ending: measure(database, batches(), [card], Submissions(print), ending))
    assert ("Items that were not stored are timed again" in str(told.value)) == (kind == "cpu")
