"""Items on several cards of one host: whatever ends, the group ends with it, and nothing is lost or
doubled.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
from sqlmodel import select

from farm.devices.simulated import UNHEALTHY_VARIABLE
from farm.jobs import groups
from farm.settings import Settings
from farm.store.tables import CardRow
from tests import slow
from tests.farms import QUICK, SharedFarm
from tests.faults.conftest import Hurt

CARD = f"SIM-{Settings().host}-"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with contextlib.closing(SharedFarm(lambda: tmp_path_factory.mktemp("farm"), 4)) as shared:
        yield shared


@pytest.fixture
def four(shared):
    """A farm of one host with four cards."""
    return Hurt(*shared.whole())


@pytest.fixture(params=[2, pytest.param(4, marks=slow.FAULT)])
def farm_of_cards(request):
    """(a farm of one host, the number of its cards): each item of a test needs all of them."""
    shared = request.getfixturevalue("two_cards" if request.param == 2 else "shared")
    return Hurt(*shared.whole()), request.param


def ranks(hurt):
    """Card number -> the rank of a group on it, for the cards that the group's worker does not
    serve itself.
    """
    found = {}
    for process in hurt.farm.processes("farm.benchmark_process.server"):
        with contextlib.suppress(psutil.Error, IndexError):
            line, worker = process.cmdline(), process.parent().parent().cmdline()
            card = line[line.index("--card") + 1]
            if worker[worker.index("card") + 1] != card:
                found[int(card.rpartition("-")[2])] = process
    return found


def in_work(hurt, number):
    """Wait until the ranks of a group of so many cards have begun; return them."""
    hurt.farm.wait_for(lambda: len(ranks(hurt)) == number - 1)
    return ranks(hurt)


def end_of(processes):
    _, alive = psutil.wait_procs(processes, 20)
    return not alive


def held(hurt):
    with hurt.farm.database.read() as session:
        return groups.in_force(session, session.exec(select(CardRow)).all())


@slow.FAULT
def test_groups_and_items_on_one_card_share_a_host(four):
    four_of_four = four.submit([""] * 2, cards=4)
    alone = four.submit([""] * 24)
    pairs = four.submit([""] * 4, cards=2)
    for job_id, number in ((four_of_four, 2), (alone, 24), (pairs, 4)):
        assert four.settled(job_id) == {"done": number}
        assert all((item.attempts, item.repeated) == (1, 0) for item in four.farm.items(job_id))
    assert {item.card_id for item in four.farm.items(four_of_four)} == {CARD + "0"}
    assert {item.card_id for item in four.farm.items(pairs)} == {CARD + "0", CARD + "2"}
    # No card measured an item alone while it measured one with others. An item's measurement takes
    # 0.05 s at least.
    spans = [(item.card_id, item.started_at_s, item.ended_at_s) for item in four.farm.items(alone)]
    for item in four.farm.items(four_of_four):
        middle_s = item.ended_at_s - float(QUICK["FARM_SIMULATED_ITEM_S"]) / 2
        assert [span for span in spans if span[1] < middle_s < span[2]] == []
    assert held(four) == {}


@pytest.mark.parametrize(
    "victim",
    [
        "rank",
        pytest.param("pool", marks=slow.ALIKE),
        pytest.param("worker", marks=slow.FAULT),
        pytest.param("worker of a peer", marks=slow.FAULT),
    ],
)
def test_kill_9_of_one_process_of_a_group(farm_of_cards, victim):
    hurt, cards = farm_of_cards
    # The ranks do not depend on the worker of a peer. The group ends when that worker starts again
    # or counts as lost.
    job_id = hurt.submit(["slow"], 8.0, cards=cards)  # longer than it takes to find the processes
    alone = hurt.submit([""] * 4)
    hurt.in_work(job_id)  # a process that dies before the claim costs no attempt
    processes = in_work(hurt, cards)
    parent = processes[1].parent()
    victims = {
        "rank": processes[1],
        "pool": parent,
        "worker": parent.parent(),
        "worker of a peer": next(
            one for one in hurt.farm.processes("tasks.main", f"{CARD}{cards // 2}")
        ),
    }
    victims[victim].kill()
    assert end_of(processes.values()), "one dead rank ends the others"
    assert hurt.settled(job_id) == {"done": 1}
    (item,) = hurt.farm.items(job_id)
    # A rank that ends before all are ready, on a busy machine, costs no attempt.
    assert item.attempts in (1, 2)
    assert item.repeated == 0
    assert hurt.settled(alone) == {"done": 4}
    assert held(hurt) == {}


def test_a_cancelled_group_ends_and_its_cards_go_on(farm_of_cards):
    hurt, cards = farm_of_cards
    job_id = hurt.submit(["slow"], 600.0, cards=cards)
    processes = in_work(hurt, cards)
    assert set(held(hurt)) == {CARD + str(number) for number in range(cards)}
    alone = hurt.submit([""] * 8)
    assert hurt.farm.say("cancel", job_id).returncode == 0
    assert end_of(processes.values())
    assert hurt.settled(alone) == {"done": 8}
    hurt.check(job_id)
    assert [item.state for item in hurt.farm.items(job_id)] == ["cancelled"]


@pytest.mark.parametrize("how", ["drained", pytest.param("sick", marks=slow.ALIKE)])
def test_a_group_ends_with_a_card_that_is_taken_away_and_waits_for_it(farm_of_cards, how):
    hurt, cards = farm_of_cards
    last = f"{CARD}{cards - 1}"
    job_id = hurt.submit(["slow"], 2.0, cards=cards)
    processes = in_work(hurt, cards)
    bad = Path(hurt.farm.environment[UNHEALTHY_VARIABLE])
    if how == "drained":
        assert hurt.farm.say("cards", "drain", last).returncode == 0
    else:
        bad.write_text(last)
        processes[cards - 1].kill()  # the next process on the card fails the check
    assert end_of(processes.values())
    hurt.farm.wait_for(lambda: [item.state for item in hurt.farm.items(job_id)] == ["waiting"])
    alone = hurt.submit([""] * 3)
    assert hurt.settled(alone) == {"done": 3}
    assert [item.state for item in hurt.farm.items(job_id)] == ["waiting"], "it needs all cards"
    bad.write_text("")
    assert hurt.farm.say("cards", "resume" if how == "drained" else "release", last).returncode == 0
    assert hurt.settled(job_id) == {"done": 1}
    assert [item.attempts for item in hurt.farm.items(job_id)] == [1 if how == "drained" else 2]


@slow.FAULT
def test_a_rank_that_hangs_ends_its_group_after_the_time_limit(start):
    hurt = start(cards=2, FARM_ITEM_TIMEOUT_S="4")
    job_id = hurt.submit(["hang"], cards=2)
    (hanging,) = in_work(hurt, 2).values()
    used = [-1.0, 0.0]
    while used[-1] != used[-2] or used[-1] < 0.1:  # it still starts, which has a longer limit
        time.sleep(0.5)
        used.append(hanging.cpu_times().user)
    hanging.suspend()
    alone = hurt.submit([""] * 4)
    assert hurt.settled(job_id) == {"failed": 1}
    assert [item.reason for item in hurt.farm.items(job_id)] == ["hung"]
    assert hurt.settled(alone) == {"done": 4}
