"""What a job would come to, told before there is one."""

from __future__ import annotations

import sqlalchemy
from sqlmodel import SQLModel, select

from farm.devices.device import Card
from farm.jobs.create import open_job
from farm.jobs.dry_run import START_S, dry_running
from farm.requests.resolved import ResolvedRequest
from farm.store import tables
from farm.types.protocol import Protocol
from farm.types.request import Request, Sweep
from farm.types.variant import Variant
from tests.planned import claim, complete, items_of, register

MODEL = Request(
    variant=Variant("alexnet", batch=1, input_size=224), protocol=Protocol(launch="eager")
)
SWEEP = Request(
    sweep=Sweep("Linear", {"in_features": (16, 32), "out_features": (16,)}, "a test"),
    protocol=Protocol(launch="eager"),
)


def rows_of(database):
    with database.read() as session:
        return {
            name: session.execute(sqlalchemy.select(table)).all()
            for name, table in SQLModel.metadata.tables.items()
        }


def test_what_is_foreseen_is_what_comes_and_nothing_is_written(any_database):
    cards = register(any_database, 0, 1)
    for request in (MODEL, SWEEP):
        for _ in range(2):  # with nothing known, then with one reading
            before = rows_of(any_database)
            with dry_running(any_database) as rehearsal:
                foreseen = rehearsal.preview(ResolvedRequest.of(request, cards))
                again = rehearsal.preview(ResolvedRequest.of(request, cards))
            assert rows_of(any_database) == before
            opened = open_job(any_database, ResolvedRequest.of(request, cards))
            assert (foreseen.tuples, foreseen.calls, foreseen.new, foreseen.reused) == (
                opened.tuples,
                opened.calls,
                opened.new,
                opened.reused,
            )
            assert (again.new, again.reused, again.expected_s) == (
                0,
                opened.new + opened.reused,
                0.0,
            )
            item = next(
                item
                for item in items_of(any_database, opened.job_id, "tuple")
                if item.state == "waiting"
            )
            complete(any_database, claim(any_database, item), item.card_id)
        assert foreseen.reused > 0
        assert foreseen.expected_s > 0


def test_before_there_is_a_database_everything_is_new():
    card = Card(id="CPU-1", kind="cpu", model="a CPU", memory_bytes=1, host="here")
    with dry_running(None, [card]) as rehearsal:
        foreseen = rehearsal.preview(ResolvedRequest.of(SWEEP, [card.id]))
    assert (foreseen.tuples, foreseen.new, foreseen.reused) == (2, 2, 0)


def test_the_expected_time_contains_the_start_of_the_workers_once():
    card = Card(id="CPU-1", kind="cpu", model="a CPU", memory_bytes=1, host="here")
    other = SWEEP.replace(
        sweep=Sweep("Linear", {"in_features": (64,), "out_features": (64,)}, "another test")
    )
    with dry_running(None, [card]) as rehearsal:
        first = rehearsal.preview(ResolvedRequest.of(SWEEP, [card.id]))
        second = rehearsal.preview(ResolvedRequest.of(other, [card.id]))
        again = rehearsal.preview(ResolvedRequest.of(SWEEP, [card.id]))
    assert first.expected_s > START_S > second.expected_s > 0
    assert again.expected_s == 0, "nothing is left to measure"


def test_readings_of_another_software_than_is_installed_do_not_serve(database):
    cards = register(database, 0)
    opened = open_job(database, ResolvedRequest.of(SWEEP, cards))
    for item in items_of(database, opened.job_id, "tuple"):
        complete(database, claim(database, item), item.card_id)
    with database.read() as session:
        row = session.exec(select(tables.CardRow)).one()
    own = Card(id=row.id, kind="simulated", model=row.model, memory_bytes=0, host="here")
    with dry_running(database, [own]) as rehearsal:
        assert rehearsal.preview(ResolvedRequest.of(SWEEP, cards)).new == 2
    with dry_running(database) as rehearsal:
        assert rehearsal.preview(ResolvedRequest.of(SWEEP, cards)).new == 0


def test_configurations_of_fast_and_slow_memory_are_items_of_their_own(database):
    cards = register(database, 0)
    placed = SWEEP.replace(placements="all")
    with dry_running(database) as rehearsal:
        plain, foreseen = (
            rehearsal.preview(ResolvedRequest.of(SWEEP, cards)),
            rehearsal.preview(ResolvedRequest.of(placed, cards)),
        )
    assert (plain.new, foreseen.new) == (
        2,
        2 * 15,
    )  # input, weight, bias and output: 16 each, all fast is known by then
    opened = open_job(database, ResolvedRequest.of(placed, cards))
    items = items_of(database, opened.job_id, "tuple")
    assert len(items) == opened.new == 2 * 16
    assert len({item.protocol_id for item in items}) == 16
    complete(database, claim(database, items[-1]), items[-1].card_id)
    with dry_running(database) as rehearsal:
        again = rehearsal.preview(ResolvedRequest.of(placed, cards))
    assert again.reused == 1
