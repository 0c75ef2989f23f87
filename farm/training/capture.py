"""Takes one training step apart at the dispatcher: every aten operator that costs anything, whose it is, and what it holds.

Requirements:

- The second step is recorded: the first makes the optimizer's state.
- Whose backward an operator is, autograd's sequence numbers say: an owner of the forward takes those that are given out while
  it runs, one owner behind the other, and a node of the backward has one of them. What runs between two nodes adds gradients of several users up.
- Looking must not change what runs. Under a dispatch mode autograd adds these gradients into new memory; when nobody looks it
  writes to the first of them, where nobody else holds it. That is done here too.
- Operators of `prim` and of the profiler run no kernel; views and allocations neither.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from farm.errors import CaptureError, FarmError
from farm.operators.allowed import FUNCTION_NAMES, LEAF_CLASSES
from farm.operators.capture import Functions
from farm.operators.cost import flop_counter
from farm.operators.encoding import NotEncodable, TensorTable, encode, tensors_in, written_tensors
from farm.operators.recorder import costs_something
from farm.training.recorded import Owner, StepCall, StepCapture, TensorLife
from farm.training.step import TrainingStep
from farm.types.tuple import OperatorTuple, TensorSpec

_ACCUMULATES = "torch::autograd::AccumulateGrad"


def capture_step(
    step: TrainingStep,
    *,
    device_type: str = "cpu",
    warmed_up: bool = False,
    around: Callable[[int], contextlib.AbstractContextManager[Any]] = lambda number: contextlib.nullcontext(),
) -> StepCapture:
    """Runs two steps and records the second; the tensors may be fake.

    Args:
        warmed_up: the first step was run already; then nobody counts its FLOPs.
        around: entered around every aten operator, by its position in ``operators`` of the result.

    Raises:
        CaptureError: the step raised.
    """
    flops = None
    parameters = {name for name, _ in step.model.named_parameters()}
    try:
        with torch.autograd.set_multithreading_enabled(False):
            if not warmed_up:
                with flop_counter() as counter:
                    step.run()
                flops = counter.get_total_flops()
            step.count_from_one()
            before = _structure(step.model)
            recorder = _Recorder(step, device_type, around)
            with recorder.watching():
                step.run(recorder.stage)
            _check_structure(step.model, before, parameters)
    except FarmError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"The training step reads values that nobody computed: what {error} gives decides what runs, or how much.",
            "Have the step do the same whatever the values are; a CUDA graph cannot hold it otherwise, either.",
        ) from error
    except Exception as error:
        raise CaptureError(
            f"The training step raised: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Run one iteration alone on this input first; data-dependent shapes cannot be captured.",
        ) from error
    return recorder.result(flops)


def _structure(model: nn.Module) -> dict[str, int]:
    return {name: id(part) for name, part in (*model.named_modules(), *model.named_parameters())}


def _check_structure(model: nn.Module, before: dict[str, int], parameters: set[str]) -> None:
    """
    Args:
        before: as it was when the recorded step began.
        parameters: that there were before the first step.

    Raises:
        CaptureError: it is not what it was, and neither is what a step computes.
    """
    after = _structure(model)
    came = [name for name in after if after[name] != before.get(name)]
    came += [name for name, _ in model.named_parameters() if name not in parameters]
    went = [name for name in (*before, *parameters) if name not in after]
    if came or went:
        name = (came or went)[0]
        raise CaptureError(
            f"The model changes its own structure while it is trained: '{name}' {'is new' if came else 'has gone'}.",
            "Make all of it before the first step: what is measured is one step, again and again.",
        )


class _Recorder:
    def __init__(
        self,
        step: TrainingStep,
        device_type: str,
        around: Callable[[int], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.step, self.device_type, self.around = step, device_type, around
        self.now = "zero_grad"
        self.path = ""
        self.paths = {id(module): name for name, module in step.model.named_modules()}
        self.owners: list[Owner] = []
        self.open: int | None = None  # the owner whose call runs
        self.again: dict[tuple[str, str], list[int]] = {}  # owners of the forward, for what is computed anew
        self.begins: list[int] = []  # the first sequence number of each owner, with its end and index beside it
        self.ends: list[tuple[int, int]] = []
        self.node: Any = None
        self.began: Any = None  # the first node of the backward
        self.tuples: dict[str, OperatorTuple] = {}
        self.known: dict[Any, OperatorTuple] = {}
        self.calls: list[StepCall] = []
        self.operators: list[int | None] = []  # of each aten operator its call
        self.unowned: list[str] = []
        self.overlaps: list[str] = []
        self.memory = _Memory(step)

    # ------------------------------------------------------------------------------------------------ stages

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _observed_modules(self), _observed_functions(self), Functions(self), _Operators(self):
            yield

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.now = name
        self.node = self.began = None
        yield

    def before_backward(self, tensor: torch.Tensor) -> None:
        """Know, of every node of the graph behind ``tensor``, when it begins and when it has ended."""
        seen, waiting = set(), [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_prehook(lambda *_, node=node: self._enter(node))
            node.register_hook(lambda *_: self._leave())
            waiting.extend(behind for behind, _ in node.next_functions)

    def _enter(self, node: Any) -> None:
        self.node = node
        self.began = self.began or node

    def _leave(self) -> None:
        self.node = None

    # ------------------------------------------------------------------------------------------------ owners

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.open is not None:
            return original(module, *args, **kwargs)
        outer, self.path = self.path, self.paths.get(id(module), self.path)
        if type(module) in LEAF_CLASSES:
            with self.owner(type(module).__name__), torch._C.DisableTorchFunction():
                out = original(module, *args, **kwargs)
        elif self.now == "backward" and self.node is not None:
            with Functions(self):  # function modes are off inside backward
                out = original(module, *args, **kwargs)
        else:
            out = original(module, *args, **kwargs)
        self.path = outer
        return out

    def call_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.Tensor.backward:
            self.before_backward(args[0])
            return func(*args, **kwargs)
        if self.open is not None or self.now not in ("forward", "loss", "backward"):
            return func(*args, **kwargs)
        name: str = FUNCTION_NAMES.get(func) or getattr(func, "__name__", "") or str(func)
        with self.owner(name.rpartition(".")[2]):
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def owner(self, what: str) -> Iterator[None]:
        """The slot is taken while a leaf module or a function runs."""
        if self.open is not None:
            yield
            return
        key = self.path, what
        if self.now == "backward":  # computed anew: the same calls in the same order
            waiting = self.again.get(key)
            self.open = waiting.pop(0) if waiting else self._new(what)
            try:
                yield
            finally:
                self.open = None
            return
        self.open = self._new(what)
        self.again.setdefault(key, []).append(self.open)
        begin = torch.autograd._get_sequence_nr()
        try:
            yield
        finally:
            end = torch.autograd._get_sequence_nr()
            if self.ends and begin < self.ends[-1][0]:  # each thread counts for itself
                self.overlaps.append(
                    f"{what} at '{self.path}': autograd's numbers go back there, as in another thread, and do not tell its "
                    "backward from others'"
                )
            else:
                self.begins.append(begin)
                self.ends.append((end, self.open))
            self.open = None

    def _new(self, what: str) -> int:
        self.owners.append(Owner(len(self.owners), self.path, what, self.now))
        return len(self.owners) - 1

    def _owner_of(self, node: Any) -> int | None:
        number = node._sequence_nr()
        place = bisect.bisect_right(self.begins, number) - 1
        while place >= 0 and self.begins[place] <= number:
            end, owner = self.ends[place]
            if number < end:
                return owner
            if self.begins[place] < number:
                break
            place -= 1
        return None

    def _part(self) -> tuple[str, int | None] | None:
        """The part of what runs now, and its owner; None where it has none."""
        if self.now in ("optimizer", "zero_grad"):
            return "optimizer", None
        if self.now in ("forward", "loss"):
            return (self.now, self.open) if self.open is not None else None
        if self.open is not None:
            return "recomputation", self.open
        if self.began is None:  # the gradient of the loss itself
            return "loss", None
        if self.node is None or self.node.name() == _ACCUMULATES:
            return "accumulation", None
        owner = self._owner_of(self.node)
        if owner is None:
            return None
        return ("loss" if self.owners[owner].stage == "loss" else "backward"), owner

    # ------------------------------------------------------------------------------------------------ operators

    def aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        between = self.now == "backward" and self.open is None and self.node is None
        if between and func is torch.ops.aten.add.Tensor and _alone(args[0]):
            func = torch.ops.aten.add_.Tensor
        number = len(self.operators)
        self.operators.append(None)
        with self.around(number):
            out = func(*args, **kwargs)
        out = _as_computed(func, args, out)
        counted = func is torch.ops.aten._local_scalar_dense.default and self.now == "optimizer"  # steps, by the host
        if func.namespace == "aten" and not counted and costs_something(func, args, kwargs, out):
            calls = len(self.calls)
            self._record(func, args, kwargs, out)
            self.operators[number] = calls if len(self.calls) > calls else None
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = str(func)
        found = self._part()
        if found is None:
            where = self.node.name() if self.node is not None else f"'{self.path}'"
            self.unowned.append(f"{name} in the {self.now} at {where}: no owner")
            return
        part, owner = found
        given = list(tensors_in((args, kwargs)))
        table = TensorTable({id(tensor): self.memory.role_in_tuple(tensor) for tensor in given})
        try:
            arguments = tuple(encode(value, table) for value in args)
            keywords = {key: encode(value, table) for key, value in kwargs.items()}
        except NotEncodable as error:
            self.unowned.append(f"{name} in the {self.now}: {error}")
            return
        layouts = table.layouts(table.storages())
        key = repr((name, arguments, keywords)), layouts
        if key not in self.known:
            tensors = tuple(TensorSpec(*layout) for layout in layouts)
            self.known[key] = OperatorTuple(name, "aten", {}, arguments, keywords, tensors)
        spec = self.known[key]
        self.tuples.setdefault(spec.id, spec)
        index = len(self.calls)
        label = func._schema.name.removeprefix("aten::")
        reads = tuple(dict.fromkeys(self.memory.number(tensor, index, label) for tensor in given))
        made = itertools.chain(written_tensors(func, args, kwargs), tensors_in(out))
        writes = tuple(dict.fromkeys(self.memory.number(tensor, index, label) for tensor in made))
        self.calls.append(StepCall(index, spec.id, self.now, part, owner, reads, writes))
        self.memory.used(index, (*reads, *writes))

    def result(self, flops: int | None) -> StepCapture:
        self.memory.after(len(self.calls))
        return StepCapture(
            tuples=self.tuples,
            calls=tuple(self.calls),
            owners=tuple(self.owners),
            tensors=self.memory.lives(self.calls),
            unowned=tuple(self.unowned),
            overlaps=tuple(self.overlaps),
            loss=self.step.loss.name if self.step.loss else "",
            device_type=self.device_type,
            operators=tuple(self.operators),
            integers=self.memory.integers,
            flops=flops,
        )


def _alone(tensor: torch.Tensor) -> bool:
    """Whether nobody but autograd's buffer holds a gradient, so that it may be added to where it lies."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= _HELD_BY_BUFFER


_HELD_BY_BUFFER = 3


#: Which of its arguments is the weight of a normalization.
_WEIGHT_OF = {
    torch.ops.aten.native_batch_norm.default: 1,
    torch.ops.aten.native_group_norm.default: 1,
    torch.ops.aten.native_layer_norm.default: 2,
}


def _as_computed(func: Any, args: Any, out: Any) -> Any:
    """What an operator gives where fake tensors are told otherwise; real ones stay as they are.

    Under autocast the statistics of a normalization are in the type of its weights. The gradient of a layer norm's input is contiguous,
    that of a batch norm's is laid out as the input, that of a hardswish's as a product of what it is given.
    """
    if func in _WEIGHT_OF:
        weight = args[_WEIGHT_OF[func]]
        if weight is not None and weight.dtype != args[0].dtype:
            return out[0], *(statistics.to(weight.dtype) for statistics in out[1:])
    if func is torch.ops.aten.native_layer_norm_backward.default and out[0] is not None:
        return out[0].contiguous(), *out[1:]
    if func is torch.ops.aten.native_batch_norm_backward.default and isinstance(out[0], FakeTensor):
        return torch.empty_like(args[1]), *out[1:]
    if func is torch.ops.aten.hardswish_backward.default and isinstance(out, FakeTensor):
        return args[0] * args[1]
    return out


class _Memory:
    """Storages as they come and go, and what they are."""

    def __init__(self, step: TrainingStep) -> None:
        self.numbers: dict[int, int] = {}  # of a live storage, by its address
        self.refs: list[StorageWeakRef] = []
        self.facts: list[dict[str, Any]] = []
        self.waiting: set[int] = set()  # storages that are not yet released
        self.integers: dict[int, torch.UntypedStorage] = {}  # of those, what was there before the step
        self.step = step
        for name, weight in step.model.named_parameters():
            self._there(weight, name, "parameter")
        for name, buffer in step.model.named_buffers():
            self._there(buffer, name, "buffer")
        names = {id(parameter): name for name, parameter in step.model.named_parameters()}
        for parameter, state in step.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._there(value, f"{names.get(id(parameter), '')}.{key}", "optimizer state")
        for name in ("_scale", "_growth_tracker") if step.scaler is not None else ():
            self._there(getattr(step.scaler, name), f"scaler.{name.strip('_')}", "optimizer state")
        for name, trained in step.model.named_parameters():
            if trained.grad is not None:
                self._there(trained.grad, f"{name}.grad", "gradient")
        for number, tensor in enumerate(tensors_in(step.inputs)):
            self._there(tensor, f"input {number}", "input")
        for number, tensor in enumerate(step.loss.targets if step.loss else ()):
            self._there(tensor, f"target {number}", "input")

    def _there(self, tensor: torch.Tensor, name: str, role: str) -> None:
        if _key(tensor) not in self.numbers:
            number = self._add(tensor, name, role, born=-1)
            if not tensor.is_floating_point():
                self.integers[number] = tensor.untyped_storage()

    def _add(self, tensor: torch.Tensor, name: str, role: str, born: int) -> int:
        storage = tensor.untyped_storage()
        number = len(self.facts)
        self.numbers[storage._cdata] = number
        self.refs.append(StorageWeakRef(storage))  # the address is not used again while this is held
        self.waiting.add(number)
        self.facts.append(
            {
                "name": name,
                "role": role,
                "shape": tuple(map(int, tensor.shape)),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "size_bytes": storage.nbytes(),
                "born": born,
                "released": None,
                "uses": [],
            }
        )
        return number

    def role_in_tuple(self, tensor: torch.Tensor) -> str:
        number = self.numbers.get(_key(tensor))
        role = self.facts[number]["role"] if number is not None else ""
        return {"parameter": "parameter", "buffer": "buffer", "optimizer state": "buffer"}.get(role, "activation")

    def number(self, tensor: torch.Tensor, index: int, label: str) -> int:
        found = self.numbers.get(_key(tensor))
        return self._add(tensor, label, "", born=index) if found is None else found

    def used(self, index: int, numbers: tuple[int, ...]) -> None:
        for number in dict.fromkeys(numbers):
            self.facts[number]["uses"].append(index)
        self.after(index)

    def after(self, index: int) -> None:
        """Note what has gone since the call before this one."""
        gone = [number for number in self.waiting if self.refs[number].expired()]
        for number in gone:
            self.waiting.discard(number)
            self.facts[number]["released"] = max(index - 1, self.facts[number]["born"])

    def lives(self, calls: list[StepCall]) -> tuple[TensorLife, ...]:
        gradients = {_key(one.grad): name for name, one in self.step.model.named_parameters() if one.grad is not None}
        for key, name in gradients.items():
            number = self.numbers.get(key)
            if number is not None:
                self.facts[number].update(role="gradient", name=f"{name}.grad")
        found = []
        for number, facts in enumerate(self.facts):
            uses = tuple(facts["uses"])
            role = facts["role"] or self._kind(facts, uses, calls)
            found.append(TensorLife(number, **{**facts, "uses": uses, "role": role}))
        return tuple(found)

    def _kind(self, facts: dict[str, Any], uses: tuple[int, ...], calls: list[StepCall]) -> str:
        made_before = facts["born"] >= 0 and calls[facts["born"]].stage in ("forward", "loss")
        return "activation" if made_before and uses and calls[uses[-1]].stage == "backward" else "temporary"


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ------------------------------------------------------------------------------------------------ watching


class _Operators(TorchDispatchMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        with torch._C.DisableTorchFunction():
            return self.recorder.aten(func, args, kwargs or {})


@contextlib.contextmanager
def _observed_modules(recorder: _Recorder) -> Iterator[None]:
    original = nn.Module.__call__

    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original, module, args, kwargs)

    nn.Module.__call__ = observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _observed_functions(recorder: _Recorder) -> Iterator[None]:
    """Custom autograd functions call the dispatcher without being a function of PyTorch's own."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.owner(cls.__name__):
            return original.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
