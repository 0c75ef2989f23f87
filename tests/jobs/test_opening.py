"""From a request to a job."""

from __future__ import annotations

import pytest
from sqlmodel import select

from farm.errors import UnknownOperator
from farm.jobs.opening import open_job, tuples_of
from farm.store.calls import counts
from farm.store.tables import Job
from farm.words.protocol import Protocol, Variant
from farm.words.request import Request, Sweep
from tests.planned import register

SWEEP = Request(
    sweep=Sweep("Linear", {"in_features": (16, 32), "out_features": (16,)}, "a test"), protocol=Protocol(launch="eager")
)
MODEL = Request(variant=Variant("alexnet", batch=1, input_size=224), protocol=Protocol(launch="eager"))


def test_cards_may_register_while_a_request_is_taken_apart(database):
    opened = open_job(database, SWEEP, ["SIM-0"], ready=lambda: register(database, 0))
    assert (opened.tuples, opened.calls, opened.new, opened.reused) == (2, 2, 2, 0)


def test_operators_that_a_model_lacks_are_refused_before_there_is_a_job(database):
    cards = register(database, 0)
    with pytest.raises(UnknownOperator, match="has none of the operators BatchNorm2d"):
        open_job(database, MODEL.replace(operators=("BatchNorm2d",)), cards)
    with database.read() as session:
        assert session.exec(select(Job)).all() == []


def test_a_model_is_taken_apart_once_and_its_job_has_all_its_calls(database):
    cards = register(database, 0)
    request = MODEL.replace(operators=("Linear",))
    tuples = tuples_of(database, request, cards)
    assert tuples_of(database, request, cards).capture_id == tuples.capture_id
    opened = open_job(database, request, cards, tuples=tuples)
    with database.read() as session:
        calls = counts(session, tuples.capture_id)
    assert (opened.tuples, opened.calls) == (len(calls), sum(calls.values()))
    assert opened.new == 3 + 1, "three kinds of Linear, and the whole"
