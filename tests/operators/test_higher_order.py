"""Higher-order operators run in a capture as the Python code that eager mode runs."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import farm
from farm.errors import UnseenOperators
from farm.models import own
from farm.operators.capture import capture, predict, run_with_owners
from farm.operators.cost import costs_of, model_flops
from farm.operators.profiler import verify_on_device
from farm.training.extract import extract


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, values):
        return self.function(self, values)


def branch_by_value(model, values):
    positive = values.sum() > 0
    return torch.cond(positive, lambda v: model.first(v), lambda v: model.second(v), (values,))


def branch_by_number(model, values):
    many = len(values) > 2
    return torch.cond(many, lambda v: model.first(v), lambda v: model.second(v), (values,))


def loop(model, values):
    def again(count, _):
        return count < 3

    def step(count, carried):
        return count + 1, model.first(carried)

    return while_loop(again, step, (torch.tensor(0), values))[1]


def loop_by_value(model, values):
    def again(carried):
        return carried.abs().sum() > 1

    return while_loop(again, lambda carried: (model.first(carried) * 0.01,), (values,))[0]


def scanned(model, values):
    def step(carried, row):
        new = torch.tanh(model.first(carried) + row)
        return new, new.clone()

    return scan(step, values[0], values)[1]


def products(_, values):
    return associative_scan(torch.mul, values, 0, combine_mode="generic")


def each(model, values):
    return mapped(lambda row: model.first(row).sin(), values)


def attention(_, values):
    heads = values.view(1, 4, 4, 4)
    return flex_attention(heads, heads, heads)


def causal_attention(_, values):
    heads = values.view(1, 4, 4, 4)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 4, 4, device="cpu")
    return flex_attention(heads, heads, heads, lambda score, b, h, q, k: score + q - k, mask)


FUNCTIONS = [
    branch_by_value,
    branch_by_number,
    loop,
    loop_by_value,
    scanned,
    products,
    each,
    attention,
    causal_attention,
]
VALUES = torch.ones(4, 16)


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def model(request):
    torch.manual_seed(0)
    return Net(request.param).eval()


def calls_of(found):
    return [(call.module_path, found.tuples[call.tuple_id].short_name) for call in found.calls]


def test_an_unwatched_pass_runs_the_captured_operators(model):
    compared = verify_on_device(model, (VALUES,), "cpu")
    assert compared.differences == []
    assert (compared.capture.gaps, compared.capture.overlaps) == ((), ())


def test_the_sum_has_the_flops_of_the_model(model):
    assert farm.capture_model(model, VALUES).mismatches == {}
    found = capture(model, (VALUES,))
    costs = costs_of(found)
    flops = sum(costs[call.tuple_id].flops for call in found.calls)
    assert flops == model_flops(model, (VALUES,), computed=True)


def test_each_call_can_be_timed_in_the_model(model):
    found, numbers = capture(model, (VALUES,)), []

    def around(number):
        numbers.append(number)
        return torch.no_grad()

    run_with_owners(model, (VALUES,), device_type="cpu", around=around)
    assert len(numbers) == len(found.slots)


def test_the_branch_that_is_taken_is_captured():
    model = Net(branch_by_value).eval()
    assert calls_of(capture(model, (VALUES,)))[-1] == ("first", "Linear")
    assert calls_of(capture(model, (-VALUES,)))[-1] == ("second", "Linear")


def test_each_iteration_is_captured_with_its_module():
    calls = calls_of(predict(Net(loop).eval(), (VALUES,)))
    assert calls.count(("first", "Linear")) == 3
    assert calls.count(("", "lt")) == 4


def test_a_predicate_without_values_is_computed_from_values(tmp_path):
    file = tmp_path / "branches.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))\n"
        "def net():\n"
        "    return Net().eval(), torch.ones(4)\n"
    )
    found = extract(farm.variant(own.register(f"{file}:net"), 4))
    assert found.refusal("net") is None
    names = [spec.short_name for spec in found.capture.tuples.values()]
    assert names == ["sum", "gt", "bool", "sin"]


def test_a_transform_of_a_branch_is_captured():
    def rows(_, values):
        return torch.vmap(lambda row: torch.cond(row.sum() > 0, torch.sin, torch.cos, (row,)))(
            values
        )

    compared = verify_on_device(Net(rows).eval(), (VALUES,), "cpu")
    assert compared.differences == []
    assert {spec.kind for spec in compared.capture.tuples.values()} == {"aten"}


@pytest.mark.parametrize("function", [branch_by_value, loop, attention])
def test_with_gradients_they_are_refused(function):
    with pytest.raises(UnseenOperators, match=r"gradients are enabled \(.*test_higher_order.py"):
        farm.capture_model(Net(function), VALUES, grad=True)


def test_a_compiled_function_inside_a_branch_is_refused():
    compiled = torch.compile(lambda values: values.sin(), backend="eager")

    def forward(_, values):
        return torch.cond(values.sum() > 0, compiled, torch.cos, (values,))

    with pytest.raises(UnseenOperators, match=r"torch\.compile compiled"):
        farm.capture_model(Net(forward), VALUES)


def test_a_capture_leaves_the_operators_as_they_were():
    before = torch.compile, torch._ops.HigherOrderOperator.__call__
    farm.capture_model(Net(branch_by_value).eval(), VALUES)
    assert (torch.compile, torch._ops.HigherOrderOperator.__call__) == before
