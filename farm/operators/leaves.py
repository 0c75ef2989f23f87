"""How a leaf module of ``torch.nn`` is described by its constructor's arguments, and built from them.

A leaf is only a leaf where its description rebuilds it: `describe_leaf` constructs the module anew on meta and
compares. What does not come out equal (hooks, a replaced ``forward``, an attribute changed after construction,
tied weights inside) is no leaf; the capture then looks into it and finds the functions that it calls.
"""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.operators.encoding import NotEncodable, decode, encode

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_IGNORED_ATTRIBUTES = {"training", "_flat_weights", "_flat_weight_refs", "_modules", "_parameters", "_buffers"}
# Old names of arguments; the module keeps what they came to under the new one.
_SUPERSEDED = frozenset({"size_average", "reduce", "min_value", "max_value"})
# torch 2.13 gave them `bias`; where it goes with `affine`, as it did before, it is not told: a tuple is the same in all versions.
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


def describe_leaf(module: nn.Module) -> dict[str, Any] | None:
    """The constructor's arguments of ``module`` as JSON trees, or None where they do not rebuild it."""
    if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in module.__dict__:
        return None
    try:
        parameters = leaf_parameters(module)
        text = json.dumps(parameters, sort_keys=True)
        leaf: Any = type(module)
        twin = _twin(leaf, text)
    except (NotEncodable, TupleRejected, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    return parameters if _alike(module, twin) else None


def leaf_parameters(module: nn.Module) -> dict[str, Any]:
    """What `describe_leaf` tells of a module that is known to be a leaf.

    Raises:
        NotEncodable: a tuple cannot hold one of the arguments.
    """
    return {name: encode(value) for name, value in _constructor_values(module).items()}


def build_leaf(leaf: Any, parameters: dict[str, Any]) -> nn.Module:
    """A module of class ``leaf`` on meta, in eval mode.

    Raises:
        TupleRejected: the parameters are not those of the class.
    """
    meta = torch.device("meta")
    try:
        values = {name: decode(tree, [], meta) for name, tree in parameters.items()}
        accepted = _constructor(leaf)
        if not set(values) <= set(accepted):
            raise TupleRejected(f"{leaf.__name__} has no parameter {sorted(set(values) - set(accepted))[0]!r}.")
        if issubclass(leaf, nn.RNNBase) and not 0 < int(values.get("num_layers", 1)) <= _MOST_LAYERS:
            raise TupleRejected(f"{leaf.__name__} cannot have {values['num_layers']} layers.")
        module = leaf(**values, device=meta) if _takes_device(leaf) else leaf(**values)
    except TupleRejected:
        raise
    except Exception as error:
        raise TupleRejected(f"{leaf.__name__} cannot be made of its parameters: {str(error)[:200]}") from error
    return module.eval()


@functools.cache
def _constructor(leaf: Any) -> tuple[str, ...]:
    if issubclass(leaf, nn.RNNBase):
        extra = {nn.RNN: ("nonlinearity",), nn.LSTM: ("proj_size",)}.get(leaf, ())
        return _RNN_ARGUMENTS + extra
    names = list(inspect.signature(leaf.__init__).parameters)[1:]
    return tuple(
        name for name in names if name not in ("device", "dtype", "args", "kwargs") and not name.startswith("_")
    )


@functools.cache
def _takes_device(leaf: Any) -> bool:
    return issubclass(leaf, nn.RNNBase) or "device" in inspect.signature(leaf.__init__).parameters


def _constructor_values(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, nn.MultiheadAttention):
        special: dict[str, Any] = {
            "bias": module.in_proj_bias is not None,
            "add_bias_kv": module.bias_k is not None,
        }
    elif isinstance(module, nn.TransformerEncoderLayer):
        attention: Any = module.self_attn
        activation = module.activation
        special = {
            "d_model": attention.embed_dim,
            "nhead": attention.num_heads,
            "dim_feedforward": module.linear1.out_features,
            "dropout": module.dropout.p,
            "activation": {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}[activation],  # type: ignore[index]
            "layer_norm_eps": module.norm1.eps,
            "batch_first": attention.batch_first,
            "bias": module.linear1.bias is not None,
        }
    elif isinstance(module, nn.PairwiseDistance):
        special = {"p": module.norm}
    else:
        special = {}
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
        elif name in _SUPERSEDED:
            continue
        else:
            values[name] = getattr(module, name)
    return values


@functools.lru_cache(maxsize=4096)
def _twin(leaf: Any, parameters: str) -> nn.Module:
    # Built for real on meta, also while a capture runs: neither its modes nor its fake tensors may see it.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return build_leaf(leaf, json.loads(parameters))


def _alike(module: nn.Module, twin: nn.Module) -> bool:
    mine, theirs = dict(module.named_modules()), dict(twin.named_modules())
    if mine.keys() != theirs.keys():
        return False
    tensors: set[int] = set()
    for name, child in mine.items():
        other = theirs[name]
        if type(child) is not type(other) or (
            name and (any(getattr(child, h) for h in _HOOKS) or "forward" in child.__dict__)
        ):
            return False
        if not _same_attributes(child, other):
            return False
        for place in ("_parameters", "_buffers"):
            own, others = getattr(child, place), getattr(other, place)
            if {key: _shape(value) for key, value in own.items()} != {key: _shape(v) for key, v in others.items()}:
                return False
            for value in own.values():
                if value is not None:
                    if id(value) in tensors:
                        return False
                    tensors.add(id(value))
    return True


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _same_attributes(module: nn.Module, twin: nn.Module) -> bool:
    def attributes(of: nn.Module) -> dict[str, Any]:
        return {
            name: value
            for name, value in of.__dict__.items()
            if name not in _IGNORED_ATTRIBUTES and not name.endswith("_hooks") and "hooks_" not in name
        }

    mine, theirs = attributes(module), attributes(twin)
    names = {name for name in mine.keys() | theirs.keys() if not name.startswith("_") or name in theirs}
    for name in names:
        a, b = mine.get(name), theirs.get(name)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return False
        if a != b:
            return False
    return True
