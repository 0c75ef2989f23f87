"""A card whose tensors are in host memory and say `cuda`, with graphs that refuse what CUDA graphs
refuse.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from farm.types import tensor_kinds

CARD = torch.device("meta")  # without CUDA, PyTorch cannot index tensors that say `cuda`
_aten: Any = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class OnCard(torch.Tensor):
    """A tensor of the card; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=CARD
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendCard().run(func, args, kwargs or {})


# It stands for a plain tensor of a card.
tensor_kinds._PLAIN_CLASSES = (*tensor_kinds._PLAIN_CLASSES, OnCard)


class PretendCard(TorchDispatchMode):
    nodes: list[tuple[Any, Any, Any, Any]] | None = None  # of the graph that is captured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnCard)]
        target = kwargs.get("device")
        here = bool(given) if target is None else torch.device(target).type == CARD.type
        if self.nodes is not None and _refused(func, args, kwargs, given, here):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        inner = {id(one.inner): one for one in given}
        plain_args, plain_kwargs = tree_map_only(OnCard, lambda one: one.inner, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            out = func(*plain_args, **plain_kwargs)
        if (
            self.nodes is not None and torch.Tag.inplace_view not in func.tags
        ):  # such a change of a shape is no node
            with torch._C._DisableTorchDispatch():  # of their present shapes
                self.nodes.append(
                    (
                        func,
                        *tree_map_only(
                            torch.Tensor, torch.Tensor.detach, (plain_args, plain_kwargs, out)
                        ),
                    )
                )
        wrap = lambda one: inner.get(id(one)) if id(one) in inner else OnCard(one)  # noqa: E731
        if func is _aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, wrap, out) if here else out


def _refused(func: Any, args: Any, kwargs: Any, given: list[OnCard], here: bool) -> bool:
    if func in (_aten.copy_.default, _aten._to_copy.default):
        source = args[1] if func is _aten.copy_.default else args[0]
        to_card = isinstance(args[0], OnCard) if func is _aten.copy_.default else here
        waits = not (
            kwargs.get("non_blocking") or (func is _aten.copy_.default and args[2:3] == (True,))
        )
        return to_card != isinstance(source, OnCard) and waits
    if not given:
        return False
    if func in _INDEXING:
        return any(
            one is not None and (not isinstance(one, OnCard) or one.dtype == torch.bool)
            for one in args[1]
        )
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def capture(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """Record the operators of the calls; return a function that runs them again on the same
    memory.
    """
    nodes: list[tuple[Any, Any, Any, Any]] = []
    with (
        mock.patch.object(PretendCard, "nodes", nodes),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        for call in calls:
            call()

    def replay() -> None:
        for func, args, kwargs, out in nodes:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay


@contextlib.contextmanager
def present() -> Iterator[None]:
    """While active, tensors can be created on the card."""
    original = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = original(data, *args, **kwargs)
        if device is None or torch.device(device).type != CARD.type:
            return made
        if PretendCard.nodes is not None and made.numel():
            raise RuntimeError("operation not permitted when stream is capturing: torch.tensor")
        return OnCard(made)

    def new_tensor(self: torch.Tensor, data: Any, device: Any = None) -> torch.Tensor:
        return tensor(data, dtype=self.dtype, device=device or self.device)

    def indexing(name: str) -> Any:
        indexed = getattr(torch.Tensor, name)

        @functools.wraps(indexed)
        def call(one: torch.Tensor, index: Any, *value: Any) -> Any:
            if isinstance(one, OnCard) and not torch._C._is_torch_function_mode_enabled():
                parts = index if isinstance(index, tuple) else (index,)
                index = tuple(
                    tensor(part, device=CARD) if isinstance(part, list) else part for part in parts
                )
            return indexed(one, index, *value)

        return mock.patch.object(torch.Tensor, name, call)

    with (
        indexing("__getitem__"),
        indexing("__setitem__"),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(torch.Tensor, "new_tensor", new_tensor),
        mock.patch.object(torch.cuda, "synchronize"),
        torch.no_grad(),
        PretendCard(),
    ):
        yield


def moved(model: nn.Module) -> nn.Module:
    """Put a model's parameters and buffers on the card."""
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                if tensor is not None:
                    one = OnCard(tensor.detach())
                    place[name] = (
                        nn.Parameter(one, requires_grad=False)
                        if place is module._parameters
                        else one
                    )
    return model


def on_card(values: Any) -> Any:
    return tree_map(lambda one: OnCard(one) if isinstance(one, torch.Tensor) else one, values)
