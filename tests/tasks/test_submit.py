"""Submitting, where it is interrupted."""

import pytest
from sqlmodel import select

from farm.benchmark.protocol import Protocol, Stopping
from farm.request import Request, Sweep
from farm.store.tables import Item, Job
from tasks import submit
from tests.planned import register


def test_ctrl_c_while_a_job_is_published_leaves_none_open(database, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "publish_round", interrupted)
    request = Request(
        sweep=Sweep("Linear", {"in_features": (16,), "out_features": (16,)}, "a test"),
        protocol=Protocol(launch="eager"),
        stopping=Stopping(),
    )
    with pytest.raises(KeyboardInterrupt):
        submit.submit(database, request, register(database, 0))
    with database.read() as session:
        assert [job.state for job in session.exec(select(Job))] == ["cancelled"]
        assert [item.state for item in session.exec(select(Item))] == ["cancelled"]
