"""Typer's help without what ours never shows.

What draws it loads rich's Markdown, with two parsers, and its tracebacks as it is imported: a third of what `farm --help`
took. Our help is rich text, and `cli.main` tells of errors itself.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NOT_SHOWN = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


def load() -> None:
    """Import what draws the help; it has a class of these two only when it makes something of it."""
    stand_ins = {}
    for module, name in _NOT_SHOWN.items():
        if module not in sys.modules:
            stand_ins[module] = sys.modules[module] = ModuleType(module)
            setattr(sys.modules[module], name, _late(module, name))
    try:
        importlib.import_module("typer.rich_utils")
    finally:
        for module in stand_ins:
            del sys.modules[module]


def _late(module: str, name: str) -> type:
    def make(_: type, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return type(name, (), {"__new__": make})
