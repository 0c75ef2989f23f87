"""A rebuilt operator is the one that ran: same aten operators, same outputs, and tame for as long
as one likes.
"""

import contextlib
import json
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from farm.errors import TupleRejected, Unmeasurable
from farm.models import catalog
from farm.operators.capture import capture, predict
from farm.operators.rebuild import rebuild, written_inputs
from farm.subjects.allow_list import ALLOWED_OPERATORS
from farm.subjects.parsing import parse
from farm.types.tuple import OperatorTuple, TensorSpec
from tests import slow
from tests.types.test_tuple import mangle


class _Model(nn.Module):
    def __init__(self, function, *parts):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs):
        return self.function(*self.parts, *inputs)


class _Trace(TorchDispatchMode):
    """Every aten operator with the shapes and strides that it gives."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, tuple | list) else [out]
        self.seen.append(
            (str(func), [(tuple(o.shape), o.stride()) for o in outs if isinstance(o, torch.Tensor)])
        )
        return out


def ran(call):
    with torch.no_grad(), _Trace() as trace:
        call()
    return trace.seen


def one(model, *inputs, mode="eval"):
    found = capture(model.train(mode == "train"), inputs)
    assert not found.gaps
    (spec,) = found.tuples.values()
    return parse(spec.to_json())


def finite(tensor):
    return bool(torch.isfinite(tensor.float()).all())


image = torch.randn(2, 8, 6, 6)
words = torch.randn(2, 5, 16)
CALLS = {
    "convolution": (_Model(lambda m, x: m(x), nn.Conv2d(8, 4, 3, padding=1)), image),
    "convolution channels_last": (
        _Model(lambda m, x: m(x), nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)),
        image.contiguous(memory_format=torch.channels_last),
    ),
    "attention": (
        _Model(lambda m, x: m(x, x, x), nn.MultiheadAttention(16, 4, batch_first=True)),
        words,
    ),
    "attention with weights": (
        _Model(lambda m, x, y: m(x, y, y), nn.MultiheadAttention(16, 4)),
        words,
        words.clone(),
    ),
    "encoder layer": (
        _Model(
            lambda m, x: m(x),
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu"),
        ),
        words,
    ),
    "lstm": (
        _Model(lambda m, x: m(x), nn.LSTM(16, 4, 2, batch_first=True, bidirectional=True)),
        words,
    ),
    "embedding": (_Model(lambda m, i: m(i), nn.Embedding(7, 3)), torch.randint(0, 7, (4, 5))),
    "transposed matmul": (_Model(lambda x: x @ x.transpose(1, 2)), words),
    "chunks of one storage": (_Model(lambda x: torch.add(*x.chunk(2, dim=1))), image),
    "strided reshape": (_Model(lambda x: x.transpose(0, 1).reshape(-1)), image),
    "expanded": (_Model(lambda x: x[:, :1].expand(-1, 8, -1, -1) * x), image),
    "gather rows": (_Model(lambda x, i: x[i]), torch.randn(9, 2), torch.randint(0, 9, (30,))),
    "gather columns": (
        _Model(lambda x, i: x[:, :, i]),
        torch.randn(2, 2, 5),
        torch.randint(0, 5, (30,)),
    ),
    "concatenation": (_Model(lambda x: torch.cat([x, x[:, ::2]], 1)), image),
    "batch norm in training": (_Model(lambda m, x: m(x), nn.BatchNorm2d(8)), image),
    "pad": (_Model(lambda x: F.pad(x, (0, 1, 0, 2))), image),
    "attention function": (
        _Model(lambda x: F.scaled_dot_product_attention(x, x, x)),
        words[:, None],
    ),
    "layer norm": (_Model(lambda m, x: m(x.permute(0, 2, 3, 1)), nn.LayerNorm(8)), image),
    "weight norm": (
        _Model(lambda m, x: F.linear(x, m.weight, m.bias), nn.Linear(16, 8)),
        words,
    ),
    "to half": (_Model(lambda x: x.to(torch.float16)), words),
    "interpolation": (_Model(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")), image),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_rebuilt_operator_runs_what_the_original_ran(name):
    model, *inputs = CALLS[name]
    mode = "train" if "training" in name else "eval"
    spec = one(model, *inputs, mode=mode)
    rebuilt = rebuild(spec, "cpu")
    again = capture(_Model(rebuilt.run), ())
    assert {key: again.operators[key] for key in again.operators} == dict(
        capture(model, tuple(inputs)).operators
    )
    with torch.no_grad():
        expected, given = model(*inputs), rebuilt.run()
    for a, b in zip(_flat(expected), _flat(given), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.stride() == b.stride() or 1 in a.shape
        assert finite(b)


def _flat(out):
    return (
        [out]
        if isinstance(out, torch.Tensor)
        else [t for o in (out or []) if o is not None for t in _flat(o)]
    )


@pytest.mark.parametrize(
    "name",
    [
        "vit_b_32",
        pytest.param("swin_t", marks=slow.ALIKE),
        "shufflenet_v2_x0_5",
        "mobilenet_v3_small",
    ],
)
def test_every_tuple_of_a_model_gives_on_the_cpu_what_it_was_predicted_to_give(name):
    found = predict(catalog.build(name), catalog.example_inputs(name))
    for spec in found.tuples.values():
        rebuilt = rebuild(spec, "cpu")
        seen = capture(_Model(rebuilt.run), ())
        assert not seen.overlaps
        inside = rebuild(parse(spec.to_json()), "cpu")
        with torch.no_grad():
            assert all(finite(out) for out in _flat(inside.run())), spec


@pytest.mark.parametrize("name", ["vit_b_32", "swin_t"])
def test_replaying_attention_takes_the_fast_path(name):
    found = predict(catalog.build(name), catalog.example_inputs(name))
    attention = [spec for spec in found.tuples.values() if spec.short_name == "MultiheadAttention"]
    assert bool(attention) == name.startswith("vit")
    for spec in attention:
        assert "aten._native_multi_head_attention.default" in [
            operator for operator, _ in ran(rebuild(spec, "cpu").run)
        ]


IN_PLACE = {
    "relu": lambda x: F.relu(x, inplace=True),
    "relu module": nn.ReLU(inplace=True),
    "relu6 module": nn.ReLU6(inplace=True),
    "silu module": nn.SiLU(inplace=True),
    "hardswish module": nn.Hardswish(inplace=True),
    "hardsigmoid module": nn.Hardsigmoid(inplace=True),
    "leaky relu": nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU(inplace=True),
    "mish": nn.Mish(inplace=True),
    "add": lambda x: x.add_(torch.ones_like(x)),
    "iadd": lambda x: x.__iadd__(x.new_ones(x.shape)),
    "sub": lambda x: x.sub_(x.new_ones(x.shape)),
    "mul": lambda x: x.mul_(x.new_ones(x.shape)),
    "div": lambda x: x.div_(x.new_ones(x.shape)),
    "add number": lambda x: x.add_(1.0),
    "clamp": lambda x: x.clamp_(0, 1),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_stay_tame(name, dtype):
    function = IN_PLACE[name]
    model = function if isinstance(function, nn.Module) else _Model(function)
    specs = capture(model.eval(), (torch.randn(64, dtype=getattr(torch, dtype)),)).tuples.values()
    spec = list(specs)[-1]
    rebuilt = rebuild(spec, "cpu")
    assert rebuilt.written
    (written,) = {spec.tensors[index].storage for index in written_inputs(spec)}
    buffer = next(
        t for t, s in zip(rebuilt.tensors, spec.tensors, strict=True) if s.storage == written
    )
    with torch.no_grad():
        rebuilt.run()
        before = buffer.float().abs().mean()
        for _ in range(10_000):
            rebuilt.run()
    after = buffer.float().abs().mean()
    assert finite(buffer)
    assert after > 0
    assert 0.25 < after / before < 4


def test_replicas_have_their_own_memory_and_the_same_values():
    model, sequence = CALLS["attention"]
    rebuilt = rebuild(one(model, sequence), "cpu")
    cold = rebuilt.replica(weights=True, index=1)
    assert {t.data_ptr() for t in cold.weights}.isdisjoint(t.data_ptr() for t in rebuilt.weights)
    assert cold.activations[0] is rebuilt.activations[0]
    both = rebuilt.replica(weights=True, activations=True)
    assert both.activations[0].data_ptr() != rebuilt.activations[0].data_ptr()
    with torch.no_grad():
        outs = [item.run()[0] for item in (rebuilt, cold, both)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert ran(cold.run) == ran(rebuilt.run)
    assert rebuilt.weight_bytes == sum(t.nbytes for t in model.parameters())
    assert rebuilt.activation_bytes == sequence.nbytes


def test_shared_storages_stay_shared_in_replicas():
    model, chunked = CALLS["chunks of one storage"]
    spec = one(model, chunked)
    assert {tensor.storage for tensor in spec.tensors} == {0}
    assert spec.tensors[1].offset - spec.tensors[0].offset == 4 * 36
    first, second = rebuild(spec, "cpu").replica(activations=True).activations
    assert second.data_ptr() - first.data_ptr() == 4 * 36 * 4


def test_the_share_of_zeros_is_honoured():
    spec = OperatorTuple(
        "torch.nn.functional.relu",
        "function",
        {},
        ({"tensor": 0},),
        {},
        (TensorSpec("activation", "", (100, 100), "float32", zeros=0.75),),
    )
    share = (rebuild(spec, "cpu").activations[0] == 0).float().mean()
    assert 0.7 < share < 0.8


def test_data_is_a_function_of_the_seed():
    spec = one(CALLS["convolution"][0], image)
    assert torch.equal(
        rebuild(spec, "cpu", seed=3).weights[0], rebuild(spec, "cpu", seed=3).weights[0]
    )
    assert not torch.equal(
        rebuild(spec, "cpu", seed=3).weights[0], rebuild(spec, "cpu", seed=4).weights[0]
    )


def test_only_the_allow_list_is_built():
    tensors = (TensorSpec("activation", "", (2,), "float32"),)
    for name in (
        "os.system",
        "torch.load",
        "torch.Tensor.apply_",
        "torch.Tensor.map_",
        "torch.hub.load",
    ):
        assert name not in ALLOWED_OPERATORS
        with pytest.raises(TupleRejected, match="allow-list"):
            rebuild(OperatorTuple(name, "function", {}, ({"tensor": 0},), {}, tensors), "cpu")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "function", "parameters": {}, "operator": "torch.nn.ReLU", "tensors": ()},
        {"parameters": {"in_features": -3, "out_features": 2}},
        {"parameters": {"in_features": 4, "out_features": 2, "device": "x"}},
        {"parameters": {"in_features": 5, "out_features": 2}},
        {"tensors": ()},
    ],
)
def test_a_module_that_its_parameters_do_not_make_is_rejected(change):
    spec = one(nn.Linear(4, 2), torch.randn(3, 4))
    data = {
        name: getattr(spec, name) for name in ("operator", "kind", "parameters", "tensors")
    } | change
    with pytest.raises(TupleRejected):
        rebuild(OperatorTuple(**data), "cpu")


def test_absurd_sizes_are_refused_before_memory_is_asked_for():
    spec = OperatorTuple(
        "torch.relu",
        "function",
        {},
        ({"tensor": 0},),
        {},
        (TensorSpec("activation", "", (2**39,), "float32"),),
    )
    with pytest.raises(Unmeasurable) as caught:
        rebuild(spec, "cpu")
    assert caught.value.reason == "rejected"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "convnext_tiny"])
def test_on_the_card_every_tuple_runs_what_the_model_ran(name):
    model = catalog.build(name, device="cuda")
    found = capture(
        model, catalog.example_inputs(catalog.variant(name, 4), device="cuda"), device_type="cuda"
    )
    assert not found.gaps
    assert sum(found.operators.values()) == sum(
        count
        * sum(
            capture(
                _Model(rebuild(found.tuples[key], "cuda").run), (), device_type="cuda"
            ).operators.values()
        )
        for key, count in found.counts.items()
    )


def test_mangled_tuples_that_still_parse_are_rebuilt_or_rejected():
    chance = random.Random(1)
    originals = [
        json.dumps(one(*CALLS[name]).to_json())
        for name in ("convolution", "attention", "lstm", "embedding")
    ]
    for _ in range(1500):
        data = json.loads(chance.choice(originals))
        mangle(data, chance)
        try:
            rebuilt = rebuild(parse(data), "meta")
        except (TupleRejected, Unmeasurable):
            continue
        with contextlib.suppress(Exception), torch.no_grad():
            rebuilt.run()
        written_inputs(rebuilt.spec)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sigmoid().bernoulli(),
        lambda x: x.softmax(-1).multinomial(2),
        lambda x: torch.poisson(x.abs()),
        lambda x: torch.binomial(x.abs().round(), x.sigmoid()),
        lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
        lambda x: nn.BCELoss()(x.sigmoid(), x.sigmoid()),
        lambda x: F.gaussian_nll_loss(x, x, x.abs()),
        lambda x: F.one_hot(x.argmax(-1) % 3, 3),
        lambda x: x.long() // (x.long().abs() + 1),
        lambda x: x.long().remainder(x.long().abs() + 1),
    ],
)
def test_an_operator_that_refuses_some_values_gets_others(function):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    found = capture(Model(), (torch.randn(4, 16),))
    assert found.gaps == ()
    for spec in found.tuples.values():
        rebuild(spec, "cpu").run()
