"""What of a tuple can lie in fast or in slow memory: the storages that it is given, and those that it makes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators import aten
from farm.operators.encoding import tensors_in
from farm.operators.rebuild import rebuild, storage_bytes
from farm.types.memory_tiers import configurations
from farm.types.tuple import OperatorTuple


@dataclass(frozen=True)
class Placeable:
    """``inputs`` are numbers of storages; ``outputs`` counts the storages that a call makes and returns."""

    inputs: tuple[int, ...]
    outputs: int


@functools.lru_cache(maxsize=8192)
def placeable(spec: OperatorTuple) -> Placeable:
    """Found by running the operator on tensors that hold nothing; what cannot be run so has no outputs that can be placed."""
    on_host = aten.read_by_host(spec) if spec.kind == "aten" else frozenset()
    inputs = tuple(number for number, size in sorted(storage_bytes(spec).items()) if size and number not in on_host)
    return Placeable(inputs, _outputs(spec))


def placements_of(spec: OperatorTuple, how: str) -> list[str]:
    """The configurations of a tuple that are asked for, see `farm.types.memory_tiers.configurations`."""
    found = placeable(spec)
    return configurations(found.inputs, found.outputs, how)


def made(output: object, given: frozenset[int]) -> list[torch.Tensor]:
    """The first tensor of each storage that a call returned and was not given.

    Args:
        given: the storages that it was given, as `storage_key` names them.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(output):
        if (key := storage_key(tensor)) not in given and tensor.untyped_storage().nbytes():
            found.setdefault(key, tensor)
    return list(found.values())


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _outputs(spec: OperatorTuple) -> int:
    try:
        with FakeTensorMode(), torch.no_grad():
            built = rebuild(spec, torch.device("cpu"), filled=False)
            return len(made(built.run(), frozenset(map(storage_key, built.tensors))))
    except (FarmError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return 0
