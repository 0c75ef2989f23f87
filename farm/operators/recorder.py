"""Keeps the account of one forward pass: who owns each operator call, what it was given, what it read and wrote.

Who owns an operator call: the leaf module of ``torch.nn`` that is running (the exact class, constructed as its
attributes say), else the outermost call of a function of PyTorch's public API. One slot holds the owner; each aten
operator is tagged with it. An aten operator that costs anything and has no owner is a *gap*, one with two owners an
*overlap*; a model is fully described when it has neither.

The recorder is told of calls and operators by `farm.operators.capture`, which watches the pass.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from farm.operators.allowed import FUNCTION_NAMES, LEAF_CLASSES, READS_BACK
from farm.operators.encoding import Given, Layout, NotEncodable, TensorTable, encode, tensors_in, written_tensors
from farm.operators.leaves import describe_leaf
from farm.operators.repeats import Repeats, repeatable
from farm.types.tuple import OperatorTuple, TensorSpec, canonical_stride

#: Called with a call's module path, its operator, its activations, each with whether the call wrote to it, and in the same
#: way the buffers and parameters that it was given as arguments: no leaf module's own, such as caches.
Watch = Callable[[str, str, list[tuple[torch.Tensor, bool]], list[tuple[torch.Tensor, bool]]], None]

UNDER_AUTOCAST = "it runs under autocast, which a tuple does not hold"


@dataclass(frozen=True)
class Call:
    """One operator call in one pass. ``reads`` and ``writes`` index `Capture.storages`.

    Of a training step, ``part`` and ``owner`` say whose it is (`farm.training.recorded`); of a forward pass they are empty.
    """

    index: int
    module_path: str
    tuple_id: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    part: str = ""
    owner: str = ""


@dataclass(frozen=True)
class StorageSpec:
    """A piece of memory that calls read or write; views of one tensor share it."""

    size_bytes: int
    role: str


@dataclass(frozen=True)
class Trace:
    """What one call did: the aten operators that cost anything, in order, and its outputs as text."""

    operators: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Capture:
    """What one forward pass consists of.

    ``gaps`` and ``overlaps`` are texts for people: the aten operator, where, and why. ``operators`` counts the
    aten operators that cost anything, as the auditor saw them; ``traces`` has them by tuple, of its first call.
    ``owners`` has an entry for all that took the owner's slot, free calls too: the index of its call, or None.
    ``integers`` is the memory, by storage, of token ids, positions and masks that no call made; none of it is computed where
    tensors are fake.
    """

    tuples: dict[str, OperatorTuple]
    calls: tuple[Call, ...]
    storages: tuple[StorageSpec, ...]
    gaps: tuple[str, ...]
    overlaps: tuple[str, ...]
    device_type: str
    grad_enabled: bool
    training: bool
    operators: Counter[str]
    traces: dict[str, Trace]
    owners: tuple[int | None, ...] = ()
    integers: dict[int, torch.UntypedStorage] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Calls per tuple id, in order of first appearance."""
        return dict(Counter(call.tuple_id for call in self.calls))

    def __repr__(self) -> str:
        return (
            f"<Capture {len(self.calls)} calls, {len(self.tuples)} tuples, {len(self.gaps)} gaps, "
            f"{len(self.overlaps)} overlaps on {self.device_type}>"
        )


# -------------------------------------------------------------------------------------------- what is free

# Allocations run no kernel and yet return new memory, and so does the mark on a constant of Python's among fake
# tensors: the one thing that schemas do not tell.
_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"})


def _output_text(tensor: torch.Tensor) -> str:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return f"{tuple(shape)} {canonical_stride(shape, stride) or 'contiguous'} {tensor.dtype}"


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def costs_something(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an aten operator runs a kernel: it writes an argument or returns memory that was not there before.

    Views of every sort return the storage of an input, whatever their schema says (``_unsafe_view``).
    """
    if func._schema.is_mutable:
        return torch.Tag.inplace_view not in func.tags
    outputs = list(tensors_in(out))
    if not outputs:
        return torch.Tag.data_dependent_output in func.tags
    if func._schema.name.removeprefix("aten::") in _NO_KERNEL:
        return False
    inputs = {_storage_key(tensor) for tensor in tensors_in((args, kwargs))}
    return any(_storage_key(tensor) not in inputs for tensor in outputs)


_READING = "aten._local_scalar_dense.default"

# ------------------------------------------------------------------------------------------------ recorder


class OpenCall:
    """The call that owns the slot."""

    __slots__ = ("costly", "number", "path", "read", "what", "written")

    def __init__(self, what: str, path: str, number: int) -> None:
        self.what, self.path, self.number = what, path, number
        self.costly: list[str] = []
        self.written: set[int] = set()
        self.read: list[tuple[torch.Tensor, Any]] = []  # each with the value that it was read as


class Recorder:
    def __init__(
        self, model: nn.Module, device_type: str, watch: Watch | None = None, repeats: Repeats | None = None
    ) -> None:
        self.watch, self.repeats = watch, repeats
        self.thread = threading.get_ident()
        self.device_type = device_type
        self.owners: list[OpenCall] = []
        self.path = ""
        self.tuples: dict[str, OperatorTuple] = {}
        self.known: dict[tuple[str, tuple[Layout, ...]], OperatorTuple] = {}
        self.calls: list[Call] = []
        self.owned: list[int | None] = []
        self.around: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None
        self.gaps: list[str] = []
        self.overlaps: list[str] = []
        self.operators: Counter[str] = Counter()
        self.traces: dict[str, Trace] = {}
        self.storages: dict[int, int] = {}
        self.storage_specs: list[StorageSpec] = []
        self.integers: dict[int, torch.UntypedStorage] = {}
        self.kept: list[StorageWeakRef] = []  # an address is not used again while a weak reference holds it
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.roles: dict[int, str] = {}
        self.leaves: dict[int, dict[str, Any] | None] = {}
        for module in model.modules():
            self.roles.update((id(tensor), "parameter") for tensor in module._parameters.values())
            self.roles.update((id(tensor), "buffer") for tensor in module._buffers.values())
            self.leaves[id(module)] = describe_leaf(module) if type(module) in LEAF_CLASSES else None

    def leaf_parameters(self, module: nn.Module) -> dict[str, Any] | None:
        if type(module) not in LEAF_CLASSES:
            return None
        if id(module) not in self.leaves:  # made while the model runs
            return describe_leaf(module)
        return self.leaves[id(module)]

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.owners or threading.get_ident() != self.thread:
            return original(module, *args, **kwargs)
        outer, self.path = self.path, self.paths.get(id(module), self.path)
        parameters = self.leaf_parameters(module)
        if parameters is None:
            out = original(module, *args, **kwargs)
        else:
            call = self._open(type(module).__name__)
            try:
                with torch._C.DisableTorchFunction():
                    out = self._leaf(call, parameters, original, module, args, kwargs)
            finally:
                self.owners.pop()
        self.path = outer  # only on success: after an error the path says where
        return out

    def _leaf(
        self,
        call: OpenCall,
        parameters: dict[str, Any],
        original: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        name = f"torch.nn.{call.what}"
        given = again = None
        repeats = self.repeats if self.repeats is not None and repeatable(module) else None
        if repeats is not None:
            given = self._describe(call, name, parameters, module, args, kwargs)
            again = None if given is None else repeats.again(given)
        if again is not None:
            operators, written, out = again
            self.operators.update(operators)
            call.costly.extend(operators)
            call.written.update(written)
        else:
            with self._around(call):
                out = original(module, *args, **kwargs)
        if call.costly:
            if given is None:
                given = self._describe(call, name, parameters, module, args, kwargs)
            if given is not None:
                self._close(call, given, out)
                if repeats is not None and again is None:
                    repeats.learn(given, call.costly, call.written, out)
        return out

    def call_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.owners or threading.get_ident() != self.thread:
            return func(*args, **kwargs)
        name = FUNCTION_NAMES.get(func)
        call = self._open(name or _text(func))
        try:
            given = again = None
            if self.repeats is not None and name in self.repeats.functions:
                given = self._describe(call, name, {}, None, args, kwargs)
                again = None if given is None else self.repeats.again(given)
            if again is not None and given is not None:
                operators, written, out = again
                self.operators.update(operators)
                call.costly.extend(operators)
                call.written.update(written)
                self._close(call, given, out)
                return out
            with self._around(call):
                out = func(*args, **kwargs)
            if call.costly:
                if call.read and name not in READS_BACK:
                    (args, kwargs), given = self._read_apart(call, args, kwargs), None
                if name is None:
                    self._gap(call, "the function is not in the allow-list")
                elif call.costly and (given := given or self._describe(call, name, {}, None, args, kwargs)):
                    self._close(call, given, out)
                    if (
                        self.repeats is not None
                        and not call.read
                        and self.repeats.learn(given, call.costly, call.written, out)
                    ):
                        self.repeats.functions.add(name)
        finally:
            self.owners.pop()
        return out

    def _open(self, what: str) -> OpenCall:
        call = OpenCall(what, self.path, len(self.owned))
        self.owned.append(None)
        self.owners.append(call)
        return call

    def _around(self, call: OpenCall) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.around is None else self.around(call.number)

    def aten(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not costs_something(func, args, kwargs, out):
            return
        name = str(func)
        self.operators[name] += 1
        if not self.owners:
            self.gaps.append(f"{name} at '{self.path}': no operator call around it")
            return
        if len(self.owners) > 1:
            self.overlaps.append(f"{name} at '{self.path}': {' and '.join(call.what for call in self.owners)}")
        call = self.owners[-1]
        call.costly.append(name)
        if func is torch.ops.aten._local_scalar_dense.default:
            call.read.append((args[0], out))
        call.written.update(map(_storage_key, written_tensors(func, args, kwargs)))

    def _read_apart(self, call: OpenCall, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with numbers where a tensor was given in the place of one (``x[:length]``).

        Reading it is a call of its own: which sizes come out is a matter of its value, and a tuple holds none of a tensor.
        """
        values = {id(tensor): value for tensor, value in call.read}
        args, replaced = _replaced(args, values)
        kwargs, others = _replaced(kwargs, values)
        for tensor, _ in call.read:
            if id(tensor) in replaced | others:
                call.costly.remove(_READING)
                reading = OpenCall("item", call.path, call.number)
                reading.costly.append(_READING)
                if given := self._describe(reading, "torch.Tensor.item", {}, None, (tensor,), {}):
                    self._close(reading, given, None)
        return args, kwargs

    def _gap(self, call: OpenCall, reason: str) -> None:
        self.gaps.extend(f"{name} at '{call.path}' in {call.what}: {reason}" for name in call.costly)

    def _describe(
        self,
        call: OpenCall,
        name: str,
        parameters: dict[str, Any],
        module: nn.Module | None,
        args: Any,
        kwargs: Any,
    ) -> Given | None:
        """What a call is given; None where a tuple cannot hold it, and then what has cost anything is a gap."""
        if torch.is_autocast_enabled(self.device_type):
            self._gap(call, UNDER_AUTOCAST)
            return None
        table = TensorTable(self.roles)
        try:
            if module is not None:
                table.add_module(module)
            arguments = tuple(encode(value, table) for value in args)
            keywords = {key: encode(value, table) for key, value in kwargs.items() if key != "_stacklevel"}
        except NotEncodable as error:
            self._gap(call, str(error))
            return None
        kind = "function" if module is None else "module"
        training = module is not None and module.training
        storages = table.storages()
        layouts = table.layouts(storages)
        key = repr((name, kind, parameters, arguments, keywords, training)), layouts
        if key not in self.known:
            tensors = tuple(TensorSpec(*layout) for layout in layouts)
            self.known[key] = OperatorTuple(name, kind, parameters, arguments, keywords, tensors, training)
        return Given(key, self.known[key], table.tensors, storages)

    def _close(self, call: OpenCall, given: Given, out: Any) -> None:
        spec = given.spec
        if spec.id not in self.tuples:
            self.tuples[spec.id] = spec
            self.traces[spec.id] = Trace(tuple(call.costly), tuple(map(_output_text, tensors_in(out))))
        roles = [tensor.role for tensor in spec.tensors]
        made = len(self.storage_specs)
        behind = {self._storage(tensor, role): tensor for tensor, role in zip(given.tensors, roles, strict=True)}
        reads = tuple(behind)
        for storage, tensor in behind.items():
            if storage >= made and not tensor.is_floating_point() and type(tensor) is not FakeTensor:
                self.integers[storage] = tensor.untyped_storage()
        writes = {self.storages[key] for key in call.written if key in given.storages}
        for tensor in tensors_in(out):
            if _storage_key(tensor) not in given.storages:
                writes.add(self._storage(tensor, "activation"))
        if self.watch is not None:
            shown = list(zip(given.tensors, given.storages, spec.tensors, strict=True))
            activations = [(tensor, key in call.written) for tensor, key, one in shown if one.role == "activation"]
            held = [(tensor, key in call.written) for tensor, key, one in shown if one.held]
            self.watch(call.path, spec.operator, activations, held)
        self.owned[call.number] = len(self.calls)
        self.calls.append(Call(len(self.calls), call.path, spec.id, reads, tuple(sorted(writes))))

    def _storage(self, tensor: torch.Tensor, role: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.kept.append(StorageWeakRef(storage))
            self.storages[key] = len(self.storage_specs)
            self.storage_specs.append(StorageSpec(storage.nbytes(), role))
        return self.storages[key]

    def result(self, grad_enabled: bool, training: bool) -> Capture:
        return Capture(
            tuples=self.tuples,
            calls=tuple(self.calls),
            storages=tuple(self.storage_specs),
            gaps=tuple(self.gaps),
            overlaps=tuple(self.overlaps),
            device_type=self.device_type,
            grad_enabled=grad_enabled,
            training=training,
            operators=self.operators,
            traces=self.traces,
            owners=tuple(self.owned),
            integers=self.integers,
        )


def _replaced(tree: Any, values: dict[int, Any]) -> tuple[Any, set[int]]:
    """The tree with values in the places of tensors, by the ids of these, and the ids of those that were found."""
    found: set[int] = set()

    def other(entry: Any) -> Any:
        if id(entry) in values:
            found.add(id(entry))
            return values[id(entry)]
        if isinstance(entry, slice):
            return slice(other(entry.start), other(entry.stop), other(entry.step))
        if type(entry) in (tuple, list):
            return type(entry)(map(other, entry))
        if type(entry) is dict:
            return {key: other(value) for key, value in entry.items()}
        return entry

    return other(tree), found


def _text(func: Any) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
