"""Labels name what tells the tuples of a model apart, on one short line."""

import pytest

from farm.report.operators import operators
from farm.subjects.label import LENGTH, label_of
from farm.training.extract import extract
from farm.types.format import told_apart
from farm.types.tuple import OperatorTuple, TensorSpec
from farm.types.variant import Variant
from tests.types.test_tuple import addition, convolution

IMAGE = TensorSpec("activation", "", (14, 14), "float32")
WEIGHT = TensorSpec("parameter", "", (14, 14), "float32", storage=1)
FIRST, SECOND = {"tensor": 0}, {"tensor": 1}
CORNER = {"tuple": [{"slice": [0, -7, None]}, {"slice": [-3, None, None]}]}


def call(operator, *arguments, tensors=(IMAGE, WEIGHT), **keywords):
    return OperatorTuple(operator, "function", {}, arguments, keywords, tensors)


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (convolution(), "Conv2d 64->128 k3 s2 p1 | 32x64x56x56 fp32"),
        (addition(), "add_ | 32x64x56x56 + 32x64x56x56 fp32"),
        (call("torch.add", FIRST, SECOND), "add | 14x14 + 14x14 (parameter) fp32"),
        (call("torch.cat", [FIRST] * 4, -1), "cat -1 | 4 of 14x14 fp32"),
        (
            call("torch.Tensor.__setitem__", FIRST, CORNER, 2),
            "setitem [0:-7, -3:] = 2 | 14x14 fp32",
        ),
        (
            call("torch.Tensor.__getitem__", FIRST, {"tuple": [{"ellipsis": True}, None]}),
            "getitem [..., None] | 14x14 fp32",
        ),
        (
            call("torch.Tensor.__getitem__", FIRST, SECOND),
            "getitem | 14x14 + 14x14 (parameter) fp32",
        ),
        (
            call("torch.Tensor.masked_fill", FIRST, SECOND, {"float": "-inf"}),
            "masked_fill -inf | 14x14 + 14x14 (parameter) fp32",
        ),
        (
            call("torch.roll", FIRST, shifts={"tuple": [-3, -3]}, dims={"tuple": [1, 2]}),
            "roll shifts -3,-3 dims 1,2 | 14x14 fp32",
        ),
        (
            call("torch.nn.functional.softmax", FIRST, dim=-1, dtype={"dtype": "float16"}),
            "softmax dim -1 dtype fp16 | 14x14 fp32",
        ),
        (call("torch.nn.functional.relu", FIRST, inplace=True), "relu inplace | 14x14 fp32"),
        (
            call("torch.nn.functional.max_pool2d", FIRST, 3, ceil_mode=False, stride=None),
            "max_pool2d 3 | 14x14 fp32",
        ),
    ],
)
def test_says_what_is_done_with_what(spec, label):
    assert label_of(spec) == label


def test_what_does_not_fit_gives_way_to_the_beginning_of_the_id():
    one, other = (call("torch.einsum", "ab," * 40 + end, FIRST) for end in ("c", "d"))
    assert label_of(one) != label_of(other)
    for spec in (one, other):
        assert label_of(spec).startswith("einsum ab,ab,")
        assert f"… #{spec.id[:6]} | 14x14 fp32" in label_of(spec)
        assert len(label_of(spec)) <= LENGTH


def test_a_label_stays_one_line():
    assert label_of(call("torch.einsum", "a\nb\x1b[31m", FIRST)) == "einsum a?b?[31m | 14x14 fp32"


def test_a_list_tells_tuples_of_one_label_apart():
    assert told_apart({"0123456789": "add", "a123456789": "add", "b123456789": "mul"}) == {
        "0123456789": "add #012345",
        "a123456789": "add #a12345",
        "b123456789": "mul",
    }


def test_no_two_tuples_share_a_label_where_only_their_strides_differ():
    variant = Variant("vit_b_16", 2, 224, "bfloat16", "channels_last", "train")
    rows = operators(variant, extract(variant)).rows
    assert len({row.label for row in rows}) == len(rows)
