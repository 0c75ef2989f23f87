"""Fake tensors in a model's place: a pass over them has shapes, strides and a device, and computes nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Fakes:
    """Stands fake tensors in for a model's own, keeping identity and strides."""

    def __init__(self, mode: FakeTensorMode, device_type: str) -> None:
        self.mode, self.device = mode, torch.device(device_type)
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.known:
            is_parameter = isinstance(tensor, nn.Parameter)
            fake = self.fresh(
                tensor.size(), tensor.stride(), tensor.dtype, requires_grad=is_parameter and tensor.requires_grad
            )
            if is_parameter:
                fake._is_param = True  # as nn.Parameter marks a tensor of another class
            self.known[id(tensor)] = (tensor, fake)  # the original is held, so its id stays its own
        return self.known[id(tensor)][1]

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
        if isinstance(tree, torch.Tensor):
            return self.tensor(tree)
        if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
            return type(tree)(self.tree(entry) for entry in tree)
        if isinstance(tree, dict):
            return {key: self.tree(value) for key, value in tree.items()}
        return copy.copy(tree)

    def unmasked(self, watch: Callable[..., None]) -> Callable[..., None]:
        """A watch that is shown the tensors behind the fakes that stand in for them."""

        def look(path: str, operator: str, *shown: Sequence[tuple[torch.Tensor, bool]]) -> None:
            behind = {id(fake): original for original, fake in self.known.values()}
            watch(path, operator, *([(behind.get(id(one), one), written) for one, written in each] for each in shown))

        return look

    @contextlib.contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        undo: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module in model.modules():
                places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
                for place in places:
                    for name, value in list(place.items()):
                        if isinstance(value, torch.Tensor):
                            undo.append((place, name, value))
                            place[name] = self.tensor(value)
                if isinstance(module, nn.RNNBase):  # a list of its own parameters, handed to the kernel
                    undo.append((module.__dict__, "_flat_weights", module._flat_weights))
                    module.__dict__["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
            yield
        finally:
            for place, name, value in undo:
                place[name] = value
