"""Passes with host steps in CUDA graphs. A *host step* is an operator for which the host waits for the card.

These operators are copies from ordinary host memory, reads of values (`item`), and operators whose output size depends
on values (`nonzero`). No graph can record them. So an eager pass records their values first, and the pass in the graph
uses these values (docs/method.md, "Host steps"):

- Copies and reads become copies from and to pinned memory, which are nodes of the graph. The host already knows the
  values, so it does not wait.
- An operator whose output size depends on values is left out: the graph uses its output of the eager pass. A boolean
  index is an integer index after `nonzero`; only the `nonzero` is left out.

Tuples and whole models use the same functions, so both sides of a verdict leave out the same operators.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.benchmark.torch_device import synchronize
from farm.errors import Unmeasurable
from farm.models.building import replaced
from farm.operators.capture import WatchedOperators
from farm.operators.encoding import costs_something, storage_key, tensors_in, written_tensors

_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_CONSTANTS = ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor"))
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class _Step:
    operator: str
    value: Any  # of the eager pass: what the host read, or the output of an operator that is left out
    pinned: torch.Tensor | None = None  # host memory that a node of the graph reads or writes; None: left out
    took_us: float = 0.0  # of an operator that is left out: eager time, launch and wait included


@dataclass
class HostSteps:
    """The host steps of a pass in order, with the values of one eager pass; none if a graph can record the pass."""

    device: torch.device
    steps: list[_Step] = field(default_factory=list)
    launches: bool = False  # True if the pass runs anything on the card that is not left out

    @classmethod
    def of(cls, run: Callable[[], object], device: torch.device) -> HostSteps:
        """Run a pass once, eagerly, and record its host steps. A model that asks is told that a graph is captured."""
        found = cls(device)
        with replaced(torch.cuda, "is_current_stream_capturing", lambda: True), _Pass(found, recording=True).watching():
            run()
        synchronize(device)
        return found

    def around(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same pass. While a graph is captured, it uses the recorded values; otherwise it is unchanged."""
        if not self.steps:
            return run

        def call() -> Any:
            if not torch.cuda.is_current_stream_capturing():
                return run()
            repeated = _Pass(self, recording=False)
            with repeated.watching():
                out = run()
            repeated.check_end()
            return out

        return call

    @property
    def copied(self) -> dict[str, int] | None:
        """Operator -> its number of copies between host and card in one pass; None if there are none."""
        return dict(Counter(step.operator for step in self.steps if step.pinned is not None)) or None

    @property
    def left_out_us(self) -> dict[str, float] | None:
        """Operator that is left out -> eager time of its calls in one pass; None if nothing is left out."""
        found = Counter[str]()
        for step in self.steps:
            if step.pinned is None:
                found[step.operator] += step.took_us  # type: ignore[assignment]  # the type of counters is int
        return {name: round(value, 1) for name, value in found.items()} or None


class _Pass:
    """Records the host steps of one pass, or repeats them."""

    def __init__(self, found: HostSteps, *, recording: bool) -> None:
        self.found, self.recording, self.card = found, recording, found.device.type
        self.position = 0
        self.inside = False  # True while an operator runs that is left out
        self.left_out: set[int] = set()  # addresses of the outputs that were not computed

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name in _CONSTANTS:
                made = self._constant(name, getattr(owner, name))
                stack.enter_context(replaced(owner, name, made))
            stack.enter_context(WatchedOperators(self.run))
            yield

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.inside:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            there = [tensor.device.type == self.card for tensor in tensors_in((args, kwargs))]
            if func in _COPIES:
                source, target = (args[0], kwargs.get("device")) if func is _COPIES[0] else (args[1], args[0].device)
                if target is not None and (source.device.type == self.card) != (torch.device(target).type == self.card):
                    copy = self._receive if source.device.type == self.card else self._send
                    return copy(func, args, kwargs)
            elif any(there):
                if func is _aten._local_scalar_dense.default:
                    return self._read(func, args, args[0])
                if func is _aten.equal.default and args[0].shape == args[1].shape:
                    return self._read(func, args, _aten.eq.Tensor(*args).all())
                if func is _aten.masked_select.default:
                    values, mask = torch.broadcast_tensors(*args)
                    func, args = _INDEXING[0], (values, [mask])
                if func in _INDEXING:
                    args = (args[0], self._places(*args, **kwargs), *args[2:])
                elif torch.Tag.dynamic_output_shape in func.tags:
                    return self._leave_out(str(func), lambda: func(*args, **kwargs))
            if self.left_out and self.left_out & set(map(storage_key, written_tensors(func, args, kwargs))):
                raise _not_repeatable(f"{func} writes to the output of an operator that no CUDA graph can record")
            out = func(*args, **kwargs)
            if self.recording and not self.found.launches:
                on_card = any(there) or any(tensor.device.type == self.card for tensor in tensors_in(out))
                self.found.launches = on_card and costs_something(func, args, kwargs, out)
            return out

    def check_end(self) -> None:
        if self.position != len(self.found.steps):
            raise _not_repeatable(f"{self.found.steps[self.position].operator} does not run again")

    def _add(self, operator: str, value: Any, pinned: torch.Tensor | None = None, took_us: float = 0.0) -> None:
        self.found.steps.append(_Step(operator, value, pinned, took_us))
        self.found.launches |= pinned is not None

    def _next(self, operator: str) -> Any:
        steps, position = self.found.steps, self.position
        if position == len(steps) or steps[position].operator != operator:
            raise _not_repeatable(f"{operator} did not run in the eager pass")
        self.position += 1
        return steps[position]

    def _send(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy from host to card."""
        if func is _COPIES[0]:
            return self._leave_out(str(func), lambda: func(*args, **kwargs))
        source = args[1].to(args[0].dtype)  # PyTorch, too, converts before it copies
        source = source if source.shape == args[0].shape else source.expand_as(args[0]).contiguous()
        if self.recording:
            self._add(str(func), None, _pinned_like(source).copy_(source))
            return func(*args, **kwargs)
        return func(args[0], self._next(str(func)).pinned, True)

    def _receive(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy from card to host."""
        if self.recording:
            out = func(*args, **kwargs)
            self._add(str(func), out.clone(), _pinned_like(out))
            return out
        step, in_place = self._next(str(func)), func is _COPIES[1]
        step.pinned.copy_(args[1] if in_place else args[0], non_blocking=True)
        return args[0].copy_(step.value) if in_place else step.value.clone()

    def _read(self, func: Any, args: Any, source: torch.Tensor) -> Any:
        """Read a value of the card."""
        if self.recording:
            value = func(*args)
            self._add(str(func), value, _pinned_like(source))
            return value
        step = self._next(str(func))
        step.pinned.copy_(source, non_blocking=True)
        return step.value

    def _places(self, values: Any, indices: Any, new: Any = None, accumulate: bool = False) -> list[Any]:
        """Indices on the card without masks, as PyTorch itself makes them."""
        given = [index for index in indices if index is not None]
        if new is not None and new.device.type != self.card and new.numel() == 1 and len(given) == 1:
            return list(indices)  # PyTorch fills the places of one mask with a number without knowing how many
        places: list[Any] = []
        for index in indices:
            if index is not None and index.device.type != self.card:
                index = self._send(_COPIES[0], (index,), {"device": values.device})
            if index is not None and index.dtype in _MASKS:
                found = self._leave_out("aten.nonzero.default", functools.partial(_aten.nonzero.default, index))
                places.extend(found.unbind(1))
            else:
                places.append(index)
        return places

    def _constant(self, name: str, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function that makes a tensor of values of the host. Modes do not see that it copies them to the card."""

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device") or (args[0].device if name == "new_tensor" else "cpu")
            data = args[name == "new_tensor"] if len(args) > (name == "new_tensor") else None
            on_card = isinstance(data, torch.Tensor) and data.device.type == self.card
            if torch.device(device).type != self.card or on_card or (isinstance(data, list) and not data):
                return original(*args, **kwargs)
            return self._leave_out(f"torch.{name}", functools.partial(original, *args, **kwargs))

        return made

    def _leave_out(self, operator: str, run: Callable[[], Any]) -> Any:
        if not self.recording:
            value = self._next(operator).value
            self.left_out.update(map(storage_key, tensors_in(value)))
            return value
        self.inside = True
        run()  # the first run may load libraries
        synchronize(self.found.device)
        begin_s = time.perf_counter()
        value = run()
        synchronize(self.found.device)
        self.inside = False
        self._add(operator, value, took_us=(time.perf_counter() - begin_s) * 1e6)
        return value


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())


def _not_repeatable(text: str) -> Unmeasurable:
    text = f"The operator or model cannot be captured in a CUDA graph: {text}."
    return Unmeasurable("not_capturable", text, "Measure it with --launch eager.")
