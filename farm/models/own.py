"""The user's own models: registered on each host in the setting ``models``, a name and 'module:function'.

The function takes no argument and returns the module, or a pair of the module and its example inputs:

    a tensor                                  the only argument
    a tuple (or list) of values               positional arguments
    a dict of values                          keyword arguments
    a pair of a tuple and a dict              positional and keyword arguments

Its module is installed, on PYTHONPATH, or in the folder of the setting ``models_path``. Only what this host's own settings
name is ever imported; messages and the database carry the name alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UsageError
from farm.models.entry import ModelEntry
from farm.settings import settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.protocol import Variant

NAME = "user"
PACKAGE = EXTRA = ""
IMAGE_PX = 224  # of the images that a model without example inputs of its own gets


def targets() -> dict[str, str]:
    """Name -> 'module:function', checked but not imported.

    Raises:
        SettingsError: one is not of that form.
    """
    return _checked("models", settings().models, "takes no argument and returns the module")


def loss(name: str) -> Callable[[Any], Any] | None:
    """What a model of the user's is trained for: takes what the model gives, and gives a scalar. None where none is named.

    Raises:
        SettingsError: it is not of that form, or could not be imported.
    """
    found = _checked("losses", settings().losses, "takes the model's output and returns a scalar")
    if name not in found:
        return None
    try:
        return _imported(found[name])  # type: ignore[no-any-return]
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"The loss of '{name}' could not be imported from '{found[name]}': {type(error).__name__}: {error}",
            "Name the folder of the module in FARM_MODELS_PATH (the current one is not searched) or install it.",
        ) from error


def _checked(setting: str, named: dict[str, str], takes: str) -> dict[str, str]:
    for name, target in named.items():
        module, colon, function = target.partition(":")
        if not colon or not all(part.isidentifier() for part in [*module.split("."), function]):
            raise SettingsError(
                f"The setting '{setting}' gives '{target}' for '{name}', which is not 'module:function'.",
                f"Write it as 'package.module:function'; the function {takes}.",
            )
    return named


def _imported(target: str) -> Any:
    module_name, _, function_name = target.partition(":")
    if (path := settings().models_path) and (folder := os.path.abspath(path)) not in sys.path:
        sys.path.append(folder)  # last: nothing in it may stand in for what is installed
    return getattr(importlib.import_module(module_name), function_name)


def entries() -> Mapping[str, ModelEntry]:
    return {
        name: ModelEntry(name=name, task="user", input_size=IMAGE_PX, smallest_size=1, origin=NAME)
        for name in targets()
    }


def refused() -> Mapping[str, str]:
    return {}


def refuse_size(name: str) -> None:
    """Called where somebody asked for an input size.

    Raises:
        UsageError: the model brings its own example inputs, which no size changes.
        SettingsError: it could not be made.
    """
    if given_inputs(name) is not None:
        raise UsageError(
            f"{name} brings its own example inputs, which --input-size does not change.",
            "Leave the input size away; -b changes the batch.",
        )


def make(entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
    """The module, which takes the values of `inputs` by position.

    Raises:
        SettingsError: it could not be made, or is no module.
    """
    from farm.models.tensors import dtype_of

    model, positional, keywords = _made(entry.own_name)
    model = model.to(dtype_of(variant))
    return by_position(model, len(positional or ()), tuple(keywords)) if keywords else model


def inputs(entry: ModelEntry, variant: Variant, device: torch.device, seed: int) -> tuple[Any, ...]:
    """The model's own example inputs in the variant's dtype, or images where it brings none.

    Of its own, tensors whose first dimension is that of the first one are repeated or cut to the batch.

    Raises:
        SettingsError: see `make`.
    """
    from farm.models.tensors import dtype_of, images

    if (given := given_inputs(entry.own_name)) is None:
        return (images(variant, device, seed),)
    return tuple(_like(value, dtype_of(variant), device, seed) for value in batched(given, variant.batch))


def given_inputs(name: str) -> tuple[Any, ...] | None:
    """The model's own example inputs: positional arguments of what `make` returns. None where it brings none.

    Raises:
        SettingsError: see `make`.
    """
    _, positional, keywords = _made(name)
    return None if positional is None else (*positional, *keywords.values())


def batched(given: Sequence[Any], batch: int) -> list[Any]:
    """A user's own example inputs: tensors whose first dimension is that of the first one are repeated or cut to the batch."""
    import torch

    tensors = [value for value in given if isinstance(value, torch.Tensor) and value.dim()]
    own_batch = tensors[0].shape[0] if tensors else 0

    def fitted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != own_batch or not own_batch:
            return value
        return value.repeat(-(-batch // own_batch), *[1] * (value.dim() - 1))[:batch]

    return [fitted(value) for value in given]


def _like(value: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A user's own example input, brought to the dtype and device; what is on meta is filled at random."""
    import torch

    from farm.models.tensors import random_normal

    if not isinstance(value, torch.Tensor):
        return value
    wanted = dtype if value.is_floating_point() else value.dtype
    if value.device.type == "meta" and device.type != "meta":
        if value.is_floating_point():
            return random_normal(tuple(value.shape), wanted, device, seed)
        return torch.zeros(value.shape, dtype=wanted, device=device)
    return value.to(device=device, dtype=wanted)


def _made(name: str) -> tuple[nn.Module, tuple[Any, ...] | None, Mapping[str, Any]]:
    """The user's module, its positional arguments (None where it brings no inputs) and its keyword arguments."""
    from torch import nn

    target = targets()[name]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no result of ours
            made = _imported(target)()
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"The model '{name}' could not be made by '{target}': {type(error).__name__}: {error}",
            "Name the folder of the module in FARM_MODELS_PATH (the current one is not searched) or install it, and check "
            "that the function takes no argument.",
        ) from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise SettingsError(
            f"'{target}' returned a {type(model).__name__} for the model '{name}', not a module.",
            "Return a torch.nn.Module, or a pair of a module and its example inputs.",
        )
    if any(nn.parameter.is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())):
        raise SettingsError(
            f"The model '{name}' has lazy modules, whose parameters have no shapes yet.",
            f"Call the model once on an input in '{target}', before it is returned.",
        )
    positional, keywords = _arguments(given)
    if wrong := [key for key in keywords if not isinstance(key, str)]:
        raise SettingsError(
            f"'{target}' names an argument of the model '{name}' {wrong[0]!r}, which is no name.",
            "Give the example inputs as a dict from names of arguments to their values.",
        )
    return model, positional, keywords


def _arguments(given: Any) -> tuple[tuple[Any, ...] | None, Mapping[str, Any]]:
    if given is None:
        return None, {}
    if isinstance(given, Mapping):  # BatchEncoding of transformers is one, too
        return (), dict(given)
    if not isinstance(given, tuple | list):
        return (given,), {}  # a tensor would come apart along its batch
    if len(given) == 2 and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def by_position(model: nn.Module, positional: int, names: tuple[str, ...]) -> nn.Module:
    """The model behind one that takes all arguments by position, as everything that measures gives them."""
    return _by_name_class()(model, positional, names)


@functools.cache
def _by_name_class() -> Any:
    from torch import nn

    class ByName(nn.Module):
        def __init__(self, model: nn.Module, positional: int, names: tuple[str, ...]) -> None:
            super().__init__()
            self.model, self.positional, self.names = model, positional, names

        def forward(self, *values: Any) -> Any:
            named = dict(zip(self.names, values[self.positional :], strict=True))
            return self.model(*values[: self.positional], **named)

    return ByName
