"""Which jobs of a command are done already."""

from __future__ import annotations

import dataclasses

import pytest

from cli.follow import preview
from cli.interruption import interruptible
from cli.options import options_of_run
from cli.output import Interrupted
from cli.run import measure
from farm.devices.device import Card
from farm.jobs.closing import close_complete_rounds
from farm.jobs.jobs import done_entries
from farm.jobs.plan import JobPlan, PlanState
from farm.requests.partial_request import complete as complete_request
from farm.requests.resolved import ResolvedRequest
from farm.store.tables import Job
from farm.types.protocol import Stopping
from tasks.submissions import Submissions
from tests.planned import claim, complete, items_of, plan, register, sweep


def test_the_job_that_did_the_same_is_told_and_skips_an_entry_of_a_file(database):
    (card,) = register(database, 0)
    job_id = plan(database, [card])
    complete(database, claim(database, items_of(database, job_id)[0]), card)
    close_complete_rounds(database, job_id, 1)
    typed, written, afresh = (
        ResolvedRequest(sweep(1, reuse=reuse), [], where=where)
        for where, reuse in (("", "model"), ("jobs.yml:1", "model"), ("jobs.yml:2", "none"))
    )
    other = ResolvedRequest(sweep(2), [])
    left = (submissions := Submissions(print)).still_to_do(
        database, [typed, written, afresh, other]
    )
    assert left == [dataclasses.replace(typed, done_by=job_id), afresh, other]
    assert submissions.shown_ids == [job_id]


def test_a_preview_of_a_short_job_does_not_take_0_s(capsys):
    plan = JobPlan(
        PlanState.PREVIEW,
        job_id="",
        round=1,
        card_ids=("CARD-1",),
        card_model="a card",
        tuples=1,
        new=1,
        reused=0,
        expected_s=0.28,
        calls=1,
        title="ReLU",
    )
    preview([plan], Submissions(print), as_json=False)
    assert "1 to measure, at least 280 ms" in capsys.readouterr().out


def test_a_rougher_job_does_not_do_an_entry(database):
    (card,) = register(database, 0)
    quick = sweep(1).replace(
        stopping=Stopping(maximum_s=0.5, time_half_width=0.03, energy_half_width=0.06)
    )
    job_id = plan(database, [card])
    with database.write() as session:
        job = session.get_one(Job, job_id)
        job.request = {**job.request, "stopping": quick.stopping.to_json()}
    complete(database, claim(database, items_of(database, job_id)[0]), card)
    close_complete_rounds(database, job_id, 1)
    with database.read() as session:
        assert done_entries(session, [quick]) == {quick.id: job_id}
        assert done_entries(session, [quick.replace(stopping=Stopping())]) == {}


def test_quick_overrides_the_precision_of_a_file(tmp_path):
    (tmp_path / "jobs.yml").write_text("- {model: resnet18, within: 1%, stopping: {maximum_s: 9}}")
    (request,) = options_of_run(f"-f {tmp_path}/jobs.yml --quick").requests()
    assert complete_request(request, "cpu", target=0.95).stopping.maximum_s == 0.5


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_interruption_says_what_is_kept(database, kind):
    def batches():
        raise KeyboardInterrupt
        yield

    card = Card("CARD-1", kind, "a card", 1)
    with pytest.raises(Interrupted, match="the same command continues") as told:
        interruptible(
            lambda ending: measure(database, batches(), [card], Submissions(print), ending)
        )
    assert ("not stored are timed again" in str(told.value)) == (kind == "cpu")


def test_a_precision_among_models_and_a_sweep_is_that_of_the_models(tmp_path):
    sweep = "- {sweep: LayerNorm, grid: {normalized_shape: [8], batch: [1], tokens: [1]}}\n"
    (tmp_path / "both.yml").write_text(f"- {{model: resnet18, batch: 1}}\n{sweep}")
    requests = options_of_run(f"-f {tmp_path}/both.yml --within 1%").requests()
    assert [request.given.get("within") for request in requests] == [0.01, None]
    (tmp_path / "sweep.yml").write_text(sweep)
    (alone,) = options_of_run(f"-f {tmp_path}/sweep.yml --within 1%").requests()
    assert alone.within == 0.01, "it is refused later, because nothing uses it"
