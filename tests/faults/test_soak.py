"""A minute of the soak benchmark: faults of many kinds in three hosts, and the audit that must find
any loss.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from benchmarks.soak.audit import CHECKS, audit
from benchmarks.soak.faults import KINDS
from benchmarks.soak.hosts import DATABASE, KeptPostgres
from benchmarks.soak.schedule import Fault, Outcome, Record, drawn
from tests import slow
from tests.farms import ROOT

#: Faults that no other test injects into three hosts with items on several cards, and some of the
#: others.
RARE = (
    "link to the broker half-open",
    "rank killed",
    "heartbeat lock held",
    "group folder locked",
    "database frozen",
    "database clock set back",
)
CHOSEN = (*RARE, "worker killed", "broker restarted", "database restarted", "network cut")


@pytest.fixture(scope="module")
def soak():
    """(the folder of a soak that has ended, its result)"""
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as name:  # PostgreSQL, as another user, must be able to enter it
        folder = Path(name)
        result = folder / "result.json"
        words = [
            "--items",
            "80",
            "--cards",
            "2",
            "--item-s",
            "0.3",
            "--every",
            "0.8",
            "--minutes",
            "1.5",
            "--last",
        ]
        words += ["--faults", str(len(CHOSEN)), "--kinds", ",".join(CHOSEN)]
        words += ["--seed", "1", "--folder", name, "--json", str(result)]
        command = [sys.executable, "-m", "benchmarks.soak", *words]
        said = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280
        )
        assert said.returncode == 0, said.stdout[-5000:] + said.stderr[-3000:]
        yield folder, json.loads(result.read_text())


@pytest.fixture(scope="module")
def postgres(soak):
    with KeptPostgres(soak[0] / "postgres", "") as server:
        yield server


@pytest.fixture
def connection(postgres):
    """The database of the soak; what a test changes in it is undone."""
    with (
        psycopg.connect(host=str(postgres.folder), user="postgres", dbname=DATABASE) as connection,
        connection.transaction(force_rollback=True),
    ):
        yield connection


@slow.SOAK
def test_three_hosts_in_which_faults_are_injected_lose_nothing(soak):
    _, found = soak
    assert found["hosts"] == 3
    assert found["faults"] >= 7
    assert sum(found["by_kind"][kind] > 0 for kind in RARE) >= 4
    assert found["items_on_several_cards"] > 0
    assert set(found["checks"]) == set(CHECKS)
    assert not any(found["checks"].values()), found["wrong"]
    assert found["items"] >= 80
    assert found["measurements_ended"] >= found["readings"] >= found["items_by_state"]["done"]


PLANTED = {
    "DELETE FROM item WHERE id = {item}": "items lost: submitted and not in the database",
    "UPDATE item SET subject_id = 'unknown' WHERE id = {item}": "items doubled, or not submitted",
    "UPDATE item SET state = 'waiting' WHERE id = {item}": "items begun or opened after their end",
    "UPDATE item SET state = 'failed' WHERE id = {item}": "good items that did not end as done",
    "UPDATE item SET attempts = attempts + 1 WHERE id = {item}": (
        "items whose number of attempts is not their claims less those handed back"
    ),
    "UPDATE item SET reading_id = NULL WHERE id = {item}": (
        "items done without a reading of their subject"
    ),
    "UPDATE item SET reading_id = (SELECT min(id) FROM reading) WHERE reading_id > (SELECT min(id) FROM reading)": (
        "readings without an item"
    ),
    "UPDATE reading SET subject_id = (SELECT min(subject_id) FROM reading)": "subjects with two readings",
    "UPDATE reading SET time_us = 2 * time_us": "readings with the value of another subject",
    "UPDATE soak_event SET at_s = at_s - 3600": (
        "readings without a measurement that ended on their card before"
    ),
    "UPDATE soak_event SET at_s = at_s + 3600": (
        "measurements without a claim of their item on their card"
    ),
    "DELETE FROM verdict": "jobs without exactly one verdict",
    "UPDATE job SET state = 'cancelled'": (
        "jobs that are not done, and cancelled jobs that nobody cancelled"
    ),
}


@slow.SOAK
@pytest.mark.parametrize("change", PLANTED)
def test_the_audit_finds_what_is_wrong(soak, connection, change):
    folder, found = soak
    item = connection.execute(
        "SELECT min(id) FROM item WHERE state = 'done' AND NOT reused"
    ).fetchone()[0]
    connection.execute(change.format(item=item))
    assert audit(connection, folder).checks[PLANTED[change]] > 0
    assert found["checks"][PLANTED[change]] == 0


@slow.SOAK
def test_the_audit_finds_measurements_that_overlap(soak, connection, tmp_path):
    folder, _ = soak
    for file in [folder / "jobs.jsonl", *folder.glob("host*/executions.log")]:
        copy = tmp_path / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(file.read_text())
    with copy.open("a") as log:
        log.write("1.0 7 SIM-host1-0 one begin\n2.0 8 SIM-host1-0 other begin\n")
        log.write("3.0 7 SIM-host1-0 one end\n4.0 8 SIM-host1-0 other end\n")
    assert audit(connection, tmp_path).checks["measurements of a card that overlap"] == 1


def test_a_seed_fixes_the_faults(tmp_path):
    kinds = list(KINDS)
    faults = drawn(kinds, 1000, 3, seed=5)
    assert faults == drawn(kinds, 1000, 3, seed=5)
    assert faults != drawn(kinds, 1000, 3, seed=6)
    numbers = Counter(fault.kind for fault in faults)
    assert set(numbers) == set(kinds)
    assert max(numbers.values()) - min(numbers.values()) <= 1


def test_a_soak_goes_on_with_the_faults_that_were_not_observed(tmp_path):
    faults = [Fault(0, "a", 0), Fault(1, "b", 1), Fault(2, "a", 2)]
    record = Record(tmp_path / "faults.jsonl")
    record.add(Outcome(0, 0, "a", "host1", 1.0, 2.0, observed="alone: process 7 ended"))
    record.add(Outcome(1, 0, "b", "host2", 2.0, 3.0, why_not="no target"))
    again = Record(tmp_path / "faults.jsonl")
    assert again.outcomes == record.outcomes
    assert list(again.left(faults)) == [Fault(2, "a", 2), Fault(1, "b", 1, tries=1)]
    assert again.by_variant() == {("a", "alone"): 1}
