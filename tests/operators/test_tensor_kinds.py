"""Tensors that are more than a dtype and strides are described with what they have, or refused by
name.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import bias
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import farm
from farm.errors import CaptureError, TupleRejected, UnsupportedTensor
from farm.operators.capture import capture, predict
from farm.operators.rebuild import rebuild
from farm.subjects.parsing import parse
from farm.training.capture import capture_step
from farm.training.step import ForwardPass
from farm.types.tuple import TensorSpec


class Int8Weight(torch.Tensor):
    """A weight of eight-bit integers with a scale, which a wrapper shows as decimals, as quantised
    weights are.
    """

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        dense = torch.utils._pytree.tree_map_only(
            cls, lambda one: one.values.to(one.scale.dtype) * one.scale, args
        )
        return func(*dense, **(kwargs or {}))


class Doubled(torch.Tensor):
    """A class that replaces a function of PyTorch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Marked(torch.Tensor):
    """A class that changes nothing."""


class Net(nn.Module):
    """A layer, and a buffer that a function may use."""

    def __init__(self, function=None, **buffers):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, values):
        found = self.layer(values)
        return found if self.function is None else self.function(self, found)


def with_weight(weight):
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(layer).eval()


EYE = torch.eye(4)
SPECIAL = {
    "sparse_coo": EYE.to_sparse(),
    "sparse_csr": EYE.to_sparse_csr(),
    "sparse_csc": EYE.to_sparse_csc(),
    "sparse_bsr": EYE.to_sparse_bsr(2),
    "nested": torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(1, 4)]),
    "jagged": torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(1, 4)], layout=torch.jagged),
    "per tensor": torch.quantize_per_tensor(EYE, 0.1, 0, torch.quint8),
    "per channel": torch.quantize_per_channel(EYE, torch.ones(4), torch.zeros(4), 0, torch.qint8),
    "oneDNN": EYE.to_mkldnn(),
    "Int8Weight": Int8Weight(torch.ones(4, 4, dtype=torch.int8), torch.rand(4, 1)),
    "Doubled": EYE.as_subclass(Doubled),
    "complex32": EYE.to(torch.complex32),
}
SAID = {"nested": "a nested tensor", "jagged": "a nested tensor"}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_buffer_that_nothing_uses_changes_nothing(name):
    plain, more = (
        farm.capture_model(Net().eval(), EYE),
        farm.capture_model(Net(held=SPECIAL[name]).eval(), EYE),
    )
    assert more.tuples == plain.tuples


def used(model, values):
    """The buffer in an operator that takes all kinds of tensors."""
    return values + torch.clone(model.held).to(values.dtype)


@pytest.mark.parametrize(
    "run", [farm.capture_model, lambda model, values: capture(model, (values,))]
)
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_tensor_that_is_used_is_named_with_its_call_and_a_way_out(name, run):
    with pytest.raises(UnsupportedTensor, match=SAID.get(name, name)) as caught:
        run(nn.Sequential(Net(used, held=SPECIAL[name])).eval(), EYE)
    assert "torch.clone at '0'" in caught.value.message
    assert caught.value.next_step


def test_a_layer_with_a_quantised_weight_is_not_a_dense_layer():
    with pytest.raises(UnsupportedTensor, match=r"Linear at '0' .* of the class \S*Int8Weight"):
        farm.capture_model(with_weight(SPECIAL["Int8Weight"]), EYE)
    with pytest.raises(UnsupportedTensor, match="Doubled with its own functions"):
        farm.capture_model(with_weight(SPECIAL["Doubled"]), EYE)


@pytest.mark.parametrize(
    "function",
    [
        lambda model, values: torch.sparse.mm(EYE.to_sparse(), values),
        lambda model, values: torch.nested.nested_tensor([values[:1], values[1:]]).to_padded_tensor(
            0.0
        ),
        lambda model, values: values.to_mkldnn().to_dense(),
    ],
)
def test_a_special_tensor_that_the_model_makes_is_refused(function):
    with pytest.raises(UnsupportedTensor, match=r"sparse tensor|nested tensor|mkldnn"):
        farm.capture_model(Net(function).eval(), EYE)


@pytest.mark.parametrize("name", ["nested", "jagged", "sparse_csr", "Int8Weight"])
def test_a_special_input_is_refused(name):
    with pytest.raises(UnsupportedTensor, match="A call of Linear at 'layer' has"):
        farm.capture_model(Net().eval(), SPECIAL[name])


def test_the_parts_of_a_sparse_tensor_are_plain_tensors():
    def gathered(model, values):
        return values[model.held._indices()[0]] * model.held._values()[:, None]

    found = farm.capture_model(Net(gathered, held=SPECIAL["sparse_coo"]).eval(), EYE)
    assert [spec.short_name for spec in found.tuples] == ["Linear", "getitem", "mul"]


def test_a_class_that_only_marks_a_tensor_is_a_plain_tensor():
    plain = farm.capture_model(Net().eval(), EYE)
    assert farm.capture_model(Net().eval(), EYE.as_subclass(Marked)).tuples == plain.tuples
    assert farm.capture_model(with_weight(EYE.as_subclass(Marked)), EYE).tuples == plain.tuples


COMPLEX = torch.randn(4, 4, dtype=torch.complex64)
LAZY = {
    "conjugated": (lambda model, values: torch.view_as_real(model.held.conj() * values), ("conj",)),
    "transposed": (
        lambda model, values: torch.view_as_real(values.to(torch.complex64) @ model.held.mH),
        ("conj",),
    ),
    "negated": (lambda model, values: values + model.held.conj().imag, ("neg",)),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_conjugation_or_negation_is_part_of_the_call(name):
    function, bits = LAZY[name]
    model = Net(function, held=COMPLEX).eval()
    found = farm.capture_model(model, EYE)
    (spec,) = [spec for spec in found.tuples if any(tensor.bits for tensor in spec.tensors)]
    assert [tensor.bits for tensor in spec.tensors if tensor.bits] == [bits]
    assert parse(spec.to_json()) == spec
    assert found.tuples == tuple(capture(model, (EYE,)).tuples.values())
    rebuilt = rebuild(spec, "cpu")
    assert [(tensor.is_conj(), tensor.is_neg()) for tensor in rebuilt.tensors] == [
        ("conj" in tensor.bits, "neg" in tensor.bits) for tensor in spec.tensors
    ]
    assert rebuilt.run().shape == (4, 4)


def test_a_conjugated_input_or_buffer_keeps_its_bit():
    class Doubled(nn.Module):
        def forward(self, values):
            return values * 2

    def doubled(model, values):
        return values + torch.view_as_real(model.held * 2).sum()

    of_input = farm.capture_model(Doubled(), COMPLEX.conj())
    of_buffer = farm.capture_model(Net(doubled, held=COMPLEX.conj()).eval(), EYE)
    for found in (of_input, of_buffer):
        assert [tensor.bits for spec in found.tuples for tensor in spec.tensors if tensor.bits] == [
            ("conj",)
        ]


def test_a_tensor_without_bits_has_the_same_description_as_ever():
    assert "bits" not in TensorSpec("activation", "", (2,), "float32").to_json()


# ----- packed sequences


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, *, state=False):
        super().__init__()
        self.rnn, self.state = kind(8, 16, batch_first=True), state

    def forward(self, values, lengths):
        packed = pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
        state = (torch.zeros(1, len(lengths), 16),) * 2 if self.state else None
        return pad_packed_sequence(self.rnn(packed, state)[0], batch_first=True)[0]


class OfPacked(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(8, 16)

    def forward(self, packed):
        return self.rnn(packed)[0].data


VALUES, LENGTHS = torch.randn(3, 5, 8), torch.tensor([5, 1, 3])
SEQUENCES = pack_sequence([torch.randn(length, 8) for length in (5, 3, 1)])
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


@pytest.mark.parametrize("kind", GATES)
def test_a_recurrent_layer_computes_the_sum_of_the_lengths(kind):
    found = farm.capture_model(Recurrent(kind).eval(), (VALUES, LENGTHS))
    assert found.flops == 9 * 2 * GATES[kind] * 16 * (8 + 16)
    assert farm.capture_model(OfPacked(kind).eval(), SEQUENCES).flops == found.flops
    packed = [
        spec
        for spec in found.tuples
        if spec.short_name in ("_pack_padded_sequence", "_pad_packed_sequence")
    ]
    assert [spec.arguments[1] for spec in packed] == [
        {"integers": [5, 3, 1]},
        {"integers": [3, 2, 2, 1, 1]},
    ]


@pytest.mark.parametrize("model", [Recurrent(), Recurrent(nn.GRU), Recurrent(state=True)])
def test_the_rebuilt_layer_gets_a_packed_sequence_with_the_same_lengths(model):
    found = farm.capture_model(model.eval(), (VALUES, LENGTHS))
    assert found.tuples == tuple(capture(model, (VALUES, LENGTHS)).tuples.values())
    for spec in found.tuples:
        assert parse(spec.to_json()) == spec
        out = rebuild(spec, "cpu").run()
        if spec.kind == "module":
            assert isinstance(out[0], PackedSequence)
            assert out[0].batch_sizes.tolist() == [3, 2, 2, 1, 1]


def test_other_lengths_are_other_tuples():
    short = farm.capture_model(
        OfPacked().eval(), pack_sequence([torch.randn(6, 8), torch.randn(3, 8)])
    )
    long = farm.capture_model(OfPacked().eval(), SEQUENCES)
    assert short.tuples[0].tensors[0].shape == long.tuples[0].tensors[0].shape
    assert short.tuples[0] != long.tuples[0]


@pytest.mark.parametrize("steps", [[3, 2, 2, 1], [3, 2, 2, 1, 2], [9, 0], [1, 8], []])
def test_steps_that_do_not_fit_the_data_are_rejected(steps):
    (spec,) = farm.capture_model(OfPacked().eval(), SEQUENCES).tuples
    changed = spec.to_json()
    changed["arguments"][0]["named_tuple"][1][1] = {"integers": steps}
    with pytest.raises(TupleRejected, match="do not fit its data"):
        rebuild(parse(changed), "cpu")


@pytest.mark.parametrize(
    "tree",
    [
        {"named_tuple": ["OrderedDict", []]},
        {"named_tuple": ["PackedSequence"]},
        {"integers": [-1]},
        {"integers": ["1"]},
        {"integers": [1] * 10_001},
    ],
)
def test_nothing_else_is_accepted_as_a_packed_sequence(tree):
    (spec,) = farm.capture_model(OfPacked().eval(), SEQUENCES).tuples
    with pytest.raises(TupleRejected):
        parse({**spec.to_json(), "arguments": [{"tensor": 0}, tree]})


# ----- costs that PyTorch cannot compute on meta


def grouped(model, values):
    return nn.functional.grouped_mm(
        values, torch.ones(2, 4, 8), offs=torch.tensor([2, 4], dtype=torch.int32)
    )


COSTS = {
    "repeat_interleave": (
        lambda model, x: x.repeat_interleave(torch.tensor([1, 2, 1, 2]), 0),
        4 * (16 + 24) + 32,
        0,
    ),
    "_grouped_mm": (grouped, 4 * (16 + 64 + 32) + 8, 2 * 4 * 4 * 8),
    "one_hot": (
        lambda model, x: nn.functional.one_hot(torch.arange(4) + x.long()[0] * 0, 5),
        8 * (4 + 20),
        0,
    ),
    "getitem": (lambda model, x: x[x == x], 4 * (16 + 16) + 16, 0),
    "bincount": (
        lambda model, x: torch.bincount((x == x).long().flatten(), minlength=2),
        8 * (16 + 2),
        0,
    ),
    "nonzero": (lambda model, x: (x == x).nonzero(), 16 + 16 * 2 * 8, 0),
    "masked_select": (lambda model, x: x.masked_select(x == x), 4 * (16 + 16) + 16, 0),
    "unique": (lambda model, x: torch.unique((x == x).long()), 8 * (16 + 1), 0),
}


@pytest.mark.parametrize("name", COSTS)
def test_an_operator_that_needs_values_costs_what_it_did_in_the_capture(name):
    function, moved_bytes, flops = COSTS[name]
    found = farm.capture_model(Net(function).eval(), EYE)
    (spec,) = [spec for spec in found.tuples if spec.short_name == name]
    cost = found.extraction.costs[spec.id]
    assert (cost.bytes, cost.flops) == (moved_bytes, flops)


def test_without_a_capture_the_cost_of_such_an_operator_is_refused():
    from farm.operators.cost import cost

    (spec,) = [
        spec
        for spec in capture(Net(COSTS["nonzero"][0]).eval(), (EYE,)).tuples.values()
        if "nonzero" in str(spec)
    ]
    other = parse(
        {**spec.to_json(), "tensors": [{**spec.to_json()["tensors"][0], "shape": [7, 4]}]}
    )
    with pytest.raises(CaptureError, match="The cost of nonzero"):
        cost(other)


class Aligned(nn.Module):
    def forward(self, logits, lengths):
        targets = torch.tensor([[1, 2, 3, 1], [2, 1, 1, 1]])
        return nn.functional.ctc_loss(logits, targets, torch.tensor([9, 7]), lengths)


def test_the_lengths_that_a_loss_reads_on_the_host_are_part_of_the_call():
    logits = torch.randn(9, 2, 4).log_softmax(-1)
    short, long = (
        farm.capture_model(Aligned(), (logits, torch.tensor(lengths)))
        for lengths in ([1, 1], [4, 2])
    )
    (spec,) = long.tuples
    assert spec.arguments[2:4] == ({"integers": [9, 7]}, {"integers": [4, 2]})
    assert short.tuples[0].id != spec.id
    assert rebuild(spec, "cpu").run().isfinite()


class Composite(Int8Weight):
    """A quantised weight that names its parts, as those of torchao."""

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["values"], parts["scale"])


class WithFunctions(Composite):
    """Replaces a function of PyTorch, too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            values, weight, bias = args
            return values @ weight.values.to(values.dtype).mT * weight.scale.mT + bias
        return super().__torch_function__(func, types, args, kwargs or {})


def eight_bit(kind):
    return kind(torch.ones(4, 4, dtype=torch.int8), torch.rand(4, 1))


OPERATORS_OF = {
    Composite: ["aten._to_copy.default", "aten.mul.Tensor", "aten.addmm.default"],
    WithFunctions: [
        "aten._to_copy.default",
        "aten.mm.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ],
}


@pytest.mark.parametrize("kind", OPERATORS_OF)
@pytest.mark.parametrize("run", [predict, capture])
def test_the_operators_on_the_parts_of_a_composite_are_captured(run, kind):
    found = run(with_weight(eight_bit(kind)), (EYE,))
    assert (found.gaps, found.overlaps) == ((), ())
    calls = [found.tuples[call.tuple_id] for call in found.calls]
    assert [spec.operator for spec in calls] == OPERATORS_OF[kind]
    assert [(tensor.role, tensor.dtype) for tensor in calls[0].tensors] == [("parameter", "int8")]
    for spec in calls:
        rebuild(spec, "cpu").run()


def test_a_composite_may_be_an_input():
    found = farm.capture_model(Net().eval(), eight_bit(Composite))
    assert [spec.operator for spec in found.tuples] == OPERATORS_OF[Composite]


@pytest.mark.parametrize("kind", OPERATORS_OF)
def test_a_composite_may_be_a_buffer(kind):
    as_buffer = farm.capture_model(Net(used, held=eight_bit(kind)).eval(), EYE)
    assert "aten._to_copy.default" in [spec.operator for spec in as_buffer.tuples]
    plain = farm.capture_model(Net().eval(), EYE)
    unused = farm.capture_model(Net(held=eight_bit(kind)).eval(), EYE)
    assert unused.tuples == plain.tuples


def test_the_model_keeps_its_composite():
    model = with_weight(eight_bit(Composite))
    weight = model[0].weight
    farm.capture_model(model, EYE)
    assert model[0].weight is weight
    assert type(weight.values) is torch.Tensor


class Attention(nn.Module):
    """Attention with a mask that is made before the model runs, or by it."""

    def __init__(self, mask, *, before):
        super().__init__()
        self.layer, self.mask, self.made = nn.Linear(4, 4), mask, mask(3, 3) if before else None

    def forward(self, values):
        hidden = self.layer(values)
        mask = self.mask(3, 3) if self.made is None else self.made
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("mask", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.parametrize(
    "run",
    [
        farm.capture_model,
        lambda model, values: capture_step(ForwardPass(model, (values,), grad=False)),
    ],
)
def test_a_mask_of_a_class_is_refused_with_the_masks_that_may_replace_it(run, mask, before):
    values = torch.randn(2, 1, 3, 4)
    with pytest.raises(UnsupportedTensor, match="of the class CausalBias") as caught:
        run(Attention(mask, before=before).eval(), values)
    assert "is_causal=True" in caught.value.next_step
    assert ".tril(columns - rows)" in caught.value.next_step
    plain = torch.ones(3, 3, dtype=torch.bool).tril(0)
    assert farm.capture_model(Attention(lambda *_: plain, before=before).eval(), values).tuples


def test_a_tensor_of_a_class_that_the_model_makes_is_named_with_its_place():
    def made(model, values):
        return values + torch.Tensor.__new__(Marked, EYE)

    with pytest.raises(UnsupportedTensor, match=r"class Marked \(.*test_tensor_kinds\.py, line"):
        farm.capture_model(Net(made).eval(), EYE)
