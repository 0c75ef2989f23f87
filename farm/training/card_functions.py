"""Functions of PyTorch as a card runs them, for a capture without a card.

PyTorch chooses some operators by the device: attention, dropout, batch normalization. A capture
without a CUDA context runs on fake tensors of a CPU, so it would list the operators of a CPU, and
the card would have to measure its own ones in a second round. While `as_on_card` is active, these
functions call the operators of an NVIDIA card, and autograd then records their backward.

Only choices that PyTorch's source makes without asking the card's library are predicted. The others
are found when the card runs the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.overrides import wrap_torch_function
from torch.utils._pytree import tree_map_only

from farm.types.replacement import replaced

#: Largest batches for which PyTorch chooses cuDNN's batch normalization.
_MOST_ROWS_TRAINING, _MOST_ROWS_EVAL = 880_801, 65_535
_MOST_ELEMENTS = 2**31 - 2  # cuDNN has kernels with 32-bit indices

_native_batch_norm: Any = torch.batch_norm
_cudnn_batch_norm: Any = torch.cudnn_batch_norm
_cat: Any = torch.cat
_losses: Any = torch._C._nn
_cross_entropy_loss: Any = _losses.cross_entropy_loss
#: Functions that autocast runs in float32 on a card, but not on a CPU.
_IN_FLOAT32: dict[str, Any] = {"layer_norm": torch.layer_norm, "group_norm": torch.group_norm}


@contextlib.contextmanager
def as_on_card() -> Iterator[None]:
    """While active, the functions of this module replace PyTorch's."""
    with (
        replaced(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        replaced(torch._VF, "dropout", dropout),
        normalized_as_on_card(),
        replaced(torch, "layer_norm", layer_norm),
        replaced(torch, "group_norm", group_norm),
        replaced(torch, "cat", cat),
        replaced(_losses, "cross_entropy_loss", cross_entropy_loss),
    ):
        yield


@contextlib.contextmanager
def normalized_as_on_card() -> Iterator[None]:
    """While active, batch and instance normalization run the operators of a card."""
    with (
        replaced(torch, "batch_norm", batch_norm),
        replaced(torch, "instance_norm", instance_norm),
    ):
        yield


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return (
        torch.native_dropout(x, p, True)[0] if train and 0 < p < 1 else torch.dropout(x, p, train)
    )


@wrap_torch_function(lambda query, *args, **kwargs: (query,))  # so that a recorder sees the call
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Attention by the operator that PyTorch chooses on a card with compute capability 9.0 and
    cuDNN 9.15, such as an H100 or H200; `dropout` is the same on all cards."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        attn_mask = (
            attn_mask.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point()
            else attn_mask
        )
    learned = attn_mask is not None and attn_mask.requires_grad  # cuDNN has no gradient of a mask
    dense = all(
        tensor is None or tensor.stride(-1) == 1 for tensor in (query, key, value, attn_mask)
    )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(
            attn_mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device)
        )
    half, widths = (
        query.dtype in (torch.bfloat16, torch.float16),
        (query.shape[-1], value.shape[-1]),
    )
    # Fused attention reads whole rows: also a mask that is one value for all keys is refused.
    fits = dense and query.dim() == 4 and not any(width % (8 if half else 4) for width in widths)
    if fits and half and max(widths) <= 256 and key.shape[2] > 1 and not learned:
        fused: Any = torch._scaled_dot_product_cudnn_attention
    elif fits and query.dtype != torch.double and query.shape[1] == key.shape[1]:
        fused = torch._scaled_dot_product_efficient_attention
        attn_mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    else:
        return torch._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, **more
        )[0]
    trained = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    return fused(
        query, key, value, attn_mask, trained, dropout_p, is_causal, scale=more.get("scale")
    )[0]


@wrap_torch_function(lambda x, *args, **kwargs: (x,))  # so that a recorder sees the call
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch normalization by the operator that PyTorch chooses on an NVIDIA card: cuDNN's, or its
    own for other dtypes, for rows of features, without weights, and for very large inputs."""
    parameters = weight, bias, running_mean, running_var
    settings = training, momentum, eps
    if not _is_of_cudnn(x, *parameters, training):
        return _native_batch_norm(x, *parameters, *settings, cudnn_enabled)
    x = x.contiguous(memory_format=suggest_memory_format(x))
    output: Tensor = _cudnn_batch_norm(x, *map(_contiguous, parameters), *settings)[0]
    return output


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _is_of_cudnn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
) -> bool:
    """The rule of PyTorch's `_select_batch_norm_backend` for a card with cuDNN."""
    if weight is None or bias is None or not torch.backends.cudnn.enabled or torch.version.hip:
        return False
    if torch.bfloat16 in (x.dtype, weight.dtype):
        return False
    if x.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    missing = [running_mean, running_var].count(None)
    if missing == 1 or (missing == 2 and not training):
        return False
    most_rows = _MOST_ROWS_TRAINING if training else _MOST_ROWS_EVAL
    return x.dim() >= 3 and x.shape[0] <= most_rows and 0 < x.numel() <= _MOST_ELEMENTS


@wrap_torch_function(lambda x, *args, **kwargs: (x,))
def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Instance normalization, which is a batch normalization of all channels of all rows, as in
    PyTorch's source."""
    rows, channels = x.shape[:2]

    def repeated(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.repeat(rows)

    mean, variance = repeated(running_mean), repeated(running_var)
    output = batch_norm(
        x.contiguous().view(1, rows * channels, *x.shape[2:]),
        repeated(weight),
        repeated(bias),
        mean,
        variance,
        use_input_stats,
        momentum,
        eps,
        cudnn_enabled,
    )
    for running, updated in ((running_mean, mean), (running_var, variance)):
        if running is not None and updated is not None:
            # the memory of the statistics, without autograd's version of it
            torch.ops.aten.alias(running).copy_(updated.view(rows, channels).mean(0))
    return output.view(x.shape)


def _in_float32(name: str) -> Callable[..., Tensor]:
    """A function of `torch` by its rule under the autocast of a card."""
    original = _IN_FLOAT32[name]

    @wrap_torch_function(lambda x, *args, **kwargs: (x,))
    def function(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        output: Tensor = original(*args, **kwargs)
        return output

    function.__name__ = name
    return function


layer_norm, group_norm = _in_float32("layer_norm"), _in_float32("group_norm")


@wrap_torch_function(lambda tensors, *args, **kwargs: tuple(tensors))
def cat(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A card concatenates tensors of several dtypes; the autocast of a CPU converts them first."""
    with torch.autocast("cpu", enabled=False):
        output: Tensor = _cat(tensors, *args, **kwargs)
        return output


def cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Under autocast, a card computes the log-softmax of this loss in the dtype of its input, and
    the rest in float32."""
    plain = label_smoothing == 0 and not target.is_floating_point()
    if not plain or not torch.is_autocast_enabled("cpu"):
        rest = target, weight, reduction, ignore_index, label_smoothing
        loss: Tensor = _cross_entropy_loss(x, *rest)
        return loss
    with torch.autocast("cpu", enabled=False):
        scores = torch.log_softmax(x, 1 if x.dim() > 1 else 0, x.dtype)
        weight = None if weight is None else weight.float()
        loss = _losses.nll_loss_nd(scores.float(), target, weight, reduction, ignore_index)
        return loss
