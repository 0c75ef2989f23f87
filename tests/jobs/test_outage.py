"""An outage is told once per cause and once that it is over, however often a loop meets it."""

import logging

import pytest

from farm.errors import BrokerUnreachable, DatabaseUnreachable
from farm.jobs import outage as module
from farm.jobs.outage import Outage


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "farm.test")
    return lambda: [record.getMessage() for record in caplog.records]


def test_each_cause_and_the_end_are_told_once(told, monkeypatch):
    outage = Outage(logging.getLogger("farm.test"), "No work")
    outage.over()
    assert told() == []
    away, full = (
        DatabaseUnreachable("It is away.", "Start it."),
        DatabaseUnreachable("It is full.", "Make room."),
    )
    for error in (away, away, full, away):
        outage.note(error)
    assert outage.lasts
    outage.over()
    outage.over()
    assert not outage.lasts
    first = [
        "No work: It is away. Start it.",
        "No work: It is full. Make room.",
        "No work: it works again",
    ]
    assert told() == first
    outage.note(away)
    outage.over()
    assert told() == first, "it comes and goes"
    monkeypatch.setattr(module, "SAME_OUTAGE_S", 0.0)
    outage.note(away)
    outage.over()
    assert told() == [*first, first[0], first[2]]


def test_one_refusal_of_a_broker_is_one_cause_whichever_command_met_it(told):
    outage = Outage(logging.getLogger("farm.test"), "No work")
    for command in ("ZADD", "PUBLISH"):
        outage.note(BrokerUnreachable(f"The broker refuses commands: {command}.", "Give rights."))
    (message,) = told()
    assert message.endswith("ZADD. Give rights.")


def test_an_unexpected_error_is_told_once_with_its_origin(told, caplog):
    outage = Outage(logging.getLogger("farm.test"), "No work")
    for _ in range(2):
        try:
            raise ValueError("strange")
        except ValueError as error:
            outage.note(error)
    assert told() == ["No work: strange "]
    assert "Traceback" in caplog.text
