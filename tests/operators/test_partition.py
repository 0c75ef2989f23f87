"""The tuples of each architecture of torchvision partition its execution, are rebuilt alike, and add
up to its FLOPs.
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
from tests import slow

alike = functools.partial(pytest.param, marks=slow.ALIKE)
#: One model of each architecture of torchvision, the one with the fewest operators: its larger
#: models have the same modules with other widths and more often.
ARCHITECTURES = (
    "alexnet",
    "convnext_tiny",
    alike("deeplabv3_mobilenet_v3_large"),
    alike("densenet121"),
    "efficientnet_b0",
    alike("efficientnet_v2_s"),
    alike("fcn_resnet50"),
    alike("googlenet"),
    alike("inception_v3"),
    alike("lraspp_mobilenet_v3_large"),
    alike("maxvit_t"),
    alike("mc3_18"),
    "mnasnet0_5",
    alike("mobilenet_v2"),
    "mobilenet_v3_small",
    alike("mvit_v1_b"),
    alike("mvit_v2_s"),
    alike("r2plus1d_18"),
    "r3d_18",
    "regnet_x_400mf",
    alike("regnet_y_400mf"),
    "resnet18",
    alike("resnet50"),
    alike("resnext50_32x4d"),
    alike("s3d"),
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    alike("swin_t"),
    alike("swin_v2_t"),
    alike("swin3d_t"),
    "vgg11",
    alike("vgg11_bn"),
    "vit_b_32",
    alike("wide_resnet50_2"),
)


@pytest.mark.parametrize("name", ARCHITECTURES)
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
    "name", ["resnet18", "vit_b_32", "efficientnet_b0", alike("densenet121"), "swin_v2_t"]
)
def test_training_leaves_no_gap(name):
    found = predict(
        catalog.build(catalog.variant(name, mode="train")),
        catalog.example_inputs(catalog.variant(name, 2)),
    )
    assert found.gaps == ()
    assert found.overlaps == ()


@pytest.mark.parametrize(
    "name", ["vit_b_32", alike("swin_t"), "swin_v2_t", alike("maxvit_t"), "shufflenet_v2_x0_5"]
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
