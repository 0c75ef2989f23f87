"""Prometheus reads the farm's figures off its control worker, and they move with the work."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import urllib.request
from collections import defaultdict

import pytest
import redis
import sqlalchemy
import sqlmodel
import yaml
from prometheus_client.parser import text_string_to_metric_families

from farm.devices.device import Card
from farm.jobs import cards, items, jobs, leases, listing
from farm.jobs.card_checks import JudgedCheck
from farm.jobs.cards import register
from farm.settings import Settings
from farm.store import tables
from farm.store.database import database_now
from farm.types.software import Software
from tasks import metrics, supervisor
from tasks.app import configure
from tasks.card_checks import RegularChecks
from tasks.metrics import FarmCollector, serve
from tests import planned, slow
from tests.farms import ROOT, TIMEOUT_S, running


def scrape(port):
    """Every series by its name and the label that tells kinds apart, summed over the cards."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        exposition = answer.read().decode()
    total = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            key = (
                sample.name,
                *(
                    sample.labels[name]
                    for name in ("reason", "state", "le")
                    if name in sample.labels
                ),
            )
            total[key] += sample.value
    return total


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def no_broker(monkeypatch):
    """None, and nobody waits for it."""
    monkeypatch.setattr(metrics, "queue_depths", lambda ids: dict.fromkeys(ids, 0))


@slow.FAULT
def test_the_figures_of_a_working_farm_move(tmp_path, broker, postgres_url):
    port = free_port()
    with running(tmp_path, broker.url, postgres_url, cards=2, FARM_METRICS_PORT=str(port)) as farm:
        before = scrape(port)
        assert before["farm_database_up",] == 1
        assert before["farm_items_measured_total",] == 0
        assert before["farm_card_state", "idle"] == 2
        assert before["farm_doctor_problems",] == 0
        first = farm.submit(["", "slow", "oom", "raise", "crash"], seconds=0.3)
        farm.wait_for(lambda: farm.ended(first))
        after = scrape(port)
        assert after["farm_items_measured_total",] == 2
        assert after["farm_items_failed", "out_of_memory"] == 1
        assert after["farm_items_failed", "raised"] == 1
        assert after["farm_items_failed", "crashed"] == 1
        assert after["farm_items_begun_again",] == 2
        assert after["farm_items_repeated",] == 0
        assert after["farm_item_seconds_count",] == after["farm_item_seconds_bucket", "+Inf"] == 2
        assert after["farm_item_seconds_sum",] > 0.3
        assert 0 < after["farm_card_busy_share",] < 1
        assert (
            after["farm_items_open", "waiting"]
            == after["farm_queue_age_seconds",]
            == after["farm_open_jobs",]
            == 0
        )

        second = farm.submit(["slow"] * 6, seconds=1.0)

        def busy():
            now = scrape(port)
            claimed = (
                now["farm_items_open", "claimed"] == now["farm_card_state", "busy"] == 2
            )  # one after the other
            return now if claimed and now["farm_items_open", "waiting"] else None

        during = farm.wait_for(busy)
        assert during["farm_queue_age_seconds",] > 0
        assert during["farm_open_jobs",] == 1
        farm.wait_for(lambda: farm.ended(second))
        assert scrape(port)["farm_items_measured_total",] == 8


def test_the_busy_share_is_of_the_last_minutes_only(any_database, clock):
    card = Card(id="GPU-1", kind="cuda", model="NVIDIA H200", memory_bytes=1, host="gpu1")
    register(any_database, card, Software(torch="2"), holder="h", queue="q")
    with any_database.write() as session:
        now_s = session.scalar(sqlalchemy.select(database_now()))
        session.add(tables.ProtocolRow(id="p", launch="graph", residency="resident", data="normal"))
        session.flush()
        session.add(tables.Job(id="j", kind="sweep", title="t", protocol_id="p"))
        session.flush()
        for number, (began_s, ended_s) in enumerate(
            [(-1000, -900), (-330, -270), (-60, -30), (-10, None)]
        ):
            session.add(
                tables.Item(
                    job_id="j",
                    round=1,
                    role="tuple",
                    subject_kind="operator",
                    subject_id=str(number),
                    protocol_id="p",
                    card_id="GPU-1",
                    card_model="NVIDIA H200",
                    state="done" if ended_s else "claimed",
                    lease_until_s=now_s + 60,
                    started_at_s=now_s + began_s,
                    ended_at_s=now_s + ended_s if ended_s else None,
                )
            )
    with any_database.read() as session:
        (entry,) = listing.count_items(session, "gpu1", 10)
        assert listing.count_items(session, "gpu2", 10) == []
        ended = listing.EndedCounts()
        twice = [listing.count_items(session, "gpu1", 10, ended)[0] for _ in range(2)]
    assert [(one.measured, one.duration_s, one.within) for one in twice] == [
        (entry.measured, entry.duration_s, entry.within)
    ] * 2
    assert [one.measured for one in ended.of_cards.values()] == [2], (
        "only the item that ended 30 s ago is counted again"
    )
    clock.back(300)  # for example that of another database server
    with any_database.read() as session:
        assert listing.count_items(session, "gpu1", 10, ended)[0].measured == 3
    # Of the last 300 s: 30 of the second, 30 of the third, 10 of the one in work.
    assert entry.busy_share == pytest.approx(70 / 300, abs=0.01)
    assert entry.measured == 3
    assert entry.within[-1] == 3
    assert entry.within[8] == 0


def test_what_is_tried_again_moved_or_handed_back_lowers_no_counter_and_waits_since_then(
    any_database, no_broker
):
    ids = planned.register(any_database, 0, 1)
    job_id = planned.plan(any_database, ids[:1], number=4)
    given_up, moved, done, left = planned.items_of(any_database, job_id)
    held = planned.claim(any_database, given_up)
    items.fail(any_database, held, "raised", "it did")
    for item in (moved, done, left):
        planned.claim(any_database, item, lease_s=0.0)
    planned.complete(any_database, planned.claim(any_database, done), "SIM-0")
    planned.claim(any_database, moved)
    collector = FarmCollector(
        Settings(database_url=any_database.url.render_as_string(hide_password=False), host="here")
    )

    def figures():
        return {
            (sample.name, sample.labels["card"], sample.labels.get("reason", "")): (
                family.type,
                sample.value,
            )
            for family in collector.collect()
            for sample in family.samples
            if "card" in sample.labels
            and sample.name.startswith(("farm_items", "farm_item_", "farm_queue_age"))
        }

    before = figures()
    assert before["farm_items_failed", "SIM-0", "raised"] == ("gauge", 1)
    assert before["farm_items_begun_again", "SIM-0", ""] == ("gauge", 2)
    with any_database.write() as session:
        for item in session.exec(sqlmodel.select(tables.Item)):
            item.created_at_s -= 2 * 24 * 3600
            item.published_at_s = session.scalar(sqlalchemy.select(database_now())) - 100
            if item.id == moved.id:
                item.card_id = "SIM-1"
    jobs.retry_failed(any_database, job_id)
    leases.hand_back(any_database, "somebody")
    after = figures()
    assert [
        key for key, (kind, value) in before.items() if kind != "gauge" and after[key][1] < value
    ] == []
    assert after["farm_items_measured_total", "SIM-0", ""] == ("counter", 1)
    assert after["farm_items_begun_again", "SIM-0", ""][1] < 2
    with any_database.write() as session:
        session.execute(sqlalchemy.update(tables.Item).values(published_at_s=database_now() - 100))
    assert 100 <= figures()["farm_queue_age_seconds", "SIM-0", ""][1] < 200


def test_every_host_tells_of_the_lost_cards_of_all(any_database, no_broker):
    for number, holder in enumerate(["h", "h", "h", "h/embedded:gpu1:1:a"]):
        card = Card(
            id=f"GPU-{number}",
            kind="cuda",
            model="NVIDIA H200",
            memory_bytes=1,
            host="gpu1",
            index=number,
        )
        register(any_database, card, Software(torch="2"), holder=holder, queue="q")
    cards.drain(any_database, "GPU-2")
    with any_database.write() as session:
        unseen = sqlmodel.col(tables.CardRow.id).in_(["GPU-1", "GPU-2", "GPU-3"])
        session.execute(
            sqlalchemy.update(tables.CardRow)
            .where(unseen)
            .values(last_seen_at_s=tables.CardRow.last_seen_at_s - 600)
        )
    url = any_database.url.render_as_string(hide_password=False)
    for host in ("gpu1", "gpu2"):
        families = {
            family.name: family
            for family in FarmCollector(
                Settings(database_url=url, host=host, heartbeat_s=60)
            ).collect()
        }
        (sample,) = families["farm_card_unseen_seconds"].samples
        assert (sample.labels["host"], sample.labels["card"]) == ("gpu1", "GPU-1")
        assert 600 <= sample.value < 700


def test_without_a_database_it_says_so(tmp_path):
    url = "postgresql://nobody@127.0.0.1:1/none"
    families = {
        family.name: family
        for family in FarmCollector(Settings(database_url=url, state_dir=tmp_path)).collect()
    }
    assert families["farm_database_up"].samples[0].value == 0
    assert set(families) == {"farm_database_up", "farm_spooled_readings", "farm_doctor_problems"}
    assert problems(families) == {
        "broker": 1,
        "cards": 0,
        "database": 1,
        "reconciler": 0,
        "supervisor": 0,
    }


def problems(families):
    return {
        sample.labels["check"]: sample.value for sample in families["farm_doctor_problems"].samples
    }


def test_what_the_doctor_would_find_is_counted_and_not_at_every_scrape(
    database, broker, monkeypatch
):
    url = database.url.render_as_string(hide_password=False)
    current = Settings(database_url=url, broker_url=broker.url)
    configure(current)
    planned.register(database, 0, 1)
    cards.quarantine(database, "SIM-1", "it is hot")
    stopped = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(supervisor.os, "getppid", lambda: stopped.pid)
    collector = FarmCollector(current, supervisor=stopped.pid)

    def found():
        return problems({family.name: family for family in collector.collect()})

    with redis.Redis.from_url(broker.redis_url) as client:
        try:
            starts = {"broker": 0, "cards": 1, "database": 0, "reconciler": 0, "supervisor": 0}
            assert found() == starts
            monkeypatch.setattr(metrics, "FIRST_PASS_S", -1.0)
            monkeypatch.setattr(metrics, "CHECK_EVERY_S", -1.0)
            assert found() == {**starts, "reconciler": 1}
            stopped.send_signal(signal.SIGSTOP)
            client.config_set("min-replicas-to-write", 1)
            damaged = {**starts, "broker": 1, "supervisor": 1}
            assert found() == damaged
            calls = client.info("commandstats")["cmdstat_multi"]["calls"]
            monkeypatch.setattr(metrics, "CHECK_EVERY_S", 60.0)
            assert found() == damaged
            assert client.info("commandstats")["cmdstat_multi"]["calls"] == calls
        finally:
            client.config_set("min-replicas-to-write", 0)
            configure(Settings())
            stopped.kill()
            stopped.wait()


def test_off_or_taken_it_stays_quiet(tmp_path):
    url = f"sqlite:///{tmp_path / 'farm.db'}"
    assert serve(Settings(metrics_port=0)) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = Settings(metrics_port=server.getsockname()[1], database_url=url)
        assert serve(taken) is None


def test_a_client_that_sends_no_request_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.2)
    port = serve(
        Settings(metrics_port=free_port(), database_url=f"sqlite:///{tmp_path / 'farm.db'}")
    )
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        assert client.recv(1) == b"", "the exporter closes the connection"


def test_alerts_ask_for_series_that_the_farm_exports(any_database, no_broker):
    """Names, labels and their values. `up` is Prometheus's own."""
    card = Card(
        id="SIM-gpu1-0", kind="simulated", model="simulated card", memory_bytes=1, host="gpu1"
    )
    register(any_database, card, Software(torch="2"), holder="h", queue="q")
    url = any_database.url.render_as_string(hide_password=False)
    current = Settings(database_url=url, host="gpu1", heartbeat_s=60)
    checks = RegularChecks(current, [card.id], any_database)
    checks._judged["job"] = JudgedCheck("job", (card.id,), 0.0, "outside")
    exported = defaultdict(lambda: defaultdict(set))
    other = Card(
        id="SIM-gpu2-0", kind="simulated", model="simulated card", memory_bytes=1, host="gpu2"
    )
    register(any_database, other, Software(torch="2"), holder="other", queue="other")
    with any_database.write() as session:
        session.get_one(tables.CardRow, other.id).last_seen_at_s -= 600
    for family in FarmCollector(current, checks=checks).collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                exported[sample.name][label].add(value)
            exported[sample.name]["instance"].add("")  # of every series that Prometheus scrapes
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        expression = re.sub(r"\b(?:max )?by \([^)]*\)", "", rule["expr"])
        selectors = re.findall(r"(farm_\w+)(?:\{([^}]*)\})?", expression)
        assert selectors or expression.startswith("up{"), rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        for name, conditions in selectors:
            assert name in exported, rule["alert"]
            assert shown <= exported[name].keys(), rule["alert"]
            for label, value in re.findall(r'(\w+)="([^"]*)"', conditions):
                assert value in exported[name][label], rule["alert"]


def test_every_metric_is_documented(any_database, no_broker):
    card = Card(
        id="SIM-gpu1-0", kind="simulated", model="simulated card", memory_bytes=1, host="gpu1"
    )
    register(any_database, card, Software(torch="2"), holder="h", queue="q")
    url = any_database.url.render_as_string(hide_password=False)
    told = {
        family.name for family in FarmCollector(Settings(database_url=url, host="gpu1")).collect()
    }
    documented = re.findall(r"`(farm_[a-z_]+)", (ROOT / "docs/monitoring.md").read_text())
    assert {name.removesuffix("_total") for name in documented} == told
