"""Collectives and split models on two real NVIDIA cards of one host, through NCCL. Skipped without
them.

With -s each reading is printed: time, bus bandwidth, energy of both cards, flags and where the time
went."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time

import pytest
import torch

from farm.benchmark_process.group import BenchmarkGroup
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.host import discover
from farm.errors import Unmeasurable
from farm.models import catalog
from farm.settings import settings
from farm.subjects.collective_calls import collective_tuple
from farm.training.extract import extract
from farm.training.version import versioned
from farm.types.collective import COLLECTIVES
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject


def pids_of(group):
    return [process.pid for process in group._ranks]


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA cards"),
]
GRAPH, EAGER = Protocol(), Protocol(launch="eager")
TRAINING = {"input_size": 64, "step": "training", "data_parallel": 2, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def pair():
    with contextlib.closing(
        BenchmarkGroup([card.id for card in discover(settings())[:2]])
    ) as group:
        yield group


def collective(name, elements, **more):
    spec = collective_tuple(name, elements, "bfloat16", 2, **more)
    return Subject("operator", spec.id, spec.to_json())


def read(pair, subject, protocol=GRAPH) -> Reading:
    began_s = time.monotonic()
    answer = pair.measure(MeasureRequest(subject, protocol, Stopping()), timeout_s=180.0)
    reading, details = answer.reading, answer.reading.details
    rate = (
        f", {details.cards.bus_bytes_per_s / 1e9:.1f} GB/s" if details.cards.bus_bytes_per_s else ""
    )
    print(
        f"\n{answer.software.communication}\n{reading.time_us.value:.1f} us ± "
        f"{reading.time_us.half_width:.2f}{rate}, "
        f"{reading.energy_mj.value} mJ = {[one.energy_mj.value for one in details.cards.ranks]}, {reading.flags}, "
        f"{details.conditions.foreign_processes}, {time.monotonic() - began_s:.1f} s: {reading.cost_s}"
    )
    assert answer.software.communication.startswith("nccl 2.")
    assert len({one.card for one in details.cards.ranks}) == 2
    assert reading.energy_mj.value == pytest.approx(
        sum(one.energy_mj.value for one in details.cards.ranks)
    )
    assert not {"shared", "lacks_sensors"} & set(reading.flags)
    return reading


@pytest.mark.parametrize("elements", [2**12, 2**24])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_in_a_graph(pair, name, elements):
    reading = read(pair, collective(name, elements))
    assert reading.details.context is not None, reading.details.missing.get("context")
    if elements == 2**24:
        assert reading.details.cards.bus_bytes_per_s > 20e9, (
            "slower than PCI Express: the cards have no direct access"
        )


def test_the_ranks_stay_for_the_next_item(pair):
    read(pair, collective("all_reduce", 2**20))
    pids = pids_of(pair)
    assert read(pair, collective("all_reduce", 2**20), EAGER).time_us.value > 0
    assert pids_of(pair) == pids


def test_a_collective_beside_a_matrix_product(pair):
    overlap = read(pair, collective("all_reduce", 2**26, beside=8192)).details.cards.overlap
    print(overlap)
    assert overlap.collective_us > 0
    assert overlap.together_us < overlap.collective_us + overlap.product_us


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_language_model_on_two_cards(pair, phase):
    said = {"phase": phase, "layers": 2, "dtype": "bfloat16", "tensor_parallel": 2}
    variant = versioned(catalog.variant("llama-3.1-8b", 4, **said))
    reading = read(pair, Subject("variant", variant.id, variant.to_json()))
    details = reading.details
    assert details.timing.eager_time_us is not None, details.missing.get("eager_time")
    assert details.order.places, details.missing.get("places")
    assert details.order.added, details.missing.get("added")
    assert set(details.order.looped_us) == set(details.order.places)


@pytest.mark.parametrize(
    "variant",
    [
        (
            "llama-3.1-8b",
            4,
            {"phase": "decode", "layers": 2, "dtype": "bfloat16", "tensor_parallel": 2},
        ),
        ("resnet18", 32, TRAINING),
        ("resnet18", 32, TRAINING | {"sharding": "fsdp"}),
    ],
    ids=str,
)
def test_rank_0_verifies_the_operators(pair, variant):
    model, batch, said = variant
    variant = versioned(catalog.variant(model, batch, **said))
    subject, protocol = (
        Subject("variant", variant.id, variant.to_json()),
        Protocol(grad=bool(variant.step)),
    )
    predicted = dict(extract(variant, device_type="cuda").capture.counts)
    answer = pair.measure(
        MeasureRequest(subject, protocol, Stopping(), predicted=predicted), timeout_s=180.0
    )
    assert answer.reading.details.missing.get("verification") is None
    print(answer.verification.differences)
    assert answer.verification.launch == "graph"
    if not variant.step:
        assert answer.verification.matches


@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_training_step_on_two_cards(pair, sharding, launch):
    variant = catalog.variant("resnet18", 32, sharding=sharding, **TRAINING)
    read(
        pair, Subject("variant", variant.id, variant.to_json()), Protocol(launch=launch, grad=True)
    )


@pytest.mark.parametrize(
    ("sent", "reason"), [(signal.SIGKILL, "crashed"), (signal.SIGSTOP, "hung")]
)
def test_a_rank_that_dies_or_hangs_inside_nccl_ends_the_group(pair, sent, reason):
    endless = dataclasses.replace(Stopping(), minimum_s=300.0, maximum_s=600.0)
    pair.wait_ready()

    def on_phase(phase, _):
        if phase == "window":
            os.kill(pids_of(pair)[1], sent)

    with pytest.raises(Unmeasurable) as caught:
        pair.measure(
            MeasureRequest(collective("all_reduce", 2**20), GRAPH, endless),
            timeout_s=25.0,
            on_phase=on_phase,
        )
    assert caught.value.reason == reason
    assert not pair.alive
    assert read(pair, collective("broadcast", 2**20)).time_us.value > 0, "a new group measures"
