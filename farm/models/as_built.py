"""How a user's own model arrives: the dtypes of its tensors, and its modules in train mode.

The farm measures a model as its function returned it, in eval mode. It casts the model only if a
person gives another dtype, and only real floating-point tensors: complex numbers, integers and
eight-bit formats stay. What differs from the returned model is told in one line each
(`differences`)."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from farm.types.format import plural
from farm.types.tensor_kinds import REAL_FLOATING, bytes_of, is_plain, is_real_floating
from farm.types.variant import Variant

#: The farm measures on a CPU with one thread.
_OF_THE_FARM = ("torch.set_num_threads",)


@dataclass(frozen=True)
class AsBuilt:
    """A model as its function returned it, with its example inputs."""

    batch: int  # of its example inputs; 0 if it has none
    dtype: str  # of most of its real floating-point numbers; "" if it has none
    dtypes: tuple[str, ...]  # all dtypes of its floating-point and complex tensors
    # path and class of its modules that compute otherwise in train mode
    depending: tuple[tuple[str, str], ...]
    settings: tuple[str, ...]  # those of PyTorch that its code changes
    parameter_bytes: int


def as_built(
    model: nn.Module, inputs: Iterable[torch.Tensor], batch: int, settings: tuple[str, ...] = ()
) -> AsBuilt:
    """Describe a model that a function returned."""
    parameters, buffers, example = list(model.parameters()), list(model.buffers()), list(inputs)
    dtypes = []
    for tensor in (*parameters, *buffers, *example):
        if is_plain(tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            dtypes.append(_name(tensor.dtype))
    return AsBuilt(
        batch,
        _main_dtype(parameters) or _main_dtype(buffers) or _main_dtype(example),
        tuple(dict.fromkeys(dtypes)),
        tuple(_depending_on_mode(model)),
        settings,
        bytes_of(parameters),
    )


def _main_dtype(tensors: Iterable[torch.Tensor]) -> str:
    """The real floating-point dtype of most numbers; "" if there are none."""
    numbers = Counter[str]()
    for tensor in tensors:
        if is_real_floating(tensor):
            numbers[_name(tensor.dtype)] += tensor.numel()
    return numbers.most_common(1)[0][0] if numbers else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def differences(name: str, built: AsBuilt, variant: Variant) -> Iterator[str]:
    """One line for each difference between the model as it was built and as a variant measures
    it.
    """
    if built.dtype and variant.dtype != built.dtype:
        yield _cast_line(name, built, variant.dtype)
    if built.depending and variant.mode == "eval":
        yield _mode_line(name, built)
    settings = [setting for setting in built.settings if setting not in _OF_THE_FARM]
    if settings:
        yield (
            f"The code of {name} changes {' and '.join(settings)}. The farm measures with the "
            "defaults of PyTorch and the flags of the protocol."
        )


def _cast_line(name: str, built: AsBuilt, dtype: str) -> str:
    real = {_name(real) for real in REAL_FLOATING}
    changed = [name for name in built.dtypes if name in real and name != dtype]
    kept = [name for name in built.dtypes if name not in real]
    line = (
        f"{name} has tensors of {' and '.join(changed)}; they are measured as {dtype}, as --dtype "
        "says."
    )
    return f"{line} Tensors of {' and '.join(kept)} are not changed." if kept else line


def _mode_line(name: str, built: AsBuilt) -> str:
    number = len(built.depending)
    path, kind = built.depending[0]
    first = f"{kind} at '{path}'" if path else kind
    shown = f"{first} and {number - 1} more" if number > 1 else first
    return (
        f"{name} was returned in train mode and is measured in eval mode. This matters for "
        f"{number} {plural('module', number)} ({shown}). --mode train measures it in train mode."
    )


def _depending_on_mode(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        if module.training and _depends_on_mode(module):
            yield path, type(module).__name__


def _depends_on_mode(module: nn.Module) -> bool:
    """True if a module's result depends on its mode: its code reads the mode, and not only for a
    dropout of 0.
    """
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return bool(module.track_running_stats)
    kind: Any = type(module)
    if not _reads_mode(kind):
        return False
    rates = [
        value
        for name, value in vars(module).items()
        if _is_rate(name) and type(value) in (int, float)
    ]
    return not rates or any(rates)


def _is_rate(name: str) -> bool:
    """True for the name of an attribute that has a probability of dropout: p, dropout, drop_prob,
    layerdrop.
    """
    return name == "p" or "drop" in name


@functools.cache
def _reads_mode(kind: Any) -> bool:
    function: Any = inspect.unwrap(inspect.getattr_static(kind, "forward"))
    code = getattr(function, "__code__", None)
    return code is not None and _mentions_mode(code)


def _mentions_mode(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return "training" in code.co_names or any(map(_mentions_mode, inner))
