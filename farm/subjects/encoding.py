"""Converts the arguments of a call to a tuple's JSON trees and back, and describes tensors."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.types.tensor_kinds import bits_of, is_composite, special_kind
from farm.types.tuple import (
    DTYPES,
    MEMORY_FORMATS,
    MOST_INTEGERS,
    OperatorTuple,
    TensorSpec,
    canonical_stride,
    table_named,
    words,
)

# Kernels choose their vector width by the alignment of the first element; a larger alignment
# changes nothing.
_ALIGNMENT_BYTES = 64

_DTYPE_OF = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_OF.items()}
_MEMORY_FORMAT_OF = {name: getattr(torch, name) for name in MEMORY_FORMATS}
#: Operator -> the positions of the arguments that it reads on the host.
_INTEGERS_OF_THE_HOST: dict[str, list[int]] = table_named("integers_of_the_host")
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
            start = numbered[key], offset
            layouts.append(
                (role, name, shape, _NAME_OF_DTYPE[tensor.dtype], stride, *start, bits_of(tensor))
            )
        return tuple(layouts), storages


def encode(value: Any, table: TensorTable | None = None) -> Any:
    """The JSON tree of a value; tensors are added to ``table``. Raises `NotEncodable` if a tuple
    cannot contain it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Generator):  # a worker uses the generator of its device
        return None
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


_ENCODABLE = (
    str,
    torch.Generator,
    enum.Enum,
    numbers.Number,
    torch.SymInt,
    torch.SymFloat,
    torch.dtype,
    torch.memory_format,
    torch.layout,
    torch.device,
    type(Ellipsis),
    type(None),
)


def is_encodable(value: Any) -> bool:
    """False if `encode` refuses a value of this type, whatever its tensors are; for tensors that a
    transform has wrapped, such as `torch.vmap`: they have no memory; and for composites."""
    if isinstance(value, torch.Tensor):
        return not (_is_wrapped(value) or is_composite(type(value)))
    if isinstance(value, PackedSequence | tuple | list):
        return all(map(is_encodable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_encodable(entry) for key, entry in value.items())
    if isinstance(value, slice):
        return all(map(is_encodable, (value.start, value.stop, value.step)))
    return isinstance(value, _ENCODABLE)


_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


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
    """The arguments of a call, with `HostIntegers` in place of the tensors that the operator reads
    on the host.
    """
    read = [
        position
        for position in _INTEGERS_OF_THE_HOST.get(operator, ())
        if position < len(args) and isinstance(args[position], torch.Tensor)
    ]
    if not read:
        return args
    entries = enumerate(args)
    return tuple(host_integers(entry) if position in read else entry for position, entry in entries)


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


def fields_of(value: Any) -> Any:
    """The fields of an object as a dictionary; lists, tuples, tensors and numbers as they are."""
    if isinstance(value, torch.Tensor | list | tuple):
        return value
    if hasattr(value, "items"):
        return dict(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: operator.attrgetter(name)(value) for name in names}
    return dict(vars(value)) if hasattr(value, "__dict__") else value


def texts_of_outputs(out: Any) -> tuple[str, ...]:
    """Shape, stride, dtype and layout of each tensor in an output: what the next operator depends
    on.
    """
    return tuple(map(_text_of_output, tensors_in(out)))


def bits_of_inputs(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """The layout bits of each tensor; () if no tensor has any."""
    bits = tuple(_bits(tensor) or "plain" for tensor in tensors)
    return bits if any(text != "plain" for text in bits) else ()


def have_values(tensors: Iterable[torch.Tensor]) -> bool:
    """True if the integers among the tensors of a call are real, or there are none."""
    return not any(
        type(tensor) is FakeTensor
        for tensor in tensors
        if not (tensor.is_floating_point() or tensor.is_complex())
    )


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


# These operators return new memory but run no kernel: allocations, and what fake tensors run on a
# Python constant (`lift_fresh`, and views of its bits). Schemas do not show this.
_NO_KERNEL = words(
    "empty empty_like empty_strided new_empty new_empty_strided lift_fresh _conj _neg_view"
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
