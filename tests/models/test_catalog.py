"""The catalog names what torchvision has, refuses with reasons, and builds without memory or
downloads.
"""

import subprocess
import sys

import pytest

from farm.errors import UnknownModel, UnsupportedModel, UsageError
from farm.models import catalog, torchvision
from farm.types.request import Request
from farm.types.variant import Variant


def test_the_written_list_is_torchvisions():
    models = torchvision.torchvision_models()
    for task, module in (
        ("classification", models),
        ("segmentation", models.segmentation),
        ("video", models.video),
    ):
        assert catalog.names(task, "torchvision") == sorted(models.list_models(module))
    assert torchvision.all_names() == set(models.list_models())
    assert len(catalog.names("classification", "torchvision")) == 80


def test_names_need_no_torch():
    code = (
        "import sys; from farm.models import catalog; catalog.names(); catalog.find('resnet50'); "
        "assert 'torch' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelt_model_gets_the_nearest_names():
    with pytest.raises(UnknownModel) as caught:
        catalog.find("resnet5O")
    assert "resnet50" in caught.value.next_step


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "quantized_resnet18", "raft_small"])
def test_what_cannot_be_extracted_is_refused_with_a_reason(name):
    with pytest.raises(UnsupportedModel, match=f"{name} is a"):
        catalog.find(name)


@pytest.mark.parametrize(
    ("name", "size"), [("vit_b_16", 160), ("inception_v3", 64), ("resnet18", 0)]
)
def test_a_size_that_the_model_does_not_take_is_refused(name, size):
    with pytest.raises(UsageError) as caught:
        catalog.variant(name, input_size=size)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "float31"}, {"memory_format": "nhwc"}, {"mode": "x"}, {"weights": "imagenet"}],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(UsageError):
        catalog.build(catalog.variant("resnet18", **wrong))


def test_batch_zero_is_refused():
    with pytest.raises(UsageError, match="batch"):
        catalog.variant("resnet18", 0)


def test_a_model_on_meta_holds_no_memory():
    model = catalog.build("vgg19")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_same_seed_gives_the_same_weights_and_another_another():
    import torch

    first, again, other = (
        catalog.build("squeezenet1_1", device="cpu", seed=seed) for seed in (1, 1, 2)
    )
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

    variant = catalog.variant(
        "resnet18", 2, input_size=64, dtype="bfloat16", memory_format="channels_last"
    )
    model, (image,) = catalog.build(variant), catalog.example_inputs(variant)
    assert model.conv1.weight.dtype == image.dtype == torch.bfloat16
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image.shape == (2, 3, 64, 64)


def test_the_table_of_costs_has_every_model_and_says_what_taking_it_apart_does():
    from farm.training.extract import extract

    entries = [catalog.find(name) for name in catalog.names(source="torchvision")]
    assert [entry.name for entry in entries if not entry.parameters or not entry.flops] == []
    for name in ("squeezenet1_1", "mobilenet_v3_small"):
        entry = catalog.find(name)
        assert entry.parameters == sum(
            parameter.numel() for parameter in catalog.build(name).parameters()
        )
        assert entry.flops == extract(Variant(name, 1, entry.input_size)).flops


@pytest.mark.parametrize(
    ("about", "known_id"),
    [
        (("resnet18", 32, 224), "7d058b9a36f1aad32b4e302d561eaa03"),
        (
            ("vit_b_16", 8, 224, "bfloat16", "channels_last", "train"),
            "7f72ba2ab9ea9314bb88a68b288dda6e",
        ),
    ],
)
def test_a_variant_that_was_read_before_there_were_other_sources_has_the_id_that_it_had(
    about, known_id
):
    assert Variant(*about).id == known_id
    assert Request(variant=Variant("resnet18", 32, 224)).id == "55606b6e451a2114d894daf62716bfb7"


def test_a_name_may_carry_its_source():
    assert catalog.find("torchvision/resnet18") == catalog.find("resnet18")
    assert catalog.variant("torchvision/resnet18").model == "resnet18"
    assert catalog.matching("torchvision/resnet1?") == ["resnet18"]
    with pytest.raises(UnknownModel, match="no model named 'nowhere/resnet18'"):
        catalog.find("nowhere/resnet18")
    with pytest.raises(UsageError, match="no model source 'nowhere'"):
        catalog.names(source="nowhere")


def test_a_training_step_is_a_variant_in_train_mode_with_an_optimizer():
    step = catalog.variant("resnet50", 32, step="training")
    assert (step.mode, step.optimizer, str(step)) == (
        "train",
        "sgd",
        "resnet50 32x224 float32 training sgd",
    )
    more = catalog.variant(
        "gpt2",
        8,
        step="training",
        optimizer="adamw-fused",
        amp="bfloat16",
        accumulate=2,
        recompute="blocks",
    )
    assert (
        str(more)
        == "gpt2 8x512 tokens float32 training adamw-fused amp bfloat16 accumulate 2 recompute blocks"
    )
    assert Variant.from_json(more.to_json()) == more


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"optimizer": "sgd"}, "--optimizer is for a training step"),
        ({"accumulate": 2}, "--accumulate is for a training step"),
        ({"step": "training", "optimizer": "lion"}, "optimizer 'lion' is unknown"),
        ({"step": "training", "accumulate": 0}, "accumulate is 0"),
        ({"step": "evaluation"}, "step 'evaluation' is unknown"),
    ],
)
def test_what_no_step_takes_is_refused_in_one_line(said, problem):
    with pytest.raises(UsageError) as caught:
        catalog.variant("resnet18", **said)
    assert problem in caught.value.message
    assert caught.value.next_step
