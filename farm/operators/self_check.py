"""Checks a capture against itself: does each tuple describe the call that ran?

A tuple is a call as it was written down. Its operator is rebuilt, as a worker does before a
measurement, and runs once. It must run the same aten operators as the call in the model, in the
same order, and return outputs of the same shapes, strides, dtypes and layouts. Otherwise its
reading would be that of another operator, so it is not measured.

The check runs as the capture ran: on fake tensors, or on real ones. Integers that had values in the
model have those that a worker fills in, because operators may depend on them. Settings of PyTorch
that a user's program may change have their defaults: a worker does not know them. What only a card
can run is checked there (`farm.benchmark.verification`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import FarmError
from farm.operators.capture import Recorder, WatchedOperators
from farm.operators.captured import CallTrace, CapturedPass
from farm.operators.deciding_values import check_values, write_values
from farm.operators.fake_pass import MOST_BYTES, STANDS_FOR_A_CARD, FakeTensors, fake_pass
from farm.operators.input_values import fill
from farm.operators.rebuild import Rebuilt, allocate, needed_bytes, rebuild
from farm.subjects.encoding import bits_of_inputs, texts_of_outputs
from farm.subjects.registry import kind_of
from farm.subjects.values import storage_users
from farm.types.deciding import EXACT, deciding_input
from farm.types.tuple import OperatorTuple, TensorSpec

#: An operator that needs values runs on real tensors if they take at most this memory.
MOST_REAL_BYTES = 2**30
#: The kinds of attention that PyTorch may choose in a new process.
_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]

#: Returns the output of an aten operator as the capture corrects it: operator, arguments, output.
Corrected = Callable[[Any, Any, Any], Any]

#: Returns what the operator of a tuple runs and returns, when it is rebuilt, in the inference mode
#: and with the values of a call in the model; None if it does not run, or was checked before.
Trace = Callable[[OperatorTuple, CallTrace], CallTrace | None]

#: (tuple id, device, grad mode, inference mode, with values) -> the trace on fake tensors, which
#: does not depend on the model.
_traces: dict[tuple[str, str, bool, bool, bool], CallTrace | None] = {}
_MOST_TRACES = 100_000


def checked(
    captured: CapturedPass, device_type: str, *, corrected: Corrected | None = None
) -> CapturedPass:
    """Returns a capture of fake tensors with its mismatches, and with tuples that describe more
    calls.

    Args:
        device_type: that for which the pass was captured. Without a card, fake tensors of the CPU
            stand for a card.
        corrected: as the capture corrects the outputs of fake operators.
    """
    device = captured.device_type
    if captured.stands_for(device_type):
        device = STANDS_FOR_A_CARD
    with contextlib.ExitStack() as stack:
        fakes: list[FakeTensors] = []  # made for the first tuple that is new in this process

        def trace(spec: OperatorTuple, call: CallTrace) -> CallTrace | None:
            modes = captured.grad_enabled, call.inference, call.has_values
            key = spec.id, device, *modes
            if key in _traces:
                return _traces[key]
            if not fakes:
                fakes.append(stack.enter_context(fake_pass(nn.Module(), (), None, device))[0])
            if len(_traces) >= _MOST_TRACES:
                _traces.clear()
            with _inference(call.inference):
                _traces[key] = _trace_on_fakes(spec, fakes[0], corrected, call.has_values)
            return _traces[key]

        return _checked(captured, trace)


def checked_on(
    device: torch.device,
    captured: CapturedPass,
    *,
    corrected: Corrected | None = None,
    known: Container[str] = (),
) -> CapturedPass:
    """As `checked`, on real tensors of a device: for a capture that ran with values. ``known``: the
    ids of tuples that were checked before."""

    def trace(spec: OperatorTuple, call: CallTrace) -> CallTrace | None:
        if spec.without_values.id in known:
            return None
        with _inference(call.inference):
            return _trace_on(device, spec, corrected)

    return _checked(captured, trace)


def _checked(captured: CapturedPass, trace: Trace) -> CapturedPass:
    mismatches, better = dict(captured.mismatches), dict[str, OperatorTuple]()
    with _default_settings(), torch.set_grad_enabled(captured.grad_enabled):
        for tuple_id, spec in captured.tuples.items():
            expected = captured.traces.get(tuple_id)
            kind = kind_of(spec)
            if expected is None or tuple_id in mismatches or not kind.standalone:
                continue
            difference = _difference(spec, expected, trace(spec, expected))
            if not difference:
                continue
            other = kind.with_roles(spec, expected.trained)
            rebuilt = trace(other, expected) if other.id != tuple_id else None
            if rebuilt is not None and not _difference(other, expected, rebuilt):
                better[tuple_id] = other
            else:
                mismatches[tuple_id] = difference
    return _with_tuples(captured, mismatches, better)


def _difference(spec: OperatorTuple, expected: CallTrace, trace: CallTrace | None) -> str:
    """How a rebuilt operator differs from the call in the model, in words; "" if it does not, or
    did not run.
    """
    if trace is None:
        return ""
    deciding = deciding_input(spec)
    # a tuple describes such values approximately, or not at all; they may decide output sizes
    is_described = deciding is None or deciding.form in EXACT
    if not is_described or kind_of(spec).largest_outputs(spec) is not None:
        trace = dataclasses.replace(trace, outputs=expected.outputs)
    return expected.difference(trace, "the model", "the operator, rebuilt from its tuple,")


def _with_tuples(
    captured: CapturedPass, found: dict[str, str], better: dict[str, OperatorTuple]
) -> CapturedPass:
    """The capture with its mismatches, and with better tuples in place of some."""
    ids = {tuple_id: spec.id for tuple_id, spec in better.items()}
    tuples = {
        ids.get(tuple_id, tuple_id): better.get(tuple_id, spec)
        for tuple_id, spec in captured.tuples.items()
    }
    traces = {ids.get(tuple_id, tuple_id): trace for tuple_id, trace in captured.traces.items()}
    calls = tuple(
        dataclasses.replace(call, tuple_id=ids.get(call.tuple_id, call.tuple_id))
        for call in captured.calls
    )
    return dataclasses.replace(
        captured, tuples=tuples, traces=traces, calls=calls, mismatches=found
    )


def _inference(inference: bool) -> contextlib.AbstractContextManager[Any]:
    # the mode False enables gradients
    return torch.inference_mode() if inference else contextlib.nullcontext()


def _trace_on_fakes(
    spec: OperatorTuple, fakes: FakeTensors, corrected: Corrected | None, has_values: bool
) -> CallTrace | None:
    try:
        rebuilt = _rebuilt_on_fakes(spec, fakes, has_values=has_values)
        return _traced(rebuilt, fakes, corrected)
    except FarmError:
        return None
    except Exception:  # it may need values
        if not has_values:
            return _trace_on_fakes(spec, fakes, corrected, True)
        if needed_bytes(spec) > MOST_REAL_BYTES:
            return None
    with _disable_current_modes():
        return _trace_on(torch.device("cpu"), spec, corrected)


def _trace_on(
    device: torch.device, spec: OperatorTuple, corrected: Corrected | None
) -> CallTrace | None:
    try:
        return _traced(rebuild(spec, device), None, corrected)
    except Exception:  # its measurement reports the error
        return None


def _traced(rebuilt: Rebuilt, fakes: FakeTensors | None, corrected: Corrected | None) -> CallTrace:
    """Runs a rebuilt operator once, in the caller's grad mode, and returns what the dispatcher
    saw.
    """
    if not kind_of(rebuilt.spec).public:  # it is itself one operator of the dispatcher
        out = rebuilt.run()
        out = out if corrected is None else corrected(rebuilt.target, rebuilt.arguments, out)
        return _trace_of(rebuilt, (rebuilt.spec.operator,), out)
    recorder = Recorder(nn.Module(), rebuilt.device.type, fakes=fakes)
    costly: list[str] = []

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if fakes is not None and corrected is not None:
            out = corrected(func, args, out)
        if recorder.costs_something(func, args, kwargs, out):
            costly.append(str(func))
        return out

    with WatchedOperators(call):
        out = rebuilt.run()
    return _trace_of(rebuilt, costly, out)


def _trace_of(rebuilt: Rebuilt, operators: Iterable[str], out: Any) -> CallTrace:
    return CallTrace(
        tuple(operators), texts_of_outputs(out), input_bits=bits_of_inputs(rebuilt.tensors)
    )


def _rebuilt_on_fakes(spec: OperatorTuple, fakes: FakeTensors, *, has_values: bool) -> Rebuilt:
    check_values(spec)
    storages = _storages(spec, fakes) if has_values else allocate(spec, fakes.device, fakes.fresh)
    rebuilt = Rebuilt(spec, fakes.device, storages)
    deciding = deciding_input(spec)
    if deciding is not None and not isinstance(rebuilt.tensors[deciding.index], FakeTensor):
        with _disable_current_modes():
            write_values(spec, rebuilt.tensors)
    return rebuilt


def _storages(spec: OperatorTuple, fakes: FakeTensors) -> list[torch.Tensor]:
    """The storages of a tuple: small integers are real and have values, all others are fake."""
    storages = allocate(spec, fakes.device, fakes.fresh)
    generator = torch.Generator(fakes.device).manual_seed(0)
    for number, (index, *_) in storage_users(spec).items():
        tensor = spec.tensors[index]
        if _has_values(tensor) and storages[number].untyped_storage().nbytes() <= MOST_BYTES:
            fake = storages[number]
            with _disable_current_modes():
                real = torch.empty_strided(
                    fake.shape, fake.stride(), dtype=fake.dtype, device=fakes.device
                )
                values = kind_of(spec).values(spec, index, frozenset())
                fill(real, tensor, values, generator)
            fakes.put_on_card(real)
            storages[number] = real
    return storages


def _has_values(tensor: TensorSpec) -> bool:
    return "float" not in tensor.dtype and "complex" not in tensor.dtype


@contextlib.contextmanager
def _default_settings() -> Iterator[None]:
    """While active, settings that choose operators or dtypes have the values of a new process."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    warn_only, fast_path = (
        torch.is_deterministic_algorithms_warn_only_enabled(),
        mha.get_fastpath_enabled(),
    )
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    mha.set_fastpath_enabled(True)
    try:
        with sdpa_kernel(_ATTENTION):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        mha.set_fastpath_enabled(fast_path)
