"""Products of groups of rows (`torch._grouped_mm`) where PyTorch multiplies the groups one after
the other.

Hopper and Blackwell have one kernel for all groups, in bfloat16. For other dtypes, on other cards
and on a CPU, PyTorch reads the ends of the groups on the host and runs one product for each group.
No CUDA graph can record that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 16  # of the rows of the output
_ONE_KERNEL = (9, 10)  # major compute capability of cards with a kernel for all groups


def needs_host(left: torch.Tensor) -> bool:
    """True if the host reads the ends of the groups."""
    if left.device.type != "cuda" or left.dtype != torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(left.device)[0] not in _ONE_KERNEL


def multiply(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, ends: Sequence[int]
) -> torch.Tensor:
    """Multiply each group with the operators that PyTorch runs, without reading ``offs``."""
    out = _output(left, right, offs)
    begin = 0
    for group, end in enumerate(ends):
        rows = slice(begin, end)
        if right.dim() == 3:  # the groups divide the rows of the left matrix
            factors, product = (left[rows], right[group]), out[rows]
        elif left.dim() == 2:  # they divide what both matrices share
            factors, product = (left[:, rows], right[rows]), out[group]
        else:  # they divide the columns of the right matrix
            factors, product = (left[group], right[:, rows]), out[:, rows]
        torch.ops.aten.mm.out(*factors, out=product)
        begin = end
    return out


def _output(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """A new tensor for the product, whose rows are aligned."""
    shape: tuple[int, ...]
    if left.dim() == right.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 2:
        shape = (left.shape[0], right.shape[-1])
    elif right.dim() == 2:
        shape = (left.shape[1], right.shape[1])
    else:
        shape = (left.shape[0], left.shape[1], right.shape[-1])

    step = ALIGNMENT_BYTES // left.element_size()
    row = -(-shape[-1] // step) * step
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return left.new_empty_strided(shape, stride)
