"""A call that no tuple describes is taken apart into its aten operators, each a call of the module."""

import pytest
import torch
from torch import nn

import farm
from farm.benchmark.verification import time_in_model
from farm.errors import CaptureError, UnseenOperators
from farm.models import catalog
from farm.operators.capture import capture, predict, run_with_owners
from farm.operators.cost import costs_of, model_flops
from farm.operators.profiler import verify_on_device
from farm.operators.rebuild import rebuild


class Net(nn.Module):
    """A layer, then a function."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(16, 16), function

    def forward(self, values):
        return self.function(self.layer(values))


LAYER = nn.Linear(16, 4, bias=False)
LAYER_WITH_BIAS = nn.Linear(16, 4)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return torch.ops.aten.mul(values, values)


def forces(values):
    with torch.enable_grad():
        places = values.detach().requires_grad_()
        return torch.autograd.grad((places @ places.mT).sin().sum(), places)[0]


def slope(function, values):
    with torch.enable_grad():
        places = values.detach().requires_grad_()
        return torch.autograd.grad(function(places).sum(), places)[0]


def per_sample_gradients(values):
    def loss(weight, row):
        return nn.functional.linear(row, weight).tanh().sum()

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(LAYER.weight, values)


def under_autocast(values):
    with torch.autocast("cpu", torch.bfloat16):
        return (values @ values.mT).float()


#: Function -> the operators of its calls, after the layer.
FUNCTIONS = {
    "an operator of aten": (
        lambda values: torch.ops.aten.gelu(values),
        ["aten.gelu.default"],
    ),
    "a custom autograd function": (Square.apply, ["aten.mul.Tensor"]),
    "vmap": (
        torch.vmap(lambda row: row.sin() * row),
        ["aten.sin.default", "aten.mul.Tensor"],
    ),
    "jvp": (
        lambda values: torch.func.jvp(torch.sin, (values,), (values,))[1],
        ["aten.sin.default", "aten.cos.default", "aten.mul.Tensor"],
    ),
    "per-sample gradients": (
        per_sample_gradients,
        [
            "aten.mm.default",
            "aten.tanh.default",
            "aten.sum.dim_IntList",
            "aten.ones_like.default",
            "aten.tanh_backward.default",
            "aten.bmm.default",
        ],
    ),
    "a Jacobian for each row": (
        torch.vmap(torch.func.jacrev(torch.tanh)),
        [
            "aten.tanh.default",
            "aten.new_zeros.default",
            "aten.fill_.Scalar",
            "aten.tanh_backward.default",
        ],
    ),
    "gradients in the forward pass": (
        forces,
        [
            "torch.Tensor.matmul",
            "torch.Tensor.sin",
            "torch.Tensor.sum",
            "aten.ones_like.default",
            "aten.cos.default",
            "aten.mul.Tensor",
            "aten.mm.default",
            "aten.mm.default",
            "aten.add.Tensor",
        ],
    ),
    "the backward of SiLU": (
        lambda values: slope(nn.functional.silu, values),
        [
            "torch.nn.functional.silu",
            "torch.Tensor.sum",
            "aten.ones_like.default",
            "aten.silu_backward.default",
        ],
    ),
    "autocast": (
        under_autocast,
        [
            "aten._to_copy.default",
            "aten._to_copy.default",
            "aten.mm.default",
            "aten._to_copy.default",
        ],
    ),
    "a generator": (
        lambda values: values + torch.randn(4, 16, generator=torch.Generator()),
        ["torch.randn", "torch.Tensor.add"],
    ),
}


@pytest.fixture(params=FUNCTIONS)
def case(request):
    function, operators = FUNCTIONS[request.param]
    return Net(function).eval(), (torch.randn(4, 16),), operators


def test_its_operators_are_calls_with_the_path_of_the_module(case):
    model, inputs, operators = case
    nested = nn.Sequential(model)
    found = predict(nested, inputs)
    assert (found.gaps, found.overlaps) == ((), ())
    calls = [(call.module_path, found.tuples[call.tuple_id].operator) for call in found.calls]
    assert calls[0] == ("0.layer", "torch.nn.Linear")
    assert [operator for _, operator in calls[1:]] == operators
    assert {path for path, _ in calls[1:]} == {"0"}


def test_a_pass_with_values_has_the_same_tuples_which_run_alone(case):
    model, inputs, _ = case
    real, fake = capture(model, inputs), predict(model, inputs)
    assert real.counts == fake.counts
    assert farm.capture_model(model, inputs).mismatches == {}
    for spec in real.tuples.values():
        rebuild(spec, "cpu").run()


def test_the_sum_has_the_flops_of_the_model_and_watching_changes_nothing(case):
    model, inputs, _ = case
    found = predict(model, inputs)
    costs = costs_of(found)
    assert sum(costs[call.tuple_id].flops for call in found.calls) == model_flops(model, inputs)
    assert verify_on_device(model, inputs, "cpu").differences == []


def test_each_call_is_timed_in_the_model(case):
    model, inputs, _ = case
    found = capture(model, inputs)

    def run(around):
        run_with_owners(model, inputs, device_type="cpu", around=around)

    timed = time_in_model(run, found, torch.device("cpu"))
    times_us = [time_us for times in timed.calls_us.values() for time_us in times]
    assert len(times_us) == len(found.calls)
    assert all(times_us)


def test_a_weight_and_its_views_stay_weights_one_level_down():
    def forward(values):
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(values, model.layer.weight)

    model = Net(forward)
    found = predict(model, (torch.randn(4, 16),))
    casts = [spec for spec in found.tuples.values() if spec.short_name == "_to_copy"]
    assert [spec.tensors[0].role for spec in casts] == ["parameter", "activation"]


def test_a_leaf_under_autocast_is_taken_apart():
    class Mixed(nn.Sequential):
        def forward(self, values):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(values)

    found = predict(Mixed(nn.Linear(16, 16), nn.ReLU()), (torch.randn(4, 16),))
    assert found.gaps == ()
    operators = [found.tuples[call.tuple_id].operator for call in found.calls]
    assert operators == [
        "aten._to_copy.default",
        "aten._to_copy.default",
        "aten._to_copy.default",
        "aten.addmm.default",
        "aten.relu.default",
    ]
    assert {call.module_path for call in found.calls} == {"0", "1"}


def test_an_operator_that_is_not_in_the_allow_list_is_a_gap_with_its_reason():
    model = Net(lambda values: torch._add_relu(values, values))
    with pytest.raises(CaptureError, match=r"_add_relu.* is not in .* allow-list"):
        farm.capture_model(model, torch.randn(4, 16))


def test_an_argument_that_no_operator_can_have_is_a_gap_with_its_reason():
    model = Net(lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8))
    with pytest.raises(CaptureError, match="qint8"):
        farm.capture_model(model, torch.randn(4, 16))


def test_a_call_that_a_tuple_describes_has_the_tuple_that_it_has_always_had():
    found = predict(catalog.build("resnet18"), catalog.example_inputs("resnet18"))
    assert {spec.kind for spec in found.tuples.values()} == {"module", "function"}


def test_a_leaf_with_the_weights_of_a_transform_is_taken_apart():
    def forward(values):
        def apply(weight):
            return torch.func.functional_call(LAYER, {"weight": weight}, values)

        return torch.vmap(apply)(torch.ones(3, 4, 16))

    found = predict(Net(forward), (torch.randn(4, 16),))
    assert found.gaps == ()
    operators = [found.tuples[call.tuple_id].operator for call in found.calls]
    assert operators == ["torch.nn.Linear", "torch.ones", "aten.bmm.default"]


class PerSample(nn.Module):
    """The gradients of its own layers for each row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, rows, classes):
        def loss(weights, row, number):
            scores = torch.func.functional_call(self.layers, weights, row[None])
            return nn.functional.cross_entropy(scores, number[None])

        gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        return gradients(dict(self.layers.named_parameters()), rows, classes)


def test_parameters_of_per_sample_gradients_keep_their_role():
    model, inputs = PerSample(), (torch.randn(5, 8), torch.randint(0, 3, (5,)))
    found = predict(model, inputs)
    assert (found.gaps, found.overlaps) == ((), ())
    assert verify_on_device(model, inputs, "cpu").differences == []
    assert farm.capture_model(model, inputs).mismatches == {}
    costs = costs_of(found)
    assert sum(costs[call.tuple_id].flops for call in found.calls) == model_flops(model, inputs)
    products = [spec for spec in found.tuples.values() if spec.short_name in ("mm", "bmm")]
    roles = [tuple(tensor.role for tensor in spec.tensors) for spec in products]
    assert roles.count(("activation", "parameter")) == 3  # two layers, and back through the second


def test_forward_mode_with_parameters_is_refused_with_the_way_in_reverse_mode():
    def tangent(values):
        return torch.func.jvp(LAYER_WITH_BIAS, (values,), (values,))[1]  # here

    with pytest.raises(UnseenOperators, match=r"forward mode \(.*# here\)") as caught:
        farm.capture_model(Net(tangent), torch.randn(4, 16))
    assert "torch.func.vjp for jvp" in caught.value.next_step


def test_a_leaf_with_other_tensors_for_its_parameters_is_the_function_that_it_calls():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            weights = {name: one * 2 for name, one in self.layer.named_parameters()}
            return torch.func.functional_call(self.layer, weights, (x,))

    for found in (capture(Scaled(), (torch.randn(2, 8),)), predict(Scaled(), (torch.randn(2, 8),))):
        assert (found.gaps, found.mismatches) == ((), {})
        called = [(call.module_path, found.tuples[call.tuple_id].operator) for call in found.calls]
        assert called[2:] == [("layer", "torch.nn.functional.linear")]
