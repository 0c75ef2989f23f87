"""Several hosts, each with an address of its own: they share a job, and one is cut off in the
middle of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from farm.store.database import Database
from tasks.servers import BrokerServer
from tests import slow
from tests.farms import QUICK, Farm, kill_all_of
from tests.faults.conftest import Hurt
from tests.servers import PostgresServer


@pytest.fixture
def middle(network):
    """The host of broker and database: (broker, a database, what every other host sets to reach
    both).
    """
    host = network.host()
    with contextlib.ExitStack() as stack:
        with host:
            broker = stack.enter_context(
                BrokerServer(
                    options={
                        "appendonly": "yes",
                        "port": "6379",
                        "bind": host.address,
                        "protected-mode": "no",
                    }
                )
            )
            postgres = stack.enter_context(PostgresServer(host.address))
        url = postgres.new_database()
        database = Database(url)
        stack.callback(database.close)
        database.upgrade()
        name = url.rpartition("/")[2].partition("?")[0]
        reached = {
            "FARM_BROKER_URL": f"redis://{host.address}:6379/0",
            "FARM_DATABASE_URL": postgres.url_over_tcp(name),
        }
        yield broker, database, reached


@pytest.fixture
def new_host(network, middle, tmp_path):
    """Plug in one more host: ``new_host("worker", FARM_SIMULATED_CARDS="1")`` is it and its farm,
    with that command.
    """
    broker, database, reached = middle
    with contextlib.ExitStack() as stack:

        def plug(*command, **settings):
            host = network.host()
            environment = {**_environment(), **host.environment(tmp_path), **reached, **settings}
            farm = Farm(database, environment, tmp_path / f"{host.name}.log")
            farm.from_here = {"FARM_BROKER_URL": broker.url}
            if command:
                with host:
                    stack.callback(kill_all_of, farm.start(*command))
            return host, farm

        yield plug


@pytest.fixture
def hosts(middle, new_host):
    """(what is hurt, two worker hosts)."""
    settings = {**QUICK, "FARM_SIMULATED_CARDS": "1"}
    (one, farm), (other, _) = [new_host("worker", **settings) for _ in range(2)]
    farm.wait_for(lambda: len(farm.alive()) == 2)
    return Hurt(farm, middle[0]), [one, other]


def _environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}


@slow.FAULT
def test_a_host_that_is_cut_off_and_comes_back_is_fenced_out(hosts):
    hurt, (cut, _) = hosts
    job_id = hurt.submit(["slow"] * 6, 2.5)
    card = f"SIM-{cut.name}-0"
    hurt.farm.wait_for(
        lambda: any(i.state == "claimed" and i.card_id == card for i in hurt.farm.items(job_id))
    )
    time.sleep(0.3)
    cut.cut()
    hurt.farm.wait_for(
        lambda: all(i.state == "done" for i in hurt.farm.items(job_id) if i.card_id == card)
    )
    cut.join()
    assert hurt.settled(job_id) == {"done": 6}
    hurt.farm.wait_for(lambda: sum(item.repeated for item in hurt.farm.items(job_id)) == 1)
    hurt.farm.wait_for(lambda: len(hurt.farm.alive()) == 2)
    again = hurt.submit(["slow"] * 4, 0.5)
    assert hurt.settled(again) == {"done": 4}


MODELS = """
import torch
from torch import nn

def steps():
    widths = (8, 16, 24, 32, 40, 48, 56)
    return nn.Sequential(*map(nn.Linear, widths, widths[1:])), torch.ones(2, 8)
"""


@slow.PROCESS
def test_a_model_is_measured_by_the_cpus_of_two_hosts_for_a_third(new_host, tmp_path):
    (tmp_path / "models_of_hosts.py").write_text(MODELS)
    model = {
        "FARM_MODELS": json.dumps({"steps": "models_of_hosts:steps"}),
        "FARM_MODELS_PATH": str(tmp_path),
    }
    hosts = [
        new_host("worker", "--card", "cpu", CUDA_VISIBLE_DEVICES="", **model) for _ in range(2)
    ]
    desk, farm = new_host(**model)
    farm.from_here = {}  # over its own cable
    farm.wait_for(lambda: len(farm.alive()) == 2)
    with desk:
        asked = farm.say("submit", "steps", "--quick", "--window", "0.1", "--wait", "--json")
    assert asked.returncode == 0, asked.stderr + "".join(
        one.log.read_text()[-2000:] for _, one in hosts
    )
    (report,) = json.loads(asked.stdout)["reports"]
    assert (report["state"], report["verdict"]["coverage"]) == ("done", 1.0)
    assert report["verdict"]["sum_time_us"] > 0
    items = farm.items(report["job_id"])
    assert {item.state for item in items} == {"done"}
    measured_on = {card.host: card.id for card in farm.alive()}
    assert set(measured_on) == {host.name for host, _ in hosts}
    assert {item.card_id for item in items} == set(measured_on.values()), (
        "each of the two had its share"
    )
    assert not (Path(farm.environment["FARM_STATE_DIR"]) / "farm.db").exists(), (
        "the third asked, and measured nothing"
    )
