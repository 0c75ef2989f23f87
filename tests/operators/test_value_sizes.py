"""Calls whose output sizes depend on values: the tuple says how large the outputs were, exactly."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farm.errors import TupleRejected, Unmeasurable
from farm.operators import self_check
from farm.operators.capture import capture
from farm.operators.deciding_values import check_values
from farm.operators.output_sizes import check_size, is_sized_by_values, trial
from farm.operators.rebuild import rebuild
from farm.subjects.encoding import texts_of_outputs
from farm.subjects.label import label_of
from farm.types.distribution import Distribution
from farm.types.tuple import OperatorTuple, TensorSpec

CPU = torch.device("cpu")
ONE, TWO = {"tensor": 0}, {"tensor": 1}


def placed(values):
    target = values.clone()
    target[values > 0] = values[values > 0] * 2
    return target


def placed_rows(values):
    target = values.clone()
    rows = values[:, 0] > 0
    target[rows, 1:] = values[rows, 1:]
    return target


#: Function of a tensor (8, 6) -> the operator whose sizes depend on values.
FUNCTIONS = {
    "nonzero": lambda values: (values > 0).nonzero(),
    "nonzero of integers": lambda values: values.relu().long().nonzero(),
    "argwhere": lambda values: torch.argwhere(values > 0.5),
    "where": lambda values: torch.where(values > 0.5),
    "masked_select": lambda values: torch.masked_select(values, values > 0),
    "getitem": lambda values: values[values > 0],
    "rows": lambda values: values[values[:, 0] > 0],
    "unique": lambda values: torch.unique(values.long(), return_inverse=True, return_counts=True),
    "unique of floats": lambda values: torch.unique(values.round()),
    "unique_consecutive": lambda values: torch.unique_consecutive(values.long().flatten()),
    "repeat_interleave": lambda values: values.repeat_interleave(values[:, 0].long().abs(), dim=0),
    "counts alone": lambda values: torch.repeat_interleave(values[:, 0].long().abs()),
    "one_hot": lambda values: F.one_hot(values.long().abs()),
}
#: Calls whose mask has as many marks as there are values.
PLACING = {
    "setitem": placed,
    "rows": placed_rows,
    "index_put": lambda values: values.index_put((values > 0,), values[values > 0]),
    "masked_scatter": lambda values: values.masked_scatter(values > 0, values[values > 0] * 2),
    "an expanded mask": lambda values: values.masked_scatter(
        (values[:, :1] > 0).expand(8, 6), values[values[:, 0] > 0]
    ),
}


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, values):
        return self.function(self.layer(values))


def captured_of(function):
    torch.manual_seed(3)
    captured = capture(Net(function).eval(), (4 * torch.randn(8, 6),))
    return self_check.checked_on(CPU, captured)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rebuilt_call_has_outputs_of_the_sizes_in_the_model(name):
    captured = captured_of(FUNCTIONS[name])
    assert not captured.gaps
    assert not captured.mismatches
    sized = [spec for spec in captured.tuples.values() if is_sized_by_values(spec)]
    assert sized
    for spec in sized:
        assert any(tensor.values is not None for tensor in spec.tensors), label_of(spec)
        trace = captured.traces[spec.id]
        assert texts_of_outputs(rebuild(spec, "cpu").run()) == trace.outputs
        assert trace.new_bytes <= trial(spec).new_bytes


@pytest.mark.parametrize("name", PLACING)
def test_a_mask_has_as_many_marks_as_there_are_values_to_place(name):
    captured = captured_of(PLACING[name])
    assert not captured.gaps
    assert not captured.mismatches
    for spec in captured.tuples.values():
        rebuild(spec, "cpu").run()


# ----- forged tuples


def integers(*shape, values=None, storage=0):
    return TensorSpec("activation", "", shape, "int64", storage=storage, values=values)


def call(operator, *arguments, tensors, **keywords):
    kind = "aten" if operator.startswith("aten.") else "function"
    return OperatorTuple(operator, kind, {}, arguments, keywords, tuple(tensors))


def floats(*shape, storage=0):
    return TensorSpec("activation", "", shape, "float32", storage=storage)


def repeated(*, rows=8, **keywords):
    total = keywords.pop("total", None)
    values = Distribution("repeats", (total, min(total, rows))) if total is not None else None
    tensors = floats(rows, 4), integers(rows, values=values, storage=1)
    return call("torch.repeat_interleave", ONE, TWO, 0, tensors=tensors, **keywords)


TOO_LARGE = [
    repeated(total=2**31),
    call(
        "torch.nn.functional.one_hot",
        ONE,
        tensors=[integers(2**20, values=Distribution("below", (2**30,)))],
    ),
    call("torch.bincount", ONE, None, 2**40, tensors=[integers(8)]),
    call("aten.bincount.default", ONE, minlength=2**40, tensors=[integers(8)]),
    call("torch.combinations", ONE, 8, tensors=[integers(1000)]),
    call(
        "torch.masked_select",
        ONE,
        TWO,
        tensors=[
            floats(2**20, 1),
            TensorSpec("activation", "", (1, 2**20), "bool", storage=1),
        ],
    ),
    call("torch.nonzero", ONE, tensors=[TensorSpec("activation", "", (2**33,) + (1,) * 9, "bool")]),
]


@pytest.mark.parametrize("spec", TOO_LARGE, ids=lambda spec: spec.operator)
def test_values_cannot_ask_for_more_memory_than_there_is(spec):
    with pytest.raises(Unmeasurable, match="outputs need"):
        check_size(spec, CPU, 2**36, 300.0)


@pytest.mark.parametrize(
    "spec",
    [
        repeated(total=2**31 + 1),
        call("torch.no_such", ONE, tensors=[integers(4)]),
        dataclasses.replace(
            call("torch.functional.unique", ONE, tensors=[integers(4)]),
            tensors=(integers(4, values=Distribution("distinct", (5,))),),
        ),
    ],
    ids=["rows", "name", "distinct"],
)
def test_values_that_do_not_fit_their_call_are_refused(spec):
    with pytest.raises(TupleRejected):
        rebuild(spec, "cpu")


@pytest.mark.parametrize("numbers", [(), (0,), (1, 2)])
def test_a_description_of_different_values_is_one_number(numbers):
    assert Distribution("distinct", numbers).problem()
    assert Distribution("below", numbers).problem()


@pytest.mark.parametrize("numbers", [(3,), (2, 3), (0, 1), (3, 0)])
def test_a_description_of_counts_is_a_sum_and_how_many_there_are(numbers):
    assert Distribution("repeats", numbers).problem()


@pytest.mark.parametrize("total", [0, 5, 8, 100])
def test_counts_always_amount_to_the_size_that_the_call_says(total):
    # On a card, the kernel trusts the size, and would write beyond it.
    spec = repeated(output_size=total)
    assert rebuild(spec, "cpu").tensors[1].sum() == total
    assert rebuild(spec, "cpu").run().shape == (total, 4)
    described = repeated(output_size=total, total=3)
    assert rebuild(described, "cpu").tensors[1].sum() == total


def test_counts_without_a_rule_are_refused_if_the_call_says_their_sum():
    expanded = TensorSpec("activation", "", (8,), "int64", stride=(0,), storage=1)
    spec = dataclasses.replace(repeated(output_size=8), tensors=(floats(8, 4), expanded))
    with pytest.raises(TupleRejected, match="amount to its output_size"):
        check_values(spec)


@pytest.mark.parametrize(("dimension", "total"), [(0, 16), (-1, 8), (None, 64)])
def test_one_count_for_all_rows_amounts_to_the_size_that_the_call_says(dimension, total):
    def spec(size):
        return call(
            "torch.repeat_interleave", ONE, 2, dimension, tensors=(floats(8, 4),), output_size=size
        )

    assert rebuild(spec(total), "cpu").run().numel() == 64
    with pytest.raises(TupleRejected, match="amount to its output_size"):
        check_values(spec(total + 1))
