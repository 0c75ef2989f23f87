"""What a pass of a user's model changes in its process: random numbers, and tensors that its
objects keep.

A capture runs the model. Afterwards the program must run as before, so it must not find tensors of
the capture: those of a fake pass have no values, and those of a capture on the CPU are on another
device than the model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from farm.types.user_packages import NOT_OF_USERS

#: Packages whose objects are never restored: also programs that run the user's code, because their
#: session refers to all that the process has.
_NOT_RESTORED = NOT_OF_USERS | {
    "pytest",
    "_pytest",
    "pluggy",
    "hypothesis",
    "IPython",
    "ipykernel",
    "traitlets",
}
_LRU_CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """While active, the random numbers of PyTorch, Python and NumPy are the same in every process:
    a user's model may branch on them. The states of the generators stay."""
    numpy_random: Any = sys.modules.get("numpy.random")
    state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        if numpy_random:
            numpy_random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)
            if numpy_random:
                numpy_random.set_state(numpy_state)


@contextlib.contextmanager
def tensors_restored(model: nn.Module) -> Iterator[None]:
    """At the end, what a pass of ``model`` has kept is gone: tensors in objects, containers and
    closures that the model refers to, in the Python modules of its classes, in their classes, and
    in caches of functions. The attributes of ``model`` and of its modules stay."""
    kept = _KeptByProgram(model)
    try:
        yield
    finally:
        kept.restore()


class _KeptByProgram:
    """The present contents of what a model can reach, without PyTorch and the standard library."""

    def __init__(self, model: nn.Module) -> None:
        self.contents: list[tuple[Any, Any]] = []  # container, class or cell -> its contents
        self.misses: list[tuple[Any, int]] = []  # of the caches of functions
        self._visited: set[int] = set()
        self._waiting: list[Any] = []
        modules = list(model.modules())
        self._visited.update(map(id, modules))
        for module in modules:
            self._waiting.extend(vars(module).values())
        classes = itertools.chain.from_iterable(type(module).__mro__ for module in modules)
        names = {cls.__module__ for cls in classes}
        for name in sorted(filter(_is_of_program, names)):
            self._waiting.append(vars(sys.modules[name]))
        while self._waiting:
            value = self._waiting.pop()
            if id(value) not in self._visited:
                self._visited.add(id(value))
                self._visit(value)

    def restore(self) -> None:
        for cache, misses in self.misses:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for container, before in self.contents:
            if _keeps_new_tensor(_contents(container), before):
                _write(container, before)

    def _visit(self, value: Any) -> None:
        if isinstance(value, torch.Tensor | types.ModuleType | str | int | float):
            return
        if isinstance(value, dict | list | set | deque | types.CellType):
            self._save(value)
        elif isinstance(value, tuple):
            self._waiting.extend(tuple.__iter__(value))
        elif isinstance(value, _LRU_CACHE):
            self.misses.append((value, value.cache_info().misses))
        elif isinstance(value, types.MethodType):
            self._waiting.extend((value.__self__, value.__func__))
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append(value.__func__)
        elif isinstance(value, functools.partial):
            self._waiting.extend((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            if _is_of_program(value.__module__):
                cells = value.__closure__ or ()
                self._waiting.extend((*cells, vars(value), value.__defaults__ or ()))
        elif isinstance(value, type):
            if _is_of_program(value.__module__):
                self._save(value)
        elif _is_of_program(type(value).__module__) and isinstance(
            getattr(value, "__dict__", None), dict
        ):
            self._waiting.append(vars(value))

    def _save(self, container: Any) -> None:
        before = _contents(container)
        self.contents.append((container, before))
        self._waiting.extend(before.values() if isinstance(before, dict) else before)


def _is_of_program(name: str | None) -> bool:
    """True for a loaded module of the user or of a package with models."""
    top = (name or "").partition(".")[0]
    return bool(top) and top not in _NOT_RESTORED and name in sys.modules


def _contents(container: Any) -> Any:
    """A copy of the contents: a dictionary, or a list of the entries."""
    if isinstance(container, type):
        return dict(vars(container))
    if isinstance(container, dict):
        return {key: dict.__getitem__(container, key) for key in dict.keys(container)}
    if isinstance(container, types.CellType):
        try:
            return [container.cell_contents]
        except ValueError:  # it is empty
            return []
    return list(container)


def _keeps_new_tensor(contents: Any, before: Any) -> bool:
    """True if contents have a tensor that they did not have, also in a tuple, a list or a
    dictionary.
    """
    entries = list(contents.values()) if isinstance(contents, dict) else contents
    earlier = before.values() if isinstance(before, dict) else before
    identities = set(map(id, earlier))
    return any(_has_tensor(entry) for entry in entries if id(entry) not in identities)


def _has_tensor(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if not depth or isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    if isinstance(value, dict):
        entries = list(dict.values(value))
    elif isinstance(value, list | tuple | set | deque):
        entries = list(value)
    else:
        entries = list(getattr(value, "__dict__", {}).values())
    return any(_has_tensor(entry, depth - 1) for entry in entries)


def _write(container: Any, before: Any) -> None:
    """Give a container the contents that it had."""
    if isinstance(container, type):
        present = dict(vars(container))
        for name in present.keys() - before.keys():
            delattr(container, name)
        for name, value in before.items():
            if present.get(name, container) is not value:
                setattr(container, name, value)
    elif isinstance(container, dict):
        for key in [key for key in container if key not in before]:
            del container[key]
        for key, value in before.items():
            if key not in container or container[key] is not value:
                container[key] = value
    elif isinstance(container, types.CellType):
        if before:
            container.cell_contents = before[0]
        else:
            del container.cell_contents
    elif isinstance(container, set):
        container.clear()
        container.update(before)
    elif isinstance(container, deque):
        container.clear()
        container.extend(before)
    else:
        container[:] = before
