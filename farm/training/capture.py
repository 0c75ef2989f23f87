"""Captures one training step at the dispatcher: every aten operator that runs a kernel, its owner,
and the lifetime of tensors.

Requirements:

- The second step is recorded: the first creates the optimizer's state.
- Autograd's sequence numbers identify the owner of a backward operator: each node of the backward
  has the sequence number that autograd assigned while its owner ran in the forward. Operators that
  run between two nodes accumulate gradients.
- Watching must not change what runs. Autograd sums the gradients of several users in the first
  gradient's memory if nothing else refers to it; under a dispatch mode it allocates new memory. The
  recorder restores the sum in place.
- Operators of `prim` and of the profiler run no kernel; views and allocations do not either.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.autograd.function import _SingleLevelFunction

from farm.errors import CaptureError, FarmError, error_text
from farm.operators.capture import (
    ATTENTION,
    Recorder,
    Storages,
    WatchedFunctions,
    WatchedOperators,
    consists_of_others,
    passes_differ,
    watched_modules,
)
from farm.operators.captured import CapturedCall, CapturedPass, Owner, role_in_tuple
from farm.operators.cost import flop_counter, operator_flops
from farm.operators.fake_outputs import as_computed
from farm.operators.unseen import Unseen, raised_by_model
from farm.subjects import collective_calls as collectives
from farm.subjects.allow_list import FUNCTION_NAMES, LEAF_CLASSES
from farm.subjects.encoding import (
    NotEncodable,
    TensorTable,
    costs_something,
    fields_of,
    storage_key,
    tensors_in,
    written_tensors,
)
from farm.training.step import ForwardPass, TrainingStep
from farm.training.streams import Streams
from farm.types.program_state import seeded
from farm.types.replacement import replaced
from farm.types.tensor_kinds import has_composites, is_plain
from farm.types.tuple import OperatorTuple, words

#: Namespaces of operators that split models run around their collectives.
_DISTRIBUTED = words(
    "c10d _c10d_functional _c10d_functional_autograd _dtensor fsdp symm_mem prim profiler"
)
_ACCUMULATES = "torch::autograd::AccumulateGrad"
#: Reference count of a storage that one tensor refers to, such as that in autograd's buffer.
_HELD_BY_AUTOGRAD = torch._C._storage_Use_Count(storage_key(_ALONE := torch.empty(0)))


@torch.enable_grad()
def capture_step(
    step: TrainingStep | ForwardPass,
    *,
    device_type: str = "cpu",
    warmed_up: bool = False,
    with_values: bool = False,
    **about: Any,
) -> CapturedPass:
    """Runs two steps, or two forward passes of a split model, and records the second; the tensors
    may be fake. If it is ``warmed_up``, the first step has already run, and FLOPs are not counted.
    ``with_values``: what runs depends on values, so both steps draw the same random numbers.
    ``about``: of a `Recorder`; ``around`` returns the context to enter around each aten operator.
    Raises `CaptureError` if the step raises an error, or changes the model's structure."""
    flops, unseen = None, Unseen()
    drawn = seeded if with_values else contextlib.nullcontext
    parameters = {name for name, _ in step.model.named_parameters()}
    try:
        with unseen.watching(), torch.autograd.set_multithreading_enabled(False):
            if not warmed_up:
                with drawn(), flop_counter() as counter:
                    step.run()
                flops = counter.get_total_flops()
            step.count_from_one()
            before = _structure(step.model)
            recorder = StepRecorder(step, device_type, **about)
            recorder.unseen = unseen
            with drawn(), recorder.watching_step():
                step.run(recorder.stage)
            _check_structure(step.model, before, parameters)
            captured = recorder.result(flops)
            if flops is not None and _recorded_flops(captured) != flops:
                repeated = _repeated_flops(step, drawn)
                captured = dataclasses.replace(captured, flops=repeated)
    except FarmError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            "The operators of the training step depend on values in tensors: on the result of "
            f"{error}. "
            "The capture computes no values.",
            "Write the step so that its operators do not depend on values. A CUDA graph requires "
            "the same.",
        ) from error
    except Exception as error:
        if "parameters that were not used in producing loss" in error_text(error):
            raise CaptureError(
                "DDP waits for the gradient of each parameter, but the step does not use some of "
                "them.",
                "Give --sharding fsdp, or remove these parameters from the model.",
            ) from error
        raise raised_by_model(
            "The training step raised",
            error,
            "Check that one iteration runs on this input. Shapes that depend on values cannot be "
            "captured.",
        ) from error
    return dataclasses.replace(captured, with_values=with_values)


def _recorded_flops(captured: CapturedPass) -> int:
    traces = captured.traces
    return sum(traces[call.tuple_id].flops for call in captured.calls if call.tuple_id in traces)


def _repeated_flops(
    step: TrainingStep | ForwardPass,
    drawn: Callable[[], contextlib.AbstractContextManager[None]],
) -> int:
    """The FLOPs of a step as it runs again and again. The first one may do more, such as initialize
    a weight. Raises `UnseenOperators` if two further steps differ."""
    counted = []
    for _ in range(2):
        with drawn(), flop_counter() as counter:
            step.run()
        counted.append(counter.get_total_flops())
    if counted[0] != counted[1]:
        raise passes_differ(f"one has {counted[0]:,} FLOP, the next one {counted[1]:,}")
    return counted[0]


def _check_structure(model: nn.Module, before: dict[str, int], parameters: set[str]) -> None:
    """Raise `CaptureError` if the model has other modules or parameters than before a step.
    ``before``: its structure; ``parameters``: the names of its parameters before the first step."""
    after = _structure(model)
    added = [name for name in after if after[name] != before.get(name)]
    added += [name for name, _ in model.named_parameters() if name not in parameters]
    removed = [name for name in (*before, *parameters) if name not in after]
    if added or removed:
        changed = f"'{added[0]}' was added" if added else f"'{removed[0]}' was removed"
        raise CaptureError(
            f"The model changes its structure during the training step: {changed}.",
            "Create all modules before the first step, because the farm repeats one step many "
            "times.",
        )


def _structure(model: nn.Module) -> dict[str, int]:
    return {name: id(part) for name, part in (*model.named_modules(), *model.named_parameters())}


class StepRecorder(Recorder):
    """Records one training step; each aten operator that runs a kernel becomes a call."""

    def __init__(self, step: TrainingStep | ForwardPass, device_type: str, **about: Any) -> None:
        super().__init__(step.model, device_type, **about)
        self.step = step
        self.now = "zero_grad"  # the stage
        self.owners: list[Owner] = []
        self.open: int | None = None  # index of the owner whose call runs
        self.to_recompute: dict[
            tuple[str, str], list[int]
        ] = {}  # (path, name) -> forward owners, in order
        self.begins: list[
            int
        ] = []  # the first sequence number of each owner; `ends` has its end and index
        self.ends: list[tuple[int, int]] = []
        self.node: Any = None  # the node of the backward that runs
        self.first_node: Any = None
        self.storages: _StepStorages = _StepStorages(step)
        # the operators of the attention that runs
        self.in_attention: list[str] | None = None
        self.streams = Streams(device_type if step.split else "cpu")

    @contextlib.contextmanager
    def watching_step(self) -> Iterator[None]:
        original = torch.autograd.Function.__dict__["apply"]
        below: Any = _SingleLevelFunction

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with self.owner(cls.__name__):
                return original.__func__(cls, *args, **kwargs)

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            implementation: Any = super(below, cls)
            with self.owner(cls.__name__):
                return implementation.apply(*args, **kwargs)

        # Custom autograd functions call the dispatcher, but are not public functions of PyTorch.
        custom = replaced(torch.autograd.Function, "apply", classmethod(apply))
        # A module may keep ``MyFunction.apply`` under another name, from before the capture.
        kept = replaced(below, "apply", classmethod(applied))
        functions, operators = (
            WatchedFunctions(self.call_function),
            WatchedOperators(self.call_aten),
        )
        with (
            watched_modules(self.call_module),
            custom,
            kept,
            functions,
            operators,
            self.streams.watched(),
        ):
            yield

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.now = name
        self.node = self.first_node = None
        yield

    def _enter(self, node: Any) -> None:
        self.node, self.first_node = node, self.first_node or node

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self.unseen.in_other_thread():
            return self.module_elsewhere(original, module, args, kwargs)
        if self.open is not None:
            return original(module, *args, **kwargs)
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.within(module))
            if type(module) in LEAF_CLASSES:
                entered.enter_context(self.owner(type(module).__name__))
                if not has_composites(module):
                    entered.enter_context(torch._C.DisableTorchFunction())
            elif self.now == "backward" and self.node is not None:
                # function modes are off inside backward
                entered.enter_context(WatchedFunctions(self.call_function))
            return original(module, *args, **kwargs)

    def call_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        # hooks record when each node of the graph begins and ends
        if func is torch.Tensor.backward:
            visited, waiting = {None}, [args[0].grad_fn]
            while waiting:
                if (node := waiting.pop()) not in visited:
                    visited.add(node)
                    node.register_prehook(lambda *_, node=node: self._enter(node))
                    node.register_hook(lambda *_: self._enter(None))
                    waiting.extend(behind for behind, _ in node.next_functions)
            return func(*args, **kwargs)
        if self.open is not None or self.now not in ("forward", "loss", "backward"):
            return func(*args, **kwargs)
        name: str = FUNCTION_NAMES.get(func) or getattr(func, "__name__", "") or str(func)
        with self.owner(name.rpartition(".")[2]):
            if func is ATTENTION and isinstance(self.step, ForwardPass):
                self.refuse_special_mask(args, kwargs)
                return self.call_aten(func, args, kwargs)
            return self.placed(func, args, kwargs)

    @contextlib.contextmanager
    def owner(self, what: str) -> Iterator[None]:
        """While active, a leaf module or a function has the slot, unless an outer call has it."""
        if self.open is not None:
            yield
            return
        recomputes = self.now == "backward"  # the same calls in the same order as in the forward
        waiting = self.to_recompute.setdefault((self.path, what), [])
        if recomputes and waiting:
            self.open = waiting.pop(0)
        else:
            self.open = len(self.owners)
            self.owners.append(Owner(self.open, self.path, what, self.now))
        begin = torch.autograd._get_sequence_nr()
        try:
            yield
        finally:
            if not recomputes:
                waiting.append(self.open)
                # each thread has its own sequence numbers
                if self.ends and begin < self.ends[-1][0]:
                    self.overlaps.append(
                        f"{what} at '{self.path}': its backward cannot be identified, because "
                        "autograd's sequence "
                        "numbers decrease there, as in another thread"
                    )
                else:
                    self.begins.append(begin)
                    self.ends.append((torch.autograd._get_sequence_nr(), self.open))
            self.open = None

    def _owner_of(self, node: Any) -> int | None:
        number = node._sequence_nr()
        position = bisect.bisect_right(self.begins, number) - 1
        while position >= 0 and self.begins[position] <= number:
            end, owner = self.ends[position]
            if number < end:
                return owner
            if self.begins[position] < number:
                break
            position -= 1
        return None

    def _part(self) -> tuple[str, int | None] | None:
        """The part that runs now and the index of its owner; None if it belongs to no part.

        What DDP and FSDP run outside of all owners belongs to the stage.
        """
        return self._own_part() or ((self.now, None) if self.step.split else None)

    def _own_part(self) -> tuple[str, int | None] | None:
        if self.now in ("optimizer", "zero_grad"):
            return "optimizer", None
        if self.now in ("forward", "loss"):
            return (self.now, self.open) if self.open is not None else None
        if self.open is not None:
            return "recomputation", self.open
        if self.first_node is None:  # the gradient of the loss itself
            return "loss", None
        if self.node is None or self.node.name() == _ACCUMULATES:
            return "accumulation", None
        owner = self._owner_of(self.node)
        if owner is None:
            return None
        stage = "loss" if self.owners[owner].stage == "loss" else "backward"
        return stage, owner

    def call_aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.in_attention is not None:
            out = func(*args, **kwargs)
            if self.costs_something(func, args, kwargs, out):
                self.in_attention.append(str(func))
            return out
        if func is not ATTENTION and consists_of_others(func):
            return self.run_parts(func, args, kwargs)
        if func is not ATTENTION and self.views_special(func, (args, kwargs)):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            added = func is torch.ops.aten.add.Tensor and self.now == "backward"
            # Between two nodes, autograd adds in place to a gradient that only its own buffer
            # refers to.
            if added and self.open is None and self.node is None:
                alone = torch._C._storage_Use_Count(storage_key(args[0])) <= _HELD_BY_AUTOGRAD
                func = torch.ops.aten.add_.Tensor if alone else func
            number = len(self.slots)
            self.slots.append(None)
            inside = self._attention() if func is ATTENTION else contextlib.nullcontext()
            with inside, self.around(number):
                out = func(*args, **kwargs)
            self.views_special(func, out)
            out = as_computed(func, args, out, on_card=self.fakes is not None and self.fakes.stands)
            # The host reads the optimizer's step counts; a graph has them on the card.
            counter = func is torch.ops.aten._local_scalar_dense.default and self.now == "optimizer"
            # A card gets numbers beside a mask, but not for an assignment, as in a split embedding;
            # fakes get both.
            scalar = self.fakes is not None and func is torch.ops.aten.scalar_tensor.default
            user = self.owners[self.open].what if scalar and self.open is not None else ""
            everywhere = user in ("where", ATTENTION.__name__) or self.now == "optimizer"
            costs = costs_something if everywhere else self.costs_something
            calls = len(self.calls)
            if func is ATTENTION:
                self._record(func, args, kwargs, out)
            elif within := collectives.inside(func, args, kwargs, out):
                self._record(*within, None, returned=False)
            elif func.namespace in _DISTRIBUTED:
                self._record_collectives(func, args, kwargs, out)
            elif (
                not counter
                and user not in ("__setitem__", "Embedding")
                and costs(func, args, kwargs, out)
            ):
                self._record(func, args, kwargs, out)
            if len(self.calls) > calls:
                self.slots[number] = calls
            return out

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """While active, operators belong to one call of attention."""
        operators: list[str] = []
        with replaced(self, "in_attention", operators):
            try:
                yield
            except Exception:
                self.gaps.extend(
                    f"{name} in the {self.now} at '{self.path}': the attention raised an error "
                    "afterwards, which the model caught"
                    for name in operators
                )
                raise

    def location(self, func: Any) -> str:
        if self.open is None:
            return f"A call of {func} in the {self.now}"
        owner = self.owners[self.open]
        return f"A call of {owner.what} at '{owner.path}' in the {self.now}"

    def _record_collectives(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the collectives of a split model. They have no roles: their inputs are memory of
        this rank.
        """
        try:
            started_collectives = collectives.collectives_of(func, args, kwargs)
            outputs = tensors_in(out) if started_collectives else ()
            for started, new in itertools.zip_longest(started_collectives, outputs):
                sent = started.sent
                dtype = str(sent.dtype).removeprefix("torch.")
                spec = collectives.collective_tuple(
                    started.name, sent.numel(), dtype, **started.parameters
                )
                if func._schema.name in collectives.COPIES_FIRST:
                    self._record(torch.ops.aten.clone.default, (sent,), {}, new)
                    sent = new
                written = [new if started.received is None else started.received]
                self._add(
                    spec,
                    func,
                    [sent],
                    written,
                    self._part(),
                    collectives.is_asynchronous(func, args, kwargs),
                )
        except NotEncodable as error:
            self.gaps.append(f"{func} in the {self.now}: {error}")

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, *, returned: bool = True
    ) -> None:
        is_attention = func is ATTENTION
        name = FUNCTION_NAMES[func] if is_attention else str(func)
        part = self._part()
        if part is None:
            where = self.node.name() if self.node is not None else f"'{self.path}'"
            self.gaps.append(
                f"{name} in the {self.now} at {where}: belongs to no module or function"
            )
            return
        inputs = list(tensors_in((args, kwargs)))
        try:
            if is_attention:
                table = TensorTable({id(tensor): self.role_of(tensor) for tensor in inputs})
                described = self.describe(name, "function", args, kwargs, table)
            else:
                described = self.describe_operator(func, args, kwargs)
        except NotEncodable as error:
            self.gaps.append(f"{name} in the {self.now}: {error}")
            return
        if returned:
            flops = 0 if is_attention else operator_flops(func, args, kwargs, out)
            self.note_trace(described, (described.spec.operator,), out, flops)
        changed = () if is_attention else written_tensors(func, args, kwargs)
        self._add(described.spec, func, inputs, itertools.chain(changed, tensors_in(out)), part)

    def role_of(self, tensor: torch.Tensor) -> str:
        number = self.storages.numbers.get(storage_key(tensor))
        return role_in_tuple("" if number is None else self.storages.tensors[number].role)

    def _add(
        self,
        spec: OperatorTuple,
        func: Any,
        inputs: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
        found: tuple[str, int | None] | None,
        asynchronous: bool = False,
    ) -> None:
        (part, number), stored = found or (self.now, None), self.storages
        index, label = (
            len(self.calls),
            func.__name__ if func is ATTENTION else func._schema.name.rpartition("::")[2],
        )

        def numbers(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(stored.add(tensor, label, "", index) for tensor in tensors))

        reads, writes = numbers(inputs), numbers(written)
        owner = self.owners[number] if number is not None else Owner(-1, "", "", "")
        self.add_call(
            CapturedCall(
                index, owner.path, spec.id, reads, writes, part, owner.what, self.now, number
            ),
            spec,
        )
        self.streams.launch(index, asynchronous=asynchronous)
        stored.release(index)

    def result(self, flops: int | None) -> CapturedPass:
        self.storages.release(len(self.calls))
        self.storages.set_roles(self.calls)
        return self.captured_pass(
            grad_enabled=True,
            training=True,
            operators=Counter(self.tuples[call.tuple_id].operator for call in self.calls),
            owners=tuple(self.owners),
            launches=tuple(self.streams.launches),
            loss=self.step.loss.name if self.step.loss else "",
            flops=flops,
        )


class _StepStorages(Storages):
    """Storages with the names and roles that a step gives them, and the call after which each is
    released.
    """

    def __init__(self, step: TrainingStep | ForwardPass) -> None:
        super().__init__()
        self.step = step
        for name, weight in step.model.named_parameters():
            if is_plain(weight):
                self._add_first(weight, name, "parameter")
        for name, buffer in step.model.named_buffers():
            if is_plain(buffer):
                self._add_first(buffer, name, "buffer")
        names = {id(parameter): name for name, parameter in step.model.named_parameters()}
        for parameter, state in step.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._add_first(
                        value, f"{names.get(id(parameter), '')}.{key}", "optimizer state"
                    )
        if step.scaler is not None:
            scaler: Any = step.scaler
            self._add_first(scaler._scale, "scaler.scale", "optimizer state")
            self._add_first(scaler._growth_tracker, "scaler.growth_tracker", "optimizer state")
        for name, parameter in _with_gradients(step.model):
            self._add_first(parameter.grad, f"{name}.grad", "gradient")
        for number, tensor in enumerate(tensors_in(list(map(fields_of, step.inputs)))):
            self._add_first(tensor, f"input {number}", "input")
        targets = step.loss.targets if step.loss else ()
        for number, tensor in enumerate(targets):
            self._add_first(tensor, f"target {number}", "input")

    def _add_first(self, whole: torch.Tensor, name: str, role: str) -> None:
        """Adds a tensor that exists before the step."""
        tensor = collectives.local_part(whole)
        if storage_key(tensor) in self.numbers:
            return
        number = self.add(tensor, name, role)
        if not tensor.is_floating_point():
            self.integers[number] = tensor.untyped_storage()

    def release(self, index: int) -> None:
        """Find the storages that were released since the previous check. Their last holder is the
        call before ``index``.
        """
        # All held storages are checked after each call; `StorageWeakRef.expired` would take a sixth
        # of the time.
        is_expired, references = torch.UntypedStorage._expired, self.references
        for number in [number for number in self.held if is_expired(references[number].cdata)]:
            self.held.discard(number)
            self.change(number, released=max(index - 1, self.tensors[number].born))

    def set_roles(self, calls: list[CapturedCall]) -> None:
        """Sets the roles of tensors that the step made: gradients, and activations that the
        backward reads.
        """
        for name, parameter in _with_gradients(self.step.model):
            number = self.numbers.get(storage_key(collectives.local_part(parameter.grad)))
            if number is not None:
                self.change(number, role="gradient", name=f"{name}.grad")
        for number, (tensor, uses) in enumerate(zip(self.tensors, self.uses, strict=True)):
            made_before = tensor.born >= 0 and calls[tensor.born].stage in ("forward", "loss")
            saved = made_before and uses and calls[uses[-1]].stage == "backward"
            if not tensor.role:
                self.change(number, role="activation" if saved else "temporary")


def _with_gradients(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
