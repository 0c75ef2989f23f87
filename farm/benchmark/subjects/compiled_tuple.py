"""Measured operator tuples of a compiled model: its kernels and its library calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farm.benchmark.passes import Passes
from farm.benchmark.subjects.compiled_model import compiled_pass_with
from farm.benchmark.subjects.operator_tuple import (
    OperatorTupleKind,
    passes_with_values,
    rebuilt_tuple,
)
from farm.operators.rebuild import Rebuilt
from farm.subjects.registry import kind_of
from farm.types.protocol import Protocol
from farm.types.subject import Subject

if TYPE_CHECKING:
    from farm.operators.compiled import CompiledPass


class CompiledTupleKind(OperatorTupleKind):
    """A tuple of a compiled model, on copies of the values in the running model."""

    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        compiled = compiled_pass_with(subject, device)  # before the tuple: it makes the kernel
        rebuilt = rebuilt_tuple(subject, device)
        copy_values(rebuilt, compiled)
        return passes_with_values(rebuilt, protocol, device)


def copy_values(rebuilt: Rebuilt, compiled: CompiledPass) -> None:
    """Copy the values of the tensors from the running model, at the first launch of the tuple.

    An aten operator that changes its inputs keeps values that do not drift
    (`farm.subjects.values`)."""
    if kind_of(rebuilt.spec).standalone and rebuilt.changed_memory:
        return
    values = compiled.copies_of(rebuilt.spec.id)
    with torch.no_grad():
        for mine, value in zip(rebuilt.tensors, values or (), strict=bool(values)):
            if 0 not in mine.stride() and mine.numel():
                mine.detach().copy_(value)
