"""Holds rebuilt operators against the calls that they were captured from.

A tuple is only worth measuring if what is rebuilt from its JSON runs the same aten operators and gives outputs of the
same shapes and strides as the call in the model did, on the device where it is measured.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators.allowed import READS_BACK
from farm.operators.capture import Capture, Trace, capture
from farm.operators.rebuild import rebuild
from farm.types.label import label_of
from farm.types.tuple import OperatorTuple, parse


class _Once(nn.Module):
    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self) -> Any:
        return self._run()


def replay(spec: OperatorTuple, device: torch.device | str, *, fake: bool = False, grad_enabled: bool = False) -> Trace:
    """Runs the operator once and says what it did.

    Args:
        fake: compute nothing; the tensors only claim to be on ``device``.

    Raises:
        FarmError: it could not be built, or raised.
    """
    device = torch.device(device)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        built = rebuild(spec, device, filled=not fake)
        seen = capture(_Once(built.run), (), device_type=device.type, grad_enabled=grad_enabled)
    if len(seen.calls) != 1:
        return Trace(tuple(seen.operators.elements()), ())
    return seen.traces[seen.calls[0].tuple_id]


def mismatches(
    found: Capture, device: torch.device | str | None = None, *, only: frozenset[str] | None = None
) -> list[str]:
    """What the rebuilt tuples of a capture do otherwise than the calls did; empty when all agree.

    Args:
        device: where to run them for real; None replays on fake tensors that claim the capture's device, and on the CPU what reads
            values back.
        only: tuple ids to replay, all if None.
    """
    different = []
    for tuple_id, spec in found.tuples.items():
        if only is not None and tuple_id not in only:
            continue
        try:
            travelled = parse(json.loads(json.dumps(spec.to_json())))
            if device is None and spec.operator not in READS_BACK:
                trace = replay(travelled, found.device_type, fake=True, grad_enabled=found.grad_enabled)
            else:  # what reads a value needs one
                trace = replay(travelled, device or "cpu", grad_enabled=found.grad_enabled)
        except FarmError as error:
            different.append(f"{label_of(spec)}: {error.message}")
            continue
        if trace != found.traces[tuple_id]:
            different.append(f"{label_of(spec)}: {found.traces[tuple_id]} in the model, {trace} rebuilt")
    return different
