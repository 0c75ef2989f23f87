"""An operator tuple: the description of one operator call as plain JSON, which is sent, stored and
measured.

Requirements:

- A tuple is a description, not code. JSON from elsewhere is validated here, with bounded sizes,
  before it is used. Nothing in it is evaluated, unpickled or imported.
- Its id is a hash of its canonical form. It is equal on every machine, in every process and Python
  version. It does not depend on the model, its weights or the addresses of its tensors.
- It contains everything that decides which kernels run: parameters, shapes, dtypes, strides, which
  arguments are the same tensor (self-attention on one tensor uses a different path than on three
  clones of it), and which tensors share a storage, with their offsets.

This module does not import torch: the command line, the queues and the simulated cards use tuples
without it.

Values that JSON lacks are written as an object with one key: ``{"tensor": 0}`` (an index into
``tensors``), ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"slice": [start, stop,
step]}``, ``{"ellipsis": true}``, ``{"dtype": "float32"}``, ``{"device": "run"}`` (always the device
of the run), ``{"memory_format": "channels_last"}``, ``{"layout": "strided"}``, ``{"float":
"inf"}``, ``{"complex": [real, imaginary]}``, ``{"integers": [5, 3]}`` (a tensor of 64-bit integers
in the memory of the host) and ``{"named_tuple": ["PackedSequence", [...]]}``. A JSON list is a
list."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farm.types.distribution import Distribution
from farm.types.fields import content_id

SCHEMA = 1

ROLES = ("parameter", "buffer", "activation")

MEMORY_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
LAYOUTS = ("strided",)
BITS = ("conj", "neg")
NAMED_TUPLES = ("PackedSequence",)
MOST_INTEGERS = 10_000  # of one tensor of the host: the steps of a packed sequence


def words(text: str) -> frozenset[str]:
    """Split a text into a set of words. It makes long sets of names readable."""
    return frozenset(text.split())


@functools.cache
def _names() -> dict[str, Any]:
    return tomllib.loads(
        Path(__file__).with_name("operator_names.toml").read_text(encoding="utf-8")
    )


def names_listed(key: str) -> frozenset[str]:
    """Return a set of names of operators from ``operator_names.toml``."""
    return words(_names()[key])


def table_named(key: str) -> dict[str, Any]:
    """Return a table of names of operators from ``operator_names.toml``."""
    table: dict[str, Any] = _names()[key]
    return table


#: dtype -> (bytes of one element, short form for labels)
DTYPES: dict[str, tuple[int, str]] = {
    name: (size, short) for name, (size, short) in table_named("dtypes").items()
}


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride, in elements, of a new contiguous tensor with this shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def canonical_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the canonical form of a stride; None for the contiguous stride.

    The stride of a dimension of size 1 has no effect, and real and fake tensors have different
    ones. So it is replaced by the contiguous stride, unless that changes whether a one-pixel image
    counts as channels_last."""
    if 0 in shape:
        return None
    plain_stride = list(stride)
    for index in reversed(range(len(shape))):
        if shape[index] == 1:
            last = index == len(shape) - 1
            plain_stride[index] = 1 if last else plain_stride[index + 1] * shape[index + 1]
    chosen = tuple(plain_stride)
    if len(shape) in (4, 5):
        was_last = _like_channels_last(shape, stride)
        if was_last != _like_channels_last(shape, chosen):
            chosen = stride
    return None if chosen == contiguous_stride(shape) else chosen


def _like_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    # The same test as in torch, which suggests a memory format with it (c10/core/MemoryFormat.h).
    least = 0
    if stride[1] == 0:
        return False
    for index in (1, *reversed(range(2, len(shape))), 0):
        if shape[index] == 0 or stride[index] < least or (index == 0 and least == stride[1]):
            return False
        least = stride[index]
        if shape[index] > 1:
            least *= shape[index]
    return True


@dataclass(frozen=True)
class TensorSpec:
    """One distinct tensor of a call.

    ``stride`` and ``offset`` count elements; a contiguous ``stride`` is None. Tensors of the same
    ``storage`` share memory. ``name`` is the name within the operator's module and empty for
    arguments. ``zeros`` is the share of zeros in the data (a hint of sweeps, 0 to 1). ``bits``:
    "conj" and "neg" for a conjugation or a negation that PyTorch has put off until the data is
    read; the call then includes it. ``values`` describes integers that decide how much work the
    call does."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    storage: int = 0
    offset: int = 0
    zeros: float = 0.0
    bits: tuple[str, ...] = ()
    values: Distribution | None = None

    def __post_init__(self) -> None:
        if self.stride is not None:
            object.__setattr__(self, "stride", canonical_stride(self.shape, self.stride))

    @property
    def held(self) -> bool:
        """True for a buffer or parameter of the model that is an argument (not the leaf module's
        own).
        """
        return self.role != "activation" and not self.name

    @property
    def strides(self) -> tuple[int, ...]:
        return contiguous_stride(self.shape) if self.stride is None else self.stride

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize_bytes(self) -> int:
        return DTYPES[self.dtype][0]

    @property
    def extent(self) -> int:
        """The number of storage elements from the first to the last one that the tensor uses."""
        return self.numel and 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)
        )

    @property
    def distinct_bytes(self) -> int:
        """The number of bytes that the tensor uses. An expanded dimension (stride 0) counts
        once.
        """
        touched = math.prod(
            size
            for size, step in zip(self.shape, self.strides, strict=True)
            if step != 0 or size == 0
        )
        return min(touched, self.extent) * self.itemsize_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON by field name, without optional fields at their defaults."""
        data = {}
        for name, value in vars(self).items():
            if name != "values" and (value or name in _REQUIRED):
                data[name] = list(value) if isinstance(value, tuple) else value
        if self.values:
            data["values"] = self.values.to_json()
        return data


_REQUIRED = ("role", "shape", "dtype", "storage")


@dataclass(frozen=True, eq=False)
class OperatorTuple:
    """An operator, its parameters and the specs of its inputs. Equal if the ids are equal.

    ``kind`` is 'module', 'function' (of PyTorch's public API), 'aten' (called by these, forward and
    backward; its name includes the overload: ``aten.convolution_backward.default``), 'library'
    (``torchvision.nms.default``), 'kernel' (generated by torch.compile; named by language and kind:
    ``triton.reduction``) or 'collective': `farm.subjects` has a file for each. ``parameters`` are
    the constructor's arguments of a module (empty for functions), ``arguments`` and ``keywords``
    those of the call. All three are JSON trees (see the module docstring)."""

    operator: str
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorSpec, ...] = ()
    training: bool = False
    #: Of a call in a capture, for an operator that PyTorch cannot run without values.
    observed_cost: Cost | None = None

    @functools.cached_property
    def id(self) -> str:
        """32 hexadecimal characters."""
        return content_id(self.to_json())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorTuple) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<OperatorTuple {self.id[:8]} {self.short_name}>"

    def to_json(self) -> dict[str, Any]:
        """The canonical form, which the id hashes. It says "forward" for every tuple, because
        stored ids do.
        """
        return {
            "schema": SCHEMA,
            "operator": self.operator,
            "kind": self.kind,
            "parameters": dict(self.parameters),
            "arguments": list(self.arguments),
            "keywords": dict(self.keywords),
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "training": self.training,
            "direction": "forward",
        }

    @functools.cached_property
    def without_values(self) -> OperatorTuple:
        """The same call without a description of values that decide its work."""
        if all(tensor.values is None for tensor in self.tensors):
            return self
        return replace(self, tensors=tuple(replace(tensor, values=None) for tensor in self.tensors))

    @property
    def short_name(self) -> str:
        """The short name: 'Conv2d', 'add', 'convolution_backward'. Tables group tuples by it."""
        return short_name_of(self.operator)

    @property
    def activations(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == "activation")

    @property
    def passed_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors passed in the call, in order. A tensor that is passed twice is listed
        twice.
        """
        trees = [*self.arguments, *self.keywords.values()]
        return tuple(self.tensors[index] for index in tensor_references(trees))

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors passed in the call."""
        return tuple(tensor.shape for tensor in self.passed_tensors)

    @property
    def parameters_by_storage(self) -> dict[int, tuple[int, int]]:
        """Number of a storage -> the number of elements of the parameters in it, and their size in
        bytes."""
        sizes: dict[int, tuple[int, int]] = {}
        for tensor in self.tensors:
            if tensor.role == "parameter":
                elements, size_bytes = sizes.get(tensor.storage, (0, 0))
                own_bytes = tensor.numel * tensor.itemsize_bytes
                sizes[tensor.storage] = (elements + tensor.numel, size_bytes + own_bytes)
        return sizes

    @property
    def held_parameters(self) -> tuple[int, int]:
        """The number of elements of the parameters, and their size in bytes."""
        sizes = self.parameters_by_storage.values()
        return sum(elements for elements, _ in sizes), sum(size_bytes for _, size_bytes in sizes)

    def parameters_for_query(self) -> dict[str, Any]:
        """The parameters as a flat object for a JSON column: ``{"in_channels": 64, "kernel_size":
        [3, 3]}``.

        It also holds the arguments of the call that are not tensors; a positional one is named
        ``argument_1``."""
        flat = dict(self.parameters)
        call = {f"argument_{index}": tree for index, tree in enumerate(self.arguments)}
        call |= self.keywords
        for name, value in call.items():
            if not holds_tensor(value):
                flat.setdefault(name, value)
        return {name: plain(value) for name, value in flat.items()}


@dataclass(frozen=True)
class Cost:
    """The cost of one call of an operator tuple.

    ``flops`` counts 2 per multiply-add and, like PyTorch's counter, only matrix products,
    convolutions and attention. ``bytes`` is the least number of bytes to read and write: inputs,
    parameters and outputs, each distinct element once (expanded elements are not repeated). Tensors
    that are written in place count twice. If an operator uses only a part of a tensor (some rows of
    a table), only that part counts. ``output_shapes`` are the shapes of the returned tensors; None
    if unknown."""

    flops: int
    bytes: int
    output_shapes: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class NeededTuple:
    """One operator tuple of a model with its counted cost."""

    operator_id: str
    short_name: str
    label: str
    flops: int
    bytes_moved: int
    calls: Mapping[str, int]  # how often the model calls it in each class of data ("" if unknown)
    spec: Mapping[str, Any]  # its description (`OperatorTuple.to_json`)
    outputs: Sequence[Sequence[int]] | None = None  # their shapes
    # why a reading of the tuple is not that of the model's calls (`farm.operators.self_check`)
    mismatch: str = ""

    @property
    def is_kernel(self) -> bool:
        """True for a kernel that the compiler generated; its JSON may be foreign."""
        return self.spec.get("kind") == "kernel"

    @property
    def all_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def held_bytes(self) -> int:
        """Size of all parameters and buffers that one call uses. Unit: bytes."""
        return self.bytes_of("parameter") + self.bytes_of("buffer")

    def bytes_of(self, role: str) -> int:
        """Size of the operands of one call with a role, such as `parameter`. Unit: bytes."""
        sizes = [
            math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]][0]
            for tensor in self.spec.get("tensors") or ()
            if tensor["role"] == role
        ]
        return sum(sizes)


def shapes_passed(spec: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return `OperatorTuple.input_shapes` for a stored description."""
    trees = [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
    return tuple(tuple(spec["tensors"][index]["shape"]) for index in tensor_references(trees))


def dtype_of_call(spec: Mapping[str, Any]) -> str | None:
    """Return the dtype of the first floating-point tensor, else of the first tensor; None if there
    is no tensor.
    """
    dtypes = [tensor["dtype"] for tensor in spec.get("tensors") or ()]
    floating = (name for name in dtypes if name in DTYPES and name.startswith(("float", "bfloat")))
    return next(floating, dtypes[0] if dtypes else None)


def short_name_of(operator: str) -> str:
    """See `OperatorTuple.short_name`."""
    parts = operator.split(".")
    # aten.mul.Tensor, or torchvision.nms.default: the last part is the overload
    if len(parts) == 3 and parts[0] != "torch":
        return parts[1]
    if parts[-1] == "__get__" and len(parts) > 1:
        return parts[-2]
    name = parts[-1]
    return _DUNDER.get(name.strip("_"), name.strip("_")) if name.startswith("__") else name


_DUNDER = {
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "radd": "add",
    "rmul": "mul",
    "rsub": "rsub",
    "truediv": "div",
}


def tensor_references(tree: Any) -> Iterator[int]:
    """Yield the indices of the tensors in a JSON tree, in order of appearance."""
    if isinstance(tree, list | tuple):
        for entry in tree:
            yield from tensor_references(entry)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from (value,) if key == "tensor" else tensor_references(value)


def holds_tensor(tree: Any) -> bool:
    """True if a JSON tree refers to a tensor."""
    return any(True for _ in tensor_references(tree))


def plain(tree: Any) -> Any:
    """Remove the tags from a JSON tree, for display and queries. This is not reversible."""
    if isinstance(tree, list):
        return [plain(entry) for entry in tree]
    if isinstance(tree, dict) and len(tree) == 1:
        tag, value = next(iter(tree.items()))
        if tag == "ellipsis":
            return "..."
        if tag == "slice":
            return ":".join("" if part is None else str(plain(part)) for part in value)
        if tag == "dict":
            return {str(key): plain(entry) for key, entry in value}
        return plain(value)
    return tree
