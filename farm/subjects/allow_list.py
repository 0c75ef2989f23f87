"""The operators that may be called: fixed lists of leaf modules, public functions and aten
overloads.

The farm looks up an operator name of a tuple only in this list. It never imports a module or reads
an attribute by such a name, so a forged tuple can only call an operator of this list. Captures of
forward passes consist of modules and functions, captures of training steps of aten overloads."""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions, resolve_name

from farm.errors import TupleRejected
from farm.subjects.libraries import library_overload
from farm.subjects.overloads import (
    BY_ELEMENT,
    GENERATED,
    NOT_READ,
    OTHER_ARGUMENTS,
    OTHER_TENSORS,
    TAKEN_APART,
    listed,
    sections,
)
from farm.types.tuple import (
    OperatorTuple,
    names_listed,
    table_named,
    tensor_references,
    words,
)

# Not leaves: modules that only combine other modules, choose by data which child runs, or have
# state that a tuple cannot store. The capture descends into them and records their children and the
# functions that they call.
_COMPOSITE = names_listed("composite")

#: Classes whose modules are recorded as one operator. The capture descends into subclasses: they
#: may compute anything.
LEAF_CLASSES: frozenset[type[nn.Module]] = frozenset(
    member
    for name, member in vars(nn).items()
    if inspect.isclass(member)
    and issubclass(member, nn.Module)
    and name not in _COMPOSITE
    and member.__name__ == name
    and not name.startswith("Lazy")
)

# Functions that torch does not list as overridable, although a function mode sees them: most create
# tensors. Three are private: matrix products of eight-bit floats and of a mixture of experts, and
# the function that parametrizations.weight_norm calls.
_NOT_LISTED = names_listed("not_overridable")

# Overridable functions that are not operators: they access files, processes, memory, Python
# callbacks or gradients.
_NOT_OPERATORS = {"", "torch.autocast", "torch.from_file"} | {
    f"torch.Tensor.{name}" for name in names_listed("methods_that_are_no_operators")
}

_LIST = Path(__file__).with_name("aten_overloads.txt")


def _full_name(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


#: Overload of aten -> why it is denied; "" if a tuple may name it.
_ATEN: dict[str, str] = {_full_name(name): reason for name, reason in listed(_LIST).items()}
_BY_ELEMENT = frozenset(map(_full_name, sections(_LIST)[BY_ELEMENT]))
ATEN_OVERLOADS: frozenset[str] = frozenset(name for name, reason in _ATEN.items() if not reason)


#: Name of an operator of aten -> the reasons for which its overloads are denied; "" for an allowed
#: one.
_REASONS: defaultdict[str, set[str]] = defaultdict(set)
for _overload, _reason in _ATEN.items():
    _REASONS[_overload.split(".")[1]].add(_reason)

#: Public functions that check as little as the operator of aten with that name.
_UNCHECKED = names_listed("unchecked_functions")


def _is_denied(name: str) -> bool:
    """True if a public function is an operator of aten whose overloads are denied because of what
    they trust."""
    short_name = name.rpartition(".")[2]
    reasons = _REASONS.get(short_name, set())
    trusts = bool(reasons) and reasons <= {OTHER_TENSORS, NOT_READ}
    is_checked = short_name.startswith(("fake_quantize_", "__"))
    return short_name in _UNCHECKED or (trusts and not is_checked)


def _builtin_functions() -> Iterator[tuple[Any, str]]:
    """Builtin functions that torch does not list as overridable, such as ``torch.randn_like``, and
    their names. The list of aten allows all that they call."""
    with_integers = table_named("integer_values")
    transforms: Any = torch._C._fft  # type: ignore[attr-defined]
    for short_name, function in (vars(torch) | vars(transforms) | vars(torch._C._nn)).items():
        reasons = _REASONS.get(short_name, set())
        name = resolve_name(function) if inspect.isbuiltin(function) else None
        computes = reasons & {"", TAKEN_APART}
        is_allowed = reasons <= {"", TAKEN_APART, GENERATED, OTHER_ARGUMENTS}
        is_named = short_name not in with_integers and not short_name.startswith("cudnn_")
        if name is not None and is_named and computes and is_allowed:
            yield function, name


#: function -> its name
FUNCTION_NAMES: dict[Any, str] = (
    dict(_builtin_functions())
    | {
        function: name
        for functions in get_overridable_functions().values()
        for function in functions
        if (name := resolve_name(function) or "") not in _NOT_OPERATORS
        and not name.endswith((".__set__", ".__delete__"))
        and not _is_denied(name)
    }
    | {operator.attrgetter(name)(torch): f"torch.{name}" for name in sorted(_NOT_LISTED)}
)

#: name -> leaf class or function
ALLOWED_OPERATORS: dict[str, Any] = {
    name: function for function, name in FUNCTION_NAMES.items()
} | {f"torch.nn.{leaf.__name__}": leaf for leaf in LEAF_CLASSES}
# As models call them: `farm.benchmark.host_steps` replaces the methods.
ALLOWED_OPERATORS |= {
    "torch.Tensor.__getitem__": operator.getitem,
    "torch.Tensor.__setitem__": operator.setitem,
}

#: Operators that return a value to the host. On meta there is none; only the bytes that they read
#: count as moved.
RETURNS_TO_HOST = {
    "torch.equal",
    "torch.allclose",
    "torch.is_nonzero",
    "aten._local_scalar_dense.default",
} | {
    f"torch.Tensor.{name}"
    for name in words(
        "item tolist equal allclose is_nonzero __bool__ __contains__ __int__ __float__ __index__"
    )
}


def computes_by_element(name: str) -> bool:
    """True if the integers of an overload are only operands: no value of them is invalid."""
    return name in _BY_ELEMENT


def overload_of(name: str) -> Any:
    """The overload with a name such as ``aten.mul.Tensor``, also of a library. Raises
    `TupleRejected` if a list denies it or none names it, or this host has no such operator."""
    return _aten_overload(name) if name.startswith("aten.") else library_overload(name)


@functools.cache
def _aten_overload(name: str) -> Any:
    reason = _ATEN.get(name)
    if reason != "":
        why = f": it {reason}" if reason else ""
        text = f"'{name}' is not in this version's allow-list of operators{why}."
        raise TupleRejected(text, "Capture the model again with this version.")
    try:
        return registered(name.removeprefix("aten."))
    except AttributeError:
        text = f"PyTorch {torch.__version__} on this host has no operator '{name}'."
        raise TupleRejected(text, "Install a newer PyTorch on this host.") from None


def registered(name: str) -> Any:
    """The overload of aten with a name of the lists: ``mul.Tensor``, ``relu`` for ``default``."""
    path = name if "." in name else f"{name}.default"
    return operator.attrgetter(path)(torch.ops.aten)


@functools.lru_cache(maxsize=8192)
def arguments_of(spec: OperatorTuple) -> dict[str, Any]:
    """Schema name of each argument -> its value as a JSON tree; arguments that the call does not
    pass are absent. Raises `TupleRejected` if the schema has no such argument."""
    arguments = overload_of(spec.operator)._schema.arguments
    names = [argument.name for argument in arguments]
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    by_position = dict(zip(positional, spec.arguments, strict=False))
    if len(spec.arguments) > len(positional) or not set(spec.keywords) <= set(names) - set(
        by_position
    ):
        text = f"The stored arguments do not fit '{spec.operator}'."
        raise TupleRejected(text, "Capture the model again with this PyTorch.")
    return by_position | dict(spec.keywords)


@functools.lru_cache(maxsize=8192)
def tensor_arguments(spec: OperatorTuple) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return for each tensor of the tuple the arguments that contain the tensor.

    Each argument is a pair: its name, and the tensor's position if the argument is a list (else 0).
    """
    passed_as: list[list[tuple[str, int]]] = [[] for _ in spec.tensors]
    for name, tree in arguments_of(spec).items():
        for position, entry in enumerate(tree if isinstance(tree, list) else [tree]):
            for index in tensor_references(entry):
                passed_as[index].append((name, position))
    return tuple(map(tuple, passed_as))


def written_by_schema(spec: OperatorTuple) -> frozenset[int]:
    """Indices of the tensors whose memory the call writes according to the operator's schema."""
    schema = overload_of(spec.operator)._schema
    names = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if spec.short_name in ("native_batch_norm", "cudnn_batch_norm") and arguments_of(spec).get(
        "training"
    ):
        names |= {"running_mean", "running_var"}  # the schema does not mark them as written
    storages = _storages_passed_as(spec, names)
    return frozenset(
        index for index, tensor in enumerate(spec.tensors) if tensor.storage in storages
    )


def read_by_host(spec: OperatorTuple) -> frozenset[int]:
    """Numbers of the storages that a CUDA operator reads on the host. While a CUDA graph is
    recorded, its kernel reads them instead."""
    if spec.short_name != "_scaled_dot_product_efficient_attention_backward":
        return frozenset()
    return _storages_passed_as(spec, {"philox_seed", "philox_offset"})


def _storages_passed_as(spec: OperatorTuple, names: set[str]) -> frozenset[int]:
    """Numbers of the storages of the tensors that the call passes as one of the arguments
    ``names``.
    """
    passed = zip(spec.tensors, tensor_arguments(spec), strict=True)
    return frozenset(
        tensor.storage
        for tensor, arguments in passed
        if any(name in names for name, _ in arguments)
    )
