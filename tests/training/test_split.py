"""Models that are split over cards, captured without cards: what rank 0 runs, and what is
refused.
"""

import json
from collections import Counter

import pytest

from farm.errors import CaptureError, UnsupportedModel, UsageError
from farm.models import catalog
from farm.operators.rebuild import rebuild
from farm.settings import settings
from farm.training.extract import extract
from farm.types.software import Software
from farm.types.variant import Variant
from tests.benchmark_process.test_group import TINY

pytest.importorskip("transformers")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    def registered(**changes):
        (tmp_path / "tiny").mkdir(exist_ok=True)
        (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY | changes))
        monkeypatch.setenv("FARM_MODELS", json.dumps({"tiny": str(tmp_path / "tiny")}))
        settings.cache_clear()
        return "tiny"

    return registered


def collectives(seen):
    found = Counter()
    for call in seen.calls:
        spec = seen.tuples[call.tuple_id]
        if spec.kind == "collective":
            found[spec.short_name, spec.tensors[0].numel] += 1
    return found


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_tensor_parallelism_runs_half_of_each_layer_and_two_all_reduces(tiny, phase):
    name = tiny()
    whole = extract(catalog.variant(name, 2, phase=phase))
    split = extract(catalog.variant(name, 2, phase=phase, tensor_parallel=2))
    assert split.refusal(name) is None
    rows = 2 * (64 if phase == "prefill" else 1)
    logits = 2 * 1 * 256 // 2
    assert collectives(split.capture) == {("all_reduce", rows * 32): 4, ("all_gather", logits): 1}
    products = {spec.operator for spec in split.capture.tuples.values()} & {
        "aten.mm.default",
        "aten.addmm.default",
    }
    assert products
    # PyTorch chooses other operators for the attention of each device, so it is one call.
    assert [one for one in split.capture.operators if "attention" in one] == [
        "torch.nn.functional.scaled_dot_product_attention"
    ]
    assert split.flops == pytest.approx(whole.flops / 2, rel=0.2)
    assert all(call.part == "" for call in split.capture.calls)
    for spec in split.capture.tuples.values():
        if spec.kind != "collective":
            rebuild(spec, "cpu").run()
    again = extract(catalog.variant(name, 2, phase=phase, tensor_parallel=2))
    assert again.capture.counts == split.capture.counts


def test_data_parallelism_is_captured_with_its_collectives_and_copies():
    alone = extract(catalog.variant("squeezenet1_1", 2, input_size=32, step="training"))
    ddp = extract(
        catalog.variant("squeezenet1_1", 2, input_size=32, step="training", data_parallel=2)
    )
    fsdp = extract(
        catalog.variant(
            "squeezenet1_1", 2, input_size=32, step="training", data_parallel=4, sharding="fsdp"
        )
    )
    weights = sum(one.numel() for one in catalog.build("squeezenet1_1").parameters())
    reduced = {
        size: number
        for (name, size), number in collectives(ddp.capture).items()
        if name == "all_reduce"
    }
    assert sum(size * number for size, number in reduced.items()) == weights
    gathered = sum(
        size * n for (name, size), n in collectives(fsdp.capture).items() if name == "all_gather"
    )
    scattered = sum(
        size * n
        for (name, size), n in collectives(fsdp.capture).items()
        if name == "reduce_scatter"
    )
    assert scattered >= weights
    assert 4 * gathered > scattered
    for found in (ddp, fsdp):
        assert found.refusal("squeezenet1_1") is None
        assert found.flops == found.model_flops == alone.flops
        assert {call.part for call in found.capture.calls} >= {"forward", "backward", "optimizer"}
        for spec in found.capture.tuples.values():
            if spec.kind != "collective":
                rebuild(spec, "cpu").run()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_split_step_for_a_card_adds_only_collectives_and_copies_to_the_step_of_one_card(sharding):
    said = {
        "layers": 2,
        "length": 16,
        "dtype": "bfloat16",
        "step": "training",
        "optimizer": "adamw-fused",
    }
    alone = extract(catalog.variant("gpt2", 2, **said), device_type="cuda").capture.operators
    split = extract(
        catalog.variant("gpt2", 2, **said, data_parallel=2, sharding=sharding), device_type="cuda"
    )
    assert not alone - split.capture.operators
    copies = (
        {"copy_", "mul"}
        if sharding == "ddp"
        else {"_chunk_cat", "_foreach_copy_", "split_with_sizes_copy"}
    )
    collective = {"ddp": {"all_reduce"}, "fsdp": {"all_gather", "reduce_scatter"}}[sharding]
    assert {one.split(".")[1] for one in split.capture.operators - alone} == copies | collective
    assert alone["aten._scaled_dot_product_cudnn_attention.default"] == 2
    assert (
        alone["aten.native_dropout.default"] == alone["aten.native_dropout_backward.default"] == 5
    )


@pytest.mark.parametrize(
    ("model", "said", "message"),
    [
        ("gpt2", {"tensor_parallel": 2}, "gpt2 has no plan for tensor parallelism"),
        ("resnet18", {"tensor_parallel": 2}, "resnet18 has no plan for tensor parallelism"),
        ("mixtral-8x7b", {"tensor_parallel": 2, "layers": 1}, "the farm does not know"),
        (
            "llama-3.1-8b",
            {"tensor_parallel": 3, "layers": 1},
            "has 32 attention heads, not a multiple of 3",
        ),
        (
            "llama-3.1-8b",
            {"tensor_parallel": 16, "layers": 1},
            "has 8 key value heads, not a multiple of 16",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_in_one_line(model, said, message):
    with pytest.raises(UnsupportedModel, match=message) as caught:
        extract(catalog.variant(model, 1, **said))
    assert caught.value.next_step
    assert "\n" not in caught.value.message


def test_a_size_that_the_cards_cannot_share_evenly_is_refused(tiny):
    with pytest.raises(UnsupportedModel, match=r"gate_proj' has the size 65"):
        extract(catalog.variant(tiny(intermediate_size=65), 1, tensor_parallel=2))


def test_ddp_with_parameters_that_the_step_does_not_use_is_refused_with_a_next_step():
    fields = {"layers": 1, "length": 8, "step": "training", "data_parallel": 2}
    with pytest.raises(CaptureError, match="DDP waits for the gradient") as refused:
        extract(catalog.variant("bert-base", 1, **fields))
    assert "--sharding fsdp" in refused.value.next_step


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel": 2, "data_parallel": 2, "step": "training"}, "do not work together"),
        ({"data_parallel": 2}, "--data-parallel is for training"),
        ({"tensor_parallel": 2, "step": "training"}, "needs --data-parallel"),
        ({"sharding": "fsdp", "step": "training"}, "--sharding needs --data-parallel"),
        (
            {"tensor_parallel": 2, "compile": "default"},
            "--compile does not work with several cards",
        ),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"tensor_parallel": 1025}, "At most 1024 cards"),
    ],
)
def test_combinations_that_are_not_measured_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Variant("net", 1, 32, **fields)
    with pytest.raises(UsageError, match="--cards is for a model of your own"):
        catalog.variant("resnet18", 1, distributed=2)


def test_one_card_leaves_ids_as_they_were_and_other_settings_of_nccl_change_them():
    assert (
        Variant("net", 1, 32).to_json()
        == Variant("net", 1, 32, tensor_parallel=1, sharding="ddp").to_json()
    )
    one, ring = Software("2.11.0"), Software("2.11.0", communication="nccl 2.28.3 NCCL_ALGO=Ring")
    assert "communication" not in one.to_json()
    assert len({one.id, ring.id, Software("2.11.0", communication="nccl 2.28.3").id}) == 3


def test_a_distributed_model_of_your_own_is_captured_on_its_cards(tmp_path, monkeypatch):
    (tmp_path / "own_split.py").write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "class Scaled(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * float(torch.arange(4).sum())\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, "
        "parallelize_module\n"
        "def net():\n"
        "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 8), "
        "torch.nn.Linear(8, 4))\n"
        "    model.append(Scaled())\n"
        "    plan = {'1': ColwiseParallel(), '2': RowwiseParallel()}\n"
        "    if dist.is_initialized():\n"
        "        parallelize_module(model, init_device_mesh('cpu', (2,)), plan)\n"
        "    return model\n"
    )
    monkeypatch.setenv("FARM_MODELS", '{"net": "own_split:net"}')
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    settings.cache_clear()
    variant = catalog.variant("net", 2, input_size=32, distributed=2)
    on_cpu, on_card = (extract(variant, device_type=kind) for kind in ("cpu", "cuda"))
    for found in (on_cpu, on_card):
        assert found.refusal("net") is None
        assert collectives(found.capture) == {("all_reduce", 8): 1}
    on_host = set(on_cpu.capture.operators - on_card.capture.operators)  # it costs a card nothing
    assert on_host == {f"aten.{name}.default" for name in ("arange", "sum", "_local_scalar_dense")}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("resnet18", {"input_size": 32, "data_parallel": 2, "sharding": "fsdp"}),
        ("codegen-350m", {"length": 8, "layers": 1}),
        ("t5-small", {"length": 8, "layers": 1, "dtype": "bfloat16"}),
    ],
    ids=["gradients on another device", "tensors on another device", "learned mask"],
)
def test_steps_are_predicted_for_a_card_as_far_as_possible(model, fields):
    variant = catalog.variant(model, 2, step="training", **fields)
    assert extract(variant, device_type="cuda").refusal(model) is None
