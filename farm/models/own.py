"""The user's own models, which the setting ``models`` registers on each host: a name and
'module:function'.

The function takes no argument and returns the module, or a pair of the module and its example
inputs:

    a tensor                                  the only argument
    a tuple (or list) of values               positional arguments
    a dict of values                          keyword arguments
    a pair of a tuple and a dict              positional and keyword arguments

Instead of a function, the setting may name a folder with a config.json of transformers
(`farm.models.transformers`).

The Python module is installed, on PYTHONPATH, or in a folder of the setting ``models_path``. Only
modules that this host's own settings name are imported; messages and the database hold the name
alone. `register` adds a location that the user gives on this host, such as ``my_models.py:net``, to
the settings of this process and its child processes."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UsageError, did_you_mean, error_text, refused
from farm.models import transformers
from farm.models.entry import ModelEntry
from farm.models.user_code import user_code
from farm.settings import settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.models.as_built import AsBuilt
    from farm.types.protocol import Variant

NAME = "user"
PACKAGE = EXTRA = ""
REFUSED: Mapping[str, str] = {}
IMAGE_PX = 224  # size of the images for a model without example inputs
_FARM = Path(__file__).absolute().parents[1]
#: A part of a module's name: Python also imports my-model.py and 01_train.py by their names.
_MODULE_NAME = re.compile(r"[\w-]+")
_PLACE = (
    "Name the module's folder in FARM_MODELS_PATH (the current folder is not searched), or "
    "install the module"
)


def is_location(name: str) -> bool:
    """True for ``my_models.py:net`` and for a folder such as ``models/tiny/``, unless it is a
    registered name.
    """
    if name in settings().models:
        return False
    return ":" in name or ("/" in name and _is_file(Path(name, "config.json")))


def _is_file(path: Path) -> bool:
    """True if a file is there; False for a name that no file can have."""
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def hint(name: str) -> str:
    """How to write the location that a text probably means; "" if it means none."""
    if name.endswith(".py"):
        return f"Name the function that builds the model, too: {name}:net"
    return (
        f"For the folder of this name, write ./{name}"
        if _is_file(Path(name, "config.json"))
        else ""
    )


def register(name: str) -> str:
    """Return the name of a model. If it is a location, register it in this process's settings
    first.

    A location is that of a function, ``file.py:function``, or ``package.module:function`` of an
    installed package or a package in the current folder; or that of a folder with a config.json,
    its path. Child processes inherit the registration. Never call it with a name from a message or
    from the database. Raises `UsageError` if there is no such file, or its module has the name of
    another module."""
    if not is_location(name):
        return name
    where, colon, function = name.rpartition(":")
    if not colon:
        path = Path(name).absolute()
        os.environ["FARM_MODELS"] = json.dumps({**settings().models, path.name: str(path)})
        settings.cache_clear()
        return path.name
    file = Path(where)
    if is_file := file.suffix == ".py":
        _check_file(file)
        where = file.stem
    folder = os.path.dirname(os.path.abspath(file)) if is_file else os.getcwd()
    target = f"{where}:{function}"
    _checked("models", {target: target}, "takes no argument and returns the module")
    paths = dict.fromkeys([*filter(None, settings().models_path.split(os.pathsep)), folder])
    os.environ["FARM_MODELS"] = json.dumps({**settings().models, target: target})
    os.environ["FARM_MODELS_PATH"] = os.pathsep.join(paths)
    settings.cache_clear()
    _note_folder(where)
    found = importlib.util.find_spec(where.partition(".")[0])
    if is_file and found and not _is_same_file(found.origin, file):
        problem = (
            f"'{file}' cannot be imported: the name '{where}' means the module "
            f"{found.origin or 'of Python'}."
        )
        raise UsageError(problem, "Rename the file.")
    return target


def _check_file(file: Path) -> None:
    """Raise `UsageError` if there is no such file, or Python cannot import a file of this name."""
    if not _is_file(file):
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


def loss(name: str) -> Callable[[Any], Any] | None:
    """The user's loss function for a model, from the model's output to a scalar; None if none is
    registered. Raises `SettingsError` if the setting is malformed, or the function could not be
    imported."""
    target = _checked(
        "losses", settings().losses, "takes the model's output and returns a scalar"
    ).get(name)
    try:
        with user_code():
            return None if target is None else _imported(target)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error_text(error)}"
        problem = f"The loss of '{name}' could not be imported from '{target}': {reason}"
        raise SettingsError(problem, f"{_PLACE}.") from error


def loss_target(name: str) -> str:
    """Return where the user's loss function of a model is: 'module:function'."""
    return settings().losses[name]


def _targets() -> dict[str, str]:
    """The registered functions by name of the model. Folders with a config.json are left out."""
    given, folders = settings().models, transformers.folders()
    for name, folder in folders.items():
        if not _is_file(folder / "config.json"):
            raise SettingsError(
                f"The setting 'models' has '{folder}' for '{name}', which is no 'module:function' "
                "and no folder with a "
                "config.json.",
                "Write 'package.module:function', or the path of the folder.",
            )
    functions = {name: target for name, target in given.items() if name not in folders}
    return _checked("models", functions, "takes no argument and returns the module")


def _checked(setting: str, named: dict[str, str], takes: str) -> dict[str, str]:
    """Return `named`; raise `SettingsError` if a value has another form than 'module:function'.
    Nothing is imported.
    """
    for name, target in named.items():
        module, colon, function = target.partition(":")
        parts = module.split(".")
        if not colon or not function.isidentifier() or not all(map(_MODULE_NAME.fullmatch, parts)):
            problem = (
                f"The setting '{setting}' has '{target}' for '{name}'; the form must be "
                "'module:function'."
            )
            raise SettingsError(problem, f"Write 'package.module:function'. The function {takes}.")
    return named


def _imported(target: str) -> Any:
    module_name, _, function_name = target.partition(":")
    _note_folder(module_name)
    with contextlib.nullcontext() if module_name in sys.modules else _seeded():
        module = importlib.import_module(module_name)
    return getattr(module, function_name)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """While active, PyTorch's random numbers are the same in every process: a user's model may
    branch on its inputs. The state of the generator stays."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _note_folder(module_name: str) -> None:
    """Make the module importable, and remember the folder that has it."""
    for path in filter(None, settings().models_path.split(os.pathsep)):
        if (folder := os.path.abspath(path)) not in sys.path:
            sys.path.append(folder)  # last: nothing in it may replace an installed module
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    top = module_name.partition(".")[0]
    with contextlib.suppress(ValueError):  # a module without a spec, such as __main__
        if spec := importlib.util.find_spec(top):
            _folders[top] = (
                Path(next(iter(spec.submodule_search_locations or [spec.origin or "."])))
                .absolute()
                .parent
            )


_folders: dict[
    str, Path
] = {}  # top-level name of the module of a registered function -> the folder that has it


class _SourceLoader(SourceFileLoader):
    """Loads a module from its source file and stores the text in ``text``.

    It ignores .pyc files: Python takes them as valid if an edit within one second does not change
    the file size."""

    text: str

    def get_code(self, fullname: str) -> Any:
        data = self.get_data(self.path)
        self.text = importlib.util.decode_source(data)
        return self.source_to_code(data, self.path)


class _Finder:
    """Finds modules with the other finders, but loads the user's modules with `_SourceLoader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        others = (one for one in sys.meta_path if one is not self)
        spec = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        if spec and type(spec.loader) is SourceFileLoader and _is_own(name, spec.loader.path):
            spec.loader = _SourceLoader(name, spec.loader.path)
        return spec


_FINDER = _Finder()


def _is_own(name: str, file: str) -> bool:
    """True for modules of the package or the folder of a registered function; False for installed
    ones beside it.
    """
    top = name.partition(".")[0]
    if top in _folders or top in (*sys.stdlib_module_names, "farm", "tasks", "cli"):
        return top in _folders
    return _is_in_folders(file)


def _is_in_folders(file: str) -> bool:
    if file.startswith("<"):  # a module of Python itself
        return False
    path = Path(file).absolute()
    packages = {"site-packages", "dist-packages"}.intersection(path.parts)
    installed = (
        packages or path.is_relative_to(_FARM) or path.is_relative_to(Path(os.__file__).parent)
    )
    return not installed and any(path.is_relative_to(folder) for folder in _folders.values())


def _functions(name: str, step: str) -> list[str]:
    """The registered functions that decide what a model computes, as 'module:function'."""
    return [
        target
        for target in (_targets().get(name), settings().losses.get(name) if step else None)
        if target
    ]


def source_of(name: str) -> Path | None:
    """The loaded file with the function of a model, or the config.json of its folder."""
    if folder := transformers.folders().get(name):
        return folder / "config.json"
    file = getattr(sys.modules.get(_targets().get(name, "").partition(":")[0]), "__file__", None)
    return Path(file) if file else None


def _loaded(name: str, step: str) -> Iterator[tuple[str, str, ast.Module | None]]:
    """The loaded modules of the user that a model's functions import, directly or indirectly: their
    names, the texts of their sources (as loaded, if known) and their syntax trees (None: not
    Python)."""
    todo, met = [target.partition(":")[0] for target in _functions(name, step)], set[str]()
    for one in todo:
        _note_folder(one)
    while todo:
        parents = todo.pop().split(".")
        for one in (".".join(parents[: number + 1]) for number in range(len(parents))):
            module = sys.modules.get(one)
            file = getattr(module, "__file__", None) or ""
            if module is None or one in met or not file.endswith(".py") or not _is_own(one, file):
                continue
            met.add(one)
            text = getattr(module.__loader__, "text", None)
            tree = None
            with contextlib.suppress(OSError, SyntaxError):
                text = _text(file) if text is None else text
                tree = ast.parse(text)
                todo += _imports(tree, module.__package__ or "")
            yield one, text or "", tree


def _text(file: str) -> str:
    return importlib.util.decode_source(Path(file).read_bytes())


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """The names in a module's import statements that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forget_edited(name: str, step: str) -> None:
    """If a file of a model's modules changed since it was loaded, import the modules again at the
    next use.
    """
    found = {one: text for one, text, _ in _loaded(name, step)}

    def is_current(one: str, text: str) -> bool:
        module = sys.modules[one]
        with contextlib.suppress(OSError):
            return (
                isinstance(module.__loader__, _SourceLoader)
                and _text(module.__file__ or "") == text
            )
        return False

    if not all(is_current(one, text) for one, text in found.items()):
        for one in found:
            del sys.modules[one]
    importlib.invalidate_caches()


def code(name: str, step: str) -> list[str]:
    """The functions' names and the source of the loaded modules of a model, without comments and
    docstrings; for a folder its config.json."""
    names = [target.partition(":")[2] for target in _functions(name, step)]
    names += [transformers.config_text(name)] if name in transformers.folders() else []
    return names + sorted(
        text if tree is None else _without_docstrings(tree) for _, text, tree in _loaded(name, step)
    )


def _without_docstrings(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
    return ast.unparse(tree)


def entries() -> Mapping[str, ModelEntry]:
    functions = {
        name: ModelEntry(name, "user", IMAGE_PX, smallest_size=1, origin=NAME)
        for name in _targets()
    }
    return functions | {name: transformers.entry_of_folder(name) for name in transformers.folders()}


def make(entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
    """Creates the module; it takes the values of `inputs` by position. Its tensors keep their
    dtypes, unless the variant has another one than most of its numbers. Raises `SettingsError` if
    the function raises an error, or does not return a module."""
    from farm.models.building import ByPosition, dtype_of
    from farm.models.tensor_kinds import cast

    model, positional, keywords = _made(entry.own_name)
    if _is_cast(entry.own_name, variant):
        cast(model, dtype_of(variant))
    return ByPosition(model, len(positional or ()), tuple(keywords)) if keywords else model


def inputs(entry: ModelEntry, variant: Variant, device: torch.device) -> tuple[Any, ...]:
    """The model's own inputs in the variant's batch (`batched`), or images without them. Their
    dtypes change as those of the model. Raises as `make`."""
    from farm.models.building import dtype_of, images

    given = given_inputs(entry.own_name)
    if given is None:
        return (images(variant, device),)
    dtype = dtype_of(variant) if _is_cast(entry.own_name, variant) else None
    return tuple(_placed(value, dtype, device) for value in batched(given, variant.batch))


def _is_cast(name: str, variant: Variant) -> bool:
    return built(name).dtype not in ("", variant.dtype)


_built: dict[str, tuple[Any, AsBuilt]] = {}  # name -> its function, and how its model arrives


def built(name: str) -> AsBuilt:
    """How the model of a function arrives; the function runs once for this. Raises as `make`."""
    from farm.models.as_built import as_built

    known = _built.get(name)
    function = None
    with contextlib.suppress(Exception, SystemExit), user_code():
        function = _imported(_targets()[name])  # `_made` raises its error again
    if known is None or known[0] is not function:
        with _seeded():
            model, positional, keywords = _made(name)
        values = (*(positional or ()), *keywords.values())
        with refused(f"The model '{name}' cannot be described"):
            known = function, as_built(model, _tensors_of(values), _batch(values))
        _built[name] = known
    return known[1]


def is_function(name: str) -> bool:
    """True for a model that a function builds, not a folder with a config.json."""
    return name in settings().models and name not in transformers.folders()


def differences(name: str, variant: Variant) -> list[str]:
    """What differs between the model that the function returned and the measured one, see
    `farm.models.as_built`.
    """
    from farm.models import as_built

    return list(as_built.differences(name, built(name), variant))


def given_inputs(name: str) -> tuple[Any, ...] | None:
    """The model's own example inputs: positional arguments of its module. None if it has none.
    Raises as `make`.
    """
    if name in transformers.folders():
        return None
    with _seeded():
        _, positional, keywords = _made(name)
    return None if positional is None else (*positional, *keywords.values())


def batched(given: Sequence[Any], batch: int) -> list[Any]:
    """Example inputs for another batch: tensors with the first dimension of the first tensor are
    repeated or cut.
    """
    import torch

    from farm.models.tensor_kinds import is_plain

    own_batch = _batch(given)

    def fitted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_plain(value) or not value.dim():
            return value
        if batch == own_batch or value.shape[0] != own_batch or not own_batch:
            return value
        return value.repeat(-(-batch // own_batch), *[1] * (value.dim() - 1))[:batch]

    return [fitted(value) for value in given]


def own_batch(name: str) -> int:
    """The batch of the model's own example inputs; 0 if none. Imports the module and torch. Raises
    as `make`.
    """
    return built(name).batch if is_function(name) else 0


def _batch(given: Sequence[Any]) -> int:
    import torch

    from farm.models.tensor_kinds import is_plain

    tensors = (
        value
        for value in given
        if isinstance(value, torch.Tensor) and is_plain(value) and value.dim()
    )
    return next((tensor.shape[0] for tensor in tensors), 0)


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

    from farm.models.tensor_kinds import moved

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
    from farm.models.tensor_kinds import is_real_floating

    if is_real_floating(tensor):
        return random_normal(tuple(tensor.shape), dtype or tensor.dtype, device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def _made(name: str) -> tuple[nn.Module, tuple[Any, ...] | None, Mapping[str, Any]]:
    """The user's module, its positional arguments (None without example inputs) and its keyword
    arguments.
    """
    from torch import nn

    target = _targets()[name]
    try:
        with user_code():
            made = _imported(target)()
    except (Exception, SystemExit) as error:
        built = "its model" if name == target else f"the model '{name}'"
        message = f"'{target}' could not build {built}: {type(error).__name__}: {error_text(error)}"
        frames = [
            one for one in traceback.extract_tb(error.__traceback__) if _is_in_folders(one.filename)
        ]
        module, _, function = target.partition(":")
        if frames:
            step = f"Correct {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}"
        elif module in sys.modules:  # it has no such function, or the function takes an argument
            near = did_you_mean(function, set(vars(sys.modules[module])) - {function})
            step = (
                near
                or "Name a function of the module that takes no argument and returns the model."
            )
        else:
            step = f"{_PLACE}, and check that the function takes no argument."
        raise SettingsError(message, step) from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    positional, keywords = _arguments(given)
    if not isinstance(model, nn.Module):
        problem = (
            f"'{target}' returned a {type(model).__name__} for the model '{name}', not a module."
        )
        step = "Return a torch.nn.Module, or a pair of a module and its example inputs."
    elif any(
        nn.parameter.is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())
    ):
        problem = f"The model '{name}' has lazy modules, whose parameters have no shapes yet."
        step = f"In '{target}', call the model once on an input before you return it."
    elif wrong := [key for key in keywords if not isinstance(key, str)]:
        problem = (
            f"'{target}' returned example inputs of the model '{name}' with the key {wrong[0]!r}, "
            "which is no text."
        )
        step = "Use the names of the model's arguments as keys of the dict."
    else:
        return model, positional, keywords
    raise SettingsError(problem, step)


def _arguments(given: Any) -> tuple[tuple[Any, ...] | None, Mapping[str, Any]]:
    if given is None:
        return None, {}
    if isinstance(given, Mapping):  # also BatchEncoding of transformers
        return (), dict(given)
    if not isinstance(given, tuple | list) or hasattr(given, "_fields"):
        return (
            given,
        ), {}  # a tensor would be split along its batch, and a named tuple is one argument
    if len(given) == 2 and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}
