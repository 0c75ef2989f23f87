"""Corrects what PyTorch's fake tensors say about the output of an operator, where a device returns
another dtype or layout."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
#: The position of a normalization's weight among its arguments.
_WEIGHT_OF = {
    _BATCH_NORM: 1,
    torch.ops.aten.cudnn_batch_norm.default: 1,
    torch.ops.aten.native_group_norm.default: 1,
    torch.ops.aten.native_layer_norm.default: 2,
}


def as_computed(func: Any, args: Any, out: Any, *, on_card: bool) -> Any:
    """Corrects the dtype or layout of a fake output to match a device; returns real outputs
    unchanged.

    Under autocast the statistics of a normalization have the dtype of its weights; those of a layer
    norm on a card are never in half precision. A batch norm on a CPU returns rows in order, also if
    those of its input are not. The gradient of the input is contiguous for a layer norm, has the
    layout of the input for a batch norm, and the layout of a product for hardswish.
    """
    if func is _BATCH_NORM and not on_card and isinstance(out[0], FakeTensor):
        in_order = suggest_memory_format(args[0])
        out = torch.empty_like(out[0], memory_format=in_order), *out[1:]
    if func in _WEIGHT_OF:
        weight = args[_WEIGHT_OF[func]]
        if on_card and func is torch.ops.aten.native_layer_norm.default:
            return out[0], *(
                statistics.to(torch.promote_types(statistics.dtype, torch.float32))
                for statistics in out[1:]
            )
        if weight is not None and weight.dtype != args[0].dtype:
            return out[0], *(statistics.to(weight.dtype) for statistics in out[1:])
    if func is torch.ops.aten.native_layer_norm_backward.default and out[0] is not None:
        return out[0].contiguous(), *out[1:]
    if func is torch.ops.aten.native_batch_norm_backward.default and isinstance(out[0], FakeTensor):
        return torch.empty_like(args[1]), *out[1:]
    if func is torch.ops.aten.hardswish_backward.default and isinstance(out, FakeTensor):
        return args[0] * args[1]
    return out
