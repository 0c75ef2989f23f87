"""Tuples with tensors in pinned host memory on a real NVIDIA card. Skipped without one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from farm.addons.memory.memory_tier import PinnedMemory
from farm.addons.memory.offload import offload
from farm.benchmark.passes import numeric_flags
from farm.benchmark.subjects import passes_of, prepare
from farm.benchmark.torch_device import capture_graph
from farm.errors import Unmeasurable
from farm.operators.capture import capture
from farm.subjects.encoding import tensors_in
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD
CARD = torch.device("cuda", 0)


class Add(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.add(left, right)


class Attention(nn.Module):
    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)


class Known(PinnedMemory):
    """Knows what it handed out."""

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(
            host.data_ptr() <= address < host.data_ptr() + host.nbytes for host in self._held
        )


#: module, inputs, whether a pool is needed for its output
TUPLES = {
    "add": (Add(), ((32, 64, 56, 56), (32, 64, 56, 56)), False),
    "linear": (nn.Linear(1024, 1024), ((1024, 1024),), False),
    "relu": (nn.ReLU(), ((1024, 1024),), False),
    "softmax": (nn.Softmax(-1), ((1024, 1024),), False),
    "conv2d": (nn.Conv2d(64, 64, 3, padding=1), ((32, 64, 56, 56),), False),
    "depthwise": (nn.Conv2d(64, 64, 3, padding=1, groups=64), ((32, 64, 56, 56),), False),
    "batch_norm": (nn.BatchNorm2d(64), ((32, 64, 56, 56),), True),
    "pool": (nn.MaxPool2d(2), ((32, 64, 56, 56),), False),
    "layer_norm": (nn.LayerNorm(1024), ((8192, 1024),), True),
    "attention": (Attention(), ((8, 12, 512, 64),), True),
    "conv1d": (nn.Conv1d(64, 64, 3), ((32, 64, 4096),), True),
}


def subject_of(name: str) -> Subject:
    module, shapes, _ = {**TUPLES, "small_layer_norm": (nn.LayerNorm(64), ((64, 64),), True)}[name]
    inputs = [torch.ones(shape, device=CARD) for shape in shapes]
    with torch.no_grad():
        (spec,) = capture(module.eval().to(CARD), inputs, device_type="cuda").tuples.values()
    return Subject("operator", spec.id, spec.to_json())


@pytest.fixture(autouse=True)
def on_one_stream():
    with torch.no_grad(), numeric_flags(Protocol()), torch.cuda.stream(torch.cuda.Stream(CARD)):
        yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", TUPLES)
@pytest.mark.parametrize("placement", ["in0", "out0", "in0+out0"])
def test_what_is_slow_is_read_and_written_where_it_lies(name: str, placement: str) -> None:
    subject, slow = subject_of(name), Known(CARD)
    wanted = next(tensors_in(passes_of(subject, Protocol(residency="reuse"), CARD).first())).clone()
    passes = passes_of(
        subject,
        Protocol(residency="reuse", placement=placement),
        CARD,
        partial(offload, memory=slow),
    )
    found = next(tensors_in(passes.first()))
    torch.testing.assert_close(found, wanted)
    assert slow.holds(found) == ("out0" in placement)
    assert (passes.pool is not None) == (TUPLES[name][2] and "out0" in placement)
    del found
    results: list[object] = []
    graph = capture_graph(
        [lambda: results.append(passes.first())], CARD, passes.pool.id if passes.pool else None
    )
    graph.replay()
    torch.cuda.synchronize()
    found = next(tensors_in(results))
    torch.testing.assert_close(found, wanted)
    assert slow.holds(found) == ("out0" in placement)
    print(name, placement, passes.details.memory.workspaces)
    results.clear()
    del found, graph


@pytest.mark.parametrize("number", [0, 1, 2])
def test_of_outputs_as_small_as_each_other_one_is_placed_alone_or_none(number: int) -> None:
    subject, slow = subject_of("small_layer_norm"), Known(CARD)
    try:
        passes = passes_of(
            subject, Protocol(placement=f"out{number}"), CARD, partial(offload, memory=slow)
        )
    except Unmeasurable as error:
        assert error.reason == "not_available"  # noqa: PT017 - either is right
    else:
        assert [slow.holds(tensor) for tensor in tensors_in(passes.first())] == [number == 0]


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer_norm"])
def test_a_placed_workload_is_made_and_let_go_of(name: str) -> None:
    for placement in ("in0-2+out0", "out0"):
        workload = prepare(subject_of(name), Protocol(placement=placement), CARD, offload)
        for _ in range(3):
            workload.next_round().launch()
        torch.cuda.synchronize()
        assert (workload.details.memory.slow_memory, workload.replayed) == (
            "pinned host memory",
            True,
        )
        workload.close()
