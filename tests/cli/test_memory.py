"""`farm memory`: what a training step needs, from a capture alone."""

import json

import pytest


def test_memory_tells_the_peak_and_what_it_is_made_of(farm):
    said = farm("memory", "resnet18", "-b", "2", "--input-size", "64", "--optimizer", "adamw", "--json")
    assert said.code == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["loss"] == "cross-entropy"
    assert found["times"] == {"from": "roofline", "card": "H200"}
    peak = found["peak"]
    assert sum(peak["bytes_by_role"].values()) == peak["bytes"] == max(row["held_bytes"] for row in found["kernels"])
    assert peak["bytes"] <= peak["allocated_bytes"]
    assert found["base_bytes"] == sum(row["size_bytes"] for row in found["tensors"] if row["global"])
    assert found["step_us"] == pytest.approx(sum(row["time_us"] for row in found["kernels"]))
    (weight,) = [row for row in found["tensors"] if row["name"] == "conv1.weight"]
    assert (weight["role"], weight["shape"], weight["birth"]) == ("parameter", [64, 3, 7, 7], None)
    (state,) = [row for row in found["tensors"] if row["name"] == "conv1.weight.exp_avg"]
    assert state["inactive_periods"][-1]["over_the_end"]  # the optimizer alone uses it
    convolutions = [row for row in found["kernels"] if row["operator"] == "aten.convolution.default"]
    assert len(convolutions) == 20
    assert min(row["flops"] for row in convolutions) > 0


def test_memory_says_what_its_times_and_operators_are(farm):
    said = farm("memory", "resnet18", "-b", "2", "--input-size", "64").stdout
    assert "a capture without a card is a prediction for a card" in said
    assert "estimates, from an H200's data sheet" in said
    assert "layer4.1.conv2.weight" in said


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("resnet18", "--optimizer", "lion"), "optimizer 'lion' is unknown"),
        (("resnet18", "--card", "Voodoo"), "There is no data sheet for 'Voodoo'."),
        (("resnet18", "--recompute", "layer9"), "The model has no module 'layer9'."),
    ],
)
def test_what_cannot_be_asked_is_one_line(farm, asked, told):
    said = farm("memory", *asked)
    assert (said.code, said.stdout) == (2, "")
    assert told in said.stderr
