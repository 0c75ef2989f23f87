"""Leaf modules of ``torch.nn``, such as ``torch.nn.Conv2d``: a class, the arguments of its
constructor, and tensors of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farm.errors import TupleRejected
from farm.subjects.function import PublicOperator
from farm.types.tuple import OperatorTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

_NEXT_STEP = "Capture the model again with this PyTorch."


class Module(PublicOperator):
    """A leaf module in train or eval mode."""

    name = "module"
    has_state = True

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        self.operator(spec, is_module=True)
        module = _fresh(_prototype(spec))
        _set_tensors(module, spec, tensors)
        return module.train(spec.training)


def _set_tensors(module: nn.Module, spec: OperatorTuple, tensors: list[torch.Tensor]) -> None:
    """Give a module built on meta its own tensors. Raises `TupleRejected` if they do not fit."""
    from torch import nn

    stored = {
        spec_of_tensor.name: (spec_of_tensor.shape, tensor)
        for spec_of_tensor, tensor in zip(spec.tensors, tensors, strict=True)
        if spec_of_tensor.name
    }
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    if expected != {name: shape for name, (shape, _) in stored.items()}:
        text = f"The stored tensors of this {spec.short_name} do not fit its stored parameters."
        raise TupleRejected(text, _NEXT_STEP)
    children = dict(module.named_modules())
    for full_name, (_, tensor) in stored.items():
        path, _, name = full_name.rpartition(".")
        child = children[path]
        if name not in child._parameters:
            child._buffers[name] = tensor
        elif isinstance(tensor, nn.Parameter):
            child._parameters[name] = tensor
        else:
            text = (
                f"'{full_name}' of {spec.short_name} is stored as a buffer, but PyTorch has a "
                "parameter of that name."
            )
            raise TupleRejected(text, _NEXT_STEP)
    for child in children.values():
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [child._parameters[name] for name in child._flat_weights_names]


@functools.lru_cache(maxsize=64)
def _prototype(spec: OperatorTuple) -> nn.Module:
    from torch.utils._python_dispatch import _disable_current_modes

    from farm.subjects.allow_list import ALLOWED_OPERATORS
    from farm.subjects.leaf import build_leaf

    # cached for later callers, so without this caller's fake tensors
    with _disable_current_modes():
        return build_leaf(ALLOWED_OPERATORS[spec.operator], dict(spec.parameters))


def _fresh(module: nn.Module) -> nn.Module:
    """A copy of the module that shares no dictionary with it; a deep copy would take
    milliseconds.
    """
    twin: Any = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(twin.__dict__[name])
    for name, child in twin._modules.items():
        if child is not None:
            twin._modules[name] = _fresh(child)
    return twin
