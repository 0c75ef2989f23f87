"""The operators that may be built: a fixed map from name to class or function, made by torch itself.

A name that arrives in a tuple is looked up here and nowhere else. There is no import and no attribute look-up by
name, so a forged tuple can at worst name an operator of this list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions, resolve_name

# Modules that only arrange others, decide by data which child runs, or hold state that a spec cannot:
# they are looked into, and their children and functions are the operators.
_LOOKED_INTO = frozenset(
    {
        "Module",
        "Sequential",
        "ModuleList",
        "ModuleDict",
        "ParameterList",
        "ParameterDict",
        "Container",
        "Transformer",
        "TransformerEncoder",
        "TransformerDecoder",
        "TransformerDecoderLayer",
        "AdaptiveLogSoftmaxWithLoss",
        "DataParallel",
        "LinearCrossEntropyLoss",
        "SyncBatchNorm",
        "TripletMarginWithDistanceLoss",
        "FractionalMaxPool2d",
        "FractionalMaxPool3d",
        "RNNBase",
        "RNNCellBase",
    }
)

#: The exact classes that are operators; a subclass is looked into, as it may do anything.
LEAF_CLASSES: frozenset[type[nn.Module]] = frozenset(
    member
    for name, member in vars(nn).items()
    if inspect.isclass(member)
    and issubclass(member, nn.Module)
    and name not in _LOOKED_INTO
    and member.__name__ == name
    and not name.startswith("Lazy")
)

# Factories depend on no tensor's values, so torch does not list them as overridable; a function mode sees them.
_NOT_LISTED: dict[str, Callable[..., Any]] = {
    "torch.Tensor.new_full": torch.Tensor.new_full,
    "torch.Tensor.new_ones": torch.Tensor.new_ones,
    "torch.Tensor.new_tensor": torch.Tensor.new_tensor,
    "torch.Tensor.new_zeros": torch.Tensor.new_zeros,
    "torch.arange": torch.arange,
    "torch.eye": torch.eye,
    "torch.full": torch.full,
    "torch.linspace": torch.linspace,
    "torch.logspace": torch.logspace,
    "torch.ones": torch.ones,
    "torch.rand": torch.rand,
    "torch.randint": torch.randint,
    "torch.randn": torch.randn,
    "torch.randperm": torch.randperm,
    "torch.tensor": torch.tensor,
    "torch.tril_indices": torch.tril_indices,
    "torch.triu_indices": torch.triu_indices,
    "torch.zeros": torch.zeros,
    "torch._scaled_mm": torch._scaled_mm,  # a product of eight-bit floats: there is no public name for it
    "torch._grouped_mm": torch._grouped_mm,  # what a mixture of experts of transformers calls
    "torch._weight_norm": torch._weight_norm,  # what torch.nn.utils.parametrizations.weight_norm calls
}


# Overridable, and yet not arithmetic: they reach files, processes, memory handles, Python callbacks or gradients.
_NOT_OPERATORS = frozenset(
    {
        "torch.Tensor.apply_",
        "torch.Tensor.map_",
        "torch.Tensor.map2_",
        "torch.Tensor.backward",
        "torch.Tensor.register_hook",
        "torch.Tensor.register_post_accumulate_grad_hook",
        "torch.Tensor.module_load",
        "torch.Tensor.numpy",
        "torch.Tensor.tolist",
        "torch.Tensor.share_memory_",
        "torch.Tensor.storage",
        "torch.Tensor.untyped_storage",
        "torch.Tensor.data_ptr",
        "torch.Tensor.set_",
        "torch.Tensor.resize_",
        "torch.Tensor.resize_as_",
        "torch.Tensor.resize",
        "torch.Tensor.resize_as",
        "torch.Tensor.cuda",
        "torch.Tensor.xpu",
        "torch.Tensor.ipu",
        "torch.Tensor.pin_memory",
        "torch.Tensor.record_stream",
        "torch.Tensor.__reduce_ex__",
        "torch.Tensor.__setstate__",
        "torch.Tensor.__deepcopy__",
        "torch.Tensor.__array__",
        "torch.Tensor.__dlpack__",
        "torch.Tensor.__repr__",
        "torch.Tensor.__format__",
        "torch.from_file",
    }
)


def _functions() -> dict[str, Callable[..., Any]]:
    named: dict[str, Callable[..., Any]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            name = resolve_name(function)
            if name and name not in _NOT_OPERATORS and not name.endswith((".__set__", ".__delete__")):
                named.setdefault(name, function)
    return named | _NOT_LISTED


#: name -> leaf class or function
ALLOWED_OPERATORS: dict[str, Any] = _functions() | {f"torch.nn.{leaf.__name__}": leaf for leaf in LEAF_CLASSES}

#: function -> its name
FUNCTION_NAMES: dict[Any, str] = {
    function: name for name, function in ALLOWED_OPERATORS.items() if not inspect.isclass(function)
}

#: What gives the host a value: on meta there is none, and it moves no more than it reads.
READS_BACK = {"torch.equal", "torch.allclose", "torch.is_nonzero", "aten._local_scalar_dense.default"} | {
    f"torch.Tensor.{name}"
    for name in (
        "item",
        "tolist",
        "equal",
        "allclose",
        "is_nonzero",
        "__bool__",
        "__contains__",
        "__int__",
        "__float__",
        "__index__",
    )
}
