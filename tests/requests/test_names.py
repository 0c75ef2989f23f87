"""Which names of operators are known."""

from __future__ import annotations

import pytest

from farm.errors import UnknownOperator
from farm.requests.partial_request import check_kernel_names, check_operator_names


def test_every_name_that_tables_show_may_be_asked_for() -> None:
    check_operator_names(
        ["Conv2d", "add_", "getitem", "convolution_backward", "_softmax_backward_data"]
    )


def test_a_misspelt_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownOperator, match="no operator named 'Conv2b'") as caught:
        check_operator_names(["Conv2b"])
    assert "Conv2d" in caught.value.next_step


def test_a_compiled_model_has_kinds_of_kernels_and_aten_operators() -> None:
    check_kernel_names(
        ["pointwise", "persistent_reduction", "fused", "template", "user", "convolution", "addmm"]
    )
    with pytest.raises(
        UnknownOperator, match="A compiled model has no operator named 'poitwise'"
    ) as caught:
        check_kernel_names(["poitwise"])
    assert "pointwise" in caught.value.next_step
    with pytest.raises(UnknownOperator) as caught:
        check_kernel_names(["Conv2d"])
    assert "convolution" in caught.value.next_step
    with pytest.raises(UnknownOperator):
        check_operator_names(["pointwise"])
