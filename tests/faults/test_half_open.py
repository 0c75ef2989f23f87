"""Connections become half-open: no worker stays without messages, and no item is lost or measured
twice.
"""

from __future__ import annotations

import contextlib
import os

import pytest
from sqlalchemy import make_url

from farm.store.database import Database
from tasks.servers import BrokerServer
from tests import slow
from tests.farms import Farm, kill_all_of, running
from tests.faults.conftest import Hurt
from tests.half_open import HalfOpenProxy
from tests.servers import PostgresServer

pytestmark = slow.SOAK

SETTINGS = {
    "FARM_GROUP_IDLE_S": "0",
    "FARM_LEASE_S": "30",
    "FARM_HEARTBEAT_S": "1",
    "FARM_RECONCILE_S": "1",
    "FARM_SIMULATED_ITEM_S": "0.05",
}


class Site:
    """A broker and a database, both behind proxies, and the farm that uses them.

    Args:
        address: of the proxies.
    """

    def __init__(self, stack: contextlib.ExitStack, address: str = "127.0.0.1") -> None:
        self.broker = stack.enter_context(BrokerServer(options={"appendonly": "yes"}))
        postgres = stack.enter_context(PostgresServer())
        url = postgres.new_database()
        self.database = Database(url)
        self.database.upgrade()
        stack.callback(self.database.close)
        self.to_broker = stack.enter_context(HalfOpenProxy(self.broker.socket, address))
        self.to_database = stack.enter_context(HalfOpenProxy(postgres.socket, address))
        self.broker_url = f"redis://{address}:{self.to_broker.port}/0"
        name = make_url(url).database
        self.database_url = (
            f"postgresql+psycopg://postgres@{address}:{self.to_database.port}/{name}"
        )
        self.farm: Farm | None = None

    @property
    def hurt(self) -> Hurt:
        return Hurt(self.farm, self.broker)

    def submit(self, seconds: float) -> list[str]:
        """Submit items on one card, and items on two cards together; return their jobs."""
        alone = self.hurt.submit(["slow"] * 2, seconds)
        together = self.hurt.submit(["slow"], seconds, cards=2)
        return [alone, together]

    def check(self, job_ids: list[str], *, lost_claims: bool = False) -> None:
        """Check that all items were measured, and again only if a claim was lost."""
        for job_id in job_ids:
            assert set(self.hurt.settled(job_id)) == {"done"}
            for item in self.farm.items(job_id):
                assert item.repeated == 0
                assert item.attempts == 1 or lost_claims


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site with one host of two cards."""
    with contextlib.ExitStack() as stack:
        site = Site(stack)
        folder = tmp_path_factory.mktemp("farm")
        farm = running(folder, site.broker_url, site.database_url, cards=2, **SETTINGS)
        site.farm = stack.enter_context(farm)
        site.farm.from_here = {"FARM_BROKER_URL": site.broker.url}
        site.farm.database = site.database
        yield site


@pytest.fixture
def two_hosts(network, tmp_path):
    """A site with two hosts of two cards each; broker, database and proxies are on a third host."""
    middle = network.host()
    with contextlib.ExitStack() as stack:
        with middle:
            site = Site(stack, middle.address)
        for _ in range(2):
            host = network.host()
            environment = {
                **os.environ,
                **host.environment(tmp_path),
                **SETTINGS,
                "FARM_SIMULATED_CARDS": "2",
                "FARM_BROKER_URL": site.broker_url,
                "FARM_DATABASE_URL": site.database_url,
            }
            site.farm = Farm(site.database, environment, tmp_path / f"{host.name}.log")
            site.farm.from_here = {"FARM_BROKER_URL": site.broker.url}
            with host:
                stack.callback(kill_all_of, site.farm.start("worker"))
        site.farm.wait_for(lambda: len(site.farm.alive()) == 4)
        yield site


def test_idle_workers_get_messages_after_their_links_to_the_broker_became_half_open(site):
    site.check(site.submit(0.05))
    assert site.to_broker.freeze() > 10
    site.check(site.submit(0.05))  # the broker sends some messages into the lost connections


def test_links_to_the_broker_become_half_open_during_measurements(site):
    job_ids = site.submit(4.0)
    site.hurt.in_work(job_ids[0])
    site.to_broker.freeze()
    site.check(job_ids)


def test_links_to_the_database_become_half_open_during_measurements(site):
    job_ids = site.submit(4.0)
    site.hurt.in_work(job_ids[0])
    site.to_database.freeze()
    site.check(job_ids, lost_claims=True)


def test_all_links_of_two_hosts_become_half_open(two_hosts):
    job_ids = two_hosts.submit(4.0)
    two_hosts.hurt.in_work(job_ids[0])
    two_hosts.to_broker.freeze()
    two_hosts.to_database.freeze()
    two_hosts.check(job_ids, lost_claims=True)
    two_hosts.to_broker.freeze()
    two_hosts.check(two_hosts.submit(0.05))
