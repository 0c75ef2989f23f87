"""The catalog names what torchvision has, refuses with reasons, and builds without memory or downloads."""

import subprocess
import sys

import pytest

from farm.errors import UnknownModel, UnsupportedModel, UsageError
from farm.models import catalog
from farm.words.protocol import Variant


def test_the_written_list_is_torchvisions():
    models = catalog.torchvision_models()
    for task, module in (
        ("classification", models),
        ("segmentation", models.segmentation),
        ("video", models.video),
    ):
        assert catalog.names(task) == sorted(models.list_models(module))
    assert set(catalog.names()) | set(catalog._REFUSED) == set(models.list_models())
    assert len(catalog.names("classification")) == 80


def test_names_need_no_torch():
    code = "import sys; from farm.models import catalog; catalog.names(); catalog.find('resnet50'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelt_model_gets_the_nearest_names():
    with pytest.raises(UnknownModel) as caught:
        catalog.find("resnet5O")
    assert "resnet50" in caught.value.next_step


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "quantized_resnet18", "raft_small"])
def test_what_cannot_be_taken_apart_is_refused_with_a_reason(name):
    with pytest.raises(UnsupportedModel, match=f"{name} is a"):
        catalog.find(name)


@pytest.mark.parametrize(("name", "size"), [("vit_b_16", 160), ("inception_v3", 64), ("resnet18", 0)])
def test_a_size_that_the_model_does_not_take_is_refused(name, size):
    with pytest.raises(UsageError) as caught:
        catalog.example_inputs(name, 1, size)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "wrong", [{"dtype": "float31"}, {"memory_format": "nhwc"}, {"mode": "x"}, {"weights": "imagenet"}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(UsageError):
        catalog.build("resnet18", **wrong)


def test_batch_zero_is_refused():
    with pytest.raises(UsageError, match="batch"):
        catalog.example_inputs("resnet18", 0)


def test_a_model_on_meta_holds_no_memory():
    model = catalog.build("vgg19")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_same_seed_gives_the_same_weights_and_another_another():
    import torch

    first, again, other = (catalog.build("squeezenet1_1", device="cpu", seed=seed) for seed in (1, 1, 2))
    key = "classifier.1.weight"
    assert torch.equal(first.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])


def test_building_leaves_the_callers_random_state_alone():
    import torch

    state = torch.random.get_rng_state()
    catalog.build("squeezenet1_1", device="cpu")
    assert torch.equal(state, torch.random.get_rng_state())


def test_dtype_and_memory_format_reach_weights_and_input():
    import torch

    model = catalog.build("resnet18", dtype="bfloat16", memory_format="channels_last")
    (image,) = catalog.example_inputs("resnet18", 2, 64, dtype="bfloat16", memory_format="channels_last")
    assert model.conv1.weight.dtype == image.dtype == torch.bfloat16
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image.shape == (2, 3, 64, 64)


def test_the_table_of_costs_has_every_model_and_says_what_taking_it_apart_does():
    from farm.operators.taking_apart import take_apart

    entries = [catalog.find(name) for name in catalog.names()]
    assert [entry.name for entry in entries if not entry.parameters or not entry.flops] == []
    for name in ("squeezenet1_1", "mobilenet_v3_small"):
        entry = catalog.find(name)
        assert entry.parameters == sum(parameter.numel() for parameter in catalog.build(name).parameters())
        assert entry.flops == take_apart(Variant(name, 1, entry.input_size)).flops
