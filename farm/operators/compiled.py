"""Captures a pass of a compiled model: every launch of a generated kernel and every aten operator
that runs a kernel.

A launch is one of: a generated kernel (a tuple of kind `kernel`), a library call inside a compiled
graph, or an operator between two graphs (tuples of kind `aten`). Each belongs to one call of the
capture, so there are no overlaps; a launch that no tuple can describe is a gap."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from farm.operators.capture import Around, Recorder, WatchedOperators
from farm.operators.captured import CapturedCall, CapturedPass
from farm.operators.compiler import CompiledModel, GeneratedKernel
from farm.subjects import kernel as kernels
from farm.subjects.allow_list import ATEN_OVERLOADS
from farm.subjects.encoding import (
    NotEncodable,
    TensorTable,
    costs_something,
    storage_key,
    tensors_in,
    written_tensors,
)

EAGER = "eager"  # `CapturedCall.owner` of an operator between two graphs

#: Called before each launch with the tuple id and the arguments' tensors, in the order of the
#: tuple's tensors.
Look = Callable[[str, list[torch.Tensor]], None]
#: Given the name of a stage of a training step, returns the context of the stage.
Stage = Callable[[str], contextlib.AbstractContextManager[Any]]


class CompiledOperators(WatchedOperators):
    """A dispatch mode that the compiler ignores; under another mode it would run the model
    eagerly.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class LaunchRecorder(Recorder):
    def __init__(
        self,
        compiled: CompiledModel,
        held: Iterable[tuple[torch.Tensor, str, str]],
        device_type: str,
        around: Around | None = None,
        look: Look | None = None,
    ) -> None:
        super().__init__(compiled.model, device_type, around)
        self.compiled, self.look = compiled, look
        self.roles: dict[int, str] = {}
        self.now = ""  # the stage of a training step
        for tensor, name, role in held:
            self._given(tensor, name, role)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.now = "optimizer" if name == "zero_grad" else name
        yield

    def _given(self, tensor: torch.Tensor, name: str, role: str) -> None:
        number = self.storages.add(tensor, name, role)
        self.roles.setdefault(storage_key(tensor), role)
        if not tensor.is_floating_point():
            self.storages.integers[number] = tensor.untyped_storage()

    def call_kernel(
        self, kernel: GeneratedKernel, args: tuple[Any, ...], launch: Callable[[], Any]
    ) -> Any:
        paths = self.compiled.paths_of(kernel.name)
        number = len(self.slots)
        self.slots.append(None)
        with torch._C.DisableTorchFunction():
            tensors = list(tensors_in(list(args)))
            written: list[torch.Tensor] = []
            outputs: list[torch.Tensor] = []
            for position, argument in enumerate(args):
                if kernel.written(position):
                    written += tensors_in(argument)
                if kernel.only_written(position):
                    outputs += tensors_in(argument)
            table = self._table(tensors)
            try:
                positions = {id(tensor): table.add(tensor) for tensor in tensors}
                parameters: dict[str, Any] = {
                    "source": kernel.source,
                    "fused": kernel.fused[:200],
                    "config": {
                        "dict": [[name, value] for name, value in sorted(kernel.config.items())]
                    },
                    "writes": sorted({positions[id(tensor)] for tensor in written}),
                    "outputs": sorted({positions[id(tensor)] for tensor in outputs}),
                }
                if kernel.compiler:
                    parameters["compiler"] = kernel.compiler
                given = self.describe(kernel.operator, "kernel", args, {}, table, parameters)
            except NotEncodable as error:
                self.gaps.append(f"{kernel.name} at '{', '.join(paths)}': {error}")
                return launch()
            kernels.register(given.spec.id, kernel.run)
            if self.look is not None:
                self.look(given.spec.id, given.tensors)
        with self.around(number):
            out = launch()
        with torch._C.DisableTorchFunction():
            self._close(number, given.spec, given.tensors, written, outputs, paths, kernel.fused)
        return out

    def call_aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = len(self.slots)
        self.slots.append(None)
        between = self.compiled.between_graphs
        with torch._C.DisableTorchFunction():
            passed = list(tensors_in((args, kwargs)))
            given = None
            if func.namespace == "aten" and str(func) in ATEN_OVERLOADS and self.look is not None:
                with contextlib.suppress(NotEncodable):
                    given = self.describe(str(func), "aten", args, kwargs, self._table(passed))
                    self.look(given.spec.id, given.tensors)
        with self.around(number):
            out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if not costs_something(func, args, kwargs, out):
                return out
            name = str(func)
            paths = [] if between else self.compiled.paths_of_library(name)
            try:
                given = given or self.describe(name, "aten", args, kwargs, self._table(passed))
                if name not in ATEN_OVERLOADS:
                    raise NotEncodable("the aten operator is not in the allow-list of operators")
            except NotEncodable as error:
                self.gaps.append(f"{name} at '{', '.join(paths)}': {error}")
                return out
            written = list(written_tensors(func, args, kwargs))
            self._close(
                number,
                given.spec,
                given.tensors,
                written,
                tensors_in(out),
                paths,
                EAGER if between else "",
            )
        return out

    def _table(self, tensors: Iterable[torch.Tensor]) -> TensorTable:
        roles = self.roles
        return TensorTable(
            {id(tensor): roles.get(storage_key(tensor), "activation") for tensor in tensors}
        )

    def _close(
        self,
        number: int,
        spec: Any,
        tensors: list[torch.Tensor],
        written: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        paths: list[str],
        owner: str,
    ) -> None:
        index, stored = len(self.calls), self.storages
        outputs = list(outputs)
        for tensor in outputs:
            stored.add(tensor, "", "activation", index)
        reads = dict.fromkeys(stored.add(tensor, "", "activation") for tensor in tensors)
        writes = {stored.numbers[storage_key(tensor)] for tensor in (*written, *outputs)}
        self.slots[number] = index
        path, written_to = ", ".join(paths)[:1000], tuple(sorted(writes))
        belongs = (self.now, owner[:200], self.now)  # part, owner and stage
        self.add_call(CapturedCall(index, path, spec.id, tuple(reads), written_to, *belongs), spec)


class CompiledPass:
    """A model with its inputs, compiled and warmed up in the grad mode and with the numeric flags
    of the caller.
    """

    compiled_model = CompiledModel

    def __init__(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        device: torch.device,
        *,
        mode: str,
        choices: dict[str, Any] | None = None,
        cached: bool = True,
    ) -> None:
        """``choices``: what autotuning chose earlier, see `CompiledModel`; ``cached``: use the
        compiler's cache. Raises `CaptureError` if the compiler refuses the model, and `UsageError`
        if no compiler is installed."""
        self.arguments, self.device, self.cached = arguments, device, cached
        self._grad = torch.is_grad_enabled()
        self.compiled = self.compiled_model(model, mode, device, choices, cached)
        self._prepare()
        with self.compiled.compiling():
            self.run()
        self.run()
        self._ids = frozenset(self.capture().tuples)  # also registers the kernels

    def _prepare(self) -> None:
        pass

    @property
    def model(self) -> nn.Module:
        return self.compiled.model

    @property
    def inputs(self) -> list[torch.Tensor]:
        return list(tensors_in(list(self.arguments)))

    def facts(self) -> dict[str, Any]:
        """What the database stores of a compilation: the choices of autotuning, and graph breaks by
        reason.
        """
        return {"choices": self.compiled.choices, "graph_breaks": dict(self.compiled.breaks)}

    def runs(self, tuple_id: str) -> bool:
        return tuple_id in self._ids

    def run(self, stage: Stage | None = None) -> Any:
        with torch.set_grad_enabled(self._grad):
            return self.compiled(*self.arguments)

    def held(self) -> Iterator[tuple[torch.Tensor, str, str]]:
        """The tensors that exist before a pass, each with its name and role."""
        yield from ((tensor, name, "parameter") for name, tensor in self.model.named_parameters())
        yield from ((tensor, name, "buffer") for name, tensor in self.model.named_buffers())
        yield from (
            (tensor, f"input {number}", "activation") for number, tensor in enumerate(self.inputs)
        )

    def capture(self, around: Around | None = None, look: Look | None = None) -> CapturedPass:
        recorder = LaunchRecorder(self.compiled, self.held(), self.device.type, around, look)
        with CompiledOperators(recorder.call_aten), self.compiled.observed(recorder.call_kernel):
            self.run(recorder.stage)
        return recorder.captured_pass(
            grad_enabled=self._grad,
            training=self.model.training,
            operators=Counter(recorder.tuples[call.tuple_id].operator for call in recorder.calls),
        )

    def copies_of(self, tuple_id: str) -> list[torch.Tensor] | None:
        """Copies of the tensors of a tuple before its first launch in a pass, in its order; None if
        it does not run.
        """
        copies: list[torch.Tensor] = []

        def look(seen: str, tensors: list[torch.Tensor]) -> None:
            if seen == tuple_id and not copies:
                copies.extend(tensor.detach().clone() for tensor in tensors)

        self.capture(look=look)
        return copies or None


class CompiledStep(CompiledPass):
    """A training step whose forward and backward are compiled. The loss runs eagerly, and the
    optimizer unless the user chose its compiled form."""

    def __init__(self, step: Any, device: torch.device, **how: Any) -> None:
        """``step`` is a `farm.training.step.TrainingStep` that has run once; see `CompiledPass` for
        ``how``.
        """
        self.step = step
        with torch.enable_grad():
            super().__init__(step.model, step.inputs, device, **how)

    def _prepare(self) -> None:
        self.step.forward = self.compiled
        if self.step.compiles_optimizer:
            self.step.optimizer.step = self.compiled.compile(self.step.optimizer.step)

    def run(self, stage: Stage | None = None) -> Any:
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            return self.step.run(stage) if stage is not None else self.step.run()

    def held(self) -> Iterator[tuple[torch.Tensor, str, str]]:
        yield from super().held()
        for parameter, values in self.step.optimizer.state.items():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    yield value, "", "buffer"
            if parameter.grad is not None:
                yield parameter.grad, "", "activation"
        targets = self.step.loss.targets if self.step.loss else ()
        yield from (
            (tensor, f"target {number}", "activation") for number, tensor in enumerate(targets)
        )
