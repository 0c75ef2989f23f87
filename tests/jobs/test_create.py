"""From a request to a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import update
from sqlmodel import select

from farm.errors import NoSuchJob, UnknownOperator, UsageError
from farm.jobs import jobs
from farm.jobs.captures import checked_capture
from farm.jobs.closing import Closing, close_round
from farm.jobs.create import continue_planning, open_job
from farm.jobs.rounds import LEAST_PRECISE
from farm.models import catalog
from farm.operators import sweep_builder as sweeps
from farm.requests.resolved import ResolvedRequest
from farm.settings import settings
from farm.store.captures import counts
from farm.store.tables import CardRow, Item, Job, Round
from farm.training.version import versioned
from farm.types.protocol import Protocol
from farm.types.request import Request, Sweep
from farm.types.variant import Variant
from tasks import control
from tests.planned import claim, complete, items_of, plan, register
from tests.statements import values_at_once

SWEEP = Request(
    sweep=Sweep("Linear", {"in_features": (16, 32), "out_features": (16,)}, "a test"),
    protocol=Protocol(launch="eager"),
)
MODEL = Request(
    variant=Variant("alexnet", batch=1, input_size=224), protocol=Protocol(launch="eager")
)


def test_cards_may_register_while_a_request_is_extracted(database):
    opened = open_job(
        database,
        ResolvedRequest.of(SWEEP, ["SIM-0"]),
        wait_for_workers=lambda: register(database, 0),
    )
    assert (opened.tuples, opened.calls, opened.new, opened.reused) == (2, 2, 2, 0)


def test_no_statement_of_a_plan_has_the_values_of_many_items(any_database):
    with values_at_once(any_database) as numbers:
        plan(any_database, register(any_database, 0), number=100)
    assert max(numbers) < 2 * 100


def test_operators_that_a_model_lacks_are_refused_before_there_is_a_job(database):
    cards = register(database, 0)
    with pytest.raises(UnknownOperator, match="has none of the operators BatchNorm2d"):
        open_job(database, ResolvedRequest.of(MODEL.replace(operators=("BatchNorm2d",)), cards))
    with database.read() as session:
        assert session.exec(select(Job)).all() == []


def test_a_model_is_extracted_once_and_its_job_has_all_its_calls(database):
    cards = register(database, 0)
    request = MODEL.replace(operators=("Linear",))
    capture_id = checked_capture(database, ResolvedRequest.of(request, cards))
    assert checked_capture(database, ResolvedRequest.of(request, cards)) == capture_id
    opened = open_job(database, replace(ResolvedRequest.of(request, cards), capture_id=capture_id))
    with database.read() as session:
        calls = counts(session, capture_id)
    assert (opened.tuples, opened.calls) == (len(calls), sum(calls.values()))
    assert opened.new == 3 + 1, "three kinds of Linear, and the whole"


def test_a_step_that_a_card_cannot_hold_is_refused_before_there_is_a_job(database):
    cards = register(database, 0, 1)
    step = catalog.variant("squeezenet1_1", 4, input_size=64, step="training")
    request = Request(variant=step, protocol=Protocol(launch="eager"))
    with database.write() as session:
        session.get_one(CardRow, cards[0]).memory_bytes = 10_000_000
        session.get_one(CardRow, cards[1]).memory_bytes = 10**9
    with pytest.raises(UsageError, match=r"does not fit into the 0\.0 GB") as caught:
        open_job(database, ResolvedRequest.of(request, cards))
    assert "farm memory squeezenet1_1 --fit" in caught.value.next_step
    with database.read() as session:
        assert session.exec(select(Job)).all() == []
    assert open_job(database, ResolvedRequest.of(request, cards[1:])).new > 100


TEN = Request(
    sweep=Sweep("Linear", {"in_features": tuple(range(1, 11)), "out_features": (4,)}, "ten"),
    protocol=Protocol(launch="eager"),
)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(sweeps, "FIRST_BATCH", 2)
    monkeypatch.setattr(sweeps, "BATCH", 3)


def test_a_sweep_is_measured_while_it_is_planned_and_its_round_stays_open_until_it_is(
    any_database, small_batches
):
    (card,) = register(any_database, 0)
    seen = []

    def grown(opened, tried):
        for item in items_of(any_database, opened.job_id):
            if item.state == "waiting":
                complete(any_database, claim(any_database, item), card)
        seen.append((tried, opened.tuples, close_round(any_database, opened.job_id, 1).closing))
        with any_database.read() as session:
            assert control._unfinished(session, "") == []
            assert jobs.progress(session, opened.job_id).message == "more items are being planned"

    opened = open_job(any_database, ResolvedRequest.of(TEN, [card]), grown=grown)
    assert seen == [
        (2, 2, Closing.OPEN),
        (5, 5, Closing.OPEN),
        (8, 8, Closing.OPEN),
        (10, 10, Closing.OPEN),
    ]
    assert (opened.tuples, opened.new, opened.reused) == (10, 10, 0)
    assert len(items_of(any_database, opened.job_id)) == 10
    assert close_round(any_database, opened.job_id, 1).closing is Closing.DONE


def test_combinations_of_different_batches_that_give_the_same_tuple_are_one_item(
    any_database, small_batches
):
    cards = register(any_database, 0)
    twice = Request(
        sweep=Sweep("Linear", {**TEN.sweep.grid, "batch": (1, 1)}, "twice"), protocol=TEN.protocol
    )
    opened = open_job(any_database, ResolvedRequest.of(twice, cards))
    assert (opened.tuples, opened.new, opened.reused) == (10, 10, 0)
    assert len(items_of(any_database, opened.job_id)) == 10


def killed_after(batches):
    """A planner that does nothing more after so many batches, and says nothing."""

    def grown(opened, tried):
        if opened.tuples > 2 + 3 * (batches - 2):
            raise SystemExit

    return grown


def test_a_job_whose_planner_was_killed_is_taken_back_and_can_be_gone_on_with(
    any_database, small_batches
):
    (card,) = register(any_database, 0)
    with pytest.raises(SystemExit):
        open_job(any_database, ResolvedRequest.of(TEN, [card]), grown=killed_after(2))
    with any_database.read() as session:
        job_id = session.exec(select(Job.id)).one()
    done, *_ = items_of(any_database, job_id)
    complete(any_database, claim(any_database, done), card)
    control._cancel_interrupted_planning(any_database, "")
    with any_database.write() as session:
        assert session.get_one(Job, job_id).state == "open", "it may only be slow"
        session.execute(
            update(Round).values(planning_at_s=Round.planning_at_s - control.PLANNING_PATIENCE_S)
        )
    control._cancel_interrupted_planning(any_database, "")
    with any_database.read() as session:
        assert session.get_one(Job, job_id).state == "cancelled"
        assert "farm resume --failed" in jobs.progress(session, job_id).message
    assert jobs.retry_failed(any_database, job_id) == 4
    control._cancel_interrupted_planning(any_database, "")
    with any_database.read() as session:
        job = session.get_one(Job, job_id)
    rest = continue_planning(any_database, job)
    assert (rest.tuples, rest.new) == (5, 5)
    items = items_of(any_database, job_id)
    assert (len(items), len({item.subject_id for item in items})) == (10, 10)
    assert [item.state for item in items].count("done") == 1


def test_who_cancels_a_job_while_it_is_planned_ends_that(any_database, small_batches):
    (card,) = register(any_database, 0)
    with pytest.raises(NoSuchJob, match="ended before its planning was complete"):
        open_job(
            any_database,
            ResolvedRequest.of(TEN, [card]),
            grown=lambda opened, _: jobs.cancel(any_database, opened.job_id),
        )
    with any_database.read() as session:
        assert set(session.exec(select(Item.state))) == {"cancelled"}


def test_each_tuple_is_only_as_precise_as_its_share_of_the_sum_needs(database):
    """With half-widths r / sqrt(share), the sum has the half-width r."""
    usual = open_job(database, ResolvedRequest.of(MODEL, register(database, 0)))
    opened = open_job(
        database, ResolvedRequest.of(MODEL.replace(within=0.01, reuse="none"), ["SIM-0"])
    )
    assert opened.expected_s < 0.7 * usual.expected_s
    items = items_of(database, opened.job_id, "tuple")
    widths = [item.half_width for item in items]
    assert 0 < min(widths) < 0.01 < max(widths) <= LEAST_PRECISE
    assert {item.half_width for item in items_of(database, usual.job_id)} == {0.0}
    rough = claim(database, max(items, key=lambda item: item.half_width))
    assert rough.work.stopping.rough
    assert rough.work.stopping.time_half_width == max(widths)


def test_a_budget_makes_the_tuples_as_precise_as_it_allows(database):
    cards = register(database, 0)
    large, small = (
        open_job(database, ResolvedRequest.of(MODEL.replace(budget_s=seconds), cards))
        for seconds in (600.0, 16.0)
    )
    assert small.expected_s <= 16.0 < large.expected_s
    assert all(item.half_width == 0 for item in items_of(database, large.job_id))
    assert max(item.half_width for item in items_of(database, small.job_id)) > 0.01


def test_a_users_model_in_another_dtype_says_why_earlier_readings_do_not_serve(
    database, tmp_path, monkeypatch
):
    (tmp_path / "measured_in_16_bits.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(8, 8).half().eval(), torch.ones(2, "
        "8).half()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(settings(), "models", {"sixteen": "measured_in_16_bits:net"})
    cards = register(database, 0)

    def opened(**fields):
        variant = versioned(catalog.variant("sixteen", 2, **fields))
        return open_job(
            database,
            ResolvedRequest.of(Request(variant=variant, protocol=Protocol(launch="eager")), cards),
        )

    before = opened(dtype="float32")
    now = opened()
    assert before.changed == ""
    assert "sixteen is measured in float16" in now.changed
    assert f"job {before.job_id} measured it in float32" in now.changed
    assert (now.new, now.reused) == (1 + 1, 0)
    assert opened().changed == ""
