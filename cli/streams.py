"""The standard streams of the program: open descriptors, and text that the terminal's encoding has.

`prepare` runs before anything else is imported, so this module imports little.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from typing import TextIO

_REPLACED = "farm-replaced"  # the name of the handler of characters that an encoding lacks
#: Characters of tables and figures -> what an encoding without them shows.
_PLAIN = {
    **dict.fromkeys("─–−", "-"),
    **dict.fromkeys("│├", "|"),
    **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True)),
    "└": "`",
    "µ": "u",
    "μ": "u",
    "±": "+-",
    "→": "->",
    "…": "...",
    "×": "x",
    "÷": "/",
    "·": ".",
    "°": "deg",
    "Σ": "S",
    "≤": "<=",
    "≥": ">=",
    "é": "e",
}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if character in _PLAIN:
        return _PLAIN[character], error.start + 1
    unencodable = UnicodeEncodeError(error.encoding, character, 0, 1, error.reason)
    escaped, _ = codecs.backslashreplace_errors(unencodable)
    return escaped, error.start + 1


codecs.register_error(_REPLACED, _replace)


def prepare() -> None:
    """Make the standard streams usable, whatever the caller of the program left of them.

    A closed descriptor is opened: otherwise the next opened file, such as a database, would get its
    number and what is written to it. Writing to a closed stdout stays an error.
    """
    # Reading only: so a write to stdout fails, as to a closed one.
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        _open_if_closed(number, flags)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stdout = sys.stdout or _written(1)
    sys.stderr = sys.stderr or _written(2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_REPLACED)


def _open_if_closed(number: int, flags: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, flags)
        os.dup2(opened, number)
        if opened == number:
            os.set_inheritable(number, True)
        else:
            os.close(opened)


def _written(descriptor: int, encoding: str = "utf-8") -> TextIO:
    return open(descriptor, "w", encoding=encoding, errors=_REPLACED, closefd=False)


def keep_results_apart() -> None:
    """Let descriptor 1 be stderr from now on, except for `sys.stdout`.

    Extensions and child processes write to descriptor 1. Their text must not be mixed with results,
    also not when the C library writes its buffers at the end of the process.
    """
    stdout = sys.stdout
    try:
        if stdout.fileno() != 1:
            return
        stdout.flush()
        private = os.dup(1)
    except (AttributeError, OSError, ValueError):  # a test reads it, or it is closed
        return
    os.dup2(2, 1)
    sys.stdout = _written(private, stdout.encoding)


def stdout_is_writable() -> bool:
    """False if a text remains in the buffer of stdout because it cannot be written."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


def discard_stdout() -> None:
    """Discard what is left in the buffer of stdout, which cannot be written."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def plain(text: str) -> str:
    """A text with other characters in place of those that stdout cannot show."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if text.isascii():
        return text
    return text.encode(encoding, _REPLACED).decode(encoding)


def shows(text: str) -> bool:
    """True if stdout can show a text."""
    return plain(text) == text
