"""Run the rebuilt operators of a capture, and compare them with the captured calls; for other
scripts and for tests.

A tuple is worth measuring only if its rebuilt operator runs the same aten operators as the call in
the model on the measured device, and returns outputs of the same shapes and strides."""

from __future__ import annotations

import contextlib
import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators.capture import FunctionAsModel, capture
from farm.operators.captured import CallTrace, CapturedPass
from farm.operators.rebuild import rebuild
from farm.subjects.allow_list import RETURNS_TO_HOST
from farm.subjects.label import label_of
from farm.subjects.parsing import parse


def mismatches(
    found: CapturedPass,
    device: torch.device | str | None = None,
    *,
    only: frozenset[str] | None = None,
) -> list[str]:
    """Replays the tuples of a capture. Returns a message for each that differs from its call.

    Args:
        device: where to run them on real tensors. None: on fake tensors of the capture's device;
            operators that return a value to the host then run on the CPU.
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
            different.append(
                f"{label_of(spec)} runs {inside} in the model, but {trace} when rebuilt alone"
            )
    return different
