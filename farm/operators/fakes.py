"""Fake tensors in a model's place: a pass over them has shapes, strides and a device, and computes nothing."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from farm.operators.allowed import LEAF_CLASSES

#: Of an integer tensor that the model is given or holds, and whose values are kept: two million token ids.
MOST_BYTES = 2**24

#: What is handed on as it is.
_NO_HOLDERS = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, torch.device, torch.dtype)


class Fakes:
    """Stands other tensors in for a model's own, keeping identity and strides: fake ones, and for integers that have values
    and are small copies (see `farm.operators.known`)."""

    def __init__(self, mode: FakeTensorMode, device_type: str) -> None:
        self.mode, self.device = mode, torch.device(device_type)
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[int, tuple[Any, Any]] = {}

    def tensor(self, tensor: torch.Tensor, *, fake: bool = False) -> torch.Tensor:
        """What stands in for a tensor: the same for the same; with ``fake`` a fake one whatever its values."""
        if id(tensor) not in self.known:
            is_parameter = isinstance(tensor, nn.Parameter)
            stand_in: torch.Tensor
            if not fake and _has_values(tensor):
                stand_in = self._kept(tensor)
            else:
                stand_in = self.fresh(
                    tensor.size(), tensor.stride(), tensor.dtype, requires_grad=is_parameter and tensor.requires_grad
                )
            if is_parameter:
                stand_in._is_param = True  # type: ignore[attr-defined]  # as nn.Parameter marks a tensor of another class
            self.known[id(tensor)] = (tensor, stand_in)  # the original is held, so its id stays its own
        return self.known[id(tensor)][1]

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
            kept.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            self.storages[storage._cdata] = kept.untyped_storage()
        kept = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return kept.set_(self.storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())

    def fresh(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, requires_grad: bool = False
    ) -> FakeTensor:
        """A fake tensor with memory of its own.

        Made as the mode itself makes one, of a tensor on meta, but past the dispatcher: a tenth of the time, and a
        model has thousands.
        """
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
        return FakeTensor(self.mode, meta, self.device)

    def tree(self, tree: Any) -> Any:
        """A copy with other tensors in it: of lists, tuples, dictionaries, and of objects (a cache with its layers)."""
        if isinstance(tree, torch.Tensor):
            return self.tensor(tree)
        if id(tree) in self.copies:
            return self.copies[id(tree)][1]
        if isinstance(tree, tuple):
            entries = [self.tree(entry) for entry in tree]
            return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
        if isinstance(tree, _NO_HOLDERS):
            return tree
        twin = copy.copy(tree)
        if twin is tree:
            return tree
        self.copies[id(tree)] = tree, twin  # what is met on the way to itself ends here
        if isinstance(twin, list):
            twin[:] = map(self.tree, tree)
        elif isinstance(twin, dict):
            for key, value in tree.items():
                dict.__setitem__(twin, key, self.tree(value))
        for name, value in getattr(twin, "__dict__", {}).items():
            twin.__dict__[name] = self.tree(value)
        return twin

    def unmasked(self, watch: Callable[..., None]) -> Callable[..., None]:
        """A watch that is shown the tensors behind those that stand in for them."""

        def look(path: str, operator: str, *shown: Sequence[tuple[torch.Tensor, bool]]) -> None:
            behind = {id(fake): original for original, fake in self.known.values()}
            watch(path, operator, *([(behind.get(id(one), one), written) for one, written in each] for each in shown))

        return look

    @contextlib.contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        undo: list[tuple[dict[str, Any], str, Any]] = []
        seen: dict[int, bool] = {}
        try:
            for module in model.modules():
                leaf = (
                    type(module) in LEAF_CLASSES
                )  # a leaf reads none of its own, and is not run again when it is given the same
                places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
                for place in places:
                    for name, value in list(place.items()):
                        if isinstance(value, torch.Tensor):
                            undo.append((place, name, value))
                            place[name] = self.tensor(value, fake=leaf)
                        elif place is module.__dict__ and name not in _OWN and _holds_tensors(value, seen):
                            undo.append((place, name, value))
                            place[name] = self.tree(value)
                if isinstance(module, nn.RNNBase):  # a list of its own parameters, handed to the kernel
                    undo.append((module.__dict__, "_flat_weights", module._flat_weights))
                    module.__dict__["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
            yield
        finally:
            for place, name, value in reversed(undo):
                place[name] = value


_OWN = frozenset(nn.Module().__dict__)  # where parameters and children are


def holds_others(model: nn.Module) -> bool:
    """Whether a model holds tensors that are neither parameters nor buffers: in a cache of its own, say."""
    seen: dict[int, bool] = {}
    return any(
        name not in _OWN and name != "_flat_weights" and _holds_tensors(value, seen)
        for module in model.modules()
        for name, value in module.__dict__.items()
    )


def _has_values(tensor: torch.Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    return not floating and not tensor.is_meta and tensor.untyped_storage().nbytes() <= MOST_BYTES


def _holds_tensors(value: Any, seen: dict[int, bool]) -> bool:
    """Whether there is a tensor anywhere in a list, a tuple, a dictionary or an object."""
    if isinstance(value, torch.Tensor):
        return True
    if value is None or isinstance(value, (str, int, float, *_NO_HOLDERS)):
        return False
    if id(value) not in seen:
        seen[id(value)] = False
        entries = list(value) if isinstance(value, list | tuple) else []
        entries += list(value.values()) if isinstance(value, dict) else []
        entries += list(getattr(value, "__dict__", {}).values())
        seen[id(value)] = any(_holds_tensors(entry, seen) for entry in entries)
    return seen[id(value)]
