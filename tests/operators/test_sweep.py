"""Sweeps give the very tuples that a model would give, and leave nothing out in silence."""

import pytest
import torch

from farm.errors import UnknownOperator, UsageError
from farm.operators.capture import capture
from farm.operators.recipes import RECIPES, REQUIRED
from farm.operators.sweep import check_names, expand, explore
from farm.words.label import label_of
from farm.words.request import Sweep


def sweep(operator, **grid):
    return Sweep(operator, {name: tuple(v) if isinstance(v, list) else (v,) for name, v in grid.items()})


def test_a_combination_is_the_tuple_that_a_model_with_that_operator_gives():
    (spec,) = expand(
        sweep("Conv2d", batch=8, in_channels=64, out_channels=128, kernel_size=3, stride=2, padding=1, image_size=56)
    )
    layer = torch.nn.Sequential(torch.nn.Conv2d(64, 128, 3, 2, 1)).eval()
    (of_model,) = capture(layer, (torch.empty(8, 64, 56, 56),)).tuples.values()
    assert spec == of_model
    assert spec.id == of_model.id


def test_every_combination_is_there_once():
    found = expand(
        sweep("Linear", batch=[1, 32], in_features=[64, 128], out_features=[10], dtype=["float32", "float16"])
    )
    assert len({spec.id for spec in found}) == len(found) == 8


def test_the_share_of_zeros_makes_another_tuple_and_marks_the_inputs_alone():
    plain, sparse = expand(sweep("Conv2d", in_channels=3, out_channels=8, zeros=[0, 0.5]))
    assert plain.id != sparse.id
    assert [tensor.zeros for tensor in sparse.tensors if tensor.role == "activation"] == [0.5]
    assert all(tensor.zeros == 0 for tensor in sparse.tensors if tensor.role != "activation")


def test_the_share_of_zeros_makes_another_tuple_and_stands_in_its_label():
    full, half = explore(sweep("Linear", in_features=8, out_features=8, tokens=4, zeros=[0, 0.5])).tuples
    assert full.id != half.id
    assert label_of(half) == f"{label_of(full)} zeros 50 %"


def test_impossible_combinations_are_counted_by_reason():
    expansion = explore(
        sweep("Conv2d", in_channels=[3, 4], out_channels=4, groups=[1, 2], kernel_size=[1, 9], image_size=7)
    )
    assert len(expansion.tuples) == 3
    assert sum(expansion.skipped.values()) == 5
    assert (
        expansion.skipped["in_channels must be divisible by groups (such as in_channels 3, groups 2, kernel_size 1)"]
        == 2
    )
    (large,) = (reason for reason in expansion.skipped if "Kernel size" in reason)
    assert expansion.skipped[large] == 3
    assert "Kernel size: (9 x 9)" in large
    assert large.endswith("(such as in_channels 3, groups 1, kernel_size 9)")


def test_a_combination_larger_than_any_card_is_left_out_with_its_reason():
    expansion = explore(Sweep("Linear", {"in_features": (16, 2_000_000), "out_features": (2_000_000,)}))
    assert len(expansion.tuples) == 1
    assert expansion.skipped == {"no card has the memory that it needs (in_features 2000000)": 1}


def test_a_sweep_of_nothing_possible_is_refused():
    with pytest.raises(UsageError, match="None of the 1 combinations"):
        expand(sweep("Conv2d", in_channels=3, out_channels=4, groups=2))


@pytest.mark.parametrize("operator", RECIPES)
def test_every_recipe_gives_its_one_operator(operator):
    small = {"normalized_shape": 16, "embed_dim": 16, "num_embeddings": 10}
    needed = {name: small.get(name, 8) for name, default in RECIPES[operator].names.items() if default is REQUIRED}
    (spec,) = expand(sweep(operator, **needed))
    assert spec.short_name == operator


@pytest.mark.parametrize(
    ("operator", "grid", "message"),
    [
        ("Conv2", {}, "no sweep of the operator 'Conv2'"),
        ("Conv2d", {"kernel": 1}, "has no 'kernel'"),
        ("Conv2d", {"in_channels": 3}, "needs out_channels"),
        ("Conv2d", {"in_channels": 3, "out_channels": "x"}, "must be a whole number"),
        ("Conv2d", {"in_channels": 3, "out_channels": True}, "must be a whole number"),
        ("Conv2d", {"in_channels": 3, "out_channels": -1}, "must be at least 0"),
        ("Conv2d", {"in_channels": 3, "out_channels": 8, "bias": 1}, "must be true or false"),
        ("Conv2d", {"in_channels": 3, "out_channels": 8, "zeros": 2}, "share from 0 to 1"),
        ("Conv2d", {"in_channels": 3, "out_channels": 8, "dtype": "fp8"}, "must be one of float32"),
        ("Linear", {"in_features": 3, "out_features": 8, "batch": [[1, 2]]}, "a single whole number"),
    ],
)
def test_wrong_grids_are_refused_before_torch_is_needed(operator, grid, message):
    with pytest.raises((UsageError, UnknownOperator)) as caught:
        check_names(sweep(operator, **grid))
    assert message in caught.value.message
    assert caught.value.next_step
