"""Weights of a user's own model from a file of safetensors, in place of random ones.

The setting ``weights`` names the file of a model on each host; messages and the database never
contain a path. The option ``--weights FILE`` names it for this process and its child processes
(`farm.settings.user_models`). The hash of the file is part of the version of the model. Files that
pickle writes are refused: to load them runs code."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UsageError, did_you_mean, told
from farm.settings import user_models
from farm.types.variant import FROM_FILE, Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

PACKAGE = "safetensors"
INSTALL = "pip install 'operator-farm[weights]'"
_SUFFIX = ".safetensors"
_WRITE = "Write the file with safetensors.torch.save_model(model, 'model.safetensors')."


def registered(model: str, text: str) -> str:
    """Return the field `Variant.weights` for what a person gives: the name of a file, which is
    registered in this process, or a value of the field.

    Raises:
        UsageError: there is no such file, or it is not of safetensors.
    """
    if text in (Variant.weights, FROM_FILE):
        return text
    file = Path(text)
    if file.suffix != _SUFFIX:
        raise UsageError(
            f"--weights '{text}' is no file of safetensors: its name does not end with {_SUFFIX}.",
            _WRITE,
        )
    if not file.is_file():
        raise UsageError(f"There is no file '{file}'.", f"Give --weights FILE{_SUFFIX}.")
    user_models.add_weights(model, str(file.absolute()))
    return FROM_FILE


def digest(model: str) -> str:
    """The hash of a model's file. Raises `SettingsError` if this host has none."""
    file = _file_of(model)
    try:
        state = file.stat()
        return _digest(file, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise _unreadable(file, error) from error


@functools.lru_cache(maxsize=16)
def _digest(file: Path, size_bytes: int, changed_ns: int) -> str:
    """A file with another size or another time of change is read again: see ``size_bytes`` and
    ``changed_ns``."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def load(module: nn.Module, model: str, device: torch.device) -> None:
    """Copy the values of a model's file into a module, in the dtypes of the module. On meta, names
    and shapes are checked only.

    Raises `SettingsError` if this host has no file, if the file is damaged, or if its names or
    shapes are not those of the module."""
    import torch

    file = _file_of(model)
    if importlib.util.find_spec(PACKAGE) is None:
        raise SettingsError(
            f"The weights of {model} need {PACKAGE}, which is not installed.",
            f"Install it: {INSTALL}",
        )
    from safetensors import SafetensorError, safe_open

    state = module.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            _check_names(file, tensors, names)
            for name in sorted(names):
                _check_tensor(file, name, tensors[name], opened.get_slice(name))
            if device.type == "meta":
                return
            with torch.no_grad():
                for name in sorted(names):
                    tensors[name].copy_(opened.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def _check_names(file: Path, tensors: Mapping[str, Any], names: set[str]) -> None:
    """Raise `SettingsError` unless the file has exactly the tensors of the module. Of a tensor with
    several names it needs one."""
    loaded = {id(tensors[name]) for name in names & tensors.keys()}
    absent = [name for name, tensor in tensors.items() if id(tensor) not in loaded]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise SettingsError(
            f"{file.name} has no values for '{absent[0]}'{more} of the model.",
            did_you_mean(absent[0], names - tensors.keys()) or _WRITE,
        )
    unknown = sorted(names - tensors.keys())
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise SettingsError(
            f"{file.name} has '{unknown[0]}'{more}, which the model does not have.",
            did_you_mean(unknown[0], tensors) or _WRITE,
        )


def _check_tensor(file: Path, name: str, tensor: torch.Tensor, stored: Any) -> None:
    """Raise `SettingsError` unless a stored tensor has the shape and the kind of numbers of that in
    the module."""
    shape, size = tuple(stored.get_shape()), tuple(tensor.shape)
    if shape != size:
        raise SettingsError(
            f"'{name}' is {_sizes(shape)} in {file.name} and {_sizes(size)} in the model.", _WRITE
        )
    is_floating = stored.get_dtype().startswith(("F", "BF"))
    if is_floating != tensor.is_floating_point():
        raise SettingsError(
            f"'{name}' is of {stored.get_dtype()} in {file.name} and of {tensor.dtype} in the "
            "model.",
            _WRITE,
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _file_of(model: str) -> Path:
    file = user_models.weights().get(model)
    if not file:
        raise SettingsError(
            f"This host has no weights for {model}.",
            f"Name the file in the setting 'weights', or give --weights FILE{_SUFFIX}.",
        )
    return Path(file)


def _unreadable(file: Path, error: Exception) -> SettingsError:
    return SettingsError(f"'{file}' cannot be read: {told(error)}.", _WRITE)
