"""The user's own models, which the setting ``models`` registers on each host: a name and
'module:function'.

The function takes no argument and returns the module, or a pair of the module and its example
inputs:

    a tensor                                  the only argument
    a tuple (or list) of values               positional arguments
    a dict of values                          keyword arguments
    a pair of a tuple and a dict              positional and keyword arguments

Instead of a function, the setting may name a folder with a config.json of transformers
(`farm.models.config_folder`).

The Python module is installed, on PYTHONPATH, or in a folder of the setting ``models_path``. Only
modules that this host's own settings name are imported; messages and the database hold the name
alone. `register` adds a location that the user gives on this host, such as ``my_models.py:net``, to
the models of this process and its child processes (`farm.settings.user_models`)."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import (
    SettingsError,
    UnsupportedModel,
    UsageError,
    did_you_mean,
    error_text,
    refused,
)
from farm.models import config_folder, torchvision, weights
from farm.models.entry import ModelEntry
from farm.models.source import Source
from farm.models.user_code import user_code
from farm.models.user_modules import user_modules
from farm.settings import settings, user_models
from farm.types.fields import LARGEST_NUMBER
from farm.types.variant import FROM_FILE, IMAGE_PX, Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.models.as_built import AsBuilt

NAME = "user"
#: Parameters of a model that is built with real memory to ask for its example inputs.
MOST_BUILT_BYTES = 2**28
#: A part of a module's name: Python also imports my-model.py and 01_train.py by their names.
_MODULE_NAME = re.compile(r"[\w-]+")
#: A library on a host with another build of PyTorch, such as torchvision for CUDA with PyTorch for
#: CPUs.
_MISSING_OPERATOR = re.compile(r"operator (\w+)::\w+ does not exist")
_PLACE = (
    "Name the module's folder in FARM_MODELS_PATH (the current folder is not searched), or "
    "install the module"
)


# ---- locations


def is_location(name: str) -> bool:
    """True for ``my_models.py:net`` and for a folder such as ``models/tiny/``, unless it is a
    registered name.
    """
    if name in user_models.targets():
        return False
    return ":" in name or ("/" in name and config_folder.is_file(Path(name, "config.json")))


def register(name: str) -> str:
    """Return the name of a model. If it is a location, register it in this process first.

    A location is that of a function, ``file.py:function``, or ``package.module:function`` of an
    installed package or a package in the current folder; or that of a folder with a config.json,
    its path. Child processes inherit the registration; neither the environment nor the settings of
    this process change. Never call it with a name from a message or from the database. Raises
    `UsageError` if there is no such file, or its module has the name of another module."""
    if not is_location(name):
        return name
    location, colon, function = name.rpartition(":")
    if not colon:
        path = Path(name).absolute()
        user_models.add(path.name, str(path))
        return path.name
    file = Path(location)
    if file.suffix != ".py":
        return _register_function(location, function, os.getcwd())
    _check_file(file)
    target = _register_function(file.stem, function, os.path.dirname(os.path.abspath(file)))
    spec = importlib.util.find_spec(file.stem)
    if spec and not _is_same_file(spec.origin, file):
        problem = (
            f"'{file}' cannot be imported: the name '{file.stem}' means the module "
            f"{spec.origin or 'of Python'}."
        )
        raise UsageError(problem, "Rename the file.")
    return target


def _register_function(module: str, function: str, folder: str) -> str:
    """Register a function by its location, and return this name."""
    target = f"{module}:{function}"
    if not _is_target(target):
        raise UsageError(
            f"'{target}' is no location of a function; the form must be 'module:function'.",
            "Write my_models.py:net. The function takes no argument and returns the module.",
        )
    if os.pathsep in folder:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise UsageError(
                f"Modules in the folder '{folder}' cannot be imported: '{os.pathsep}' separates "
                "the folders of Python's search path.",
                f"Rename the folder, or move the module to a folder without '{os.pathsep}'.",
            )
        folder = ""  # the module is installed
    user_models.add(target, target, folder)
    user_modules().make_importable(module)
    return target


def _check_file(file: Path) -> None:
    """Raise `UsageError` if there is no such file, or Python cannot import a file of this name."""
    if not config_folder.is_file(file):
        raise UsageError(
            f"There is no file '{file}'.", "Give the path of a Python file: my_models.py:function."
        )
    if not _MODULE_NAME.fullmatch(file.stem):
        possible = re.sub(r"[^A-Za-z0-9_-]", "_", file.stem)
        raise UsageError(
            f"The file '{file}' cannot be imported: a name of a module has letters, digits, '_' "
            "and '-' only.",
            f"Rename the file, for example to {possible}.py.",
        )


def _is_same_file(origin: str | None, file: Path) -> bool:
    with contextlib.suppress(OSError):  # a module of Python itself has no file
        return origin is not None and os.path.samefile(origin, file)
    return False


# ---- registered functions


def loss(name: str) -> Callable[[Any], Any] | None:
    """The user's loss function for a model, from the model's output to a scalar; None if none is
    registered. Raises `SettingsError` if the setting is malformed, or the function could not be
    imported."""
    losses = settings().losses
    _check_targets("losses", losses, "takes the model's output and returns a scalar")
    if name not in losses:
        return None
    target = losses[name]
    try:
        with user_code():
            return user_modules().function(target)  # type: ignore[no-any-return]
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error_text(error)}"
        problem = f"The loss of '{name}' could not be imported from '{target}': {reason}"
        raise SettingsError(problem, f"{_PLACE}.") from error


def loss_target(name: str) -> str:
    """Return where the user's loss function of a model is: 'module:function'."""
    return settings().losses[name]


def _targets() -> dict[str, str]:
    """The registered functions by name of the model. Folders with a config.json are left out."""
    folders = config_folder.folders()
    for name, folder in folders.items():
        if not config_folder.is_file(folder / "config.json"):
            raise SettingsError(
                f"The setting 'models' has '{folder}' for '{name}', which is no 'module:function' "
                "and no folder with a config.json.",
                "Write 'package.module:function', or the path of the folder.",
            )
    targets = user_models.targets()
    functions = {name: targets[name] for name in targets if name not in folders}
    _check_targets("models", functions, "takes no argument and returns the module")
    return functions


def _check_targets(setting: str, targets: Mapping[str, str], takes: str) -> None:
    """Raise `SettingsError` if a value has another form than 'module:function'. Nothing is
    imported.
    """
    for name, target in targets.items():
        if not _is_target(target):
            problem = (
                f"The setting '{setting}' has '{target}' for '{name}'; the form must be "
                "'module:function'."
            )
            raise SettingsError(problem, f"Write 'package.module:function'. The function {takes}.")


def _is_target(target: str) -> bool:
    """True for the form 'module:function'."""
    module, _, function = target.partition(":")
    return function.isidentifier() and all(map(_MODULE_NAME.fullmatch, module.split(".")))


def _functions(name: str, step: str) -> list[str]:
    """The registered functions that decide what a model computes, as 'module:function'."""
    targets = [_targets().get(name)]
    if step:
        targets.append(settings().losses.get(name))
    return [target for target in targets if target]


def source_of(name: str) -> Path | None:
    """The loaded file with the function of a model, or the config.json of its folder."""
    folder = config_folder.folders().get(name)
    if folder:
        return folder / "config.json"
    module_name = _targets().get(name, "").partition(":")[0]
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return Path(file) if file else None


# ---- what a function returns


@dataclass(frozen=True)
class UserModel:
    """What the user's function returned: a module and its example inputs, if it has them."""

    module: nn.Module
    has_inputs: bool
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    settings: tuple[str, ...]  # those of PyTorch that the module or the function changes

    @property
    def values(self) -> tuple[Any, ...] | None:
        """The example inputs in the order of the arguments; None if the model has none."""
        return (*self.positional, *self.keywords.values()) if self.has_inputs else None


def made(name: str) -> UserModel:
    """Call the function of a model. Raises `SettingsError` if the function raises an error, or
    returns no module, and `UnsupportedModel` if the model takes too much memory while it is built.
    """
    from farm.types import torch_settings

    target = _targets()[name]
    try:
        with user_code(), torch_settings.restored() as changed:
            function = user_modules().function(target)
            torch_settings.write(user_modules().settings_of(target))
            returned = function()
    except UnsupportedModel:  # it does not fit into memory
        raise
    except (Exception, SystemExit) as error:
        model = "its model" if name == target else f"the model '{name}'"
        problem = f"'{target}' could not build {model}: {type(error).__name__}: {error_text(error)}"
        raise SettingsError(problem, _step_after(error, target)) from error
    if isinstance(returned, tuple) and len(returned) == 2:
        module, example = returned
    else:
        module, example = returned, None
    positional, keywords = _arguments(example)
    _check_returned(name, target, module, keywords)
    return UserModel(module, example is not None, positional, keywords, tuple(changed))


def _step_after(error: BaseException, target: str) -> str:
    """What to do after the user's function raised an error."""
    missing = _MISSING_OPERATOR.search(error_text(error))
    if missing:
        return (
            f"{missing[1]} is installed without its compiled operators: install a build of it that "
            "suits PyTorch on this host."
        )
    if isinstance(error, SyntaxError) and user_modules().has_file(error.filename or "<"):
        return f"Correct {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_user = [frame for frame in frames if user_modules().has_file(frame.filename)]
    if frames_of_user:
        last = frames_of_user[-1]
        return f"Correct {last.filename}, line {last.lineno}: {last.line}"
    module, _, function = target.partition(":")
    if module not in sys.modules:
        return f"{_PLACE}, and check that the function takes no argument."
    # The module has no such function, or the function takes an argument.
    near = did_you_mean(function, set(vars(sys.modules[module])) - {function})
    return near or "Name a function of the module that takes no argument and returns the model."


def _check_returned(name: str, target: str, module: Any, keywords: Mapping[Any, Any]) -> None:
    """Raise `SettingsError` if a function returned no module, a lazy one or wrong names."""
    from torch import nn

    if not isinstance(module, nn.Module):
        raise SettingsError(
            f"'{target}' returned a {type(module).__name__} for the model '{name}', not a module.",
            "Return a torch.nn.Module, or a pair of a module and its example inputs.",
        )
    if any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
        raise SettingsError(
            f"The model '{name}' has lazy modules, whose parameters have no shapes yet.",
            f"In '{target}', call the model once on an input before you return it.",
        )
    for key in keywords:
        if not isinstance(key, str):
            raise SettingsError(
                f"'{target}' returned example inputs of the model '{name}' with the key {key!r}, "
                "which is no text.",
                "Use the names of the model's arguments as keys of the dict.",
            )


def _arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and keyword arguments of example inputs; none for None."""
    if example is None:
        return (), {}
    if isinstance(example, Mapping):  # also BatchEncoding of transformers
        return (), dict(example)
    if not isinstance(example, tuple | list) or hasattr(example, "_fields"):
        # A tensor would be split along its batch, and a named tuple is one argument.
        return (example,), {}
    if len(example) == 2:
        first, second = example
        if isinstance(first, tuple | list) and isinstance(second, Mapping):
            return tuple(first), dict(second)
    return tuple(example), {}


# ---- example inputs


def example(name: str, *, is_small: bool = False) -> UserModel:
    """The model of a function, for its example inputs and a description of its tensors.

    The parameters of a model of more than `MOST_BUILT_BYTES` take no memory: they are on meta, if
    the model can be built so and its inputs do not come from them. ``is_small``: the parameters are
    known to take less, so the function runs once. Raises as `made`."""
    from farm.models.building import built_on_cpu, built_on_meta
    from farm.types.program_state import seeded
    from farm.types.tensor_kinds import bytes_of

    def make() -> UserModel:
        with seeded():
            return made(name)

    def takes_no_memory(model: UserModel) -> bool:
        is_large = bytes_of(model.module.parameters()) > MOST_BUILT_BYTES
        return is_large and not any(tensor.is_meta for tensor in _tensors_of(model.values))

    return built_on_cpu(make) if is_small else built_on_meta(make, takes_no_memory)


def batched(inputs: Sequence[Any], batch: int) -> list[Any]:
    """Example inputs for another batch: tensors with the first dimension of the first tensor are
    repeated or cut.
    """
    present = _batch(inputs)
    if batch == present or not present:
        return list(inputs)
    fitted = []
    for value in inputs:
        if _has_batch(value) and value.shape[0] == present:
            times = [math.ceil(batch / present)] + [1] * (value.dim() - 1)
            value = value.repeat(*times)[:batch]
        fitted.append(value)
    return fitted


def _batch(inputs: Sequence[Any]) -> int:
    """The first dimension of the first tensor; 0 if there is none; 1 if it is too large for a
    batch, as for one row of billions of numbers.
    """
    first = next((value.shape[0] for value in inputs if _has_batch(value)), 0)
    return first if first <= LARGEST_NUMBER else 1


def _has_batch(value: Any) -> bool:
    """True for a plain tensor with dimensions."""
    import torch

    from farm.types.tensor_kinds import is_plain

    return isinstance(value, torch.Tensor) and is_plain(value) and value.dim() > 0


def _tensors_of(values: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree

    return [value for value in _pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _placed(value: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """An example input on the device; a meta tensor gets random values. With ``dtype``, its
    decimals are cast.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence

    from farm.types.tensor_kinds import moved

    if isinstance(value, PackedSequence):
        data, _, *orders = (_placed(part, dtype, device) for part in value)
        return PackedSequence(data, value.batch_sizes, *orders)  # the host reads these sizes
    if type(value) in (list, tuple):
        return type(value)(_placed(entry, dtype, device) for entry in value)
    if type(value) is dict:
        return {key: _placed(entry, dtype, device) for key, entry in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "meta" or device.type == "meta":
        return moved(value, device, dtype)
    return _filled(value, dtype, device)


def _filled(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A tensor on the device in place of one on meta: standard normal decimals, zeros otherwise."""
    import torch

    from farm.models.building import random_normal
    from farm.types.tensor_kinds import is_real_floating

    if is_real_floating(tensor):
        return random_normal(tuple(tensor.shape), dtype or tensor.dtype, device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


# ---- the source


class Own(Source):
    """The models of functions and of folders with a config.json."""

    name = NAME
    is_preferred = True
    keeps_modes = True  # modules that the user has frozen stay in eval mode
    has_versions = True

    def __init__(self, of_folders: Source) -> None:
        """``of_folders``: the source that makes the models of folders."""
        self._of_folders = of_folders
        #: Name -> its function, and how its model arrives.
        self._arrivals: dict[str, tuple[Any, AsBuilt]] = {}

    def entries(self) -> Mapping[str, ModelEntry]:
        entries = {}
        for name in _targets():
            entries[name] = ModelEntry(name, "user", IMAGE_PX, smallest_size=1, origin=NAME)
        for name in config_folder.folders():
            entries[name] = config_folder.entry(name)
        names = entries.keys() & torchvision.all_names()
        if names:
            raise SettingsError(
                f"The setting 'models' gives your model the name '{min(names)}', which is a model "
                "of torchvision.",
                "Choose another name for your model.",
            )
        return entries

    def registered(self, name: str) -> str:
        return register(name)

    def hint(self, name: str) -> str:
        if name.endswith(".py"):
            return f"Name the function that builds the model, too: {name}:net"
        if config_folder.is_file(Path(name, "config.json")):
            return f"For the folder of this name, write ./{name}"
        if os.path.isdir(name):
            return (
                f"The folder {name} has no config.json. Give another one, or a function: "
                "my_models.py:net"
            )
        return ""

    def maker(self, entry: ModelEntry) -> Source:
        return self._of_folders if config_folder.is_folder(entry.own_name) else self

    def make(self, entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
        """The module; it takes the values of `inputs` by position. Its tensors keep their dtypes,
        unless the variant has another one than most of its numbers. Raises as `made`."""
        from farm.models.building import ByPosition
        from farm.types.tensor_kinds import cast

        model = made(entry.own_name)
        if variant.weights == FROM_FILE:
            weights.load(model.module, entry.own_name, device)
        dtype = self._cast_to(entry, variant)
        if dtype is not None:
            cast(model.module, dtype)
        if not model.keywords:
            return model.module
        return ByPosition(model.module, len(model.positional), tuple(model.keywords))

    def inputs(self, entry: ModelEntry, variant: Variant, device: torch.device) -> tuple[Any, ...]:
        """The model's own inputs in the variant's batch (`batched`), or images without them. Their
        dtypes change as those of the model. Raises as `made`."""
        from farm.models.building import images

        example = self.example_inputs(entry)
        if example is None:
            return (images(variant, device),)
        dtype = self._cast_to(entry, variant)
        return tuple(_placed(value, dtype, device) for value in batched(example, variant.batch))

    def _cast_to(self, entry: ModelEntry, variant: Variant) -> torch.dtype | None:
        """The dtype to which the model is cast; None if it stays as it arrives."""
        from farm.models.building import dtype_of

        dtype = self._arrival(entry.own_name).dtype
        return None if dtype in ("", variant.dtype) else dtype_of(variant)

    def _arrival(self, name: str) -> AsBuilt:
        """How the model of a function arrives; the function runs for this until it has changed.
        Raises as `made`.
        """
        from farm.models.as_built import as_built

        function = None
        with contextlib.suppress(Exception, SystemExit), user_code():
            function = user_modules().function(_targets()[name])  # `made` raises its error again
        if name not in self._arrivals or self._arrivals[name][0] is not function:
            model = example(name)
            values = model.values or ()
            with refused(f"The model '{name}' cannot be described"):
                tensors = _tensors_of(values)
                arrival = as_built(model.module, tensors, _batch(values), model.settings)
            self._arrivals[name] = function, arrival
        return self._arrivals[name][1]

    def example_inputs(self, entry: ModelEntry) -> tuple[Any, ...] | None:
        arrival = self._arrival(entry.own_name)
        is_small = arrival.parameter_bytes <= MOST_BUILT_BYTES
        return example(entry.own_name, is_small=is_small).values

    def usual_batch(self, entry: ModelEntry) -> int:
        return self._arrival(entry.own_name).batch

    def usual_dtype(self, entry: ModelEntry) -> str:
        return self._arrival(entry.own_name).dtype

    def differences(self, entry: ModelEntry, variant: Variant) -> list[str]:
        from farm.models import as_built

        arrival = self._arrival(entry.own_name)
        return list(as_built.differences(entry.own_name, arrival, variant))

    def hint_about_inputs(self, entry: ModelEntry, variant: Variant) -> str:
        if self._cast_to(entry, variant) is not None:
            return " Or omit --dtype, to measure it in its own dtype."
        if self.example_inputs(entry) is not None:
            return ""
        return (
            " The input is an image; return a pair of the model and its example inputs for "
            "another one."
        )

    def code(self, entry: ModelEntry, step: str) -> list[str]:
        """The functions' names and the source of the loaded modules of a model, without comments
        and docstrings; for a folder its config.json."""
        functions = _functions(entry.own_name, step)
        texts = [target.partition(":")[2] for target in functions]
        if config_folder.is_folder(entry.own_name):
            texts.append(config_folder.text(entry.own_name))
        return texts + sorted(
            module.without_docstrings() for module in user_modules().loaded(functions)
        )

    def forget_edited(self, entry: ModelEntry, step: str) -> None:
        user_modules().forget_edited(_functions(entry.own_name, step))
