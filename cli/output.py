"""How the command line speaks: results on stdout, everything else on stderr, errors as one message.

Rich and traceback load only when something is printed with them, so that ``farm --help`` stays quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from farm.errors import Unwritable
from farm.types.format import printable

if TYPE_CHECKING:
    from rich.console import Console


_ENDLESS = 100_000  # columns; no line is as long


class Left(KeyboardInterrupt):
    """Ctrl-C where a person only looked on: no error."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C where there is something to say about what goes on and how to continue."""

    def __init__(self, hint: str) -> None:
        super().__init__(hint)
        self.hint = hint


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Around what writes to stdout.

    Raises:
        Unwritable: stdout takes nothing more. A reader that has gone is no error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable.because(error) from error


def emit(line: str) -> None:
    """A plain line on stdout."""
    with writing():
        typer.echo(printable(line))


def emit_json(data: Any) -> None:
    """One JSON document on stdout."""
    with writing():
        typer.echo(printable(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False), keep="\n"))


def show(renderable: Any) -> None:
    """A rich renderable on stdout; plain text where stdout is a pipe."""
    with writing():
        console().print(renderable)


_quiet = False


def set_quiet(quiet: bool) -> None:
    """Whether results and errors alone are told: no notes, no progress."""
    global _quiet
    _quiet = quiet


_instead: Callable[[str], object] | None = None


def say(line: str) -> None:
    """A line for the person, on stderr: never mixed into what a program reads. One that goes on below is set in there."""
    if not _quiet:
        _tell(line)


def _tell(line: str) -> None:
    if _instead is not None:
        _instead(line)
    else:
        typer.echo(printable(line, keep="\n").replace("\n", "\n  "), err=True)


@contextlib.contextmanager
def said_through(instead: Callable[[str], object]) -> Iterator[None]:
    """Within, what is said goes there: into a log whose lines have a form of their own."""
    global _instead
    before, _instead = _instead, instead
    try:
        yield
    finally:
        _instead = before


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width, and what reads it wants each line whole; COLUMNS, which Rich reads, gives it one.
    whole = not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    return Console(
        file=stream, width=_ENDLESS if whole else None, soft_wrap=False, highlight=False, quiet=stderr and _quiet
    )


def complain(message: str, next_step: str = "") -> None:
    """An error, and what to do about it."""
    _tell(f"error: {message}")
    if next_step:
        _tell(f"→ {next_step}")
