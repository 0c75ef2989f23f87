"""Groups of benchmark processes: real processes that communicate with gloo on the CPU, or simulated
cards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import threading
import time

import psutil
import pytest

from farm.benchmark_process.group import BenchmarkGroup
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.host import links_of
from farm.errors import Unmeasurable
from farm.jobs.group_driver import KeptGroup
from farm.models import catalog
from farm.settings import settings
from farm.subjects.collective_calls import collective_tuple
from farm.training.extract import extract
from farm.training.version import versioned
from farm.types.collective import COLLECTIVES
from farm.types.fields import content_id
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from tests import slow


def pids_of(group):
    return [process.pid for process in group._ranks]


EAGER = Protocol(launch="eager")
SHORT = Stopping(warm_up_s=0.02, minimum_s=0.02, maximum_s=0.1, time_half_width=0.5)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return json.dumps({"tiny": str(folder)})


@pytest.fixture(scope="module")
def pair(models):
    """Two ranks on the CPU."""
    with contextlib.closing(
        BenchmarkGroup([settings().cpu_card_id] * 2, {"FARM_MODELS": models})
    ) as group:
        yield group


def collective(name: str, elements: int = 256, cards: int = 2, **more) -> Subject:
    spec = collective_tuple(name, elements, "float32", cards, **more)
    return Subject("operator", spec.id, spec.to_json())


def all_gone(pids, within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_has_a_reading_of_all_ranks(pair, name):
    subject = collective(name)
    answer = pair.measure(MeasureRequest(subject, EAGER, SHORT), timeout_s=60.0)
    reading, ranks = answer.reading, answer.reading.details.cards.ranks
    assert len(ranks) == 2
    assert reading.time_us.value == max(rank.time_us.value for rank in ranks)
    moved = COLLECTIVES[name].bus(2) * 256 * 4
    assert reading.details.cards.bus_bytes_per_s == pytest.approx(
        moved / reading.time_us.value * 1e6, rel=1e-3
    )
    assert answer.software.communication == "gloo"
    assert links_of(answer.card)["communication"] == "gloo", (
        "as the worker of the card registers it"
    )
    assert answer.software.id != dataclasses.replace(answer.software, communication="").id
    assert reading.from_json(reading.to_json()) == reading


def test_a_pair_of_collective_and_product_says_how_much_is_hidden(pair):
    overlap = pair.measure(
        MeasureRequest(collective("all_gather", beside=64), EAGER, SHORT), timeout_s=60.0
    ).reading.details.cards.overlap
    assert overlap.exposed_us == pytest.approx(overlap.together_us - overlap.product_us)
    assert overlap.hidden_us == pytest.approx(overlap.collective_us - overlap.exposed_us)


@slow.PROCESS
def test_a_split_model_is_one_subject_of_all_ranks(pair, models, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("FARM_MODELS", models)
    settings.cache_clear()
    variant = versioned(catalog.variant("tiny", 2, phase="prefill", tensor_parallel=2))
    subject = Subject("variant", variant.id, variant.to_json())
    assert variant.cards == 2
    assert (
        len(
            pair.measure(
                MeasureRequest(subject, EAGER, SHORT), timeout_s=120.0
            ).reading.details.cards.ranks
        )
        == 2
    )


@slow.PROCESS
def test_rank_0_compares_the_operators_of_a_split_model_or_step_with_the_prediction(
    pair, models, monkeypatch
):
    pytest.importorskip("transformers")
    monkeypatch.setenv("FARM_MODELS", models)
    settings.cache_clear()
    decode = versioned(catalog.variant("tiny", 2, phase="decode", tensor_parallel=2))
    about = {"input_size": 32, "step": "training", "data_parallel": 2}
    for variant in (
        *(catalog.variant("squeezenet1_1", 2, sharding=one, **about) for one in ("fsdp", "ddp")),
        decode,
    ):
        subject = Subject("variant", variant.id, variant.to_json())
        protocol = dataclasses.replace(EAGER, grad=bool(variant.step))
        predicted = dict(extract(variant).capture.counts)
        answer = pair.measure(
            MeasureRequest(subject, protocol, SHORT, predicted=predicted), timeout_s=120.0
        )
        assert len(answer.reading.details.cards.ranks) == 2
        found = answer.verification
        assert not found.missing
        # gloo copies the result of each reduce-scatter; NCCL does not
        assert all(": 1x copy_ |" in one or ": 2x copy_ |" in one for one in found.differences)
        assert (
            found.matches == (answer.verification.observed is None) == (variant.sharding == "ddp")
        )
    left_out = predicted.popitem()[0]
    answer = pair.measure(
        MeasureRequest(subject, protocol, SHORT, predicted=predicted), timeout_s=120.0
    )
    assert list(answer.verification.unexpected) == [left_out]
    assert left_out in answer.verification.observed["tuples"]
    assert len(answer.reading.details.cards.ranks) == 2


def test_what_needs_another_number_of_cards_is_refused_and_the_ranks_end(pair):
    with pytest.raises(Unmeasurable, match=r"needs 4 cards, and 2 measure it") as caught:
        pair.measure(
            MeasureRequest(collective("all_reduce", cards=4), EAGER, SHORT), timeout_s=60.0
        )
    assert caught.value.reason == "not_available"
    assert not pair.alive


@pytest.fixture
def simulated_pair():
    """Two ranks on simulated cards, which start in a tenth of the time."""
    environment = {"FARM_SIMULATED_CARDS": "2", "FARM_HOST": "here"}
    with contextlib.closing(BenchmarkGroup(["SIM-here-0", "SIM-here-1"], environment)) as group:
        yield group


def simulated(**parameters: str) -> Subject:
    spec = {"operator": "torch.nn.ReLU", "parameters": parameters}
    return Subject("operator", content_id(spec), spec)


def ending(group, subject, act, during="window", timeout_s=60.0):
    """Measure for long, `act` as soon as a phase begins, and return the error."""
    endless = Stopping(warm_up_s=0.02, minimum_s=300.0, maximum_s=600.0)

    def on_phase(phase, _):
        if phase == during:
            act()

    group.wait_ready()
    pids = pids_of(group)
    with pytest.raises((Unmeasurable, KeyboardInterrupt)) as caught:
        group.measure(
            MeasureRequest(subject, EAGER, endless), timeout_s=timeout_s, on_phase=on_phase
        )
    assert not group.alive
    assert all_gone(pids)
    return caught.value


@slow.PROCESS
def test_a_killed_rank_ends_the_group_with_the_reason(pair):
    error = ending(
        pair, collective("all_reduce"), lambda: os.kill(pids_of(pair)[1], signal.SIGKILL)
    )
    assert error.reason == "crashed"
    assert error.message.startswith("Rank 1 of 2")
    assert "SIGKILL" in error.message


def test_a_rank_that_hangs_ends_the_group_at_the_time_limit(simulated_pair):
    def stop():
        os.kill(pids_of(simulated_pair)[1], signal.SIGSTOP)

    error = ending(simulated_pair, simulated(simulate="slow"), stop, "rebuild", 4.0)
    assert error.reason == "hung"


def test_a_cancelled_measurement_ends_the_group(simulated_pair):
    def cancel():
        raise KeyboardInterrupt

    error = ending(simulated_pair, simulated(simulate="hang"), cancel, "rebuild")
    assert isinstance(error, KeyboardInterrupt)
    answer = simulated_pair.measure(MeasureRequest(simulated(), Protocol(cards=2), Stopping()))
    assert answer.reading.time_us.value > 0, "by a new group"


def test_a_group_of_simulated_cards_sums_their_energies():
    cards = [f"SIM-here-{number}" for number in range(3)]
    env = {"FARM_SIMULATED_CARDS": "3", "FARM_HOST": "here"}
    with contextlib.closing(BenchmarkGroup(cards, env)) as group:
        assert group.wait_ready().communication == "simulated"
        reading = group.measure(MeasureRequest(simulated(), Protocol(cards=3), Stopping())).reading
        assert [rank.card for rank in reading.details.cards.ranks] == cards
        assert reading.energy_mj.value == pytest.approx(
            sum(rank.energy_mj.value for rank in reading.details.cards.ranks)
        )
        folder = group._folder
        left = tempfile.mkdtemp(prefix="farm-group-")  # of a process that was killed
        assert os.stat(folder).st_mode & 0o777 == 0o700
        threading.Timer(0.5, os.kill, (pids_of(group)[2], signal.SIGKILL)).start()
        with pytest.raises(Unmeasurable, match=r"Rank 2 of 3 on SIM-here-2.*SIGKILL") as caught:
            group.measure(
                MeasureRequest(simulated(simulate="hang"), Protocol(), Stopping()), timeout_s=60.0
            )
        assert caught.value.reason == "crashed"
        with contextlib.closing(BenchmarkGroup(cards[:2], env)) as other:
            other.start()
            group.start()
            assert os.path.exists(other._folder)
    assert not os.path.exists(folder)
    assert not os.path.exists(left)


def test_the_ranks_of_an_item_wait_for_the_next_one_on_the_same_cards(monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "4")
    monkeypatch.setenv("FARM_HOST", "here")
    settings.cache_clear()
    kept, watched = KeptGroup(), []

    def pids(*numbers, error=None):
        with kept.used(
            [f"SIM-here-{number}" for number in numbers], lambda: watched.append(numbers)
        ) as group:
            group.wait_ready()
            if error is not None:
                raise error
            return pids_of(group)

    first = pids(0, 1)
    assert pids(0, 1) == first
    others = pids(2, 3)
    assert all_gone(first)
    assert {(0, 1), (2, 3)} <= set(watched)
    with pytest.raises(ZeroDivisionError):
        pids(2, 3, error=ZeroDivisionError())
    assert all_gone(others), "an error may have left the ranks in the middle of something"
    idle = pids(2, 3)
    os.kill(idle[1], signal.SIGKILL)
    os.waitid(
        os.P_PID, idle[1], os.WEXITED | os.WNOWAIT
    )  # a zombie may still have threads that end
    renewed = pids(2, 3)
    assert not set(idle) & set(renewed), "a rank died while it waited: the item gets new ones"
    assert all_gone(idle)
    monkeypatch.setenv("FARM_GROUP_IDLE_S", "0.1")
    settings.cache_clear()
    assert all_gone(pids(2, 3)), "they do not wait for ever"
    kept.close()
