"""What a card's pool process does with one message: against a real database, with its benchmark process replaced."""

from __future__ import annotations

import pytest

from farm import items
from farm.benchmark.client import Answer
from farm.benchmark.simulated import SOFTWARE
from farm.devices.device import Card
from farm.spool import Spool
from tasks import measure
from tests.planned import READING, claim, items_of, plan, readings, register

CARD = Card(id="SIM-0", kind="simulated", model="a card", memory_bytes=0, host="here", index=0)


class Benchmark:
    """One that is ready at once, reads the same of everything, and counts what was asked of it."""

    card = CARD
    unhealthy = ""

    def __init__(self):
        self.asked = []

    def wait_ready(self):
        self.asked.append("ready")
        return SOFTWARE

    def measure(self, subject, *_, **__):
        self.asked.append(subject.id)
        return Answer(READING, SOFTWARE, CARD)


@pytest.fixture
def worker(any_database, tmp_path):
    register(any_database, 0)
    return measure.CardWorker("SIM-0", "holder-0", any_database, Benchmark(), Spool(tmp_path / "spool"), SOFTWARE)


def test_a_reading_that_the_database_refuses_is_kept_and_told(worker, any_database, monkeypatch):
    (item,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    held = claim(any_database, item, "holder-0")
    with monkeypatch.context() as patched:
        patched.setattr(items, "complete", refuse)
        with pytest.raises(ValueError, match="not this one"):
            measure._write_down(worker, held, Answer(READING, SOFTWARE, CARD))
    assert worker.spool.items() == {item.id}
    (closed,) = worker.spool.flush(any_database, "SIM-0")
    assert closed.accepted
    assert readings(any_database) == 1


def refuse(*_, **__):
    raise ValueError("not this one")
