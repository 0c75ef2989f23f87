"""Runs rebuilt operators, compares them with the captured calls, and finds the storages of their outputs.

A tuple is worth measuring only if its rebuilt operator runs the same aten operators as the call in the model on the
measured device, and returns outputs of the same shapes and strides.
"""

from __future__ import annotations

import contextlib
import functools
import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators.allow_list import RETURNS_TO_HOST, read_by_host
from farm.operators.capture import FunctionAsModel, capture
from farm.operators.captured import CallTrace, CapturedPass
from farm.operators.encoding import storage_key, tensors_in
from farm.operators.rebuild import rebuild, storage_bytes
from farm.types.label import label_of
from farm.types.protocol import configurations
from farm.types.tuple import OperatorTuple, parse


def mismatches(
    found: CapturedPass, device: torch.device | str | None = None, *, only: frozenset[str] | None = None
) -> list[str]:
    """Replays the tuples of a capture. Returns a message for each that differs from its call.

    Args:
        device: where to run them on real tensors. None: on fake tensors of the capture's device; operators that return
            a value to the host then run on the CPU.
        only: the ids of the tuples to replay; all if None.
    """
    different = []
    for tuple_id, spec in found.tuples.items():
        if only is not None and tuple_id not in only:
            continue
        fake = device is None and spec.operator not in RETURNS_TO_HOST
        on = torch.device(found.device_type if fake else device or "cpu")
        try:
            with FakeTensorMode() if fake else contextlib.nullcontext():
                built = rebuild(parse(json.loads(json.dumps(spec.to_json()))), on, filled=not fake)
                model, grad_enabled = FunctionAsModel(built.run), found.grad_enabled
                alone = capture(model, (), device_type=on.type, grad_enabled=grad_enabled)
        except FarmError as error:
            different.append(f"{label_of(spec)}: {error.message}")
            continue
        trace = CallTrace(tuple(alone.operators.elements()), ())
        if len(alone.calls) == 1:
            trace = alone.traces[alone.calls[0].tuple_id]
        if trace != found.traces[tuple_id]:
            inside = found.traces[tuple_id]
            different.append(f"{label_of(spec)} runs {inside} in the model, but {trace} when rebuilt alone")
    return different


@functools.lru_cache(maxsize=8192)
def offloadable(spec: OperatorTuple) -> tuple[tuple[int, ...], int]:
    """Return the storages that can be in slow memory: (numbers of the input storages, count of the output storages).

    Output storages are those that a call allocates and returns. Their count is 0 if the operator does not run on fake
    tensors.
    """
    on_host = read_by_host(spec) if spec.kind == "aten" else frozenset()
    inputs = tuple(number for number, size in sorted(storage_bytes(spec).items()) if size and number not in on_host)
    try:
        with FakeTensorMode(), torch.no_grad():
            built = rebuild(spec, torch.device("cpu"), filled=False)
            return inputs, len(new_storages(built.run(), frozenset(map(storage_key, built.tensors))))
    except (FarmError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return inputs, 0


def placements_of(spec: OperatorTuple, which: str) -> list[str]:
    """The placements of a tuple's storages that ``which`` selects, see `farm.types.protocol.configurations`."""
    return configurations(*offloadable(spec), which)


def new_storages(output: object, inputs: frozenset[int]) -> list[torch.Tensor]:
    """The first tensor of each storage in ``output`` that is not an input.

    Args:
        inputs: the storages of the inputs, as `storage_key` returns them.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(output):
        if (key := storage_key(tensor)) not in inputs and tensor.untyped_storage().nbytes():
            found.setdefault(key, tensor)
    return list(found.values())
