"""The Python modules of the user: where they are, their source text, and whether a file changed.

Python has one import state per process (`sys.path`, `sys.modules`, `sys.meta_path`), and the object
`user_modules()` is a part of it. The modules are installed, on PYTHONPATH, or in the folders of
`farm.settings.user_models`, which Python searches last."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from farm.settings import user_models
from farm.types.user_packages import NOT_OF_USERS

_FARM = Path(__file__).absolute().parents[1]


@dataclass(frozen=True)
class LoadedModule:
    """A loaded module of the user: its source text as it was loaded, and its syntax tree (None: not
    Python).
    """

    name: str
    text: str
    tree: ast.Module | None

    def without_docstrings(self) -> str:
        """The source text without comments and docstrings."""
        if self.tree is None:
            return self.text
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
        return ast.unparse(self.tree)


class _SourceLoader(SourceFileLoader):
    """Loads a module from its source file and stores the text in ``text``.

    It ignores .pyc files: Python takes them as valid if an edit within one second does not change
    the file size."""

    text: str

    def get_code(self, fullname: str) -> Any:
        data = self.get_data(self.path)
        self.text = importlib.util.decode_source(data)
        return self.source_to_code(data, self.path)


class UserModules:
    """Imports the modules of registered functions, and knows which loaded modules are the user's.

    It is a finder of `sys.meta_path`: it finds modules with the other finders, but loads the user's
    modules with `_SourceLoader`."""

    def __init__(self) -> None:
        #: top-level name of the module of a registered function -> the folder that has it
        self._folders: dict[str, Path] = {}
        #: module -> the settings of PyTorch that its import has changed
        self._settings: dict[str, dict[str, Any]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is None:
                continue
            loader = spec.loader
            if type(loader) is SourceFileLoader and self._is_of_user(name, loader.path):
                spec.loader = _SourceLoader(name, loader.path)
            return spec
        return None

    def make_importable(self, module_name: str) -> None:
        """Let Python find a module of the user, and remember the folder that has it."""
        for path in user_models.folders():
            folder = os.path.abspath(path)
            if folder not in sys.path:
                sys.path.append(folder)  # last: nothing in it may replace an installed module
        top = module_name.partition(".")[0]
        with contextlib.suppress(ValueError):  # a module without a spec, such as __main__
            spec = importlib.util.find_spec(top)
            if spec and top not in NOT_OF_USERS:
                locations = spec.submodule_search_locations or [spec.origin or "."]
                self._folders[top] = Path(next(iter(locations))).absolute().parent

    def function(self, target: str) -> Any:
        """Import the function 'module:function'. The settings of PyTorch stay as they are."""
        module_name, _, function_name = target.partition(":")
        self.make_importable(module_name)
        if module_name in sys.modules:
            module = importlib.import_module(module_name)
        else:
            from farm.types.program_state import seeded
            from farm.types.torch_settings import restored

            with seeded(), restored() as changed:
                module = importlib.import_module(module_name)
            self._settings[module_name] = changed
        return operator.attrgetter(function_name)(module)

    def settings_of(self, target: str) -> dict[str, Any]:
        """The settings of PyTorch that the import of 'module:function' has changed."""
        return self._settings.get(target.partition(":")[0], {})

    def has_file(self, file: str) -> bool:
        """True for a file in the folder of a registered function that is not installed."""
        if file.startswith("<"):  # a module of Python itself
            return False
        path = Path(file).absolute()
        if {"site-packages", "dist-packages"}.intersection(path.parts):
            return False
        if path.is_relative_to(_FARM) or path.is_relative_to(Path(os.__file__).parent):
            return False
        return any(path.is_relative_to(folder) for folder in self._folders.values())

    def _is_of_user(self, name: str, file: str) -> bool:
        """True for modules of the package or the folder of a registered function; False for
        installed ones beside it.
        """
        top = name.partition(".")[0]
        if top in self._folders:
            return True
        return top not in NOT_OF_USERS and self.has_file(file)

    def loaded(self, functions: Iterable[str]) -> Iterator[LoadedModule]:
        """The loaded modules of the user that some functions import, directly or indirectly."""
        todo = [target.partition(":")[0] for target in functions]
        for name in todo:
            self.make_importable(name)
        visited: set[str] = set()
        while todo:
            for name in _with_parents(todo.pop()):
                file = _file_of(name)
                if name in visited or not file.endswith(".py") or not self._is_of_user(name, file):
                    continue
                visited.add(name)
                module = _read(name, file)
                if module.tree:
                    package = sys.modules[name].__package__ or ""
                    todo += _imported_names(module.tree, package)
                yield module

    def forget_edited(self, functions: Iterable[str]) -> None:
        """If a file of the functions' modules changed since it was loaded, import all of them again
        at the next use.
        """
        modules = list(self.loaded(functions))
        if not all(_is_current(module) for module in modules):
            for module in modules:
                del sys.modules[module.name]
        importlib.invalidate_caches()


def user_modules() -> UserModules:
    """The finder of the user's modules in `sys.meta_path`; the first call adds it."""
    for finder in sys.meta_path:
        if isinstance(finder, UserModules):
            return finder
    finder = UserModules()
    sys.meta_path.insert(0, finder)
    return finder


def _with_parents(name: str) -> list[str]:
    """A module's name and those of its packages: a, a.b and a.b.c for a.b.c."""
    parts = name.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _file_of(name: str) -> str:
    """The file of a loaded module; "" if it is not loaded, or has none."""
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _read(name: str, file: str) -> LoadedModule:
    text = getattr(sys.modules[name].__loader__, "text", None)
    with contextlib.suppress(OSError, SyntaxError):
        if text is None:
            text = _text(file)
        return LoadedModule(name, text, ast.parse(text))
    return LoadedModule(name, text or "", None)


def _text(file: str) -> str:
    return importlib.util.decode_source(Path(file).read_bytes())


def _is_current(module: LoadedModule) -> bool:
    """True if a module was loaded from the present text of its file."""
    if not isinstance(sys.modules[module.name].__loader__, _SourceLoader):
        return False
    with contextlib.suppress(OSError):
        return _text(_file_of(module.name)) == module.text
    return False


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """The names in a module's import statements that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
