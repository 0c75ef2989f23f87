"""A round is judged once, whoever comes, and a further one is planned in the same transaction."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlmodel import select

from farm.devices.simulated import SOFTWARE
from farm.jobs import items, jobs
from farm.jobs.closing import Closing, close_round
from farm.jobs.significant import significant
from farm.operators.captured import CapturedCall
from farm.report import report
from farm.store import captures, content, tables
from farm.types.figure import Figure
from farm.types.verification import Verification
from tests.planned import READING, claim, complete, items_of, plan, plan_model, register
from tests.statements import meanwhile


def measure(database, job_id):
    for item in items_of(database, job_id):
        if item.state == "waiting":
            complete(database, claim(database, item), item.card_id)


def verdicts(database, job_id):
    with database.read() as session:
        return list(
            session.exec(select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id))
        )


def test_a_round_is_closed_once_and_only_when_nothing_is_open(any_database):
    job_id = plan(any_database, register(any_database, 0), number=2)
    assert close_round(any_database, job_id, 1).closing is Closing.OPEN
    measure(any_database, job_id)
    with ThreadPoolExecutor(3) as pool:
        came = list(pool.map(lambda _: close_round(any_database, job_id, 1).closing, range(3)))
    assert sorted(came) == [Closing.ALREADY, Closing.ALREADY, Closing.DONE]
    assert len(verdicts(any_database, job_id)) == 1


def only_a_part_is_predicted(database):
    """A model job, read to its end, that wants a second round."""
    (card,) = register(database, 0)
    job_id = plan_model(
        database, [card], ["Conv2d", "ReLU"], operators=("auto",), scope=("Conv2d",), target=0.999
    )
    measure(database, job_id)
    return job_id


def test_a_job_that_is_cancelled_while_its_round_closes_has_nothing_left_to_measure(any_database):
    job_id = only_a_part_is_predicted(any_database)
    with meanwhile(
        any_database, "INSERT INTO verdict", lambda: jobs.cancel(any_database, job_id)
    ) as cancelled:
        assert close_round(any_database, job_id, 1).next_round == 2
    assert cancelled == [1]
    assert {item.state for item in items_of(any_database, job_id) if item.round == 2} == {
        "cancelled"
    }


def test_a_job_that_is_tried_again_while_its_round_closes_waits_in_its_newest_round(any_database):
    job_id = plan_model(any_database, register(any_database, 0), ["Conv2d", "ReLU"])
    failing, *_ = items_of(any_database, job_id, "tuple")
    items.fail(any_database, claim(any_database, failing), "raised", "no")
    measure(any_database, job_id)
    with meanwhile(
        any_database, "INSERT INTO verdict", lambda: jobs.retry_failed(any_database, job_id)
    ) as again:
        assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert again == [1]
    assert verdicts(any_database, job_id) == []
    with any_database.read() as session:
        assert session.get_one(tables.Job, job_id).state == "open"


def observe(database, job_id):
    """The card runs the first call's operator otherwise; the id of what it showed."""
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        calls = session.exec(select(tables.Call)).all()
        extra = session.get_one(tables.Operator, calls[0].operator_id).model_copy(
            update={"id": "observed"}
        )
        session.add(tables.Operator(**extra.model_dump()))
        session.flush()
        observed = [
            CapturedCall(0, "", "observed", (), ()),
            CapturedCall(1, "", calls[1].operator_id, (), ()),
        ]
        return captures.store_capture(
            session,
            observed,
            tables.Capture(
                variant_id=job.variant_id,
                device_type="cpu",
                grad=False,
                torch="t",
                launch="eager",
                origin="observed",
            ),
        )


def test_other_operators_on_the_card_than_predicted_make_a_further_round(any_database):
    job_id = plan_model(any_database, register(any_database, 0), ["Conv2d", "ReLU"])
    measure(any_database, job_id)
    observe(any_database, job_id)
    closed = close_round(any_database, job_id, 1)
    assert (closed.closing, closed.next_round) == (Closing.NEXT, 2)
    assert [item.subject_id for item in items_of(any_database, job_id) if item.round == 2] == [
        "observed"
    ]
    assert close_round(any_database, job_id, 1).closing is Closing.ALREADY
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 2).closing is Closing.DONE
    assert [verdict.round for verdict in verdicts(any_database, job_id)] == [1, 2]


def test_what_the_card_shows_that_it_does_not_run_is_not_measured_and_not_tried_again(any_database):
    (card,) = register(any_database, 0)
    job_id = plan_model(any_database, [card], ["Conv2d", "ReLU"])
    assert items.drop_not_run(any_database, job_id, observe(any_database, job_id)) == 1
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 1).closing is Closing.NEXT
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 2).closing is Closing.DONE
    assert jobs.retry_failed(any_database, job_id) == 0
    with any_database.read() as session:
        counts = report.build(session, job_id).readings
    assert (counts.not_run, counts.cancelled, counts.failed, counts.measured) == (1, 0, 0, 3)


def test_what_a_card_did_not_see_is_named_by_its_label(any_database):
    job_id = plan_model(any_database, register(any_database, 0), ["Conv2d", "ReLU"])
    with any_database.read() as session:
        capture_id = session.get_one(tables.Round, (job_id, 1)).capture_id
        operator = session.exec(select(tables.Operator)).first()
    told = [f"predicted, but not run on the card: 1x {operator.id}", "gap: aten.mul at ''"]
    captures.store_observed(
        any_database,
        capture_id,
        Verification(missing={operator.id: 1}, differences=tuple(told)),
        card_id="CPU-0",
    )
    with any_database.read() as session:
        kept = session.get_one(tables.Capture, capture_id).verification
    assert kept["differences"] == [
        f"predicted, but not run on the card: 1x {operator.label}",
        told[1],
    ]
    assert kept["missing"] == {operator.id: 1}


def test_what_a_card_says_of_a_prediction_is_asked_once_a_job_and_renewed_with_the_next(
    any_database,
):
    def asked(job_id):
        with any_database.read() as session:
            capture_id = session.get_one(tables.Round, (job_id, 1)).capture_id
        return captures.predicted_counts(any_database, capture_id, job_id, card)[1], capture_id

    (card,) = register(any_database, 0)
    (other,) = register(any_database, 1, model="another")
    first = plan_model(any_database, [card], ["Conv2d", "ReLU"])
    awaited, capture_id = asked(first)
    assert awaited
    captures.store_observed(any_database, capture_id, Verification(matches=True), card_id=card)
    assert asked(first) == (False, capture_id)
    with any_database.write() as session:  # before the clock was set back by an hour
        capture = session.get_one(tables.Capture, capture_id)
        before = capture.verification
        capture.verification = {**before, "read_at_s": before["read_at_s"] + 3600}
    assert asked(first) == (True, capture_id)
    with any_database.write() as session:
        session.get_one(tables.Capture, capture_id).verification = before
    with any_database.write() as session:  # a job that was made after that
        session.get_one(tables.Job, first).created_at_s += 1.0
    assert asked(first) == (True, capture_id)
    with any_database.write() as session:  # it saves card time
        job = session.get_one(tables.Job, first)
        job.request = {**job.request, "within": 0.01}
    assert asked(first) == (False, capture_id)
    with any_database.write() as session:
        capture = session.get_one(tables.Capture, capture_id)
        capture.verification = {**capture.verification, "card": other}
    assert asked(first) == (True, capture_id)


def test_the_accuracy_loop_adds_operators_until_there_are_none_left(any_database):
    (card,) = register(any_database, 0)
    job_id = plan_model(
        any_database,
        [card],
        ["Conv2d", "ReLU"],
        operators=("auto",),
        scope=("Conv2d",),
        target=0.999,
    )
    assert [item.role for item in items_of(any_database, job_id)] == ["tuple", "whole"]
    rounds = 0
    while True:
        rounds += 1
        measure(any_database, job_id)
        if close_round(any_database, job_id, rounds).closing is not Closing.NEXT:
            break
    assert rounds == 2
    with any_database.read() as session:
        assert session.get_one(tables.Job, job_id).state == "done"
        assert session.get(tables.SignificantOperator, "ReLU") is not None


@pytest.mark.parametrize("changes", [{"flags": ("busy_host",)}, {"time_us": Figure(20.0, 0.01)}])
def test_the_accuracy_loop_adds_nothing_to_a_sum_that_says_nothing_or_is_too_large(
    database, changes
):
    (card,) = register(database, 0)
    job_id = plan_model(
        database, [card], ["Conv2d", "ReLU"], operators=("auto",), scope=("Conv2d",), target=0.9
    )
    for item in items_of(database, job_id):
        changed = item.role == "tuple" or "flags" in changes
        reading = dataclasses.replace(READING, **changes) if changed else READING
        complete(database, claim(database, item), card, reading=reading)
    assert close_round(database, job_id, 1).closing is Closing.DONE
    with database.read() as session:
        assert significant(session) == set()
    (verdict,) = verdicts(database, job_id)
    if verdict.outcome == "fail":
        reason = (
            "No operator type was added, because the sum is already larger than the whole model."
        )
        assert verdict.details["reasons"][-1] == reason


def test_where_no_further_round_can_be_planned_the_verdict_stands_and_says_why(any_database):
    (card,) = register(any_database, 0)
    job_id = plan_model(
        any_database,
        [card],
        ["Conv2d", "ReLU"],
        operators=("auto",),
        scope=("Conv2d",),
        target=0.999,
    )
    measure(any_database, job_id)
    with any_database.write() as session:
        job = session.get_one(tables.Job, job_id)
        job.request = {**job.request, "cards": [card, "GPU-gone"]}
        session.add(job)
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    (verdict,) = verdicts(any_database, job_id)
    assert verdict.outcome == "fail"
    assert "No further round could be planned" in verdict.details["reasons"][-1]


def test_readings_of_two_softwares_are_not_summed(any_database):
    (card,) = register(any_database, 0)
    job_id = plan_model(any_database, [card], ["Conv2d", "ReLU"])
    first, *others = items_of(any_database, job_id)
    complete(any_database, claim(any_database, first), card)
    newer = dataclasses.replace(SOFTWARE, torch="9.9.9")
    with any_database.write() as session:
        content.store_software(session, newer)
    for item in others:
        complete(
            any_database,
            claim(any_database, item, software_id=newer.id),
            card,
            software_id=newer.id,
        )
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    (verdict,) = verdicts(any_database, job_id)
    (reason,) = verdict.details["reasons"]
    assert verdict.outcome == "none"
    assert f"2 with torch 9.9.9 and 1 with torch {SOFTWARE.torch}" in reason
    assert "run the job again" in reason


def test_a_round_that_cannot_be_judged_ends_its_job_with_the_reason(any_database):
    job_id = plan(any_database, register(any_database, 0))
    measure(any_database, job_id)
    assert (
        close_round(any_database, job_id, 1, failed="The sum could not be made: KeyError").closing
        is Closing.DONE
    )
    assert close_round(any_database, job_id, 1, failed="again").closing is Closing.ALREADY
    assert close_round(any_database, job_id, 1).closing is Closing.ALREADY
    (verdict,) = verdicts(any_database, job_id)
    assert (verdict.outcome, verdict.details["reasons"]) == (
        "none",
        ["The sum could not be made: KeyError"],
    )
