"""The storages of an operator that can be in slow memory: its inputs, and the outputs that it allocates."""

from __future__ import annotations

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators.allow_list import read_by_host
from farm.operators.encoding import storage_key, tensors_in
from farm.operators.rebuild import rebuild, storage_bytes
from farm.types.protocol import configurations
from farm.types.tuple import OperatorTuple


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
    """The first tensor of each storage in ``output`` that is not an input (``inputs``: keys by `storage_key`)."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(output):
        if (key := storage_key(tensor)) not in inputs and tensor.untyped_storage().nbytes():
            found.setdefault(key, tensor)
    return list(found.values())
