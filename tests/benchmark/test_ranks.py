"""Two ranks with other clocks, noise and sensors run the same passes: otherwise NCCL would wait for
ever.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import subprocess
import sys
import time
import weakref
from collections import Counter

import pytest
import torch

from farm.benchmark import clock, ranks
from farm.benchmark.bench import Bench
from farm.benchmark.call_context import Player
from farm.benchmark.subjects import passes_of
from farm.models import catalog
from farm.settings import settings
from farm.subjects.collective_calls import collective_tuple
from farm.training.capture import capture_step
from farm.training.extract import build_step, extract
from farm.training.split import build
from farm.training.step import ForwardPass
from farm.training.version import versioned
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests import slow
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark_process.test_group import TINY

STOPPING = Stopping(
    warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=0.02, energy_half_width=0.02
)


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """Runs a function of this file on two ranks and returns what each found."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(name):
        command = [
            sys.executable,
            "-m",
            "tests.benchmark.test_ranks",
            str(tmp_path / "rendezvous"),
            name,
        ]
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(2)
        ]
        try:
            return [json.loads(process.communicate(timeout=120)[0]) for process in started]
        finally:
            for process in started:
                process.kill()

    return run


@slow.PROCESS
def test_ranks_that_see_other_times_run_the_same_passes(pair):
    first, second = pair("measure")
    assert first["rounds"] == second["rounds"]
    assert first["decisions"] == second["decisions"]
    assert set(second["flags"]) - set(first["flags"]) >= {"shared", "throttled_power"}
    assert first["repeated"] == second["repeated"] == 2
    assert first["burst"]
    assert second["burst"]


@slow.PROCESS
def test_split_models_run_what_was_captured_without_cards_and_are_replayed_on_all_ranks(
    pair, monkeypatch, tmp_path
):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setenv("FARM_MODELS", json.dumps({"tiny": str(tmp_path)}))
    settings.cache_clear()
    first, second = pair("split")
    assert first == second
    for variant, counts in zip(split_variants(), first["ran"], strict=True):
        captured = extract(variant).capture
        assert not Counter(captured.counts) - Counter(counts)
        # gloo's reduce-scatter copies its result; NCCL's does not.
        added = Counter(counts) - Counter(captured.counts)
        assert sum(added.values()) == (0 if variant.sharding == "ddp" else 3)
    for replayed in first["replayed"]:
        assert replayed["collectives"] > 2
        assert replayed["elsewhere"] == 0


@slow.PROCESS
def test_a_failure_of_one_rank_is_a_failure_of_all_and_a_rank_knows_if_it_failed_alone(pair):
    first, second = pair("fail")
    assert first["error"].startswith("RuntimeError: Another rank failed")
    assert second["error"].startswith("MemoryError")
    assert [(found["together"], found["alone"]) for found in (first, second)] == [
        (True, None),
        (True, False),
    ]


def test_a_failure_keeps_no_memory():
    made = []

    def make() -> None:
        tensor = torch.empty(1)
        made.append(weakref.ref(tensor))
        raise MemoryError

    gc.disable()
    try:
        with contextlib.suppress(MemoryError):
            ranks.together(make)
        assert made[0]() is None
    finally:
        gc.enable()


def fail(rank: int) -> dict[str, object]:
    def make() -> None:
        if rank:
            raise MemoryError

    try:
        ranks.together(make)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        together, alone = ranks.failed_everywhere(), ranks.failed_everywhere(0.2) if rank else None
        return {"error": text, "together": together, "alone": alone}
    return {"error": ""}


def split_variants() -> list[Variant]:
    training = {"step": "training", "data_parallel": 2, "optimizer": "adamw-foreach"}
    how = [
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "phase": "decode"},
        training,
        training | {"sharding": "fsdp"},
    ]
    return [catalog.variant("tiny", 2, **said) for said in how]


def split(rank: int) -> dict[str, list[dict[str, int]]]:
    """FSDP2 gathers into memory of which the input of the collective is a part."""
    parallel = catalog.variant("tiny", 2, length=8, phase="prefill", tensor_parallel=2)
    sharded = catalog.variant(
        "tiny", 2, length=8, step="training", data_parallel=2, sharding="fsdp"
    )
    return {
        "ran": [observe(one) for one in split_variants()],
        "replayed": [replay(one) for one in (parallel, sharded)],
    }


def observe(variant: Variant) -> dict[str, int]:
    """Run a split model and count its calls."""
    cpu = torch.device("cpu")
    if variant.step:
        step = build_step(variant, cpu)
        step.split = True
    else:
        step = ForwardPass(*build(variant, cpu), grad=False)
        step.run()
    return capture_step(step, warmed_up=True).counts


def replay(asked: Variant) -> dict[str, int]:
    """Replay the calls of a split model. Count those that read other memory than an earlier call
    has written.
    """
    variant = versioned(asked)
    subject = Subject("variant", variant.id, variant.to_json())
    passes = passes_of(subject, Protocol(launch="eager"), torch.device("cpu"))
    capture, made, found = passes.order(), {}, {"collectives": 0, "elsewhere": 0}

    def step(call, operator):
        given = dict.fromkeys(tensor.untyped_storage().data_ptr() for tensor in operator.tensors)
        found["elsewhere"] += sum(
            made.get(one, address) != address
            for one, address in zip(call.reads, given, strict=True)
        )
        found["collectives"] += capture.tuples[call.tuple_id].kind == "collective"
        out = operator.run()
        if isinstance(out, torch.Tensor):
            same = () if operator.spec.kind == "collective" else call.reads
            made.update(
                dict.fromkeys(set(call.writes) - set(same), out.untyped_storage().data_ptr())
            )
        return out

    Player(capture, torch.device("cpu")).play(step, once=True)
    return found


def measure(rank: int) -> dict[str, object]:
    """Measure a collective as one of two ranks; the second is late, noisy, hot, shared and at its
    power limit.
    """
    seen = {"rounds": 0, "decisions": 0}
    noise, launch, largest = random.Random(rank), clock.Clock.launch, ranks.largest

    def noisy_launch(self: clock.Clock) -> None:
        seen["rounds"] += 1
        time.sleep(noise.random() * 0.004 * rank)
        launch(self)

    def counted(value: float) -> float:
        seen["decisions"] += 1
        return largest(value)

    clock.Clock.launch, ranks.largest = noisy_launch, counted  # type: ignore[method-assign]
    device = FakeDevice(
        lambda now_s: 300.0 + rank * 100.0 * noise.random() + rank * 200.0 * now_s,
        0.02 + 0.03 * rank,
    )
    device.reasons, device.processes = ("power_cap",) * rank, [frozenset({99})] * rank
    device.temperature_c = lambda: 40.0 + rank * 30.0 * (time.perf_counter() % 1.0)  # type: ignore[method-assign]
    bench = Bench(device, "cpu", idle_power_w=80.0, canary_every=9, repeats=1)
    spec = collective_tuple("all_reduce", 4096, "float32", 2)
    reading = bench.measure(
        Subject("operator", spec.id, spec.to_json()), Protocol(launch="eager"), STOPPING
    )
    burst, repeated = reading.details.burst is not None, reading.details.timing.attempts
    return {**seen, "flags": reading.flags, "burst": burst, "repeated": repeated}


if __name__ == "__main__":
    rank = int(sys.argv[3])
    ranks.join(torch.device("cpu"), rank, 2, sys.argv[1])
    json.dump(globals()[sys.argv[2]](rank), sys.stdout)
