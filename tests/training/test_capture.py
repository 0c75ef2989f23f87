"""One training step extracted: every operator has exactly one part, and looking changes nothing."""

import contextlib
import functools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

import farm
from farm.errors import CaptureError, SettingsError, UnseenOperators, UnsupportedModel, UsageError
from farm.models import catalog, own
from farm.operators.fake_pass import STANDS_FOR_A_CARD, fake_pass
from farm.operators.profiler import profiled
from farm.settings import settings
from farm.training.capture import capture_step
from farm.training.extract import extract, extract_step
from farm.training.step import (
    ForwardPass,
    Loss,
    TrainingStep,
    blocks_of,
    checkpoint_modules,
    loss_of,
)
from tests import slow
from tests.operators.fallback import Fallback

CPU = torch.device("cpu")


class Residual(nn.Module):
    """Two users of one activation, a parameter used twice, an operation in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x + self.second(self.second(x).relu_())
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def stepping(model, *inputs, optimizer="sgd", **more):
    def make_loss(output):
        return loss_of(output, causal=False, masked=False, device=CPU)

    return TrainingStep(model.train(), inputs, optimizer=optimizer, make_loss=make_loss, **more)


def extract_from_catalog(name, batch=2, device_type="cpu", **said):
    return extract_step(
        catalog.variant(name, batch, step="training", **said), device_type=device_type
    )


def parts(seen):
    return Counter(call.part for call in seen.calls)


@pytest.mark.parametrize(
    ("optimizer", "amp"),
    [
        ("sgd", None),
        ("adam", None),
        ("adamw-foreach", None),
        ("adamw-fused", None),
        ("sgd-fused", torch.float16),
    ],
)
def test_what_runs_when_nobody_looks_runs_when_it_is_recorded(optimizer, amp):
    step = stepping(Residual(), torch.randn(2, 3, 16, 16), optimizer=optimizer, amp=amp)
    step.run()
    captures = []

    def plainly():
        step.count_from_one()
        step.run()

    with torch.autograd.set_multithreading_enabled(False):
        plain, _ = profiled(plainly, CPU)
        watched, _ = profiled(lambda: captures.append(capture_step(step, warmed_up=True)), CPU)
    assert plain == watched
    (seen,) = captures
    assert not seen.gaps
    assert not seen.overlaps


class Transformed(nn.Module):
    """A layer, and what a function does with it."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, rows):
        return self.function(self.layer, rows)


def per_sample_gradients(layer, rows):
    def loss(weights, row):
        return torch.func.functional_call(layer, weights, row).tanh().sum()

    weights = dict(layer.named_parameters())
    gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)
    return gradients["weight"].flatten(1)


def after_an_inner_step(layer, rows):
    def loss(weights):
        return torch.func.functional_call(layer, weights, rows).square().mean()

    weights = dict(layer.named_parameters())
    slopes = torch.func.grad(loss)(weights)
    better = {name: weights[name] - 0.1 * slopes[name] for name in weights}
    return torch.func.functional_call(layer, better, rows)


def slope_of_the_input(layer, rows):
    rows = rows.detach().requires_grad_()
    return torch.autograd.grad(layer(rows).tanh().sum(), rows, create_graph=True)[0]


def jacobians(layer, rows):
    return torch.vmap(torch.func.jacrev(lambda row: layer(row).tanh()))(rows).flatten(1)


def under_autocast(layer, rows):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(rows).relu().float()


@pytest.mark.parametrize(
    "function",
    [per_sample_gradients, after_an_inner_step, slope_of_the_input, jacobians, under_autocast],
)
def test_a_step_through_a_transform_runs_the_same_when_it_is_recorded(function):
    step = stepping(Transformed(function), torch.randn(4, 8))
    step.run()
    captures = []
    with torch.autograd.set_multithreading_enabled(False):
        plain, _ = profiled(step.run, CPU)
        watched, _ = profiled(lambda: captures.append(capture_step(step, warmed_up=True)), CPU)
    assert plain == watched
    (seen,) = captures
    assert (seen.gaps, seen.overlaps) == ((), ())


def test_a_backward_belongs_to_the_call_whose_gradient_it_takes():
    seen = capture_step(stepping(Residual(), torch.randn(2, 3, 16, 16)))
    owned = Counter(
        (seen.owners[call.owner_index].what, call.part)
        for call in seen.calls
        if call.owner_index is not None
    )
    assert owned["Conv2d", "forward"] == owned["Conv2d", "backward"] == 3
    assert owned["Linear", "forward"] == 1
    assert owned["Linear", "backward"] >= 2
    assert [
        seen.tuples[call.tuple_id].operator for call in seen.calls if call.part == "accumulation"
    ] == [
        # of the activation with two users, and of the parameters used twice: in place, as
        # unobserved
        "aten.add_.Tensor",
    ] * 3


class Tied(nn.Module):
    """The first gradient of its weight is a view of a product, which the product's node still
    holds.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))[:, 0]


@pytest.mark.parametrize("device", ["", "cpu", STANDS_FOR_A_CARD])
def test_a_gradient_that_is_a_view_is_added_into_new_memory(device):
    model, ids = Tied(), torch.ones(2, 3, dtype=torch.long)
    (step := stepping(model, ids)).run()
    with torch.profiler.profile() as unobserved:
        step.run()
    assert [event.name for event in unobserved.events()].count("aten::add") == 1
    faked = (
        fake_pass(model, (ids,), None, device)
        if device
        else contextlib.nullcontext((None, (ids,), {}))
    )
    with faked as (fakes, given, _):
        step = stepping(model, *given)
        step.loss = Loss("sum", (), lambda output, targets: output.sum())
        seen = capture_step(step, fakes=fakes)
    summed = [
        seen.tuples[call.tuple_id].operator for call in seen.calls if call.part == "accumulation"
    ]
    assert summed == ["aten.add.Tensor"]


@pytest.mark.parametrize(
    ("said", "attention"),
    [
        ({"dtype": "bfloat16"}, "_scaled_dot_product_cudnn_attention"),
        ({"amp": "float16", "optimizer": "adamw-fused"}, "_scaled_dot_product_cudnn_attention"),
        ({}, "_scaled_dot_product_efficient_attention"),
        ({"padded": True}, "_scaled_dot_product_efficient_attention"),
    ],
    ids=str,
)
def test_a_step_for_a_card_has_the_cards_attention_dropout_and_statistics(said, attention):
    seen = extract_from_catalog("bert-base", layers=1, length=8, device_type="cuda", **said)
    assert not seen.gaps
    (owner,) = (one for one in seen.owners if one.what == "scaled_dot_product_attention")
    run = {
        seen.tuples[call.tuple_id].short_name
        for call in seen.calls
        if call.owner_index == owner.index
    }
    assert attention in run
    names = {name.split(".")[1] for name in seen.operators}
    assert names >= {"native_dropout", "native_dropout_backward"}
    assert not [name for name in names if "bernoulli" in name or "for_cpu" in name]
    for spec in seen.tuples.values():
        if spec.short_name == "native_layer_norm_backward":
            assert {spec.tensors[place].dtype for place in (2, 3)} == {"float32"}


def test_in_float32_a_card_has_no_fused_attention_for_fewer_heads_of_keys():
    seen = extract_from_catalog("llama-3.2-1b", layers=1, length=8, device_type="cuda")
    assert "aten.bmm.default" in seen.operators
    assert not [name for name in seen.operators if "attention" in name]


def test_a_tensors_life_is_from_the_call_that_made_it_to_the_last_that_holds_it():
    seen = capture_step(stepping(Residual(), torch.randn(2, 3, 16, 16)))
    roles = Counter(tensor.role for tensor in seen.tensors)
    assert roles["parameter"] == roles["optimizer state"] == 6
    assert roles["activation"] >= 3
    for tensor in seen.tensors:
        if tensor.released is not None and tensor.uses:
            assert tensor.born <= tensor.uses[0] <= tensor.uses[-1] <= tensor.released
    held = sum(tensor.size_bytes for tensor in seen.tensors if tensor.outlives)
    assert min(seen.memory_bytes) >= held
    assert max(seen.memory_bytes) > held


def test_what_is_computed_anew_belongs_to_the_first_time():
    seen = extract_from_catalog("resnet18", 2, recompute="layer1.0,layer2.0")
    plain = extract_from_catalog("resnet18", 2)
    assert not seen.gaps
    assert parts(seen)["recomputation"] > 8
    assert {
        seen.owners[call.owner_index].stage for call in seen.calls if call.part == "recomputation"
    } == {"forward"}
    assert len(seen.owners) == len(plain.owners)
    assert max(seen.memory_bytes) < max(plain.memory_bytes)


def test_a_module_that_is_named_twice_is_recomputed_once_and_gets_its_own_forward_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    own = model[1].forward = functools.partial(torch.relu)
    with checkpoint_modules(model, "0,1,0,2"):
        inner = model[0].forward.args[0]
        assert inner.__func__ is nn.Linear.forward
    assert model[1].forward is own
    assert "forward" not in vars(model[0])


class CatchesAnAttention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.first, self.last, self.mask = nn.Linear(8, 8), nn.Linear(8, 8), mask

    def forward(self, x):
        y = self.first(x)
        with contextlib.suppress(RuntimeError):
            functional.scaled_dot_product_attention(y, y, y, attn_mask=self.mask)
        return torch.relu(self.last(y))


@pytest.mark.parametrize(
    ("mask", "gaps"), [(torch.zeros(4, 4, dtype=torch.int64), False), (torch.zeros(3, 3), True)]
)
def test_operators_after_an_attention_that_raises_are_recorded(mask, gaps):
    """What the attention ran before its error is a gap."""
    model = CatchesAnAttention(mask)
    seen = capture_step(ForwardPass(model, (torch.randn(2, 4, 8),), grad=False))
    assert [seen.tuples[call.tuple_id].short_name for call in seen.calls] == [
        "addmm",
        "addmm",
        "relu",
    ]
    assert bool(seen.gaps) == gaps
    assert all("raised an error afterwards" in gap for gap in seen.gaps)


def test_operators_after_an_error_that_the_model_catches_belong_to_their_own_module():
    seen = capture_step(stepping(nn.Sequential(Fallback(4, 3)), torch.randn(2, 4)))
    paths = {seen.tuples[call.tuple_id].short_name: call.module_path for call in seen.calls}
    assert not seen.gaps
    assert (paths["addmm"], paths["mul"]) == ("0.slow", "0")


def test_blocks_are_those_of_all_stages():
    model = catalog.build("resnet18")
    assert blocks_of(model) == [
        f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
    ]
    with pytest.raises(UsageError, match="the model has no module 'layer9'"):
        extract_from_catalog("resnet18", recompute="layer9")


def test_several_passes_may_go_before_the_optimizer():
    one, two = (extract_from_catalog("resnet18", 2, accumulate=passes) for passes in (1, 2))
    assert parts(two)["forward"] == 2 * parts(one)["forward"]
    assert parts(two)["optimizer"] == parts(one)["optimizer"]
    assert (
        parts(two)["accumulation"] == 2 * parts(one)["accumulation"] + 62
    )  # each parameter's gradient


def test_autocast_computes_in_another_type():
    seen = extract_from_catalog("resnet18", 2, amp="bfloat16")
    assert not seen.gaps
    assert any(
        spec.tensors[0].dtype == "bfloat16"
        for spec in seen.tuples.values()
        if "convolution" in spec.operator
    )


def test_a_gradient_scaler_belongs_to_the_loss_and_to_the_optimizer():
    seen = extract_from_catalog("resnet18", 2, amp="float16", input_size=32, accumulate=2)
    assert not seen.gaps
    named = [(seen.tuples[call.tuple_id].short_name, call.stage, call.part) for call in seen.calls]
    assert (
        named.count(("_amp_foreach_non_finite_check_and_unscale_", "optimizer", "optimizer")) == 1
    )
    assert named.count(("_amp_update_scale_", "optimizer", "optimizer")) == 1
    assert named.count(("_fused_sgd_", "optimizer", "optimizer")) == 1
    scaled = [
        call
        for call in seen.calls
        if call.owner_index is not None and seen.owners[call.owner_index].what == "mul"
    ]
    assert [(call.stage, call.part) for call in scaled] == [
        ("loss", "loss"),
        ("backward", "loss"),
    ] * 2
    states = {tensor.name: tensor for tensor in seen.tensors}
    assert {states[name].role for name in ("scaler.scale", "scaler.growth_tracker")} == {
        "optimizer state"
    }
    with pytest.raises(UsageError, match="checks on the host") as refused:
        extract_from_catalog("resnet18", amp="float16", optimizer="adam-foreach")
    assert "--optimizer adam-fused" in refused.value.next_step


@pytest.mark.parametrize(
    ("model", "said", "loss"),
    [
        pytest.param("googlenet", {}, "cross-entropy", marks=slow.ALIKE),
        pytest.param(
            "swin_t",
            {"input_size": 64},
            "cross-entropy",
            marks=slow.ALIKE,
        ),
        ("bert-base", {"length": 16, "layers": 2}, "cross-entropy of masked tokens"),
        (
            "gpt2",
            {"length": 16, "layers": 2, "optimizer": "adamw-fused"},
            "cross-entropy of the next token",
        ),
        ("opt-125m", {"length": 16, "layers": 2}, "cross-entropy of the next token"),
        (
            "t5-small",
            {"length": 16, "layers": 2, "phase": "encode"},
            "mean of squares of its outputs",
        ),
    ],
)
def test_models_of_the_catalog_are_extracted_completely_and_twice_alike(model, said, loss):
    seen, again = (extract_from_catalog(model, **said, device_type="cuda") for _ in range(2))
    assert not seen.gaps
    assert not seen.overlaps
    assert seen.loss == loss
    assert [call.tuple_id for call in seen.calls] == [call.tuple_id for call in again.calls]
    assert seen.tensors == again.tensors


@pytest.mark.parametrize(
    "said", [{}, {"amp": "bfloat16", "recompute": "layer1.0", "accumulate": 2}]
)
def test_the_parts_of_a_step_have_the_arithmetic_that_pytorch_counts_over_the_whole(said):
    apart = extract(catalog.variant("resnet18", 2, input_size=32, step="training", **said))
    assert apart.flops == apart.model_flops > 0


def test_a_batch_may_have_more_targets_than_values_are_kept_of():
    assert not extract_from_catalog("bert-base", 1100, length=128, layers=1).gaps


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


twice = Twice.apply  # as some packages keep it


class Custom(nn.Module):
    def __init__(self, function=None):
        super().__init__()
        self.head, self.function = nn.Linear(4, 3), function

    def forward(self, x):
        return self.head((self.function or Twice.apply)(self.head.weight.sum() * x))


class InAThread(Residual):
    def forward(self, x):
        with ThreadPoolExecutor(1) as thread:
            return self.head(thread.submit(self.second, self.first(x)).result().mean((2, 3)))


def test_a_part_that_runs_in_another_thread_is_refused():
    with pytest.raises(UnseenOperators, match="in another thread"):
        capture_step(stepping(InAThread(), torch.randn(2, 3, 16, 16)))


@pytest.mark.parametrize("function", [None, twice], ids=["by its class", "kept by the module"])
def test_a_custom_function_owns_by_its_name_what_it_does(function):
    seen = capture_step(stepping(Custom(function), torch.randn(2, 4)))
    assert not seen.gaps
    owned = Counter(
        (seen.owners[call.owner_index].what, call.part)
        for call in seen.calls
        if call.owner_index is not None
    )
    assert owned["Twice", "forward"] == owned["Twice", "backward"] == 1


def test_hooks_of_parameters_are_in_the_step_that_nothing_computes(tmp_path):
    file = tmp_path / "hooked.py"
    file.write_text(
        "import torch\n"
        "def signed(bias):\n"
        "    bias.grad.sign_()\n"
        "def net():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))\n"
        "    model.bias.register_post_accumulate_grad_hook(signed)\n"
        "    return model, torch.randn(2, 4)\n"
    )
    found = extract(farm.variant(own.register(f"{file}:net"), 2, step="training", optimizer="sgd"))
    assert found.refusal("net") is None
    parts = {
        found.capture.tuples[call.tuple_id].short_name: call.part for call in found.capture.calls
    }
    assert (parts["clamp"], parts["sign_"]) == ("accumulation", "accumulation")


def test_a_step_that_raises_is_one_line():
    with pytest.raises(CaptureError, match="The training step raised: RuntimeError"):
        capture_step(stepping(nn.Linear(4, 3), torch.randn(2, 5)))


def test_a_users_model_is_trained_with_the_loss_that_is_registered_beside_it(tmp_path, monkeypatch):
    (tmp_path / "trained_here.py").write_text(
        "import torch\n"
        "def net():\n    return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
        "def loss(output):\n    return output.abs().sum()\n"
    )
    monkeypatch.setenv("FARM_MODELS", '{"mine": "trained_here:net"}')
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    settings.cache_clear()
    assert extract_from_catalog("mine").loss == "cross-entropy"
    monkeypatch.setenv("FARM_LOSSES", '{"mine": "trained_here:loss"}')
    settings.cache_clear()
    seen = extract_from_catalog("mine")
    assert seen.loss == "trained_here:loss"
    assert "abs" in {owner.what for owner in seen.owners}
    monkeypatch.setenv("FARM_LOSSES", '{"mine": "trained_here:nothing"}')
    settings.cache_clear()
    with pytest.raises(SettingsError, match=r"loss of 'mine' .* from 'trained_here:nothing'"):
        extract_from_catalog("mine")


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.layers.append(nn.Linear(4, 4))
        return x


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "Growing",
            "The model changes its structure during the training step: 'layers.2' was added.",
        ),
    ],
)
def test_a_model_whose_step_is_not_always_the_same_is_one_line(model, told, monkeypatch):
    monkeypatch.setenv("FARM_MODELS", json.dumps({"mine": f"{__name__}:made_{model.lower()}"}))
    monkeypatch.setenv("FARM_MODELS_PATH", ".")
    settings.cache_clear()
    with pytest.raises(CaptureError) as caught:
        extract_from_catalog("mine")
    assert caught.value.message.startswith(told)


def made_growing():
    return Growing(), torch.randn(2, 4)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).long()


def test_a_model_that_gives_nothing_to_train_for_says_what_to_register():
    with pytest.raises(UnsupportedModel) as caught:
        capture_step(stepping(Counting(), torch.randn(2, 3)))
    assert "so no loss can be computed" in caught.value.message
    assert "FARM_LOSSES" in caught.value.next_step


def test_an_operator_with_a_kernel_is_not_taken_apart_although_it_may_be():
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    seen = capture_step(stepping(model, torch.randn(2, 4)))
    assert "aten.silu_backward.default" in {spec.operator for spec in seen.tuples.values()}
