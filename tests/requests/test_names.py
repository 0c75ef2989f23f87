"""Which names of operators are known."""

from __future__ import annotations

import pytest

from farm.errors import UnknownOperator
from farm.requests.partial_request import check_operator_names


def test_every_name_that_tables_show_may_be_asked_for() -> None:
    check_operator_names(["Conv2d", "add_", "getitem", "convolution_backward", "_softmax_backward_data"])


def test_a_misspelt_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownOperator, match="no operator named 'Conv2b'") as caught:
        check_operator_names(["Conv2b"])
    assert "Conv2d" in caught.value.next_step
