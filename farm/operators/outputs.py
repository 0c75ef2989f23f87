"""What an operator gives: the sizes of its outputs, found by running it on tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import FarmError
from farm.operators.rebuild import rebuild
from farm.words.tuple import OperatorTuple


def output_sizes(spec: OperatorTuple) -> list[list[int]] | None:
    """The shape of each tensor that a call returns; None where it cannot be told without values (`nonzero`).

    ``Conv2d 3->64 k7 s2 | 32x3x224x224`` gives ``[[32, 64, 112, 112]]``.
    """
    try:
        with FakeTensorMode(), torch.no_grad():
            built = rebuild(spec, torch.device("cpu"), filled=False)
            return [[int(size) for size in tensor.shape] for tensor in _tensors(built.run())]
    except (FarmError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for entry in tree:
            yield from _tensors(entry)
    elif isinstance(tree, dict):
        for entry in tree.values():
            yield from _tensors(entry)
