"""What an operator gives: the sizes of its outputs, found by running it on tensors that hold nothing."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators.encoding import tensors_in
from farm.operators.rebuild import rebuild
from farm.types.tuple import OperatorTuple


def output_sizes(spec: OperatorTuple) -> list[list[int]] | None:
    """The shape of each tensor that a call returns; None where it cannot be told without values (`nonzero`).

    ``Conv2d 3->64 k7 s2 | 32x3x224x224`` gives ``[[32, 64, 112, 112]]``.
    """
    try:
        with FakeTensorMode(), torch.no_grad():
            built = rebuild(spec, torch.device("cpu"), filled=False)
            return [[int(size) for size in tensor.shape] for tensor in tensors_in(built.run())]
    except (FarmError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
