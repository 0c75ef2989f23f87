"""Training steps whose sizes or branches depend on values run on the CPU to be captured."""

import pytest
import torch

import farm
from farm.errors import CaptureError
from farm.models import own
from farm.operators.output_sizes import is_sized_by_values
from farm.operators.rebuild import rebuild
from farm.training import extract as extracting
from farm.training.extract import extract

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(16, 16), function

    def forward(self, values):
        return self.function(self.layer(values))

def routed(values):
    out = torch.zeros_like(values)
    for expert in range(2):
        rows = ((values[:, 0] > 0) == bool(expert)).nonzero()[:, 0]
        out = out.index_add(0, rows, values[rows] * (expert + 1))
    return out

def grouped(values):
    ends = torch.tensor([1, 4], dtype=torch.int32)
    experts = values.new_ones(2, 16, 16).bfloat16()
    return torch._grouped_mm(values.bfloat16(), experts, offs=ends).float()

FUNCTIONS = {
    "mask": lambda values: values[values > 0] * 2,
    "masked_select": lambda values: torch.masked_select(values, values > 0).sum(),
    "placed": lambda values: values.index_put((values > 0,), values[values > 0] * 2),
    "counts": lambda values: values.repeat_interleave((values[:, 0] > 0).long() + 1, dim=0),
    "branch": lambda values: values * 2 if values.sum() > 0 else values,
    "drawn": lambda values: values * torch.randint(1, 9, ()).item() @ torch.ones(16, 2),
    "normal": lambda values: torch.distributions.Normal(values, 1.0).rsample(),
    "routed": routed,
    "grouped": grouped,
}

def made(name):
    torch.manual_seed(2)
    return Net(FUNCTIONS[name]), torch.randn(4, 16)

for name in FUNCTIONS:
    globals()[name] = lambda name=name: made(name)
"""
NAMES = ("mask", "masked_select", "placed", "counts", "branch", "drawn", "normal", "routed")


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "sized_by_values.py"
    file.write_text(MODELS)

    def made(name, **fields):
        registered = own.register(f"{file}:{name}")
        return farm.variant(registered, 4, step="training", optimizer="sgd", **fields)

    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_captured_completely_and_each_tuple_is_its_call(variant, name, monkeypatch):
    # The compiler switches this off for the whole process; a distribution then reads no value.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    found = extract(variant(name), device_type="cuda")
    captured = found.capture
    assert captured.with_values
    assert (captured.gaps, captured.overlaps, captured.mismatches) == ((), (), {})
    assert found.flops == found.model_flops
    assert {call.part for call in captured.calls} >= {"forward", "loss", "backward", "optimizer"}
    assert "optimizer" in {call.stage for call in captured.calls}
    for spec in captured.tuples.values():
        rebuild(spec, "cpu").run()
        if is_sized_by_values(spec):
            assert any(tensor.values is not None for tensor in spec.tensors)
    assert "sizes or branches depend on values" in found.note_on_values


def test_a_step_that_needs_no_values_does_not_run_with_them():
    found = extract(farm.variant("resnet18", 2, input_size=32, step="training", optimizer="sgd"))
    assert not found.capture.with_values
    assert found.note_on_values == ""


def test_a_product_of_groups_is_a_part_of_a_step(variant):
    found = extract(variant("grouped"), device_type="cuda")
    captured = found.capture
    assert (captured.gaps, captured.overlaps, captured.mismatches) == ((), (), {})
    products = [spec for spec in captured.tuples.values() if spec.short_name == "_grouped_mm"]
    assert len(products) == 2  # forward, and the gradient of the rows
    for spec in products:
        ends = next(
            tensor
            for tensor in rebuild(spec, "cpu").tensors
            if tensor.dtype.is_signed and not tensor.is_floating_point()
        )
        assert ends.tolist() == [2, 4]  # equal segments


def test_a_step_that_is_too_large_to_run_says_so(variant, monkeypatch):
    monkeypatch.setattr(extracting, "MOST_RUN_BYTES", 4096)
    with pytest.raises(CaptureError, match="with gradients and states take") as refused:
        extract(variant("mask"))
    assert "smaller variant" in refused.value.next_step
