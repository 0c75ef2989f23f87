"""Between Python's values and a tuple's JSON trees: what a call was given, and how to give it again."""

from __future__ import annotations

import enum
import functools
import itertools
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farm.errors import TupleRejected
from farm.types.tuple import DTYPES, MEMORY_FORMATS, OperatorTuple

# Kernels pick their vector width by the alignment of the first element; beyond that an offset changes nothing.
_ALIGNMENT_BYTES = 64

_DTYPE_OF = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_OF.items()}
_MEMORY_FORMAT_OF = {name: getattr(torch, name) for name in MEMORY_FORMATS}
_NAME_OF_MEMORY_FORMAT = {value: name for name, value in _MEMORY_FORMAT_OF.items()}


class NotEncodable(Exception):
    """A value that a tuple cannot hold; the text says which."""


#: The fields of a `TensorSpec` in their order: role, name, shape, dtype, stride, storage, offset.
Layout = tuple[str, str, tuple[int, ...], str, tuple[int, ...], int, int]


@dataclass(frozen=True, eq=False)
class Given:
    """What one call was given. ``tensors`` and their ``storages`` (addresses) are in the order of ``spec.tensors``.

    ``key`` holds what the tuple holds, with strides as they are; it is cheaper to make and to compare.
    """

    key: tuple[str, tuple[Layout, ...]]
    spec: OperatorTuple
    tensors: list[torch.Tensor]
    storages: list[int]


class TensorTable:
    """The distinct tensors of one call, in order of first appearance."""

    def __init__(self, roles: dict[int, str]) -> None:
        self._roles = roles
        self.tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        self._index: dict[int, int] = {}

    def add_module(self, module: nn.Module) -> None:
        for name, tensor in itertools.chain[tuple[str, torch.Tensor]](
            module.named_parameters(), module.named_buffers()
        ):
            self.add(tensor, name)

    def add(self, tensor: torch.Tensor, name: str = "") -> int:
        if id(tensor) not in self._index:
            if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in _NAME_OF_DTYPE:
                raise NotEncodable(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} is not supported")
            self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self._names.append(name)
        return self._index[id(tensor)]

    def role(self, tensor: torch.Tensor) -> str:
        known = self._roles.get(id(tensor))
        if known is None:
            known = "parameter" if isinstance(tensor, nn.Parameter) else "activation"
        name = self._names[self._index[id(tensor)]]
        return "buffer" if name and known == "activation" else known

    def storages(self) -> list[int]:
        """The storage of each tensor, as an address."""
        return [tensor.untyped_storage()._cdata for tensor in self.tensors]

    def layouts(self, storages: list[int]) -> tuple[Layout, ...]:
        """How the tensors lie in their ``storages`` (as `storages` gives them), strides as they are."""
        numbered: dict[int, int] = {}
        first_byte: dict[int, int] = {}
        for tensor, key in zip(self.tensors, storages, strict=True):
            numbered.setdefault(key, len(numbered))
            begin = int(tensor.storage_offset()) * tensor.element_size()
            first_byte[key] = min(first_byte.get(key, begin), begin)
        layouts = []
        for tensor, name, key in zip(self.tensors, self._names, storages, strict=True):
            skipped = first_byte[key] - first_byte[key] % _ALIGNMENT_BYTES
            layouts.append(
                (
                    self.role(tensor),
                    name,
                    tuple(map(int, tensor.shape)),
                    _NAME_OF_DTYPE[tensor.dtype],
                    tuple(map(int, tensor.stride())),
                    numbered[key],
                    int(tensor.storage_offset()) - skipped // tensor.element_size(),
                )
            )
        return tuple(layouts)


def encode(value: Any, table: TensorTable | None = None) -> Any:
    """The JSON tree of a value; tensors go into ``table``.

    Raises:
        NotEncodable: a tuple cannot hold it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        if table is None:
            raise NotEncodable("a tensor cannot be a parameter")
        return {"tensor": table.add(value)}
    if isinstance(value, enum.Enum):
        return encode(value.value, table)
    if isinstance(value, numbers.Integral | torch.SymInt):
        return int(value)
    if isinstance(value, numbers.Real | torch.SymFloat):
        return _encode_float(float(value))
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype) and value in _NAME_OF_DTYPE:
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
    if isinstance(value, tuple):
        return {"tuple": [encode(entry, table) for entry in value]}
    if isinstance(value, list):
        return [encode(entry, table) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, encode(entry, table)] for key, entry in value.items()]}
    raise NotEncodable(f"an argument of type {type(value).__name__} cannot be described")


def _encode_float(value: float) -> Any:
    text = repr(value)
    # A database's JSON may turn 1e+20 into an integer; such floats travel as text.
    if not math.isfinite(value) or ("e" in text and value.is_integer()):
        return {"float": text}
    return value


def decode(tree: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """The value that a validated JSON tree describes."""
    if isinstance(tree, list):
        return [decode(entry, tensors, device) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    tag, value = next(iter(tree.items()))
    if tag == "tensor":
        return tensors[value]
    if tag == "tuple":
        return tuple(decode(entry, tensors, device) for entry in value)
    if tag == "dict":
        return {key: decode(entry, tensors, device) for key, entry in value}
    if tag == "slice":
        return slice(*(decode(entry, tensors, device) for entry in value))
    if tag == "ellipsis":
        return Ellipsis
    if tag == "dtype":
        return dtype_of(value)
    if tag == "device":
        return device
    if tag == "memory_format":
        return _MEMORY_FORMAT_OF[value]
    if tag == "layout":
        return torch.strided
    if tag == "float":
        return float(value)
    if tag == "complex":
        return complex(*value)
    raise TupleRejected(f"'{tag}' is no kind of value.")


def dtype_of(name: str) -> torch.dtype:
    """Raises TupleRejected where this torch has no such dtype."""
    try:
        return _DTYPE_OF[name]
    except KeyError:
        raise TupleRejected(f"This torch has no dtype '{name}'.", "Use a newer torch on this host.") from None


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of what an operator was given or gave: nested lists, tuples and dictionaries, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for entry in tree:
            yield from tensors_in(entry)
    elif isinstance(tree, dict):
        for entry in tree.values():
            yield from tensors_in(entry)


def written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among an aten operator's arguments that it writes."""
    for position, name in _written_arguments(func):
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an aten operator writes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
