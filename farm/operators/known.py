"""Keeps the values of small tensors in a pass that computes nothing else, for the code that reads them.

Requirements:

- A model looks whether its mask hides anything, or where its cache ends, and goes on by the answer. Such values come from
  token ids, masks and positions: integers that the model was given, and what is made on the way from those and from numbers
  alone. These stay real tensors and are computed with; whatever a weight or an activation goes into is fake.
- They are plain tensors, not fake ones with a value beside them: transformers takes a fake mask for a sign of being traced,
  which is another way through the model than the one that runs.
- Memory is known or it is not. Once something fake was written to it, what is computed from it is fake, and reading it fails
  as it does for every fake tensor.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from farm.operators.encoding import tensors_in, written_tensors
from farm.operators.fakes import Fakes

#: Of a tensor that is made of small ones or of numbers alone: a mask of 1024 x 1024. Larger ones are fake.
MOST_MADE_BYTES = 2**20
_WIDER = 8  # times what it is made of is no large one either: integers for booleans

_DEPENDS_ON_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
#: A boolean mask among their indices stands for the places that it marks.
_INDEXING = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
)


class Known(TorchDispatchMode):
    """Above a `FakeTensorMode`: runs what is given real tensors alone and makes no large ones; leaves all else to that mode."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.overwritten: dict[int, StorageWeakRef] = {}  # an address is not used again while a weak reference holds it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        kept = [tensor for tensor in given if type(tensor) is not FakeTensor]
        if len(kept) < len(given) or not self._runs(func, args, kwargs, kept):
            return self._left(func, args, kwargs) if kept else func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)

    def _runs(self, func: Any, args: Any, kwargs: Any, kept: list[torch.Tensor]) -> bool:
        if func.is_view:  # whatever stands in the memory
            return True
        if any(_address(tensor) in self.overwritten for tensor in kept):
            return False
        if (
            torch.Tag.nondeterministic_seeded in func.tags
        ):  # one number is drawn on the host: whether to skip a layer, say
            return not kept and func is torch.ops.aten.rand.default and args[0] == []
        placed = any(argument.name == "device" for argument in func._schema.arguments)
        if func._schema.is_mutable or not _DEPENDS_ON_VALUES.isdisjoint(func.tags) or not (kept or placed):
            return True  # the last: two numbers, say, that are divided
        meta = {"device": torch.device("meta")} if placed and ("device" in kwargs or not kept) else {}
        with torch._C._DisableTorchDispatch():
            there = tree_map_only(torch.Tensor, _on_meta, args)
            named = tree_map_only(torch.Tensor, _on_meta, kwargs) | meta
            try:
                out = func(*there, **named)
            except (RuntimeError, NotImplementedError):  # not to be had on meta
                return bool(kept)
        most = max(MOST_MADE_BYTES, _WIDER * sum(tensor.nbytes for tensor in kept))
        return all(tensor.untyped_storage().nbytes() <= most for tensor in tensors_in(out))

    def _left(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the mode below makes of it, with fake tensors in the place of the real ones."""
        if func in _INDEXING:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is FakeTensor:
                return tensor
            if id(tensor) not in instead:
                instead[id(tensor)] = tensor, self.fakes.fresh(tensor.shape, tensor.stride(), tensor.dtype)
            return instead[id(tensor)][1]

        out = func(*tree_map_only(torch.Tensor, fake, args), **tree_map_only(torch.Tensor, fake, kwargs))
        for tensor in written_tensors(func, args, kwargs):
            if id(tensor) in instead:
                self.overwritten[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        behind = {id(one): tensor for tensor, one in instead.values()}
        return tree_map_only(torch.Tensor, lambda tensor: behind.get(id(tensor), tensor), out)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        known = index is not None and type(index) is not FakeTensor and _address(index) not in self.overwritten
        if index is None or not known or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        with torch._C._DisableTorchDispatch():
            return list(index.nonzero().unbind(1))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def nothing_computed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, device_type: str
) -> Iterator[tuple[Fakes, tuple[Any, ...], dict[str, Any]]]:
    """While active, ``model`` has stand-ins for its tensors, on ``device_type``; gives those for its arguments."""
    mode = FakeTensorMode()
    fakes = Fakes(mode, device_type)
    log = logging.getLogger(
        FakeTensorMode.__module__
    )  # what it says of an operator that cannot be faked is said in the error
    with fakes.swapped(model), _silent(log):
        stand_ins = fakes.tree(args), fakes.tree(kwargs or {})
        with mode, Known(fakes):
            yield fakes, *stand_ins


@contextlib.contextmanager
def _silent(log: logging.Logger) -> Iterator[None]:
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
