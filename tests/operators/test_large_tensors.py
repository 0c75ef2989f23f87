"""Tensors of more than 2^31 elements are captured and labelled without their memory."""

import pytest

import farm
from farm.models import catalog, own
from farm.subjects.label import label_of
from farm.training.extract import extract

LARGE = 2**31 + 8

FILE = f"""
import torch
from torch import nn

class Sine(nn.Module):
    def forward(self, values):
        return values.sin()

class Products(nn.Module):
    def forward(self, values):
        return (values[:, None, :] * values[:, :, None]).sum(-1)

def row():
    return Sine().eval(), torch.empty({LARGE}, device="meta")

def rows():
    return Sine().eval(), torch.empty(2, {LARGE}, device="meta", dtype=torch.bfloat16)

def inside():
    return Products().eval(), torch.empty(9, 16384, device="meta")

def weight():
    return nn.Embedding(2**20 + 1, 2056), torch.randint(0, 100, (4, 16))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "large.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("row", [f"sin | {LARGE} fp32"]),
        ("rows", [f"sin | 2x{LARGE} bf16"]),
        ("inside", ["mul | 9x1x16384 + 9x16384x1 fp32", "sum -1 | 9x16384x16384 fp32"]),
        ("weight", ["Embedding 1048577->2056 | 4x16 fp32"]),
    ],
)
def test_they_are_captured_and_labelled(file, name, labels):
    model = own.register(f"{file}:{name}")
    found = extract(farm.variant(model, catalog.resolve(model).usual_batch(32)))
    assert found.refusal(name) is None
    assert [label_of(spec) for spec in found.capture.tuples.values()] == labels


def test_a_row_that_is_too_long_for_a_batch_is_one_row(file):
    assert catalog.resolve(own.register(f"{file}:row")).usual_batch(32) == 1
