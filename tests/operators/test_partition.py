"""The tuples of every torchvision model partition its execution, are rebuilt alike, and add up to
its FLOPs.
"""

import functools
from collections import Counter

import pytest

from benchmarks.replay_tuples import mismatches
from farm.models import catalog
from farm.operators import self_check
from farm.operators.capture import capture, predict
from farm.operators.cost import cost, model_flops
from farm.subjects.label import LENGTH, label_of

slow = functools.partial(pytest.param, marks=pytest.mark.slow(reason="one of many alike"))
#: Families whose smallest model takes 2 s or more. Most of them have smaller relatives here, or are
#: in other tests.
LONG = (
    "deeplabv",
    "densenet",
    "googlenet",
    "inception",
    "lraspp",
    "maxvit",
    "mvit",
    "s3d",
    "swin",
    "swin3d",
)


def _one_of_each_family_and_the_others_if_there_is_time() -> list[object]:
    names = catalog.names(source="torchvision")
    large_first = sorted(names, key=lambda name: catalog.find(name).parameters or 0, reverse=True)
    smallest = {name.split("_")[0].rstrip("0123456789"): name for name in large_first}
    now = {name for family, name in smallest.items() if family not in LONG}
    return [name if name in now else slow(name) for name in names]


@pytest.mark.parametrize("name", _one_of_each_family_and_the_others_if_there_is_time())
def test_every_costing_operator_belongs_to_exactly_one_tuple(name):
    model, inputs = catalog.build(name), catalog.example_inputs(name)
    found = predict(model, inputs)
    assert found.gaps == ()
    assert found.overlaps == ()
    assert sum(found.counts.values()) == len(found.calls) > 0
    summed = sum(
        count * cost(found.tuples[tuple_id]).flops for tuple_id, count in found.counts.items()
    )
    assert summed == model_flops(model, inputs)
    assert self_check.checked(found, "cpu").mismatches == {}
    labels = Counter(label_of(spec) for spec in found.tuples.values())
    assert [label for label, number in labels.items() if number > 1] == [], (
        "labels tell the tuples of a model apart"
    )
    assert max(map(len, labels)) <= LENGTH + 1


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_b_32", "efficientnet_b0", slow("densenet121"), "swin_v2_t"]
)
def test_training_leaves_no_gap(name):
    found = predict(
        catalog.build(catalog.variant(name, mode="train")),
        catalog.example_inputs(catalog.variant(name, 2)),
    )
    assert found.gaps == ()
    assert found.overlaps == ()


@pytest.mark.parametrize(
    "name", ["vit_b_32", slow("swin_t"), "swin_v2_t", slow("maxvit_t"), "shufflenet_v2_x0_5"]
)
def test_attention_and_all_around_it_replay_alike_on_real_tensors(name):
    found = capture(catalog.build(name, device="cpu"), catalog.example_inputs(name, device="cpu"))
    assert mismatches(found, "cpu") == []


def test_attention_in_training_replays_alike_on_real_tensors():
    # The slow path folds its batch into one product or not, by whether the weights ask for
    # gradients.
    model = catalog.build(catalog.variant("vit_b_32", mode="train"), device="cpu")
    found = capture(model, catalog.example_inputs(catalog.variant("vit_b_32", 2), device="cpu"))
    assert mismatches(found, "cpu") == []
