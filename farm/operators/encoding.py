"""Converts the arguments of a call, and the constructor arguments of a leaf module, to a tuple's
JSON trees and back.

A module of ``torch.nn`` counts as a leaf only if its constructor arguments rebuild it:
`describe_leaf` constructs the module again on meta and compares. A module that differs from this
copy (hooks, a replaced ``forward``, an attribute changed after construction, tied weights inside)
is not a leaf: the capture descends into it and records the functions that it calls."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
import numbers
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.models.tensor_kinds import bits_of, special_kind
from farm.operators.allow_list import LEAF_CLASSES
from farm.types.tuple import (
    DTYPES,
    MEMORY_FORMATS,
    MOST_INTEGERS,
    OperatorTuple,
    TensorSpec,
    canonical_stride,
    table_named,
)

# Kernels choose their vector width by the alignment of the first element; a larger alignment
# changes nothing.
_ALIGNMENT_BYTES = 64

_DTYPE_OF = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_OF.items()}
_MEMORY_FORMAT_OF = {name: getattr(torch, name) for name in MEMORY_FORMATS}
#: Operator -> the position of an argument that it reads on the host.
_INTEGERS_OF_THE_HOST: dict[str, int] = table_named("integers_of_the_host")
_NAME_OF_MEMORY_FORMAT = {value: name for name, value in _MEMORY_FORMAT_OF.items()}


class NotEncodable(Exception):
    """A tuple cannot contain this value; the message names the value."""


#: The fields of a `TensorSpec`: role, name, shape, dtype, stride, storage, offset, bits.
Layout = tuple[str, str, tuple[int, ...], str, tuple[int, ...], int, int, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class DescribedCall:
    """One call as a tuple. ``tensors`` and ``storages`` (their addresses) are in the order of
    ``spec.tensors``.

    ``key`` has the same information as the tuple, with unchanged strides; it is cheaper to create
    and to compare."""

    key: tuple[str, tuple[Layout, ...]]
    spec: OperatorTuple
    tensors: list[torch.Tensor]
    storages: list[int]


class TensorTable:
    """The distinct tensors of one call, in order of first appearance. ``roles``: ``id()`` of a
    tensor -> its role; other tensors are parameters if their class says so, else activations."""

    def __init__(self, roles: dict[int, str]) -> None:
        self._roles = roles
        self.tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        self._index: dict[int, int] = {}

    def add_module(self, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.add(tensor, name)

    def add(self, tensor: torch.Tensor, name: str = "") -> int:
        if id(tensor) not in self._index:
            kind = special_kind(tensor)
            if kind is not None:
                raise NotEncodable(
                    f"it has {kind.description}; the farm does not measure such tensors"
                )
            self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self._names.append(name)
        return self._index[id(tensor)]

    def layouts(self) -> tuple[tuple[Layout, ...], list[int]]:
        """The layout of each tensor in its storage, with unchanged strides, and the addresses of
        the storages.
        """
        storages = list(map(storage_key, self.tensors))
        numbered: dict[int, int] = {}
        first_byte: dict[int, int] = {}
        for tensor, key in zip(self.tensors, storages, strict=True):
            numbered.setdefault(key, len(numbered))
            begin = int(tensor.storage_offset()) * tensor.element_size()
            first_byte[key] = min(first_byte.get(key, begin), begin)
        layouts = []
        for tensor, name, key in zip(self.tensors, self._names, storages, strict=True):
            skipped = first_byte[key] - first_byte[key] % _ALIGNMENT_BYTES
            offset = int(tensor.storage_offset()) - skipped // tensor.element_size()
            shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
            role = self._roles.get(id(tensor)) or (
                "parameter" if isinstance(tensor, nn.Parameter) else "activation"
            )
            role = "buffer" if name and role == "activation" else role
            place = numbered[key], offset
            layouts.append(
                (role, name, shape, _NAME_OF_DTYPE[tensor.dtype], stride, *place, bits_of(tensor))
            )
        return tuple(layouts), storages


def encode(value: Any, table: TensorTable | None = None) -> Any:
    """The JSON tree of a value; tensors are added to ``table``. Raises `NotEncodable` if a tuple
    cannot contain it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        if table is None:
            raise NotEncodable(
                "an argument of the module's constructor is a tensor, which a tuple cannot contain"
            )
        return {"tensor": table.add(value)}
    if isinstance(value, enum.Enum):
        return encode(value.value, table)
    if isinstance(value, numbers.Integral | torch.SymInt):
        return int(value)
    if isinstance(value, numbers.Real | torch.SymFloat):
        number = float(value)
        text = repr(number)
        # A database's JSON may turn 1e+20 into an integer; such floats are stored as text.
        return (
            {"float": text}
            if not math.isfinite(number) or ("e" in text and number.is_integer())
            else number
        )
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        if value not in _NAME_OF_DTYPE:
            raise NotEncodable(f"the farm does not measure the dtype {value}")
        return {"dtype": _NAME_OF_DTYPE[value]}
    if isinstance(value, torch.memory_format):
        return {"memory_format": _NAME_OF_MEMORY_FORMAT[value]}
    if isinstance(value, torch.layout) and value is torch.strided:
        return {"layout": "strided"}
    if isinstance(value, torch.device):
        return {"device": "run"}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [encode(part, table) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, PackedSequence):
        return _packed_sequence_tree(value, table)
    if isinstance(value, HostIntegers):
        return {"integers": list(value.numbers)}
    if isinstance(value, tuple):
        return {"tuple": [encode(entry, table) for entry in value]}
    if isinstance(value, list):
        return [encode(entry, table) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, encode(entry, table)] for key, entry in value.items()]}
    raise NotEncodable(f"an argument of type {type(value).__name__} cannot be described")


@dataclass(frozen=True)
class HostIntegers:
    """A tensor of integers in the memory of the host whose values are part of a tuple."""

    numbers: tuple[int, ...]


def host_integers(tensor: torch.Tensor) -> HostIntegers:
    """The values of a tensor in the memory of the host. Raises `NotEncodable` if they are unknown
    or too many.
    """
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        raise NotEncodable("the lengths of its sequences are unknown before the model runs")
    if tensor.numel() > MOST_INTEGERS:
        raise NotEncodable(
            f"it has {tensor.numel()} lengths or steps, and a tuple has at most {MOST_INTEGERS}"
        )
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return HostIntegers(tuple(tensor.tolist()))


def with_host_integers(operator: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call, with `HostIntegers` in place of a tensor that the operator reads on
    the host.
    """
    position = _INTEGERS_OF_THE_HOST.get(operator)
    if position is None or not isinstance(args[position], torch.Tensor):
        return args
    return (*args[:position], host_integers(args[position]), *args[position + 1 :])


def _packed_sequence_tree(packed: PackedSequence, table: TensorTable | None) -> dict[str, Any]:
    steps = host_integers(packed.batch_sizes)
    fields = [packed.data, steps, packed.sorted_indices, packed.unsorted_indices]
    return {"named_tuple": ["PackedSequence", [encode(field, table) for field in fields]]}


def _packed_sequence(
    data: Any, batch_sizes: Any, sorted_indices: Any, unsorted_indices: Any
) -> PackedSequence:
    """Raises `TupleRejected` if the steps are not those of the data: a library would read other
    memory.
    """
    sizes = batch_sizes.tolist()
    falling = all(size > 0 for size in sizes) and sizes == sorted(sizes, reverse=True)
    if not sizes or not falling or sum(sizes) != len(data):
        raise TupleRejected(
            "The steps of a packed sequence do not fit its data.", "Capture the model again."
        )
    return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)


def decode(tree: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """The value that a validated JSON tree describes."""
    if isinstance(tree, list):
        return [decode(entry, tensors, device) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    tag, value = next(iter(tree.items()))
    match tag:
        case "tensor":
            return tensors[value]
        case "integers":
            with _disable_current_modes():  # a real tensor also in a fake pass
                return torch.tensor(value, dtype=torch.int64, device="cpu")
        case "named_tuple":
            return _named_tuple(value[0], [decode(entry, tensors, device) for entry in value[1]])
        case "tuple":
            return tuple(decode(entry, tensors, device) for entry in value)
        case "dict":
            return {key: decode(entry, tensors, device) for key, entry in value}
        case "slice":
            return slice(*(decode(entry, tensors, device) for entry in value))
        case "ellipsis":
            return Ellipsis
        case "dtype":
            return dtype_of(value)
        case "device":
            return device
        case "memory_format":
            return _MEMORY_FORMAT_OF[value]
        case "layout":
            return torch.strided
        case "float":
            return float(value)
        case "complex":
            return complex(*value)
    raise TupleRejected(f"A stored argument has the unknown kind '{tag}'.")


def _named_tuple(name: str, fields: list[Any]) -> Any:
    if name != "PackedSequence" or len(fields) != len(PackedSequence._fields):
        raise TupleRejected(
            f"A stored argument is no {name} of this PyTorch.", "Capture the model again."
        )
    return _packed_sequence(*fields)


def dtype_of(name: str) -> torch.dtype:
    """Raises `TupleRejected` if this torch has no such dtype."""
    try:
        return _DTYPE_OF[name]
    except KeyError:
        raise TupleRejected(
            f"This torch has no dtype '{name}'.", "Use a newer torch on this host."
        ) from None


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for entry in tree:
            yield from tensors_in(entry)
    elif isinstance(tree, dict):
        for entry in tree.values():
            yield from tensors_in(entry)


def texts_of_outputs(out: Any) -> tuple[str, ...]:
    """Shape, stride, dtype and layout of each tensor in an output: what the next operator depends
    on.
    """
    return tuple(map(_text_of_output, tensors_in(out)))


def bits_of_inputs(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """The layout bits of each tensor; () if no tensor has any."""
    bits = tuple(_bits(tensor) or "plain" for tensor in tensors)
    return bits if any(text != "plain" for text in bits) else ()


def are_trained(tensors: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """For each tensor, whether it is a parameter that requires gradients, or a view of one. Such a
    view requires them also under ``no_grad``, and PyTorch chooses by it how it multiplies."""
    return tuple(map(_is_trained, tensors))


def _is_trained(tensor: torch.Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return tensor.requires_grad and base.is_leaf


def _bits(tensor: torch.Tensor) -> str:
    return " ".join(bits_of(tensor)) if special_kind(tensor) is None else ""


def _text_of_output(tensor: torch.Tensor) -> str:
    shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"{shape} {tensor.layout}{' nested' if tensor.is_nested else ''} {dtype}"
    stride = canonical_stride(shape, tuple(map(int, tensor.stride()))) or "contiguous"
    return f"{shape} {stride} {dtype} {_bits(tensor)}".strip()


def tensor_spec(layout: Layout) -> TensorSpec:
    """The description of a tensor with this layout."""
    role, name, shape, dtype, stride, storage, offset, bits = layout
    return TensorSpec(role, name, shape, dtype, stride, storage, offset, bits=bits)


def storage_key(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage: equal for views of the same memory."""
    return tensor.untyped_storage()._cdata


def written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an aten operator writes, among these arguments."""
    for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(
                args[position] if position < len(args) else kwargs.get(argument.name)
            )


# These operators return new memory but run no kernel: allocations, and `lift_fresh`, which fake
# tensors run on a Python constant. Schemas do not show this.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
)


def costs_something(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """True if an aten operator runs a kernel, that is, if it writes an argument or returns new
    memory.

    An output of a view shares the storage of an input, even if its schema hides that
    (``_unsafe_view``)."""
    if func._schema.is_mutable:
        return torch.Tag.inplace_view not in func.tags
    outputs = list(tensors_in(out))
    if not outputs:
        return torch.Tag.data_dependent_output in func.tags
    if func._schema.name.removeprefix("aten::") in _NO_KERNEL:
        return False
    inputs = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
    return any(storage_key(tensor) not in inputs for tensor in outputs)


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
    tensors = [
        id(one) for child in mine.values() for one in _tensors(child).values() if one is not None
    ]
    if mine.keys() != theirs.keys() or len({*tensors}) < len(
        tensors
    ):  # or two of its tensors are tied
        return False
    for name, child in mine.items():
        other = theirs[name]
        if type(child) is not type(other) or is_changed(child):
            return False
        own, others = (
            {
                key: None if tensor is None else tuple(tensor.shape)
                for key, tensor in _tensors(one).items()
            }
            for one in (child, other)
        )
        if own != others:
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


def _tensors(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}
