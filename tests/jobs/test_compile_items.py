"""Items that compile a model and list its kernels: the next round measures them. In databases of
schema 0018 they were whole models, which failed with the reason `kernels_listed`."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlmodel import select

from farm.jobs import items, jobs
from farm.jobs.closing import Closing, close_round
from farm.jobs.moving import give_up
from farm.operators.captured import CapturedCall
from farm.report import report
from farm.store import captures, content, tables
from farm.store.database import Database
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.variant import Variant
from tests.farms import store_operators
from tests.planned import claim, complete, items_of, plan_model, register

LISTED = "kernels_listed: The model was compiled; its kernels are measured in the next round."
#: When a farm of the older version is upgraded: after the planning, during the compilation, after
#: it, after it was tried in vain, and after the job was cancelled.
MOMENTS = ("waiting", "claimed", "listed", "failed", "cancelled")


def plan_compiled(database: Database, cards: list[str], batch: int = 1, **changes: Any) -> str:
    """Plan a job of a compiled model whose kernels are unknown; return its id."""
    variant = Variant("resnet18", batch, 224, compile="default")
    like = tables.Capture(
        variant_id=variant.id,
        device_type="cpu",
        grad=False,
        torch="t",
        launch="eager",
        origin="predicted",
        card_model="a card",
    )
    with database.write() as session:
        content.store_variant(session, variant)
        capture_id = captures.store_capture(session, (), like)
    request = Request(variant=variant, protocol=Protocol(launch="eager", data="copied"), **changes)
    return jobs.create(database, request, cards, scope=("all",), capture_id=capture_id).job_id


def compile_item(database: Database, job_id: str) -> tables.Item:
    (item,) = (item for item in items_of(database, job_id) if item.state != "failed")
    return item


def store_kernels(database: Database, job_id: str) -> None:
    """Store what a card's process finds when it compiles the model: two kernels."""
    ids = store_operators(database, ["", ""])
    calls = [CapturedCall(index, "", id_, (), ()) for index, id_ in enumerate(ids)]
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        (planned,) = session.exec(
            select(tables.Capture).where(tables.Capture.variant_id == job.variant_id)
        )
        same = {name: getattr(planned, name) for name in captures.CAPTURE_KEY}
        compiled = {"choices": {"kernels": {}, "algorithms": {}}, "graph_breaks": {}}
        captures.store_capture(
            session, calls, tables.Capture(**same, origin="observed", compiled=compiled)
        )


def list_kernels(database: Database, job_id: str, claimed: items.Claim | None = None) -> None:
    claimed = claimed or claim(database, compile_item(database, job_id))
    assert claimed.lists_kernels
    store_kernels(database, job_id)
    assert items.listed(database, claimed).accepted


def finish(database: Database, job_id: str, number: int = 2) -> tables.VerdictRow:
    """Measure all open items, close the last round and return its verdict."""
    for item in items_of(database, job_id):
        if item.state in ("waiting", "claimed"):
            claimed = claim(database, item, item.holder or "somebody")
            assert not claimed.lists_kernels
            complete(database, claimed, item.card_id)
    assert close_round(database, job_id, number).closing is Closing.DONE
    return verdict_of(database, job_id, number)


def verdict_of(database: Database, job_id: str, number: int) -> tables.VerdictRow:
    with database.read() as session:
        return session.exec(
            select(tables.VerdictRow).where(
                tables.VerdictRow.job_id == job_id, tables.VerdictRow.round == number
            )
        ).one()


def facts(verdict: tables.VerdictRow) -> dict[str, Any]:
    """What a verdict says, without its job and its model."""
    details = {**verdict.details, "wholes": len(verdict.details.get("wholes", ()))}
    kept = ("outcome", "accuracy_time", "coverage", "sum_time_us", "whole_time_us")
    return {name: getattr(verdict, name) for name in kept} | {"reasons": details["reasons"]}


def states(database: Database, job_id: str) -> list[tuple[str, int, str]]:
    return sorted((item.role, item.round, item.state) for item in items_of(database, job_id))


def test_a_model_is_compiled_first_and_measured_with_its_kernels(any_database):
    job_id = plan_compiled(any_database, register(any_database, 0))
    assert states(any_database, job_id) == [("compile", 1, "waiting")]
    list_kernels(any_database, job_id)
    assert states(any_database, job_id) == [("compile", 1, "done")]
    closed = close_round(any_database, job_id, 1)
    assert (closed.closing, closed.next_round) == (Closing.NEXT, 2)
    first = verdict_of(any_database, job_id, 1)
    assert first.outcome == "none"
    assert [whole["reason"] for whole in first.details["wholes"]] == [LISTED]
    waiting = [("tuple", 2, "waiting")] * 2 + [("whole", 2, "waiting")]
    assert states(any_database, job_id) == [("compile", 1, "done"), *waiting]
    last = finish(any_database, job_id)
    assert last.whole_time_us == 10.0
    with any_database.read() as session:
        counts = report.build(session, job_id).readings
    assert (counts.items, counts.measured, counts.failed) == (3, 3, 0)


def test_a_reading_of_the_whole_model_does_not_replace_the_list_of_its_kernels(any_database):
    cards = register(any_database, 0)
    job_id = plan_compiled(any_database, cards)
    list_kernels(any_database, job_id)
    close_round(any_database, job_id, 1)
    finish(any_database, job_id)
    with any_database.write() as session:
        for row in session.exec(select(tables.Capture).where(tables.Capture.origin == "observed")):
            row.torch = "another"
            session.add(row)
    again = plan_compiled(any_database, cards)
    assert states(any_database, again) == [("compile", 1, "waiting")]
    assert claim(any_database, compile_item(any_database, again)).lists_kernels


def test_two_jobs_do_not_compile_a_model_at_the_same_time(any_database):
    cards = register(any_database, 0)
    first, second = (plan_compiled(any_database, cards) for _ in range(2))
    claimed = claim(any_database, compile_item(any_database, first))
    declined = claim(any_database, compile_item(any_database, second), "another")
    assert declined.why is items.DeclineReason.DEFERRED
    store_kernels(any_database, first)
    closed = items.listed(any_database, claimed)
    assert closed.woken == (compile_item(any_database, second).id,)


def test_a_cancelled_compilation_compiles_when_its_job_is_tried_again(any_database):
    job_id = plan_compiled(any_database, register(any_database, 0))
    claimed = claim(any_database, compile_item(any_database, job_id))
    jobs.cancel(any_database, job_id)
    assert items.listed(any_database, claimed).accepted
    assert states(any_database, job_id) == [("compile", 1, "cancelled")]
    assert jobs.retry_failed(any_database, job_id) == 1
    list_kernels(any_database, job_id)
    assert close_round(any_database, job_id, 1).next_round == 2


def test_a_job_that_ended_after_its_list_of_kernels_goes_on_when_it_is_tried_again(any_database):
    job_id = plan_compiled(any_database, register(any_database, 0))
    list_kernels(any_database, job_id)
    jobs.cancel(any_database, job_id)
    assert jobs.retry_failed(any_database, job_id) == 0, "it has nothing to repeat"
    assert close_round(any_database, job_id, 1).next_round == 2
    finish(any_database, job_id)
    assert jobs.retry_failed(any_database, job_id) == 0
    with any_database.read() as session:
        assert session.get_one(tables.Job, job_id).state == "done"


def test_another_card_compiles_and_measures_for_a_card_that_left(any_database):
    lost, peer = register(any_database, 0, 1)
    job_id = plan_compiled(any_database, [lost])
    with any_database.read() as session:
        peers = [session.get_one(tables.CardRow, peer)]
    give_up(any_database, [lost], peers)
    assert states(any_database, job_id) == [("compile", 1, "failed"), ("compile", 1, "waiting")]
    list_kernels(any_database, job_id)
    assert close_round(any_database, job_id, 1).next_round == 2
    roles = {(item.role, item.card_id) for item in items_of(any_database, job_id) if item.round > 1}
    assert ("whole", peer) in roles
    assert ("compile", lost) not in roles


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_is_open_during_the_upgrade_ends_with_the_same_verdict(any_database, moment):
    cards = register(any_database, 0)
    native = plan_compiled(any_database, cards, batch=2)
    list_kernels(any_database, native)
    assert close_round(any_database, native, 1).next_round == 2
    wanted = facts(finish(any_database, native))

    job_id = plan_compiled(any_database, cards)
    claimed = None
    if moment in ("claimed", "listed", "failed"):
        claimed = claim(any_database, compile_item(any_database, job_id))
    if moment == "listed":
        store_kernels(any_database, job_id)
        reason, _, message = LISTED.partition(": ")
        items.fail(any_database, claimed, reason, message)
    if moment == "failed":
        items.fail(any_database, claimed, "raised", "RuntimeError: no shape is known.")
    if moment == "cancelled":
        jobs.cancel(any_database, job_id)
    as_before(any_database)

    any_database.upgrade()
    assert {item.role for item in items_of(any_database, job_id)} == {"compile"}
    assert {item.role for item in items_of(any_database, native)} == {"compile", "tuple", "whole"}
    if moment in ("failed", "cancelled"):
        assert jobs.retry_failed(any_database, job_id) == 1
    if moment != "listed":
        list_kernels(any_database, job_id, claimed if moment == "claimed" else None)
    assert states(any_database, job_id) == [("compile", 1, "done")]
    assert close_round(any_database, job_id, 1).next_round == 2
    assert facts(finish(any_database, job_id)) == wanted


def test_a_job_whose_kernels_are_known_and_an_eager_job_stay_as_they_are(any_database):
    cards = register(any_database, 0)
    job_id = plan_compiled(any_database, cards)
    list_kernels(any_database, job_id)
    close_round(any_database, job_id, 1)
    eager = plan_model(any_database, cards, ["Conv2d"])
    before = states(any_database, job_id), states(any_database, eager)
    as_before(any_database)
    any_database.upgrade()
    assert (states(any_database, job_id), states(any_database, eager)) == before


def as_before(database: Database) -> None:
    """Give the items of compiled models the form that they had in schema 0018."""
    with database.engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE item SET role = 'whole' WHERE role = 'compile' AND job_id NOT IN "
                "(SELECT job_id FROM item WHERE role = 'whole')"
            )
        )
        connection.execute(text("ALTER TABLE model_variant DROP COLUMN quantize"))  # of 0020
        connection.execute(text("UPDATE alembic_version SET version_num = '0018'"))
