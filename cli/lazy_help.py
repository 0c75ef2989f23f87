"""Typer's help without what ours never shows.

What draws it loads rich's Markdown, with two parsers, and its tracebacks as it is imported: a third of what `farm --help`
took. Our help is rich text, and `cli.main` tells of errors itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class Markdown:
    """rich's, when one is made."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        from rich.markdown import Markdown

        return Markdown(*arguments, **options)


class Traceback:
    """rich's, when one is made."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        from rich.traceback import Traceback

        return Traceback(*arguments, **options)


def load() -> None:
    """Import what draws the help, with these two in the place of rich's."""
    stand_ins = []
    for name, late in (("rich.markdown", Markdown), ("rich.traceback", Traceback)):
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            setattr(sys.modules[name], late.__name__, late)
            stand_ins.append(name)
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in stand_ins:
            del sys.modules[name]
