"""A leaf or a function that is given the same again is not run again in a prediction, and the
capture is the same as if it were."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from farm.models import catalog
from farm.operators.capture import capture, predict
from farm.operators.fake_pass import fake_pass
from tests import slow


def run_in_full(model, inputs, grad_enabled=False):
    with fake_pass(model, inputs, None, "cpu") as (_, stand_ins, _):
        return capture(model, stand_ins, grad_enabled=grad_enabled)


class Twice(nn.Module):
    """Calls each of its leaves twice, on inputs that differ as little as inputs can."""

    def __init__(self, *leaves):
        super().__init__()
        self.leaves = nn.ModuleList(leaves)

    def forward(self, *inputs):
        for leaf in self.leaves:
            for tensor in inputs:
                leaf(tensor)
                leaf(tensor)
        return inputs


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        pytest.param("googlenet", marks=slow.ALIKE),
        pytest.param("swin_t", marks=slow.ALIKE),
        "vit_b_32",
        "shufflenet_v2_x0_5",
    ],
)
@pytest.mark.parametrize(("mode", "grad_enabled"), [("eval", False), ("train", True)])
def test_a_model_is_captured_as_if_all_of_it_had_run(name, mode, grad_enabled):
    model, inputs = (
        catalog.build(catalog.variant(name, mode=mode)),
        catalog.example_inputs(catalog.variant(name, 2)),
    )
    assert predict(model, inputs, grad_enabled=grad_enabled) == run_in_full(
        model, inputs, grad_enabled
    )


@pytest.mark.parametrize(
    "leaf",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.Dropout(),  # returns what it is given when it does not train
        nn.Flatten(),  # returns a view
        nn.Unflatten(1, (2, 3)),
        nn.MaxPool2d(2, return_indices=True),
        nn.BatchNorm2d(6),
        nn.LSTM(4, 4),
        nn.MultiheadAttention(4, 2),
        nn.LayerNorm(4),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
@pytest.mark.parametrize("training", [False, True])
def test_a_leaf_does_again_what_it_did(leaf, training):
    if isinstance(leaf, nn.MultiheadAttention):
        leaf = _OnItself(leaf)
    image = torch.empty(2, 6, 4, 4, device="meta")
    inputs = [image, image.contiguous(memory_format=torch.channels_last), image.expand(2, 6, 4, 4)]
    inputs += [
        torch.empty(3, 6, 4, 4, device="meta")[1:],
        torch.empty(1, 6, 4, 4, device="meta").expand(2, 6, 4, 4),
    ]
    if isinstance(leaf, nn.LSTM | _OnItself):
        inputs = [tensor[:, 0] for tensor in inputs]
    if isinstance(leaf, nn.ReLU) and leaf.inplace:
        inputs.pop()  # an expanded tensor cannot be written
    model = Twice(leaf).train(training)
    assert predict(model, tuple(inputs)) == run_in_full(model, tuple(inputs))


class _Layers(nn.Module):
    """The same functions again and again, as a decoder's layers call them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("cache", torch.zeros(2, 4, 8))

    def forward(self, x):
        for position in range(3):
            normal = x.float().pow(2).mean(-1, keepdim=True)
            x = self.weight * (x * torch.rsqrt(normal + 1e-6)).to(x.dtype)
            left, right = x.chunk(2, dim=-1)
            x = torch.cat((-right, left), dim=-1).transpose(0, 1).reshape(2, 4, 8)
            self.cache.index_copy_(1, torch.tensor([position]), x[:, :1])
            x += F.scaled_dot_product_attention(x, self.cache, self.cache)
            x = F.dropout(F.silu(x), 0.1, self.training)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_functions_are_captured_as_if_all_of_them_had_run(dtype, training):
    model = _Layers().to("meta", dtype).train(training)
    inputs = (torch.empty(2, 4, 8, device="meta", dtype=dtype),)
    assert predict(model, inputs) == run_in_full(model, inputs)


def test_equal_functions_run_once_in_a_prediction():
    class Aten(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Watched(nn.Module):
        def forward(self, x):
            with Aten():
                return x.sin().sin().sin()

    seen = []
    assert len(predict(Watched(), (torch.empty(4, device="meta"),)).calls) == 3
    assert seen.count(torch.ops.aten.sin.default) == 2  # in each of two passes


class _OnItself(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)


def test_equal_leaves_run_once_in_a_prediction(monkeypatch):
    runs = []
    linear = nn.functional.linear

    def counted(*args):
        runs.append(args)
        return linear(*args)

    # A leaf whose class has another `forward` than PyTorch's is no leaf, so the function that it
    # calls is counted.
    monkeypatch.setattr(nn.functional, "linear", counted)
    model, inputs = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)),
        (torch.empty(2, 4),),
    )
    assert len(predict(model, inputs).calls) == 3
    assert len(runs) == 2  # in each of two passes
    assert len(capture(model, inputs).calls) == 3
    assert len(runs) == 2 + 3


def test_values_that_a_fake_pass_knows_are_computed_each_time():
    class Shrinks(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = nn.ReLU()

        def forward(self, x):
            for size in (-1, 2, 3):
                x = x[int(self.leaf(torch.tensor(size))) :]
            return x.relu()

    model, inputs = Shrinks(), (torch.empty(9),)
    found = predict(model, inputs)
    assert found == run_in_full(model, inputs)
    assert [call.tuple_id for call in found.calls] == [
        call.tuple_id for call in capture(model, inputs).calls
    ]
    assert found.tuples[found.calls[-1].tuple_id].input_shapes == ((4,),)


def test_a_leaf_with_a_hook_runs_each_time():
    leaf, plain, seen = nn.ReLU(), nn.ReLU(), []
    leaf.register_forward_hook(lambda module, args, out: seen.append(out.dim()) or out.repeat(2, 1))

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.leaf = plain, leaf

        def forward(self, x):
            return self.plain(x), self.leaf(x), self.leaf(x), self.plain(self.leaf(x))

    found = predict(Hooked(), (torch.empty(3, 4, device="meta"),))
    assert len(seen) == 2 * 3  # in two passes
    shapes = [found.tuples[call.tuple_id].input_shapes[0] for call in found.calls]
    assert shapes[-1] == (6, 4)


def _seen(out):
    """What a capture sees of the outputs of a call."""
    tensors = out if isinstance(out, tuple | list) else (out,)
    return [
        (
            tuple(one.shape),
            one.stride(),
            one.dtype,
            one.storage_offset(),
            one.untyped_storage().nbytes(),
        )
        for one in tensors
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (
            x + 1,
            x + 1.0,
            x + True,
        ),  # equal numbers; the dtype of the result depends on their type
        lambda x: x.zero_(),
        lambda x: torch.max(x, 1),
        lambda x: x.split(1),
        lambda x: x.t(),
        lambda x: x.to(torch.float64),
        lambda x: x.to(x.dtype),  # the tensor itself
        lambda x: torch.cat([x, x[1:]]),
        lambda x: torch.empty_like(x),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: x.t_(),  # writes the layout only
    ],
)
def test_an_operator_gives_again_what_it_gave(call):
    def tensors():
        whole = torch.ones(4, 3, dtype=torch.int64)
        return [
            whole,
            whole[1:],
            torch.ones(3, 4, dtype=torch.int64).t(),
            torch.ones(4, 3),
            torch.ones(4, 3).bool(),
        ]

    expected = [_seen(call(tensor)) for tensor in tensors()]
    with fake_pass(nn.Identity(), (), None, "cpu") as (fakes, _, _):
        for _ in range(2):
            fake = [fakes.tensor(tensor, fake=True) for tensor in map(torch.clone, tensors())]
            fake[1] = fakes.tensor(torch.ones(4, 3, dtype=torch.int64), fake=True)[1:]
            fake[2] = fakes.tensor(torch.ones(3, 4, dtype=torch.int64), fake=True).t()
            assert [_seen(call(tensor)) for tensor in fake] == expected


def test_an_equal_operator_is_not_run_again_in_another_pass(monkeypatch):
    ran, original = [], FakeTensorMode.dispatch

    def dispatch(mode, func, *arguments):
        ran.append(str(func))
        return original(mode, func, *arguments)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    for _ in range(2):
        with fake_pass(nn.Identity(), (torch.ones(7, 61),), None, "cpu") as (_, (x,), _):
            assert (x.sin() * 2).shape == (7, 61)
    assert ran.count("aten.sin.default") == ran.count("aten.mul.Tensor") == 1
