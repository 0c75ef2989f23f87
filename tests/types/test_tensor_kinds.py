"""Moving tensors between devices and dtypes."""

import pytest
import torch

from farm.types.tensor_kinds import bits_of, moved

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch._neg_view(torch.randn(3)),
    ],
)
def test_a_moved_tensor_has_the_requested_dtype_the_same_bits_and_the_same_values(tensor):
    half = moved(tensor, CPU, torch.float16)
    assert half.dtype == torch.float16
    assert bits_of(half) == bits_of(tensor)
    torch.testing.assert_close(half, tensor.to(torch.float16))


@pytest.mark.parametrize("tensor", [torch.arange(3), torch.randn(3, dtype=torch.complex64).conj()])
def test_a_tensor_that_is_not_real_floating_keeps_its_dtype(tensor):
    same = moved(tensor, CPU, torch.float16)
    assert same.dtype == tensor.dtype
    assert bits_of(same) == bits_of(tensor)
    torch.testing.assert_close(same, tensor)
