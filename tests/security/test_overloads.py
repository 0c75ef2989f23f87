"""The list of overloads is that of PyTorch's registry, and it fails closed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.operator_registry import LIST, overloads_of_this_torch, reason_of
from farm.errors import TupleRejected
from farm.subjects.allow_list import ATEN_OVERLOADS, overload_of
from farm.subjects.overloads import listed


@pytest.fixture(scope="module")
def registry():
    return overloads_of_this_torch()


def test_the_list_agrees_with_the_registry_of_this_torch(registry):
    reasons = listed(LIST)
    others = {
        one.name: (reasons.get(one.name), reason_of(one))
        for one in registry
        if reasons.get(one.name) != reason_of(one)
    }
    # Only an older version may deny more.
    assert not {name: pair for name, pair in others.items() if not pair[0]}
    assert len(others) < 20


def test_the_dispatcher_knows_no_overload_that_the_list_does_not_name():
    reasons = listed(LIST)
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    ]
    unknown = {name for name in names if name not in reasons}
    assert all(name.startswith("quantized_") or name == "get_gradients" for name in unknown)


@pytest.mark.parametrize(
    "name",
    [
        "from_file.default",
        "set_.source_Tensor",
        "set_data.default",
        "resize_.default",
        "as_strided.default",
        "as_strided_.default",
        "as_strided_scatter.default",
        "_sparse_coo_tensor_unsafe.default",
        "_nested_view_from_buffer.default",
        "_cudnn_init_dropout_state.default",
        "_cufft_set_plan_cache_max_size.default",
        "_pin_memory.default",
        "record_stream.default",
        "requires_grad_.default",
        "retain_grad.default",
        "_backward.default",
        "_assert_async.default",
        "_assert_async.msg",
        "_print.default",
        "_test_optional_intlist.default",
        "save.default",
        "warn.default",
        "format.default",
        "manual_seed.default",
        "no_such_operator.default",
    ],
)
def test_what_is_denied_is_refused(name):
    with pytest.raises(TupleRejected, match="not in this version's allow-list"):
        overload_of(f"aten.{name}")


def test_an_overload_of_another_namespace_is_refused():
    for name in ("prims.add.default", "inductor._alloc_from_pool.default", "c10d.send.default"):
        with pytest.raises(TupleRejected, match="not in this version's allow-list"):
            overload_of(name)


def test_each_allowed_overload_takes_only_values_that_a_tuple_can_contain():
    allowed = {"Tensor", "int", "bool", "float", "number", "str", "Device", "Generator"}
    for name in ATEN_OVERLOADS:
        for argument in overload_of(name)._schema.arguments:
            text = str(argument.type)
            for word in ("Optional", "List", "[", "]"):
                text = text.replace(word, " ")
            assert set(text.split()) <= allowed, name


def test_the_list_is_made_and_not_written_by_hand():
    assert (
        Path(LIST).read_text().startswith("# The overloads of aten, of PyTorch 2.11, 2.12, 2.13.")
    )


@pytest.mark.parametrize(
    "name",
    ["_is_all_true.default", "_is_any_true.default", "_standard_gamma.default", "nonzero.default"],
)
def test_what_only_reads_is_allowed(name):
    overload_of(f"aten.{name}")
