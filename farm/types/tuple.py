"""An operator tuple: the description of one operator call as plain JSON, which is sent, stored and measured.

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
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from farm.errors import TupleRejected

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


def words(text: str) -> frozenset[str]:
    """The words of a text, for long sets of names."""
    return frozenset(text.split())


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

    ``stride`` and ``offset`` count elements; ``stride`` is None where it is the contiguous one. Tensors of the same
    ``storage`` share memory. ``name`` is the name within the operator's module and empty for arguments. ``zeros`` is
    the share of zeros the data should have (a hint of sweeps, 0 to 1).
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

    ``kind`` is 'module', 'function' (of PyTorch's public API) or 'aten' (what these call, forward and backward, by the
    name of its overload: ``aten.convolution_backward.default``).

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


@dataclass(frozen=True)
class Cost:
    """The cost of one call of an operator tuple.

    ``flops`` counts 2 per multiply-add and, like PyTorch's counter, only matrix products, convolutions and attention.
    ``bytes`` must be read or written at least: inputs, parameters and outputs, each distinct element once (an expanded
    tensor by its memory), tensors that are written in place twice; if an operator touches only a part of a tensor (a
    row of a cache, some rows of a table), that part.
    """

    flops: int
    bytes: int


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


# ----- validation of JSON from a database, a file or a message, with bounds on every size

# The bounds are far above the needs of a model and far below what harms a worker.
_MAX_TEXT = 200
_MAX_TENSORS = 8192  # an optimizer updates all parameters in one call: five lists of 897 of efficientnet_v2_l
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**40
_MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 12
_MAX_NODES = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_OVERLOAD = re.compile(r"aten\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+\Z")

_NEXT_STEP = "Capture the model again with this version; a tuple is never edited by hand."
_KEYS = {"schema", "operator", "kind", "parameters", "arguments", "keywords", "tensors", "training", "direction"}
_TENSOR_KEYS = {"role", "name", "shape", "dtype", "stride", "storage", "offset", "zeros"}


def _reject(where: str, problem: str) -> TupleRejected:
    return TupleRejected(f"Not an operator tuple: {where} {problem}.", _NEXT_STEP)


def parse(data: Any) -> OperatorTuple:
    """The tuple that ``data`` (the result of ``json.loads``) describes.

    Raises:
        TupleRejected: it describes none; the message names the offending key. Nothing else is ever raised.
    """
    try:
        return _parse(data)
    except TupleRejected:
        raise
    except Exception as error:  # a hole in the validation must still be a refusal, not a dead worker
        raise TupleRejected(f"Not an operator tuple: {type(error).__name__}.", _NEXT_STEP) from error


def _parse(data: Any) -> OperatorTuple:
    if not isinstance(data, dict):
        raise _reject("it", f"is a {type(data).__name__}, not an object")
    if set(data) != _KEYS:
        wrong = sorted(str(key)[:40] for key in set(data) ^ _KEYS)
        raise _reject("its keys", f"are not those of schema {SCHEMA} ({', '.join(wrong[:5])})")
    if type(data["schema"]) is not int or data["schema"] != SCHEMA:
        raise _reject("schema", f"is not {SCHEMA}")
    operator = _name(data["operator"], "operator")
    if data["kind"] not in KINDS or not isinstance(data["kind"], str):
        raise _reject("kind", f"is none of {KINDS}")
    if data["kind"] == "aten" and not _OVERLOAD.match(operator):
        raise _reject("operator", "is not the name of an overload of aten")
    if type(data["training"]) is not bool:
        raise _reject("training", "is not a boolean")
    if not isinstance(data["direction"], str) or data["direction"] != "forward":
        raise _reject("direction", "is not 'forward'")
    tensors = _tensors(data["tensors"], data["kind"])
    budget = [_MAX_NODES]
    parameters = _named_trees(data["parameters"], "parameters", 0, budget)
    if data["kind"] != "module" and parameters:
        raise _reject("parameters", "belong to modules, and this is none")
    if not isinstance(data["arguments"], list):
        raise _reject("arguments", "are not a list")
    for tree in data["arguments"]:
        _check_tree(tree, "arguments", len(tensors), budget, 0)
    keywords = _named_trees(data["keywords"], "keywords", len(tensors), budget)
    used = set(tensor_references([data["arguments"], list(keywords.values())]))
    for index, tensor in enumerate(tensors):
        if not tensor.name and index not in used:
            raise _reject(f"tensors[{index}]", "is used by no argument")
    return OperatorTuple(
        operator=operator,
        kind=data["kind"],
        parameters=parameters,
        arguments=tuple(data["arguments"]),
        keywords=keywords,
        tensors=tensors,
        training=data["training"],
    )


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not _NAME.match(value) or not value.isascii():
        raise _reject(where, "is not a name")
    return value


def _integer(value: Any, where: str, upper: int = _MAX_SIZE, lower: int = 0) -> int:
    if type(value) is not int or not lower <= value <= upper:
        raise _reject(where, f"is not an integer from {lower} to {upper}")
    return value


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise _reject(where, f"is not a list of at most {_MAX_DIMENSIONS} sizes")
    return tuple(_integer(size, where) for size in value)


def _tensors(data: Any, kind: str) -> tuple[TensorSpec, ...]:
    if not isinstance(data, list) or len(data) > _MAX_TENSORS:
        raise _reject("tensors", f"is not a list of at most {_MAX_TENSORS} tensors")
    tensors: list[TensorSpec] = []
    names: set[str] = set()
    storages = 0
    for index, entry in enumerate(data):
        where = f"tensors[{index}]"
        if not isinstance(entry, dict) or not set(entry) <= _TENSOR_KEYS:
            raise _reject(where, "is not an object with the keys of a tensor")
        if not {"role", "shape", "dtype", "storage"} <= set(entry):
            raise _reject(where, "lacks role, shape, dtype or storage")
        if not isinstance(entry["role"], str) or entry["role"] not in ROLES:
            raise _reject(f"{where}.role", f"is none of {ROLES}")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise _reject(f"{where}.dtype", "is no known dtype")
        name = _name(entry["name"], f"{where}.name") if "name" in entry else ""
        if name and (kind != "module" or entry["role"] == "activation" or name in names):
            raise _reject(f"{where}.name", "is not the one name of a module's own tensor")
        names.add(name)
        shape = _sizes(entry["shape"], f"{where}.shape")
        stride = _sizes(entry["stride"], f"{where}.stride") if "stride" in entry else None
        if stride is not None and len(stride) != len(shape):
            raise _reject(f"{where}.stride", "has another length than the shape")
        storage = _integer(entry["storage"], f"{where}.storage", storages)
        storages = max(storages, storage + 1)
        offset = _integer(entry["offset"], f"{where}.offset") if "offset" in entry else 0
        zeros = entry.get("zeros", 0.0)
        if type(zeros) not in (int, float) or not 0 <= zeros <= 1:
            raise _reject(f"{where}.zeros", "is not a share from 0 to 1")
        spec = TensorSpec(entry["role"], name, shape, entry["dtype"], stride, storage, offset, float(zeros))
        if spec.numel > _MAX_SIZE or spec.extent + offset > _MAX_SIZE:
            raise _reject(where, "is larger than any card")
        tensors.append(spec)
    return tuple(tensors)


def _named_trees(data: Any, where: str, tensors: int, budget: list[int]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _reject(where, "is not an object")
    for name, tree in data.items():
        _name(name, f"a name in {where}")
        _check_tree(tree, f"{where}.{name}", tensors, budget, 0)
    return dict(data)


def _check_tree(tree: Any, where: str, tensors: int, budget: list[int], depth: int) -> None:
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise _reject(where, "is too deep or too large")
    if tree is None or type(tree) is bool:
        return
    if type(tree) is int:
        _integer(tree, where, _MAX_INTEGER, -_MAX_INTEGER)
    elif type(tree) is float:
        if not math.isfinite(tree):
            raise _reject(where, "holds a number that JSON does not have")
    elif type(tree) is str:
        if len(tree) > _MAX_TEXT:
            raise _reject(where, "holds too long a text")
    elif type(tree) is list:
        for entry in tree:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif type(tree) is dict and len(tree) == 1:
        _check_tag(*next(iter(tree.items())), where, tensors, budget, depth)
    else:
        raise _reject(where, "holds what is not a value of an operator tuple")


def _check_tag(tag: Any, value: Any, where: str, tensors: int, budget: list[int], depth: int) -> None:
    if tag == "tensor":
        _integer(value, where, tensors - 1)
    elif type(value) is list and (tag == "tuple" or (tag == "slice" and len(value) == 3)):
        for entry in value:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif tag == "dict" and type(value) is list:
        for pair in value:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or len(pair[0]) > _MAX_TEXT:
                raise _reject(where, "holds a dict that is not a list of pairs with text keys")
            _check_tree(pair[1], where, tensors, budget, depth + 1)
    elif tag == "complex" and type(value) is list and len(value) == 2:
        if any(type(part) not in (int, float) or not math.isfinite(part) for part in value):
            raise _reject(where, "holds a malformed complex number")
    elif tag == "float" and type(value) is str and len(value) <= 32:
        if not re.fullmatch(r"-?(inf|nan|[0-9.]+e[+-]?[0-9]{1,3})", value, re.ASCII):
            raise _reject(where, "holds a malformed number")
    elif not (
        (tag == "ellipsis" and value is True)
        or (tag == "dtype" and isinstance(value, str) and value in DTYPES)
        or (tag == "device" and value == "run")
        or (tag == "memory_format" and isinstance(value, str) and value in MEMORY_FORMATS)
        or (tag == "layout" and isinstance(value, str) and value in LAYOUTS)
    ):
        raise _reject(where, "holds an unknown kind of value")
