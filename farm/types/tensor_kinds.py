"""The kinds of tensors. Shape, strides and dtype describe a plain tensor; a special tensor has
more.

Special tensors are sparse, nested, quantised and oneDNN tensors, and those of a class with its own
operators, such as the quantised weights of torchao. An operator tuple cannot describe them. A class
that names the tensors of which it consists (`__tensor_flatten__`) is a *composite*: its operators
run others on these parts, and a capture records those. The farm refuses a model that computes with
any other special tensor. A special tensor that the model does not use changes nothing."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from farm.errors import UnsupportedTensor
from farm.types.tuple import DTYPES

#: Classes of tensors that stand for the parts of all ranks, or for the result of a collective that
#: still runs.
WRAPPERS = frozenset({"DTensor", "AsyncCollectiveTensor"})

#: Classes that PyTorch and the capture use for plain tensors.
_PLAIN_CLASSES = (
    FakeTensor,
    FunctionalTensor,
    nn.UninitializedParameter,
    nn.parameter.UninitializedBuffer,
)
#: Packages whose classes only mark a tensor: the operators are those of a plain tensor.
_MARKING_PACKAGES = ("torchvision.tv_tensors", "monai.data.meta_tensor")

#: What to use in place of the masks of `torch.nn.attention.bias`.
PLAIN_MASK = (
    "Give is_causal=True instead of causal_upper_left, and a plain mask instead of "
    "causal_lower_right: "
    "attn_mask=torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)."
)

#: The names of the dtypes that an operator tuple can contain.
_DESCRIBED = frozenset(f"torch.{name}" for name in DTYPES)


@dataclass(frozen=True)
class SpecialKind:
    """What a special tensor is ("a sparse tensor (torch.sparse_coo)"), and how to measure a model
    without it.
    """

    description: str
    way_out: str


def special_kind(tensor: torch.Tensor) -> SpecialKind | None:
    """The kind of a special tensor; None for a plain tensor."""
    if _has_own_operators(type(tensor)):
        return _of_class(tensor)
    with torch._C.DisableTorchFunction():  # a recorder must not see these functions
        if tensor.is_nested:
            return _nested()
        if tensor.layout is not torch.strided:
            return _of_layout(tensor.layout)
        if tensor.is_quantized:
            return _quantised(tensor)
        if str(tensor.dtype) not in _DESCRIBED:
            return SpecialKind(
                f"a tensor of dtype {tensor.dtype}",
                "Convert it to another dtype before the model runs, such as float16.",
            )
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor that shape, strides and dtype describe."""
    return special_kind(tensor) is None


@functools.cache
def is_composite(kind: type) -> bool:
    """True for a class of special tensors whose operators run others on plain tensors."""
    if not issubclass(kind, torch.Tensor) or not _has_own_operators(kind):
        return False
    is_nested = issubclass(kind, NestedTensor)
    return is_traceable_wrapper_subclass_type(kind) and not is_nested


def has_composites(module: nn.Module) -> bool:
    """True if a parameter or a buffer of a module is a composite."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return any(is_composite(type(tensor)) for tensor in tensors)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of which a tensor consists: itself, or the parts of a composite."""
    if is_plain(tensor):
        yield tensor
    elif is_composite(type(tensor)):
        composite: Any = tensor
        names, _ = composite.__tensor_flatten__()
        for name in names:
            yield from parts_of(operator.attrgetter(name)(composite))


def rebuilt_of(
    tensor: torch.Tensor, replacement: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A composite with replaced parts."""
    composite: Any = tensor
    names, context = composite.__tensor_flatten__()
    parts = {name: replacement(operator.attrgetter(name)(composite)) for name in names}
    size, stride = composite.size(), composite.stride()
    twin = type(composite).__tensor_unflatten__(parts, context, size, stride)
    if isinstance(tensor, nn.Parameter):
        twin._is_param = True
    return twin.requires_grad_() if tensor.requires_grad else twin


def refusal(special: torch.Tensor, location: str) -> UnsupportedTensor:
    """The error for a call that uses or returns a special tensor."""
    kind = special_kind(special)
    assert kind is not None, "the caller has found that the tensor is special"
    return UnsupportedTensor(
        f"{location} has {kind.description}; the farm does not measure such tensors.", kind.way_out
    )


def only_views(func: Any, special: torch.Tensor) -> bool:
    """True if an aten operator returns a view of a special tensor, and so computes nothing."""
    return func in _VIEWS or (func.is_view and not _has_own_operators(type(special)))


_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def is_real_floating(tensor: torch.Tensor) -> bool:
    """True for a plain tensor of decimals that a change of the model's dtype changes; complex
    numbers and the eight-bit formats of scaled products stay."""
    return tensor.dtype in REAL_FLOATING and is_plain(tensor)


REAL_FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def bits_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """The bits of a tensor whose conjugation or negation PyTorch has put off: "conj", "neg", both
    or none.
    """
    bits = ("conj",) if tensor.is_conj() else ()
    return (*bits, "neg") if tensor.is_neg() else bits


def with_bits(tensor: torch.Tensor, bits: Sequence[str]) -> torch.Tensor:
    """A view of a tensor with these bits changed."""
    view = tensor.conj() if "conj" in bits else tensor
    return torch._neg_view(view) if "neg" in bits else view


def moved(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The tensor on a device, with the same bits. A special tensor stays where it is if PyTorch
    cannot move it, and if the device is meta: there it would lose its kind. With ``dtype``, a real
    floating-point tensor gets this dtype."""
    if not is_plain(tensor):
        return _moved_special(tensor, device)
    bits = bits_of(tensor)
    stored = with_bits(tensor, bits)  # without the bits
    new_dtype = dtype if is_real_floating(tensor) else None
    return with_bits(stored.to(device=device, dtype=new_dtype), bits)


def _moved_special(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "meta":
        return tensor
    try:
        return tensor.to(device)
    except (RuntimeError, NotImplementedError, TypeError):
        return tensor


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of a model's real floating-point parameters and buffers."""
    model._apply(lambda tensor: tensor.to(dtype) if is_real_floating(tensor) else tensor)


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model's parameters and buffers to a device, see `moved`."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(is_plain(tensor) and not bits_of(tensor) for tensor in tensors):
        return model.to(device=device)
    return model._apply(lambda tensor: moved(tensor, device))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The size of the plain tensors and of the parts of composites; sparse and nested tensors have
    no single memory.
    """
    parts = itertools.chain.from_iterable(map(parts_of, tensors))
    return sum(part.nbytes for part in parts)


@functools.cache
def _has_own_operators(class_: type[torch.Tensor]) -> bool:
    """True if a class of tensors replaces operators or functions of PyTorch."""
    if class_ in (torch.Tensor, nn.Parameter) or issubclass(class_, _PLAIN_CLASSES):
        return False
    if class_.__name__ in WRAPPERS or class_.__module__.startswith(_MARKING_PACKAGES):
        return False
    return _replaces_dispatch(class_) or _replaces_functions(class_)


def _replaces_dispatch(class_: type[torch.Tensor]) -> bool:
    return class_.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _replaces_functions(class_: type[torch.Tensor]) -> bool:
    if class_.__torch_function__ is torch._C._disabled_torch_function_impl:
        return False
    usual: Any = torch.Tensor.__torch_function__
    method: Any = class_.__torch_function__
    return getattr(method, "__func__", method) is not usual.__func__


def _of_class(tensor: torch.Tensor) -> SpecialKind:
    if tensor.is_nested:
        return _nested()
    class_ = type(tensor)
    if class_.__module__ == "torch.nn.attention.bias":
        return SpecialKind(f"a mask of the class {class_.__qualname__}", PLAIN_MASK)
    description = f"a tensor of the class {class_.__module__}.{class_.__qualname__}"
    if _replaces_dispatch(class_):
        return SpecialKind(
            f"{description} with its own operators",
            "Measure the model before it gets such tensors, for example before it is quantised.",
        )
    return SpecialKind(
        f"{description} with its own functions",
        "Give plain tensors: tensor.as_subclass(torch.Tensor).",
    )


def _nested() -> SpecialKind:
    return SpecialKind(
        "a nested tensor", "Pass a padded tensor: torch.nested.to_padded_tensor(tensor, 0.0)."
    )


def _of_layout(layout: torch.layout) -> SpecialKind:
    if layout is torch._mkldnn:  # type: ignore[attr-defined]
        return SpecialKind(
            "an oneDNN (mkldnn) tensor", "Measure the model before it is converted to mkldnn."
        )
    return SpecialKind(f"a sparse tensor ({layout})", "Use a dense tensor: tensor.to_dense().")


def _quantised(tensor: torch.Tensor) -> SpecialKind:
    per = str(tensor.qscheme()).removeprefix("torch.").replace("_", " ")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SpecialKind(
        f"a quantised tensor ({dtype}, {per})", "Measure the model before it is quantised."
    )
