"""The study of tensors in another GPU's memory, on simulated cards, and what of it holds without
any.
"""

import contextlib

import psutil
import pytest
import torch
from sqlmodel import col, select, update

from benchmarks.studies import STUDIES, peer_memory, results
from benchmarks.studies.conditions import peer
from benchmarks.studies.laboratory import Laboratory, StudyOptions
from farm.addons.memory import memory_tier
from farm.addons.memory.slow_costs import read_slow
from farm.benchmark_process.client import BenchmarkProcess
from farm.devices.lock import CardLock
from farm.errors import CardBusy, FarmError, Unmeasurable, UsageError
from farm.settings import settings
from farm.store import tables
from farm.types.variant import Variant
from tests.addons.memory.test_offload import Fake
from tests.report import filled

VARIANT = Variant("squeezenet1_1", 1, 224)


def plan(cards, tuples=1):
    return StudyOptions(VARIANT, True, tuples, (cards[1],))


def test_each_configuration_is_read_in_both_memories_while_both_cards_are_held(database, cards):
    held = []

    def say(line):
        for card in cards:
            with pytest.raises(CardBusy):
                CardLock(card.id, settings().lock_dir).acquire()
        held.append(line)

    made = results.perform(STUDIES["peer"], database, cards[0], plan(cards, 2), say)
    with database.read() as session:
        rows = list(session.exec(select(tables.ReadingRow)))
    told = [
        (row.details["study"]["memory"], row.subject_id, row.details["study"]["placement"])
        for row in rows
    ]
    slow = [one for one in told if one[2] != "none"]
    assert len(made.rows) == len(slow) / 2 >= 2
    assert len(held) == len(set(told)) == len(told) == len(slow) + 2 * 2  # all fast in between
    assert {memory for memory, *_ in told} == {"of the host", "of another GPU"}
    assert {row.card_id for row in rows} == {cards[0].id}
    assert all("study" in row.flags for row in rows)
    for card in cards:
        CardLock(card.id, settings().lock_dir).acquire().release()


class Scripted(Laboratory):
    """Slow takes ten times as long in the host's memory and two in another GPU's, which takes all
    fast 1 % longer.
    """

    there = False
    fails = ""

    @contextlib.contextmanager
    def slow_on(self, peer):
        self.there = True
        yield
        self.there = False

    def read(self, sample, protocol, stopping, **circumstances):
        if protocol.placement == self.fails:
            self.failures[sample.label] = "out_of_memory: no room"
            return None
        fast_us = 10.1 if self.there else 10.0
        time_us = fast_us * ((2 if self.there else 10) if protocol.placement else 1)
        return tables.ReadingRow(
            id="r", card_id=self.card.id, time_median_us=time_us, details={}, cost_s={}
        )


def test_one_memory_is_held_against_the_other(database, cards):
    with Scripted(database, cards[0], "peer") as laboratory:
        laboratory.fails = "in1"  # no ReLU's
        found = peer(laboratory, plan(cards))
        (row, *_) = found.rows
        assert (row["fast_time_us"], row["host_time_us"], row["peer_time_us"]) == (
            10,
            100,
            pytest.approx(20.2),
        )
        assert (row["change_fast"], row["change_host"]) == (pytest.approx(1), pytest.approx(-0.798))
        assert found.notes[0] == f"The other GPU is {cards[1]}."
        assert "the host's memory: median 10 times the time" in found.notes[1]
        assert "the other GPU's memory: median 2 times" in found.notes[2]
        assert "the host's memory: median 20.2 %" in found.notes[3]
        assert "median +1.00% over 1 tuple" in found.notes[4]
        assert found.drawable
        laboratory.fails = row["placement"]  # its only one
        with pytest.raises(FarmError, match="out_of_memory: no room"):
            peer(laboratory, plan(cards))


def test_one_benchmark_process_at_a_time_is_on_the_card(database, cards):
    with Laboratory(database, cards[0], "peer") as laboratory:
        usual = laboratory._process
        with laboratory.slow_on(cards[1]):
            assert (usual.alive, laboratory._process.alive) == (False, True)
            assert (
                "benchmarks.studies.peer_process"
                in psutil.Process(laboratory._process.pid).cmdline()
            )
            meanwhile = laboratory._process
        assert (laboratory._process, meanwhile.alive) == (usual, False)
        (sample,) = laboratory.samples(VARIANT, 1)
        assert (
            laboratory.read(sample, laboratory.protocol(), laboratory.stopping(quick=True))
            is not None
        )


def test_a_process_with_a_peer_sees_both_cards_its_own_first():
    with BenchmarkProcess("GPU-own", verify_apart=False, also_visible=("GPU-other",)) as process:
        environment = psutil.Process(process.pid).environ()
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-own,GPU-other"


def test_a_card_without_a_neighbour_is_refused_in_a_line(database, cards):
    with pytest.raises(UsageError, match="the only usable card"):
        results.perform(STUDIES["peer"], database, cards[0], StudyOptions(VARIANT, True))
    with CardLock(cards[1].id, settings().lock_dir), pytest.raises(CardBusy, match=cards[1].id):
        results.perform(STUDIES["peer"], database, cards[0], plan(cards))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there is a second GPU")
def test_a_card_that_reaches_no_other_says_so_and_keeps_its_slow_memory():
    before = memory_tier.of_gpu
    with pytest.raises(Unmeasurable, match="cannot access the memory of another GPU") as refused:
        peer_memory.take_from_peer(torch.device("cuda", 0))
    assert refused.value.reason == "not_available"
    assert memory_tier.of_gpu is before


def test_where_slow_is_another_gpus_memory_all_that_is_slow_lies_there(monkeypatch):
    monkeypatch.setattr(memory_tier, "of_gpu", memory_tier.PinnedMemory)
    monkeypatch.setattr(peer_memory, "PeerMemory", lambda device: Fake())
    peer_memory.take_from_peer(torch.device("cuda", 0))
    assert memory_tier.slow_memory_of(torch.device("cuda", 0)).name == "fake memory"


def test_what_a_neighbours_memory_took_is_never_taken_for_the_hosts(database):
    placed = filled.PROTOCOL.with_placement("in0")
    ids = filled.fill(database).capture.tuples
    filled.fill(database, protocol=placed, slower=3.0, whole=False)

    def read():
        with database.read() as session:
            return read_slow(session, ids, ["NVIDIA H200"], launch="graph")

    before, since_s = read(), 1.8e9
    filled.fill(database, protocol=placed, slower=1.5, whole=False, created_at_s=since_s)
    assert read() != before
    with database.write() as session:
        session.execute(
            update(tables.ReadingRow)
            .where(col(tables.ReadingRow.created_at_s) >= since_s)
            .values(flags=["study"])
        )
    assert read() == before
    assert before.added_us
