"""A farm of several hosts, each with an address of its own: servers on one, workers on two, a person at a fourth."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlmodel import select

from farm.store.database import Database
from farm.store.tables import Card, Item, Job, Verdict
from tasks.servers import BrokerServer
from tests.namespaces import Host, Network
from tests.servers import PostgresServer

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Farm:
    """The servers' addresses, as every host is told them; the database as the test reads it."""

    folder: Path
    settings: dict[str, str]
    database: Database

    def environment(self, host: Host, **more: str) -> dict[str, str]:
        return {**os.environ, **self.settings, **host.environment(self.folder), **more}

    def say(self, host: Host, *words: str) -> subprocess.CompletedProcess[str]:
        """`farm ...` on a host."""
        with host:
            return subprocess.run(
                [sys.executable, "-m", "cli", *words],
                cwd=ROOT,
                env=self.environment(host),
                capture_output=True,
                text=True,
                timeout=120,
            )

    @contextlib.contextmanager
    def worker(self, host: Host, **more: str) -> Iterator[subprocess.Popen[str]]:
        """`farm worker` on a host, stopped in order at the end."""
        with host:
            worker = subprocess.Popen(
                [sys.executable, "-m", "cli", "worker"],
                cwd=ROOT,
                env=self.environment(host, **more),
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            yield worker
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=60)

    def wait_for_cards(self, number: int, *workers: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self.database.read() as session:
                if sum(card.state == "idle" for card in session.exec(select(Card))) == number:
                    return
            for worker in workers:
                assert worker.poll() is None, worker.communicate()
            assert time.monotonic() < deadline_s, "the workers did not register"
            time.sleep(0.2)


@pytest.fixture
def hosts(network: Network) -> list[Host]:
    return [network.host() for _ in range(4)]


@pytest.fixture
def farm(hosts: list[Host], tmp_path: Path) -> Iterator[Farm]:
    """A broker and a PostgreSQL on the first host, reached by its address."""
    server = hosts[0]
    options = {"port": "6379", "bind": server.address, "protected-mode": "no"}
    with server, PostgresServer(server.address) as postgres, BrokerServer(options=options):
        postgres.new_database()
        url = postgres.url_over_tcp("test_1")
        settings = {"FARM_BROKER_URL": f"redis://{server.address}:6379/0", "FARM_DATABASE_URL": url}
        database = Database(postgres.url("test_1"))  # the test's own way in: the socket
        database.upgrade()
        yield Farm(tmp_path, settings, database)
        database.close()


@pytest.mark.serial
def test_hosts_share_a_job_that_a_third_one_submits(farm: Farm, hosts: list[Host]) -> None:
    _, first, second, desk = hosts
    with (
        farm.worker(first, FARM_SIMULATED_CARDS="2", FARM_SIMULATED_ITEM_S="0.1") as one,
        farm.worker(second, FARM_SIMULATED_CARDS="1", FARM_SIMULATED_ITEM_S="0.1") as other,
    ):
        farm.wait_for_cards(3, one, other)
        said = farm.say(desk, "submit", "squeezenet1_1", "--wait", "--json")
        assert said.returncode == 0, said.stderr
        assert "Traceback" not in said.stderr
    (report,) = json.loads(said.stdout)["reports"]
    assert report["state"] == "done"
    with farm.database.read() as session:
        cards = {card.id: card.host for card in session.exec(select(Card))}
        items = list(session.exec(select(Item)))
        verdicts = list(session.exec(select(Verdict)))
        assert {job.state for job in session.exec(select(Job))} == {"done"}
    assert cards == {
        f"SIM-{first.name}-0": first.name,
        f"SIM-{first.name}-1": first.name,
        f"SIM-{second.name}-0": second.name,
    }
    assert {cards[item.card_id] for item in items} == {first.name, second.name}
    assert {item.state for item in items} == {"done"}
    assert len({item.reading_id for item in items}) == len(items)
    # The whole stands on every card that gave to the sum.
    wholes = sorted(item.card_id for item in items if item.role == "whole")
    assert wholes == sorted({item.card_id for item in items if item.role == "tuple"})
    assert [(verdict.job_id, verdict.round) for verdict in verdicts] == [(report["job_id"], 1)]


@pytest.mark.serial
def test_the_cpus_of_two_hosts_are_two_cards_although_the_machine_is_one(farm: Farm, hosts: list[Host]) -> None:
    _, first, second, desk = hosts
    path = farm.folder / "relu.yml"
    path.write_text(
        "- {sweep: ReLU, name: small, grid: {channels: [4, 8, 12, 16], image_size: 7}, stopping: {warm_up_s: 0.05, minimum_s: 0.1, maximum_s: 0.2}}\n"
    )
    with farm.worker(first) as one, farm.worker(second) as other:
        farm.wait_for_cards(2, one, other)
        said = farm.say(desk, "submit", "-f", str(path), "--wait", "--json")
        assert said.returncode == 0, said.stderr
    with farm.database.read() as session:
        items = list(session.exec(select(Item)))
    assert {item.card_id for item in items} == {f"CPU-{first.name}", f"CPU-{second.name}"}
    assert {item.state for item in items} == {"done"}


@pytest.mark.serial
def test_a_host_that_is_not_plugged_in_is_told_what_does_not_answer(farm: Farm, hosts: list[Host]) -> None:
    desk = hosts[3]
    desk.cut()
    said = farm.say(desk, "submit", "squeezenet1_1")
    assert said.returncode == 3
    assert "does not answer" in said.stderr
    assert "Traceback" not in said.stderr
    desk.join()
    said = farm.say(desk, "submit", "squeezenet1_1")
    assert said.returncode == 3
    assert "No worker listens" in said.stderr
