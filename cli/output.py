"""The output of the command line: results on stdout, everything else on stderr, errors as one
message.

Rich is imported only when it is used, so that ``farm --help`` is fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from cli.streams import discard_stdout, shows
from farm.errors import Unwritable
from farm.errors.safe_text import printable, without_secrets

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from sqlmodel import Session

    from farm.devices.device import Card
    from farm.requests.partial_request import ResolvedVariant
    from farm.requests.resolved import ResolvedRequest
    from farm.store.database import Database


_ENDLESS = 100_000  # columns; no line is longer
PATIENCE_S = 2.0  # a command that takes longer says what it does
REPEATED_S = 5.0  # least time between two lines of progress, without a terminal


class Left(KeyboardInterrupt):
    """Ctrl-C while the program only shows progress: not an error."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while work continues elsewhere. The argument says what continues and how to return to
    it.
    """


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """A context for writing to stdout. Raises `Unwritable` if that fails; a reader that has ended
    is not an error.
    """
    end_note()
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise Unwritable.because(error) from error


def _write(text: str, stream: TextIO) -> None:
    """Write a line. Typer would write UTF-8 to a terminal that has ASCII only."""
    stream.write(f"{text}\n")
    stream.flush()


def emit(line: str) -> None:
    """Print a plain line on stdout."""
    with writing():
        _write(printable(line), sys.stdout)


def emit_json(data: Any) -> None:
    """Print one JSON document on stdout."""
    text = printable(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False), keep="\n")
    if not shows(text):
        text = json.dumps(data, indent=2, allow_nan=False)
    with writing():
        _write(text, sys.stdout)


def show(renderable: Any) -> None:
    """Print a rich renderable on stdout; plain text if stdout is a pipe."""
    with writing():
        console().print(renderable)


def answer(as_json: bool, data: Any, view: Callable[[], Any]) -> None:
    """Print an answer on stdout: plain JSON (or an object with `to_json`), or the renderable that
    `view` makes.
    """
    if as_json:
        emit_json(data.to_json() if hasattr(data, "to_json") else data)
    else:
        show(view())


class _Stderr:
    """What a command prints on stderr beside errors.

    Attributes:
        is_quiet: only results and errors are printed: no notes, no progress.
        log: gets the notes instead of stderr, if it is set.
        note: what the command does, while it prints nothing.
    """

    def __init__(self) -> None:
        self.is_quiet = False
        self.log: Callable[[str], object] | None = None
        self.note: _Note | None = None


_STDERR = _Stderr()


def set_quiet(quiet: bool) -> None:
    """Print only results and errors: no notes, no progress."""
    _STDERR.is_quiet = quiet


def say(line: str) -> None:
    """Print a note on stderr, separate from results. Further lines of it are indented."""
    if not _STDERR.is_quiet:
        _tell(line)


def say_differences(resolved: Iterable[ResolvedRequest | ResolvedVariant]) -> None:
    """Print what differs between a user's models and the measured ones: a dtype, the mode. Each
    line once.
    """
    lines: dict[str, None] = {}
    for entry in resolved:
        lines.update(dict.fromkeys(entry.differences))
    for line in lines:
        say(line)


def _tell(line: str) -> None:
    line = without_secrets(line)
    if _STDERR.log is not None:
        _STDERR.log(line)
    else:
        # A closed or full stderr is no reason to stop.
        with contextlib.suppress(OSError, ValueError):
            _write(printable(line, keep="\n").replace("\n", "\n  "), sys.stderr)


@contextlib.contextmanager
def said_through(log: Callable[[str], object]) -> Iterator[None]:
    """A context in which notes go to this function, as of a log with its own line format."""
    before = _STDERR.log
    _STDERR.log = log
    try:
        yield
    finally:
        _STDERR.log = before


# ---- what a command does while it prints nothing


class _Note:
    """A line on stderr, or a spinner in a terminal, from a thread: what the command does, after
    `PATIENCE_S`.
    """

    def __init__(self, text: str) -> None:
        self.text, self.over = text, threading.Event()
        self.thread = threading.Thread(target=self._show, daemon=True)
        self.thread.start()

    def _show(self) -> None:
        if self.over.wait(PATIENCE_S):
            return
        out, said = console(stderr=True), ""
        if out.file.isatty():
            spinner = "dots" if shows("⠋") else "line"
            with out.status(printable(self.text), spinner=spinner) as status:
                while not self.over.wait(0.2):
                    status.update(printable(self.text))
            return
        while not (said and self.over.wait(REPEATED_S)):
            if said != self.text:
                say(f"{(said := self.text)} ...")


def end_note() -> None:
    """End the note: from here on, the command shows its own output or progress."""
    note = _STDERR.note
    _STDERR.note = None
    if note is not None:
        note.over.set()
        note.thread.join()


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """A context with a note of what the command does, if there is none. It ends with the first
    output on stdout.
    """
    _STDERR.note = _STDERR.note or _Note(text)
    try:
        yield
    finally:
        end_note()


def doing(text: str) -> None:
    """Change the text of the note."""
    if _STDERR.note is not None:
        _STDERR.note.text = text


def console(*, stderr: bool = False) -> Console:
    from cli.tables import PlainConsole

    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width: its reader needs complete lines. COLUMNS, which Rich reads, sets a width.
    endless = not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    return PlainConsole(
        file=stream,
        width=_ENDLESS if endless else None,
        highlight=False,
        quiet=stderr and _STDERR.is_quiet,
    )


def complain(message: str, next_step: str = "") -> None:
    """Print an error, and the next step."""
    _tell(f"error: {message}")
    if next_step:
        _tell(f"→ {next_step}")


# ---- the database and the cards of a command


Answer = TypeVar("Answer")


def open_database() -> Database:
    """See `farm.store.database.open_database`."""
    from farm.store.database import open_database

    return open_database()


@contextlib.contextmanager
def writable_database(*, may_upgrade: bool = False) -> Iterator[Database]:
    """The database of the settings; see `farm.store.upgrades.writable_database`.

    Args:
        may_upgrade: allows the upgrade of an embedded database. Its note is printed with --quiet,
            too.
    """
    from farm.store.upgrades import writable_database

    database = writable_database(_tell if may_upgrade else None)
    try:
        yield database
    finally:
        database.close()


def chosen_own_cards(wanted: Sequence[str]) -> list[Card]:
    """See `farm.jobs.cards.chosen_own_cards`."""
    from farm.jobs.cards import chosen_own_cards

    return chosen_own_cards(wanted, say)


def check_page(path: Path | None) -> None:
    """Raise `UsageError` if no page can be written to the file of --html, before the work that it
    shows. None: no page.
    """
    from farm.extensions import result_pages

    if path is not None:
        result_pages("--html").check_page(path)


def first_that_knows(
    ask: Callable[[Session], Answer], knows: Callable[[Answer], bool] = lambda _: True
) -> Answer:
    """See `farm.exchange.first_answer.first_answer`."""
    from farm.exchange.first_answer import first_answer

    return first_answer(ask, knows, say)
