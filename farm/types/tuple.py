"""What one operator call is, as plain JSON: the currency that travels, is stored and is measured.

Requirements this file answers:

- A tuple is a description, not code. Whatever arrives as JSON is validated here, with bounded sizes, before
  anything looks at it; nothing in it is evaluated, unpickled or imported.
- Its id is a hash of its canonical form: equal on every machine, in every process and Python version, and
  blind to which model asked, which weights it held and which addresses its tensors had.
- It holds what decides which kernels run: parameters, shapes, dtypes, strides, which arguments are one and the
  same tensor (self-attention called with one tensor three times takes another path than with three clones),
  and which tensors share a storage and at what offset.

No torch in this file: the command line, the queues and the simulated cards read tuples without it.

Values that JSON lacks are written as an object with one key: ``{"tensor": 0}`` (an index into ``tensors``),
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"slice": [start, stop, step]}``, ``{"ellipsis": true}``,
``{"dtype": "float32"}``, ``{"device": "run"}`` (always the device of the run), ``{"memory_format": "channels_last"}``,
``{"layout": "strided"}``, ``{"float": "inf"}`` and ``{"complex": [real, imaginary]}``. A JSON list is a list.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1

ROLES = ("parameter", "buffer", "activation")
KINDS = ("module", "function", "aten")

#: dtype -> (bytes of one element, short form for labels)
DTYPES: dict[str, tuple[int, str]] = {
    "float64": (8, "fp64"),
    "float32": (4, "fp32"),
    "float16": (2, "fp16"),
    "bfloat16": (2, "bf16"),
    "float8_e4m3fn": (1, "fp8e4"),
    "float8_e5m2": (1, "fp8e5"),
    "complex64": (8, "c64"),
    "complex128": (16, "c128"),
    "int64": (8, "i64"),
    "int32": (4, "i32"),
    "int16": (2, "i16"),
    "int8": (1, "i8"),
    "uint8": (1, "u8"),
    "uint16": (2, "u16"),
    "uint32": (4, "u32"),
    "uint64": (8, "u64"),
    "bool": (1, "bool"),
}
MEMORY_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
LAYOUTS = ("strided",)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Stride, in elements, that a freshly made tensor of this shape has."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def canonical_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The stride that stands for ``stride`` in a tuple; None for the contiguous one.

    The stride of a dimension of size 1 addresses nothing, and real and fake tensors disagree on it; it is replaced
    by the contiguous choice. But it decides whether an image of one pixel counts as channels_last, so where that
    would change, the channels_last choice is taken.
    """
    if 0 in shape:
        return None
    plain_stride = list(stride)
    for index in reversed(range(len(shape))):
        if shape[index] == 1:
            last = index == len(shape) - 1
            plain_stride[index] = 1 if last else plain_stride[index + 1] * shape[index + 1]
    chosen = tuple(plain_stride)
    if len(shape) in (4, 5) and _like_channels_last(shape, stride) != _like_channels_last(shape, chosen):
        chosen = stride
    return None if chosen == contiguous_stride(shape) else chosen


def _like_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    # The test that torch applies when it suggests a memory format (c10/core/MemoryFormat.h).
    least = 0
    if stride[1] == 0:
        return False
    for index in (1, *reversed(range(2, len(shape))), 0):
        if shape[index] == 0 or stride[index] < least:
            return False
        if index == 0 and least == stride[1]:
            return False
        least = stride[index]
        if shape[index] > 1:
            least *= shape[index]
    return True


@dataclass(frozen=True)
class TensorSpec:
    """One distinct tensor of a call.

    ``stride`` and ``offset`` count elements; ``stride`` is None where it is the contiguous one. Tensors of the same ``storage`` share
    memory. ``name`` is the name within the operator's module and empty for arguments. ``zeros`` is the share of
    zeros the data should have (a hint of sweeps, 0 to 1).
    """

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    storage: int = 0
    offset: int = 0
    zeros: float = 0.0

    def __post_init__(self) -> None:
        if self.stride is not None:
            object.__setattr__(self, "stride", canonical_stride(self.shape, self.stride))

    @property
    def held(self) -> bool:
        """Whether it is a buffer or parameter of the model that was given as an argument, and no leaf module's own."""
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
        """Elements from the first to behind the last one that the tensor touches."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    @property
    def distinct_elements(self) -> int:
        """Elements that the tensor touches; an expanded dimension (stride 0) counts once."""
        touched = math.prod(size for size, step in zip(self.shape, self.strides, strict=True) if step != 0 or size == 0)
        return min(touched, self.extent)

    @property
    def distinct_bytes(self) -> int:
        return self.distinct_elements * self.itemsize_bytes

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "role": self.role,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "storage": self.storage,
        }
        if self.name:
            data["name"] = self.name
        if self.stride is not None:
            data["stride"] = list(self.stride)
        if self.offset:
            data["offset"] = self.offset
        if self.zeros:
            data["zeros"] = self.zeros
        return data


@dataclass(frozen=True, eq=False)
class OperatorTuple:
    """An operator, its parameters and the specs of its inputs. Equal when the ids are equal.

    ``kind`` is 'module', 'function' (of PyTorch's public API) or 'aten' (what these call, forward and backward, by the name
    of its overload: ``aten.convolution_backward.default``).

    ``parameters`` are the constructor's arguments of a module (empty for functions), ``arguments`` and
    ``keywords`` those of the call; all three are JSON trees as the head of this file describes.
    """

    operator: str
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorSpec, ...] = ()
    training: bool = False
    direction: str = "forward"

    @functools.cached_property
    def id(self) -> str:
        """32 hexadecimal characters."""
        return hashlib.sha256(self._canonical.encode("ascii")).hexdigest()[:32]

    @functools.cached_property
    def _canonical(self) -> str:
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorTuple) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<OperatorTuple {self.id[:8]} {self.short_name}>"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "operator": self.operator,
            "kind": self.kind,
            "parameters": dict(self.parameters),
            "arguments": list(self.arguments),
            "keywords": dict(self.keywords),
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "training": self.training,
            "direction": self.direction,
        }

    @property
    def short_name(self) -> str:
        """'Conv2d', 'add', 'convolution_backward': what tables group by."""
        return short_name_of(self.operator)

    @property
    def activations(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == "activation")

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors passed in the call, in order, repeated where one tensor is passed twice."""
        trees = [*self.arguments, *self.keywords.values()]
        return tuple(self.tensors[index].shape for tree in trees for index in tensor_references(tree))

    def parameters_for_query(self) -> dict[str, Any]:
        """The parameters as a flat object for a JSON column: ``{"in_channels": 64, "kernel_size": [3, 3]}``.

        Arguments of the call that are not tensors stand beside them, positional ones as ``argument_1``.
        """
        flat = {name: plain(value) for name, value in self.parameters.items()}
        for index, value in enumerate(self.arguments):
            if not any(True for _ in tensor_references(value)):
                flat[f"argument_{index}"] = plain(value)
        for name, value in self.keywords.items():
            if not any(True for _ in tensor_references(value)):
                flat.setdefault(name, plain(value))
        return flat


def short_name_of(operator: str) -> str:
    """See `OperatorTuple.short_name`."""
    parts = operator.split(".")
    if parts[0] == "aten":  # aten.mul.Tensor: the last part says which of several of the name
        return parts[1]
    if parts[-1] == "__get__" and len(parts) > 1:
        return parts[-2]
    if not parts[-1].startswith("__"):
        return parts[-1]
    name = parts[-1].strip("_")
    return _DUNDER.get(name, name)


_DUNDER = {"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "radd": "add", "rmul": "mul"}
_DUNDER |= {"rsub": "rsub", "truediv": "div"}


def tensor_references(tree: Any) -> Iterator[int]:
    """Indices of the tensors in a JSON tree, in order of appearance."""
    if isinstance(tree, list | tuple):
        for entry in tree:
            yield from tensor_references(entry)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key == "tensor":
                yield value
            else:
                yield from tensor_references(value)


def plain(tree: Any) -> Any:
    """A JSON tree without its tags, for people and queries (not reversible)."""
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
