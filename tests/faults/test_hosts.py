"""Several hosts, each with an address of its own: one is cut off in the middle of its items, and comes back."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time

import pytest

from farm.store.database import Database
from tasks.servers import BrokerServer
from tests.farms import Farm
from tests.faults.conftest import QUICK, Hurt
from tests.servers import PostgresServer


@pytest.fixture
def hosts(network, tmp_path):
    """(what is hurt, the farm of each of two worker hosts, those hosts); broker and database are on a third."""
    middle, *workers = (network.host() for _ in range(3))
    with contextlib.ExitStack() as stack:
        with middle:
            broker = stack.enter_context(
                BrokerServer(persistent=True, options={"port": "6379", "bind": middle.address, "protected-mode": "no"})
            )
            postgres = stack.enter_context(PostgresServer(middle.address))
        url = postgres.new_database()
        database = Database(url)
        stack.callback(database.close)
        database.upgrade()
        name = url.rpartition("/")[2].partition("?")[0]
        farms = []
        for host in workers:
            environment = {
                **_environment(),
                **host.environment(tmp_path),
                **QUICK,
                "FARM_BROKER_URL": f"redis://{middle.address}:6379/0",
                "FARM_DATABASE_URL": postgres.url_over_tcp(name),
                "FARM_SIMULATED_CARDS": "1",
                "FARM_ITEM_TIMEOUT_S": "60",
            }
            farm = Farm(database, environment, tmp_path / f"{host.name}.log")
            with host:
                process = farm.start("worker")
            stack.callback(_stop, process)
            farms.append(farm)
        farms[0].wait_for(lambda: len(farms[0].alive()) == 2)
        yield Hurt(farms[0], broker), workers


def _environment():
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}


def _stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_a_host_that_is_cut_off_and_comes_back_is_fenced_out(hosts):
    hurt, (cut, _) = hosts
    job_id = hurt.submit(["slow"] * 6, 2.5)
    card = f"SIM-{cut.name}-0"
    hurt.farm.wait_for(lambda: any(i.state == "claimed" and i.card_id == card for i in hurt.farm.items(job_id)))
    time.sleep(0.3)
    cut.cut()
    hurt.farm.wait_for(lambda: all(i.state == "done" for i in hurt.farm.items(job_id) if i.card_id == card))
    cut.join()
    assert hurt.settled(job_id) == {"done": 6}
    hurt.farm.wait_for(lambda: sum(item.repeated for item in hurt.farm.items(job_id)) == 1)
    hurt.farm.wait_for(lambda: len(hurt.farm.alive()) == 2)
    again = hurt.submit(["slow"] * 4, 0.5)
    assert hurt.settled(again) == {"done": 4}
