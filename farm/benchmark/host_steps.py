"""Passes with host steps in CUDA graphs. A *host step* is an operator for which the host waits for
the card.

No graph can record one. So an eager pass records their values, and the pass in the graph uses them
(docs/design/host-steps.md): a read of a value becomes a copy to pinned memory, a node of the
graph. Values of the host, and outputs whose size depends on values, are omitted: they are already
on the card. Of a boolean index, `nonzero` is omitted, and an integer index remains. Tuples and
whole models use the same functions, so both sides of a verdict omit the same."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from farm.benchmark.torch_device import synchronize
from farm.errors import Unmeasurable
from farm.operators.capture import WatchedOperators
from farm.operators.grouped_products import multiply, needs_host
from farm.subjects.encoding import storage_key, tensors_in, written_tensors
from farm.types.details import Details
from farm.types.replacement import replaced

_aten: Any = torch.ops.aten
#: The same values in other tensors: autograd attaches the graph of a pass to what an operator
#: returns.
_alias = functools.partial(tree_map_only, torch.Tensor, torch.Tensor.detach)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


@dataclass(frozen=True)
class _Step:
    operator: str
    value: Any  # of the eager pass
    # host memory for the copy of a value that the host reads; None: omitted
    pinned: torch.Tensor | None = None
    took_us: float = 0.0  # eager time of an operator that is omitted, with launch and wait


@dataclass
class HostSteps:
    """The host steps of a pass in order, with the values of one eager pass; none if a graph can
    record the pass.
    """

    device: torch.device
    steps: list[_Step] = field(default_factory=list)
    launches: bool = False  # True if anything runs on the card that is not omitted

    @classmethod
    def of(cls, run: Callable[[], object], device: torch.device) -> HostSteps:
        """Run a pass once, eagerly, and record its host steps. A model that asks is told that a
        graph is captured.

        Raises `Unmeasurable` (not_capturable) if nothing else runs on the card.
        """
        steps = cls(device)
        with (
            replaced(torch.cuda, "is_current_stream_capturing", lambda: True),
            _Pass(steps, recording=True).watching(),
        ):
            run()
        synchronize(device)
        if steps.steps and not steps.launches:
            raise not_capturable(
                f"{steps.steps[0].operator} depends on values, and nothing else runs on the card."
            )
        return steps

    def around(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same pass. While a graph is captured, it uses the recorded values; otherwise it is
        unchanged.
        """

        def call() -> Any:
            if not torch.cuda.is_current_stream_capturing():
                return run()
            repeated = _Pass(self, recording=False)
            with repeated.watching():
                out = run()
            if repeated.left:
                raise not_capturable(f"{repeated.left[0].operator} does not run again.")
            return out

        return call if self.steps else run

    def noted(self, details: Details) -> Details:
        """Return the details of a reading with the steps of its passes."""
        copies, took_us = Counter[str](), Counter[str]()
        for step in self.steps:
            if step.pinned is None:
                took_us[step.operator] += step.took_us  # type: ignore[assignment]
            else:
                copies[step.operator] += 1
        omitted_us = {name: round(value, 1) for name, value in took_us.items()}
        return replace(
            details,
            launching=replace(details.launching, host_copies=dict(copies) or None),
            timing=replace(details.timing, left_out_us=omitted_us or None),
        )


class _Pass:
    """Records the host steps of one pass, or repeats them."""

    def __init__(self, found: HostSteps, *, recording: bool) -> None:
        self.found, self.recording, self.card = found, recording, found.device.type
        self.left = [] if recording else list(found.steps)  # the steps that are still to repeat
        self.inside = False  # True while an operator runs that is omitted
        self.not_computed: dict[int, torch.Tensor] = {}  # outputs of omitted operators, by address

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        # A mode for functions would change what models run.
        tensor = functools.partial(self._constant, torch.tensor)

        def new(like: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
            return tensor(data, **{"dtype": like.dtype, "device": like.device, **kwargs})

        with (
            replaced(torch, "tensor", tensor),
            replaced(torch.Tensor, "new_tensor", new),
            _lists_replaced(torch.Tensor.__getitem__, tensor),
            _lists_replaced(torch.Tensor.__setitem__, tensor),
            # host steps of a backward keep their order
            torch.autograd.set_multithreading_enabled(False),
            WatchedOperators(self.run),
        ):
            yield

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.inside:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            here = [tensor.device.type == self.card for tensor in tensors_in((args, kwargs))]
            if func is _aten._to_copy.default and kwargs.get("device"):
                if here[0] != self._is_card(kwargs["device"]):
                    run = functools.partial(func, *args, **kwargs)
                    return self._read(func, run, args[0]) if here[0] else self._omit(str(func), run)
            elif func is _aten.copy_.default and here == [True, False]:
                args = (args[0], self._sent(args[1]))
            elif func is _aten._local_scalar_dense.default and here[0]:
                return self._read(func, functools.partial(func, *args), args[0])
            elif func is _aten._grouped_mm.default and here[0] and needs_host(args[0]):
                return self._multiply_groups(func, args, kwargs)
            elif func in _INDEXING and here[0]:
                args = (args[0], self._positions(*args), *args[2:])
            elif (
                torch.Tag.dynamic_output_shape in func.tags
                and any(here)
                and kwargs.get("output_size") is None
            ):
                return self._omit(str(func), functools.partial(func, *args, **kwargs))
            if self.not_computed and self.not_computed.keys() & set(
                map(storage_key, written_tensors(func, args, kwargs))
            ):
                raise not_capturable(
                    f"{func} writes to the output of an operator that is left out."
                )
            self.found.launches |= any(here) and not func.is_view
            return func(*args, **kwargs)

    def _is_card(self, device: Any) -> bool:
        return torch.device(device).type == self.card

    def _next(self, operator: str) -> Any:
        if not self.left or self.left[0].operator != operator:
            raise not_capturable(f"{operator} did not run in the eager pass.")
        return self.left.pop(0)

    def _read(self, func: Any, run: Callable[[], Any], source: torch.Tensor) -> Any:
        """Copy a value from the card to the host."""
        if self.recording:
            value = run()
            like = value if isinstance(value, torch.Tensor) else source
            pinned = torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())
            self.found.steps.append(_Step(str(func), value, pinned))
            self.found.launches = True
        else:
            step = self._next(str(func))
            value = step.value
            step.pinned.copy_(source, non_blocking=True)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _multiply_groups(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Multiply groups of rows whose ends the host reads."""
        left, right = args[:2]
        offs = args[2] if len(args) > 2 else kwargs.get("offs")
        if offs is None:  # all groups have the same size
            self.found.launches = True
            return func(*args, **kwargs)  # type: ignore[no-any-return]

        read = functools.partial(torch.Tensor.cpu, offs)
        ends = self._read(func, read, offs)
        return (
            func(*args, **kwargs) if self.recording else multiply(left, right, offs, ends.tolist())
        )  # type: ignore[no-any-return]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the card."""
        return self._omit("aten._to_copy.default", functools.partial(tensor.to, self.found.device))

    def _constant(
        self, make: Callable[..., torch.Tensor], data: Any, **kwargs: Any
    ) -> torch.Tensor:
        """A new tensor with values of the host. Modes do not see that PyTorch copies them to the
        card.
        """
        run, empty = functools.partial(make, data, **kwargs), isinstance(data, list) and not data
        if (
            empty
            or isinstance(data, torch.Tensor)
            or not self._is_card(kwargs.get("device") or "cpu")
        ):
            return run()
        return self._omit("torch.tensor", run)

    def _positions(self, values: Any, indices: Any, new: Any = None, *_: Any) -> list[Any]:
        """The indices as integers on the card, as PyTorch itself makes them."""
        if (
            new is not None
            and not self._is_card(new.device)
            and sum(index is not None for index in indices) == 1
        ):
            # PyTorch fills the places of one mask with a number without knowing how many
            return list(indices)
        positions: list[Any] = []
        for index in indices:
            if index is not None and not self._is_card(index.device):
                index = self._sent(index)
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
            else:
                nonzero = _aten.nonzero.default
                positions.extend(
                    self._omit(str(nonzero), functools.partial(nonzero, index)).unbind(1)
                )
        return positions

    def _omit(self, operator: str, run: Callable[[], Any]) -> Any:
        if not self.recording:
            value = _alias(self._next(operator).value)
            self.not_computed.update((storage_key(tensor), tensor) for tensor in tensors_in(value))
            return value
        self.inside = True
        run()  # the first run may load libraries
        synchronize(self.found.device)
        begin_s = time.perf_counter()
        value = run()
        synchronize(self.found.device)
        self.inside = False
        self.found.steps.append(
            _Step(operator, value, took_us=(time.perf_counter() - begin_s) * 1e6)
        )
        return _alias(value)


def _lists_replaced(
    original: Any, make: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """While active, a method that indexes a tensor gets tensors of the card instead of lists of
    numbers.
    """

    @functools.wraps(original)
    def call(tensor: Any, index: Any, *value: Any) -> Any:
        def placed(part: Any) -> Any:
            listed = (
                isinstance(part, list | tuple)
                and part
                and all(isinstance(number, int) for number in part)
            )
            return make(part, device=tensor.device) if listed else part

        # otherwise the mode calls again, below itself
        if not torch._C._is_torch_function_mode_enabled():
            index = tuple(map(placed, index)) if isinstance(index, tuple) else placed(index)
        return original(tensor, index, *value)

    return replaced(torch.Tensor, original.__name__, call)


def not_capturable(why: str) -> Unmeasurable:
    text = f"The operator or model cannot be captured in a CUDA graph: {why}"
    return Unmeasurable("not_capturable", text, "Measure it with --launch eager.")
