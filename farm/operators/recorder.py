"""What the recorders of forward passes and of training steps share: the watched calls, descriptions and storages.

One *owner slot* says whose an aten operator is: the leaf module that runs, or the outermost call of a public function.
An aten operator that costs anything and has no owner is a *gap*, one with two owners an *overlap*; a capture without
both is complete.

Watching must not change what runs. An active ``TorchFunctionMode`` and any hook on a module switch off PyTorch's fused
attention path (other operators, other strides after it). So there are no hooks: ``torch.nn.Module.__call__`` is
replaced while the pass runs, and inside a leaf the function mode is disabled; only the dispatch mode sees inside. That
mode sees every aten operator, so none is missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from farm.operators.captured import CapturedCall, CapturedPass, CapturedTensor
from farm.operators.encoding import DescribedCall, Layout, TensorTable, encode, storage_key
from farm.types.tuple import OperatorTuple, TensorSpec

#: Entered around each operator, by its position in `CapturedPass.slots`.
Around = Callable[[int], contextlib.AbstractContextManager[Any]]


class Recorder:
    """Follows one pass of ``model``. Subclasses decide who owns the slot and what becomes a call; their functions
    ``call_module``, ``call_function`` and ``call_aten`` are called instead of what they are given, and run it."""

    def __init__(self, model: nn.Module, device_type: str, around: Around | None = None) -> None:
        self.device_type = device_type
        self.around = around or (lambda number: contextlib.nullcontext())
        self.path = ""  # of the module that runs
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.tuples: dict[str, OperatorTuple] = {}
        self.calls: list[CapturedCall] = []
        self.slots: list[int | None] = []
        self.gaps: list[str] = []
        self.overlaps: list[str] = []
        self.storages = Storages()
        self._specs: dict[tuple[str, tuple[Layout, ...]], OperatorTuple] = {}

    def describe(
        self,
        name: str,
        kind: str,
        args: Any,
        kwargs: Any,
        table: TensorTable,
        parameters: dict[str, Any] | None = None,
        training: bool = False,
    ) -> DescribedCall:
        """The call as a tuple. ``table`` holds the leaf module's own tensors already.

        Raises:
            NotEncodable: a tuple cannot hold one of the arguments.
        """
        arguments = tuple(encode(value, table) for value in args)
        keywords = {key: encode(value, table) for key, value in kwargs.items()}
        layouts, storages = table.layouts()
        key = repr((name, kind, parameters, arguments, keywords, training)), layouts
        if key not in self._specs:
            tensors = tuple(TensorSpec(*layout) for layout in layouts)
            self._specs[key] = OperatorTuple(name, kind, parameters or {}, arguments, keywords, tensors, training)
        return DescribedCall(key, self._specs[key], table.tensors, storages)

    def add_call(self, call: CapturedCall, spec: OperatorTuple) -> None:
        self.tuples.setdefault(spec.id, spec)
        self.calls.append(call)
        for number in dict.fromkeys((*call.reads, *call.writes)):
            self.storages.uses[number].append(call.index)

    def captured_pass(self, **more: Any) -> CapturedPass:
        """What was recorded; ``more`` are the fields of `CapturedPass` that this class does not record."""
        stored = zip(self.storages.tensors, self.storages.uses, strict=True)
        return CapturedPass(
            tuples=self.tuples,
            calls=tuple(self.calls),
            tensors=tuple(dataclasses.replace(tensor, uses=tuple(uses)) for tensor, uses in stored),
            gaps=tuple(self.gaps),
            overlaps=tuple(self.overlaps),
            device_type=self.device_type,
            slots=tuple(self.slots),
            integers=self.storages.integers,
            **more,
        )


class Storages:
    """Numbers the storages of a pass in order of appearance, and keeps what is known of each."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # of live storages, by their address
        self.references: list[StorageWeakRef] = []  # a weak reference keeps the address from being used again
        self.held: set[int] = set()  # numbers of storages that are not known to be released
        self.tensors: list[CapturedTensor] = []  # without their uses
        self.uses: list[list[int]] = []
        self.integers: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor, name: str, role: str, born: int = -1) -> int:
        """The number of the tensor's storage, which is added if it is new."""
        key = storage_key(tensor)
        if key not in self.numbers:
            storage, number = tensor.untyped_storage(), len(self.tensors)
            self.numbers[key] = number
            self.references.append(StorageWeakRef(storage))
            self.held.add(number)
            shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch.")
            self.tensors.append(CapturedTensor(number, name, role, shape, dtype, storage.nbytes(), born, None, ()))
            self.uses.append([])
        return self.numbers[key]

    def change(self, number: int, **values: Any) -> None:
        """Sets fields of a tensor."""
        self.tensors[number] = dataclasses.replace(self.tensors[number], **values)


class WatchedFunctions(TorchFunctionMode):
    """Passes each call of a public function to ``call(function, args, kwargs)``."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


class WatchedOperators(TorchDispatchMode):
    """Passes each aten operator to ``call(operator, args, kwargs)``."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent call on fake tensors; it runs nothing
            return args[0].device
        return self.call(func, args, kwargs or {})


def watched_modules(call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """While active, passes each call of a module to ``call(original, module, args, kwargs)``."""
    original = nn.Module.__call__
    return replaced(nn.Module, "__call__", lambda module, *args, **kwargs: call(original, module, args, kwargs))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While active, an attribute of a class or module is ``value``."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
