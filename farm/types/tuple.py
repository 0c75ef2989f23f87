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
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from farm.errors import TupleRejected
from farm.types.collective import problem_of
from farm.types.distribution import MOST_NUMBERS, Distribution
from farm.types.fields import content_id, names_of

SCHEMA = 1

ROLES = ("parameter", "buffer", "activation")
KINDS = ("module", "function", "aten", "kernel", "collective")

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
    found: dict[str, Any] = _names()[key]
    return found


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
    if len(shape) in (4, 5) and _like_channels_last(shape, stride) != _like_channels_last(
        shape, chosen
    ):
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
        found = {name: value for name, value in vars(self).items() if value or name in _REQUIRED}
        found |= {"values": self.values.to_json()} if self.values else {}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
        }


_REQUIRED = ("role", "shape", "dtype", "storage")


@dataclass(frozen=True, eq=False)
class OperatorTuple:
    """An operator, its parameters and the specs of its inputs. Equal if the ids are equal.

    ``kind`` is 'module', 'function' (of PyTorch's public API), 'aten' (called by these, forward and
    backward; its name includes the overload: ``aten.convolution_backward.default``) or 'kernel'
    (generated by torch.compile, see `farm.operators.kernels`; named by language and kind:
    ``triton.reduction``) or 'collective' (`farm.types.collective`). ``parameters`` are the
    constructor's arguments of a module (empty for functions), ``arguments`` and ``keywords`` those
    of the call. All three are JSON trees (see the module docstring)."""

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
        return content_id(self.to_json())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorTuple) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<OperatorTuple {self.id[:8]} {self.short_name}>"

    def to_json(self) -> dict[str, Any]:
        data = {"schema": SCHEMA, **{name: getattr(self, name) for name in names_of(OperatorTuple)}}
        data |= {"parameters": dict(self.parameters), "arguments": list(self.arguments)}
        return data | {
            "keywords": dict(self.keywords),
            "tensors": [tensor.to_json() for tensor in self.tensors],
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
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors passed in the call, in order. A tensor that is passed twice is
        listed twice.
        """
        trees = [*self.arguments, *self.keywords.values()]
        return tuple(
            self.tensors[index].shape for tree in trees for index in tensor_references(tree)
        )

    def parameters_for_query(self) -> dict[str, Any]:
        """The parameters as a flat object for a JSON column: ``{"in_channels": 64, "kernel_size":
        [3, 3]}``.

        It also holds the arguments of the call that are not tensors; a positional one is named
        ``argument_1``."""
        flat = dict(self.parameters)
        call = {f"argument_{index}": tree for index, tree in enumerate(self.arguments)} | dict(
            self.keywords
        )
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
    def all_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def held_bytes(self) -> int:
        """Size of all parameters and buffers that one call uses. Unit: bytes."""
        held = [one for one in self.spec["tensors"] if one["role"] != "activation"]
        return sum(math.prod(one["shape"]) * DTYPES[one["dtype"]][0] for one in held)


def shapes_passed(spec: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return `OperatorTuple.input_shapes` for a stored description."""
    trees = [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
    return tuple(
        tuple(spec["tensors"][index]["shape"])
        for tree in trees
        for index in tensor_references(tree)
    )


def dtype_of_call(spec: Mapping[str, Any]) -> str | None:
    """Return the dtype of the first floating-point tensor, else of the first tensor; None if there
    is no tensor.
    """
    dtypes = [tensor["dtype"] for tensor in spec.get("tensors") or ()]
    floating = (
        name for name in dtypes if name in DTYPES and DTYPES[name][1][0] in "fb" and name != "bool"
    )
    return next(floating, dtypes[0] if dtypes else None)


def short_name_of(operator: str) -> str:
    """See `OperatorTuple.short_name`."""
    parts = operator.split(".")
    if parts[0] == "aten":  # aten.mul.Tensor: the last part is the overload
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
}
_DUNDER |= {"rsub": "rsub", "truediv": "div"}


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


# ----- validation of JSON from a database, a file or a message, with bounds on every size

# The bounds are far above what models need, and far below sizes that harm a worker.
_MAX_TEXT = 200
# an optimizer updates all parameters in one call: five lists of 897 of efficientnet_v2_l
_MAX_TENSORS = 8192
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**40
_MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 12
_MAX_NODES = 20_000
_OVERLOAD = re.compile(r"aten\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+\Z")

_NEXT_STEP = "Capture the model again with this version. Do not edit a tuple by hand."


def _reject(where: str, problem: str) -> TupleRejected:
    return TupleRejected(f"Not an operator tuple: {where} {problem}.", _NEXT_STEP)


def parse(data: Any) -> OperatorTuple:
    """Validate ``data`` (the result of ``json.loads``) and return the tuple that it describes.
    Raises only `TupleRejected`, with the name of the wrong key."""
    try:
        return _parse(data)
    except TupleRejected:
        raise
    except ValueError as error:
        first = error.errors()[0]  # type: ignore[attr-defined]  # Pydantic's ValidationError
        raise _reject(
            ".".join(map(str, first["loc"])) or "it", f"is wrong: {first['msg']}"
        ) from error
    except Exception as error:  # an unforeseen error must not end the worker
        raise TupleRejected(
            f"Not an operator tuple: {type(error).__name__}.", _NEXT_STEP
        ) from error


@functools.cache
def _json_type() -> Any:
    """Return the Pydantic model of a tuple's JSON. `_check_tree` checks the trees of values."""
    from pydantic import ConfigDict, Field, create_model  # late: creating a tuple does not need it

    create: Any = create_model
    strict = ConfigDict(extra="forbid", strict=True)
    name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$", max_length=_MAX_TEXT)]
    size = Annotated[int, Field(ge=0, le=_MAX_SIZE)]
    sizes = Annotated[list[size], Field(max_length=_MAX_DIMENSIONS)]  # type: ignore[valid-type]
    share = Annotated[float, Field(ge=0, le=1)]
    numbers = Annotated[list[size], Field(max_length=MOST_NUMBERS)]  # type: ignore[valid-type]
    values = create("values", __config__=strict, form=(name, ...), numbers=(numbers, ...))
    tensor = create(
        "tensor",
        __config__=strict,
        role=(Literal[ROLES], ...),
        name=(name, ""),
        shape=(sizes, ...),
        dtype=(Literal[tuple(DTYPES)], ...),
        stride=(sizes, None),
        storage=(size, ...),
        offset=(size, 0),
        zeros=(share, 0.0),
        bits=(Annotated[list[Literal[BITS]], Field(max_length=len(BITS))], []),  # type: ignore[valid-type]
        values=(values, None),
    )
    return create(
        "tuple",
        __config__=strict,
        schema_=(int, Field(alias="schema", ge=SCHEMA, le=SCHEMA)),
        operator=(name, ...),
        kind=(Literal[KINDS], ...),
        parameters=(dict[name, Any], ...),  # type: ignore[valid-type]
        arguments=(list[Any], ...),
        keywords=(dict[name, Any], ...),  # type: ignore[valid-type]
        tensors=(Annotated[list[tensor], Field(max_length=_MAX_TENSORS)], ...),  # type: ignore[valid-type]
        training=(bool, ...),
        direction=(Literal["forward"], ...),
    )


def _parse(data: Any) -> OperatorTuple:
    found = _json_type().model_validate(data)
    if found.kind == "aten" and not _OVERLOAD.match(found.operator):
        raise _reject("operator", "is not the name of an overload of aten")
    if found.kind not in ("module", "kernel", "collective") and found.parameters:
        raise _reject("parameters", "must be empty, because the operator is not a module")
    tensors = _tensors(found)
    if found.kind == "kernel":
        _check_kernel(found.parameters, len(tensors))
    if found.kind == "collective":
        shapes = [tensor.shape for tensor in tensors if tensor.stride is None and not tensor.offset]
        if problem := problem_of(found.operator, found.parameters, shapes):
            raise _reject("operator", problem)
        if found.arguments != [{"tensor": 0}] or found.keywords:
            raise _reject("arguments", "must be one tensor")
    budget = [_MAX_NODES]
    for name, tree in found.parameters.items():
        _check_tree(tree, f"parameters.{name}", 0, budget, 0)
    for name, tree in (*(("arguments", tree) for tree in found.arguments), *found.keywords.items()):
        _check_tree(tree, name, len(tensors), budget, 0)
    used = set(tensor_references([found.arguments, list(found.keywords.values())]))
    for index, tensor in enumerate(tensors):
        if not tensor.name and index not in used:
            raise _reject(f"tensors.{index}", "is used by no argument")
    given = {
        name: getattr(found, name)
        for name in ("operator", "kind", "parameters", "keywords", "training")
    }
    return OperatorTuple(**given, arguments=tuple(found.arguments), tensors=tensors)


def _check_kernel(parameters: Mapping[str, Any], tensors: int) -> None:
    """Check the parameters of a generated kernel (`farm.operators.kernels`); `_check_tree` checks
    their values.
    """
    needed, source = {"source", "fused", "config", "writes", "outputs"}, parameters.get("source")
    if set(parameters) - {"compiler"} != needed:
        raise _reject("parameters", "are not those of a generated kernel")
    if (
        type(source) is not str
        or not re.fullmatch("[0-9a-f]{32}", source)
        or type(parameters["fused"]) is not str
    ):
        raise _reject("parameters.source", "is not the hash of a source")
    for name in ("writes", "outputs"):
        numbers = parameters[name]
        if type(numbers) is not list or any(
            type(one) is not int or not 0 <= one < tensors for one in numbers
        ):
            raise _reject(f"parameters.{name}", f"refers to none of the {tensors} tensors")


def _tensors(found: Any) -> tuple[TensorSpec, ...]:
    tensors: list[TensorSpec] = []
    names: set[str] = set()
    storages = 0
    for index, one in enumerate(found.tensors):
        where = f"tensors.{index}"
        if one.name and (found.kind != "module" or one.role == "activation" or one.name in names):
            raise _reject(
                f"{where}.name", "must be unique, and only a module's own tensors have names"
            )
        if one.stride is not None and len(one.stride) != len(one.shape):
            raise _reject(f"{where}.stride", "must have as many entries as the shape")
        if one.storage > storages:
            raise _reject(f"{where}.storage", f"is not an integer from 0 to {storages}")
        names.add(one.name)
        storages = max(storages, one.storage + 1)
        stride = None if one.stride is None else tuple(one.stride)
        if "conj" in one.bits and not one.dtype.startswith("complex"):
            raise _reject(f"{where}.bits", "has a conjugation, but the numbers are real")
        layout = (one.role, one.name, tuple(one.shape), one.dtype, stride, one.storage, one.offset)
        values = _values(one.values, f"{where}.values")
        spec = TensorSpec(*layout, one.zeros, tuple(one.bits), values)
        if spec.numel > _MAX_SIZE or spec.extent + spec.offset > _MAX_SIZE:
            raise _reject(where, "is larger than the memory of any card")
        tensors.append(spec)
    return tuple(tensors)


def _values(given: Any, where: str) -> Distribution | None:
    """The values of an input. Whether they fit the operator is checked before it is built."""
    if given is None:
        return None
    values = Distribution(given.form, tuple(given.numbers))
    if problem := values.problem():
        raise _reject(where, problem)
    return values


def _check_tree(tree: Any, where: str, tensors: int, budget: list[int], depth: int) -> None:
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise _reject(where, "is too deep or too large")
    if tree is None or type(tree) is bool:
        return
    if type(tree) is int:
        if abs(tree) > _MAX_INTEGER:
            raise _reject(where, f"is not an integer from {-_MAX_INTEGER} to {_MAX_INTEGER}")
    elif type(tree) is float:
        if not math.isfinite(tree):
            raise _reject(where, "contains a number that is infinite or NaN")
    elif type(tree) is str:
        if len(tree) > _MAX_TEXT:
            raise _reject(where, f"contains a text of more than {_MAX_TEXT} characters")
    elif type(tree) is list:
        for entry in tree:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif type(tree) is dict and len(tree) == 1:
        _check_tag(*next(iter(tree.items())), where, tensors, budget, depth)
    else:
        raise _reject(where, "contains a value that an operator tuple cannot have")


def _check_tag(
    tag: Any, value: Any, where: str, tensors: int, budget: list[int], depth: int
) -> None:
    if tag == "tensor":
        if type(value) is not int or not 0 <= value < tensors:
            raise _reject(where, f"refers to none of the {tensors} tensors")
    elif type(value) is list and (tag == "tuple" or (tag == "slice" and len(value) == 3)):
        for entry in value:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif tag == "dict" and type(value) is list:
        for pair in value:
            if (
                type(pair) is not list
                or len(pair) != 2
                or type(pair[0]) is not str
                or len(pair[0]) > _MAX_TEXT
            ):
                raise _reject(where, "contains a dict that is not a list of pairs with text keys")
            _check_tree(pair[1], where, tensors, budget, depth + 1)
    elif (
        tag == "named_tuple"
        and type(value) is list
        and len(value) == 2
        and value[0] in NAMED_TUPLES
    ):
        _check_tree(value[1], where, tensors, budget, depth + 1)
    elif tag == "integers" and type(value) is list and len(value) <= MOST_INTEGERS:
        if any(type(number) is not int or not 0 <= number <= _MAX_SIZE for number in value):
            raise _reject(where, "contains a number that is no size")
    elif tag == "complex" and type(value) is list and len(value) == 2:
        if any(type(part) not in (int, float) or not math.isfinite(part) for part in value):
            raise _reject(where, "contains a malformed complex number")
    elif tag == "float" and type(value) is str and len(value) <= 32:
        if not re.fullmatch(r"-?(inf|nan|[0-9.]+e[+-]?[0-9]{1,3})", value, re.ASCII):
            raise _reject(where, "contains a malformed number")
    elif (
        tag not in _CHOICES
        or type(value) is not type(_CHOICES[tag][0])
        or value not in _CHOICES[tag]
    ):
        raise _reject(where, "contains a value of an unknown kind")


#: Tag -> the values that it accepts.
_CHOICES: dict[Any, tuple[Any, ...]] = {
    "ellipsis": (True,),
    "dtype": tuple(DTYPES),
    "device": ("run",),
    "memory_format": MEMORY_FORMATS,
    "layout": LAYOUTS,
}
