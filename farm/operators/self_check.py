"""Checks a capture against itself: does each tuple describe the call that ran?

A tuple is a call as it was written down. Its operator is rebuilt, as a worker does before a measurement, and runs once.
It must run the same aten operators as the call in the model, in the same order, and return outputs of the same shapes,
strides, dtypes and layouts. Otherwise its reading would be that of another operator, so it is not measured.

The check runs as the capture ran: on fake tensors, or on real ones. Integers have the values that a worker fills in,
because operators may depend on them. Settings of PyTorch that a user's program may change have their defaults: a worker
does not know them. What only a card can run is checked there (`farm.benchmark.verification`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import FarmError, told
from farm.operators.capture import Recorder, WatchedOperators
from farm.operators.captured import CallTrace, CapturedPass
from farm.operators.encoding import texts_of_outputs
from farm.operators.fake_pass import MOST_BYTES, FakeTensors, fake_pass
from farm.operators.input_values import fill, storage_users, values_for
from farm.operators.rebuild import Rebuilt, allocate, needed_bytes, rebuild
from farm.types.tuple import OperatorTuple, TensorSpec

#: An operator that needs values runs on real tensors if they take at most this memory.
MOST_REAL_BYTES = 2**30
#: Kinds of tuples that only a card can run.
ON_A_CARD = frozenset({"kernel", "collective"})

#: Returns the output of an aten operator as the capture corrects it: operator, arguments, output.
Corrected = Callable[[Any, Any, Any], Any]

#: (tuple id, device, grad mode) -> the trace of the rebuilt operator; a text says why it did not run.
_traces: dict[tuple[str, str, bool], CallTrace | str] = {}
_MOST_TRACES = 100_000


def checked(captured: CapturedPass, device: str, *, corrected: Corrected | None = None) -> CapturedPass:
    """Returns a capture of fake tensors with its mismatches.

    Args:
        device: that of the fake tensors.
        corrected: only of a training step.
    """
    found = dict(captured.mismatches)
    with _default_settings(), torch.set_grad_enabled(captured.grad_enabled), contextlib.ExitStack() as stack:
        fakes: FakeTensors | None = None
        for tuple_id, spec in captured.tuples.items():
            expected = captured.traces.get(tuple_id)
            if expected is None or tuple_id in found or spec.kind in ON_A_CARD:
                continue
            key = (tuple_id, device, captured.grad_enabled)
            if key not in _traces:
                if fakes is None:
                    fakes, *_ = stack.enter_context(fake_pass(nn.Module(), (), None, device))
                _remember(key, _trace_on_fakes(spec, fakes, corrected))
            difference = mismatch(expected, _traces[key])
            if difference:
                found[tuple_id] = difference
    return dataclasses.replace(captured, mismatches=found)


def checked_on(device: torch.device, captured: CapturedPass) -> CapturedPass:
    """As `checked`, on real tensors of a device: for a capture that ran with values."""
    found = dict(captured.mismatches)
    with _default_settings(), torch.set_grad_enabled(captured.grad_enabled):
        for tuple_id, spec in captured.tuples.items():
            expected = captured.traces.get(tuple_id)
            if expected is None or tuple_id in found or spec.kind in ON_A_CARD:
                continue
            difference = mismatch(expected, trace_on(spec, device))
            if difference:
                found[tuple_id] = difference
    return dataclasses.replace(captured, mismatches=found)


def mismatch(expected: CallTrace, trace: CallTrace | str) -> str:
    """Says how a rebuilt operator differs from the call in the model; "" if it does not."""
    if isinstance(trace, str):
        return f"the operator, rebuilt from its tuple, does not run: {trace}"
    difference = expected.difference(trace)
    return f"the model's call {difference} as the operator, rebuilt from its tuple" if difference else ""


def trace_on(spec: OperatorTuple, device: torch.device) -> CallTrace | str:
    """The trace of the rebuilt operator on real tensors; a text says why it did not run."""
    try:
        return traced(rebuild(spec, device))
    except FarmError as error:
        return error.message
    except Exception as error:
        return told(error)


def traced(rebuilt: Rebuilt, fakes: FakeTensors | None = None, corrected: Corrected | None = None) -> CallTrace:
    """Runs a rebuilt operator once, in the caller's grad mode, and returns what the dispatcher saw."""
    costly: list[str] = []
    recorder = Recorder(nn.Module(), rebuilt.device.type, fakes=fakes)

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if recorder.costs_something(func, args, kwargs, out):
            costly.append(str(func))
        return out

    if rebuilt.spec.kind == "aten":
        out = rebuilt.run()
        if corrected is not None:
            out = corrected(rebuilt.target, rebuilt.arguments, out)
        return CallTrace((rebuilt.spec.operator,), texts_of_outputs(out))
    with WatchedOperators(call):
        out = rebuilt.run()
    return CallTrace(tuple(costly), texts_of_outputs(out))


def _remember(key: tuple[str, str, bool], trace: CallTrace | str) -> None:
    if len(_traces) >= _MOST_TRACES:
        _traces.clear()
    _traces[key] = trace


def _trace_on_fakes(spec: OperatorTuple, fakes: FakeTensors, corrected: Corrected | None) -> CallTrace | str:
    try:
        return traced(Rebuilt(spec, fakes.device, _storages(spec, fakes)), fakes, corrected)
    except FarmError as error:
        return error.message
    except Exception as error:
        if needed_bytes(spec) > MOST_REAL_BYTES:
            return told(error)
    with _disable_current_modes():  # it needs values
        return trace_on(spec, torch.device("cpu"))


def _storages(spec: OperatorTuple, fakes: FakeTensors) -> list[torch.Tensor]:
    """The storages of a tuple: small integers are real and have values, all others are fake."""
    storages = allocate(spec, fakes.device, fakes.fresh)
    generator = torch.Generator().manual_seed(0)
    for number, (index, *_) in storage_users(spec).items():
        tensor = spec.tensors[index]
        if _has_values(tensor) and storages[number].untyped_storage().nbytes() <= MOST_BYTES:
            fake = storages[number]
            with _disable_current_modes():
                real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
                fill(real, tensor, values_for(spec, index, frozenset()), generator)
            fakes.put_on_card(real)
            storages[number] = real
    return storages


def _has_values(tensor: TensorSpec) -> bool:
    return "float" not in tensor.dtype and "complex" not in tensor.dtype


@contextlib.contextmanager
def _default_settings() -> Iterator[None]:
    """While active, settings that choose operators or dtypes have the values of a new process."""
    mha, deterministic = torch.backends.mha, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype, fast_path = torch.get_default_dtype(), mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    mha.set_fastpath_enabled(True)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        mha.set_fastpath_enabled(fast_path)
