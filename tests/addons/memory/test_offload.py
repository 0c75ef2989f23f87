"""Tuples with tensors in slow memory: a fake one, behind the same interface."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from farm.addons.memory.memory_tier import FarNode, PinnedMemory, SlowMemory
from farm.addons.memory.offload import _out_variant, offload
from farm.benchmark import subjects
from farm.devices.cpu import farthest_node, no_slow_memory
from farm.devices.device import Card
from farm.errors import Unmeasurable
from farm.operators.capture import capture
from farm.types.protocol import Protocol
from farm.types.subject import Subject

CPU = torch.device("cpu")
aten = torch.ops.aten


class Fake(SlowMemory):
    """Memory like any other that knows what it handed out."""

    name = "fake memory"

    def __init__(self):
        self.storages = []

    def storage(self, size_bytes):
        self.storages.append(torch.empty(size_bytes, dtype=torch.uint8).untyped_storage())
        return self.storages[-1]

    def holds(self, tensor):
        return tensor.untyped_storage().data_ptr() in [
            storage.data_ptr() for storage in self.storages
        ]


class Add(nn.Module):
    def forward(self, left, right):
        return torch.add(left, right)


class Largest(nn.Module):
    def forward(self, values):
        return torch.topk(values, 2)


def passes_of(module, *inputs, placement="", slow=None, residency="reuse"):
    with torch.no_grad():
        (spec,) = capture(module.eval(), inputs).tuples.values()
        protocol = Protocol(launch="eager", residency=residency, placement=placement)
        return subjects.passes_of(
            Subject("operator", spec.id, spec.to_json()),
            protocol,
            CPU,
            partial(offload, memory=slow),
        )


IMAGE = (1, 4, 8, 8)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Add(), (torch.ones(8), torch.ones(8))),
        (nn.Linear(4, 8), (torch.ones(2, 3, 4),)),
        (nn.ReLU(), (torch.ones(8),)),
        (nn.Softmax(-1), (torch.ones(2, 8),)),
        (nn.BatchNorm2d(4), (torch.ones(IMAGE),)),
        (nn.BatchNorm2d(4), (torch.ones(IMAGE).to(memory_format=torch.channels_last),)),
        (nn.MaxPool2d(2), (torch.ones(IMAGE),)),
    ],
)
@torch.no_grad()
def test_an_output_is_written_where_it_is_to_lie(module, inputs):
    slow = Fake()
    wanted = passes_of(module, *inputs).first()
    passes = passes_of(module, *inputs, placement="out0", slow=slow)
    for _ in range(2):
        found = passes.first()
        assert slow.holds(found)
        assert len(slow.storages) == 1
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted)
    assert (passes.details.memory.slow_memory, passes.details.memory.workspaces) == (
        "fake memory",
        "fast",
    )


class DispatchModes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the aten calls that Python sees, and asserts that no other mode is active."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        self.calls += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_timed_eager_pass_runs_no_python_that_selects_memory():
    for module, inputs in ((nn.ReLU(), (torch.ones(8),)), (nn.Linear(4, 8), (torch.ones(2, 4),))):
        passes = passes_of(module, *inputs, placement="out0", slow=Fake())
        with DispatchModes() as seen:
            passes.first()
        assert seen.calls == 1


class Normalized(nn.Module):
    def forward(self, values):
        return nn.functional.cosine_similarity(values, values, dim=0)


@torch.no_grad()
def test_an_eager_pass_that_computes_more_than_its_outputs_is_not_placed():
    with pytest.raises(Unmeasurable, match="with eager launch") as refused:
        passes_of(Normalized(), torch.ones(4, 8), placement="out0", slow=Fake())
    assert refused.value.reason == "not_available"


@torch.no_grad()
def test_of_several_outputs_one_may_be_slow():
    slow = Fake()
    values, indices = passes_of(Largest(), torch.ones(2, 8), placement="out1", slow=slow).first()
    assert slow.holds(indices)
    assert not slow.holds(values)


@torch.no_grad()
def test_inputs_and_parameters_lie_where_they_are_placed_and_so_do_copies_of_them():
    slow = Fake()
    wanted = passes_of(nn.Linear(4, 8), torch.ones(2, 4)).first()
    passes = passes_of(
        nn.Linear(4, 8), torch.ones(2, 4), placement="in0+in2", slow=slow, residency="stream"
    )
    torch.testing.assert_close(passes.first(), wanted)
    assert len(slow.storages) == 2
    assert [slow.holds(memory) for memory in passes.inputs] == [True]
    torch.testing.assert_close(passes.copy(1)(), wanted)
    assert len(slow.storages) == 4


@torch.no_grad()
def test_what_writes_only_where_it_allocates_is_not_placed():
    with pytest.raises(Unmeasurable, match=r"slow memory: aten\.convolution\.default") as refused:
        passes_of(nn.Conv2d(4, 4, 3), torch.ones(IMAGE), placement="out0", slow=Fake())
    assert refused.value.reason == "not_available"


@pytest.mark.parametrize(
    ("placement", "line"), [("in3", "names in3, but"), ("out1", "names out1, but")]
)
@torch.no_grad()
def test_a_tensor_that_is_not_there(placement, line):
    with pytest.raises(Unmeasurable, match=line):
        passes_of(nn.Linear(4, 8), torch.ones(2, 4), placement=placement, slow=Fake())


def test_variants_that_compute_as_ever_and_copy_do_not_count():
    assert _out_variant(aten.add.Tensor, "CPU") == (aten.add.out, ("out",))
    assert _out_variant(aten.topk.default, "CPU") == (aten.topk.values, ("values", "indices"))
    assert torch.Tag.generated in aten.native_layer_norm.out.tags
    for generated in (
        aten.convolution.default,
        aten.native_layer_norm.default,
        aten.embedding.default,
    ):
        assert _out_variant(generated, "CPU") is None
    assert (
        _out_variant(aten.cudnn_convolution.default, "CPU") is None
    )  # real, and no kernel for this kind of card


def test_a_card_without_mapped_memory_says_so():
    with pytest.raises(Unmeasurable, match="cannot map the host's memory"):
        PinnedMemory(torch.device("cuda", 99))


def test_a_host_with_one_node_has_nothing_that_is_slower(tmp_path):
    (tmp_path / "node0").mkdir()
    with pytest.raises(Unmeasurable, match="one NUMA node"):
        FarNode(tmp_path)
    card = Card(id="CPU-1", kind="cpu", model="a CPU", memory_bytes=1, host="here")
    assert "one NUMA node" in no_slow_memory(card, tmp_path)
    assert no_slow_memory(dataclasses.replace(card, kind="simulated"), tmp_path) == ""


def test_the_farthest_node_is_taken(tmp_path):
    for number in range(3):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "distance").write_text("10 12 32\n")
    assert farthest_node(tmp_path) == 2


def test_host_memory_that_cannot_be_pinned_is_one_line_with_the_limit():
    with pytest.raises(Unmeasurable, match=r"cannot be pinned: .*ulimit -l") as refused:
        PinnedMemory.check_room(2**60)
    assert refused.value.reason == "out_of_memory"
