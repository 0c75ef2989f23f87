"""Takes a leaf module of `torch.nn` apart into its constructor's arguments, and builds it again.

A module counts as a leaf only if its constructor arguments rebuild it: `describe_leaf` constructs
the module again on meta and compares. A module that differs from this copy (hooks, a replaced
``forward``, an attribute changed after construction, tied weights inside) is not a leaf: the
capture descends into it and records the functions that it calls."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.subjects.allow_list import LEAF_CLASSES
from farm.subjects.encoding import NotEncodable, decode, encode
from farm.types.tensor_kinds import is_plain

_TORCH = str(Path(torch.__file__).parent)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_IGNORED_ATTRIBUTES = {
    "training",
    "_flat_weights",
    "_flat_weight_refs",
    "_modules",
    "_parameters",
    "_buffers",
}
# Old names of arguments; the module keeps the value under the new name.
_SUPERSEDED = frozenset({"size_average", "reduce", "min_value", "max_value"})
# torch 2.13 added `bias` to these. It is left out if it equals `affine`, so a tuple is the same in
# all versions.
_AFFINE = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
_MOST_LAYERS = 256  # each is built in Python
_RNN_ARGUMENTS = (
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
)
_RNN_EXTRA: dict[Any, tuple[str, ...]] = {nn.RNN: ("nonlinearity",), nn.LSTM: ("proj_size",)}


def describe_leaf(module: nn.Module) -> dict[str, Any] | None:
    """The constructor arguments of ``module`` as JSON trees; None if it is not a leaf, or if they
    do not rebuild it.
    """
    leaf: Any = type(module)
    if leaf not in LEAF_CLASSES or is_changed(module):
        return None
    try:
        parameters = leaf_parameters(module)
        twin = _twin(leaf, json.dumps(parameters, sort_keys=True))
    except (
        NotEncodable,
        TupleRejected,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ):
        return None
    return parameters if _is_equal(module, twin) else None


def leaf_parameters(module: nn.Module) -> dict[str, Any]:
    """As `describe_leaf`, for a known leaf. Raises `NotEncodable` if a tuple cannot contain an
    argument.
    """
    return {name: encode(value) for name, value in _constructor_values(module).items()}


def build_leaf(leaf: Any, parameters: dict[str, Any]) -> nn.Module:
    """A module of class ``leaf`` on meta, in eval mode. Raises `TupleRejected` if it does not
    accept the parameters.
    """
    meta = torch.device("meta")
    try:
        values = {name: decode(tree, [], meta) for name, tree in parameters.items()}
        if unknown := sorted(set(values) - set(_constructor(leaf))):
            raise TupleRejected(f"{leaf.__name__} has no parameter {unknown[0]!r}.")
        if (
            issubclass(leaf, nn.RNNBase)
            and not 0 < int(values.get("num_layers", 1)) <= _MOST_LAYERS
        ):
            most = f"from 1 to {_MOST_LAYERS}"
            raise TupleRejected(
                f"{leaf.__name__} has num_layers {values['num_layers']}; it must be {most}."
            )
        if issubclass(leaf, nn.RNNBase) or "device" in inspect.signature(leaf.__init__).parameters:
            values["device"] = meta
        module: nn.Module = leaf(**values)
    except TupleRejected:
        raise
    except Exception as error:
        raise TupleRejected(
            f"{leaf.__name__} does not accept its stored parameters: {str(error)[:200]}"
        ) from error
    return module.eval()


@functools.cache
def _constructor(leaf: Any) -> tuple[str, ...]:
    if issubclass(leaf, nn.RNNBase):
        return _RNN_ARGUMENTS + _RNN_EXTRA.get(leaf, ())
    names = list(inspect.signature(leaf.__init__).parameters)[1:]
    skipped = ("device", "dtype", "args", "kwargs")
    return tuple(name for name in names if name not in skipped and not name.startswith("_"))


def _constructor_values(module: nn.Module) -> dict[str, Any]:
    special: dict[str, Any] = {}  # arguments that the module does not store under their name
    if isinstance(module, nn.MultiheadAttention):
        special = {
            "bias": module.in_proj_bias is not None,
            "add_bias_kv": module.bias_k is not None,
        }
    elif isinstance(module, nn.TransformerEncoderLayer):
        attention: Any = module.self_attn
        special = {
            "d_model": attention.embed_dim,
            "nhead": attention.num_heads,
            "dim_feedforward": module.linear1.out_features,
            "dropout": module.dropout.p,
            "activation": {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}[
                module.activation
            ],  # type: ignore[index]
            "layer_norm_eps": module.norm1.eps,
            "batch_first": attention.batch_first,
            "bias": module.linear1.bias is not None,
        }
    elif isinstance(module, nn.PairwiseDistance):
        special = {"p": module.norm}
    values = {}
    leaf: Any = type(module)
    for name in _constructor(leaf):
        if name in special:
            values[name] = special[name]
        elif name == "bias" and isinstance(module, _AFFINE):
            if module.affine and module.bias is None:
                values[name] = False
        elif name == "bias" and not isinstance(getattr(module, "bias", None), bool):
            values[name] = module.bias is not None
        elif name not in _SUPERSEDED:
            values[name] = getattr(module, name)
    return values


@functools.lru_cache(maxsize=4096)
def _twin(leaf: Any, parameters: str) -> nn.Module:
    # Built from meta tensors even while a capture runs: the capture must not record it or make it
    # fake.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return build_leaf(leaf, json.loads(parameters))


def has_replaced_parameters(module: nn.Module) -> bool:
    """True if another tensor stands for a parameter, as in `torch.func.functional_call`: then no
    module of PyTorch has these tensors, but its functions can be called with them."""
    parameters = [tensor for tensor in module._parameters.values() if tensor is not None]
    return any(is_plain(tensor) and not isinstance(tensor, nn.Parameter) for tensor in parameters)


def is_changed(module: nn.Module) -> bool:
    """True if the module has hooks or its own ``forward``, or if another package replaced that of
    its class: it may compute something else than PyTorch's class."""
    return (
        any(getattr(module, hooks) for hooks in _HOOKS)
        or "forward" in module.__dict__
        or _is_replaced(type(module))
    )


def _is_replaced(leaf: type[nn.Module]) -> bool:
    code = getattr(leaf.forward, "__code__", None)
    return code is not None and not code.co_filename.startswith(_TORCH)


def _is_equal(module: nn.Module, twin: nn.Module) -> bool:
    mine, theirs = dict(module.named_modules()), dict(twin.named_modules())
    if mine.keys() != theirs.keys() or _has_tied_tensors(module):
        return False
    for name, child in mine.items():
        other = theirs[name]
        if type(child) is not type(other) or is_changed(child):
            return False
        if _shapes(child) != _shapes(other):
            return False
        for key in {
            key
            for key in child.__dict__.keys() | other.__dict__
            if key[0] != "_" or key in other.__dict__
        }:
            if (
                key not in _IGNORED_ATTRIBUTES
                and not key.endswith("_hooks")
                and "hooks_" not in key
            ):
                a, b = child.__dict__.get(key), other.__dict__.get(key)
                if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b:
                    return False
    return True


def _has_tied_tensors(module: nn.Module) -> bool:
    tensors = []
    for child in module.modules():
        tensors += [id(tensor) for tensor in _tensors(child).values() if tensor is not None]
    return len(set(tensors)) < len(tensors)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    return {
        name: None if tensor is None else tuple(tensor.shape)
        for name, tensor in _tensors(module).items()
    }


def _tensors(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}
