"""Sweeps give the very tuples that a model would give, and leave nothing out in silence."""

import itertools

import pytest
import torch

from farm.errors import TupleRejected, UnknownOperator, UsageError
from farm.operators import sweep_builder as sweeps
from farm.operators.capture import capture
from farm.operators.cost import cost
from farm.operators.rebuild import rebuild
from farm.operators.sweep_builder import Builder, Expansion, Impossible, with_zeros
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.subjects.sweep import RECIPES, REQUIRED, check_names
from farm.types.request import Sweep


def sweep(operator, **grid):
    return Sweep(
        operator, {name: tuple(v) if isinstance(v, list) else (v,) for name, v in grid.items()}
    )


def expand(wanted):
    return [spec for batch in Expansion(wanted).batches() for spec in batch]


def test_a_combination_is_the_tuple_that_a_model_with_that_operator_gives():
    (spec,) = expand(
        sweep(
            "Conv2d",
            batch=8,
            in_channels=64,
            out_channels=128,
            kernel_size=3,
            stride=2,
            padding=1,
            image_size=56,
        )
    )
    layer = torch.nn.Sequential(torch.nn.Conv2d(64, 128, 3, 2, 1)).eval()
    (of_model,) = capture(layer, (torch.empty(8, 64, 56, 56),)).tuples.values()
    assert spec == of_model
    assert spec.id == of_model.id


def test_every_combination_is_there_once():
    found = expand(
        sweep(
            "Linear",
            batch=[1, 32],
            in_features=[64, 128],
            out_features=[10],
            dtype=["float32", "float16"],
        )
    )
    assert len({spec.id for spec in found}) == len(found) == 8


def test_the_share_of_zeros_makes_another_tuple_and_marks_the_inputs_alone():
    plain, sparse = expand(sweep("Conv2d", in_channels=3, out_channels=8, zeros=[0, 0.5]))
    assert plain.id != sparse.id
    assert [tensor.zeros for tensor in sparse.tensors if tensor.role == "activation"] == [0.5]
    assert all(tensor.zeros == 0 for tensor in sparse.tensors if tensor.role != "activation")


def test_the_share_of_zeros_makes_another_tuple_and_stands_in_its_label():
    full, half = expand(sweep("Linear", in_features=8, out_features=8, tokens=4, zeros=[0, 0.5]))
    assert full.id != half.id
    assert label_of(half) == f"{label_of(full)} zeros 50 %"


def test_impossible_combinations_are_counted_by_reason():
    expansion = Expansion(
        sweep(
            "Conv2d",
            in_channels=[3, 4],
            out_channels=4,
            groups=[1, 2],
            kernel_size=[1, 9],
            image_size=7,
        )
    )
    assert [len(batch) for batch in expansion.batches()] == [3]
    assert sum(expansion.skipped.values()) == 5
    (groups,) = (reason for reason in expansion.skipped if "divisible by groups" in reason)
    assert expansion.skipped[groups] == 2
    assert groups.endswith("(such as in_channels 3, groups 2, kernel_size 1)")
    (large,) = (reason for reason in expansion.skipped if "Kernel size" in reason)
    assert expansion.skipped[large] == 3
    assert "Kernel size: (9 x 9)" in large
    assert large.endswith("(such as in_channels 3, groups 1, kernel_size 9)")


def test_a_combination_larger_than_any_card_is_left_out_with_its_reason():
    expansion = Expansion(
        Sweep("Linear", {"in_features": (16, 2_000_000), "out_features": (2_000_000,)})
    )
    assert [len(batch) for batch in expansion.batches()] == [1]
    ((reason, number),) = expansion.skipped.items()
    assert number == 1
    assert "more memory" in reason
    assert "in_features 2000000" in reason


def test_a_sweep_of_nothing_possible_is_refused():
    with pytest.raises(UsageError, match="none of the 1 combinations"):
        expand(sweep("Conv2d", in_channels=3, out_channels=4, groups=2))


#: Two sizes for whatever is needed, so that each structure is met again; some are impossible.
VARIED = {
    "Conv2d": {
        "kernel_size": [1, 3, 61],
        "groups": [1, 3],
        "bias": [True, False],
        "padding": [1, "same"],
    },
    "ConvTranspose2d": {"stride": [1, 2], "output_padding": [0, 1], "kernel_size": [[1, 2]]},
    "Linear": {"tokens": [0, 5], "bias": [True, False], "dtype": ["float32", "bfloat16"]},
    "BatchNorm2d": {"affine": [True, False]},
    "GroupNorm": {"num_channels": [8, 12]},
    "MultiheadAttention": {"num_heads": [1, 3], "tokens": [7, 9]},
    "MaxPool2d": {"padding": [0, 1, 2], "stride": [None, 1], "image_size": [8, [9, 7]]},
    "AvgPool2d": {"kernel_size": [2, 3], "ceil_mode": [True, False]},
    "AdaptiveAvgPool2d": {"output_size": [1, 7]},
    "ReLU": {"inplace": [True, False], "zeros": [0.5], "channels": [1, 3]},
    "ReLU6": {"inplace": [True], "image_size": [3, 5]},
    "Softmax": {"dim": [-1, 1, 5], "tokens": [0, 4]},
    "softmax": {"dim": [-1, 1, 5], "tokens": [0, 4]},
    "scaled_dot_product_attention": {
        "is_causal": [True, False],
        "heads": [2, 4],
        "key_value_heads": [0, 2],
        "tokens": [1, 5],
        "cache": [0, 7],
    },
    "RMSNorm": {"tokens": [0, 5], "elementwise_affine": [True, False]},
    "_scaled_mm": {
        "m": [16, 17],
        "n": [16, 32],
        "k": [16, 24],
        "zeros": [0, 0.5],
        "dtype": ["float8_e4m3fn", "float8_e5m2"],
    },
    "add": {"tokens": [0, 5], "heads": [1, 2]},
    "mul": {"tokens": [0, 5], "heads": [1, 2]},
    "neg": {"tokens": [1, 5]},
    "cat": {"dim": [-1, 2, 4], "tokens": [1, 5]},
}


@pytest.mark.parametrize("operator", [name for name in RECIPES if not RECIPES[name].collective])
def test_each_of_a_sweeps_tuples_is_the_one_that_a_capture_gives_and_costs_the_same(operator):
    """Only the first of a structure is captured: the others must be what a capture of them would
    be.
    """
    recipe = RECIPES[operator]
    needed = {name: [8, 12] for name, default in recipe.names.items() if default is REQUIRED}
    grid = {"batch": [1, 2], **needed, **VARIED.get(operator, {})}
    grid = {name: values for name, values in grid.items() if name in recipe.names}
    builder, captures = Builder(operator, recipe), Builder(operator, recipe)

    def outcome(build, values):
        try:
            spec, cost = build(values)
        except Impossible as refusal:
            return str(refusal)
        return with_zeros(spec, values["zeros"]).to_json(), cost

    for combination in itertools.product(*grid.values()):
        values = {**recipe.names, **dict(zip(grid, combination, strict=True))}
        assert outcome(builder.build, values) == outcome(captures.build_by_capture, values), values
    (short_name,) = {sample.short_name for sample in builder._samples.values()}
    assert short_name == operator


def test_few_combinations_are_captured(monkeypatch):
    by_capture = []
    build = Builder.build_by_capture
    monkeypatch.setattr(Builder, "build_by_capture", lambda *a: by_capture.append(a) or build(*a))
    grid = {
        "in_channels": range(1, 11),
        "out_channels": range(1, 11),
        "kernel_size": (1, 3),
        "bias": (True, False),
    }
    assert (
        len(expand(Sweep("Conv2d", {name: tuple(values) for name, values in grid.items()}))) == 400
    )
    assert len(by_capture) == 2


def test_a_large_grid_comes_in_batches_from_all_over_it(monkeypatch):
    monkeypatch.setattr(sweeps, "FIRST_BATCH", 4)
    monkeypatch.setattr(sweeps, "BATCH", 10)
    wanted = sweep(
        "Linear", in_features=list(range(1, 7)), out_features=list(range(1, 6)), batch=[1, 1]
    )
    expansion = Expansion(wanted)
    batches = list(expansion.batches())
    assert [len(batch) for batch in batches[:2]] == [4, 10]
    assert max(map(len, batches)) == 10
    assert expansion.tried == 60
    assert len({spec.input_shapes[0][-1] for spec in batches[0]}) == 4
    assert len({spec for batch in batches for spec in batch}) == 30


def test_attention_beside_a_cache_has_few_queries_many_keys_and_fewer_heads_of_them():
    (spec,) = expand(
        sweep(
            "scaled_dot_product_attention",
            batch=8,
            heads=32,
            key_value_heads=8,
            tokens=1,
            cache=1023,
            head_features=128,
        )
    )
    assert spec.input_shapes == ((8, 32, 1, 128), (8, 8, 1024, 128), (8, 8, 1024, 128))
    assert cost(spec).flops == 4 * 8 * 32 * 1024 * 128
    assert spec.keywords["enable_gqa"] is True
    (alike,) = expand(sweep("scaled_dot_product_attention", heads=8, key_value_heads=8))
    assert "enable_gqa" not in alike.keywords


def test_a_product_of_eight_bit_floats_runs_as_it_is_described():
    expansion = Expansion(sweep("_scaled_mm", m=[16, 32], n=64, k=[128, 100], zeros=[0, 0.5]))
    specs = [spec for batch in expansion.batches() for spec in batch]
    assert len(specs) == 4
    (reason,) = expansion.skipped
    assert "divisible by 16" in reason
    assert [spec.tensors[1].stride for spec in specs] == [(1, 128)] * 4
    assert [cost(spec).flops for spec in specs[::2]] == [2 * m * 64 * 128 for m in (16, 32)]
    for spec in specs:
        rebuilt = rebuild(spec, "cpu")
        zeros = (rebuilt.tensors[0].float() == 0).float().mean()
        assert zeros == pytest.approx(spec.tensors[0].zeros, abs=0.1)
        assert (rebuilt.tensors[2] > 0).all()
        out = rebuilt.run()
        assert out.dtype == torch.bfloat16
        assert out.shape == (spec.tensors[0].shape[0], 64)


@pytest.mark.parametrize(
    ("operator", "grid", "message"),
    [
        ("Conv2", {}, "no sweep of the operator 'Conv2'"),
        ("Conv2d", {"kernel": 1}, "has no parameter or size 'kernel'"),
        ("Conv2d", {"in_channels": 3}, "needs out_channels"),
        ("Conv2d", {"in_channels": 3, "out_channels": "x"}, "must be a whole number"),
        ("Conv2d", {"in_channels": 3, "out_channels": True}, "must be a whole number"),
        ("Conv2d", {"in_channels": 3, "out_channels": -1}, "must be at least 0"),
        ("Conv2d", {"in_channels": 3, "out_channels": 8, "bias": 1}, "must be true or false"),
        ("Conv2d", {"in_channels": 3, "out_channels": 8, "zeros": 2}, "share from 0 to 1"),
        ("Conv2d", {"in_channels": 3, "out_channels": 8, "dtype": "fp8"}, "must be one of float32"),
        (
            "_scaled_mm",
            {"m": 16, "n": 16, "k": 16, "dtype": "float32"},
            "must be one of float8_e4m3fn, float8_e5m2",
        ),
        ("_scaled_mm", {"m": 16, "n": 16, "k": 16, "out_dtype": "int8"}, "must be one of float32"),
        (
            "Linear",
            {"in_features": 3, "out_features": 8, "batch": [[1, 2]]},
            "a single whole number",
        ),
    ],
)
def test_wrong_grids_are_refused_before_torch_is_needed(operator, grid, message):
    with pytest.raises((UsageError, UnknownOperator)) as caught:
        check_names(sweep(operator, **grid))
    assert message in caught.value.message
    assert caught.value.next_step


def test_a_sweep_of_a_collective_has_a_tuple_for_each_size_and_number_of_cards():
    grid = {"elements": (1024, 6), "cards": (2, 4), "dtype": ("bfloat16",)}
    expansion = Expansion(Sweep("reduce_scatter", grid))
    (found,) = expansion.batches()
    labels = {label_of(spec): cost.bytes for spec, cost in found.items()}
    assert labels == {
        "reduce_scatter sum 2 cards | 1024 bf16": 3 * 1024,
        "reduce_scatter sum 4 cards | 1024 bf16": 2.5 * 1024,
        "reduce_scatter sum 2 cards | 6 bf16": 18,
    }
    assert "divided by the number of cards" in next(iter(expansion.skipped))
    assert all(parse(spec.to_json()) == spec for spec in found)
    pair = Expansion(Sweep("all_gather", {"elements": (1024,), "beside": (512,)}))
    (spec,) = next(iter(pair.batches()))
    assert label_of(spec) == "all_gather 2 cards beside a product of 512 | 1024 fp32"
    for wrong in ({"cards": (1,)}, {"reduction": ("mean",)}, {"elements": ("many",)}):
        with pytest.raises(UsageError):
            check_names(Sweep("all_reduce", {"elements": (8,), **wrong}))
    forged = spec.to_json() | {"operator": "collective.exec"}
    with pytest.raises(TupleRejected, match="not the name of a collective"):
        parse(forged)
